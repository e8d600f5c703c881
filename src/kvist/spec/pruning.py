"""Pruning: which method drops tokens of a running request's cache, and how many tokens it keeps.

::

    h2o:0.5           half of the prompt: what attention has weighed most, and the newest tokens      arXiv:2306.14048
    h2o-sum:0.5       the same, where weights are added up and not divided by a key's age, as in the paper
    snapkv:512        512 tokens: what the end of the prompt attends to                               arXiv:2404.14469
    streaming:4+1020  the first 4 tokens and the newest 1,020                                         arXiv:2309.17453
    streaming:0.25    a quarter of the prompt, the first 4 tokens among it
    none

A budget is a share of the prompt, written with a point, or a number of tokens, whichever the method. A pruned sequence
has two lengths: *positions*, the tokens that were computed, by which rotary positions and the context are counted, and
*slots*, the tokens that are still stored, by which memory and attention's work are. ``bounded`` methods prune again
while they decode, whenever :data:`SLACK` slots more than the budget are filled, so that slots never exceed the prompt's
or the budget and the slack; the others prune a prompt once, and keep every token of the answer.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from math import ceil

from kvist.errors import InputError
from kvist.units import parse_tokens

SINKS = 4
"""First tokens, on which attention rests that has nowhere else to go: no method drops them (arXiv:2309.17453)."""

SLACK = 32
"""Slots beyond its budget that a bounded sequence fills before it is pruned again."""

LEAST = 16
"""Fewest tokens that a share of a prompt keeps."""

NEVER = 1 << 62
"""A length that no sequence reaches."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is known of a method beside its scores, which :data:`kvist.kernels.pruning.SCORES` has.

    Attributes:
        bounded: it prunes answers too.
        observes: last queries of a prompt whose attention it looks at; those are computed even where the prefix tree
            has their keys and values, so that a hit changes no choice. :data:`NEVER`: all.
        recent: newest tokens that it keeps, as a share of the budget.
        most_recent: and in tokens, no more than these.
        variant_of: the method of which it is another way to score; that one is compared where nothing else is said.
    """

    bounded: bool
    observes: int
    recent: float
    most_recent: int = NEVER
    variant_of: str | None = None


METHODS = {
    "h2o": Method(bounded=True, observes=NEVER, recent=0.5),
    "h2o-sum": Method(bounded=True, observes=NEVER, recent=0.5, variant_of="h2o"),
    "snapkv": Method(bounded=False, observes=32, recent=0.5, most_recent=32),
    "streaming": Method(bounded=True, observes=0, recent=1.0),
}
"""The methods by name."""


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """A method and its budget: a share of the prompt or a number of tokens, and never both.

    Attributes:
        method: one of :data:`METHODS`.
        share: of the prompt, above 0 and at most 1.
        tokens: kept, sinks included; more than these.
        sinks: first tokens that are kept whatever their scores.

    Raises:
        InputError: there is no such method, or no such budget.
    """

    method: str
    share: float | None = None
    tokens: int | None = None
    sinks: int = SINKS

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"evict: {self.method!r} is no method; choose one of {', '.join(METHODS)}", key="evict")
        if (self.share is None) == (self.tokens is None):
            raise InputError("evict: give a share of the prompt or a number of tokens, one of them", key="evict")
        if type(self.sinks) is not int or self.sinks < 0:
            raise InputError(f"evict: {self.sinks!r} first tokens; a whole number, 0 or more", key="evict")
        number = isinstance(self.share, float | int) and not isinstance(self.share, bool)
        if self.share is not None and not (number and 0 < self.share <= 1):
            raise InputError(f"evict: {self.share!r} of the prompt; a share is above 0 and at most 1", key="evict")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens <= self.sinks):
            raise InputError(
                f"evict: {self.tokens!r} tokens; a whole number above {self.sinks}, the first tokens, which are kept",
                key="evict",
            )

    @classmethod
    def read(cls, text: str) -> "Pruning | None":
        """Read ``h2o:0.5``, ``snapkv:512``, ``streaming:4+1020`` or ``none``, which is None.

        Raises:
            InputError: it is written otherwise.
        """
        if text == "none":
            return None
        name, _, budget = text.partition(":")
        if name not in METHODS:
            known = ", ".join(f"{method}:BUDGET" for method in METHODS)
            raise InputError(f"evict: {text[:40]!r} is no method with a budget; write {known} or none", key="evict")
        if re.fullmatch(r"[0-9]*\.[0-9]+|[0-9]+\.", budget):
            return cls(method=name, share=float(budget))
        sinks, plus, recent = budget.partition("+")
        try:
            if not plus:
                return cls(method=name, tokens=parse_tokens(budget))
            if name == "streaming" and re.fullmatch(r"[0-9]{1,9}", sinks):
                return cls(method=name, tokens=int(sinks) + parse_tokens(recent), sinks=int(sinks))
        except InputError as error:
            if error.key == "evict":
                raise
        own = "; or streaming:4+1020, first and newest tokens" if name == "streaming" else ""
        raise InputError(
            f"evict: {budget[:40]!r} is no budget of {name}; write {name}:0.5, a share of the prompt, or {name}:512, "
            f"tokens{own}",
            key="evict",
        )

    def __str__(self) -> str:
        if self.share is not None:
            # As it is read: never with an exponent.
            return f"{self.method}:{Decimal(repr(float(self.share))):f}"
        assert self.tokens is not None
        if self.method == "streaming":
            return f"{self.method}:{self.sinks}+{self.tokens - self.sinks}"
        return f"{self.method}:{self.tokens}"

    def of_prompt(self, prompt: int) -> "PruningPlan":
        """What it means for a prompt of so many tokens."""
        keep = self.tokens
        if keep is None:
            assert self.share is not None
            keep = max(LEAST, self.sinks + 1, ceil(self.share * prompt))
        return PruningPlan(pruning=self, prompt=prompt, keep=keep)


@dataclass(frozen=True, kw_only=True)
class PruningPlan:
    """When and how far one request is pruned: all of it follows from lengths, so that a request which is computed again
    is pruned at the same tokens.

    Attributes:
        pruning: as it was asked for.
        prompt: tokens of the prompt.
        keep: slots that a pruned prompt keeps.
    """

    pruning: Pruning
    prompt: int
    keep: int

    @cached_property
    def method(self) -> Method:
        """What is known of its method."""
        return METHODS[self.pruning.method]

    @property
    def reusable(self) -> int:
        """Most tokens of the prompt that may come from the prefix tree: the others are computed, and observed."""
        return max(0, self.prompt - max(1, self.method.observes))

    def due(self, length: int, dropped: int) -> int:
        """The length at which a sequence is pruned next; no step computes past it.

        Args:
            length: positions stored.
            dropped: of these, tokens that were dropped.
        """
        if length < self.prompt or (not dropped and self.keep < self.prompt):
            return self.prompt
        return dropped + self.keep + SLACK if self.method.bounded else NEVER

    @property
    def first(self) -> int:
        """Positions at which a sequence is pruned first."""
        return self.due(self.prompt, 0)

    def slots_after(self, length: int) -> int:
        """Most slots that are filled at once from the first pruning on, on the way to ``length`` positions."""
        if length < self.first:
            return 0
        return self.keep + (min(SLACK, length - self.first) if self.method.bounded else length - self.prompt)

    def target(self, length: int) -> int:
        """Slots that remain of ``length`` positions once they are pruned."""
        return self.keep if self.method.bounded else self.keep + max(0, length - self.prompt)

    def recent(self, length: int) -> int:
        """Newest slots of ``length`` positions, which are kept whatever their scores."""
        method = self.method
        recent = min(method.most_recent, int(self.keep * method.recent), self.keep - self.pruning.sinks)
        return max(0, recent + self.target(length) - self.keep)

    def slots(self, length: int) -> int:
        """Most slots that are filled at once on the way to ``length`` positions."""
        if length <= self.prompt:
            return length
        after = length if self.keep >= self.prompt else self.keep + length - self.prompt
        return max(self.prompt, min(after, self.keep + SLACK) if self.method.bounded else after)
