"""Decodes: one query a sequence, over that sequence's own blocks.

Sequences of similar length share one gather and one product, padded under a mask; a lone long one is cut in pieces, so
that what is gathered stays in the caches until it is read, and every thread has its share of the heads.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.dense import Scores, attend, merge_all
from kvist.store.layouts import Gathering, Index, PagedVectors

# Keys and values gathered at a time: while they stay in the caches of the cores, reading them again is cheap.
_GATHER_BYTES = 2 * 2**20
# Padding that is cheaper than another bucket, in tokens.
_PADDING_TOKENS = 256
# A lone sequence is cut among the threads when each part has as many tokens.
_PART_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One token's private tail: positions ``begin … end - 1``, its own included; ``row`` is its place in the step."""

    row: int
    table: Index
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.end - self.begin


def decode_segments(
    decodes: list[Decode], store: PagedVectors, scores: Scores, dtype: torch.dtype, rows: int
) -> "list[Tails | LongTail]":
    """Group decodes of similar length; inside a group rows keep their order.

    Args:
        rows: of the whole step.
    """
    most = max(1, _GATHER_BYTES // store.token_bytes)
    buckets: list[list[Decode]] = []
    padding = 0
    for decode in sorted(decodes, key=lambda decode: -decode.length):
        if buckets:
            longest = buckets[-1][0].length
            padding += longest - decode.length
            if padding <= _PADDING_TOKENS and (len(buckets[-1]) + 1) * longest <= most:
                buckets[-1].append(decode)
                continue
        buckets.append([decode])
        padding = 0
    segments: list[Tails | LongTail] = []
    for bucket in buckets:
        bucket.sort(key=lambda decode: decode.row)
        if len(bucket) == 1 and LongTail.suits(bucket[0], store, dtype):
            segments.append(LongTail(bucket[0], store, scores, dtype))
        else:
            segments.append(Tails(bucket, store, scores, dtype, rows))
    return segments


class Tails:
    """Decodes of similar length, each over its own blocks."""

    def __init__(
        self, bucket: list[Decode], store: PagedVectors, scores: Scores, dtype: torch.dtype, step_rows: int
    ) -> None:
        self.scores = scores
        size = store.block_tokens
        rows = [decode.row for decode in bucket]
        self.rows: slice | Tensor = slice(rows[0], rows[-1] + 1)
        if rows[-1] + 1 - rows[0] != len(rows):
            self.rows = torch.tensor(rows)
        self.all_rows = len(rows) == step_rows
        begins = np.array([decode.begin for decode in bucket])
        ends = np.array([decode.end for decode in bucket])
        starts = begins // size
        stops = -(-ends // size)
        blocks = np.empty((len(bucket), int((stops - starts).max())), np.int64)
        for index, decode in enumerate(bucket):
            held = stops[index] - starts[index]
            blocks[index, :held] = decode.table[starts[index] : stops[index]]
            # Any real block will do behind the end; its scores are masked.
            blocks[index, held:] = decode.table[stops[index] - 1]
        lead = begins - starts * size
        lengths = ends - begins
        self.mask: Tensor | None = None
        self.hidden: Tensor | None = None
        if (lengths == lengths[0]).all() and (lead == lead[0]).all():
            self.gathering = Gathering(store, blocks, dtype, slice(int(lead[0]), int(lead[0] + lengths[0])))
            return
        self.gathering = Gathering(store, blocks, dtype)
        places = np.arange(blocks.shape[1] * size)
        seen = (places >= lead[:, None]) & (places < (lead + lengths)[:, None])
        hidden = torch.from_numpy(~seen)[:, None, None, :]
        self.mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if not store.plain:
            # Bytes once written as another type may read as NaN, which no mask silences.
            self.hidden = hidden.transpose(-1, -2)

    def run(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Attend in one layer: output ``[rows, repeats, kv_heads, dim]`` and log-sum-exp."""
        keys, values = self.gathering.read(slot)
        if self.hidden is not None:
            keys, values = keys.masked_fill(self.hidden, 0), values.masked_fill(self.hidden, 0)
        if not self.all_rows:
            q = q[self.rows] if isinstance(self.rows, slice) else q.index_select(0, self.rows)
        out, lse = attend(q.transpose(1, 2), keys, values, self.scores, mask=self.mask)
        return out.transpose(1, 2), lse.transpose(1, 2)


class LongTail:
    """A lone decode over many tokens: pieces gathered one after another, each cut in parts that threads share."""

    def __init__(self, decode: Decode, store: PagedVectors, scores: Scores, dtype: torch.dtype) -> None:
        self.scores = scores
        self.rows: slice | Tensor = slice(decode.row, decode.row + 1)
        size = store.block_tokens
        blocks = decode.table[decode.begin // size : -(-decode.end // size)]
        count = -(-decode.length * store.token_bytes // _GATHER_BYTES)
        self.parts = _parts(store, decode.length // count)
        step = -(-len(blocks) // count)
        self.pieces = [
            _Piece(store, blocks[first : first + step], decode.length - first * size, self.parts, dtype)
            for first in range(0, len(blocks), step)
        ]

    @staticmethod
    def suits(decode: Decode, store: PagedVectors, dtype: torch.dtype) -> bool:
        """Whether cutting is possible, and worth its extra operators."""
        plain = store.uniform and store.parts[0].dtype == dtype and decode.begin % store.block_tokens == 0
        long = decode.length * store.token_bytes > _GATHER_BYTES
        return plain and (long or _parts(store, decode.length) > 1)

    def run(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Attend in one layer: output ``[1, repeats, kv_heads, dim]`` and log-sum-exp."""
        q = q[self.rows].transpose(1, 2)
        results = []
        for piece in self.pieces:
            piece.gathering.read(slot)
            parts = q.expand(piece.parts, -1, -1, -1)
            results.append(attend(parts, piece.keys, piece.values, self.scores, mask=piece.mask))
        if len(results) == 1:
            out, lse = results[0]
        else:
            out, lse = (torch.cat(side) for side in zip(*results, strict=True))
        out, lse = merge_all(out, lse)
        return out.transpose(1, 2), lse.transpose(1, 2)


class _Piece:
    """Some blocks of one sequence, viewed as a batch of equal parts; the last part may end in hidden slots."""

    def __init__(self, store: PagedVectors, blocks: Index, left: int, parts: int, dtype: torch.dtype) -> None:
        held = min(len(blocks) * store.block_tokens, left)
        # A part must hold at least one token: the mean of none is not a number.
        self.parts = parts = parts if (parts - 1) * -(-held // parts) < held else 1
        part = -(-held // parts)
        self.gathering = Gathering(store, blocks[None], dtype)

        def cut(whole: Tensor) -> Tensor:
            shape = (parts, store.kv_heads, part, store.dim)
            return whole.as_strided(shape, (part * store.dim, whole.stride(1), store.dim, 1), whole.storage_offset())

        self.keys, self.values = cut(self.gathering.keys), cut(self.gathering.values)
        self.mask: Tensor | None = None
        if held < part * parts:
            self.mask = torch.zeros(parts, 1, 1, part, dtype=dtype)
            self.mask.view(-1)[held:] = float("-inf")


def _parts(store: PagedVectors, tokens: int) -> int:
    """In how many parts ``tokens`` are cut, so that the heads of all parts divide among the threads.

    A power of two that divides a block: the slots that fill the last part up then lie in the sequence's own blocks.
    """
    threads, parts = torch.get_num_threads(), 1
    while (
        (store.kv_heads * parts) % threads
        and store.kv_heads * parts < 4 * threads
        and tokens >= 2 * parts * _PART_TOKENS
        and store.block_tokens % (2 * parts) == 0
    ):
        parts *= 2
    return parts
