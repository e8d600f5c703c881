"""Sequences of many lengths: which lengths they have at a random moment, and what they have in common.

**A random moment.** Sequences that run at once are not at their ends: one with a prompt of p tokens and an answer of o
holds p + 1 … p + o of them, one more each step. A look at a random moment finds a request in proportion to the steps
that it stays, o, and at each of its lengths equally likely. Where a file tells only whole lengths, a sequence counts as
held in full.

**In common.** Tokens that every prompt begins with are had by the sequences whose prompts are longer. In a trace that
names its blocks, the n requests that run at once are taken as n consecutive ones: the mean saves what the average
window of n has in common, the 99 % what 99 % of the windows have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.planning.lengths import Lengths, Request
from kvist.units import counted

CONFIDENCE = 0.99
_MOST_LENGTH = 2**24

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Sequences to plan for, those that the limit allows.

    Attributes:
        source: the file.
        requests: of it.
        limit: longest sequence that the server takes.
        dropped: requests that are longer.
        empty: requests of no token, left out.
        block_tokens: tokens of the blocks that a trace names.
        shared: tokens that every longer prompt begins with.
    """

    source: str
    requests: tuple[Request, ...]
    limit: int
    dropped: int
    empty: int
    block_tokens: int | None
    shared: int

    @classmethod
    def of(cls, lengths: Lengths, *, limit: int, shared: int = 0) -> "Mix":
        """Leave out what the limit refuses.

        Raises:
            InputError: nothing is left, or no prompt is longer than the shared prefix.
        """
        requests = tuple(request for request in lengths.requests if request.total <= limit)
        if not requests:
            shortest = min(request.total for request in lengths.requests)
            raise InputError(
                f"lengths: no sequence of {lengths.source} is within {counted(limit, 'token')} (the shortest has "
                f"{shortest:,}); raise `context`",
                key="lengths",
            )
        if shared and not any(request.prompt > shared for request in requests):
            longest = max(request.prompt for request in requests)
            raise InputError(
                f"shared_prefix: {counted(shared, 'token')}; no prompt of {lengths.source} is longer (the longest has "
                f"{longest:,})",
                key="shared_prefix",
            )
        if max(request.total for request in requests) > _MOST_LENGTH:
            raise InputError(f"lengths: a sequence is longer than {_MOST_LENGTH:,} tokens", key="lengths")
        return cls(
            source=lengths.source,
            requests=requests,
            limit=limit,
            dropped=len(lengths.requests) - len(requests),
            empty=lengths.empty,
            block_tokens=lengths.block_tokens,
            shared=shared,
        )

    @cached_property
    def moments(self) -> "Moments":
        """Lengths at a random moment."""
        return Moments.of(self.requests)

    @cached_property
    def having_prefix(self) -> Floats:
        """The part of :attr:`moments` whose sequences begin with the shared prefix."""
        having = [request for request in self.requests if request.prompt > self.shared]
        steps, of_having = (sum(request.output or 1 for request in part) for part in (self.requests, having))
        weight = np.zeros(len(self.moments.weight))
        found = Moments.of(having).weight * (of_having / steps)
        weight[: len(found)] = found
        return weight

    @cached_property
    def in_common(self) -> "Sharing":
        """What consecutive requests have in common."""
        return Sharing(self.requests)

    def to_dict(self) -> dict[str, Any]:
        """As under ``capacity.workload`` in the JSON of ``kvist plan``."""
        return {
            "source": self.source,
            "requests": len(self.requests),
            "too_long": self.dropped,
            "limit": self.limit,
            "mean_prompt_tokens": self.mean_prompt,
            "mean_total_tokens": float(np.mean([request.total for request in self.requests])),
            "mean_held_tokens": self.moments.mean_tokens,
            "p99_held_tokens": self.moments.quantile(CONFIDENCE),
            "shared_prefix_tokens": self.shared,
            "block_tokens": self.block_tokens,
        }

    @property
    def mean_prompt(self) -> float:
        """Tokens of the average prompt."""
        return float(np.mean([request.prompt for request in self.requests]))


@dataclass(frozen=True, kw_only=True)
class Moments:
    """How likely a sequence is found at each length: ``weight[n]`` for n tokens, summing to 1."""

    weight: Floats

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Moments":
        """Count the steps that requests spend at each length."""
        longest = max(request.total for request in requests)
        if any(request.output for request in requests):
            # A difference array: a request adds one step at each of its lengths prompt + 1 … prompt + output.
            starts = np.array([request.prompt + 1 for request in requests if request.output], np.int64)
            ends = np.array([request.total + 1 for request in requests if request.output], np.int64)
            change = np.bincount(starts, minlength=longest + 2) - np.bincount(ends, minlength=longest + 2)
            steps = np.cumsum(change)[: longest + 1].astype(np.float64)
        else:
            steps = np.bincount([request.total for request in requests], minlength=longest + 1).astype(np.float64)
        return cls(weight=steps / steps.sum())

    @property
    def mean_tokens(self) -> float:
        """Tokens that a sequence holds at a random moment."""
        return float(self.weight @ np.arange(len(self.weight)))

    def quantile(self, share: float) -> int:
        """Tokens that a sequence does not exceed in ``share`` of the moments."""
        return int(np.searchsorted(np.cumsum(self.weight), share - 1e-12))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes, or blocks, that need not be stored: on average, and what 99 % of the time at least."""

    mean: float
    safe: float

    def times(self, factor: float) -> "Saved":
        """The same of things each ``factor`` as large."""
        return Saved(mean=self.mean * factor, safe=self.safe * factor)


class Sharing:
    """How many prompt blocks n consecutive requests of a trace have in common."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = len(requests)
        self._known: dict[int, Saved] = {}
        last: dict[int, int] = {}
        before, now = [], []
        for index, request in enumerate(requests):
            for block in request.blocks:
                if block in last:
                    before.append(last[block])
                    now.append(index)
                last[block] = index
        # Each block that was there before: in which request last, and in which again.
        self._before, self._now = np.array(before, np.int64), np.array(now, np.int64)

    def saved(self, users: int) -> Saved:
        """Blocks that n consecutive requests need not store; beyond the trace's length no more are known."""
        users = min(users, self._requests)
        if users not in self._known:
            self._known[users] = self._slide(users)
        return self._known[users]

    def _slide(self, users: int) -> Saved:
        """A block is saved in the windows that hold both of its requests, from now - n + 1 to before."""
        windows = self._requests - users + 1
        first = np.maximum(0, self._now - users + 1)
        end = np.minimum(self._before, windows - 1) + 1
        held = end > first
        change = np.bincount(first[held], minlength=windows + 1) - np.bincount(end[held], minlength=windows + 1)
        found = np.cumsum(change[:windows])
        return Saved(mean=float(np.mean(found)), safe=float(np.quantile(found, 1 - CONFIDENCE)))
