"""Runs of the prefix tree that stay until they are let go, and stand for tokens that nobody has.

A trained cache has positions, and no tokens: *placeholders* stand for them, ids below zero, which no text has. A run
under them is pinned by a sequence that holds its blocks and never steps; the sequences of requests share it as they
share any prefix. What they add behind it enters the tree below it.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvist.cache.layout import ArenaLayout
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import NO_BLOCKS, Sequence
from kvist.errors import DoesNotFit, InputError
from kvist.units import format_size

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


def placeholders(count: int) -> npt.NDArray[np.int32]:
    """What stands for ``count`` tokens that nobody has: -1, -2 …"""
    return -np.arange(1, count + 1, dtype=np.int32)


class Pins:
    """What is pinned, and how many slabs it leaves.

    Args:
        layout: how the arena is cut.

    Attributes:
        sequences: those that pin.
        changes: ascends with each that comes or goes.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self.sequences: list[Sequence] = []
        self.changes = 0
        groups = len(layout.blocks_per_slab)
        # Per group: pinned blocks, and the slabs in which they lie, which no other group will have.
        self._blocks = [0] * groups
        self._slabs = [0] * groups

    def add(self, sequence: Sequence) -> None:
        """One more."""
        self.sequences.append(sequence)
        self._count()

    def remove(self, sequence: Sequence) -> None:
        """One fewer."""
        self.sequences.remove(sequence)
        self._count()

    def _count(self) -> None:
        self.changes += 1
        for group, per in enumerate(self._layout.blocks_per_slab):
            tables = [sequence.tables[group] for sequence in self.sequences]
            # Two names of one cartridge have the same blocks; windows have given some back.
            ids = np.unique(np.concatenate([NO_BLOCKS, *tables]))
            ids = ids[ids >= 0]
            self._blocks[group] = ids.size
            self._slabs[group] = np.unique(ids // per).size

    def slabs_with(self, blocks: Seq[int]) -> int:
        """Slabs for what is pinned and ``blocks[g]`` more of each group."""
        if not self.sequences:
            return self._layout.slabs_for(blocks)
        sizes = zip(blocks, self._blocks, self._slabs, self._layout.blocks_per_slab, strict=True)
        return sum(max(slabs, -(-(count + pinned) // per)) for count, pinned, slabs, per in sizes)

    @property
    def bytes(self) -> int:
        """Of pinned blocks."""
        return sum(count * size for count, size in zip(self._blocks, self._layout.block_bytes, strict=True))


def pin(manager: "CacheManager", count: int, key: PrefixKey) -> Sequence:
    """:meth:`CacheManager.pin`."""
    unit = manager.unit_tokens
    if count % unit:
        raise InputError(
            f"cartridge: {count} tokens are no whole blocks of {unit}; choose blocks of a divisor of {count}",
            key="cartridge",
        )
    fixed = next((group for group in manager.groups if group.fixed_blocks is not None), None)
    if fixed is not None:
        raise InputError(f"cartridge: {fixed.name} keeps what no run of tokens stands for", key="cartridge")
    wanted = [group.all_blocks(count) for group in manager.groups]
    if not manager.arena.could_take(wanted, [NO_BLOCKS] * len(wanted)):
        needed = sum(blocks * size for blocks, size in zip(wanted, manager.layout.block_bytes, strict=True))
        raise DoesNotFit(
            f"memory: a cartridge of {count} tokens takes {format_size(needed)}, which the cache of "
            f"{format_size(manager.layout.total_bytes)} does not have now; give it more"
        )
    sequence = Sequence(placeholders(count), key, len(wanted))
    manager.free_up(wanted)
    sequence.tables = [manager.arena.take(group, blocks) for group, blocks in enumerate(wanted)]
    sequence.node = manager.tree.insert(key, None, sequence.tokens, sequence.tables, 0, count)
    sequence.begun = True
    sequence.published = sequence.pinned = sequence.in_flight = count
    return sequence
