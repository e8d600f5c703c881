"""The arena: one piece of memory, cut in slabs that are lent to layer groups and cut again into their blocks.

::

    arena   | slab 0      | slab 1      | slab 2      | …      one flat buffer
              full          window-512    free                 each slab is lent to one group at a time
              |b0|b1|b2|..|   |  b4   |~                       block id = slab x blocks_per_slab + slot; ~ is tail waste

A block is *held* while sequences refer to it, *cached* while only the prefix tree does, else *free*. In every group
``free + cached + held`` equals the blocks of the slabs lent to it, after every operation.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist.cache.layout import ArenaLayout

# Indexing with 64-bit ids is three times as fast as with 32-bit ones, which NumPy widens first.
Ids = npt.NDArray[np.int64]


class Arena:
    """Block ids, their reference counts and their free lists; whoever owns tensors lays them out the same way.

    Methods take arrays of distinct block ids of one group; none of them is checked on the hot path.

    Attributes:
        layout: how its memory is cut.
        refs: per group, int32 ``[blocks]``: sequences that refer to each block.
        kept: per group, bool ``[blocks]``: whether the prefix tree keeps it.
        idled: blocks that have lost their last reference so far: while it stays, nothing more can be had than before.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.idled = 0
        counts = [layout.total_blocks(group) for group in range(len(layout.blocks_per_slab))]
        self.refs = [np.zeros(count, np.int32) for count in counts]
        self.kept = [np.zeros(count, np.bool_) for count in counts]
        self._free = [np.empty(count, np.int64) for count in counts]
        self._free_count = [0] * len(counts)
        self._cached_count = [0] * len(counts)
        self._slabs_lent = [0] * len(counts)
        self._owner = np.full(layout.num_slabs, -1, np.int16)
        self._free_slabs = list(range(layout.num_slabs - 1, -1, -1))

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def free_slabs(self) -> int:
        """Slabs lent to no group."""
        return len(self._free_slabs)

    def lent(self, group: int) -> int:
        """Blocks in the slabs lent to a group."""
        return self._slabs_lent[group] * self.layout.blocks_per_slab[group]

    def free(self, group: int) -> int:
        """Blocks of a group's slabs that nobody uses."""
        return self._free_count[group]

    def cached(self, group: int) -> int:
        """Blocks that only the prefix tree keeps."""
        return self._cached_count[group]

    def held(self, group: int) -> int:
        """Blocks that sequences refer to."""
        return self.lent(group) - self._free_count[group] - self._cached_count[group]

    def shortage(self, wanted: Sequence[int]) -> int:
        """Blocks, or slabs where there are several groups, that lack for :meth:`take` to give ``wanted[g]`` of each."""
        if len(wanted) == 1:
            return wanted[0] - self._free_count[0] - len(self._free_slabs) * self.layout.blocks_per_slab[0]
        missing = (count - free for count, free in zip(wanted, self._free_count, strict=True))
        slabs = sum(-(-max(0, count) // per) for count, per in zip(missing, self.layout.blocks_per_slab, strict=True))
        return slabs - len(self._free_slabs)

    def owner_of_slabs(self) -> npt.NDArray[np.int16]:
        """Group of each slab, -1 where it is lent to none."""
        return self._owner.copy()

    # -- blocks ---------------------------------------------------------------------------------------------

    def take(self, group: int, count: int) -> Ids:
        """Give ``count`` free blocks, each with one reference; the caller has seen that they are available."""
        top = self._free_count[group]
        if top < count:
            self._lend(group, count - top)
            top = self._free_count[group]
        ids = self._free[group][top - count : top][::-1].copy()
        self._free_count[group] = top - count
        # Of single blocks, most of those that answers take, the general way costs several times as much.
        self.refs[group][ids if count != 1 else int(ids[0])] = 1
        return ids

    def share(self, group: int, ids: Ids) -> None:
        """Add one reference to each block."""
        refs = self.refs[group]
        counts = refs[ids]
        self._cached_count[group] -= ids.size - int(np.count_nonzero(counts))
        counts += 1
        refs[ids] = counts

    def drop(self, group: int, ids: Ids) -> None:
        """Take one reference away; a block without any is cached where the tree keeps it, else free."""
        refs = self.refs[group]
        counts = refs[ids]
        counts -= 1
        refs[ids] = counts
        idle = ids if not counts.any() else ids[counts == 0]
        if idle.size:
            self.idled += idle.size
            kept = self.kept[group][idle]
            cached = int(np.count_nonzero(kept))
            self._cached_count[group] += cached
            if cached < idle.size:
                self._give(group, idle[~kept])

    def keep(self, group: int, ids: Ids) -> None:
        """The prefix tree takes these held blocks as well."""
        self.kept[group][ids] = True

    def forget(self, group: int, ids: Ids) -> None:
        """The prefix tree lets these blocks go; those without references become free.

        A fork may refer to blocks that its twin has given the tree, whether or not it uses their node.
        """
        if ids.size == 1:
            self._forget_one(group, int(ids[0]))
            return
        self.kept[group][ids] = False
        held = self.refs[group][ids]
        idle = ids[held == 0] if held.any() else ids
        self._cached_count[group] -= idle.size
        self._give(group, idle)

    def _forget_one(self, group: int, block: int) -> None:
        self.kept[group][block] = False
        if not self.refs[group][block]:
            top = self._free_count[group]
            self._cached_count[group] -= 1
            self._free[group][top] = block
            self._free_count[group] = top + 1

    def _give(self, group: int, ids: Ids) -> None:
        top = self._free_count[group]
        self._free[group][top : top + ids.size] = ids[::-1]
        self._free_count[group] = top + ids.size

    # -- slabs ----------------------------------------------------------------------------------------------

    def grow(self, layout: ArenaLayout) -> None:
        """Go on in an arena with more slabs of the same size behind those that there are; every id stays."""
        more = layout.num_slabs - self.layout.num_slabs
        if more < 0 or layout.blocks_per_slab != self.layout.blocks_per_slab:
            raise ValueError("an arena grows by slabs that are cut as its own")
        counts = [layout.total_blocks(group) - refs.size for group, refs in enumerate(self.refs)]
        for group, count in enumerate(counts):
            self.refs[group] = np.concatenate((self.refs[group], np.zeros(count, np.int32)))
            self.kept[group] = np.concatenate((self.kept[group], np.zeros(count, np.bool_)))
            self._free[group] = np.concatenate((self._free[group], np.empty(count, np.int64)))
        self._owner = np.concatenate((self._owner, np.full(more, -1, np.int16)))
        self._free_slabs = [*range(layout.num_slabs - 1, self.layout.num_slabs - 1, -1), *self._free_slabs]
        self.layout = layout

    def _lend(self, group: int, blocks: int) -> None:
        per_slab = self.layout.blocks_per_slab[group]
        count = -(-blocks // per_slab)
        slabs = np.array(self._free_slabs[-count:][::-1], np.int64)
        del self._free_slabs[-count:]
        self._owner[slabs] = group
        self._slabs_lent[group] += count
        blocks_of: Ids = slabs[:, None] * per_slab + np.arange(per_slab)
        self._give(group, blocks_of.ravel())

    def collect_slabs(self) -> int:
        """Take back every slab of which all blocks are free; return how many came back."""
        before = len(self._free_slabs)
        for group, per_slab in enumerate(self.layout.blocks_per_slab):
            free = self._free[group][: self._free_count[group]]
            slab_of = free // per_slab
            empty = np.bincount(slab_of, minlength=self.layout.num_slabs) == per_slab
            if not empty.any():
                continue
            # Sorted, so that the next blocks come from few slabs and others stay collectable.
            remaining = np.sort(free[~empty[slab_of]])[::-1]
            self._free[group][: remaining.size] = remaining
            self._free_count[group] = remaining.size
            slabs = np.flatnonzero(empty)
            self._owner[slabs] = -1
            self._slabs_lent[group] -= slabs.size
            self._free_slabs.extend(slabs[::-1].tolist())
        return len(self._free_slabs) - before

    def could_take(self, wanted: Sequence[int], revived: Sequence[Ids]) -> bool:
        """Whether ``wanted[g]`` blocks of every group can be had if every cached block but the ``revived`` ones goes.

        Changes nothing. Counts what lies free inside slabs that must stay with their group, and the slabs that would
        come back.
        """
        shortage = self.shortage(wanted)
        if shortage <= 0:
            return True
        if len(wanted) == 1:
            return shortage <= self._cached_count[0] - int(np.count_nonzero(self.refs[0][revived[0]] == 0))
        slabs = len(self._free_slabs)
        missing = 0
        for group, per_slab in enumerate(self.layout.blocks_per_slab):
            held = self.refs[group] > 0
            held[revived[group]] = True
            in_slab = held.reshape(-1, per_slab).sum(axis=1)[self._owner == group]
            slabs += int(np.count_nonzero(in_slab == 0))
            inside = int((per_slab - in_slab[in_slab > 0]).sum())
            missing += -(-max(0, wanted[group] - inside) // per_slab)
        return missing <= slabs
