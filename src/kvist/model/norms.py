"""Norms, and the stream of residuals between them."""

import torch
from torch import Tensor

from kvist.kernels.cpu import Cpu


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) * multiplier`` over the last dimension (arXiv:1910.07467).

    Computed as the layer norm of ``[x, -x]``, whose mean is 0 and whose variance is the mean square of ``x``: one fused
    operator, in float32 inside, where the formula takes seven.

    Args:
        multiplier: float32 ``[width]``, or ``[heads, width]`` for heads with different ones.
        eps: added to the mean square.
    """

    def __init__(self, multiplier: Tensor, eps: float) -> None:
        self.eps = eps
        self.width = multiplier.shape[-1]
        self.shape = (2 * self.width,)
        self.doubled = torch.cat((multiplier, multiplier)) if multiplier.dim() == 1 else None
        self.multiplier = multiplier.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and type as ``x``; rows may keep a stride of twice their width."""
        return self.of_mirrored(torch.cat((x, x.neg()), dim=-1))

    def of_mirrored(self, mirrored: Tensor) -> Tensor:
        """The same of ``[x, -x]``, ``[…, 2 x width]``."""
        out = torch.layer_norm(mirrored, self.shape, self.doubled, None, self.eps)[..., : self.width]
        return out if self.doubled is not None else (out * self.multiplier).to(mirrored.dtype)


class LayerNorm:
    """``(x - mean) / sqrt(variance + eps) * multiplier + bias`` over the last dimension (arXiv:1607.06450).

    Args:
        multiplier: float32 ``[width]``.
        bias: float32 ``[width]``, or None.
        eps: added to the variance.
    """

    def __init__(self, multiplier: Tensor, bias: Tensor | None, eps: float) -> None:
        self.multiplier = multiplier
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and type as ``x``; computed in float32."""
        return torch.layer_norm(x.float(), self.multiplier.shape, self.multiplier, self.bias, self.eps).to(x.dtype)


AnyNorm = RMSNorm | LayerNorm


class Residual:
    """The stream to which every half layer adds, kept beside its negative as the norms want it.

    Args:
        x: ``[rows, width]``, copied.
        dtype: of what norms give.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        rows, width = x.shape
        self.mirrored = torch.empty(rows, 2 * width, dtype=x.dtype)
        self.x = self.mirrored[:, :width]
        self.negative = self.mirrored[:, width:]
        self.x.copy_(x)

    def add(self, change: Tensor, after: AnyNorm | None) -> None:
        """Add ``[rows, width]``, which goes through ``after`` first where that is there."""
        self.x.add_(change if after is None else after(change))

    def normed(self, norm: AnyNorm | None) -> Tensor:
        """``norm`` of the stream; without one the stream itself, not to be written to."""
        if norm is None:
            return self.x.to(self.dtype)
        if isinstance(norm, LayerNorm):
            return norm(self.x).to(self.dtype)
        torch.neg(self.x, out=self.negative)
        return norm.of_mirrored(self.mirrored).to(self.dtype)

    def rows(self, index: Tensor) -> "Residual":
        """Some rows of the stream, copied."""
        return Residual(self.x.index_select(0, index), self.dtype)


class PlainResidual:
    """The same for gradients: nothing is written over that a way back would read.

    Args:
        x: ``[rows, width]``.
        dtype: of what norms give.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        self.x = x
        self.dtype = dtype

    def add(self, change: Tensor, after: AnyNorm | None) -> None:
        """Add ``[rows, width]``, which goes through ``after`` first where that is there."""
        self.x = self.x + (change if after is None else after(change))

    def normed(self, norm: AnyNorm | None) -> Tensor:
        """``norm`` of the stream; without one the stream itself."""
        return (self.x if norm is None else norm(self.x)).to(self.dtype)

    def rows(self, index: Tensor) -> "PlainResidual":
        """Some rows of the stream."""
        return PlainResidual(self.x.index_select(0, index), self.dtype)


class FusedResidual:
    """The same on the kernels of the CPU: what is added waits for the norm that follows, and both run as one.

    Args:
        x: bf16 ``[rows, width]``; it becomes the stream and is changed.
        kernels: of this machine.
    """

    def __init__(self, x: Tensor, kernels: Cpu) -> None:
        self.x = x
        self.kernels = kernels
        self.change: Tensor | None = None
        self.after: RMSNorm | None = None

    def add(self, change: Tensor, after: AnyNorm | None) -> None:
        """Add ``[rows, width]``, which goes through ``after`` first where that is there."""
        self._settle()
        if isinstance(after, LayerNorm):
            self.x.add_(after(change))
        else:
            self.change, self.after = change, after

    def _settle(self) -> None:
        if self.change is not None:
            self.x.add_(self.change if self.after is None else self.after(self.change))
            self.change = self.after = None

    def normed(self, norm: AnyNorm | None) -> Tensor:
        """``norm`` of the stream; without one the stream itself, not to be written to."""
        if not isinstance(norm, RMSNorm):
            self._settle()
            return self.x if norm is None else norm(self.x)
        after = None if self.after is None else self.after.multiplier
        out = self.kernels.add_norm(self.x, self.change, after, norm.multiplier, norm.eps)
        self.change = self.after = None
        return out

    def rows(self, index: Tensor) -> "FusedResidual":
        """Some rows of the stream, copied."""
        rows = FusedResidual(self.x.index_select(0, index), self.kernels)
        if self.change is not None:
            rows.add(self.change.index_select(0, index), self.after)
        return rows


Stream = Residual | PlainResidual | FusedResidual
