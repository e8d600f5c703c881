"""How many sequences of many lengths a cache holds at once: the mean, and a number that is safe 99 % of the time.

**A sequence at a random moment.** Sequences that run at once are not at their ends: one with a prompt of p tokens and
an answer of o holds p + 1 … p + o of them, one more each step. A look at a random moment finds a request in proportion
to the steps that it stays, o, and at each of its lengths equally likely. Where a file tells only whole lengths, a
sequence counts as held in full. Each length is priced with the blocks that the engine would hold
(:meth:`Group.peak_blocks`, one token in flight).

**Mean.** The cache divided by the mean of that price.

**99 %.** The largest n for which n independent sequences exceed the cache with a probability below 1 %. The
distribution of their sum is the n-fold convolution of the price's, computed on a grid of 1/8192 of the cache by
repeated squaring, so that rare long sequences count as what they are; a normal approximation would not do for the
few dozen sequences with heavy tails that a GPU holds. Prices are dealt out to the two nearest points of the grid,
which keeps their mean.

**Shared prefixes.** Tokens that every prompt begins with are stored once. In a trace that names its blocks, the n
requests that run at once are taken as n consecutive ones, and what they have in common is stored once: the mean takes
the saving of the average window of n, the 99 % the saving that 99 % of the windows reach. Only layers that keep every
token share: windows, chunks and states are a sequence's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.errors import InputError
from kvist.planning.demand import Users, shared_blocks
from kvist.planning.lengths import Lengths, Request

_GRID = 8192
_CONFIDENCE = 0.99
_MOST_LENGTH = 2**24
_MOST_USERS = 10**7

_Floats = npt.NDArray[np.float64]


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
                f"lengths: all {len(lengths.requests):,} sequences of {lengths.source} are longer than {limit:,} "
                f"tokens (the shortest has {shortest:,}); raise `context`",
                key="lengths",
            )
        if shared and not any(request.prompt > shared for request in requests):
            longest = max(request.prompt for request in requests)
            raise InputError(
                f"shared_prefix: {shared:,} tokens; no prompt of {lengths.source} is longer (the longest has "
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
    def having_prefix(self) -> _Floats:
        """The part of :attr:`moments` whose sequences begin with the shared prefix."""
        having = [request for request in self.requests if request.prompt > self.shared]
        steps, of_having = (sum(request.output or 1 for request in part) for part in (self.requests, having))
        weight = np.zeros(len(self.moments.weight))
        found = Moments.of(having).weight * (of_having / steps)
        weight[: len(found)] = found
        return weight

    @cached_property
    def in_common(self) -> "_Sharing":
        """What consecutive requests have in common."""
        return _Sharing(self.requests)

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
            "p99_held_tokens": self.moments.quantile(_CONFIDENCE),
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

    weight: _Floats

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
class MixUsers:
    """What a cache holds of a mix.

    Attributes:
        paged: with blocks as sequences grow.
        prefix: with what prompts have in common stored once; None where nothing is known to be in common.
        mean_bytes: of the blocks of one sequence at a random moment.
    """

    paged: Users
    prefix: Users | None
    mean_bytes: float


@lru_cache(maxsize=32)
def prices(groups: tuple[Group, ...], longest: int) -> _Floats:
    """Bytes of the blocks of a sequence, by its tokens, 0 to ``longest``."""
    total = np.zeros(longest + 1)
    for group in groups:
        block = group.block_tokens
        # The number of blocks changes only where one more begins.
        ends = list(range(block, longest + block, block)) or [block]
        counts = np.array([group.peak_blocks(min(end, longest), 1) for end in ends], np.float64)
        of_length = counts[np.maximum(0, -(-np.arange(longest + 1) // block) - 1)]
        of_length[0] = 0
        total += of_length * group.block_bytes
    return total


def mix_users(mix: Mix, groups: tuple[Group, ...], layout: ArenaLayout, *, chunk: int) -> MixUsers:
    """Count what a cache holds of a mix.

    Args:
        mix: the sequences.
        groups: of the model, or of a rank.
        layout: how the cache is cut.
        chunk: most prompt tokens that a step computes; one sequence is in its prompt.
    """
    room = _room(mix, groups, layout, chunk)
    bare, sharing = _Priced.of(mix, groups), _Priced.sharing(mix, groups)
    return MixUsers(
        paged=bare.users(room), prefix=None if sharing is None else sharing.users(room), mean_bytes=bare.mean
    )


def mix_holds(mix: Mix, groups: tuple[Group, ...], layout: ArenaLayout, *, users: int, chunk: int) -> bool:
    """Whether a cache holds so many of a mix 99 % of the time, with what they have in common stored once."""
    priced = _Priced.sharing(mix, groups) or _Priced.of(mix, groups)
    return priced.holds(users, _room(mix, groups, layout, chunk))


def mix_least(mix: Mix, groups: tuple[Group, ...], users: int) -> int:
    """Bytes of blocks that hold so many 99 % of the time, whatever else a cache needs."""
    priced = _Priced.sharing(mix, groups) or _Priced.of(mix, groups)
    # Far out on the right; the grid then still is a thousandth of the answer.
    most = max(priced.mean, float(priced.price[priced.weight > 0].max()) / max(1, users) * 4) * users * 2
    return max(0, round(_Sums(priced.price, priced.weight, most).quantile(users) - priced.saved(users).safe))


def _room(mix: Mix, groups: Sequence[Group], layout: ArenaLayout, chunk: int) -> float:
    """Bytes that blocks can have: each group may have one slab that is not full, and one sequence a chunk in flight."""
    longest = len(mix.moments.weight) - 1
    spare = (len(groups) - 1) * layout.slab_bytes
    for group in groups:
        flight = group.peak_blocks(longest, min(chunk, group.block_tokens)) - group.peak_blocks(longest, 1)
        spare += flight * group.block_bytes
    return max(0, layout.num_slabs * _usable(groups, layout) - spare)


def _usable(groups: Sequence[Group], layout: ArenaLayout) -> int:
    """Bytes of a slab that blocks can have, in the group whose blocks fit worst."""
    return min(per * group.block_bytes for per, group in zip(layout.blocks_per_slab, groups, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """What sequences cost, how likely each cost is, and what some of them save together."""

    price: _Floats
    weight: _Floats
    saved: "Callable[[int], _Saved]"

    @classmethod
    def of(cls, mix: Mix, groups: tuple[Group, ...]) -> "_Priced":
        """Every sequence for itself."""
        weight = mix.moments.weight
        nothing = _Saved(mean=0.0, safe=0.0)
        return cls(price=prices(groups, len(weight) - 1), weight=weight, saved=lambda users: nothing)

    @classmethod
    def sharing(cls, mix: Mix, groups: tuple[Group, ...]) -> "_Priced | None":
        """With a prefix that all have, or the blocks that a trace names, stored once; None where there is neither."""
        bare = cls.of(mix, groups)
        if mix.shared:
            once = shared_bytes(groups, mix.shared)
            inside = mix.having_prefix
            # Shorter prompts cannot have the prefix: their sequences share nothing.
            return cls(
                price=np.concatenate([np.maximum(0.0, bare.price - once), bare.price]),
                weight=np.concatenate([inside, np.maximum(0.0, bare.weight - inside)]),
                saved=lambda users: _Saved(mean=-once, safe=-once),
            )
        if mix.block_tokens is None:
            return None
        of_block = shared_bytes(groups, mix.block_tokens)
        return cls(price=bare.price, weight=bare.weight, saved=lambda users: mix.in_common.saved(users).times(of_block))

    @property
    def mean(self) -> float:
        """Bytes of the average sequence."""
        return float(self.weight @ self.price)

    def holds(self, users: int, room: float) -> bool:
        """Whether so many stay within a room 99 % of the time."""
        space = room + self.saved(users).safe
        return space > 0 and _Sums(self.price, self.weight, space).within(users)

    def users(self, room: float) -> Users:
        """Most sequences on average, and 99 % of the time."""
        mean = self.mean
        if mean <= 0 or room <= 0:
            return Users(mean=0, safe=0)
        on_average = _most(lambda users: users * mean - self.saved(users).mean <= room, at_most=_MOST_USERS)
        if np.ptp(self.price[self.weight > 0]) == 0:
            return Users(mean=on_average, safe=on_average)
        sums: dict[float, _Sums] = {}

        def within(users: int) -> bool:
            space = room + self.saved(users).safe
            if space <= 0:
                return False
            if space not in sums:
                sums.clear()
                sums[space] = _Sums(self.price, self.weight, space)
            return sums[space].within(users)

        return Users(mean=on_average, safe=_most(within, at_most=on_average))


def shared_bytes(groups: Sequence[Group], tokens: int) -> int:
    """Bytes of the whole blocks of the first ``tokens`` that sequences can share."""
    return sum(shared_blocks(group, tokens) * group.block_bytes for group in groups)


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Bytes, or blocks, that need not be stored: on average, and what 99 % of the time at least."""

    mean: float
    safe: float

    def times(self, factor: float) -> "_Saved":
        return _Saved(mean=self.mean * factor, safe=self.safe * factor)


class _Sharing:
    """How many prompt blocks n consecutive requests of a trace have in common."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = len(requests)
        self._known: dict[int, _Saved] = {}
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

    def saved(self, users: int) -> _Saved:
        """Blocks that n consecutive requests need not store; beyond the trace's length no more are known."""
        users = min(users, self._requests)
        if users not in self._known:
            self._known[users] = self._slide(users)
        return self._known[users]

    def _slide(self, users: int) -> _Saved:
        """A block is saved in the windows that hold both of its requests, from now - n + 1 to before."""
        windows = self._requests - users + 1
        first = np.maximum(0, self._now - users + 1)
        end = np.minimum(self._before, windows - 1) + 1
        held = end > first
        change = np.bincount(first[held], minlength=windows + 1) - np.bincount(end[held], minlength=windows + 1)
        found = np.cumsum(change[:windows])
        return _Saved(mean=float(np.mean(found)), safe=float(np.quantile(found, 1 - _CONFIDENCE)))


def _most(fits: Callable[[int], bool], *, at_most: int) -> int:
    """Largest n that fits, where all smaller ones do too."""
    low, high = 0, 1
    while high <= at_most and fits(high):
        low, high = high, high * 2
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class _Sums:
    """How likely sums of independent prices stay within a room, on a grid; what lies beyond the room is dropped."""

    def __init__(self, price: _Floats, weight: _Floats, room: float) -> None:
        self._room = room
        place = price * (_GRID / room)
        low = np.floor(place).astype(np.int64)
        part = place - low
        density = np.zeros(_GRID + 2)
        for at, share in ((low, 1 - part), (low + 1, part)):
            inside = at <= _GRID
            density += np.bincount(at[inside], weights=(weight * share)[inside], minlength=_GRID + 2)
        self._powers: list[_Floats] = [density]

    def within(self, users: int) -> bool:
        """Whether so many stay within the room with 99 % certainty."""
        density = self._density(users)
        return density is None or float(density[: _GRID + 1].sum()) >= _CONFIDENCE - 1e-9

    def quantile(self, users: int) -> float:
        """Bytes within which so many stay with 99 % certainty; the room where they do not."""
        density = self._density(users)
        if density is None:
            return 0.0
        return min(_GRID, int(np.searchsorted(np.cumsum(density), _CONFIDENCE))) * self._room / _GRID

    def _density(self, users: int) -> _Floats | None:
        """The density of the sum of so many; None for none."""
        density: _Floats | None = None
        for bit in range(users.bit_length()):
            if bit == len(self._powers):
                self._powers.append(_convolved(self._powers[-1], self._powers[-1]))
            if users >> bit & 1:
                power = self._powers[bit]
                density = power if density is None else _convolved(density, power)
        return density


def _convolved(one: _Floats, other: _Floats) -> _Floats:
    """The density of a sum, cut off where its parts are."""
    length = 2 * len(one)
    product: _Floats = np.fft.irfft(np.fft.rfft(one, length) * np.fft.rfft(other, length), length)
    return np.maximum(0.0, product[: len(one)])
