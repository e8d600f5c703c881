"""Paged attention, slow and obviously right: the oracle of all kernels.

It counts bytes from the drawings in :mod:`kvist.cache.groups` and :mod:`kvist.store.codecs`, in float64, and shares no
code with what stores and reads them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.kernels.spans import Span

_FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

Numbers = npt.NDArray[np.float64]


def read_vector(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, head: int, block: int, slot: int
) -> tuple[Tensor, Tensor]:
    """Read the key and the value of one token.

    Args:
        arena: uint8 ``[layout.total_bytes]``.
        ordinal: of the group in the layout.
        layer: place in the group.

    Returns:
        Where they are stored as numbers of PyTorch's these themselves, in place; else copies in float64.
    """
    vectors = []
    for side in range(2):
        codec, run = _run(arena, group, layout, ordinal, layer=layer, head=head, block=block, side=side)
        dim = (group.attention.key_dim, group.attention.value_dim)[side]
        if codec in _FLOATS:
            vectors.append(run.view(_FLOATS[codec]).view(-1, dim)[slot])
        else:
            vectors.append(torch.from_numpy(decoded(run.numpy(), codec, side, group.block_tokens, dim)[slot]))
    return vectors[0], vectors[1]


def read_sequence(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, table: np.ndarray, length: int
) -> tuple[Tensor, Tensor]:
    """Read all keys and values of a sequence, run by run.

    Returns:
        Two float64 tensors ``[kv_heads, length, dim]``; zeros where the block was given back.
    """
    heads, tokens = group.attention.kv_heads, group.block_tokens
    sides = []
    for side, dim in enumerate((group.attention.key_dim, group.attention.value_dim)):
        found = np.zeros((heads, -(-length // tokens) * tokens, dim))
        for place, block in enumerate(table[: -(-length // tokens)].tolist()):
            for head in range(heads if block >= 0 else 0):
                codec, run = _run(arena, group, layout, ordinal, layer=layer, head=head, block=block, side=side)
                found[head, place * tokens : (place + 1) * tokens] = decoded(run.numpy(), codec, side, tokens, dim)
        sides.append(torch.from_numpy(found[:, :length]))
    return sides[0], sides[1]


def _run(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, head: int, block: int, side: int
) -> tuple[str, Tensor]:
    """The codec and the bytes of one head's run of keys (side 0) or values (1)."""
    runs, heads = group.head_run_bytes, group.attention.kv_heads
    per_slab = layout.blocks_per_slab[ordinal]
    at = (block // per_slab) * layout.slab_bytes + (block % per_slab) * group.block_bytes
    at += layer * heads * sum(runs) + side * heads * runs[0] + head * runs[side]
    return (group.format.key, group.format.value)[side], arena[at : at + runs[side]]


def decoded(run: npt.NDArray[np.uint8], codec: str, side: int, tokens: int, dim: int) -> Numbers:
    """The numbers of one run.

    Args:
        run: its bytes.
        side: 0 for keys, 1 for values.

    Returns:
        ``[tokens, dim]``.
    """
    if codec in _FLOATS:
        plain: Tensor = torch.from_numpy(run.copy()).view(_FLOATS[codec])
        return np.asarray(plain.double().view(tokens, dim), np.float64)
    t, i = np.meshgrid(np.arange(tokens), np.arange(dim), indexing="ij")
    if codec == "fp8":
        return _e4m3(run[t * dim + i])
    group, groups = i // 32, dim // 32
    if codec == "int8":
        codes: Numbers = run[t * dim + i if side == 0 else i * tokens + t].view(np.int8).astype(np.float64)
        codes_bytes = tokens * dim
    else:
        if side == 0:
            byte, high = t * (dim // 2) + group * 16 + i % 16, i % 32 >= 16
        else:
            byte, high = (i // 4 * 2 + i % 2) * tokens + t, i % 4 >= 2
        codes = np.where(high, run[byte] >> 4, run[byte] & 15).astype(np.float64)
        codes_bytes = tokens * dim // 2
    floats = run[codes_bytes:].view(np.float16).astype(np.float64)
    if codec == "int4c":
        shared = t // 32 * 2 * dim
        return np.asarray(floats[shared + dim + i] + floats[shared + i] * codes)
    if codec != "int4a":
        scales = floats[t * groups + group if side == 0 else group * tokens + t]
        return np.asarray(scales * (codes if codec == "int8" else codes - 8))
    if side == 0:
        scale_at, least_at = 2 * (t * groups + group), 2 * (t * groups + group) + 1
    else:
        scale_at, least_at = group * tokens + t, (groups + group) * tokens + t
    return np.asarray(floats[least_at] + floats[scale_at] * codes)


def _e4m3(bytes_: npt.NDArray[np.uint8]) -> Numbers:
    """One sign, four bits of exponent, three of mantissa; all ones mean no number (arXiv:2209.05433)."""
    exponent, mantissa = (bytes_ >> 3 & 15).astype(np.int64), (bytes_ & 7) / 8
    size = np.ldexp(mantissa + (exponent > 0), np.maximum(exponent, 1) - 7)
    return np.where(bytes_ & 127 == 127, np.nan, np.where(bytes_ & 128, -size, size))


def read_latent(
    arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, *, layer: int, block: int, slot: int
) -> Tensor:
    """Read the latent of one token, as :func:`read_vector` reads keys and values."""
    per_slab = layout.blocks_per_slab[ordinal]
    rank, rope = group.latent.rank, group.latent.rope_dim
    base = (block // per_slab) * layout.slab_bytes + (block % per_slab) * group.block_bytes
    size = group.block_bytes // len(group.layers) // group.block_tokens
    at = base + (layer * group.block_tokens + slot) * size
    vector = arena[at : at + size]
    if group.format.key == "fp8":
        assert size == rank + 2 * rope
        return torch.cat(
            (torch.from_numpy(_e4m3(vector[:rank].numpy())), vector[rank:].clone().view(torch.bfloat16).double())
        )
    return vector.view(_FLOATS[group.format.key])


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


def attend_paged(
    arena: Tensor,
    group: Group,
    layout: ArenaLayout,
    ordinal: int,
    *,
    layer: int,
    spans: Sequence[Span],
    q: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the queries of a step must find, whose own keys and values are stored already.

    Args:
        layer: place in the group.
        spans: in the order of the step's rows.
        q: ``[tokens, repeats, kv_heads, dim]``.
        scale: of the scores.
        softcap: as of :func:`attend`.
        sinks: ``[repeats, kv_heads]``.

    Returns:
        float64 ``[tokens, repeats x kv_heads x dim]``.
    """
    rows, row = [], 0
    for span in spans:
        keys, values = read_sequence(
            arena, group, layout, ordinal, layer=layer, table=span.table, length=span.start + span.count
        )
        out = attend(
            q[row : row + span.count].double().transpose(1, 2).flatten(1, 2),
            keys,
            values,
            start=span.start,
            scale=scale,
            window=group.attention.window,
            chunk=group.attention.chunk,
            softcap=softcap,
            sinks=None if sinks is None else sinks.double().t().flatten(),
        )
        rows.append(out.view(span.count, len(keys), -1, out.shape[2]).transpose(1, 2).flatten(1))
        row += span.count
    return torch.cat(rows)


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
