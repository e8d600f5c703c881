"""Weights that stay packed: a product of few rows is as slow as its weight is large.

A step that decodes few sequences reads every weight for a handful of multiplications. GGUF's Q4_0 and Q4_1 hold a
weight in a quarter of the bytes of bf16, Q8_0 in half. Where the C++ kernels run, they multiply with such weights as
they are (:mod:`kvist.kernels.matrix`). Elsewhere PyTorch's operator for 4 bits serves few rows: it unpacks anew for
every few of them, so that larger steps are faster on unpacked weights, and both are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# PyTorch's kernel unpacks a weight once for up to 4 rows. Of the time of oneDNN's product in bf16 it takes 0.4 with 1
# row, 0.5 with 2 and 0.75 with 4, but 1.15 with 6 (one core with AVX-512 and AMX; SmolLM2's matrices).
FEW_ROWS = 4

GROUP = 32
"""Elements with one scale in GGUF's blocks."""

_FORMATS = {"Q4_0": (4, 2), "Q4_1": (4, 4), "Q8_0": (8, 2)}  # bits of a code, bytes of a block before its codes

# The kernel wants rows in whole vectors, and packs blocks of 64 of them.
_ROWS_MULTIPLE = 16
_PACK_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Codes:
    """A matrix of codes: ``w = code * scale + minimum``.

    Attributes:
        bits: 4 or 8.
        codes: ``[rows, columns]``: uint8 from 0 to 15, or int8.
        scales: float16 ``[rows, columns / 32]``.
        minima: likewise.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    minima: Tensor

    @staticmethod
    def reads(kind: str) -> bool:
        """Whether tensors of this GGUF type are such matrices."""
        return kind in _FORMATS

    @classmethod
    def of_blocks(cls, raw: Tensor, kind: str) -> "Codes":
        """Read rows of blocks, uint8 ``[rows, bytes]``, of type Q4_0, Q4_1 or Q8_0.

        Blocks are as in ggml-common.h: a scale ``d`` and in Q4_1 a minimum ``m``, both float16. Then 16 bytes whose low
        halves are elements 0 to 15 and whose high halves are elements 16 to 31, ``w = (code - 8) d`` or ``code d + m``;
        in Q8_0 32 signed bytes, ``w = code d``.
        """
        bits, head = _FORMATS[kind]
        blocks = raw.view(len(raw), -1, head + GROUP * bits // 8)
        factors = blocks[..., :head].contiguous().view(torch.float16)
        scales = factors[..., 0]
        if bits == 8:
            codes, minima = blocks[..., head:].view(torch.int8), torch.zeros_like(scales)
        else:
            nibbles = blocks[..., head:]
            codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
            minima = factors[..., 1] if kind == "Q4_1" else -8 * scales
        return cls(bits=bits, codes=codes.reshape(len(raw), -1), scales=scales, minima=minima)

    @classmethod
    def stack(cls, parts: Sequence["Codes"]) -> "Codes | None":
        """The rows of all parts, in order; None where their codes are not equally wide."""
        if len({part.bits for part in parts}) != 1:
            return None
        return cls(
            bits=parts[0].bits,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            minima=torch.cat([part.minima for part in parts]),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Codes":
        """The matrix with its rows, or whole groups of its columns, in another order; ``move`` sees 2 dimensions."""
        return Codes(bits=self.bits, codes=move(self.codes), scales=move(self.scales), minima=move(self.minima))


class FewRows:
    """``x W^T + b`` for few rows of bf16, on a packed weight. Scales and zeros are rounded to bf16.

    Args:
        weight: that :func:`can_multiply` allows.
        bias: ``[outputs]`` or None.
    """

    def __init__(self, weight: Codes, bias: Tensor | None) -> None:
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        # The operator wants codes as int32, which are made for some rows at a time; the layout's blocks are 64 rows.
        self.codes = torch.cat([pack(rows.int(), 1) for rows in torch.split(weight.codes, _PACK_ROWS)])
        scales = weight.scales.float()
        # Its codes count from -8.
        factors = torch.stack((scales.t(), (weight.minima.float() + 8 * scales).t()), dim=-1)
        self.scales_and_zeros = factors.bfloat16().contiguous()
        self.bias = bias
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        out: Tensor = self.multiply(x.contiguous(), self.codes, GROUP, self.scales_and_zeros)
        return out if self.bias is None else out.add_(self.bias)


def can_multiply(weight: Codes) -> bool:
    """Whether :class:`FewRows` computes with such a weight on this machine, and gains by it."""
    return weight.bits == 4 and len(weight.codes) % _ROWS_MULTIPLE == 0 and _works()


@cache
def _works() -> bool:
    """Try the operator: it is not public, and elsewhere than on AVX it is a plain loop."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    codes = (torch.arange(64 * 64) % 13).view(64, 64)
    factors = torch.full((64, 2), 0.5, dtype=torch.float16)
    weight = Codes(bits=4, codes=codes.to(torch.uint8), scales=factors, minima=-6 * factors)
    x = (torch.arange(64) % 3).to(torch.bfloat16)[None]
    try:
        found = FewRows(weight, None)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(found.float(), x.float() @ ((codes.float() - 8) * 0.5 + 1).t(), rtol=2**-7)
