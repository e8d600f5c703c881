"""What users ask of a cache: sequences of one length, or a mix of lengths.

Both answer the same two questions of the cache on a rank: does it hold so many, and how many does it hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvist.cache.groups import Group, unit_of
from kvist.cache.layout import ArenaLayout
from kvist.errors import DoesNotFit
from kvist.planning.capacity import Capacity, capacity_of, most_that_fit
from kvist.planning.cartridge import pinned_blocks
from kvist.planning.deployment import Cutting, Stage

if TYPE_CHECKING:
    from kvist.planning.mix import Mix

# Where a stage remembers nothing, others decide.
NO_LIMIT = 10**9


_SHARING = ("full", "compressed", "sealed")


@dataclass(frozen=True, kw_only=True)
class Users:
    """Sequences at once: as many as fit on average, and as many as fit 99 % of the time."""

    mean: int
    safe: int

    def at_least(self, other: "Users") -> "Users":
        """The larger of each."""
        return Users(mean=max(self.mean, other.mean), safe=max(self.safe, other.safe))


@dataclass(frozen=True, kw_only=True)
class StageUsers:
    """What the cache on a rank holds.

    Attributes:
        capacity: how it is cut, and what it holds of sequences of one length; None where nothing is remembered.
        slab: sequences when each reserves the longest context in one piece.
        paged: sequences when blocks are taken as sequences grow.
        prefix: the same with shared prefixes stored once; None where none is known.
        sequence: bytes of one sequence's blocks, of the average one in a mix.
        reserved: bytes that a slab reserves for a sequence.
    """

    capacity: Capacity | None
    slab: int
    paged: Users
    prefix: Users | None
    sequence: int
    reserved: int


UNLIMITED = StageUsers(
    capacity=None,
    slab=NO_LIMIT,
    paged=Users(mean=NO_LIMIT, safe=NO_LIMIT),
    prefix=Users(mean=NO_LIMIT, safe=NO_LIMIT),
    sequence=0,
    reserved=0,
)


class Demand(Protocol):
    """What users ask of a cache."""

    @property
    def cutting(self) -> Cutting:
        """How caches are cut."""
        ...

    @property
    def context(self) -> int:
        """Tokens of a sequence, on average in a mix."""
        ...

    @property
    def prompt(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def limit(self) -> int:
        """Tokens for which a slab is reserved."""
        ...

    @property
    def mix(self) -> "Mix | None":
        """The sequences, where they are of many lengths."""
        ...

    def holds(self, stage: Stage, cache: int, users: int) -> bool:
        """Whether ``cache`` bytes on a rank hold so many."""
        ...

    def least(self, stage: Stage, users: int) -> int:
        """Bytes of blocks that so many need on a rank; a cache that is cut in slabs needs a little more."""
        ...

    def count(self, stage: Stage, cache: int) -> StageUsers:
        """How many ``cache`` bytes on a rank hold.

        Raises:
            DoesNotFit: there is not one slab for each group.
        """
        ...


def logical_bytes(cutting: Cutting, stage: Stage, tokens: int) -> int:
    """What a rank must remember of a sequence, its encoder included: no blocks."""
    encoder = stage.spec.cross_bytes(stage.fmt, encoder_tokens=cutting.encoder_tokens)
    return stage.spec.sequence_bytes(tokens, stage.fmt) + (encoder or 0)


def capacity_at(cutting: Cutting, stage: Stage, cache: int, context: int) -> Capacity:
    """How a rank's cache is cut, and what it holds of sequences of ``context`` tokens.

    Raises:
        DoesNotFit: there is not one slab for each group.
    """
    return capacity_of(
        stage.spec, stage.fmt, stage.groups, cache_bytes=cache, context=context, chunk=cutting.chunk,
        cartridge=cutting.cartridge,
    )  # fmt: skip


def shared_blocks(groups: Sequence[Group], tokens: int) -> tuple[int, ...]:
    """Blocks of the first ``tokens`` that sequences can share in each group: none where they are given back.

    Prefixes are shared as far as the blocks of all groups are whole.
    """
    whole = tokens - tokens % unit_of(groups) if groups else 0
    return tuple(whole // group.block_tokens if group.lifetime in _SHARING else 0 for group in groups)


@dataclass(frozen=True, kw_only=True)
class SameLength:
    """Sequences of one length.

    Attributes:
        cutting: how caches are cut.
        context: tokens of each.
        limit: longest context, for which slabs are reserved.
        shared: tokens that all of them begin with.
    """

    cutting: Cutting
    context: int
    limit: int
    shared: int = 0

    @property
    def prompt(self) -> int:
        """All of it."""
        return self.context

    @property
    def mix(self) -> None:
        """None: they are of one length."""
        return None

    def holds(self, stage: Stage, cache: int, users: int) -> bool:
        """Whether ``cache`` bytes on a rank hold so many."""
        if not stage.groups:
            return True
        try:
            layout = ArenaLayout.of(stage.groups, cache)
        except DoesNotFit:
            return False
        return self._fits(stage, layout, users, self.shared)

    def least(self, stage: Stage, users: int) -> int:
        """Bytes of blocks that so many need on a rank."""
        needed = 0
        pins = pinned_blocks(stage.groups, self.cutting.cartridge)
        for group, pinned, once in zip(stage.groups, pins, shared_blocks(stage.groups, self.shared), strict=True):
            needed += (pinned + once + users * (group.peak_blocks(self.context, 1) - once)) * group.block_bytes
        return needed

    def count(self, stage: Stage, cache: int) -> StageUsers:
        """How many ``cache`` bytes on a rank hold.

        Raises:
            DoesNotFit: there is not one slab for each group.
        """
        if not stage.groups:
            return UNLIMITED
        capacity = capacity_at(self.cutting, stage, cache, self.context)
        prefix = None
        if self.shared:
            most = capacity.layout.num_slabs * max(capacity.layout.blocks_per_slab)
            most = most_that_fit(lambda users: self._fits(stage, capacity.layout, users, self.shared), most)
            prefix = Users(mean=most, safe=most)
        return StageUsers(
            capacity=capacity,
            slab=capacity.users_slab,
            paged=Users(mean=capacity.users_paged, safe=capacity.users_paged),
            prefix=prefix,
            sequence=capacity.sequence_allocated,
            reserved=logical_bytes(self.cutting, stage, self.limit),
        )

    def _fits(self, stage: Stage, layout: ArenaLayout, users: int, shared: int) -> bool:
        """Shared blocks are stored once; one sequence still computes its prompt, as :func:`capacity_of` has it."""
        chunk = min(min(group.block_tokens for group in stage.groups), self.context, self.cutting.chunk)
        counts = []
        pins = pinned_blocks(stage.groups, self.cutting.cartridge)
        for group, pinned, once in zip(stage.groups, pins, shared_blocks(stage.groups, shared), strict=True):
            own, last = group.peak_blocks(self.context, 1) - once, group.peak_blocks(self.context, chunk) - once
            counts.append(pinned + once + (users - 1) * own + last)
        return layout.slabs_for(counts) <= layout.num_slabs
