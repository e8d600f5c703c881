"""What stands before sequences in blocks and a format of its own: a segment that none of them owns.

A lead is pinned before sequences name it. Each that has begun refers to its blocks, which no step writes to; their own
slots begin at 0, and their positions behind it. The prefix tree knows nothing of leads: what sequences share behind one
they share under their key, which says what it is and how it is stored.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvist.cache.arena import Ids
from kvist.cache.lead_groups import lead_blocks, lead_unit
from kvist.errors import DoesNotFit, InputError
from kvist.units import format_size

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


class Lead:
    """What stands before sequences.

    Attributes:
        tokens: positions that it takes; what stands behind it begins there.
        tables: per group, int64 ``[blocks]``; none but of the groups of leads.
    """

    __slots__ = ("tables", "tokens")

    def __init__(self, tokens: int, tables: list[Ids]) -> None:
        self.tokens = tokens
        self.tables = tables

    def put_before(self, tables: list[Ids]) -> None:
        """Let tables that a sequence is about to have refer to its blocks."""
        for group, table in enumerate(self.tables):
            if table.size:
                tables[group] = table


def pin_lead(manager: "CacheManager", count: int, behind: Lead | None) -> Lead:
    """:meth:`kvist.cache.pinning.Pins.pin` where cartridges have a format of their own."""
    arena, sizes = manager.arena, manager.layout.block_bytes
    unit = lead_unit(manager.groups)
    if count % unit:
        raise InputError(
            f"cartridge: {count} tokens are no whole blocks of {unit}; choose blocks of a divisor of {count}",
            key="cartridge",
        )
    empty = np.empty(0, np.int64)
    wanted = [*lead_blocks(manager.groups, count)]
    if not arena.could_take(wanted, [empty] * len(wanted)):
        needed = sum(blocks * size for blocks, size in zip(wanted, sizes, strict=True))
        raise DoesNotFit(
            f"memory: a cartridge of {count} tokens takes {format_size(needed)}, which the cache of "
            f"{format_size(manager.layout.total_bytes)} does not have now; give it more"
        )
    shared = [empty] * len(wanted) if behind is None else behind.tables
    for group, table in enumerate(shared):
        arena.share(group, table)
    manager.free_up(wanted)
    taken = [arena.take(group, blocks) if blocks else empty for group, blocks in enumerate(wanted)]
    tables = [np.concatenate(both) for both in zip(shared, taken, strict=True)]
    return Lead(count if behind is None else behind.tokens + count, tables)
