"""What a student is taught by: its teacher's likeliest tokens, and the divergence from them.

The teacher is the same model with the document before the item (context distillation, as in arXiv:2506.06266).
Of its distribution behind each token the twenty likeliest are kept with their probabilities, and the rest as one more::

    loss = sum_i p_i log(p_i / q_i) + (1 - sum p) log((1 - sum p) / (1 - sum q))        i over the teacher's twenty

which is the divergence of the two distributions with all other tokens put together: never above the whole one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOP = 20
_LEAST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The teacher's distributions.

    Attributes:
        ids: int32 ``[rows, top]``, likeliest first.
        logs: float32 ``[rows, top]``, the logarithms of their probabilities.
    """

    ids: Tensor
    logs: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Targets":
        """From logits ``[rows, vocab]``."""
        kept = logits.topk(min(TOP, logits.shape[1]), dim=1)
        logs = kept.values - logits.logsumexp(1, keepdim=True)
        return cls(ids=kept.indices.int(), logs=logs.float())


def divergence(logits: Tensor, targets: Targets) -> Tensor:
    """Mean divergence of a student's logits, float32 ``[rows, vocab]``, from its teacher's distributions, in nats."""
    loss: Tensor = _Divergence.apply(logits, targets.ids.long(), targets.logs)  # type: ignore[no-untyped-call]
    return loss


class _Divergence(torch.autograd.Function):
    """With its way back written out: one tensor as large as the logits, where autograd would keep four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, logs: Tensor) -> Tensor:
        lse = logits.logsumexp(1, keepdim=True)
        logs = logs.to(logits.dtype)
        found = logits.gather(1, ids) - lse
        given = logs.exp()
        rest = (1 - given.sum(1, keepdim=True)).clamp_min(_LEAST)
        left = 1 - found.exp().sum(1, keepdim=True)
        held = left.clamp_min(_LEAST)
        loss = (given * (logs - found)).sum(1, keepdim=True) + rest * (rest.log() - held.log())
        # By the log-probability of each; where the rest is held at its least, nothing comes from it.
        slope = found.exp() * (rest / held * (left > _LEAST)) - given
        ctx.save_for_backward(logits, lse, ids, slope)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, ids, slope = ctx.saved_tensors
        scaled = slope * (gradients[0] / len(logits))
        change = (logits - lse).exp_().mul_(-scaled.sum(1, keepdim=True))
        return change.scatter_add_(1, ids, scaled), None, None
