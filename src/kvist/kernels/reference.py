"""Paged attention, slow and obviously right: the oracle of the fast path's tests."""

import numpy as np
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.store.layouts import CODEC_DTYPES


def read_vector(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, head: int, block: int, slot: int
) -> tuple[Tensor, Tensor]:
    """Read the key and the value of one token, counting bytes from the drawing in ``cache/groups.py``.

    Args:
        arena: uint8 ``[layout.total_bytes]``.
        ordinal: of the group in the layout.
        layer: place in the group.
    """
    per_slab = layout.blocks_per_slab[ordinal]
    base = (block // per_slab) * layout.slab_bytes + (block % per_slab) * group.block_bytes
    key_run, value_run = group.head_run_bytes
    base += layer * group.attention.kv_heads * (key_run + value_run)
    vectors = []
    for codec, run, start, dim in (
        (group.format.key_codec, key_run, base, group.attention.key_dim),
        (group.format.value_codec, value_run, base + group.attention.kv_heads * key_run, group.attention.value_dim),
    ):
        size = codec.vector_bytes(dim)
        at = start + head * run + slot * size
        vectors.append(arena[at : at + size].view(CODEC_DTYPES[codec.name]))
    return vectors[0], vectors[1]


def read_sequence(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, table: np.ndarray, length: int
) -> tuple[Tensor, Tensor]:
    """Read all keys and values of a sequence, token by token.

    Returns:
        Two float64 tensors ``[kv_heads, length, dim]``; zeros where the block was given back.
    """
    heads, tokens = group.attention.kv_heads, group.block_tokens
    keys = torch.zeros(heads, length, group.attention.key_dim, dtype=torch.float64)
    values = torch.zeros(heads, length, group.attention.value_dim, dtype=torch.float64)
    for position in range(length):
        block = int(table[position // tokens])
        for head in range(heads if block >= 0 else 0):
            key, value = read_vector(
                arena, group, layout, ordinal, layer=layer, head=head, block=block, slot=position % tokens
            )
            keys[head, position], values[head, position] = key.double(), value.double()
    return keys, values


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the queries at positions ``start …`` over all earlier positions and their own.

    Args:
        q: ``[queries, heads, dim]``; query heads ``h`` share the KV head ``h // (heads / kv_heads)``.
        keys: ``[kv_heads, length, dim]``, ``length >= start + queries``.
        values: likewise.
        scale: of the scores.
        window: a query at position p sees positions > p - window.
        chunk: a query at position p sees positions from the last multiple of ``chunk`` on.
        softcap: scores become ``softcap x tanh(score / softcap)``.
        sinks: ``[heads]``, a score that takes part in the softmax and has no value.

    Returns:
        ``[queries, heads, dim]`` in the type of ``q``.
    """
    queries, heads, _ = q.shape
    out = torch.empty_like(q)
    for index in range(queries):
        position = start + index
        first = 0 if window is None else max(0, position - window + 1)
        if chunk is not None:
            first = position // chunk * chunk
        for head in range(heads):
            shared = head * keys.shape[0] // heads
            scores = keys[shared, first : position + 1] @ q[index, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1]))
            weights = torch.softmax(scores, dim=0)[: position + 1 - first]
            out[index, head] = weights @ values[shared, first : position + 1]
    return out
