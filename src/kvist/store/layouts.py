"""The keys and values, or latents, of a group of layers inside the arena: append a step's tokens, gather whole blocks.

The arena is one flat buffer of bytes. Inside it, one head of one layer of one block is a *run* of ``block_tokens``
vectors (see :mod:`kvist.cache.groups`); every run begins at a multiple of the group's *unit*, the greatest common
divisor of all sizes involved::

    unit        0    1    2    3    4    5    6    7    8    9   10   11
    arena     | key head 0 | key head 1 | value h. 0 | value h. 1 | layer 1 …
              ^ block_unit(block) + layer's shift

A view of the arena, ``[units, run]`` with a stride of one unit, makes any run one row: one ``index_select`` then
gathers ``[sequences, heads, blocks, run]``, which is ``[sequences, heads, tokens, dim]`` without a transpose. The
layer is in the view's offset, so that the indices of a step serve all layers of the group.
"""

from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.errors import InputError
from kvist.spec.formats import Codec
from kvist.spec.layers import Latent

CODEC_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

Index = npt.NDArray[np.int64]


class Scratch:
    """Memory for what is gathered, used again by every layer: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.dtype, int], Tensor] = {}

    def rows(self, dtype: torch.dtype, slot: int, rows: int, width: int) -> Tensor:
        """A tensor ``[rows, width]``, valid until the same ``slot`` is asked for again."""
        buffer = self.buffers.get((dtype, slot))
        size = rows * width
        if buffer is None or buffer.numel() < size:
            buffer = torch.zeros(size + size // 4, dtype=dtype)
            self.buffers[dtype, slot] = buffer
        return buffer[:size].view(rows, width)


class _Part:
    """Heads that share a codec and a width: all of a layer's keys and values, or one of the two."""

    def __init__(
        self, arena: Tensor, group: Group, codec: Codec, *, unit: int, heads: int, dim: int, first: int
    ) -> None:
        self.dtype = CODEC_DTYPES[codec.name]
        self.heads = heads
        self.dim = dim
        item = self.dtype.itemsize
        vector = self.dim * item
        run = vector * group.block_tokens
        layer_bytes = group.block_bytes // len(group.layers)
        self.run_units = run // unit
        # Vectors may begin at finer steps than runs.
        self.step = gcd(unit, vector)
        self.vector_steps = vector // self.step
        self.unit_steps = unit // self.step
        self.width = run // item
        flat = arena.view(self.dtype)
        self.run_views: list[Tensor] = []
        self.vector_views: list[Tensor] = []
        for slot in range(len(group.layers)):
            offset = slot * layer_bytes + first
            rows = (arena.numel() - offset - run) // unit + 1
            self.run_views.append(flat.as_strided((rows, self.width), (unit // item, 1), offset // item))
            rows = (arena.numel() - offset - vector) // self.step + 1
            self.vector_views.append(flat.as_strided((rows, self.dim), (self.step // item, 1), offset // item))


class PagedVectors:
    """One group's vectors in the arena: what keys and values have in common with latents.

    Args:
        arena: uint8 ``[layout.total_bytes]``.
        ordinal: of the group in the layout.
        scratch: shared by the groups of a runner.
        kv_heads: that queries share.
        dim: of a vector.
        runs: bytes of the runs of one head.

    Attributes:
        parts: set by what is stored.
        uniform: whether one part holds all.

    Raises:
        InputError: the group's format is not computed with yet.
    """

    parts: "tuple[_Part, ...]"
    uniform: bool

    def __init__(
        self,
        arena: Tensor,
        group: Group,
        layout: ArenaLayout,
        ordinal: int,
        scratch: Scratch,
        *,
        kv_heads: int,
        dim: int,
        runs: tuple[int, ...],
    ) -> None:
        check_format(group)
        self.group = group
        self.kv_heads = kv_heads
        self.dim = dim
        self.block_tokens = group.block_tokens
        # Of one layer.
        self.token_bytes = group.token_bytes // len(group.layers)
        self.blocks_per_slab = layout.blocks_per_slab[ordinal]
        self.slab_bytes = layout.slab_bytes
        self.address = arena.data_ptr()
        self.unit = gcd(layout.slab_bytes, group.block_bytes, *runs)
        self.slab_units = layout.slab_bytes // self.unit
        self.block_units = group.block_bytes // self.unit
        self.scratch = scratch

    def sides(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in vectors ``[…, heads, …]`` as they are stored, whose heads are the second dimension."""
        raise NotImplementedError

    def vectors(self, blocks: Index, slots: Index) -> list[Tensor]:
        """Where one vector a token and head lies, for :meth:`append`: int64 ``[tokens, heads]`` a part.

        Args:
            blocks: block id of each token, ``[tokens]``.
            slots: its place in the block.
        """
        units = self.units(blocks)
        indices = []
        for part in self.parts:
            head = np.arange(part.heads) * (part.run_units * part.unit_steps)
            rows = (units * part.unit_steps + slots * part.vector_steps)[:, None] + head
            indices.append(torch.from_numpy(rows))
        return indices

    def units(self, blocks: Index) -> Index:
        """First unit of each block."""
        slab, place = np.divmod(blocks.astype(np.int64, copy=False), self.blocks_per_slab)
        units: Index = slab * self.slab_units + place * self.block_units
        return units

    def append(self, slot: int, kv: Tensor, where: list[Tensor]) -> None:
        """Store a step's keys and values of one layer; changes the arena.

        Args:
            slot: the layer's place in the group.
            kv: ``[tokens, heads, dim]``, all that is stored: the heads' keys, then their values, or latents.
            where: of :meth:`vectors`.
        """
        for number, (part, index) in enumerate(zip(self.parts, where, strict=True)):
            rows = kv if self.uniform else kv[:, number * self.kv_heads : (number + 1) * self.kv_heads]
            part.vector_views[slot].index_put_((index,), rows if rows.dtype == part.dtype else rows.to(part.dtype))

    def rounded(self, kv: Tensor) -> Tensor:
        """Keys and values as they will be read again, so that a chunk sees itself as later chunks see it."""
        if all(part.dtype == kv.dtype for part in self.parts):
            return kv
        if self.uniform:
            return kv.to(self.parts[0].dtype).to(kv.dtype)
        halves = kv[:, : self.kv_heads], kv[:, self.kv_heads :]
        return torch.cat([half.to(p.dtype).to(kv.dtype) for half, p in zip(halves, self.parts, strict=True)], dim=1)


class PagedKV(PagedVectors):
    """Keys and values of one group; arguments and errors as of :class:`PagedVectors`."""

    def __init__(self, arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, scratch: Scratch) -> None:
        check_format(group)
        heads, dim, runs = group.attention.kv_heads, group.attention.key_dim, group.head_run_bytes
        super().__init__(arena, group, layout, ordinal, scratch, kv_heads=heads, dim=dim, runs=runs)
        self.uniform = group.format.key == group.format.value
        key, value = group.format.key_codec, group.format.value_codec
        if self.uniform:
            self.parts = (_Part(arena, group, key, unit=self.unit, heads=2 * heads, dim=dim, first=0),)
        else:
            self.parts = (
                _Part(arena, group, key, unit=self.unit, heads=heads, dim=dim, first=0),
                _Part(arena, group, value, unit=self.unit, heads=heads, dim=dim, first=heads * runs[0]),
            )

    def sides(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The heads' keys, then their values."""
        return stored[:, : self.kv_heads], stored[:, self.kv_heads :]


class PagedLatents(PagedVectors):
    """Latents of one group: one vector a token, key and value of every head (:class:`kvist.spec.layers.Latent`).

    Arguments and errors as of :class:`PagedVectors`.
    """

    def __init__(self, arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, scratch: Scratch) -> None:
        dim = group.latent.rank + group.latent.rope_dim
        run = group.block_bytes // len(group.layers)
        super().__init__(arena, group, layout, ordinal, scratch, kv_heads=1, dim=dim, runs=(run,))
        self.uniform = True
        self.parts = (_Part(arena, group, group.format.key_codec, unit=self.unit, heads=1, dim=dim, first=0),)

    def sides(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The same vectors twice: a latent's value is its beginning, and whoever attends cuts it out."""
        return stored, stored


class Gathering:
    """Whole blocks of some sequences, to be read layer by layer; index and target are made once a step.

    Args:
        store: of the group.
        blocks: block ids ``[sequences, blocks]``; every id must be real, also where a sequence is shorter.
        dtype: of the keys and values handed out.
        seen: tokens of the blocks that are wanted.
    """

    def __init__(self, store: PagedVectors, blocks: Index, dtype: torch.dtype, seen: slice = slice(None)) -> None:
        self.parts = store.parts
        self.dtype = dtype
        units = store.units(blocks)
        sequences, count = blocks.shape
        self.indices: list[Tensor] = []
        self.rows: list[Tensor] = []
        views: list[Tensor] = []
        for number, part in enumerate(self.parts):
            head = np.arange(part.heads)[:, None] * part.run_units
            index = torch.from_numpy((units[:, None, :] + head).ravel())
            rows = store.scratch.rows(part.dtype, number, len(index), part.width)
            self.indices.append(index)
            self.rows.append(rows)
            views.append(rows.view(sequences, part.heads, count * store.block_tokens, store.dim)[:, :, seen])
        if store.uniform:
            self.keys, self.values = store.sides(views[0])
        else:
            self.keys, self.values = views
        self.converted = any(part.dtype != dtype for part in self.parts)

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """Read one layer.

        Returns:
            Keys and values, each ``[sequences, kv_heads, tokens, dim]``; valid until the next read of the runner.
        """
        for part, index, rows in zip(self.parts, self.indices, self.rows, strict=True):
            torch.index_select(part.run_views[slot], 0, index, out=rows)
        if self.converted:
            keys = self.keys.to(self.dtype)
            return keys, keys if self.values is self.keys else self.values.to(self.dtype)
        return self.keys, self.values


def check_format(group: Group) -> None:
    """Refuse what the engine does not store yet.

    Raises:
        InputError: names the codec and those that are stored.
    """
    if group.lifetime == "state":
        return
    for side in ("key",) if isinstance(group.layer, Latent) else ("key", "value"):
        codec = getattr(group.format, side)
        if codec not in CODEC_DTYPES:
            raise InputError(
                f"{side}: the engine does not store {codec} yet; choose one of {', '.join(CODEC_DTYPES)}", key=side
            )
    if isinstance(group.layer, Latent):
        group.latent  # noqa: B018 (refuses windows and indexers)
        return
    if group.chunk is not None and group.chunk % group.block_tokens:
        raise InputError(
            f"{group.name}: chunks of {group.chunk} tokens are not whole blocks of {group.block_tokens}; "
            f"choose blocks of a divisor of it",
            key="block_tokens",
        )
    if group.attention.key_dim != group.attention.value_dim:
        raise InputError(
            f"{group.name}: keys are {group.attention.key_dim} wide, values {group.attention.value_dim}; "
            f"the engine stores equal widths",
            key="head_dim",
        )
