"""Attention over what stands before sequences too: one more segment, in a format of its own, that no step writes to.

::

    rows      0 … 40             | 41        | 42         | 43 …
    before    lead a, all of it  | lead a    | nothing    | lead b, all of it
    own       their sequence up to themselves, as without leads

Every row sees all of its lead, so that neighbours behind the same one attend to it together, in one product without a
mask; what comes of it is merged with the rest by log-sum-exp (FlashInfer's cascade, arXiv:2501.01005).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from kvist.kernels.attention import AttentionPlan, Dense, PagedMemory, dense_parts, with_sinks
from kvist.kernels.dense import merge
from kvist.kernels.paged import PagedAttention, PagedPlan
from kvist.kernels.sealing import SealedAttention, SealedMemory, SealedPlan
from kvist.kernels.spans import Span
from kvist.store.layouts import Index, PagedKV


@dataclass(frozen=True, kw_only=True)
class Before:
    """What stands before some rows of a step.

    Attributes:
        table: its block ids; none where nothing does.
        tokens: of it, all of which each row sees.
        count: rows.
    """

    table: Index
    tokens: int
    count: int


def together(parts: Sequence[Before]) -> list[Before]:
    """The same rows, neighbours behind the same blocks taken together."""
    found: list[Before] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.tokens == part.tokens and np.array_equal(last.table, part.table):
            found[-1] = Before(table=last.table, tokens=last.tokens, count=last.count + part.count)
        else:
            found.append(part)
    return found


class LedAttention:
    """Memory of some layers, and what stands before it, as the compiled kernels see them.

    Args:
        own: of the sequences.
        lead: of what stands before them, by kernels of the same kind.
        layers: place of each layer in the group of leads.
    """

    def __init__(self, own: PagedAttention | SealedAttention, lead: PagedAttention, layers: Sequence[int]) -> None:
        self.own = own
        self.lead = lead
        self.layers = layers

    def plan(self, before: Sequence[Before], *spans: Sequence[Span]) -> PagedPlan:
        """Plan a step; ``before`` of the rows of all spans, which are as ``own`` wants them."""
        return self.own.plan(*spans, further=self._segments(before))

    def _segments(self, before: Sequence[Before]) -> list[Any]:
        parts = together(before)
        if not any(part.tokens for part in parts):
            return []
        seen = np.repeat([part.tokens - 1 for part in parts], [part.count for part in parts])
        spans = [Span(table=part.table, start=0, count=part.count) for part in parts]
        return [self.lead.segment(spans, seen, self.layers)]


class LedMemory:
    """The same as PyTorch's operators read them; arguments as of :class:`LedAttention`."""

    def __init__(self, own: PagedMemory | SealedMemory, lead: PagedKV, layers: Sequence[int]) -> None:
        self.own = own
        self.lead = lead
        self.layers = layers

    def plan(self, before: Sequence[Before], *spans: Sequence[Span]) -> "AttentionPlan | SealedPlan | LedPlan":
        """Plan a step; as :meth:`LedAttention.plan`."""
        own = self.own.plan(*spans)
        parts: list[Dense] = []
        row = 0
        for part in together(before):
            rows = slice(row, row + part.count)
            parts += dense_parts(self.lead, part.table, part.tokens, rows, self.own.scores, self.own.dtype)
            row = rows.stop
        return LedPlan(own, parts, self.layers) if parts else own


class LedPlan:
    """What the queries of one step see, before their sequences and in them; the same verb as :class:`AttentionPlan`."""

    def __init__(self, own: AttentionPlan | SealedPlan, parts: Sequence[Dense], layers: Sequence[int]) -> None:
        self.own = own
        self.parts = parts
        self.layers = layers

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store a layer's new keys and values, then attend; as :meth:`AttentionPlan.attend`."""
        out, lse = self.own.merging(slot, q, kv)
        q, out, lse = q.contiguous(), out.contiguous(), lse.contiguous()
        for part in self.parts:
            more, more_lse = part.run(self.layers[slot], q)
            merge(out[part.rows], lse[part.rows], more, more_lse, final=False)
        return with_sinks(out, lse, sinks)
