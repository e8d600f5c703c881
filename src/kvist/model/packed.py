"""Weights that stay packed: a product of few rows is as slow as its weight is large.

A step that decodes few sequences reads every weight for a handful of multiplications. GGUF's Q4_0, Q4_1 and Q4_K hold a
weight in a quarter of the bytes of bf16; Q8_0, and Q5_0 as bytes, in half. Where the C++ kernels run, they multiply
with such weights as they are (:mod:`kvist.kernels.matrix`). Elsewhere PyTorch's operator for 4 bits serves few rows: it
unpacks anew for every few of them, so that larger steps are faster on unpacked weights, and both are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch's kernel unpacks a weight once for up to 4 rows. Of the time of oneDNN's product in bf16 it takes 0.4 with 1
# row, 0.5 with 2 and 0.75 with 4, but 1.15 with 6 (one core with AVX-512 and AMX; SmolLM2's matrices).
FEW_ROWS = 4

GROUP = 32
"""Elements with one scale in GGUF's blocks."""

_SUPER = 256
"""Elements of a block of the K types, which hold scales of their own for every 32."""

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
        return kind in _READERS

    @classmethod
    def of_blocks(cls, raw: Tensor, kind: str) -> "Codes":
        """Read rows of blocks, uint8 ``[rows, bytes]``, of a type that :meth:`reads` knows; ggml-common.h draws them.

        Q4_K's scales and minima are products, which are rounded to float16, by less than 2^-11 of themselves; all else
        is exact.
        """
        bits, codes, scales, minima = _READERS[kind](raw)
        rows = len(raw)
        return cls(
            bits=bits, codes=codes.reshape(rows, -1), scales=scales.reshape(rows, -1), minima=minima.reshape(rows, -1)
        )

    def padded(self, rows: int) -> "Codes":
        """With rows of zeros below."""
        below = (0, 0, 0, rows)
        return Codes(
            bits=self.bits,
            codes=F.pad(self.codes, below),
            scales=F.pad(self.scales, below),
            minima=F.pad(self.minima, below),
        )

    @classmethod
    def stack(cls, parts: Sequence["Codes"]) -> "Codes":
        """The rows of all parts, in order; codes of 4 bits become bytes beside others."""
        bits = max(part.bits for part in parts)
        narrow = bits == 4
        return cls(
            bits=bits,
            codes=torch.cat([part.codes if narrow else part.codes.to(torch.int8) for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            minima=torch.cat([part.minima for part in parts]),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Codes":
        """The matrix with its rows, or whole groups of its columns, in another order; ``move`` sees 2 dimensions."""
        return Codes(bits=self.bits, codes=move(self.codes), scales=move(self.scales), minima=move(self.minima))


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """Of each row of bytes first the low halves, then the high ones."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


_Parts = tuple[int, Tensor, Tensor, Tensor]  # bits, codes, scales, minima


def _q4_0(raw: Tensor) -> _Parts:
    """``d`` and 16 bytes: ``w = (code - 8) d``."""
    blocks = raw.view(len(raw), -1, 18)
    scales = _halves(blocks[..., :2])
    return 4, _nibbles(blocks[..., 2:]), scales, -8 * scales


def _q4_1(raw: Tensor) -> _Parts:
    """``d``, ``m`` and 16 bytes: ``w = code d + m``."""
    blocks = raw.view(len(raw), -1, 20)
    factors = _halves(blocks[..., :4])
    return 4, _nibbles(blocks[..., 4:]), factors[..., 0], factors[..., 1]


def _q5_0(raw: Tensor) -> _Parts:
    """``d``, the 32 codes' fifth bits and 16 bytes: ``w = (code - 16) d``."""
    blocks = raw.view(len(raw), -1, 22)
    fifth = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    codes = _nibbles(blocks[..., 6:]) | fifth.flatten(-2) << 4
    scales = _halves(blocks[..., :2])
    return 8, codes.to(torch.int8) - 16, scales, torch.zeros_like(scales)


def _q8_0(raw: Tensor) -> _Parts:
    """``d`` and 32 signed bytes: ``w = code d``."""
    blocks = raw.view(len(raw), -1, 34)
    scales = _halves(blocks[..., :2])
    return 8, blocks[..., 2:].view(torch.int8), scales, torch.zeros_like(scales)


def _q4_k(raw: Tensor) -> _Parts:
    """Of 256: ``d``, ``m``, 12 bytes with eight scales and minima of 6 bits, and 128 bytes, 32 for two groups:
    ``w = code d scale - m minimum``."""
    blocks = raw.view(len(raw), -1, _SUPER // 2 + 16)
    factors = _halves(blocks[..., :4]).float()
    first, second, rest = torch.split(blocks[..., 4:16], 4, dim=-1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, GROUP))
    return 4, codes, (factors[..., :1] * scales).half(), (-factors[..., 1:] * minima).half()


_READERS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
}


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
