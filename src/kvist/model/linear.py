"""The operators of a decoder's weights: products and gated products.

In bf16 the C++ kernels multiply where this machine has some. Elsewhere the weights are laid out once as oneDNN wants
them: its plain entry point would reorder them in every call, which costs as much as the product itself while few tokens
are computed. Weights that a file holds in 4 bits are then kept packed as well, for steps of few rows.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.kernels.cpu import kernels_of
from kvist.kernels.gradients import gradients_wanted
from kvist.kernels.matrix import Matrix, Result
from kvist.model.packed import FEW_ROWS, Codes, FewRows, can_multiply

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": torch.relu,
}
"""By the names of configurations."""

# oneDNN chooses the same layout for all row counts that were tried; any hint will do.
_ROWS_HINT = 64
_FEW_LOGITS = 16


def can_pack(dtype: torch.dtype) -> bool:
    """Whether products of this type run on weights in oneDNN's layout, which no gradient passes."""
    return not gradients_wanted() and _has_layout(dtype)


@cache
def _has_layout(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # In float32 the plain product is as fast.
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _matrix(weight: Tensor, bias: Tensor | None, codes: Codes | None, result: Result) -> Matrix | None:
    """The weight as the C++ kernels multiply with it, from its codes where there are any; None where they do not."""
    kernels = kernels_of(weight.dtype)
    if kernels is None or not Matrix.suits(weight):
        return None
    matrix = Matrix(kernels, weight.shape, result, bias, bits=16 if codes is None else codes.bits)
    if codes is None:
        matrix.fill(weight)
    else:
        matrix.fill_codes(codes.codes, codes.scales, codes.minima)
    return matrix


class Linear:
    """``x W^T + b``.

    Args:
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]`` or None.
        codes: the same weight as it is stored, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, codes: Codes | None = None) -> None:
        self.bias = bias
        self.matrix = _matrix(weight, bias, codes, "bf16")
        if self.matrix is not None:
            return
        self.few_rows = None if codes is None or not can_multiply(codes) else FewRows(codes, bias)
        packed = can_pack(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if packed else weight
        self.call = torch.ops.mkldnn._linear_pointwise.default if packed else None

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        if self.matrix is not None:
            return self.matrix(x)
        if self.few_rows is not None and len(x) <= FEW_ROWS:
            return self.few_rows(x)
        if self.call is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = self.call(x, self.weight, self.bias, "none", [], "")
        return out


def _head(weight: Tensor, codes: Codes | None) -> Matrix | None:
    """The kernels' matrix of a head; few vocabularies fill the last panel, which zeros do then."""
    if kernels_of(weight.dtype) is None:
        return None  # before a weight is copied for nothing
    if missing := -len(weight) % Matrix.PANEL:
        weight = F.pad(weight, (0, 0, 0, missing))
        codes = None if codes is None else codes.padded(missing)
    return _matrix(weight, None, codes, "f32")


class Logits:
    """``x W^T`` in float32.

    Args:
        weight: ``[vocab, hidden]``.
        codes: the same weight as it is stored, or None.
        tied: the weight is the table of embeddings as well, whose layout must stay as it is.
    """

    def __init__(self, weight: Tensor, codes: Codes | None = None, *, tied: bool = False) -> None:
        # A second copy in the kernels' order is worth its memory where it is smaller than the first, or nothing else
        # multiplies in this type.
        second = tied and codes is None and can_pack(weight.dtype)
        self.vocab = len(weight)
        self.matrix = None if second else _head(weight, codes)
        if self.matrix is None:
            self.weight = weight
        self.reordered = can_pack(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, hidden]`` to float32 ``[rows, vocab]``."""
        if self.matrix is not None:
            return self.matrix(x)[:, : self.vocab]
        if not self.reordered:
            return F.linear(x, self.weight).float()
        # With the large weight on the left oneDNN takes it as it lies, and so does the product with one vector.
        if len(x) == 1:
            return torch.mv(self.weight, x[0]).float()[None]
        out = torch.empty(len(x), len(self.weight))
        # Of more rows at once it makes two to four times as much work a row.
        for some, into in zip(torch.split(x, _FEW_LOGITS), torch.split(out, _FEW_LOGITS), strict=True):
            into.copy_(torch.mm(self.weight, some.t()).t())
        return out


class Gated:
    """``act(x Wg^T + bg) * (x Wu^T + bu)``.

    Args:
        weight: the gate's rows, then as many of the other factor's: ``[2 x outputs, inputs]``.
        bias: likewise, or None.
        activation: its name in configurations.
        codes: the same weight as it is stored, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, codes: Codes | None = None) -> None:
        self.width = weight.shape[0] // 2
        self.gelu = activation in ("gelu_pytorch_tanh", "gelu_new")
        self.activation = ACTIVATIONS[activation]
        fusable = self.gelu or activation == "silu"
        self.matrix = _matrix(weight, bias, codes, "gelu" if self.gelu else "silu") if fusable else None
        if self.matrix is not None:
            return
        self.few_rows = None if codes is None or not can_multiply(codes) else FewRows(codes, bias)
        self.fused = fusable and can_pack(weight.dtype)
        if self.fused:
            biases = (None, None) if bias is None else torch.split(bias, self.width)
            gate, up = torch.split(weight, self.width)
            self.gate, self.up = Linear(gate, biases[0]), Linear(up, biases[1])
        else:
            self.both = Linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        if self.matrix is not None:
            return self.matrix(x)
        if self.few_rows is not None and len(x) <= FEW_ROWS:
            return self._product(self.few_rows(x))
        if self.fused:
            pointwise = torch.ops.mkldnn._linear_pointwise
            attribute, algorithm = ("gelu", "tanh") if self.gelu else ("swish", "")
            gate = pointwise.default(x, self.gate.weight, self.gate.bias, attribute, [], algorithm)
            out: Tensor = pointwise.binary(x, gate, self.up.weight, self.up.bias, "mul")
            return out
        return self._product(self.both(x))

    def _product(self, both: Tensor) -> Tensor:
        return self.activation(both[:, : self.width]) * both[:, self.width :]
