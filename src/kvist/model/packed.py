"""Weights of 4 bits that stay packed: a product of few rows is as slow as its weight is large.

A step that decodes few sequences reads every weight for a handful of multiplications. GGUF's Q4_0 and Q4_1 hold a
weight in a quarter of the bytes of bf16, and PyTorch multiplies with such weights as they are. Unpacking costs work
for every few rows, so that larger steps are faster on unpacked weights; both are kept.
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

_FORMATS = {"Q4_0": 2, "Q4_1": 4}  # bytes of a block before its codes

# The kernel wants rows in whole vectors, and packs blocks of 64 of them.
_ROWS_MULTIPLE = 16
_PACK_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """A matrix of 4-bit codes: ``w = (code - 8) * scale + zero``.

    Attributes:
        codes: uint8 ``[rows, columns]``, 0 to 15.
        scales: float32 ``[rows, columns / 32]``.
        zeros: likewise.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @staticmethod
    def reads(kind: str) -> bool:
        """Whether tensors of this GGUF type are such matrices."""
        return kind in _FORMATS

    @classmethod
    def of_blocks(cls, raw: Tensor, kind: str) -> "FourBit":
        """Read rows of blocks, uint8 ``[rows, bytes]``, of type Q4_0 or Q4_1.

        Blocks are as in ggml-common.h: a scale ``d`` and in Q4_1 a minimum ``m``, both float16, then 16 bytes whose low
        halves are elements 0 to 15 and whose high halves are elements 16 to 31; ``w = (code - 8) d`` or ``code d + m``.
        """
        head = _FORMATS[kind]
        blocks = raw.view(len(raw), -1, head + GROUP // 2)
        factors = blocks[..., :head].contiguous().view(torch.float16).float()
        nibbles = blocks[..., head:]
        scales = factors[..., 0]
        return cls(
            codes=torch.cat((nibbles & 15, nibbles >> 4), dim=-1).view(len(raw), -1),
            scales=scales,
            zeros=factors[..., 1] + 8 * scales if kind == "Q4_1" else torch.zeros_like(scales),
        )

    @classmethod
    def stack(cls, parts: Sequence["FourBit"]) -> "FourBit":
        """The rows of all parts, in order."""
        return cls(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat([part.zeros for part in parts]),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "FourBit":
        """The matrix with its rows, or whole groups of its columns, in another order; ``move`` sees 2 dimensions."""
        return FourBit(codes=move(self.codes), scales=move(self.scales), zeros=move(self.zeros))


class FewRows:
    """``x W^T + b`` for few rows of bf16, on a packed weight. Scales and zeros are rounded to bf16.

    Args:
        weight: with a height that :func:`can_multiply` allows.
        bias: ``[outputs]`` or None.
    """

    def __init__(self, weight: FourBit, bias: Tensor | None) -> None:
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        # The operator wants codes as int32, which are made for some rows at a time; the layout's blocks are 64 rows.
        self.codes = torch.cat([pack(rows.int(), 1) for rows in torch.split(weight.codes, _PACK_ROWS)])
        factors = torch.stack((weight.scales.t(), weight.zeros.t()), dim=-1)
        self.scales_and_zeros = factors.bfloat16().contiguous()
        self.bias = bias
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        out: Tensor = self.multiply(x.contiguous(), self.codes, GROUP, self.scales_and_zeros)
        return out if self.bias is None else out.add_(self.bias)


def can_multiply(outputs: int) -> bool:
    """Whether :class:`FewRows` computes with weights of that many rows on this machine, and gains by it."""
    return outputs % _ROWS_MULTIPLE == 0 and _works()


@cache
def _works() -> bool:
    """Try the operator: it is not public, and elsewhere than on AVX it is a plain loop."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    codes = (torch.arange(64 * 64) % 13).view(64, 64)
    weight = FourBit(codes=codes.to(torch.uint8), scales=torch.full((64, 2), 0.5), zeros=torch.ones(64, 2))
    x = (torch.arange(64) % 3).to(torch.bfloat16)[None]
    try:
        found = FewRows(weight, None)(x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(found.float(), x.float() @ ((codes.float() - 8) * 0.5 + 1).t(), rtol=2**-7)
