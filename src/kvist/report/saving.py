"""What a cache saves: the same answer with and without one, token by token, as a table and as plain numbers.

Without a cache the step to token n computes all n tokens again, so that an answer costs the square of its length; with
one it computes a single token, and only attention looks back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvist.report.simulation_tables import format_seconds
from kvist.report.tables import Column, print_table

_STRETCHES = 8


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A run of tokens of an answer.

    Attributes:
        length: of the sequence at its end, prompt included.
        cached, uncached: tokens a second in it, with and without the cache.
        cached_seconds, uncached_seconds: from the request to its end.
    """

    length: int
    cached: float
    uncached: float
    cached_seconds: float
    uncached_seconds: float


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Both runs.

    Attributes:
        prompt_tokens: length of the prompt.
        cached, uncached: seconds from the request to each token.
        equal_tokens: tokens, from the first on, that are the same in both.
        stopped: the run without the cache was stopped when its time was over.
    """

    prompt_tokens: int
    cached: Sequence[float]
    uncached: Sequence[float]
    equal_tokens: int
    stopped: bool

    @property
    def compared(self) -> int:
        """Tokens that both runs made."""
        return min(len(self.cached), len(self.uncached))

    @property
    def equal(self) -> bool:
        """Whether the answers are the same, as far as both go; only the run that was stopped may be shorter."""
        whole = self.stopped or len(self.cached) == len(self.uncached)
        return whole and self.equal_tokens == self.compared

    def stretches(self, most: int = _STRETCHES) -> list[Stretch]:
        """The tokens after the first, which either run has to compute the prompt for, in equal parts."""
        ends = sorted({1 + (self.compared - 1) * part // most for part in range(most + 1)} if self.compared > 1 else {})
        return [
            Stretch(
                length=self.prompt_tokens + end,
                cached=_rate(self.cached, start, end),
                uncached=_rate(self.uncached, start, end),
                cached_seconds=self.cached[end - 1],
                uncached_seconds=self.uncached[end - 1],
            )
            for start, end in pairwise(ends)
        ]

    def to_dict(self) -> dict[str, Any]:
        """As under ``saving`` in the JSON of ``kvist generate --no-cache``."""
        return {
            "equal": self.equal,
            "equal_tokens": self.equal_tokens,
            "compared_tokens": self.compared,
            "stopped": self.stopped,
            "cached": {"seconds": list(self.cached)},
            "uncached": {"seconds": list(self.uncached)},
            "lengths": [
                {
                    "length": each.length,
                    "cached_tokens_per_second": each.cached,
                    "uncached_tokens_per_second": each.uncached,
                    "cached_seconds": each.cached_seconds,
                    "uncached_seconds": each.uncached_seconds,
                }
                for each in self.stretches()
            ],
        }


def _rate(seconds: Sequence[float], start: int, end: int) -> float:
    """Tokens a second of the tokens ``start + 1 … end``, counted from one."""
    return (end - start) / max(seconds[end - 1] - seconds[start - 1], 1e-9)


def print_saving(saving: Saving) -> None:
    """Print tokens a second against length, and the time so far."""
    columns = ("length", "tokens/s", "without cache", "times as fast", "so far", "without cache")
    print_table(
        [Column(title=title, number=True) for title in columns],
        [
            (
                f"{each.length:,}",
                f"{each.cached:,.1f}",
                f"{each.uncached:,.1f}",
                f"{each.cached / each.uncached:,.1f}",
                format_seconds(each.cached_seconds),
                format_seconds(each.uncached_seconds),
            )
            for each in saving.stretches()
        ],
        title="What the cache saves",
    )
