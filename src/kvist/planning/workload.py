"""How many sequences of many lengths a cache holds at once: the mean, and a number that is safe 99 % of the time.

**A price.** A sequence is priced at the length that it has at a random moment (:mod:`kvist.planning.mix`), with the
blocks that the engine would hold (:meth:`Group.peak_blocks`, one token in flight).

**Mean.** The cache divided by the mean of that price.

**99 %.** The largest n for which n independent sequences exceed the cache with a probability below 1 %. The
distribution of their sum is the n-fold convolution of the price's, computed on a grid of 1/8192 of the cache by
repeated squaring, so that rare long sequences count as what they are; a normal approximation would not do for the
few dozen sequences with heavy tails that a GPU holds. Prices are dealt out to the two nearest points of the grid,
which keeps their mean.

**Shared prefixes.** What prompts have in common is stored once, in the layers that keep every token: windows, chunks
and states are a sequence's own. A prefix is there while any sequence has it, of n sequences with the probability
``1 - (1 - p) ** n``; so sharing never takes more than each for itself. The 99 % is the better of two bounds: the prefix
always there, and nothing shared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.planning.demand import Users, shared_blocks
from kvist.planning.mix import CONFIDENCE, Floats, Mix, Saved

_GRID = 8192
_MOST_USERS = 10**7


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
def prices(groups: tuple[Group, ...], longest: int) -> Floats:
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
    paged = bare.users(room)
    prefix = None if sharing is None else sharing.users(room).at_least(paged)
    return MixUsers(paged=paged, prefix=prefix, mean_bytes=bare.mean)


def mix_holds(mix: Mix, groups: tuple[Group, ...], layout: ArenaLayout, *, users: int, chunk: int) -> bool:
    """Whether a cache holds so many of a mix 99 % of the time, with what they have in common stored once."""
    room = _room(mix, groups, layout, chunk)
    return any(priced.holds(users, room) for priced in _Priced.ways(mix, groups))


def mix_least(mix: Mix, groups: tuple[Group, ...], users: int) -> int:
    """Bytes of blocks that hold so many 99 % of the time, whatever else a cache needs."""
    return min(priced.least(users) for priced in _Priced.ways(mix, groups))


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

    price: Floats
    weight: Floats
    saved: "Callable[[int], Saved]"

    @classmethod
    def of(cls, mix: Mix, groups: tuple[Group, ...]) -> "_Priced":
        """Every sequence for itself."""
        weight = mix.moments.weight
        nothing = Saved(mean=0.0, safe=0.0)
        return cls(price=prices(groups, len(weight) - 1), weight=weight, saved=lambda users: nothing)

    @classmethod
    def sharing(cls, mix: Mix, groups: tuple[Group, ...]) -> "_Priced | None":
        """With a prefix that all have, or the blocks that a trace names, stored once; None where there is neither."""
        bare = cls.of(mix, groups)
        if mix.shared:
            once = shared_bytes(groups, mix.shared)
            inside = mix.having_prefix
            without = max(0.0, 1 - float(inside.sum()))
            # Shorter prompts cannot have the prefix: their sequences share nothing.
            return cls(
                price=np.concatenate([np.maximum(0.0, bare.price - once), bare.price]),
                weight=np.concatenate([inside, np.maximum(0.0, bare.weight - inside)]),
                saved=lambda users: Saved(mean=-once * (1 - without**users), safe=-once),
            )
        if mix.block_tokens is None:
            return None
        of_block = shared_bytes(groups, mix.block_tokens)
        return cls(price=bare.price, weight=bare.weight, saved=lambda users: mix.in_common.saved(users).times(of_block))

    @classmethod
    def ways(cls, mix: Mix, groups: tuple[Group, ...]) -> "list[_Priced]":
        """Every sequence for itself, and what they have in common stored once: bounds of which the better holds."""
        return [way for way in (cls.sharing(mix, groups), cls.of(mix, groups)) if way is not None]

    @property
    def mean(self) -> float:
        """Bytes of the average sequence."""
        return float(self.weight @ self.price)

    def holds(self, users: int, room: float) -> bool:
        """Whether so many stay within a room 99 % of the time."""
        space = room + self.saved(users).safe
        return space > 0 and _Sums(self.price, self.weight, space).within(users)

    def least(self, users: int) -> int:
        """Bytes within which so many stay 99 % of the time."""
        # Far out on the right; the grid then still is a thousandth of the answer.
        most = max(self.mean, float(self.price[self.weight > 0].max()) / max(1, users) * 4) * users * 2
        return max(0, round(_Sums(self.price, self.weight, most).quantile(users) - self.saved(users).safe))

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
    return sum(count * group.block_bytes for group, count in zip(groups, shared_blocks(groups, tokens), strict=True))


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

    def __init__(self, price: Floats, weight: Floats, room: float) -> None:
        self._room = room
        place = price * (_GRID / room)
        low = np.floor(place).astype(np.int64)
        part = place - low
        density = np.zeros(_GRID + 2)
        for at, share in ((low, 1 - part), (low + 1, part)):
            inside = at <= _GRID
            density += np.bincount(at[inside], weights=(weight * share)[inside], minlength=_GRID + 2)
        self._powers: list[Floats] = [density]

    def within(self, users: int) -> bool:
        """Whether so many stay within the room with 99 % certainty."""
        density = self._density(users)
        return density is None or float(density[: _GRID + 1].sum()) >= CONFIDENCE - 1e-9

    def quantile(self, users: int) -> float:
        """Bytes within which so many stay with 99 % certainty; the room where they do not."""
        density = self._density(users)
        if density is None:
            return 0.0
        return min(_GRID, int(np.searchsorted(np.cumsum(density), CONFIDENCE))) * self._room / _GRID

    def _density(self, users: int) -> Floats | None:
        """The density of the sum of so many; None for none."""
        density: Floats | None = None
        for bit in range(users.bit_length()):
            if bit == len(self._powers):
                self._powers.append(_convolved(self._powers[-1], self._powers[-1]))
            if users >> bit & 1:
                power = self._powers[bit]
                density = power if density is None else _convolved(density, power)
        return density


def _convolved(one: Floats, other: Floats) -> Floats:
    """The density of a sum, cut off where its parts are."""
    length = 2 * len(one)
    product: Floats = np.fft.irfft(np.fft.rfft(one, length) * np.fft.rfft(other, length), length)
    return np.maximum(0.0, product[: len(one)])
