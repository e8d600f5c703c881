"""Numbers of the GPU kernels: rounding, the operands of products, and what codes mean.

Only arithmetic that is exact, or rounded once to the nearest and ties to even, so that the same bytes are written
everywhere. The interpreter knows bf16 only as bit patterns: it cuts where hardware rounds, and multiplies them as
whole numbers; there such values are kept as the float32 that they stand for.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def nearest_bf16(x: tl.tensor) -> tl.tensor:
    """float32 to the nearest number that bf16 has, still float32; what is no number stays none."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = bits + (((bits >> 16) & 1) + 0x7FFF)
    return tl.where(x == x, ((bits >> 16) << 16).to(tl.float32, bitcast=True), x)


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 as ``dtype``, rounded to the nearest, to be stored."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = nearest_bf16(x)
    return x.to(dtype)


@triton.jit
def operand(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Numbers as one side of a product that is computed in ``dtype``."""
    if INTERPRETED:
        x = x.to(tl.float32)
        if dtype == tl.bfloat16:
            x = nearest_bf16(x)
        if dtype == tl.float16:
            x = x.to(tl.float16).to(tl.float32)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def whole(x: tl.tensor) -> tl.tensor:
    """float32 to the nearest whole number, ties to even; magnitudes below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent of float32, to about 1e-7."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def fp8_codes(x: tl.tensor) -> tl.tensor:
    """float32 to e4m3fn (arXiv:2209.05433) as uint8, saturating at 448; what is no number stays none.

    As PyTorch's ``fp8e4m3fn_from_fp32_value``: below the smallest normal number an addition shifts and rounds.
    """
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    bits = tl.maximum(size, 0.015625).to(tl.uint32, bitcast=True)
    large = (bits - 0x3BF80001 + ((bits >> 20) & 1)) >> 20
    codes = tl.where(size < 0.015625, small, large)
    return (tl.where(x == x, codes, 0x7F) | sign).to(tl.uint8)


@triton.jit
def fp8_values(codes: tl.tensor) -> tl.tensor:
    """e4m3fn as uint8 to float32: f16 has the same fields, one bit wider in the exponent, whose bias is 8 larger.

    What is no number has all bits of both fields, which in f16 are moved up together.
    """
    wide = codes.to(tl.uint16)
    rest = wide & 0x7F
    half = ((wide & 0x80) << 8) | tl.where(rest == 0x7F, 0x7E00, rest << 7)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def spread(scales: tl.tensor, rows: tl.constexpr, groups: tl.constexpr, each: tl.constexpr) -> tl.tensor:
    """One scale a group, ``[rows, groups]``, to one a column, ``[rows, groups x each]``."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (rows, groups, each)), (rows, groups * each))
