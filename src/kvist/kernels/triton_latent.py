"""Attention over latents (MLA, arXiv:2405.04434 section 2.1) in their own space: a vector's beginning is its value.

Every query head attends to the same vectors, ``latent | rotary key``, so that a token is read once for all of them.
"""

import triton
import triton.language as tl

from kvist.kernels.triton_attention import FIELDS, block_of_keys, weighed
from kvist.kernels.triton_numbers import fp8_values, operand, rounded


@triton.jit
def attend_latents(
    q_ptr: tl.tensor,
    q_stride: tl.tensor,
    q_step: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    pieces_ptr: tl.tensor,
    begin: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CODEC: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT_ITEM: tl.constexpr,
    ROPE_ITEM: tl.constexpr,
    ROPE_BYTES: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
) -> None:
    """Attend one piece of :mod:`kvist.kernels.triton_attention`; a grid of ``(pieces,)``.

    Args:
        q_ptr: ``[tokens, HEADS, RANK + ROPE]`` in the latents' space, a token ``q_stride`` apart,
            a head ``q_step``.
        out_ptr: ``[tokens, HEADS, RANK]``.
        partial_ptr: float32 ``[partial rows, RANK]``.
        latent_ptr, rope_ptr: the arena, read as what the two parts of a vector are.
        begin: byte of a block at which this layer's vectors begin.
        ROPE_BYTES: bytes of a vector before its rotary part.
        LATENT_COLUMNS, ROPE_COLUMNS: at least RANK and ROPE, powers of two, 16 or more.
    """
    piece = pieces_ptr + tl.program_id(0) * FIELDS
    row = tl.load(piece).to(tl.int64)
    first_fold = tl.load(piece + 1)
    position = tl.load(piece + 3)
    tables = tables_ptr + tl.load(piece + 4)
    first = tl.load(piece + 5)
    end = tl.load(piece + 6)

    fold = first_fold + tl.arange(0, ROWS)
    real = fold < tl.load(piece + 2)
    token = fold // HEADS
    head = fold % HEADS
    queries = position + token
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    column = tl.arange(0, LATENT_COLUMNS)
    rope_column = tl.arange(0, ROPE_COLUMNS)
    mask = real[:, None] & (column < RANK)[None, :]
    rope_mask = real[:, None] & (rope_column < ROPE)[None, :]
    q_at = q_ptr + ((row + token) * q_stride + head * q_step)[:, None]
    q_latent = operand(tl.load(q_at + column[None, :], mask=mask, other=0.0), dtype)
    q_rope = operand(tl.load(q_at + RANK + rope_column[None, :], mask=rope_mask, other=0.0), dtype)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, LATENT_COLUMNS), tl.float32)
    for start in range(first // KEYS * KEYS, end, KEYS):
        keys = tl.multiple_of(start, KEYS) + tl.arange(0, KEYS)
        base, inside = block_of_keys(tables, keys, first, end, TOKENS, ALIGN)
        vector = tl.multiple_of(base + begin + (keys % TOKENS) * VECTOR_BYTES, ALIGN)
        latent_at = tl.multiple_of(vector // LATENT_ITEM, ALIGN // LATENT_ITEM)
        latent_at = latent_ptr + latent_at[:, None] + column[None, :]
        latent = tl.load(latent_at, mask=inside[:, None] & (column < RANK)[None, :], other=0)
        rope_at = tl.multiple_of((vector + ROPE_BYTES) // ROPE_ITEM, ALIGN // ROPE_ITEM)
        rope_at = rope_ptr + rope_at[:, None] + rope_column[None, :]
        rope = tl.load(rope_at, mask=inside[:, None] & (rope_column < ROPE)[None, :], other=0.0)
        if CODEC == "fp8":
            latent = fp8_values(latent)
        # Nothing times what is no number would be no number.
        own = ((keys >= first) & (keys < end))[:, None]
        latent = operand(tl.where(own, latent.to(tl.float32), 0.0), dtype)
        products = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        products = tl.dot(q_rope, tl.trans(operand(rope.to(tl.float32), dtype)), products, input_precision="ieee")
        top, total, weights, before = weighed(products, queries, keys, first, end, top, total, scale, cap, 0, CAPPED)
        mixed = tl.dot(operand(weights, dtype), latent, mixed * before[:, None], input_precision="ieee")

    some = total > 0.0
    total = tl.where(some, total, 1.0)
    mixed = mixed * (1.0 / total)[:, None]
    if tl.load(piece + 8) != 0:
        result_at = out_ptr + ((row + token) * HEADS + head)[:, None] * RANK + column[None, :]
        tl.store(result_at, rounded(mixed, dtype), mask=mask)
    else:
        partial = (tl.load(piece + 7) + fold).to(tl.int64)
        tl.store(partial_ptr + partial[:, None] * RANK + column[None, :], mixed, mask=mask)
        tl.store(lse_ptr + partial, tl.where(some, top + tl.log2(total), float("-inf")), mask=real)
