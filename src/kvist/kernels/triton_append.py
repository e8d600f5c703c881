"""Quantise a step's keys, values or latents and store them in the arena, in one pass: the GPU's kernel.

One program quantises some tokens of one head. A token's bytes are its own, so that no two programs write the same.
The formulas are those of ggml's ``quantize_row_q8_0``, ``q4_0`` and ``q4_1`` with ties to even; float32 throughout.
"""

import triton
import triton.language as tl

from kvist.kernels.triton_numbers import fp8_codes, rounded, whole

_GROUP = tl.constexpr(32)


@triton.jit
def _f16(x: tl.tensor) -> tl.tensor:
    """float32 as f16; what is too large saturates."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _holds_none(x: tl.tensor) -> tl.tensor:
    """Whether there is what is no number in ``[tokens, groups, …]``, by group: the largest of numbers leaves it out."""
    return tl.max((x != x).to(tl.int32), axis=2) > 0


@triton.jit
def _bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _scaled(x: tl.tensor, scale: tl.tensor, low: tl.constexpr, high: tl.constexpr) -> tl.tensor:
    """Codes of ``[tokens, groups, …]``; 0 where the scale is, or is no number."""
    some = (scale == scale) & (scale != 0.0)
    ratio = tl.div_rn(x, tl.broadcast_to(tl.where(some, scale, 1.0)[:, :, None], x.shape))
    ratio = tl.minimum(tl.maximum(ratio, low), high)
    return tl.where(tl.broadcast_to(some[:, :, None], x.shape), whole(ratio), 0.0)


@triton.jit
def append_side(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    count: tl.tensor,
    begin: tl.tensor,
    CODEC: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    ITEM: tl.constexpr,
    RUN_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SLOT_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    SCALE_SLOT_STEP: tl.constexpr,
    SCALE_GROUP_STEP: tl.constexpr,
    MINIMUM_STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    X_ITEM_STEP: tl.constexpr,
) -> None:
    """Store ``[count, heads, dim]``; a grid of ``(count / TOKENS, heads)``.

    Args:
        x_ptr: the first element of the side; a token's heads are dense.
        x_stride: elements from one token to the next.
        codes_ptr: the arena as the codec's codes.
        scales_ptr: the arena as f16.
        offsets_ptr: int64 ``[count]``, byte at which each token's block begins.
        slots_ptr: int64 ``[count]``, its place in the block.
        count: tokens.
        begin: byte of a block at which the side of this layer begins.
        GROUPS: of a vector, at least so many and a power of two; without scales 1.
        EACH: columns of a group.
        TOKENS: of a program, a power of two.
        X_ITEM_STEP: elements from one head to the next.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < count
    block = tl.load(offsets_ptr + token, mask=real, other=0) + begin + head.to(tl.int64) * RUN_BYTES
    slot = tl.load(slots_ptr + token, mask=real, other=0)
    column = tl.arange(0, GROUPS * EACH)
    inside = real[:, None] & (column < COLUMNS)[None, :]
    source = x_ptr + token.to(tl.int64)[:, None] * x_stride + head * X_ITEM_STEP
    target = codes_ptr + (block // ITEM + slot * SLOT_STEP)[:, None] + (column * COLUMN_STEP)[None, :]

    if CODEC == "int8" or CODEC == "int4" or CODEC == "int4a":
        group = tl.arange(0, GROUPS)
        whole_groups = real[:, None] & (group * EACH < COLUMNS)[None, :]
        scale_at = scales_ptr + ((block + SCALE_BYTES) // 2 + slot * SCALE_SLOT_STEP)[:, None]
        scale_at = scale_at + (group * SCALE_GROUP_STEP)[None, :]
        shape: tl.constexpr = (TOKENS, GROUPS, EACH)
        if CODEC == "int8":
            x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
            x = tl.reshape(x, shape)
            scale = _f16(tl.div_rn(tl.max(tl.abs(x), axis=2), tl.full((TOKENS, GROUPS), 127.0, tl.float32)))
            scale = tl.where(_holds_none(x), float("nan"), scale).to(tl.float16)
            codes = _scaled(x, scale.to(tl.float32), -127.0, 127.0).to(tl.int8)
            tl.store(target, tl.reshape(codes, (TOKENS, GROUPS * EACH)), mask=inside)
            tl.store(scale_at, scale, mask=whole_groups)
        else:
            low_element = column // HIGH * (2 * HIGH) + column % HIGH
            low = tl.load(source + low_element[None, :], mask=inside, other=0.0).to(tl.float32)
            high = tl.load(source + (low_element + HIGH)[None, :], mask=inside, other=0.0).to(tl.float32)
            low = tl.reshape(low, shape)
            high = tl.reshape(high, shape)
            none = _holds_none(low) | _holds_none(high)
            if CODEC == "int4":
                # The first element of the largest magnitude, with its sign, becomes -8.
                peak = tl.maximum(tl.max(tl.abs(low), axis=2), tl.max(tl.abs(high), axis=2))
                peaks = tl.broadcast_to(peak[:, :, None], shape)
                place = tl.broadcast_to(tl.reshape(low_element % _GROUP, (1, GROUPS, EACH)), shape)
                low_place = tl.where(tl.abs(low) == peaks, place, _GROUP)
                high_place = tl.where(tl.abs(high) == peaks, place + HIGH, _GROUP)
                first = tl.minimum(tl.min(low_place, axis=2), tl.min(high_place, axis=2))
                firsts = tl.broadcast_to(first[:, :, None], shape)
                # Only one of the bit patterns is not 0; a zero keeps its sign.
                signed = tl.sum(tl.where(low_place == firsts, _bits(low), 0), axis=2)
                signed = signed + tl.sum(tl.where(high_place == firsts, _bits(high), 0), axis=2)
                signed = signed.to(tl.uint32).to(tl.float32, bitcast=True)
                scale = _f16(tl.div_rn(signed, tl.full((TOKENS, GROUPS), -8.0, tl.float32)))
                scale = tl.where(none, float("nan"), scale).to(tl.float16)
                low = _scaled(low, scale.to(tl.float32), -8.0, 7.0) + 8.0
                high = _scaled(high, scale.to(tl.float32), -8.0, 7.0) + 8.0
            else:
                least = tl.minimum(tl.min(low, axis=2), tl.min(high, axis=2))
                most = tl.maximum(tl.max(low, axis=2), tl.max(high, axis=2))
                scale = _f16(tl.div_rn(most - least, tl.full((TOKENS, GROUPS), 15.0, tl.float32)))
                scale = tl.where(none, float("nan"), scale).to(tl.float16)
                minimum = _f16(least)
                bottom = tl.broadcast_to(minimum.to(tl.float32)[:, :, None], shape)
                low = _scaled(low - bottom, scale.to(tl.float32), 0.0, 15.0)
                high = _scaled(high - bottom, scale.to(tl.float32), 0.0, 15.0)
                tl.store(scale_at + MINIMUM_STEP, minimum, mask=whole_groups)
            codes = low.to(tl.uint8) | (high.to(tl.uint8) << 4)
            tl.store(target, tl.reshape(codes, (TOKENS, GROUPS * EACH)), mask=inside)
            tl.store(scale_at, scale, mask=whole_groups)
    else:
        x = tl.load(source + column[None, :], mask=inside, other=0.0)
        if CODEC == "fp8":
            tl.store(target, fp8_codes(x.to(tl.float32)), mask=inside)
        else:
            tl.store(target, rounded(x.to(tl.float32), codes_ptr.dtype.element_ty), mask=inside)
