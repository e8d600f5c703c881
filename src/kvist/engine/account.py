"""A request's memory at its end: what was planned, what it held, and what of that held no token."""

from dataclasses import dataclass

from kvist.batch import Request
from kvist.cache.manager import CacheManager
from kvist.planning.capacity import allocated_bytes


@dataclass(frozen=True, kw_only=True)
class Account:
    """A request's memory at its end.

    Attributes:
        planned_bytes: what the plan's arithmetic gives for its length.
        allocated_bytes: bytes of the blocks in its tables, shared ones included.
        waste_bytes: of these, bytes that hold no token.
        blocks: blocks in its tables, over all groups.
        prefix_hit_tokens: prompt tokens found in the cache.
        tier_hit_tokens: of these, tokens that were loaded from tiers.
        pruned_tokens: tokens that pruning has dropped.
        cartridge_tokens: positions of the cartridge before the prompt; its blocks are among the others.
    """

    planned_bytes: int
    allocated_bytes: int
    waste_bytes: int
    blocks: int
    prefix_hit_tokens: int
    pruned_tokens: int = 0
    cartridge_tokens: int = 0
    tier_hit_tokens: int = 0

    @classmethod
    def of(cls, request: Request, cache: CacheManager) -> "Account":
        """Of a request that has not given its blocks back yet."""
        sequence, groups = request.sequence, cache.groups
        waste = sum(
            group.unfilled_bytes(
                sequence.blocks(index) + sequence.given_back[index], sequence.length - sequence.dropped[index]
            )
            for index, group in enumerate(groups)
        )
        return cls(
            planned_bytes=allocated_bytes(groups, sequence.length, pruned=sequence.pruned, before=sequence.held_before),
            allocated_bytes=cache.held_bytes(sequence),
            waste_bytes=waste,
            blocks=sum(sequence.blocks(index) for index in range(len(groups))),
            prefix_hit_tokens=request.first_hit_tokens or 0,
            pruned_tokens=sequence.pruned,
            cartridge_tokens=sequence.before,
            tier_hit_tokens=sum(load.tokens for load in request.first_loads),
        )

    def to_dict(self) -> dict[str, int]:
        """The JSON of ``kvist generate``."""
        return {
            "planned_bytes": self.planned_bytes,
            "allocated_bytes": self.allocated_bytes,
            "waste_bytes": self.waste_bytes,
            "blocks": self.blocks,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "tier_hit_tokens": self.tier_hit_tokens,
            "pruned_tokens": self.pruned_tokens,
            "cartridge_tokens": self.cartridge_tokens,
        }
