"""Two sequences of one: what a fork shares with its twin, and what is copied."""

from typing import TYPE_CHECKING

from kvist.cache.arena import Ids
from kvist.cache.groups import Group
from kvist.cache.sequence import NO_BLOCKS, BlockCopy, Fork, Sequence

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


def fork(manager: "CacheManager", sequence: Sequence) -> Fork | None:
    """:meth:`CacheManager.fork`."""
    length = sequence.length
    if any(
        group.lifetime != "lead" and table.size > group.all_blocks(length - gone)
        for group, table, gone in zip(manager.groups, sequence.tables, sequence.dropped, strict=True)
    ):
        raise ValueError("a sequence forks between steps, when nothing that it reserved is in flight")
    wanted = [
        table.size - max(gone, _shareable(manager, group, table, length, dropped))
        for group, table, gone, dropped in zip(
            manager.groups, sequence.tables, sequence.given_back, sequence.dropped, strict=True
        )
    ]
    if any(wanted) and not manager.arena.could_take(wanted, [NO_BLOCKS] * len(manager.groups)):
        return None
    twin = Sequence(sequence.known().copy(), sequence.key, len(manager.groups))
    twin.pruning, twin.pruned, twin.dropped = sequence.pruning, sequence.pruned, list(sequence.dropped)
    twin.prompt_size, twin.apart = sequence.prompt_size, sequence.apart
    twin.length, twin.published, twin.hit_tokens = (
        sequence.length,
        sequence.published,
        sequence.hit_tokens,
    )
    twin.given_back = list(sequence.given_back)
    twin.node, twin.begun, twin.room = sequence.node, sequence.begun, sequence.room
    twin.parting, twin.pinned, twin.lead = sequence.parting, sequence.pinned, sequence.lead
    manager.tree.hold(twin.node)
    for group, table in enumerate(sequence.tables):
        manager.arena.share(group, table[sequence.given_back[group] : table.size - wanted[group]])
        twin.tables[group] = table.copy()
    manager.free_up(wanted)
    copies = []
    for group, count in enumerate(wanted):
        if count:
            table = twin.tables[group]
            sources = table[-count:].tolist()
            table[-count:] = manager.arena.take(group, count)
            copies += [BlockCopy(group, *pair) for pair in zip(sources, table[-count:].tolist(), strict=True)]
    return Fork(twin, [*manager.take_moves(), *copies])


def _shareable(manager: "CacheManager", group: Group, table: Ids, length: int, dropped: int) -> int:
    """Leading blocks that are written to no more, and that twins which part will not both give the tree."""
    match group.lifetime:
        case "state":
            return 0
        case "cross" | "lead":
            return table.size
        case _ if dropped:
            return (length - dropped) // group.block_tokens
        case _:
            return length // manager.unit_tokens * manager.unit_tokens // group.block_tokens
