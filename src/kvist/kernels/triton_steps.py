"""A step's attention cut into pieces for the GPU's programs; arithmetic on the host, once a step and group.

::

    shared run       ─┬─ piece ── piece ── …   by the queries of all sequences that begin with it
    rest of a context ┴─ piece ── piece ── …   by its own, up to the query itself

Long contexts are cut so that there are as many pieces as run at once. What several pieces attend for one query is
merged; a piece that is alone writes the result itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvist.kernels.sharing import shared_runs
from kvist.kernels.spans import Span
from kvist.store.layouts import Index

# Keys below which a piece does not repay its start and the merge.
_LEAST_KEYS = 256
# Queries of a shared run come after all of it.
_BEHIND_ALL = 1 << 30

Pieces = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the programs of one step do.

    Attributes:
        tables: block ids of all sequences, one after the other; -1 for those that are gone.
        pieces: by the rows of a piece at most, ``[pieces, 9]`` as :mod:`kvist.kernels.triton_attention` has them.
        partial_rows: results of pieces that are not alone.
        rows: the step's row of each token whose pieces are merged.
        bounds: ``[tokens + 1]``: which sources are its own.
        sources: first partial row of a piece's results for a token.
    """

    tables: Index
    pieces: dict[int, Pieces]
    partial_rows: int
    rows: Pieces
    bounds: Pieces
    sources: Pieces


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Queries that see the same keys but for what follows each of them: whole tokens, or some heads of one."""

    row: int
    first_token: int
    end_token: int
    folds: tuple[tuple[int, int], ...]
    position: int
    table: int
    first: int
    end: int
    size: int


def cut(
    spans: Sequence[Span],
    *,
    block_tokens: int,
    repeats: int,
    window: int | None,
    sizes: tuple[int, int],
    step: int,
    programs: int,
) -> Steps:
    """Cut a step.

    Args:
        spans: in the order of the step's rows; to be found as shared, runs must be neighbours.
        block_tokens: of a block.
        repeats: query heads of a KV head.
        window: tokens that a query sees, itself included.
        sizes: rows of a piece of few and of many queries.
        step: keys attended at a time.
        programs: that run at once, over the number of KV heads.
    """
    lengths = [len(span.table) for span in spans]
    begins = np.cumsum([0, *lengths]).tolist()
    rows = np.cumsum([0, *(span.count for span in spans)]).tolist()
    runs = []
    if window is None:
        runs = shared_runs([span.table for span in spans], [span.start // block_tokens for span in spans])
    shared = [0] * len(spans)
    tiles: list[_Tile] = []
    for run in runs:
        shared[run.first_span : run.end_span] = [run.end_block] * (run.end_span - run.first_span)
        row, count = rows[run.first_span], rows[run.end_span] - rows[run.first_span]
        for first_token, end_token, folds, size in _queries(count, repeats, sizes):
            tiles.append(
                _Tile(
                    row=row, first_token=first_token, end_token=end_token, folds=folds, size=size,
                    position=_BEHIND_ALL, table=begins[run.first_span],
                    first=run.first_block * block_tokens, end=run.end_block * block_tokens,
                )
            )  # fmt: skip
    for index, span in enumerate(spans):
        for first_token, end_token, folds, size in _queries(span.count, repeats, sizes):
            first = shared[index] * block_tokens
            if window is not None:
                first = max(0, span.start + first_token - window + 1)
            tiles.append(
                _Tile(
                    row=rows[index], first_token=first_token, end_token=end_token, folds=folds, size=size,
                    position=span.start, table=begins[index], first=first, end=span.start + end_token,
                )
            )  # fmt: skip
    return _number(
        tiles,
        np.concatenate([span.table for span in spans]),
        tokens=rows[-1],
        repeats=repeats,
        step=step,
        most=_most_keys(tiles, step, programs),
    )


def _queries(
    count: int, repeats: int, sizes: tuple[int, int]
) -> list[tuple[int, int, tuple[tuple[int, int], ...], int]]:
    """Cut ``count`` tokens into tiles of whole tokens or, where one has more rows, of one token in several parts."""
    few, many = sizes
    size = few if count * repeats <= few else many
    each = max(1, size // repeats)
    tiles = []
    for first in range(0, count, each):
        end = min(first + each, count)
        folds = tuple((fold, min(fold + size, end * repeats)) for fold in range(first * repeats, end * repeats, size))
        tiles.append((first, end, folds, size))
    return tiles


def _most_keys(tiles: Sequence[_Tile], step: int, programs: int) -> int:
    """Keys of a piece at most, so that as many pieces as run at once share the work."""
    parts = sum(len(tile.folds) for tile in tiles)
    if parts >= programs:
        return _BEHIND_ALL
    work = sum((tile.end - tile.first) * len(tile.folds) for tile in tiles)
    return max(_LEAST_KEYS, -(-work // programs // step) * step)


def _number(tiles: Sequence[_Tile], tables: Index, *, tokens: int, repeats: int, step: int, most: int) -> Steps:
    # How many pieces attend for each row decides which of them are alone.
    counts = np.zeros(tokens, np.int64)
    cuts = []
    for tile in tiles:
        keys = tile.end - tile.first
        each = -(-keys // -(-keys // most) // step) * step
        # From the second on they begin where kernels do.
        bounds = [tile.first, *range(tile.first // step * step + each, tile.end, each), tile.end]
        cuts.append(bounds)
        counts[tile.row + tile.first_token : tile.row + tile.end_token] += len(bounds) - 1
    found: dict[int, list[tuple[int, ...]]] = {}
    sources: list[list[int]] = [[] for _ in range(tokens)]
    partial = 0
    for tile, bounds in zip(tiles, cuts, strict=True):
        alone = int(counts[tile.row + tile.first_token]) == 1
        for first, end in pairwise(bounds):
            for begin, stop in tile.folds:
                found.setdefault(tile.size, []).append(
                    (
                        tile.row, begin, stop, tile.position, tile.table, first, end,
                        partial - tile.first_token * repeats, int(alone),
                    )
                )  # fmt: skip
            if alone:
                continue
            for token in range(tile.first_token, tile.end_token):
                sources[tile.row + token].append(partial + (token - tile.first_token) * repeats)
            partial += (tile.end_token - tile.first_token) * repeats
    merged = [row for row, own in enumerate(sources) if own]
    return Steps(
        tables=tables,
        pieces={size: np.array(pieces, np.int32) for size, pieces in found.items()},
        partial_rows=partial,
        rows=np.array(merged, np.int32),
        bounds=np.cumsum([0, *(len(sources[row]) for row in merged)]).astype(np.int32),
        sources=np.array([source for row in merged for source in sources[row]], np.int32),
    )
