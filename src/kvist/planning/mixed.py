"""What users of many lengths ask of a cache, see :mod:`kvist.planning.workload` for how they are counted."""

from dataclasses import dataclass

from kvist.cache.layout import ArenaLayout
from kvist.errors import DoesNotFit
from kvist.planning.demand import NO_LIMIT, UNLIMITED, StageUsers, capacity_at, logical_bytes
from kvist.planning.deployment import Cutting, Stage
from kvist.planning.mix import Mix
from kvist.planning.workload import mix_holds, mix_least, mix_users


@dataclass(frozen=True, kw_only=True)
class MixedLengths:
    """Sequences of many lengths, caught at random moments.

    Attributes:
        cutting: how caches are cut.
        mix: the sequences, up to the limit of the server.
    """

    cutting: Cutting
    mix: Mix

    @property
    def context(self) -> int:
        """Tokens that a sequence holds on average."""
        return max(1, round(self.mix.moments.mean_tokens))

    @property
    def prompt(self) -> int:
        """Tokens of the average prompt."""
        return max(1, round(self.mix.mean_prompt))

    @property
    def limit(self) -> int:
        """Longest sequence that the server takes."""
        return self.mix.limit

    def holds(self, stage: Stage, cache: int, users: int) -> bool:
        """Whether ``cache`` bytes on a rank hold so many, 99 % of the time."""
        if not stage.groups:
            return True
        try:
            layout = ArenaLayout.of(stage.groups, cache)
        except DoesNotFit:
            return False
        return mix_holds(self.mix, stage.groups, layout, users=users, chunk=self.cutting.chunk)

    def least(self, stage: Stage, users: int) -> int:
        """Bytes of blocks that so many need on a rank, 99 % of the time."""
        return mix_least(self.mix, stage.groups, users) if stage.groups else 0

    def count(self, stage: Stage, cache: int) -> StageUsers:
        """How many ``cache`` bytes on a rank hold.

        Raises:
            DoesNotFit: there is not one slab for each group.
        """
        if not stage.groups:
            return UNLIMITED
        capacity = capacity_at(self.cutting, stage, cache, self.context)
        found = mix_users(self.mix, stage.groups, capacity.layout, chunk=self.cutting.chunk)
        reserved = logical_bytes(self.cutting, stage, self.limit)
        return StageUsers(
            capacity=capacity,
            slab=cache // reserved if reserved else NO_LIMIT,
            paged=found.paged,
            prefix=found.prefix,
            sequence=round(found.mean_bytes),
            reserved=reserved,
        )
