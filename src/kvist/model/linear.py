"""The operators of a decoder's weights: products, norms, activations."""

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """``x W^T + b``.

    Args:
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]`` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """``[…, inputs]`` to ``[…, outputs]``."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) * multiplier`` over the last dimension (arXiv:1910.07467).

    Args:
        multiplier: float32 ``[width]``, or ``[heads, width]`` for heads with different ones.
        eps: added to the mean square.
    """

    def __init__(self, multiplier: Tensor, eps: float) -> None:
        self.multiplier = multiplier
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and type as ``x``."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).mul_(self.multiplier).to(x.dtype)
