"""Which blocks hold the tokens of a batch whose rows have all one length; NumPy, no tensors.

::

    group     full, blocks of 16                      window of 20, blocks of 16
    row 0     | b0 | b1 | b2 | b3~|                   |    |    | b7 | b8~|      length 52: a query sees 33 … 52
    row 1     | b0 | b1 | b4 | b5~|                   |    |    | b9 | b6~|      ~ still filled
              shared: what beams have in common       first = 2: given back

A table is int64 ``[rows, blocks]``, from block ``first`` of each sequence on. Rows that were one share blocks until one
of them writes to it: the last, partly filled one is copied then. Each group has an arena of its own, of slabs of one
block, which grows: between groups that all grow there is nothing to lend, and no byte lies beside a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvist.cache.arena import Arena, Ids
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.sequence import BlockCopy
from kvist.errors import DoesNotFit, InputError
from kvist.units import counted, format_size

# An arena grows by as much of itself, so that it is seldom moved and little of it lies idle.
_GROWTH = 16


@dataclass(kw_only=True)
class Table:
    """The blocks of one group.

    Attributes:
        blocks: int64 ``[rows, blocks]``; during a step with room for its tokens.
        first: which block of a sequence the first column is.
        past: during a step that begins anew, as none of the older tokens outlives it: where these lie until its end.
        past_first: the same of ``past``.
        stored_from: first of a step's tokens that is stored; those before it are dead when it ends.
    """

    blocks: Ids
    first: int = 0
    past: Ids | None = None
    past_first: int = 0
    stored_from: int = 0


class Blocks:
    """The tables of all groups, and the arenas from which they are.

    Args:
        groups: the model's.
        memory: most bytes of all arenas together; None: as many as it takes.

    Attributes:
        arenas: of each group.
        rows: sequences; 0 before the first step.
        length: tokens of each that are stored.
        settled: the length at which blocks were last given back; less than ``length`` while the past is recorded.
        recording: nothing is given back until :meth:`crop`, so that steps can be taken back.
        in_flight: tokens of the step under way.
    """

    def __init__(self, groups: Sequence[Group], memory: int | None) -> None:
        self.groups = tuple(groups)
        self.memory = memory
        self.recording = False
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, and the arenas."""
        self.arenas = [Arena(layout_of(group, 0)) for group in self.groups]
        self.rows = self.length = self.settled = self.in_flight = 0
        self.tables = [Table(blocks=np.empty((0, 0), np.int64)) for _ in self.groups]

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas, whatever lies in them."""
        return sum(arena.layout.total_bytes for arena in self.arenas)

    def planned_bytes(self) -> int:
        """Bytes of the blocks that the sequences need: arithmetic alone."""
        flight = self.length - self.settled
        return self.rows * sum(group.live_blocks(self.settled, flight) * group.block_bytes for group in self.groups)

    def allocated_bytes(self) -> int:
        """Bytes of the blocks that they refer to, shared ones counted in each row."""
        return sum(table.blocks.size * group.block_bytes for table, group in zip(self.tables, self.groups, strict=True))

    def begin(self, rows: int, count: int) -> list[BlockCopy]:
        """Make room for ``count`` more tokens of each row, or change nothing.

        Returns:
            Copies to be done before anything is written.

        Raises:
            DoesNotFit: the memory is bounded and too small.
        """
        if not self.length:
            self.rows = rows
            for table in self.tables:
                table.blocks = np.empty((rows, 0), np.int64)
        end = self.length + count
        lives, twins, wanted = [], [], []
        for group, table in zip(self.groups, self.tables, strict=True):
            live = table.first if self.recording else max(table.first, group.first_live_block(end))
            have = table.first + table.blocks.shape[1]
            fresh = live >= have
            twin = np.empty(0, np.int64) if fresh else self._twins(group, table)
            lives.append(live)
            twins.append(twin)
            wanted.append(rows * (group.all_blocks(end) - (live if fresh else have)) + twin.size)
        self._make_room(wanted, end)
        copies = []
        for ordinal, (group, table, live, twin) in enumerate(zip(self.groups, self.tables, lives, twins, strict=True)):
            have = table.first + table.blocks.shape[1]
            table.past, table.stored_from = None, max(self.length, live * group.block_tokens)
            start = have
            if live >= have:
                if table.blocks.size:
                    table.past, table.past_first = table.blocks, table.first
                table.blocks, table.first, start = np.empty((rows, 0), np.int64), live, live
            elif twin.size:
                table.blocks = table.blocks.copy()
                sources = table.blocks[twin, -1]
                table.blocks[twin, -1] = self.arenas[ordinal].take(0, twin.size)
                self._drop(ordinal, sources)
                copies += [
                    BlockCopy(ordinal, *pair)
                    for pair in zip(sources.tolist(), table.blocks[twin, -1].tolist(), strict=True)
                ]
            more = group.all_blocks(end) - start
            if more > 0:
                taken = self.arenas[ordinal].take(0, rows * more).reshape(rows, more)
                table.blocks = np.concatenate((table.blocks, taken), axis=1)
        self.in_flight = count
        return copies

    def end(self) -> None:
        """The step's tokens are stored: what no query sees any more is given back, unless the past is recorded."""
        self.length += self.in_flight
        self.in_flight = 0
        for ordinal, table in enumerate(self.tables):
            if table.past is not None:
                self._drop(ordinal, table.past)
                table.past = None
        if not self.recording:
            self._settle()

    def crop(self, count: int) -> None:
        """Take back the last ``count`` tokens, and settle what is left.

        Raises:
            InputError: they are not there, or what the query behind the rest sees has been given back.
        """
        length = self.length - count
        if length < 0:
            raise InputError(
                f"crop: {count} tokens; the cache holds {counted(self.length, 'token')}: take back at most as many",
                key="crop",
            )
        for group, table in zip(self.groups, self.tables, strict=True):
            if count and group.first_live_block(length) < table.first:
                raise InputError(
                    f"crop: {count} tokens; what a query behind {length} sees of {group.name} was given back: call "
                    f"activate_past_recording() before the steps that may be taken back",
                    key="crop",
                )
        for ordinal, (group, table) in enumerate(zip(self.groups, self.tables, strict=True)):
            keep = group.all_blocks(length) - table.first
            if keep < table.blocks.shape[1]:
                self._drop(ordinal, table.blocks[:, keep:])
                table.blocks = table.blocks[:, :keep].copy()
        self.length = length
        self._settle()

    def select(self, rows: Ids) -> None:
        """Make the sequences those of ``rows``, of which any may be there several times, or not at all."""
        for ordinal, table in enumerate(self.tables):
            chosen = table.blocks[rows]
            for ids in _distinct(chosen):
                self.arenas[ordinal].share(0, ids)
            self._drop(ordinal, table.blocks)
            table.blocks = chosen
        self.rows = int(rows.size)

    def distinct_bytes(self) -> int:
        """Bytes of the blocks that are referred to, shared ones counted once."""
        return sum(
            int(np.unique(table.blocks).size) * group.block_bytes
            for table, group in zip(self.tables, self.groups, strict=True)
        )

    def _settle(self) -> None:
        for ordinal, (group, table) in enumerate(zip(self.groups, self.tables, strict=True)):
            dead = min(group.first_live_block(self.length) - table.first, table.blocks.shape[1])
            if dead > 0:
                self._drop(ordinal, table.blocks[:, :dead])
                table.blocks, table.first = table.blocks[:, dead:].copy(), table.first + dead
        self.settled = self.length

    def _twins(self, group: Group, table: Table) -> Ids:
        """Rows whose last block is written to next, and another's too."""
        if not group.whole_tokens(self.length) % group.block_tokens:
            return np.empty(0, np.int64)
        _, owners = np.unique(table.blocks[:, -1], return_index=True)
        return np.setdiff1d(np.arange(len(table.blocks)), owners)

    def _drop(self, ordinal: int, blocks: Ids) -> None:
        for ids in _distinct(blocks):
            self.arenas[ordinal].drop(0, ids)

    def _make_room(self, wanted: list[int], end: int) -> None:
        """Grow the arenas until so many blocks of each group are to be had."""
        short = [max(0, arena.shortage([count])) for arena, count in zip(self.arenas, wanted, strict=True)]
        sizes = [group.block_bytes for group in self.groups]
        need = self.arena_bytes + sum(count * size for count, size in zip(short, sizes, strict=True))
        spare = None if self.memory is None else self.memory - need
        if spare is not None and spare < 0:
            raise DoesNotFit(
                f"memory: {format_size(self.memory or 0)} is too little for {counted(self.rows, 'sequence')} of {end} "
                f"tokens; give at least {format_size(need)}, or leave memory out"
            )
        for arena, group, count in zip(self.arenas, self.groups, short, strict=True):
            if count:
                ahead = max(0, arena.layout.num_slabs // _GROWTH - count)
                if spare is not None:
                    ahead = min(ahead, spare // group.block_bytes)
                    spare -= ahead * group.block_bytes
                arena.grow(layout_of(group, arena.layout.num_slabs + count + ahead))


def layout_of(group: Group, blocks: int) -> ArenaLayout:
    """An arena of so many blocks of one group."""
    size = group.block_bytes
    return ArenaLayout(
        total_bytes=blocks * size, slab_bytes=size, num_slabs=blocks, block_bytes=(size,), blocks_per_slab=(1,)
    )


def _distinct(blocks: Ids) -> list[Ids]:
    """Blocks, of which some are there several times, as arrays without any twice."""
    ids, counts = np.unique(blocks, return_counts=True)
    return [ids[counts > times] for times in range(int(counts.max(initial=0)))]
