"""Attention over a paged, quantised past: one kernel for decodes and chunks of prompts.

A *piece* is what one program attends: some rows of queries of one KV head over some keys. Rows are the queries of
neighbouring tokens that share a KV head, ``token x repeats + repeat``. Codes are read in place, whole blocks of them;
what lies outside the piece has no weight, whatever its bytes mean. Pieces of one query that several programs attend
are merged by their log-sum-exp (FlashInfer's cascade, arXiv:2501.01005; flash decoding), kept here to base 2.

Fields of a piece, int32: row of the first token; first and end fold; position of the first token; begin of its table;
first and end key; where its partial results go, less the first fold; whether it is alone and writes the result.
"""

import triton
import triton.language as tl

from kvist.kernels.triton_numbers import fp8_values, operand, rounded, spread, tanh

FIELDS = tl.constexpr(9)


@triton.jit
def block_of_keys(
    tables: tl.tensor, keys: tl.tensor, first: tl.tensor, end: tl.tensor, TOKENS: tl.constexpr, ALIGN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where the blocks of some keys begin, in bytes, and which of them are the piece's: whole blocks."""
    place = keys // TOKENS
    inside = (place >= first // TOKENS) & (place < (end + TOKENS - 1) // TOKENS)
    # Codes are read in wide words where blocks begin at multiples of those.
    return tl.multiple_of(tl.load(tables + place, mask=inside, other=0), ALIGN), inside


@triton.jit
def scaled_tile(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    run: tl.tensor,
    slots: tl.tensor,
    inside: tl.tensor,
    CODEC: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SLOT_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    SCALE_SLOT_STEP: tl.constexpr,
    SCALE_GROUP_STEP: tl.constexpr,
    MINIMUM_STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What codes mean, ``[keys, GROUPS x EACH]`` float32: the only elements, or the low ones and the high ones.

    Args:
        run: byte at which the head's run of each key begins.
        slots: of the keys in their blocks.
        inside: which keys are read; others are 0.
    """
    column = tl.arange(0, GROUPS * EACH)
    mask = inside[:, None] & (column < COLUMNS)[None, :]
    at = tl.multiple_of(run // ITEM, ALIGN // ITEM) + slots * SLOT_STEP
    codes = tl.load(codes_ptr + at[:, None] + (column * COLUMN_STEP)[None, :], mask=mask, other=0)
    if CODEC == "int8" or CODEC == "int4" or CODEC == "int4a":
        group = tl.arange(0, GROUPS)
        scale_run = (run + SCALE_BYTES) // 2
        if SCALE_BYTES % ALIGN == 0:
            scale_run = tl.multiple_of(scale_run, ALIGN // 2)
        scale_at = scales_ptr + (scale_run + slots * SCALE_SLOT_STEP)[:, None] + (group * SCALE_GROUP_STEP)[None, :]
        scale_mask = inside[:, None] & (group * EACH < COLUMNS)[None, :]
        scale = spread(tl.load(scale_at, mask=scale_mask, other=0.0).to(tl.float32), KEYS, GROUPS, EACH)
        if CODEC == "int8":
            low = codes.to(tl.float32) * scale
            high = low
        else:
            low = (codes & 15).to(tl.int32).to(tl.float32)
            high = (codes >> 4).to(tl.int32).to(tl.float32)
            if CODEC == "int4":
                low = (low - 8.0) * scale
                high = (high - 8.0) * scale
            else:
                minimum = tl.load(scale_at + MINIMUM_STEP, mask=scale_mask, other=0.0).to(tl.float32)
                minimum = spread(minimum, KEYS, GROUPS, EACH)
                low = low * scale + minimum
                high = high * scale + minimum
    elif CODEC == "fp8":
        low = fp8_values(codes)
        high = low
    else:
        low = codes.to(tl.float32)
        high = low
    return low, high


@triton.jit
def weighed(
    products: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One more tile of scores in the running softmax of arXiv:1805.02867, to base 2.

    Args:
        products: ``[rows, keys]`` of queries and keys.
        queries: positions of the rows.
        keys: positions.
        top: largest score so far, -inf before the first.
        total: sum of the weights so far.

    Returns:
        The new largest score, the new sum, the weights and the factor of what was summed before.
    """
    scores = products * scale
    if CAPPED:
        scores = tanh(scores) * cap
    seen = (keys[None, :] <= queries[:, None]) & ((keys >= first) & (keys < end))[None, :]
    if WINDOW > 0:
        seen = seen & (keys[None, :] > queries[:, None] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    # Rows that have seen nothing yet weigh nothing.
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - level[:, None])
    before = tl.exp2(top - level)
    return highest, total * before + tl.sum(weights, axis=1), weights, before


@triton.jit
def with_sink(
    sinks_ptr: tl.tensor,
    repeats: tl.tensor,
    head: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    mask: tl.tensor,
    KV_HEADS: tl.constexpr,
) -> tl.tensor:
    """The sum of weights with the head's sink among them: a score without a value."""
    sink = tl.load(sinks_ptr + repeats * KV_HEADS + head, mask=mask, other=0.0) * 1.4426950408889634
    return total + tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def attend_pages(
    q_ptr: tl.tensor,
    q_stride: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    pieces_ptr: tl.tensor,
    key_begin: tl.tensor,
    value_begin: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    KEY_HIGH: tl.constexpr,
    KEY_ITEM: tl.constexpr,
    KEY_RUN: tl.constexpr,
    KEY_SCALE_BYTES: tl.constexpr,
    KEY_SLOT_STEP: tl.constexpr,
    KEY_COLUMN_STEP: tl.constexpr,
    KEY_SCALE_SLOT_STEP: tl.constexpr,
    KEY_SCALE_GROUP_STEP: tl.constexpr,
    KEY_MINIMUM_STEP: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    KEY_EACH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_HIGH: tl.constexpr,
    VALUE_ITEM: tl.constexpr,
    VALUE_RUN: tl.constexpr,
    VALUE_SCALE_BYTES: tl.constexpr,
    VALUE_SLOT_STEP: tl.constexpr,
    VALUE_COLUMN_STEP: tl.constexpr,
    VALUE_SCALE_SLOT_STEP: tl.constexpr,
    VALUE_SCALE_GROUP_STEP: tl.constexpr,
    VALUE_MINIMUM_STEP: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    VALUE_EACH: tl.constexpr,
) -> None:
    """Attend one piece; a grid of ``(pieces, KV_HEADS)``.

    Args:
        q_ptr: ``[tokens, REPEATS, KV_HEADS, DIM]``, dense but for ``q_stride``.
        out_ptr: ``[tokens, REPEATS, KV_HEADS, DIM]``, dense.
        partial_ptr: float32 ``[partial rows, KV_HEADS, DIM]``: results of pieces that are not alone.
        lse_ptr: float32 ``[partial rows, KV_HEADS]``: their log-sum-exps.
        sinks_ptr: float32 ``[REPEATS, KV_HEADS]``; read if SINKS.
        key_ptr, value_ptr, scales_ptr: the arena, read as what they are.
        tables_ptr: int64, byte at which each block of each sequence begins.
        pieces_ptr: ``[pieces, FIELDS]``.
        key_begin, value_begin: byte of a block at which this layer's keys and values begin.
        scale: of the scores, to base 2; over the cap where there is one.
        cap: of the scores, to base 2; read if CAPPED.
        ALIGN: bytes, a power of two, of which everything in the arena begins at a multiple.
        ROWS: of a piece at most, a power of two, 16 or more.
        KEYS: attended at a time, a power of two, 16 or more.
    """
    piece = pieces_ptr + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    row = tl.load(piece).to(tl.int64)
    first_fold = tl.load(piece + 1)
    position = tl.load(piece + 3)
    tables = tables_ptr + tl.load(piece + 4)
    first = tl.load(piece + 5)
    end = tl.load(piece + 6)

    fold = first_fold + tl.arange(0, ROWS)
    real = fold < tl.load(piece + 2)
    token = fold // REPEATS
    repeat = fold % REPEATS
    queries = position + token
    q_at = q_ptr + ((row + token) * q_stride + (repeat * KV_HEADS + head) * DIM)[:, None]
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    column = tl.arange(0, KEY_GROUPS * KEY_EACH)
    mask = real[:, None] & (column < KEY_COLUMNS)[None, :]
    if KEY_HIGH > 0:
        element = column // KEY_HIGH * (2 * KEY_HIGH) + column % KEY_HIGH
        q_low = operand(tl.load(q_at + element[None, :], mask=mask, other=0.0), dtype)
        q_high = operand(tl.load(q_at + (element + KEY_HIGH)[None, :], mask=mask, other=0.0), dtype)
    else:
        q_low = operand(tl.load(q_at + column[None, :], mask=mask, other=0.0), dtype)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    low = tl.zeros((ROWS, VALUE_GROUPS * VALUE_EACH), tl.float32)
    if VALUE_HIGH > 0:
        high = tl.zeros((ROWS, VALUE_GROUPS * VALUE_EACH), tl.float32)

    for start in range(first // KEYS * KEYS, end, KEYS):
        keys = tl.multiple_of(start, KEYS) + tl.arange(0, KEYS)
        base, inside = block_of_keys(tables, keys, first, end, TOKENS, ALIGN)
        slots = keys % TOKENS
        k_low, k_high = scaled_tile(
            key_ptr,
            scales_ptr,
            base + (key_begin + head * KEY_RUN),
            slots,
            inside,
            KEY,
            KEY_COLUMNS,
            KEY_ITEM,
            KEY_SCALE_BYTES,
            KEY_SLOT_STEP,
            KEY_COLUMN_STEP,
            KEY_SCALE_SLOT_STEP,
            KEY_SCALE_GROUP_STEP,
            KEY_MINIMUM_STEP,
            KEY_GROUPS,
            KEY_EACH,
            KEYS,
            ALIGN,
        )
        products = tl.dot(q_low, tl.trans(operand(k_low, dtype)), input_precision="ieee")
        if KEY_HIGH > 0:
            products = tl.dot(q_high, tl.trans(operand(k_high, dtype)), products, input_precision="ieee")
        top, total, weights, before = weighed(
            products, queries, keys, first, end, top, total, scale, cap, WINDOW, CAPPED
        )
        v_low, v_high = scaled_tile(
            value_ptr,
            scales_ptr,
            base + (value_begin + head * VALUE_RUN),
            slots,
            inside,
            VALUE,
            VALUE_COLUMNS,
            VALUE_ITEM,
            VALUE_SCALE_BYTES,
            VALUE_SLOT_STEP,
            VALUE_COLUMN_STEP,
            VALUE_SCALE_SLOT_STEP,
            VALUE_SCALE_GROUP_STEP,
            VALUE_MINIMUM_STEP,
            VALUE_GROUPS,
            VALUE_EACH,
            KEYS,
            ALIGN,
        )
        # Nothing times what is no number would be no number.
        own = ((keys >= first) & (keys < end))[:, None]
        weights = operand(weights, dtype)
        v_low = operand(tl.where(own, v_low, 0.0), dtype)
        low = tl.dot(weights, v_low, low * before[:, None], input_precision="ieee")
        if VALUE_HIGH > 0:
            v_high = operand(tl.where(own, v_high, 0.0), dtype)
            high = tl.dot(weights, v_high, high * before[:, None], input_precision="ieee")

    column = tl.arange(0, VALUE_GROUPS * VALUE_EACH)
    mask = real[:, None] & (column < VALUE_COLUMNS)[None, :]
    element = column
    if VALUE_HIGH > 0:
        element = column // VALUE_HIGH * (2 * VALUE_HIGH) + column % VALUE_HIGH
    alone = tl.load(piece + 8)
    if alone != 0:
        if SINKS:
            total = with_sink(sinks_ptr, repeat, head, top, total, real, KV_HEADS)
        share = (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        at = out_ptr + (((row + token) * REPEATS + repeat) * KV_HEADS + head)[:, None] * DIM + element[None, :]
        tl.store(at, rounded(low * share, dtype), mask=mask)
        if VALUE_HIGH > 0:
            tl.store(at + VALUE_HIGH, rounded(high * share, dtype), mask=mask)
    else:
        some = total > 0.0
        total = tl.where(some, total, 1.0)
        share = (1.0 / total)[:, None]
        partial = (tl.load(piece + 7) + fold).to(tl.int64) * KV_HEADS + head
        result_at = partial_ptr + partial[:, None] * DIM + element[None, :]
        tl.store(result_at, low * share, mask=mask)
        if VALUE_HIGH > 0:
            tl.store(result_at + VALUE_HIGH, high * share, mask=mask)
        tl.store(lse_ptr + partial, tl.where(some, top + tl.log2(total), float("-inf")), mask=real)


@triton.jit
def merge_pieces(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Merge the pieces of one token's queries of one KV head; a grid of ``(tokens, KV_HEADS, REPEATS / ROWS)``.

    Args:
        partial_ptr, lse_ptr, out_ptr, sinks_ptr: as of :func:`attend_pages`.
        rows_ptr: int32, the step's row of each token.
        bounds_ptr: int32 ``[tokens + 1]``: which sources are its own.
        sources_ptr: int32, the first partial row of a piece's results for it.
        ROWS: repeats at a time, a power of two.
        COLUMNS: at least DIM, a power of two.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    repeat = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = repeat < REPEATS
    column = tl.arange(0, COLUMNS)
    mask = real[:, None] & (column < DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, COLUMNS), tl.float32)
    for source in range(tl.load(bounds_ptr + token), tl.load(bounds_ptr + token + 1)):
        partial = (tl.load(sources_ptr + source) + repeat).to(tl.int64) * KV_HEADS + head
        lse = tl.load(lse_ptr + partial, mask=real, other=float("-inf"))
        highest = tl.maximum(top, lse)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        before = tl.exp2(top - level)
        weight = tl.exp2(lse - level)
        part = tl.load(partial_ptr + partial[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        mixed = mixed * before[:, None] + part * weight[:, None]
        total = total * before + weight
        top = highest
    if SINKS:
        total = with_sink(sinks_ptr, repeat, head, top, total, real, KV_HEADS)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    row = tl.load(rows_ptr + token).to(tl.int64)
    at = out_ptr + ((row * REPEATS + repeat) * KV_HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(at, rounded(mixed, out_ptr.dtype.element_ty), mask=mask)
