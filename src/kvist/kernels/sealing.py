"""Attention over two segments of each sequence: sealed runs in a format of their own, and an open tail as computed.

::

    position   0 … 31 | 32 … 63 | 64 … 70        runs of 32 tokens
    stored     sealed | sealed  | tail           in the codecs of the format; in the type that is computed in
    seen       sealed | sealed  | tail           by a query at 70; one at 40 sees 0 … 31 sealed and 32 … 40 as computed

A step's tokens are stored in the tail, then whole runs of it are sealed, then queries attend to both, merged by
log-sum-exp (FlashInfer's cascade, arXiv:2501.01005). What a query sees follows from its position alone: prompts in
chunks, decoding, and what begins behind a shared prefix give the same answers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.attention import AttentionPlan, with_sinks
from kvist.kernels.decoding import Decode, LongTail, Tails, decode_segments
from kvist.kernels.dense import Scores, attend, merge
from kvist.kernels.paged import PagedAttention, PagedPlan
from kvist.kernels.sharing import SharedRun, shared_runs
from kvist.kernels.spans import Span, in_chunks, positions_of
from kvist.store.layouts import Gathering, Index, PagedKV

# Queries that share one mask, and keys and values gathered at a time, as in kvist.kernels.attention.
_TILE = 256
_DENSE_BYTES = 16 * 2**20


class SealedAttention:
    """Both segments of a group's layers as the compiled kernels see them.

    Args:
        body: of the sealed runs.
        tail: of the tail, by kernels of the same kind.
        layers: place of each layer in the group of the tail.
    """

    def __init__(self, body: PagedAttention, tail: PagedAttention, layers: Sequence[int]) -> None:
        self.body = body
        self.tail = tail
        self.layers = layers
        self.run = _run_of(body.store)

    def plan(self, spans: Sequence[Span], tails: Sequence[Span], *, further: Sequence[Any] = ()) -> PagedPlan:
        """Plan a step; the spans are the same, with the tables of sealed runs and with those of tails.

        ``further`` segments, of :meth:`PagedAttention.segment`, are what the rows see besides.
        """
        body, tail, run = self.body, self.tail, self.run
        sizes = body.store.block_tokens, tail.store.block_tokens
        runs = _shared(spans, run, sizes[0])
        pieces = in_chunks(tails, run, sizes[1])
        return body.plan_of(
            [
                body.segment(spans, positions_of(spans) // run * run - 1),
                tail.segment(pieces, positions_of(pieces), self.layers),
                *further,
            ],
            runs=runs,
            open_segment=1,
            sealed=sealed_tokens(spans, tails, run, sizes),
        )


def sealed_tokens(spans: Sequence[Span], tails: Sequence[Span], run: int, sizes: tuple[int, int]) -> Index:
    """The tokens of the runs that a step completes.

    Args:
        spans: with the tables of sealed runs.
        tails: with those of tails.
        run: tokens.
        sizes: tokens of a block of either.

    Returns:
        int64 ``[tokens, 4]``: block and slot in the tail, block and slot among the sealed.
    """
    found = []
    for span, tail in zip(spans, tails, strict=True):
        tokens = np.arange(span.start // run * run, (span.start + span.count) // run * run)
        if tokens.size:
            rows = (
                tail.table[tokens // sizes[1]],
                tokens % sizes[1],
                span.table[tokens // sizes[0]],
                tokens % sizes[0],
            )
            found.append(np.stack(rows, 1))
    return np.concatenate(found) if found else np.empty((0, 4), np.int64)


class SealedMemory:
    """Both segments of a group's layers as PyTorch's operators read them.

    Args:
        body: store of the sealed runs.
        tail: store of the tail.
        layers: place of each layer in the group of the tail.
        scores: scale and cap.
        dtype: of queries, keys and values.
    """

    def __init__(self, body: PagedKV, tail: PagedKV, layers: Sequence[int], scores: Scores, dtype: torch.dtype) -> None:
        self.body = body
        self.tail = tail
        self.layers = layers
        self.scores = scores
        self.dtype = dtype

    def plan(self, spans: Sequence[Span], tails: Sequence[Span]) -> "SealedPlan":
        """Plan a step; as :meth:`SealedAttention.plan`."""
        return SealedPlan(self, spans, tails)


class SealedPlan:
    """What the queries of one step see in both segments; the same verb as :class:`AttentionPlan`."""

    def __init__(self, memory: SealedMemory, spans: Sequence[Span], tails: Sequence[Span]) -> None:
        self.memory = memory
        body, tail, dtype = memory.body, memory.tail, memory.dtype
        run, size = _run_of(body), body.block_tokens
        self.tail = AttentionPlan(tail, tails, memory.scores, dtype)
        moved = sealed_tokens(spans, tails, run, (size, tail.block_tokens))
        self.sealed: Gathering | None = None
        if len(moved):
            # Tokens of a block lie beside each other, block after block.
            self.sealed = Gathering(tail, moved[:: tail.block_tokens, 0][None], dtype)
            self.where = body.vectors(moved[:, 2], moved[:, 3])
        self.parts: list[Tails | LongTail | _Sealed] = []
        runs = _shared(spans, run, size)
        shared = [0] * len(spans)
        rows = np.concatenate(([0], np.cumsum([span.count for span in spans]))).tolist()
        for each in runs:
            shared[each.first_span : each.end_span] = [each.end_block * size] * (each.end_span - each.first_span)
        decodes = []
        for index, span in enumerate(spans):
            begin, behind = shared[index], span.start // run * run
            if span.count == 1:
                if behind > begin:
                    decodes.append(Decode(row=rows[index], table=span.table, begin=begin, end=behind))
                continue
            self._past(span.table[begin // size : -(-behind // size)], behind - begin, rows[index], rows[index + 1])
            first = behind + run
            for tile in range(max(first, span.start), span.start + span.count, _TILE):
                end = min(tile + _TILE, span.start + span.count)
                positions = np.arange(tile, end) // run * run - behind
                blocks = span.table[behind // size : -(-(behind + int(positions[-1])) // size)]
                row = rows[index] + tile - span.start
                places = slice(behind % size, behind % size + int(positions[-1]))
                self.parts.append(_Sealed(self, blocks, places, slice(row, row + end - tile), positions))
        self.parts += decode_segments(decodes, body, memory.scores, dtype, rows[-1])
        for each in runs:
            blocks = spans[each.first_span].table[each.first_block : each.end_block]
            self._past(blocks, len(blocks) * size, rows[each.first_span], rows[each.end_span])

    def _past(self, blocks: Index, tokens: int, row: int, end: int) -> None:
        """Keys that all of some rows see."""
        size = self.memory.body.block_tokens
        step = max(1, _DENSE_BYTES // self.memory.body.token_bytes // size)
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            places = slice(0, min(len(part) * size, tokens - first * size))
            self.parts.append(_Sealed(self, part, places, slice(row, end)))

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store a layer's new keys and values, seal whole runs, then attend; as :meth:`AttentionPlan.attend`."""
        return with_sinks(*self._segments(slot, q, kv, merged=sinks is not None), sinks)

    def merging(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """The same without sinks, to what is merged with more; as :meth:`AttentionPlan.merging`."""
        return self._segments(slot, q, kv, merged=True)

    def _segments(self, slot: int, q: Tensor, kv: Tensor, *, merged: bool) -> tuple[Tensor, Tensor]:
        memory, tail_slot = self.memory, self.memory.layers[slot]
        memory.tail.append(tail_slot, kv, self.tail.where)
        if self.sealed is not None:
            keys, values = self.sealed.read(tail_slot)
            memory.body.append(slot, torch.cat((keys[0], values[0])).transpose(0, 1), self.where)
        kept = bool(self.parts) or merged
        out, lse = self.tail.segments(tail_slot, q, memory.tail.rounded(kv), merged=kept)
        if self.parts:
            q, out, lse = q.contiguous(), out.contiguous(), lse.contiguous()
        for number, part in enumerate(self.parts):
            more, more_lse = part.run(slot, q, kv)
            final = number + 1 == len(self.parts) and not merged
            if isinstance(part.rows, slice):
                merge(out[part.rows], lse[part.rows], more, more_lse, final=final)
                continue
            some, some_lse = out[part.rows], lse[part.rows]
            merge(some, some_lse, more, more_lse, final=final)
            out[part.rows], lse[part.rows] = some, some_lse
        return out, lse


class _Sealed:
    """Sealed keys that some rows see: all of them, or each row the first so many."""

    def __init__(self, plan: SealedPlan, blocks: Index, places: slice, rows: slice, seen: Index | None = None) -> None:
        memory = plan.memory
        self.scores = memory.scores
        self.rows: slice | Tensor = rows
        self.gathering = Gathering(memory.body, blocks[None], memory.dtype, places)
        self.mask: Tensor | None = None
        tokens = places.stop - places.start
        if seen is not None and (seen < tokens).any():
            hidden = torch.from_numpy(np.arange(tokens) >= seen[:, None])
            self.mask = torch.zeros(hidden.shape, dtype=memory.dtype).masked_fill_(hidden, float("-inf"))[None, None]

    def run(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.gathering.read(slot)
        part = q[self.rows]
        count, repeats, heads, dim = part.shape
        if self.mask is None:
            out, lse = attend(part.reshape(1, count * repeats, heads, dim).transpose(1, 2), keys, values, self.scores)
            return (
                out.transpose(1, 2).reshape(count, repeats, heads, dim),
                lse.transpose(1, 2).reshape(count, repeats, heads),
            )
        keys, values = keys.expand(repeats, -1, -1, -1), values.expand(repeats, -1, -1, -1)
        out, lse = attend(part.permute(1, 2, 0, 3), keys, values, self.scores, mask=self.mask)
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _run_of(body: PagedKV) -> int:
    run = body.group.attention.sealed
    assert run is not None, "the store holds sealed runs"
    return run


def _shared(spans: Sequence[Span], run: int, block_tokens: int) -> list[SharedRun]:
    """Runs of blocks that all queries of several sequences see sealed."""
    return shared_runs([span.table for span in spans], [span.start // run * run // block_tokens for span in spans])
