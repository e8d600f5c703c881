"""How the arena's memory is cut: slabs that every group's blocks fill well; arithmetic, for planner and engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.cache.groups import Group
from kvist.errors import DoesNotFit
from kvist.units import counted, format_size

_MAX_LARGEST_BLOCKS_PER_SLAB = 16
_ACCEPTED_TAIL = 0.01
_NO_TAIL = 0.002


@dataclass(frozen=True, kw_only=True)
class ArenaLayout:
    """How the arena's bytes are cut.

    Attributes:
        total_bytes: ``num_slabs x slab_bytes``; what the engine allocates.
        slab_bytes: bytes of a slab, a multiple of the largest block.
        num_slabs: slabs in the arena.
        block_bytes: bytes of a block, a group.
        blocks_per_slab: blocks in a slab, a group.
    """

    total_bytes: int
    slab_bytes: int
    num_slabs: int
    block_bytes: tuple[int, ...]
    blocks_per_slab: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[Group], memory_bytes: int) -> "ArenaLayout":
        """Cut ``memory_bytes`` for these groups.

        A slab is one of the first 16 multiples of the largest block: of those whose tails waste at most 1 % in every
        group, or else of the least wasteful, the one that wastes the least as a share of the memory. That is its
        longest tail, of which 0.2 % count as none, and two slabs of each group: what a group cannot give back,
        because its last slab is not full and blocks that come and go lie between such as stay. So small memories have
        small slabs, which move easily, and large ones hardly any tails.

        Raises:
            DoesNotFit: there is not one slab for each group.
        """
        sizes = tuple(group.block_bytes for group in groups)
        largest = max(sizes)
        affordable = max(1, min(_MAX_LARGEST_BLOCKS_PER_SLAB, memory_bytes // (len(sizes) * largest)))
        ends = 2 * len(sizes)

        def waste(slab: int) -> tuple[float, float, int]:
            tail = max(slab % size / slab for size in sizes)
            return max(_ACCEPTED_TAIL, tail), max(_NO_TAIL, tail) + ends * slab / max(1, memory_bytes), slab

        slab = min((count * largest for count in range(1, affordable + 1)), key=waste)
        num_slabs = memory_bytes // slab
        if num_slabs < len(sizes):
            held = counted(num_slabs, "slab")
            raise DoesNotFit(
                f"memory: {format_size(memory_bytes)} holds {held} of {format_size(slab)}, too few "
                f"for {counted(len(sizes), 'layer group')}: at least {format_size(len(sizes) * slab)}"
            )
        return cls(
            total_bytes=num_slabs * slab,
            slab_bytes=slab,
            num_slabs=num_slabs,
            block_bytes=sizes,
            blocks_per_slab=tuple(slab // size for size in sizes),
        )

    def total_blocks(self, group: int) -> int:
        """Number of block ids that a group could ever use."""
        return self.num_slabs * self.blocks_per_slab[group]

    def offset(self, group: int, block: int) -> int:
        """Byte of the arena at which a block begins."""
        slab, place = divmod(block, self.blocks_per_slab[group])
        return slab * self.slab_bytes + place * self.block_bytes[group]

    def slabs_for(self, blocks: Sequence[int]) -> int:
        """Slabs that hold ``blocks[g]`` blocks of every group."""
        return sum(-(-count // per) for count, per in zip(blocks, self.blocks_per_slab, strict=True))
