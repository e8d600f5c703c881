"""The engine's attention: what a step's queries see, planned once a step and group, then run by every layer.

Each sequence's keys are a list of segments, attended one by one and merged by log-sum-exp::

    prompt chunk   shared run ─┬─ rest of its past ─ the chunk itself (causal, not read back from the cache)
    decode         shared run ─┘  private tail, its own token included

Chunks of attention (Llama 4) are sequences of their own: a step's spans are cut where one begins.

A run of blocks with which several sequences begin is attended once, by the queries of all of them: one dense
product without a mask. Private tails are attended in buckets of similar length. Windows have no shared runs: a
chunk's queries see a band, cut in tiles so that the work does not grow with the context.

Query heads come grouped as ``[tokens, repeats, kv_heads, dim]``: the queries that share a KV head then fold into the
length of the query without a copy, and keys are never repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.decoding import Decode, LongTail, Tails, decode_segments
from kvist.kernels.dense import Scores, attend, merge
from kvist.kernels.sharing import SharedRun, shared_runs
from kvist.kernels.spans import Span, in_chunks
from kvist.store.layouts import Gathering, Index, PagedVectors

# Past keys and values attended at a time by a chunk: a bound on memory, far above where speed changes.
_DENSE_BYTES = 16 * 2**20
# Queries that share one band of a window.
_TILE = 256


class AttentionPlan:
    """What the queries of one step see in one group of layers.

    Args:
        store: of the group.
        spans: in the order of the step's rows; to be found as shared, runs must be neighbours.
        scores: scale and cap.
        dtype: of queries, keys and values.
    """

    def __init__(self, store: PagedVectors, spans: Sequence[Span], scores: Scores, dtype: torch.dtype) -> None:
        self.store = store
        self.scores = scores
        self.dtype = dtype
        if store.group.chunk is not None:
            spans = in_chunks(spans, store.group.chunk, store.block_tokens)
        self.rows = np.concatenate(([0], np.cumsum([span.count for span in spans]))).tolist()
        self.tokens = self.rows[-1]
        self.where = new_vectors(store, spans)
        window = store.group.window
        runs: list[SharedRun] = []
        if window is None:
            limits = [span.start // store.block_tokens for span in spans]
            runs = shared_runs([span.table for span in spans], limits)
        shared = [0] * len(spans)
        for run in runs:
            shared[run.first_span : run.end_span] = [run.end_block] * (run.end_span - run.first_span)
        self.first: list[Tails | LongTail | _Own | _Band] = []
        self.others: list[Dense] = []
        decodes: list[Decode] = []
        for index, span in enumerate(spans):
            row, end = self.rows[index], self.rows[index + 1]
            if span.count == 1:
                begin = shared[index] * store.block_tokens
                if window is not None:
                    begin = max(0, span.start - window + 1)
                decodes.append(Decode(row=row, table=span.table, begin=begin, end=span.start + 1))
            elif window is not None and span.start + span.count > window:
                self.first.append(_Band(self, span, row, window))
            else:
                self.first.append(_Own(self, row, end))
                self._past(span, shared[index], row, end)
        self.first += decode_segments(decodes, store, scores, dtype, self.tokens)
        for run in runs:
            blocks = spans[run.first_span].table[run.first_block : run.end_block]
            self._dense(blocks, len(blocks) * store.block_tokens, self.rows[run.first_span], self.rows[run.end_span])

    def _past(self, span: Span, shared_blocks: int, row: int, end: int) -> None:
        """Everything before a chunk that it does not attend together with others."""
        size = self.store.block_tokens
        last = -(-span.start // size)
        self._dense(span.table[shared_blocks:last], span.start - shared_blocks * size, row, end)

    def _dense(self, blocks: Index, tokens: int, row: int, end: int) -> None:
        self.others += dense_parts(self.store, blocks, tokens, slice(row, end), self.scores, self.dtype)

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store a layer's new keys and values, then attend.

        Args:
            slot: the layer's place in the group.
            q: ``[tokens, repeats, kv_heads, dim]``, rotated.
            kv: ``[tokens, 2 x kv_heads, dim]``, rotated keys, then values.
            sinks: float32 ``[repeats, kv_heads]``: a score a head that takes part in the softmax and has no value.

        Returns:
            ``[tokens, repeats x kv_heads x dim]``.
        """
        self.store.append(slot, kv, self.where)
        return self.over(slot, q, self.store.rounded(kv), sinks)

    def merging(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Store and attend, as :meth:`attend` without sinks, to what is merged with more: as :meth:`segments`."""
        self.store.append(slot, kv, self.where)
        return self.segments(slot, q, self.store.rounded(kv), merged=True)

    def over(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend, as :meth:`attend`; keys and values are stored already, and ``kv`` are as they will be read."""
        return with_sinks(*self.segments(slot, q, kv, merged=sinks is not None), sinks)

    def segments(self, slot: int, q: Tensor, kv: Tensor, *, merged: bool) -> tuple[Tensor, Tensor]:
        """Attend, as :meth:`over`, without sinks.

        Args:
            merged: what comes out is merged with more, and so the log-sum-exp is wanted.

        Returns:
            ``[tokens, repeats, kv_heads, dim]`` and, where it is wanted, their log-sum-exp, without the last dimension.
        """
        kept = bool(self.others) or merged
        if len(self.first) == 1:
            out, lse = self.first[0].run(slot, q, kv)
        else:
            out = torch.empty(q.shape, dtype=q.dtype)
            lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
            for segment in self.first:
                part, part_lse = segment.run(slot, q, kv)
                if isinstance(segment.rows, slice):
                    out[segment.rows] = part
                    if kept:
                        lse[segment.rows] = part_lse
                else:
                    out.index_copy_(0, segment.rows, part)
                    if kept:
                        lse.index_copy_(0, segment.rows, part_lse)
        if self.others:
            q = q.contiguous()
            out = out.contiguous()
            for number, dense in enumerate(self.others):
                part, part_lse = dense.run(slot, q)
                final = number + 1 == len(self.others) and not merged
                merge(out[dense.rows], lse[dense.rows], part, part_lse, final=final)
        return out, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """What attention has made, ``[tokens, repeats x kv_heads x dim]``: sinks, where there are any, take their share.

    Args:
        out: ``[tokens, repeats, kv_heads, dim]``.
        lse: its log-sum-exp.
        sinks: as of :meth:`AttentionPlan.attend`.
    """
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype)
    return out.reshape(len(out), -1)


def new_vectors(store: PagedVectors, spans: Sequence[Span]) -> list[list[Tensor]]:
    """Where the new vectors of a step lie, as :meth:`PagedVectors.append` wants it."""
    size = store.block_tokens
    if all(span.count == 1 for span in spans):
        positions = np.array([span.start for span in spans])
        blocks = np.array([span.table[span.start // size] for span in spans])
    else:
        positions = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
        blocks = np.concatenate([span.table[np.arange(span.start, span.start + span.count) // size] for span in spans])
    return store.vectors(blocks, positions % size)


class PagedMemory:
    """One group's memory as PyTorch's operators read it.

    Args:
        store: of the group.
        scores: scale and cap.
        dtype: of queries, keys and values.
    """

    # Whether attention tells keys what they draw.
    draws = False

    def __init__(self, store: PagedVectors, scores: Scores, dtype: torch.dtype) -> None:
        self.store = store
        self.scores = scores
        self.dtype = dtype

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """Plan a step; its spans in the order of its rows."""
        return AttentionPlan(self.store, spans, self.scores, self.dtype)


def dense_parts(
    store: PagedVectors, blocks: Index, tokens: int, rows: slice, scores: Scores, dtype: torch.dtype
) -> "list[Dense]":
    """Keys that all queries of some rows see in full, as much at a time as is gathered at once.

    Args:
        store: where they are.
        blocks: whose first ``tokens`` they are.
        tokens: how many; none make no part.
        rows: of the step.
        scores: scale and cap.
        dtype: of queries, keys and values.
    """
    size = store.block_tokens
    step = max(1, _DENSE_BYTES // store.token_bytes // size)
    return [
        Dense(store, part, min(len(part) * size, tokens - first * size), rows, scores, dtype)
        for first in range(0, len(blocks), step)
        for part in [blocks[first : first + step]]
    ]


class Dense:
    """A part of :func:`dense_parts`."""

    def __init__(
        self, store: PagedVectors, blocks: Index, tokens: int, rows: slice, scores: Scores, dtype: torch.dtype
    ) -> None:
        self.rows = rows
        self.scores = scores
        self.gathering = Gathering(store, blocks[None], dtype, slice(tokens))

    def run(self, slot: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attend in one layer: output ``[rows, repeats, kv_heads, dim]`` and log-sum-exp.

        Args:
            slot: the layer's place in the group.
            q: of the whole step, contiguous.
        """
        keys, values = self.gathering.read(slot)
        part = q[self.rows]
        count, repeats, heads, dim = part.shape
        folded = part.view(1, count * repeats, heads, dim).transpose(1, 2)
        out, lse = attend(folded, keys, values, self.scores)
        return (
            out.transpose(1, 2).view(count, repeats, heads, dim),
            lse.transpose(1, 2).view(count, repeats, heads),
        )


class _Own:
    """A chunk of a prompt over itself."""

    def __init__(self, plan: AttentionPlan, row: int, end: int) -> None:
        self.plan = plan
        self.rows = slice(row, end)

    def run(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.plan.scores
        part = q[self.rows].permute(1, 2, 0, 3)
        new = kv[self.rows].permute(1, 0, 2)[None].expand(len(part), -1, -1, -1)
        keys, values = self.plan.store.sides(new)
        out, lse = attend(part, keys, values, scores, causal=True)
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


class _Band:
    """A chunk of a prompt in a layer with a window, cut in tiles that see the window before them and themselves."""

    def __init__(self, plan: AttentionPlan, span: Span, row: int, window: int) -> None:
        self.plan = plan
        self.rows = slice(row, row + span.count)
        size = plan.store.block_tokens
        first = max(0, span.start - window + 1)
        self.past = span.start - first
        self.gathering: Gathering | None = None
        if self.past:
            blocks = span.table[first // size : -(-span.start // size)]
            seen = slice(first % size, first % size + self.past)
            self.gathering = Gathering(plan.store, blocks[None], plan.dtype, seen)
        self.tiles: list[_Tile] = []
        masks: dict[tuple[int, int, int], Tensor] = {}
        for begin in range(0, span.count, _TILE):
            end = min(begin + _TILE, span.count)
            # Places in `past + chunk`, of which the first is position `first`.
            low = max(0, span.start + begin - window + 1 - first)
            high = self.past + end
            ahead = self.past + begin - low
            key = (end - begin, high - low, ahead)
            if key not in masks:
                masks[key] = _band_mask(*key, window, plan.dtype)
            self.tiles.append(_Tile(begin=begin, end=end, low=low, high=high, mask=masks[key]))

    def run(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.plan
        part = q[self.rows]
        count, repeats, heads, dim = part.shape
        keys, values = (side[0] for side in plan.store.sides(kv[self.rows].transpose(0, 1)[None]))
        if self.gathering is not None:
            past_keys, past_values = self.gathering.read(slot)
            keys = torch.cat((past_keys[0], keys), dim=1)
            values = torch.cat((past_values[0], values), dim=1)
        out = torch.empty(count, repeats, heads, dim, dtype=q.dtype)
        lse = torch.empty(count, repeats, heads, dtype=torch.promote_types(q.dtype, torch.float32))
        for tile in self.tiles:
            tile_out, tile_lse = attend(
                part[tile.begin : tile.end].permute(1, 2, 0, 3),
                keys[None, :, tile.low : tile.high].expand(repeats, -1, -1, -1),
                values[None, :, tile.low : tile.high].expand(repeats, -1, -1, -1),
                plan.scores,
                mask=tile.mask,
            )
            out[tile.begin : tile.end] = tile_out.permute(2, 0, 1, 3)
            lse[tile.begin : tile.end] = tile_lse.permute(2, 0, 1)
        return out, lse


@dataclass(frozen=True, kw_only=True)
class _Tile:
    begin: int
    end: int
    low: int
    high: int
    mask: Tensor


def _band_mask(queries: int, length: int, ahead: int, window: int, dtype: torch.dtype) -> Tensor:
    """Mask ``[queries, length]``; query i stands at place ``ahead + i`` of the keys."""
    distance = torch.arange(ahead, ahead + queries)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(queries, length, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]
