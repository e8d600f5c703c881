"""Pruning's side of the arena: the tokens that a sequence keeps move into blocks of its own, the others' go back.

::

    before   | tree | tree | tree | tree | own ~|        tree: blocks of the prefix, which others may read
    after    | own  | new ~|                             those stay as they are, and only lose a reference

Which tokens are kept may differ from layer to layer and from head to head, but not how many: one table serves all.
Blocks that nobody else refers to and the tree does not keep are filled again where they are; what lacks is taken from
what is free. Where that is not enough, the sequence's own runs leave the tree, which hardly anybody would look for in
so full a memory, and their blocks are filled again; then cached blocks of others are reclaimed.

A pruned sequence has nothing to do with the tree any more: what follows its tokens depends on what was dropped.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvist.cache.arena import Ids
from kvist.cache.reclaim import Node
from kvist.cache.sequence import NO_BLOCKS, Compaction, Sequence

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


def compact(manager: "CacheManager", sequence: Sequence) -> list[Compaction] | None:
    """Cut a sequence to the slots that its :class:`kvist.spec.pruning.PruningPlan` leaves it; see the manager's verb.

    Args:
        manager: whose sequence it is.
        sequence: with nothing in flight, and more slots than that.
    """
    assert sequence.pruning is not None
    slots = sequence.length - sequence.pruned
    keep = sequence.pruning.target(sequence.length)
    if sequence.in_flight or keep >= slots:
        raise ValueError("a sequence is pruned between steps, and to fewer slots than it fills")
    arena, groups = manager.arena, manager.groups
    pruned = [index for index, group in enumerate(groups) if group.prunable]
    blocks = {index: groups[index].all_blocks(keep) for index in pruned}
    sources = {index: sequence.tables[index] for index in pruned}
    own = {index: _own(manager, sequence, index)[: blocks[index]] for index in pruned}
    wanted = [blocks[index] - own[index].size if index in blocks else 0 for index in range(len(groups))]
    withdrawn: list[Node] = []
    if any(wanted) and arena.shortage(wanted) > 0:
        withdrawn = manager.tree.used_alone(sequence.node)
        own = {index: _own(manager, sequence, index, withdrawn)[: blocks[index]] for index in pruned}
        wanted = [blocks[index] - own[index].size if index in blocks else 0 for index in range(len(groups))]
        if any(wanted) and not arena.could_take(wanted, [NO_BLOCKS] * len(groups)):
            return None
    if sequence.node is not None:
        manager.tree.mark_stale(sequence.node)
        manager.tree.let_go(sequence.node)
        manager.tree.withdraw(withdrawn)
        sequence.node = sequence.trailing = None
    if any(wanted):
        manager.free_up(wanted)
    made = []
    for index in pruned:
        source = sources[index]
        target = own[index]
        if wanted[index]:
            target = np.concatenate((target, arena.take(index, wanted[index])))
        arena.drop(index, np.setdiff1d(source, own[index]))
        sequence.tables[index] = target
        sequence.dropped[index] += slots - keep
        made.append(Compaction(index, source, target.copy()))
    sequence.pruned += slots - keep
    sequence.room = manager.room(sequence)
    return made


def _own(manager: "CacheManager", sequence: Sequence, group: int, withdrawn: "list[Node] | tuple[()]" = ()) -> Ids:
    """The blocks that are a sequence's alone, once these runs have left the tree."""
    arena, table = manager.arena, sequence.tables[group]
    kept = arena.kept[group][table]
    for node in withdrawn:
        kept &= ~np.isin(table, node.blocks[group])
    own: Ids = table[(arena.refs[group][table] == 1) & ~kept]
    return own
