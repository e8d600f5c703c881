"""Keys and values as bytes: every codec, to the bit, as a block holds it.

A *run* is one KV head of one layer of one block: ``T`` tokens of ``D`` elements, ``G = D / 32`` groups that share a
scale. Numbers without a scale lie one token after another, ``[T][D]``. Quantised keys lie in rows, quantised values
transposed, codes before scales::

    keys    int8            codes [T][D]         scales [T][G]
            int4  int4a     codes [T][G][16]     scales [T][G], or pairs of scale and minimum [T][G][2]
                            byte i of a group: element i in its low half, element i + 16 in its high one
    values  int8            codes [D][T]         scales [G][T]
            int4  int4a     codes [D/4][2][T]    scales [G][T], then minima [G][T]
                            byte (a, j, t): element 4a + j of token t in its low half, 4a + 2 + j in its high one
    keys    int4c           codes [T][G][16]     scales, then minima, of a run of 32 tokens: [T/32][2][D]
    latents in fp8          [T] times rank elements in fp8, then rope_dim in bf16

So a vector register of a row of keys covers one token's elements under one scale, one of a row of values 16 or more
tokens of one element: codes go into products as the small integers that they are, a value's scale into its weight, and
nothing is transposed or summed across. A byte belongs to one token, and a token is quantised when it is appended; but
for int4c, whose scales belong to a channel and a run of tokens, which is quantised when it is sealed.

Codes are made in float32 of the numbers as the compute type has them; scales and minima are f16::

    int8    d = max |x| / 127                     x' = d c, c = x / d in -127 … 127
    int4    d = m / -8, m the x of largest |x|    x' = d c, c = x / d in -8 … 7, stored as c + 8    (ggml's q4_0)
    int4a   d = (max x - min x) / 15              x' = min + d c, c = (x - min) / d in 0 … 15       (ggml's q4_1)
    int4c   the same, of one channel of 32 tokens                                       (KIVI, arXiv:2402.02750)
    fp8     e4m3fn without a scale, saturating at 448

``d`` and ``min`` are rounded first, and codes made with what they have become; codes and fp8 are rounded to the
nearest, to even from the middle. Where ``d`` rounds to nothing, of either sign, codes are 0. What is too large for f16
saturates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvist.errors import InputError

Side = Literal["key", "value"]

GROUP = 32
"""Elements under one scale."""

_MOST_F16 = 65504.0
_MOST_FP8 = 448.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One of the arrays of which a run is made; of it a token has a row of equally spaced elements.

    Attributes:
        dtype: of an element.
        elements: of one token.
        offset: bytes before the array.
        token_step: bytes from one token's row to the next.
        element_step: bytes from one element of a row to the next.
        shared: tokens that have one row in common; ``token_step`` is from one of their rows to the next.
    """

    dtype: torch.dtype
    elements: int
    offset: int
    token_step: int
    element_step: int
    shared: int = 1

    def rows(self, runs: Tensor, tokens: int) -> Tensor:
        """The rows in uint8 ``[runs, run bytes]``, where they lie: ``[runs, tokens / shared, elements]``."""
        flat = runs.view(self.dtype)
        item = self.dtype.itemsize
        steps = (flat.stride(0), self.token_step // item, self.element_step // item)
        size = (len(flat), tokens // self.shared, self.elements)
        return flat.as_strided(size, steps, flat.storage_offset() + self.offset // item)


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """A codec: vectors along the last dimension to rows, and back into a tensor.

    Both are told how far apart lie the two elements whose codes share a byte, where two do.
    """

    encode: Callable[[Tensor, int], tuple[Tensor, ...]]
    decode: Callable[[tuple[Tensor, ...], int, Tensor], None]


class Coding:
    """How vectors of one width lie in runs of one side, and the ways between them and numbers.

    Args:
        codec: its name.
        side: whose layout; ``key`` for latents.
        dim: width of a vector.
        tokens: of a block.

    Attributes:
        pieces: the arrays of a run, in their order.
        run_bytes: ``tokens x vector_bytes(dim)`` of the codec.
        shared: tokens that have scales in common, and are coded together.

    Raises:
        InputError: there is no such codec, or the width is not a whole number of its groups.
    """

    def __init__(self, codec: str, *, side: Side, dim: int, tokens: int) -> None:
        self.shared = _SHARED.get(codec, 1)
        if codec not in _SCHEMES or (self.shared > 1 and side == "value"):
            raise InputError(f"{side}: {codec!r} is not stored; choose one of {', '.join(_SCHEMES)}", key=side)
        self.codec = codec
        self.side = side
        self.dim = dim
        self.tokens = tokens
        self.quantised = codec not in PLAIN
        self._scheme = _SCHEMES[codec]
        if codec not in _GROUPED:
            dtype = PLAIN.get(codec, torch.uint8)
            self._half = 0
            sizes = [(dtype, dim)]
            transposed = False
        else:
            if dim % GROUP:
                raise InputError(
                    f"codec {codec} stores groups of {GROUP} elements; a width of {dim} is not a multiple: choose a "
                    f"codec without groups, such as bf16",
                    key="format",
                )
            code, bits, scales = _GROUPED[codec]
            self._half = 16 if side == "key" else 2
            sizes = [(code, dim * bits // 8), (torch.float16, scales * (dim // GROUP))]
            transposed = side == "value"
        if tokens % self.shared:
            raise InputError(
                f"{side}: {codec} stores runs of {self.shared} tokens; blocks of {tokens} are not a multiple: choose "
                f"larger ones",
                key="block_tokens",
            )
        pieces, offset = [], 0
        for number, (dtype, elements) in enumerate(sizes):
            item, shared = dtype.itemsize, 1
            if number and self.shared > 1:
                elements, shared = 2 * dim, self.shared
            token_step, element_step = (item, tokens * item) if transposed else (elements * item, item)
            pieces.append(
                Piece(
                    dtype=dtype, elements=elements, offset=offset, token_step=token_step, element_step=element_step,
                    shared=shared,
                )
            )  # fmt: skip
            offset += tokens // shared * elements * item
        self.pieces = tuple(pieces)
        self.run_bytes = offset

    def quantise(self, x: Tensor) -> tuple[Tensor, ...]:
        """Code vectors.

        Args:
            x: ``[…, dim]``, of any floating type; of codecs that share scales ``[…, tokens, dim]``, whole runs.

        Returns:
            A row ``[…, elements]`` of each piece, of its type; of those that tokens share one a run.
        """
        rows = self._scheme.encode(x, self._half)
        if self.shared == 1 and len(rows) == 2 and rows[1].dim() > x.dim():
            # A scale and a minimum: pairs of a group among keys, all of one, then all of the other among values.
            rows = rows[0], (rows[1] if self.side == "key" else rows[1].transpose(-1, -2)).flatten(-2)
        return rows

    def numbers(self, rows: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """What rows of pieces stand for, rounded once to the type of ``out``, ``[…, dim]``, which is returned."""
        if self.codec == "int4a":
            codes, pairs = rows
            if self.side == "key":
                rows = codes, _cut(pairs, 2)
            else:
                rows = codes, _cut(pairs, self.dim // GROUP).transpose(-1, -2)
        self._scheme.decode(rows, self._half, out)
        return out

    def rounded(self, x: Tensor) -> Tensor:
        """Vectors ``[…, dim]`` as they will be read again, in their own type."""
        return self.numbers(self.quantise(x), torch.empty_like(x, memory_format=torch.contiguous_format))

    def pack(self, x: Tensor) -> Tensor:
        """Whole runs of vectors ``[…, tokens, dim]``: uint8 ``[…, run_bytes]``."""
        flat = x.reshape(-1, self.tokens, self.dim)
        runs = torch.empty(len(flat), self.run_bytes, dtype=torch.uint8)
        for piece, rows in zip(self.pieces, self.quantise(flat), strict=True):
            piece.rows(runs, self.tokens).copy_(rows)
        return runs.view(*x.shape[:-2], self.run_bytes)

    def unpack(self, runs: Tensor, out: Tensor) -> Tensor:
        """What runs hold.

        Args:
            runs: uint8 ``[runs, run_bytes]``, whose rows are dense.
            out: ``[runs, tokens, dim]``, of any floating type; filled and returned.
        """
        return self.numbers(tuple(piece.rows(runs, self.tokens) for piece in self.pieces), out)


class LatentCoding(Coding):
    """How latents lie in runs whose vectors are in fp8, their rotary elements in bf16 behind them.

    Args:
        rank: elements in fp8; an even number.
        rope_dim: elements in bf16.
        tokens: of a block.
    """

    def __init__(self, *, rank: int, rope_dim: int, tokens: int) -> None:
        latent = Coding("fp8", side="key", dim=rank, tokens=tokens)
        rope = Coding("bf16", side="key", dim=rope_dim, tokens=tokens)
        if rank % rope.pieces[0].dtype.itemsize:
            raise InputError(f"key: latents of {rank} elements in fp8 are not whole pairs; choose bf16", key="key")
        super().__init__("fp8", side="key", dim=rank + rope_dim, tokens=tokens)
        self._halves = ((latent, slice(rank)), (rope, slice(rank, None)))
        step = (latent.run_bytes + rope.run_bytes) // tokens
        self.pieces = (
            replace(latent.pieces[0], token_step=step),
            replace(rope.pieces[0], token_step=step, offset=rank),
        )
        self.run_bytes = tokens * step

    def quantise(self, x: Tensor) -> tuple[Tensor, ...]:
        """As :meth:`Coding.quantise`."""
        return tuple(row for coding, part in self._halves for row in coding.quantise(x[..., part]))

    def numbers(self, rows: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """As :meth:`Coding.numbers`."""
        for (coding, part), row in zip(self._halves, rows, strict=True):
            coding.numbers((row,), out[..., part])
        return out


def _encode_int8(x: Tensor, half: int) -> tuple[Tensor, ...]:
    wide = _cut(x.float(), GROUP)
    scales = _f16(wide.abs().amax(-1) / 127)
    codes = (wide / _divisor(scales)).round_().clamp_(-127, 127)
    return codes.flatten(-2).to(torch.int8), scales


def _decode_int8(rows: tuple[Tensor, ...], half: int, out: Tensor) -> None:
    codes, scales = rows
    torch.mul(_cut(codes, GROUP), scales.float().unsqueeze(-1), out=_cut(out, GROUP))


def _encode_int4(x: Tensor, half: int) -> tuple[Tensor, ...]:
    wide = _cut(x.float(), GROUP)
    largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = _f16(largest / -8)
    codes = (wide / _divisor(scales)).round_().clamp_(-8, 7).add_(8)
    return _paired(codes, half), scales


def _decode_int4(rows: tuple[Tensor, ...], half: int, out: Tensor) -> None:
    codes, scales = rows
    centred = _halves(codes, half).float().sub_(8)
    torch.mul(centred, scales.float().unsqueeze(-1), out=_cut(out, GROUP))


def _encode_int4a(x: Tensor, half: int) -> tuple[Tensor, ...]:
    wide = _cut(x.float(), GROUP)
    least, most = torch.aminmax(wide, dim=-1)
    scales, minima = _f16((most - least) / 15), _f16(least)
    codes = ((wide - minima.float().unsqueeze(-1)) / _divisor(scales)).round_().clamp_(0, 15)
    return _paired(codes, half), torch.stack((scales, minima), dim=-1)


def _decode_int4a(rows: tuple[Tensor, ...], half: int, out: Tensor) -> None:
    codes, pairs = rows
    scales, minima = pairs.float().unsqueeze(-1).unbind(-2)
    _cut(out, GROUP).copy_(torch.addcmul(minima, _halves(codes, half).float(), scales))


def _encode_int4c(x: Tensor, half: int) -> tuple[Tensor, ...]:
    runs = torch.unflatten(x.float(), -2, (-1, _SHARED["int4c"]))
    least, most = torch.aminmax(runs, dim=-2)
    # Of zeros of both signs either may come out as the least: it is stored as that without a sign.
    scales, minima = _f16((most - least) / 15), _f16(least) + 0
    codes = ((runs - minima.float().unsqueeze(-2)) / _divisor(scales).transpose(-1, -2)).round_().clamp_(0, 15)
    return _paired(_cut(codes.flatten(-3, -2), GROUP), half), torch.cat((scales, minima), dim=-1)


def _decode_int4c(rows: tuple[Tensor, ...], half: int, out: Tensor) -> None:
    codes, shared = rows
    scales, minima = shared.float().unsqueeze(-2).chunk(2, dim=-1)
    runs = torch.unflatten(_halves(codes, half).float().flatten(-2), -2, (-1, _SHARED["int4c"]))
    out.copy_(torch.addcmul(minima, runs, scales).flatten(-3, -2))


def _encode_fp8(x: Tensor, half: int) -> tuple[Tensor, ...]:
    return (x.float().clamp(-_MOST_FP8, _MOST_FP8).to(torch.float8_e4m3fn).view(torch.uint8),)


def _decode_fp8(rows: tuple[Tensor, ...], half: int, out: Tensor) -> None:
    out.copy_(rows[0].view(torch.float8_e4m3fn))


def _plain(dtype: torch.dtype) -> _Scheme:
    def encode(x: Tensor, half: int) -> tuple[Tensor, ...]:
        return (x.to(dtype),)

    def decode(rows: tuple[Tensor, ...], half: int, out: Tensor) -> None:
        out.copy_(rows[0])

    return _Scheme(encode=encode, decode=decode)


def _f16(x: Tensor) -> Tensor:
    return x.clamp(-_MOST_F16, _MOST_F16).half()


def _divisor(scales: Tensor) -> Tensor:
    """Float32 ``[…, 1]``; of a scale of nothing infinity, so that codes are 0."""
    wide = scales.float()
    return wide.masked_fill(wide == 0, float("inf")).unsqueeze(-1)


def _cut(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as one of these sizes, and one of how many there are before them."""
    return torch.unflatten(x, -1, (-1, *sizes))


def _paired(codes: Tensor, half: int) -> Tensor:
    """Codes 0 … 15, ``[…, groups, 32]``, two a byte: of ``2 x half`` neighbours the first half low, the other high."""
    low, high = _cut(codes.to(torch.uint8).flatten(-2), 2, half).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def _halves(codes: Tensor, half: int) -> Tensor:
    """The way back from :func:`_paired`: uint8 ``[…, groups, 32]``."""
    pairs = _cut(codes, half)
    return _cut(torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3), GROUP)


PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Codecs that are a type of PyTorch's, which are computed with as they are stored where that is the compute type."""

# Type of the codes, bits of one, and f16 numbers a group.
_GROUPED = {
    "int8": (torch.int8, 8, 1),
    "int4": (torch.uint8, 4, 1),
    "int4a": (torch.uint8, 4, 2),
    "int4c": (torch.uint8, 4, 2),
}
# Tokens that have scales in common.
_SHARED = {"int4c": 32}

_SCHEMES = {
    **{name: _plain(dtype) for name, dtype in PLAIN.items()},
    "fp8": _Scheme(encode=_encode_fp8, decode=_decode_fp8),
    "int8": _Scheme(encode=_encode_int8, decode=_decode_int8),
    "int4": _Scheme(encode=_encode_int4, decode=_decode_int4),
    "int4a": _Scheme(encode=_encode_int4a, decode=_decode_int4a),
    "int4c": _Scheme(encode=_encode_int4c, decode=_decode_int4c),
}

STORED = tuple(name for name in _SCHEMES if name not in _SHARED)
"""Names of the codecs that keys and values are stored in."""

SEALED = tuple(_SHARED)
"""Names of those that keys are stored in a run at a time."""
