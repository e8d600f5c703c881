"""Attention over one segment of keys, with the log-sum-exp by which segments are merged."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How scores are made.

    Attributes:
        scale: factor of the product of query and key.
        softcap: scores become ``softcap x tanh(score / softcap)``, as in Gemma 2; None for no cap.
    """

    scale: float
    softcap: float | None = None


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scores: Scores,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of ``[batch, heads, queries, dim]`` over ``[batch, heads, length, dim]``.

    Args:
        scores: scale and cap.
        mask: added to the scores, broadcast to ``[batch, heads, queries, length]``.
        causal: query i sees keys 0 … i; needs as many keys as queries.

    Returns:
        The output, shaped like ``q`` and laid out ``[batch, queries, heads, dim]`` in memory, and the log-sum-exp of
        the scores ``[batch, heads, queries]`` in float32 or wider, laid out ``[batch, queries, heads]``.
    """
    if scores.softcap is None:
        # torch's own dispatcher hides the log-sum-exp; this is the kernel behind it.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, values, 0.0, causal, attn_mask=mask, scale=scores.scale
        )
        return out, lse
    wide = torch.matmul(q, keys.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scores.scale
    wide = torch.tanh(wide / scores.softcap) * scores.softcap
    if mask is not None:
        wide = wide + mask
    if causal:
        length = wide.shape[-1]
        above = torch.ones(length, length, dtype=torch.bool).triu(1)
        wide = wide.masked_fill(above, float("-inf"))
    lse = torch.logsumexp(wide, dim=-1)
    out = torch.matmul((wide - lse[..., None]).exp().to(q.dtype), values)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2).contiguous().transpose(1, 2)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, final: bool) -> None:
    """Fold another segment's result into ``out`` and ``lse``, in place.

    ``softmax`` over the union of two segments is the mean of both outputs, weighted by the exponentials of their
    log-sum-exps (FlashInfer's cascade, arXiv:2501.01005).

    Args:
        out: ``[…, dim]``.
        lse: ``[…]``.
        final: nothing follows, and ``lse`` is not kept up.
    """
    weight = torch.sigmoid(other_lse - lse)
    if not final:
        lse.copy_(torch.logaddexp(lse, other_lse))
    out.lerp_(other, weight.unsqueeze(-1).to(out.dtype))


def merge_all(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of several segments of the same queries.

    Args:
        out: ``[segments, …, dim]``.
        lse: ``[segments, …]``.

    Returns:
        The same with one segment.
    """
    share = torch.softmax(lse, dim=0).unsqueeze(-1).to(out.dtype)
    return (out * share).sum(0, keepdim=True), torch.logsumexp(lse, dim=0, keepdim=True)
