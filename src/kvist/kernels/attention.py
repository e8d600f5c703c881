"""The engine's attention: what a step's queries see, planned once a step and group, then run by every layer.

Each sequence's keys are a list of segments, attended one by one and merged by log-sum-exp::

    prompt chunk   shared run ─┬─ rest of its past ─ the chunk itself (causal, not read back from the cache)
    decode         shared run ─┘  private tail, its own token included

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

from kvist.kernels.dense import attend, merge
from kvist.kernels.sharing import SharedRun, shared_runs
from kvist.store.layouts import Gathering, Index, PagedKV

# Keys and values gathered at a time: while they stay in the caches of the cores, reading them again is cheap.
_GATHER_BYTES = 2 * 2**20
# Padding that is cheaper than another bucket, in tokens.
_PADDING_TOKENS = 256
# A lone sequence is cut among the threads when each part has as many tokens.
_PART_TOKENS = 512
# Queries that share one band of a window.
_TILE = 256


@dataclass(frozen=True, kw_only=True)
class Span:
    """One sequence's part of a step: ``count`` tokens from position ``start`` on.

    ``table`` holds its block ids from position 0; those behind a window may be -1.
    """

    table: Index
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are made: their scale, and the cap of Gemma 2 where there is one."""

    scale: float
    softcap: float | None = None


class AttentionPlan:
    """What the queries of one step see in one group of layers.

    Args:
        store: of the group.
        spans: in the order of the step's rows; to be found as shared, runs must be neighbours.
        scores: scale and cap.
        dtype: of queries, keys and values.
    """

    def __init__(self, store: PagedKV, spans: Sequence[Span], scores: Scores, dtype: torch.dtype) -> None:
        self.store = store
        self.scores = scores
        self.dtype = dtype
        counts = [span.count for span in spans]
        self.rows = np.concatenate(([0], np.cumsum(counts))).tolist()
        self.tokens = self.rows[-1]
        self.where = self._new_vectors(spans, counts)
        window = store.group.layer.window
        runs: list[SharedRun] = []
        if window is None:
            limits = [span.start // store.block_tokens for span in spans]
            runs = shared_runs([span.table for span in spans], limits)
        shared = [0] * len(spans)
        for run in runs:
            shared[run.first_span : run.end_span] = [run.end_block] * (run.end_span - run.first_span)
        self.first: list[_Tails | _Own | _Band] = []
        self.others: list[_Dense] = []
        decodes: list[_Decode] = []
        for index, span in enumerate(spans):
            row, end = self.rows[index], self.rows[index + 1]
            if span.count == 1:
                begin = shared[index] * store.block_tokens
                if window is not None:
                    begin = max(0, span.start - window + 1)
                decodes.append(_Decode(row=row, table=span.table, begin=begin, end=span.start + 1))
            elif window is not None and span.start + span.count > window:
                self.first.append(_Band(self, span, row, window))
            else:
                self.first.append(_Own(self, row, end))
                self._past(span, shared[index], row, end)
        for bucket in _buckets(decodes, store):
            self.first.append(_Tails(self, bucket))
        for run in runs:
            blocks = spans[run.first_span].table[run.first_block : run.end_block]
            self._dense(blocks, len(blocks) * store.block_tokens, self.rows[run.first_span], self.rows[run.end_span])

    def _new_vectors(self, spans: Sequence[Span], counts: list[int]) -> list[Tensor]:
        size = self.store.block_tokens
        if self.tokens == len(spans):
            positions = np.array([span.start for span in spans])
            blocks = np.array([span.table[span.start // size] for span in spans])
        else:
            positions = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
            blocks = np.concatenate(
                [span.table[np.arange(span.start, span.start + span.count) // size] for span in spans]
            )
        return self.store.vectors(blocks, positions % size)

    def _past(self, span: Span, shared_blocks: int, row: int, end: int) -> None:
        """Everything before a chunk that it does not attend together with others."""
        size = self.store.block_tokens
        last = -(-span.start // size)
        self._dense(span.table[shared_blocks:last], span.start - shared_blocks * size, row, end)

    def _dense(self, blocks: Index, tokens: int, row: int, end: int) -> None:
        size = self.store.block_tokens
        step = max(1, 8 * _GATHER_BYTES // _token_bytes(self.store) // size)
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            self.others.append(_Dense(self, part, min(len(part) * size, tokens - first * size), row, end))

    def attend(self, slot: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store a layer's new keys and values, then attend.

        Args:
            slot: the layer's place in the group.
            q: ``[tokens, repeats, kv_heads, dim]``, rotated.
            kv: ``[tokens, 2 x kv_heads, dim]``, rotated keys, then values.

        Returns:
            ``[tokens, repeats x kv_heads x dim]``.
        """
        self.store.append(slot, kv, self.where)
        kv = self.store.rounded(kv)
        if len(self.first) == 1:
            out, lse = self.first[0].run(slot, q, kv)
        else:
            out = torch.empty(q.shape, dtype=q.dtype)
            lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
            for segment in self.first:
                part, part_lse = segment.run(slot, q, kv)
                if isinstance(segment.rows, slice):
                    out[segment.rows] = part
                    if self.others:
                        lse[segment.rows] = part_lse
                else:
                    out.index_copy_(0, segment.rows, part)
                    if self.others:
                        lse.index_copy_(0, segment.rows, part_lse)
        if self.others:
            q = q.contiguous()
            out = out.contiguous()
            for number, dense in enumerate(self.others):
                part, part_lse = dense.run(slot, q)
                final = number + 1 == len(self.others)
                merge(out[dense.rows], lse[dense.rows], part, part_lse, final=final)
        return out.reshape(self.tokens, -1)


class _Dense:
    """Keys that all queries of some rows see in full."""

    def __init__(self, plan: AttentionPlan, blocks: Index, tokens: int, row: int, end: int) -> None:
        self.plan = plan
        self.rows = slice(row, end)
        self.gathering = Gathering(plan.store, blocks[None], plan.dtype, slice(tokens))

    def run(self, slot: int, q: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.plan
        keys, values = self.gathering.read(slot)
        part = q[self.rows]
        count, repeats, heads, dim = part.shape
        folded = part.view(1, count * repeats, heads, dim).transpose(1, 2)
        out, lse = attend(folded, keys, values, scale=plan.scores.scale, softcap=plan.scores.softcap)
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
        heads = self.plan.store.kv_heads
        part = q[self.rows].permute(1, 2, 0, 3)
        new = kv[self.rows].permute(1, 0, 2)[None].expand(len(part), -1, -1, -1)
        out, lse = attend(part, new[:, :heads], new[:, heads:], scale=scores.scale, causal=True, softcap=scores.softcap)
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
        heads = plan.store.kv_heads
        part = q[self.rows]
        count, repeats, _, dim = part.shape
        own = kv[self.rows].transpose(0, 1)
        keys, values = own[:heads], own[heads:]
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
                scale=plan.scores.scale,
                mask=tile.mask,
                softcap=plan.scores.softcap,
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


@dataclass(frozen=True, kw_only=True)
class _Decode:
    """One token's private tail: positions ``begin … end - 1``."""

    row: int
    table: Index
    begin: int
    end: int


def _buckets(decodes: list[_Decode], store: PagedKV) -> list[list[_Decode]]:
    """Group tails of similar length; inside a bucket rows keep their order."""
    most = max(1, _GATHER_BYTES // _token_bytes(store))
    buckets: list[list[_Decode]] = []
    padding = 0
    for decode in sorted(decodes, key=lambda decode: decode.begin - decode.end):
        length = decode.end - decode.begin
        if buckets:
            longest = buckets[-1][0].end - buckets[-1][0].begin
            padding += longest - length
            if padding <= _PADDING_TOKENS and (len(buckets[-1]) + 1) * longest <= most:
                buckets[-1].append(decode)
                continue
        buckets.append([decode])
        padding = 0
    return [sorted(bucket, key=lambda decode: decode.row) for bucket in buckets]


class _Tails:
    """Decodes of similar length, each over its own blocks."""

    def __init__(self, plan: AttentionPlan, bucket: list[_Decode]) -> None:
        self.plan = plan
        store = plan.store
        size = store.block_tokens
        rows = [decode.row for decode in bucket]
        self.rows: slice | Tensor = slice(rows[0], rows[-1] + 1)
        if rows[-1] + 1 - rows[0] != len(rows):
            self.rows = torch.tensor(rows)
        self.all_rows = len(rows) == plan.tokens
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
        self.split = 1
        if (lengths == lengths[0]).all() and (lead == lead[0]).all():
            self.split = self._parts(len(bucket), int(lengths[0]), int(lead[0]))
            seen = slice(int(lead[0]), int(lead[0]) + -(-int(lengths[0]) // self.split) * self.split)
            self.gathering = Gathering(store, blocks, plan.dtype, seen)
            if self.split > 1:
                self._cut(int(lengths[0]))
            return
        self.gathering = Gathering(store, blocks, plan.dtype)
        places = np.arange(blocks.shape[1] * size)
        seen_places = (places >= lead[:, None]) & (places < (lead + lengths)[:, None])
        hidden = torch.from_numpy(~seen_places)[:, None, None, :]
        self.mask = torch.zeros(hidden.shape, dtype=plan.dtype).masked_fill_(hidden, float("-inf"))
        if not store.uniform:
            # Bytes once written as another type may read as NaN, which no mask silences.
            self.hidden = hidden.transpose(-1, -2)

    def _parts(self, sequences: int, length: int, lead: int) -> int:
        """In how many parts a lone sequence is cut, so that every thread has its share of the heads."""
        store, threads = self.plan.store, torch.get_num_threads()
        parts = 1
        if sequences == 1 and lead == 0 and store.uniform and not self.gathering_converts():
            while (
                (store.kv_heads * parts) % threads
                and store.kv_heads * parts < 4 * threads
                and length >= 2 * parts * _PART_TOKENS
                and store.block_tokens % (2 * parts) == 0
            ):
                parts *= 2
        return parts

    def gathering_converts(self) -> bool:
        """Whether keys and values are copied to another type when they are read."""
        return any(part.dtype != self.plan.dtype for part in self.plan.store.parts)

    def _cut(self, length: int) -> None:
        """View the keys and values of the one sequence as a batch of equal parts; the last may have hidden slots."""
        gathering, dim = self.gathering, self.plan.store.dim
        _, heads, total, _ = gathering.keys.shape
        part = total // self.split

        def cut(whole: Tensor) -> Tensor:
            strides = (part * dim, whole.stride(1), dim, 1)
            return whole.as_strided((self.split, heads, part, dim), strides, whole.storage_offset())

        gathering.keys, gathering.values = cut(gathering.keys), cut(gathering.values)
        if length < total:
            self.mask = torch.zeros(self.split, 1, 1, part, dtype=self.plan.dtype)
            self.mask.view(-1)[length:] = float("-inf")

    def run(self, slot: int, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.plan
        keys, values = self.gathering.read(slot)
        if self.hidden is not None:
            keys, values = keys.masked_fill(self.hidden, 0), values.masked_fill(self.hidden, 0)
        if not self.all_rows:
            q = q[self.rows] if isinstance(self.rows, slice) else q.index_select(0, self.rows)
        q = q.transpose(1, 2)
        if self.split > 1:
            q = q.expand(self.split, -1, -1, -1)
        out, lse = attend(q, keys, values, scale=plan.scores.scale, mask=self.mask, softcap=plan.scores.softcap)
        if self.split > 1:
            share = torch.softmax(lse, dim=0).unsqueeze(-1).to(out.dtype)
            out = (out * share).sum(0, keepdim=True)
            lse = torch.logsumexp(lse, dim=0, keepdim=True)
        return out.transpose(1, 2), lse.transpose(1, 2)


def _token_bytes(store: PagedKV) -> int:
    return store.group.layer.token_bytes(store.group.format)
