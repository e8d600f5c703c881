"""Attention over latents (MLA, arXiv:2405.04434 section 2.1): one vector a token makes all heads' keys and values.

Vectors are stored as ``latent | rotary key``, and nothing else is. There are two ways to attend to them, and a step
takes for each sequence the one that costs less::

    absorbed   queries go into the latents' space, where all heads share one key and one value, the latent itself
    expanded   keys and values of every head are made, a piece of the past at a time, and let go again

A query costs about three times as much in the latents' space, as vectors there are that much wider; but a token's keys
and values must be made first. So decodes and short chunks are absorbed, by the plan of grouped attention with one KV
head (:mod:`kvist.kernels.attention`); what a longer chunk sees is expanded.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.attention import AttentionPlan, new_vectors
from kvist.kernels.dense import Scores, attend, merge
from kvist.kernels.sharing import shared_runs
from kvist.kernels.spans import Span
from kvist.store.layouts import Gathering, Index, PagedLatents

# Queries that must see a past token, on average, before making its keys and values pays: measured, 16 heads, f32 and
# bf16 (benchmarks/latent_decode.py --chunks); by arithmetic rank x (nope + value) / (2 x rank + rope - key - value).
_EXPANDED_QUERIES = 200
# New tokens below which the operators of a segment of their own cost more than they save.
_EXPANDED_TOKENS = 32
# Keys and values made at a time.
_EXPANDED_BYTES = 32 * 2**20
# But for no fewer tokens: products of fewer rows are slow.
_LEAST_TOKENS = 256


class LatentHeads:
    """A layer's way between latents and heads: the matrix that makes keys and values of latents, used from both sides.

    Args:
        weight: ``[heads, value + nope, rank]``: of each head the rows that make its value, then those that make its
            key but for the rotary part.
        value: width of a value; no wider than a key.
        rope: width of the rotary key.
    """

    def __init__(self, weight: Tensor, *, value: int, rope: int) -> None:
        self.heads, both, self.rank = weight.shape
        self.value, self.rope = value, rope
        self.nope = both - value
        self.key = self.nope + rope
        self.rows = weight.view(-1, self.rank)
        self.to_values = weight[:, :value].transpose(1, 2)
        self.to_keys = weight[:, value:]

    @property
    def expanded(self) -> int:
        """Elements of one token's keys and values."""
        return self.heads * (self.value + self.key)

    def absorb(self, nope: Tensor, rope: Tensor) -> Tensor:
        """Queries in the space of latents.

        Args:
            nope: ``[tokens, heads, nope]``.
            rope: ``[tokens, heads, rope]``, rotated.

        Returns:
            ``[tokens, heads, 1, rank + rope]``.
        """
        queries = torch.empty(self.heads, len(nope), self.rank + self.rope, dtype=nope.dtype, device=nope.device)
        queries[..., : self.rank] = torch.bmm(nope.transpose(0, 1), self.to_keys)
        queries[..., self.rank :] = rope.transpose(0, 1)
        return queries.transpose(0, 1)[:, :, None]

    def values(self, mixed: Tensor) -> Tensor:
        """Values of heads from means of stored vectors.

        Args:
            mixed: ``[tokens, heads, rank + rope]``.

        Returns:
            ``[tokens, heads, value]``.
        """
        return torch.bmm(mixed[..., : self.rank].transpose(0, 1), self.to_values).transpose(0, 1)

    def expand(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head.

        Args:
            stored: ``[tokens, rank + rope]``.

        Returns:
            Both ``[1, heads, tokens, key]``; a value is the beginning of what is as wide as a key, as the kernel of
            :func:`kvist.kernels.dense.attend` wants it: what lies there is read and means nothing.
        """
        made = torch.nn.functional.linear(stored[:, : self.rank], self.rows)
        both = torch.empty(self.heads, len(stored), self.value + self.key, dtype=stored.dtype)
        made = made.view(len(stored), self.heads, -1).transpose(0, 1)
        both[..., : self.value + self.nope] = made
        both[..., self.value + self.nope :] = stored[:, self.rank :]
        return both[None, ..., self.value :], both[None, ..., : self.key]


def expands(span: Span) -> bool:
    """Whether making keys and values of what a span sees costs less than attending to the latents themselves."""
    seen = span.count * (span.start + span.count / 2)
    return span.count >= _EXPANDED_TOKENS and seen >= _EXPANDED_QUERIES * span.start


class LatentMemory:
    """One group's latents.

    Args:
        store: of the group.
        scores: scale and cap.
        dtype: of queries and latents.
    """

    def __init__(self, store: PagedLatents, scores: Scores, dtype: torch.dtype) -> None:
        self.store = store
        self.scores = scores
        self.dtype = dtype

    def plan(self, spans: Sequence[Span]) -> "LatentPlan":
        """Plan a step; its spans in the order of its rows."""
        return LatentPlan(self.store, spans, self.scores, self.dtype)


class LatentPlan:
    """What the queries of one step see in one group of latents; arguments as of :class:`AttentionPlan`."""

    def __init__(self, store: PagedLatents, spans: Sequence[Span], scores: Scores, dtype: torch.dtype) -> None:
        self.store = store
        self.tokens = sum(span.count for span in spans)
        self.where = new_vectors(store, spans)
        ends = np.cumsum([span.count for span in spans])
        absorbed: list[int] = []
        expanded: list[int] = []
        for index, span in enumerate(spans):
            (expanded if expands(span) else absorbed).append(index)
        self.absorbed: AttentionPlan | None = None
        self.expanded: _Expanded | None = None
        self.absorbed_rows = _rows(absorbed, spans, ends)
        self.expanded_rows = _rows(expanded, spans, ends)
        if absorbed:
            self.absorbed = AttentionPlan(store, [spans[index] for index in absorbed], scores, dtype)
        if expanded:
            self.expanded = _Expanded(store, [spans[index] for index in expanded], scores, dtype)

    def attend(self, slot: int, nope: Tensor, rope: Tensor, new: Tensor, heads: LatentHeads) -> Tensor:
        """Store a layer's new latents, then attend.

        Args:
            slot: the layer's place in the group.
            nope: the queries' part that is not rotated, ``[tokens, heads, nope]``.
            rope: the rotated part, ``[tokens, heads, rope]``.
            new: latents and rotated keys, ``[tokens, 1, rank + rope]``.
            heads: of the layer.

        Returns:
            ``[tokens, heads x value]``.
        """
        self.store.append(slot, new, self.where)
        new = self.store.rounded(new)
        if self.expanded is None:
            return self._absorbed(slot, nope, rope, new, heads).reshape(self.tokens, -1)
        if self.absorbed is None:
            return self.expanded.run(slot, torch.cat((nope, rope), dim=-1), new[:, 0], heads).reshape(self.tokens, -1)
        out = torch.empty(self.tokens, heads.heads, heads.value, dtype=nope.dtype)
        rows = self.absorbed_rows
        out[rows] = self._absorbed(slot, nope[rows], rope[rows], new[rows], heads)
        rows = self.expanded_rows
        queries = torch.cat((nope[rows], rope[rows]), dim=-1)
        out[rows] = self.expanded.run(slot, queries, new[rows][:, 0], heads)
        return out.view(self.tokens, -1)

    def _absorbed(self, slot: int, nope: Tensor, rope: Tensor, new: Tensor, heads: LatentHeads) -> Tensor:
        assert self.absorbed is not None
        mixed = self.absorbed.over(slot, heads.absorb(nope, rope), new)
        return heads.values(mixed.view(len(nope), heads.heads, -1))


class _Expanded:
    """Chunks of prompts over themselves and over their pasts, a piece expanded at a time."""

    def __init__(self, store: PagedLatents, spans: Sequence[Span], scores: Scores, dtype: torch.dtype) -> None:
        self.store = store
        self.scores = scores
        self.dtype = dtype
        size = store.block_tokens
        self.rows = np.concatenate(([0], np.cumsum([span.count for span in spans]))).tolist()
        runs = shared_runs([span.table for span in spans], [span.start // size for span in spans])
        shared = [0] * len(spans)
        # Rows that see all of some blocks' tokens, and these.
        self.pasts: list[tuple[slice, Index, int]] = []
        for run in runs:
            shared[run.first_span : run.end_span] = [run.end_block] * (run.end_span - run.first_span)
            blocks = spans[run.first_span].table[run.first_block : run.end_block]
            rows = slice(self.rows[run.first_span], self.rows[run.end_span])
            self.pasts.append((rows, blocks, len(blocks) * size))
        for index, span in enumerate(spans):
            tokens = span.start - shared[index] * size
            if tokens:
                blocks = span.table[shared[index] : -(-span.start // size)]
                self.pasts.append((slice(self.rows[index], self.rows[index + 1]), blocks, tokens))
        # How much is expanded at a time depends on the layer's heads, which are the same in all of them.
        self.step = 0
        self.pieces: list[tuple[slice, Gathering]] = []

    def run(self, slot: int, q: Tensor, new: Tensor, heads: LatentHeads) -> Tensor:
        """Attend in one layer.

        Args:
            q: ``[tokens, heads, nope + rope]``.
            new: the step's latents as they will be read again, ``[tokens, rank + rope]``.

        Returns:
            ``[tokens, heads, value]``.
        """
        if not self.step:
            self._cut(heads)
        queries = q.transpose(0, 1)[None]
        out = torch.empty(len(q), heads.heads, heads.value, dtype=q.dtype)
        lse = torch.empty(len(q), heads.heads, dtype=torch.promote_types(q.dtype, torch.float32))
        for begin, end in pairwise(self.rows):
            # From the last piece to the first: what a row sees of its own piece is there before others are merged in.
            for first in reversed(range(begin, end, self.step)):
                last = min(first + self.step, end)
                keys, values = heads.expand(new[first:last])
                part, part_lse = self._attend(queries[:, :, first:last], keys, values, heads, causal=True)
                out[first:last], lse[first:last] = part, part_lse
                if last < end:
                    self._merge(slice(last, end), queries, keys, values, out, lse, heads)
        for rows, gathering in self.pieces:
            keys, values = heads.expand(gathering.read(slot)[0][0, 0])
            self._merge(rows, queries, keys, values, out, lse, heads)
        return out

    def _cut(self, heads: LatentHeads) -> None:
        size = self.store.block_tokens
        blocks = max(_EXPANDED_BYTES // (heads.expanded * self.dtype.itemsize), _LEAST_TOKENS) // size or 1
        self.step = blocks * size
        for rows, table, tokens in self.pasts:
            for first in range(0, len(table), blocks):
                part = table[first : first + blocks]
                seen = slice(min(len(part) * size, tokens - first * size))
                self.pieces.append((rows, Gathering(self.store, part[None], self.dtype, seen)))

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, heads: LatentHeads, *, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        out, lse = attend(queries, keys, values, self.scores, causal=causal)
        return out[0, ..., : heads.value].transpose(0, 1), lse[0].t()

    def _merge(
        self, rows: slice, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, heads: LatentHeads
    ) -> None:
        part, part_lse = self._attend(queries[:, :, rows], keys, values, heads)
        merge(out[rows], lse[rows], part, part_lse, final=False)


def _rows(chosen: Sequence[int], spans: Sequence[Span], ends: Index) -> slice | Tensor:
    """The step's rows of some of its spans."""
    rows = [(int(ends[index]) - spans[index].count, int(ends[index])) for index in chosen]
    if all(one[1] == other[0] for one, other in pairwise(rows)):
        return slice(rows[0][0], rows[-1][1]) if rows else slice(0)
    return torch.from_numpy(np.concatenate([np.arange(begin, end) for begin, end in rows]))
