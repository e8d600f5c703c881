"""A picture of the cache, as JSON: where every block is, what the prefix tree knows and what the tiers hold.

``bytes`` adds up to the arena: free, cached (kept by the prefix tree alone), held (tokens of running sequences) and
waste (slab tails, and the unfilled ends of held blocks).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvist.cache.reclaim import Node

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager
    from kvist.cache.sequence import Sequence

MOST_NODES = 300
_TEXT_TOKENS = 16
_STATES = np.array(list("fchx"))


def snapshot(
    manager: "CacheManager",
    sequences: Mapping[str, "Sequence"],
    text_of: Callable[[list[int]], str] | None = None,
) -> dict[str, Any]:
    """Describe the arena, its groups and the prefix tree.

    Args:
        manager: whose cache it is.
        sequences: the running ones, by the id to call them.
        text_of: decodes the first tokens of a run of the tree, for people.
    """
    arena, layout = manager.arena, manager.layout
    groups = [_group(manager, index, sequences) for index in range(len(manager.groups))]
    lent_slabs = layout.num_slabs - arena.free_slabs
    used_in_slabs = sum(arena.lent(index) * size for index, size in enumerate(layout.block_bytes))
    tails = lent_slabs * layout.slab_bytes - used_in_slabs
    unfilled = sum(unfilled_bytes(manager, sequence) for sequence in sequences.values())
    cached = sum(group["cached"] * group["block_bytes"] for group in groups)
    free = sum(group["free"] * group["block_bytes"] for group in groups)
    held = sum(group["held"] * group["block_bytes"] for group in groups)
    waste = tails + unfilled
    return {
        "arena": {
            "bytes": layout.total_bytes,
            "slab_bytes": layout.slab_bytes,
            "slabs": layout.num_slabs,
            "slabs_free": arena.free_slabs,
        },
        "bytes": {
            "free": arena.free_slabs * layout.slab_bytes + free,
            "cached": cached,
            "held": held - unfilled,
            "waste": waste,
        },
        "groups": groups,
        "tree": _tree(manager, text_of),
        "tiers": _tiers(manager),
    }


def _tiers(manager: "CacheManager") -> list[dict[str, Any]]:
    if manager.tiers is None:
        return []
    return [
        {
            "name": held.tier,
            "bytes": tier.capacity_bytes,
            "cached": held.cached_bytes,
            "swapped": held.swapped_bytes,
            "free": tier.capacity_bytes - held.cached_bytes - held.swapped_bytes,
            "blocks": held.blocks,
        }
        for tier, held in zip(manager.tiers.tiers, manager.tiers.occupied(), strict=True)
    ]


def unfilled_bytes(manager: "CacheManager", sequence: "Sequence") -> int:
    """Bytes in a sequence's blocks beyond its last known token."""
    return sum(
        group.unfilled_bytes(table.size, sequence.size - gone)
        for group, table, gone in zip(manager.groups, sequence.tables, sequence.dropped, strict=True)
    )


def _group(manager: "CacheManager", index: int, sequences: Mapping[str, "Sequence"]) -> dict[str, Any]:
    arena, group = manager.arena, manager.groups[index]
    held = arena.refs[index] > 0
    state = np.where(held, 2, np.where(arena.kept[index], 1, 0))
    state[np.repeat(arena.owner_of_slabs() != index, manager.layout.blocks_per_slab[index])] = 3
    return {
        "name": group.name,
        "layers": len(group.layers),
        "window": group.window,
        "block_tokens": group.block_tokens,
        "block_bytes": group.block_bytes,
        "blocks_total": manager.layout.total_blocks(index),
        "free": arena.free(index),
        "cached": arena.cached(index),
        "held": arena.held(index),
        "block_states": "".join(f"{count}{_STATES[state[first]]}" for first, count in _runs(np.diff(state) != 0)),
        "held_by": [
            [int(ids[first]), count, name]
            for name, sequence in sequences.items()
            for ids in [sequence.tables[index][sequence.given_back[index] :]]
            for first, count in _runs(np.diff(ids) != 1, empty=not ids.size)
        ],
    }


def _runs(breaks: npt.NDArray[np.bool_], *, empty: bool = False) -> Iterable[tuple[int, int]]:
    """First index and length of the runs of an array, from where its neighbours part."""
    if empty:
        return []
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    ends = [*starts[1:], breaks.size + 1]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _salted(manager: "CacheManager", node: Node) -> bool:
    """Whether a tenant keeps this prefix to itself: its text is nobody else's to read."""
    return bool(manager.tree.key_of(node).salt)


def _tree(manager: "CacheManager", text_of: Callable[[list[int]], str] | None) -> dict[str, Any]:
    nodes = sorted(manager.tree.nodes(), key=lambda node: node.tokens.size, reverse=True)
    return {
        "tokens": manager.tree.tokens,
        "nodes": [
            {
                "id": node.id,
                "parent": node.parent.id if node.parent and node.parent.parent else None,
                "tokens": int(node.tokens.size),
                "users": node.users,
                "last_used": node.last_used,
                "text": text_of([token for token in node.tokens[:_TEXT_TOKENS].tolist() if token >= 0])
                if text_of and not _salted(manager, node)
                else None,
                "pinned": bool(node.tokens[0] < 0),
            }
            for node in nodes[:MOST_NODES]
        ],
    }
