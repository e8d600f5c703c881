"""Runs of the prefix tree that stay until they are let go, and stand for tokens that nobody has.

A trained cache has positions, and no tokens: *placeholders* stand for them, ids below zero, which no text has. A run
under them is pinned by a sequence that holds its blocks and never steps; the sequences of requests share it as they
share any prefix. What they add behind it enters the tree below it, and so does a run that is pinned behind another: its
placeholders are numbers of its own, so that a path down the tree says which runs follow one another.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvist.cache.leads import Lead, pin_lead
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import NO_BLOCKS, Sequence
from kvist.errors import DoesNotFit, InputError
from kvist.units import format_size

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


def placeholders(count: int, after: int = 0) -> npt.NDArray[np.int32]:
    """What stands for ``count`` tokens that nobody has: -1, -2 …, or the numbers below ``-after``."""
    return -np.arange(after + 1, after + count + 1, dtype=np.int32)


class Pins:
    """What is pinned, and how many slabs it leaves.

    Args:
        manager: of the cache in whose arena it lies.

    Attributes:
        held: what is pinned.
        changes: ascends with each that comes or goes.
    """

    def __init__(self, manager: "CacheManager") -> None:
        self._manager = manager
        self._layout = layout = manager.layout
        self.held: list[Sequence | Lead] = []
        self.changes = 0
        groups = len(layout.blocks_per_slab)
        # Per group: pinned blocks, and the slabs in which they lie, which no other group will have.
        self._blocks = [0] * groups
        self._slabs = [0] * groups

    def pin(
        self,
        count: int,
        key: PrefixKey,
        *,
        behind: Sequence | Lead | None = None,
        tokens: npt.NDArray[np.int32] | None = None,
    ) -> Sequence | Lead:
        """Take blocks for a run that stands for ``count`` tokens which nobody has.

        Whoever calls fills them before the next step and says so with :meth:`filled`, or gives them back with
        :meth:`unpin`. Requests whose tokens begin with its own find it under ``key``. Where cartridges have a format of
        their own it is a lead, which those have whose :attr:`Sequence.lead` it is; key and tokens say nothing then.

        Args:
            count: of its tokens.
            key: of the run.
            behind: a run that is pinned under the same key, which it follows and whose blocks it shares.
            tokens: placeholders, int32 ``[count]``, which no other run behind that one has; left out, those of
                :func:`placeholders`.

        Raises:
            InputError: ``count`` is no multiple of the unit, or a group keeps something that is no token's.
            DoesNotFit: there is no room now; nothing has changed.
        """
        if self._manager.leads:
            assert not isinstance(behind, Sequence)
            return pin_lead(self._manager, count, behind)
        assert not isinstance(behind, Lead)
        return _pin_run(self._manager, count, key, behind, tokens)

    def filled(self, pinned: Sequence | Lead) -> None:
        """What is pinned is stored now: nothing reclaims it until :meth:`unpin`, but for what windows never read."""
        if isinstance(pinned, Sequence):
            # Nothing is to be copied for it itself; what others are to give up stays to be told.
            self._manager.note_stored(pinned, pinned.pinned)
        self.held.append(pinned)
        self._count()

    def unpin(self, pinned: Sequence | Lead) -> None:
        """Let a pinned run go: it is reclaimed like any other once nobody uses it, and at once where it is a lead."""
        filled = pinned in self.held
        if filled:
            self.held.remove(pinned)
            self._count()
        if isinstance(pinned, Sequence):
            self._manager.release(pinned, keep=filled)
            return
        for group, table in enumerate(pinned.tables):
            self._manager.arena.drop(group, table)

    def _count(self) -> None:
        self.changes += 1
        for group, per in enumerate(self._layout.blocks_per_slab):
            tables = [pinned.tables[group] for pinned in self.held]
            # Two names of one cartridge have the same blocks; windows have given some back.
            ids = np.unique(np.concatenate([NO_BLOCKS, *tables]))
            ids = ids[ids >= 0]
            self._blocks[group] = ids.size
            self._slabs[group] = np.unique(ids // per).size

    def slabs_with(self, blocks: Seq[int]) -> int:
        """Slabs for what is pinned and ``blocks[g]`` more of each group."""
        if not self.held:
            return self._layout.slabs_for(blocks)
        sizes = zip(blocks, self._blocks, self._slabs, self._layout.blocks_per_slab, strict=True)
        return sum(max(slabs, -(-(count + pinned) // per)) for count, pinned, slabs, per in sizes)

    @property
    def bytes(self) -> int:
        """Of pinned blocks."""
        return sum(count * size for count, size in zip(self._blocks, self._layout.block_bytes, strict=True))


def _pin_run(
    manager: "CacheManager",
    count: int,
    key: PrefixKey,
    behind: Sequence | None,
    tokens: npt.NDArray[np.int32] | None,
) -> Sequence:
    """:meth:`Pins.pin` in the tree."""
    unit = manager.unit_tokens
    if count % unit:
        raise InputError(
            f"cartridge: {count} tokens are no whole blocks of {unit}; choose blocks, and a tail, of a divisor of "
            f"{count}",
            key="cartridge",
        )
    fixed = next((group for group in manager.groups if group.fixed_blocks is not None), None)
    if fixed is not None:
        raise InputError(f"cartridge: {fixed.name} keeps what no run of tokens stands for", key="cartridge")
    first = 0 if behind is None else behind.size
    run = placeholders(count) if tokens is None else tokens
    sequence = Sequence(run if behind is None else np.concatenate((behind.tokens, run)), key, len(manager.groups))
    if behind is not None:
        sequence.tables = [table.copy() for table in behind.tables]
        sequence.given_back = list(behind.given_back)
    # What no query behind the run sees has no block, nor is it filled.
    unseen = [group.first_live_block(first + count) if group.gives_back else 0 for group in manager.groups]
    for number, dead in enumerate(unseen):
        table = sequence.tables[number]
        sequence.given_back[number] = max(sequence.given_back[number], dead)
        sequence.tables[number] = np.concatenate((table, np.full(max(0, dead - table.size), -1, np.int64)))
        sequence.tables[number][:dead] = -1
    wanted = [
        group.all_blocks(first + count) - table.size
        for group, table in zip(manager.groups, sequence.tables, strict=True)
    ]
    if not manager.arena.could_take(wanted, [NO_BLOCKS] * len(wanted)):
        needed = sum(blocks * size for blocks, size in zip(wanted, manager.layout.block_bytes, strict=True))
        raise DoesNotFit(
            f"memory: a cartridge of {count} tokens takes {format_size(needed)}, which the cache of "
            f"{format_size(manager.layout.total_bytes)} does not have now; give it more"
        )
    if behind is not None:
        manager.tree.hold(behind.node)
        sequence.node = behind.node
        for group, table in enumerate(sequence.tables):
            manager.arena.share(group, table[sequence.given_back[group] :])
    manager.free_up(wanted)
    for group, blocks in enumerate(wanted):
        sequence.tables[group] = np.concatenate((sequence.tables[group], manager.arena.take(group, blocks)))
    sequence.node = manager.tree.insert(
        sequence.key, sequence.node, sequence.tokens, sequence.tables, first, first + count
    )
    sequence.begun = True
    sequence.length = first
    sequence.in_flight = count
    sequence.published = sequence.pinned = first + count
    return sequence
