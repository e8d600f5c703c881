"""What a step asks of attention: each sequence's new tokens and where its blocks are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvist.store.layouts import Index


@dataclass(frozen=True, kw_only=True)
class Span:
    """One sequence's part of a step: ``count`` tokens from position ``start`` on.

    Attributes:
        table: its block ids from position 0; those behind a window may be -1.
        start: first position.
        count: tokens.
        drawn: float32 ``[layers, kv_heads, room]``, room for all positions so far: to which attention adds what its
            queries weigh each key, of memories whose ``draws`` is true; None: nobody asks.
    """

    table: Index
    start: int
    count: int
    drawn: Tensor | None = None


def positions_of(spans: Sequence[Span]) -> Index:
    """The position of each row of a step, int64 ``[rows]``."""
    counts = np.array([span.count for span in spans])
    starts = np.array([span.start for span in spans])
    positions: Index = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return positions


def in_chunks(spans: Sequence[Span], chunk: int, block_tokens: int) -> list[Span]:
    """Cut spans where chunks of attention begin, and count their positions and blocks from there.

    No query sees anything before its chunk: each piece is what a sequence of that one chunk would ask.

    Args:
        spans: in the order of the step's rows, which the pieces keep.
        chunk: tokens, whole blocks.
        block_tokens: of a block.
    """
    pieces: list[Span] = []
    for span in spans:
        end = span.start + span.count
        for first in range(span.start // chunk * chunk, end, chunk):
            begin, stop = max(first, span.start), min(first + chunk, end)
            blocks = span.table[first // block_tokens : -(-stop // block_tokens)]
            pieces.append(Span(table=blocks, start=begin - first, count=stop - begin))
    return pieces
