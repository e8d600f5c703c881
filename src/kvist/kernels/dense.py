"""Attention over one segment of keys, with the log-sum-exp by which segments are merged."""

import torch
from torch import Tensor


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``[batch, heads, queries, dim]`` over ``[batch, heads, length, dim]``.

    Args:
        scale: of the scores.
        mask: added to the scaled scores, broadcast to ``[batch, heads, queries, length]``.
        causal: query i sees keys 0 … i; needs as many keys as queries.
        softcap: scores become ``softcap x tanh(score / softcap)`` before the mask.

    Returns:
        The output, shaped like ``q`` and laid out ``[batch, queries, heads, dim]`` in memory, and the log-sum-exp of
        the scores ``[batch, heads, queries]`` in float32 or wider, laid out ``[batch, queries, heads]``.
    """
    if softcap is None:
        # torch's own dispatcher hides the log-sum-exp; this is the kernel behind it.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, values, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = torch.matmul(q, keys.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if causal:
        length = scores.shape[-1]
        above = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul((scores - lse[..., None]).exp().to(q.dtype), values)
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
