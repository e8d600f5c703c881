"""What one setting does to answers, memory and speed, against the full cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.batch import Request
from kvist.cartridges.evaluation import Question
from kvist.comparison.questions import Fact, Piece
from kvist.comparison.reader import Reader
from kvist.comparison.settings import Setting
from kvist.errors import InputError

ANSWER = 32
"""Tokens by which the speed of decoding is measured, behind each piece."""

BLOCK = 32
"""Neighbouring tokens that are averaged before differences are weighed: what moves one moves the next."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting, measured.

    Attributes:
        setting: what was measured.
        dtype: of computation.
        bytes_per_token: held in the arena behind a context, by its tokens.
        full_bytes_per_token: the same of the full cache.
        divergences: of the next token's distribution from the full cache's, in nats, of each token that followed.
        top1_agreement: share of the tokens at which both find the same likeliest.
        perplexity: on what followed.
        needle: share of the facts whose answer was the likeliest token; the question came after pruning. NaN, as the
            three that follow, of a cartridge: facts are hidden in a text that it never saw.
        needle_known: the same; the question stood before the cache was pruned.
        choice: share of the facts whose answer was the likeliest of all that might be; the question came after.
        choice_known: the same; the question stood before.
        answered: share of the user's questions with answers to choose from whose right one was the likeliest; None
            where there are none.
        decode_tokens_per_second: of one sequence, behind its context.
    """

    setting: Setting
    dtype: str
    bytes_per_token: float
    full_bytes_per_token: float
    divergences: tuple[float, ...] = field(repr=False)
    top1_agreement: float
    perplexity: float
    needle: float
    needle_known: float
    choice: float
    choice_known: float
    decode_tokens_per_second: float
    answered: float | None = None

    @property
    def label(self) -> str:
        """The setting in a few words."""
        return self.setting.label(self.dtype)

    @property
    def memory_ratio(self) -> float:
        """The full cache's bytes by these."""
        return self.full_bytes_per_token / self.bytes_per_token

    @property
    def kl(self) -> float:
        """Mean divergence."""
        return float(np.mean(self.divergences))

    @property
    def kl_error(self) -> float:
        """Standard error of the mean divergence, over blocks of neighbouring tokens."""
        return _error(self._blocks())

    def _blocks(self) -> npt.NDArray[np.float64]:
        whole = len(self.divergences) // BLOCK
        blocks = np.asarray(self.divergences[: whole * BLOCK], np.float64).reshape(whole, BLOCK)
        return np.asarray(blocks.mean(axis=1), np.float64)

    def indistinct_from(self, other: "Row") -> bool:
        """Whether the two divergences differ by less than two standard errors of their difference, token by token."""
        difference = self._blocks() - other._blocks()
        # Of fewer tokens than a block nothing is known.
        return difference.size > 0 and abs(float(difference.mean())) < 2 * _error(difference)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``format``, ``evict`` and what was measured."""
        fmt = self.setting.format
        return {
            "setting": self.label,
            "format": f"{self.dtype}/{self.dtype}" if fmt is None else f"{fmt.key}/{fmt.value}",
            "rotate": fmt is not None and fmt.rotates,
            "tail": 0 if fmt is None else fmt.plain.tail,
            "evict": self.setting.evict,
            "cartridge": self.setting.cartridge,
            "cartridge_format": None if self.setting.cartridge_format is None else str(self.setting.cartridge_format),
            "bytes_per_token": round(self.bytes_per_token, 2),
            "memory_ratio": round(self.memory_ratio, 3),
            "kl": round(self.kl, 6),
            "kl_error": round(self.kl_error, 6) if isfinite(self.kl_error) else None,
            "top1_agreement": round(self.top1_agreement, 4),
            "perplexity": round(self.perplexity, 4),
            "needle": _share(self.needle),
            "needle_known": _share(self.needle_known),
            "choice": _share(self.choice),
            "choice_known": _share(self.choice_known),
            "answered": None if self.answered is None else _share(self.answered),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 2),
        }


def _share(value: float) -> float | None:
    return round(value, 4) if isfinite(value) else None


def _error(values: npt.NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The full cache's answers.

    Attributes:
        row: as of every setting.
        logs: log-probabilities behind each piece's context, float32 ``[following, vocab]``.
    """

    row: Row
    logs: Sequence[Tensor]


def measure(
    reader: Reader,
    setting: Setting,
    pieces: Sequence[Piece],
    *,
    dtype: str,
    reference: Reference | None,
    told: Callable[[float], None],
) -> Reference:
    """Measure one setting; without a reference it is the full cache, and becomes it.

    Args:
        reader: with its format.
        setting: whose pruning is done.
        pieces: what is read.
        dtype: of computation.
        reference: the full cache's answers.
        told: is called with the share that is done.

    Raises:
        InputError: answers hold what is no number.
    """
    held = full = agreed = answered = asked = 0
    losses, seconds = 0.0, 0.0
    divergences: list[float] = []
    answers = np.zeros(4)
    kept: list[Tensor] = []
    steps = len(pieces) * (2 + len(pieces[0].facts))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        told(done / steps)

    for number, piece in enumerate(pieces):
        if setting.cartridge is None:
            request = reader.read(piece.context, setting.pruning, answer=ANSWER + 1)
        else:
            request = reader.cartridge(setting.cartridge)
        held += reader.held_bytes(request)
        full += len(piece.context)
        compared = torch.tensor(piece.compared)
        # Before each of them.
        logs = reader.behind(request, piece.following)[compared - 1]
        following = torch.tensor(piece.following)[compared]
        losses -= float(logs.gather(1, following[:, None]).double().sum())
        expected = logs if reference is None else reference.logs[number]
        divergences += F.kl_div(logs, expected, log_target=True, reduction="none").sum(1).double().tolist()
        agreed += int((logs.argmax(1) == expected.argmax(1)).sum())
        answered += sum(_likeliest(reader, request, question) == question.right for question in piece.asked)
        asked += len(piece.asked)
        if reference is None:
            kept.append(logs)
        if setting.cartridge is not None:
            request = reader.read_behind(setting.cartridge, piece.following[:1], answer=ANSWER + 1)
            seconds += reader.seconds_to_answer(request, piece.following[1], ANSWER)
            reader.end(request)
            step()
            continue
        seconds += reader.seconds_to_answer(request, piece.following[0], ANSWER)
        reader.end(request)
        step()
        request = reader.read(piece.hidden, setting.pruning)
        for fact in piece.facts:
            answers[:2] += _answer(reader.behind(request, (*fact.question, *fact.answer))[-1], fact)
        reader.end(request)
        step()
        for fact in piece.facts:
            if setting.pruning is not None:
                request = reader.read((*piece.hidden, *fact.question), setting.pruning)
                answers[2:] += _answer(reader.behind(request, fact.answer)[-1], fact)
                reader.end(request)
            step()
    if not all(map(isfinite, (losses, *divergences))):
        raise InputError(
            f"dtype: answers in {setting.label(dtype)}, computed in {dtype}, hold what is no number; choose a "
            f"type with a larger range",
            key="dtype",
        )
    if setting.cartridge is not None:
        answers[:] = np.nan
    if setting.pruning is None:
        # Nothing is dropped: when a question was known makes no difference.
        answers[2:] = answers[:2]
    needle, choice, needle_known, choice_known = (answers / (len(pieces) * len(pieces[0].facts))).tolist()
    row = Row(
        setting=setting,
        dtype=dtype,
        bytes_per_token=held / full,
        full_bytes_per_token=held / full if reference is None else reference.row.bytes_per_token,
        divergences=tuple(round(divergence, 8) for divergence in divergences),
        top1_agreement=agreed / len(divergences),
        perplexity=exp(min(700.0, losses / len(divergences))),
        needle=needle,
        needle_known=needle_known,
        choice=choice,
        choice_known=choice_known,
        decode_tokens_per_second=len(pieces) * ANSWER / seconds,
        answered=answered / asked if asked else None,
    )
    return Reference(row=row, logs=kept)


def _answer(logs: Tensor, fact: Fact) -> tuple[float, float]:
    """Whether the answer is the likeliest token, and whether it is the likeliest choice."""
    choices = torch.tensor(fact.choices)
    return float(int(logs.argmax()) == fact.told), float(int(choices[logs[choices].argmax()]) == fact.told)


def _likeliest(reader: Reader, request: Request, question: Question) -> int:
    """Index of the choice that is likeliest as a whole, with what ends it."""
    found = []
    for tokens in question.choices:
        logs = reader.behind(request, tokens)[question.answer - 1 : -1]
        answer = torch.tensor(tokens[question.answer :])
        found.append(float(logs.gather(1, answer[:, None]).double().sum()))
    return int(np.argmax(found))
