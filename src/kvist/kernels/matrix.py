"""Products with a weight as it is stored, on the C++ kernels: bf16, or codes of 4 or 8 bits."""

from typing import Literal

import torch
from torch import Tensor

from kvist.kernels.cpu import Cpu

Result = Literal["bf16", "f32", "silu", "gelu"]
"""``x W^T + b`` in one of two types; or, in bf16, ``act(gate) * other`` where the weight holds both, one after the
other."""

_RESULTS = ("bf16", "f32", "silu", "gelu")


class Matrix:
    """``x W^T + b``; to be filled once.

    Args:
        kernels: of this machine.
        shape: ``[outputs, inputs]``; :meth:`suits` it.
        result: what becomes of the product.
        bias: ``[outputs]`` or None.
        bits: 16 for bf16, or those of a code.
    """

    PANEL = 32
    """Outputs that are multiplied together, of which a weight has a whole number."""

    def __init__(self, kernels: Cpu, shape: torch.Size, result: Result, bias: Tensor | None, *, bits: int) -> None:
        outputs, inputs = shape
        self.kernels = kernels
        self.bits = bits
        self.inputs = inputs
        self.gated = result in ("silu", "gelu")
        self.width = outputs // 2 if self.gated else outputs
        self.dtype = torch.float32 if result == "f32" else torch.bfloat16
        self.packed = kernels.module.Matrix(outputs=outputs, inputs=inputs, bits=bits, result=_RESULTS.index(result))
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = bias.float().contiguous()
            if self.gated:
                # The kernels hold 16 outputs of the gate, then 16 of the other half, by turns.
                self.bias = self.bias.view(2, -1, 16).transpose(0, 1).reshape(-1)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether the kernels multiply with a weight of this shape: whole panels of outputs and steps of inputs."""
        outputs, inputs = weight.shape
        return outputs % Matrix.PANEL == 0 and inputs % 32 == 0

    def fill(self, weight: Tensor) -> None:
        """Copy a weight, bf16 ``[outputs, inputs]``."""
        weight = weight.contiguous()
        self.packed.pack_bf16(weight.data_ptr())

    def fill_codes(self, codes: Tensor, scales: Tensor, minima: Tensor) -> None:
        """Copy codes ``[outputs, inputs]``, uint8 or int8, and float16 scales and minima ``[outputs, inputs / 32]``."""
        codes, scales, minima = codes.contiguous(), scales.contiguous(), minima.contiguous()
        self.packed.pack_codes(codes.data_ptr(), scales.data_ptr(), minima.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """bf16 ``[rows, inputs]`` to ``[rows, outputs]``, half as wide where the weight holds a gate."""
        x = x.contiguous()
        out = torch.empty(len(x), self.width, dtype=self.dtype)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.packed.multiply(self.kernels.kind, x.data_ptr(), len(x), out.data_ptr(), bias)
        return out
