"""Which sequences of a step begin with the same blocks, so that one gather and one product serve all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A shared run costs a few more operator calls a layer; fewer blocks saved than this do not repay them.
_WORTH_BLOCKS = 16


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """Blocks ``first_block … end_block - 1``, equal in the tables of spans ``first_span … end_span - 1``."""

    first_span: int
    end_span: int
    first_block: int
    end_block: int


def shared_runs(tables: Sequence[npt.NDArray[np.int64]], limits: Sequence[int]) -> list[SharedRun]:
    """Find the runs that neighbours share.

    Args:
        tables: block ids; sequences that share must be neighbours, see :func:`sharing_order`.
        limits: leading blocks of each that may be shared: whole, and stored before its own tokens.

    Returns:
        Runs, outer ones first; those of one sequence follow each other without a gap.
    """
    if len(tables) < 2:
        return []
    common = [
        _common_blocks(tables[index - 1], tables[index], min(limits[index - 1], limits[index]))
        for index in range(1, len(tables))
    ]
    found: list[SharedRun] = []
    # Spans [first, end) share `depth` blocks that runs already cover.
    pending = [(0, len(tables), 0)]
    while pending:
        first, end, depth = pending.pop()
        if end - first < 2:
            continue
        inner = common[first : end - 1]
        shortest = min(inner)
        covered = depth
        if (shortest - depth) * (end - first - 1) >= _WORTH_BLOCKS:
            found.append(SharedRun(first_span=first, end_span=end, first_block=depth, end_block=shortest))
            covered = shortest
        cuts = [first + 1 + place for place, blocks in enumerate(inner) if blocks == shortest]
        pending += [(begin, stop, covered) for begin, stop in zip([first, *cuts], [*cuts, end], strict=True)]
    return found


def sharing_order(tables: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """An order in which sequences that begin with the same blocks are neighbours, and else longer ones come first."""
    families: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        families.setdefault(int(table[0]) if table.size else -1, []).append(index)
    ordered = sorted(families.values(), key=lambda family: -max(len(tables[index]) for index in family))
    for family in ordered:
        if len(family) > 1:
            family.sort(key=lambda index: tables[index].tobytes())
    return [index for family in ordered for index in family]


def _common_blocks(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64], limit: int) -> int:
    if limit == 0 or one[0] != other[0]:
        return 0
    differs = np.flatnonzero(one[:limit] != other[:limit])
    return int(differs[0]) if differs.size else limit
