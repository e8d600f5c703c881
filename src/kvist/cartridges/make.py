"""From a document to a cartridge: self-study, the teacher's expectations, training, the file."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from kvist.cartridges.self_study import Item, Writer, sentences, template_items, written_items
from kvist.cartridges.student import Student, to_cache
from kvist.cartridges.teacher import Teacher
from kvist.cartridges.training import Lesson, Progress, Settings, Training
from kvist.engine.engine import Engine
from kvist.engine.loading import best_dtype, with_weights
from kvist.errors import DoesNotFit, InputError
from kvist.model.fingerprints import model_digest, rotary_positions
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge, Manifest

BLOCK = 16
"""Tokens of which a cartridge is a multiple: whole blocks of a cache, shared as they are."""

# Tokens that a question and its answer have room for.
_BEHIND = 256
_HELD_OUT = 0.1
_MEMORY = "512MiB"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is made of a document.

    Attributes:
        tokens: positions of the cartridge; rounded up to whole blocks.
        items: that are learnt from and measured with.
        written: share of them that the model writes itself; the others are templates.
        chunk: most tokens that the teacher reads before an item.
    """

    tokens: int
    items: int = 480
    written: float = 0.4
    chunk: int = 2048

    @property
    def blocks_of_tokens(self) -> int:
        """``tokens``, rounded up to whole blocks."""
        return -(-self.tokens // BLOCK) * BLOCK


class Told(Protocol):
    """Hears how far a stage is; ``training`` says more."""

    def __call__(self, stage: str, done: float, progress: Progress | None = None) -> None:
        """``done`` is a share, 0 … 1."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and its tokens.

    Attributes:
        name: of its file.
        text: all of it.
        tokens: with what the tokenizer puts before a text.
        chunks: pieces of it that a teacher reads, as tokens and as text.
    """

    name: str
    text: str
    tokens: list[int]
    chunks: list[tuple[list[int], str]]

    @classmethod
    def of(cls, name: str, text: str, engine: Engine, chunk: int) -> "Document":
        """Cut a text; pieces after the first begin with a whole line.

        Raises:
            InputError: it is empty.
            DoesNotFit: the cache is too small for pieces.
        """
        tokenizer = engine.tokenizer
        tokens = tokenizer.encode(text, parse_special=False)
        if not text.strip():
            raise InputError("document: it is empty; give a text", key="document")
        most = min(chunk, engine.max_context - _BEHIND)
        if most < 16:
            raise DoesNotFit(
                f"memory: the teacher's cache and {engine.model_id} allow {engine.max_context:,} tokens, too few for a "
                f"part of the document and {_BEHIND} behind it; give it more"
            )
        if len(tokens) <= most:
            return cls(name=name, text=text, tokens=tokens, chunks=[(tokens, text)])
        chunks: list[tuple[list[int], str]] = []
        piece = ""
        for line in _lines(text, tokenizer.encode, most):
            if piece and len(tokenizer.encode(piece + line, parse_special=False)) > most:
                chunks.append((tokenizer.encode(piece, parse_special=False), piece))
                piece = ""
            piece += line
        chunks.append((tokenizer.encode(piece, parse_special=False), piece))
        return cls(name=name, text=text, tokens=tokens, chunks=chunks)

    @property
    def digest(self) -> str:
        """SHA-256 of its text."""
        return sha256(self.text.encode()).hexdigest()


def _lines(text: str, encode: Callable[..., list[int]], most: int) -> list[str]:
    """Lines of a text; those that are too long by themselves are cut."""
    lines = []
    for line in text.splitlines(keepends=True):
        parts = -(-len(encode(line)) // most)
        width = -(-len(line) // parts) if parts else 1
        lines += [line[start : start + width] for start in range(0, len(line), width)]
    return lines


def make(
    model: ModelSpec,
    document: Path,
    study: Study,
    settings: Settings,
    out: Path,
    *,
    dtype: str | None = None,
    memory: str | int = _MEMORY,
    resume: bool = False,
    told: Told | None = None,
) -> Cartridge:
    """Train a cartridge and write its file; a checkpoint lies beside it until it is done.

    Args:
        model: to train for.
        document: a file of text in UTF-8.
        study: what is made of it.
        settings: of the training.
        out: where to.
        dtype: to compute in; left out, the fastest that this machine computes well.
        memory: of the teacher's cache.
        resume: go on from the checkpoint.
        told: hears how far it is.

    Raises:
        InputError: a parameter is wrong, or a file cannot be read or written.
        UnsupportedModel, BadFile: as :class:`Engine` and :class:`Student`.
        DoesNotFit: the teacher's cache is too small.
    """
    hear: Told = told or (lambda stage, done, progress=None: None)
    text = read_document(document)
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    try:
        there = checkpoint.exists()
    except OSError as error:
        raise InputError(f"{str(out)[:60]}: cannot be written: {error.strerror}", key="out") from error
    if there != resume:
        raise InputError(
            f"resume: {checkpoint} is there; go on with resume, or remove it"
            if not resume
            else f"resume: there is no {checkpoint}; begin without resume",
            key="resume",
        )
    spec = with_weights(model)
    compute = dtype or best_dtype(spec)
    digests = {"model_digest": model_digest(spec), "document_digest": sha256(text.encode()).hexdigest()}
    about: dict[str, Any] = {**digests, **asdict(study), "tokens": study.blocks_of_tokens, "dtype": compute}
    if settings.frozen >= study.blocks_of_tokens:
        raise InputError(
            f"frozen: {settings.frozen} of {study.blocks_of_tokens} tokens; some must be left to train", key="frozen"
        )
    if study.blocks_of_tokens + _BEHIND > spec.max_context:
        raise InputError(
            f"tokens: {study.blocks_of_tokens:,} and {_BEHIND} behind them are more than the {spec.max_context:,} that "
            f"{spec.name} reads; choose fewer",
            key="tokens",
        )
    student = Student(spec, compute)
    engine = Engine(spec, memory=memory, dtype=compute)
    paper = Document.of(document.name, text, engine, study.chunk)
    if study.blocks_of_tokens >= len(paper.tokens):
        raise InputError(
            f"tokens: {study.blocks_of_tokens} are no fewer than the {len(paper.tokens)} of the document; a cartridge "
            f"is to be shorter",
            key="tokens",
        )
    if resume:
        training = Training.resume(student, checkpoint, settings, about)
    else:
        lessons = study_document(engine, paper, study, settings.seed, hear)
        held_out = max(1, round(_HELD_OUT * len(lessons)))
        segments = student.read(paper.tokens[: study.blocks_of_tokens])
        training = Training(student, segments, lessons[held_out:], lessons[:held_out], settings, about)
    manifest_of = _manifest_of(spec, engine, paper, study, settings, digests["model_digest"])
    del engine
    training.run(lambda progress: hear("training", progress.share, progress), checkpoint=checkpoint)
    cartridge = Cartridge.of(manifest_of(training), to_cache(training.segments))
    cartridge.save(out, student.groups)
    checkpoint.unlink(missing_ok=True)
    return cartridge


def _manifest_of(
    spec: ModelSpec, engine: Engine, paper: Document, study: Study, settings: Settings, digest: str
) -> Callable[[Training], Manifest]:
    tokenizer_digest = engine.tokenizer.digest

    def manifest(training: Training) -> Manifest:
        return Manifest(
            model=spec.name,
            model_digest=digest,
            tokenizer_digest=tokenizer_digest,
            rope=rotary_positions(spec),
            tokens=study.blocks_of_tokens,
            frozen=settings.frozen,
            # As it is shown: on one line, whatever the file is called.
            document="".join(letter if letter.isprintable() else "?" for letter in paper.name),
            document_digest=paper.digest,
            document_tokens=len(paper.tokens),
            seed=settings.seed,
            steps=training.step,
            losses=training.losses,
        )

    return manifest


def study_document(engine: Engine, document: Document, study: Study, seed: int, told: Told) -> list[Lesson]:
    """Make items of a document and have the teacher read them; in random order."""
    writer = Writer(engine.tokenizer)
    rng = random.Random(seed)
    items: list[Item] = []
    # Others are read by nobody: there is nothing to ask about them.
    telling = [number for number, (_, text) in enumerate(document.chunks) if sentences(text)]
    for done, number in enumerate(telling):
        context, text = document.chunks[number]
        share = -(-study.items // len(telling))
        written = round(study.written * share) if writer.chat else 0
        told("self-study", done / len(telling))
        if written:
            items += written_items(engine, writer, number, context, text, written, rng)
        made = template_items(writer, number, text, rng)
        items += [next(made) for _ in range(share - written)]
    if not items:
        raise InputError("document: holds no sentence of 20 letters; give a text", key="document")
    rng.shuffle(items)
    teacher = Teacher(engine)
    # Behind the chunk, as the teacher reads them, and behind the cartridge.
    rooms = [engine.max_context - max(len(context), study.blocks_of_tokens) for context, _ in document.chunks]
    items = [item for item in items if item.learnt < len(item.tokens) <= rooms[item.chunk]]
    lessons: dict[int, Lesson] = {}
    # By chunks, of which the tree then keeps the one that is being read.
    for done, index in enumerate(sorted(range(len(items)), key=lambda index: items[index].chunk)):
        told("teacher", done / len(items))
        context = document.chunks[items[index].chunk][0]
        lessons[index] = Lesson(item=items[index], targets=teacher.targets(context, items[index]))
    return [lessons[index] for index in range(len(items))]


def read_document(path: Path) -> str:
    """The text of a file.

    Raises:
        InputError: it cannot be read, or is no text in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"document: {path}: {error.strerror}", key="document") from error
    except UnicodeDecodeError as error:
        raise InputError(f"document: {path}: byte {error.start} is no UTF-8; give a text", key="document") from error
