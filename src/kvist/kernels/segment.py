"""Attention that gradients pass: a batch of items, each over one segment that all share and over itself.

::

    keys      segment, positions 0 … P-1 ─ item, positions P … P+L-1        the segment is broadcast over the batch
    item 0    sees all of it               and of itself what came before
    item 1    likewise; items do not see each other

Items are as long as the longest, and what is behind an item's end is seen by nothing before it. The plans have the verb
that layers know, so that a decoder runs on them unchanged; nothing is stored but what :attr:`ItemsPlan.seen` collects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvist.kernels.dense import Scores, attend
from kvist.kernels.latent import LatentHeads


@dataclass(frozen=True, kw_only=True)
class Items:
    """The shape of a batch.

    Attributes:
        count: of its items.
        length: tokens of each.
        first: position of an item's first token: the segment's length.
    """

    count: int
    length: int
    first: int


class ItemsPlan:
    """What the queries of a batch see in one group of layers with grouped KV heads.

    Args:
        segment: of each of the group's layers keys and values, ``[2 x kv_heads, first, dim]``.
        items: the batch; its tokens are the rows of the step, item by item.
        scores: scale and cap.
        window: tokens that a query sees, itself included; None for all.
        chunk: tokens of a chunk, before whose first one none of its queries sees anything; None for no chunks.
        collect: keep what is to be stored, in ``seen``.

    Attributes:
        seen: by the layer's place in the group, keys and values of the step's tokens, ``[tokens, 2 x kv_heads, dim]``.
    """

    def __init__(
        self,
        segment: Sequence[Tensor],
        items: Items,
        scores: Scores,
        *,
        window: int | None = None,
        chunk: int | None = None,
        collect: bool = False,
    ) -> None:
        self.segment = segment
        self.items = items
        self.scores = scores
        self.mask = visible(items, window=window, chunk=chunk)
        self.added: dict[tuple[int, torch.dtype], Tensor] = {}
        self.collect = collect
        self.seen: dict[int, Tensor] = {}

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """As :meth:`kvist.kernels.attention.AttentionPlan.attend`, of which it has the shapes; stores nothing."""
        count, length = self.items.count, self.items.length
        tokens, repeats, heads, dim = q.shape
        if self.collect:
            self.seen[slot] = kv.detach().clone()
        segment = self.segment[slot].to(kv.dtype)
        own = kv.reshape(count, length, 2 * heads, dim).transpose(1, 2)
        both = torch.cat((segment.expand(count, -1, -1, -1), own), dim=2)
        keys, values = both[:, :heads], both[:, heads:]
        folded = q.reshape(count, length * repeats, heads, dim).transpose(1, 2)
        if sinks is not None:
            # [repeats, kv_heads] to the folded rows of each head.
            sinks = sinks.t().repeat(1, length)[..., None]
        out = _attend(folded, keys, values, self.scores, self._mask(repeats, q.dtype), sinks)
        return out.transpose(1, 2).reshape(tokens, repeats * heads * dim)

    def _mask(self, repeats: int, dtype: torch.dtype) -> Tensor:
        if (repeats, dtype) not in self.added:
            rows = self.mask.repeat_interleave(repeats, 0)
            self.added[repeats, dtype] = torch.zeros(rows.shape, dtype=dtype).masked_fill_(~rows, float("-inf"))
        return self.added[repeats, dtype]


class LatentItemsPlan:
    """The same over latents, of which keys and values of every head are made.

    Args:
        segment: of each of the group's layers latents and rotated keys, ``[first, rank + rope]``.
        items: the batch.
        scores: scale.
        collect: keep what is to be stored, in ``seen``: ``[tokens, 1, rank + rope]``.
    """

    def __init__(self, segment: Sequence[Tensor], items: Items, scores: Scores, *, collect: bool = False) -> None:
        self.segment = segment
        self.items = items
        self.scores = scores
        self.mask = visible(items)
        self.collect = collect
        self.seen: dict[int, Tensor] = {}

    def attend(self, slot: int, nope: Tensor, rope: Tensor, new: Tensor, heads: LatentHeads) -> Tensor:
        """As :meth:`kvist.kernels.latent.LatentPlan.attend`, of which it has the shapes; stores nothing."""
        count, length = self.items.count, self.items.length
        if self.collect:
            self.seen[slot] = new.detach().clone()
        segment = self.segment[slot].to(new.dtype)
        both = torch.cat((segment.expand(count, -1, -1), new.reshape(count, length, -1)), dim=1)
        keys, values = heads.expand(both.flatten(0, 1))
        keys, values = (side[0].reshape(heads.heads, count, -1, heads.key).transpose(0, 1) for side in (keys, values))
        queries = torch.cat((nope, rope), dim=-1).view(count, length, heads.heads, -1).transpose(1, 2)
        mask = torch.zeros(self.mask.shape, dtype=nope.dtype).masked_fill_(~self.mask, float("-inf"))
        out = _attend(queries, keys, values[..., : heads.value], self.scores, mask, None)
        return out.transpose(1, 2).reshape(count * length, -1)


def visible(items: Items, *, window: int | None = None, chunk: int | None = None) -> Tensor:
    """Which keys each query of an item sees: bool ``[length, first + length]``."""
    keys = torch.arange(items.first + items.length)
    queries = keys[items.first :, None]
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if chunk is not None:
        seen &= keys // chunk == queries // chunk
    return seen


def _attend(q: Tensor, keys: Tensor, values: Tensor, scores: Scores, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention ``[items, heads, queries, dim]``; ``mask`` is added, ``sinks`` ``[heads, queries, 1]`` take part."""
    if scores.softcap is None and sinks is None and values.shape[-1] == q.shape[-1]:
        out: Tensor = _Plain.apply(q, keys, values, mask, scores.scale)  # type: ignore[no-untyped-call]
        return out
    wide = torch.matmul(q, keys.transpose(-1, -2)).float() * scores.scale
    if scores.softcap is not None:
        wide = torch.tanh(wide / scores.softcap) * scores.softcap
    wide = wide + mask
    if sinks is not None:
        wide = torch.cat((wide, sinks.expand(len(q), -1, -1, -1).to(wide.dtype)), dim=-1)
    weights = torch.softmax(wide, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)


class _Plain(torch.autograd.Function):
    """Attention without cap and sinks: PyTorch's fused kernel, and a way back of products.

    The kernel's own way back takes three times as long as these five products, for the short items that there are.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        out, lse = attend(q, keys, values, Scores(scale=scale), mask=mask)
        ctx.save_for_backward(q, keys, values, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, keys, values, mask, out, lse = ctx.saved_tensors
        (gradient,) = gradients
        wide = lse.dtype
        # Softmax by its log-sum-exp; its way back is weights x (change - mean change).
        weights = torch.matmul(q, keys.transpose(-1, -2)).to(wide).mul_(ctx.scale)
        weights.add_(mask).sub_(lse[..., None]).exp_()
        mean = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        to_values = torch.matmul(weights.to(q.dtype).transpose(-1, -2), gradient)
        change = torch.matmul(gradient, values.transpose(-1, -2)).to(wide)
        change = change.sub_(mean).mul_(weights).mul_(ctx.scale).to(q.dtype)
        return torch.matmul(change, keys), torch.matmul(change.transpose(-1, -2), q), to_values, None, None
