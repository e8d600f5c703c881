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


def read_latent(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, block: int, slot: int
) -> Tensor:
    """Read the latent of one token, as :func:`read_vector` reads keys and values."""
    per_slab = layout.blocks_per_slab[ordinal]
    base = (block // per_slab) * layout.slab_bytes + (block % per_slab) * group.block_bytes
    size = group.format.key_codec.vector_bytes(group.latent.rank + group.latent.rope_dim)
    at = base + (layer * group.block_tokens + slot) * size
    return arena[at : at + size].view(CODEC_DTYPES[group.format.key])


def read_latents(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, table: np.ndarray, length: int
) -> Tensor:
    """Read all latents of a sequence, token by token: float64 ``[length, rank + rope_dim]``."""
    places = [(int(table[position // group.block_tokens]), position % group.block_tokens) for position in range(length)]
    return torch.stack(
        [
            read_latent(arena, group, layout, ordinal, layer=layer, block=block, slot=slot).double()
            for block, slot in places
        ]
    )


def expand(stored: Tensor, to_keys: Tensor, to_values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head from latents.

    Args:
        stored: ``[length, rank + rope_dim]``.
        to_keys: ``[heads, nope, rank]``.
        to_values: ``[heads, value, rank]``.

    Returns:
        ``[heads, length, nope + rope_dim]`` and ``[heads, length, value]``.
    """
    rank = to_keys.shape[2]
    keys, values = [], []
    for head in range(len(to_keys)):
        made = stored[:, :rank] @ to_keys[head].T
        keys.append(torch.cat((made, stored[:, rank:]), dim=1))
        values.append(stored[:, :rank] @ to_values[head].T)
    return torch.stack(keys), torch.stack(values)


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
        values: ``[kv_heads, length, value]``.
        scale: of the scores.
        window: a query at position p sees positions > p - window.
        chunk: a query at position p sees positions from the last multiple of ``chunk`` on.
        softcap: scores become ``softcap x tanh(score / softcap)``.
        sinks: ``[heads]``, a score that takes part in the softmax and has no value.

    Returns:
        ``[queries, heads, value]`` in the type of ``q``.
    """
    queries, heads, _ = q.shape
    out = q.new_empty(queries, heads, values.shape[2])
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
