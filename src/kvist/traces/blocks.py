"""Ids of prompts' blocks: made dense, made to name all tokens before them too, and their size found.

All over whole columns, so that millions of references take seconds. ``offsets`` are as of
:class:`kvist.traces.trace.Trace`.
"""

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int64]
# Sizes that traces use, likelier ones first.
_SIZES = (512, 256, 128, 64, 32, 16, 1024, 8, 2048, 4096)
# Of conversations whose turns name no blocks.
TURN_BLOCK = 16
_SLICE = 2**20


def chained(blocks: _Ids, offsets: _Ids) -> _Ids:
    """Number blocks 0, 1, 2 … in the order in which they first appear, one number for each block *after each prefix*.

    Ids that come after one predecessor only, as in every published trace, stay one; an id that is found after
    different ones becomes a block of its own after each.
    """
    ids = _in_order(blocks)
    if not ids.size:
        return ids
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    starts = offsets[:-1][np.diff(offsets) > 0]
    before[starts] = -1
    predecessor = np.empty(int(ids.max()) + 1, np.int64)
    predecessor[ids] = before
    if all(np.array_equal(predecessor[ids[piece]], before[piece]) for piece in _pieces(ids.size)):
        return ids
    return _in_order(_rechained(ids, offsets))


def _in_order(blocks: _Ids) -> _Ids:
    """Number ids in the order in which they first appear."""
    if not blocks.size:
        return blocks
    if _is_in_order(blocks):
        return blocks
    if blocks.min() < 0 or blocks.max() > 4 * blocks.size + 1024:
        _, blocks = np.unique(blocks, return_inverse=True)
    first = np.full(int(blocks.max()) + 1, -1, np.int64)
    for piece in reversed(_pieces(blocks.size)):
        # Of repeated indices the last is kept: in reverse order, the first appearance.
        first[blocks[piece][::-1]] = np.arange(piece.stop - 1, piece.start - 1, -1)
    used = np.flatnonzero(first >= 0)
    used = used[np.argsort(first[used], kind="stable")]
    number = first
    number[used] = np.arange(used.size)
    return number[blocks]


def _is_in_order(blocks: _Ids) -> bool:
    """Whether each id that is new is the next number."""
    known = -1
    for piece in _pieces(blocks.size):
        largest = np.maximum.accumulate(np.concatenate([[known], blocks[piece]]))
        if blocks[piece].min() < 0 or int(np.diff(largest).max()) > 1:
            return False
        known = int(largest[-1])
    return True


def _pieces(size: int) -> list[slice]:
    """Parts of a column, so that what is made of it on the way stays small."""
    return [slice(at, min(size, at + _SLICE)) for at in range(0, size, _SLICE)]


def _rechained(ids: _Ids, offsets: _Ids) -> _Ids:
    """An id for each block after each prefix: all first blocks, then all second ones, and so on."""
    counts = np.diff(offsets)
    order = np.argsort(-counts, kind="stable")
    starts, lengths = offsets[:-1][order], counts[order]
    new = np.empty_like(ids)
    above = np.zeros(order.size, np.int64)
    used, width = 0, int(ids.max()) + 1
    for depth in range(int(lengths[0])):
        alive = int(np.searchsorted(-lengths, -depth, side="left"))
        at = starts[:alive] + depth
        found, inverse = np.unique(above[:alive] * width + ids[at], return_inverse=True)
        new[at] = used + inverse
        above[:alive] = used + inverse + 1
        used += found.size
    return new


def block_tokens_of(prompts: _Ids, counts: _Ids) -> int | None:
    """Tokens of a block: the size by which more than half of the prompts have as many as they name.

    Args:
        prompts: tokens, of requests that name blocks.
        counts: blocks that they name.

    Returns:
        None where no size fits so many.
    """
    # Some traces leave the last, partly filled block out.
    for full in (False, True):
        fits = [int(np.count_nonzero((prompts // size if full else -(-prompts // size)) == counts)) for size in _SIZES]
        if 2 * max(fits) > prompts.size:
            return _SIZES[fits.index(max(fits))]
    return None


def clipped(blocks: _Ids, offsets: _Ids, most: _Ids) -> tuple[_Ids, _Ids]:
    """Leave out the blocks of each request beyond the first ``most``.

    Returns:
        Blocks and offsets.
    """
    counts = np.diff(offsets)
    if np.all(counts <= most):
        return blocks, offsets
    place = np.arange(blocks.size) - np.repeat(offsets[:-1], counts)
    kept = place < np.repeat(most, counts)
    return blocks[kept], offsets_of(np.minimum(counts, most))


def taken(blocks: _Ids, offsets: _Ids, order: _Ids) -> tuple[_Ids, _Ids]:
    """Blocks and offsets of the requests in another order, or of some of them."""
    counts = np.diff(offsets)[order]
    new = offsets_of(counts)
    return blocks[np.arange(int(new[-1])) + np.repeat(offsets[:-1][order] - new[:-1], counts)], new


def of_streams(streams: _Ids, prompts: _Ids) -> tuple[_Ids, _Ids]:
    """Name the full blocks of the prompts of conversations: turns of one stream begin with the same ones.

    Args:
        streams: which stream of tokens each prompt is the beginning of.
        prompts: tokens.

    Returns:
        Blocks of :data:`TURN_BLOCK` tokens, and offsets.
    """
    counts = prompts // TURN_BLOCK
    offsets = offsets_of(counts)
    longest = np.zeros(int(streams.max(initial=-1)) + 1, np.int64)
    np.maximum.at(longest, streams, counts)
    begins = np.cumsum(longest) - longest
    return np.arange(int(offsets[-1])) + np.repeat(begins[streams] - offsets[:-1], counts), offsets


def offsets_of(counts: _Ids) -> _Ids:
    """Where the blocks of each request begin, and the end of all: int64 ``[requests + 1]``."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
