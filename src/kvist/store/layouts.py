"""The keys and values, or latents, of a group of layers inside the arena: append a step's tokens, gather whole blocks.

The arena is one flat buffer of bytes. Inside it, one head of one layer of one block is a *run* of ``block_tokens``
vectors (see :mod:`kvist.cache.groups`); every run begins at a multiple of the group's *unit*, the greatest common
divisor of all sizes involved::

    unit        0    1    2    3    4    5    6    7    8    9   10   11
    arena     | key head 0 | key head 1 | value h. 0 | value h. 1 | layer 1 …
              ^ block_unit(block) + layer's shift

A view of the arena, ``[units, run]`` with a stride of one unit, makes any run one row: one ``index_select`` then
gathers ``[sequences, heads, blocks, run]``, which is ``[sequences, heads, tokens, dim]`` without a transpose. Runs of
codes are gathered as bytes, and become numbers then (:mod:`kvist.store.codecs`). The layer is in the view's offset, so
that the indices of a step serve all layers of the group.
"""

from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.errors import InputError
from kvist.spec.layers import Latent
from kvist.store.codecs import PLAIN, SEALED, STORED, Coding, LatentCoding

Index = npt.NDArray[np.int64]


class Scratch:
    """Memory for what is gathered, used again by every layer: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.dtype, int | str], Tensor] = {}

    def rows(self, dtype: torch.dtype, slot: int | str, rows: int, width: int) -> Tensor:
        """A tensor ``[rows, width]``, valid until the same ``slot`` is asked for again."""
        buffer = self.buffers.get((dtype, slot))
        size = rows * width
        if buffer is None or buffer.numel() < size:
            buffer = torch.zeros(size + size // 4, dtype=dtype)
            self.buffers[dtype, slot] = buffer
        return buffer[:size].view(rows, width)


class _Part:
    """Heads that share a codec, a side and a width: all of a layer's keys and values, or one of the two.

    Attributes:
        dtype: in which runs are gathered: bytes, where they hold codes.
    """

    def __init__(self, arena: Tensor, group: Group, coding: Coding, *, unit: int, heads: int, first: int) -> None:
        self.coding = coding
        self.heads = heads
        self.dtype = torch.uint8 if coding.quantised else PLAIN[coding.codec]
        run = coding.run_bytes
        layer_bytes = group.block_bytes // len(group.layers)
        self.run_units = run // unit
        self.width = run // self.dtype.itemsize
        # Of one token, in all heads, as it is read: codes become float32 on the way.
        self.read_bytes = heads * (4 * coding.dim if coding.quantised else run // group.block_tokens)
        # Rows of a piece may begin at finer steps than runs.
        self.steps = [gcd(unit, piece.token_step) for piece in coding.pieces]
        self.unit = unit
        wide = max(piece.dtype.itemsize for piece in coding.pieces)
        if unit % wide:
            raise InputError(
                f"{group.name}: blocks of {group.block_tokens} tokens do not begin at multiples of {wide} bytes, as "
                f"{coding.codec} needs; choose a larger power of two",
                key="block_tokens",
            )
        self.run_views: list[Tensor] = []
        self.piece_views: list[list[Tensor]] = []
        for slot in range(len(group.layers)):
            offset = slot * layer_bytes + first
            self.run_views.append(_rows(arena, self.dtype, offset, run, unit, self.width, self.dtype.itemsize))
            self.piece_views.append(
                [
                    _rows(
                        arena,
                        piece.dtype,
                        offset + piece.offset,
                        (piece.elements - 1) * piece.element_step + piece.dtype.itemsize,
                        step,
                        piece.elements,
                        piece.element_step,
                    )
                    for piece, step in zip(coding.pieces, self.steps, strict=True)
                ]
            )

    def rows(self, units: Index, slots: Index) -> list[Tensor]:
        """Where the rows of some tokens are in the views of each piece: int64 ``[tokens, heads]``."""
        heads = np.arange(self.heads) * (self.run_units * self.unit)
        return [
            torch.from_numpy(
                (units * (self.unit // step) + slots // piece.shared * (piece.token_step // step))[:, None]
                + heads // step
            )
            for piece, step in zip(self.coding.pieces, self.steps, strict=True)
        ]

    def append(self, slot: int, vectors: Tensor, where: list[Tensor]) -> None:
        """Store ``[tokens, heads, dim]`` at what :meth:`rows` gave; whole runs in turn, where these share scales."""
        if self.coding.shared == 1:
            rows = self.coding.quantise(vectors)
        else:
            rows = tuple(row.transpose(0, 1) for row in self.coding.quantise(vectors.transpose(0, 1)))
        for view, index, row, piece in zip(self.piece_views[slot], where, rows, self.coding.pieces, strict=True):
            view.index_put_((index[:: piece.shared],), row)


def _rows(
    arena: Tensor, dtype: torch.dtype, offset: int, extent: int, step: int, elements: int, element_step: int
) -> Tensor:
    """Rows of ``elements``, ``extent`` bytes from first to last, one every ``step`` bytes of the arena."""
    item = dtype.itemsize
    rows = (arena.numel() - offset - extent) // step + 1
    return arena.view(dtype).as_strided((rows, elements), (step // item, element_step // item), offset // item)


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
        InputError: the group's format is not stored.
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
        self.blocks_per_slab = layout.blocks_per_slab[ordinal]
        self.slab_bytes = layout.slab_bytes
        self.address = arena.data_ptr()
        self.unit = gcd(layout.slab_bytes, group.block_bytes, *runs)
        self.slab_units = layout.slab_bytes // self.unit
        self.block_units = group.block_bytes // self.unit
        self.scratch = scratch

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer as it is read."""
        return sum(part.read_bytes for part in self.parts)

    @property
    def plain(self) -> bool:
        """Whether one part holds all, in one of PyTorch's types: any bytes once written there read as before."""
        return self.uniform and not self.parts[0].coding.quantised

    def sides(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in vectors ``[…, heads, …]`` as they are stored, whose heads are the second dimension."""
        raise NotImplementedError

    def vectors(self, blocks: Index, slots: Index) -> list[list[Tensor]]:
        """Where one vector a token and head lies, for :meth:`append`: int64 ``[tokens, heads]`` a piece of each part.

        Args:
            blocks: block id of each token, ``[tokens]``.
            slots: its place in the block.
        """
        units = self.units(blocks)
        return [part.rows(units, slots) for part in self.parts]

    def units(self, blocks: Index) -> Index:
        """First unit of each block."""
        slab, place = np.divmod(blocks.astype(np.int64, copy=False), self.blocks_per_slab)
        units: Index = slab * self.slab_units + place * self.block_units
        return units

    def append(self, slot: int, kv: Tensor, where: list[list[Tensor]]) -> None:
        """Store a step's keys and values of one layer; changes the arena.

        Args:
            slot: the layer's place in the group.
            kv: ``[tokens, heads, dim]``, all that is stored: the heads' keys, then their values, or latents.
            where: of :meth:`vectors`.
        """
        for number, (part, index) in enumerate(zip(self.parts, where, strict=True)):
            part.append(slot, kv if self.uniform else self.sides(kv)[number], index)

    def rounded(self, kv: Tensor) -> Tensor:
        """Keys and values as they will be read again, so that a chunk sees itself as later chunks see it."""
        if all(part.dtype == kv.dtype for part in self.parts):
            return kv
        if self.uniform:
            return self.parts[0].coding.rounded(kv)
        out = torch.empty_like(kv, memory_format=torch.contiguous_format)
        for part, given, taken in zip(self.parts, self.sides(kv), self.sides(out), strict=True):
            part.coding.numbers(part.coding.quantise(given), taken)
        return out


class PagedKV(PagedVectors):
    """Keys and values of one group; arguments and errors as of :class:`PagedVectors`."""

    def __init__(self, arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, scratch: Scratch) -> None:
        check_format(group)
        heads, dim, runs = group.attention.kv_heads, group.attention.key_dim, group.head_run_bytes
        super().__init__(arena, group, layout, ordinal, scratch, kv_heads=heads, dim=dim, runs=runs)
        key = Coding(group.format.key, side="key", dim=dim, tokens=group.block_tokens)
        value = Coding(group.format.value, side="value", dim=dim, tokens=group.block_tokens)
        self.uniform = key.codec == value.codec and not key.quantised
        if self.uniform:
            self.parts = (_Part(arena, group, key, unit=self.unit, heads=2 * heads, first=0),)
        else:
            self.parts = (
                _Part(arena, group, key, unit=self.unit, heads=heads, first=0),
                _Part(arena, group, value, unit=self.unit, heads=heads, first=heads * runs[0]),
            )

    def sides(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The heads' keys, then their values."""
        return stored[:, : self.kv_heads], stored[:, self.kv_heads :]


class PagedLatents(PagedVectors):
    """Latents of one group: one vector a token, key and value of every head (:class:`kvist.spec.layers.Latent`).

    Arguments and errors as of :class:`PagedVectors`.
    """

    def __init__(self, arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, scratch: Scratch) -> None:
        check_format(group)
        rank, rope_dim, tokens, codec = group.latent.rank, group.latent.rope_dim, group.block_tokens, group.format.key
        run = group.block_bytes // len(group.layers)
        super().__init__(arena, group, layout, ordinal, scratch, kv_heads=1, dim=rank + rope_dim, runs=(run,))
        self.uniform = True
        if codec == "fp8":
            coding: Coding = LatentCoding(rank=rank, rope_dim=rope_dim, tokens=tokens)
        else:
            coding = Coding(codec, side="key", dim=rank + rope_dim, tokens=tokens)
        self.parts = (_Part(arena, group, coding, unit=self.unit, heads=1, first=0),)

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
        # Where the codes of a part become numbers; those that are stored as numbers need no such place.
        self.numbers: list[Tensor | None] = []
        views: list[Tensor] = []
        for number, part in enumerate(self.parts):
            head = np.arange(part.heads)[:, None] * part.run_units
            index = torch.from_numpy((units[:, None, :] + head).ravel())
            rows = store.scratch.rows(part.dtype, number, len(index), part.width)
            made = None
            if part.coding.quantised:
                vectors = len(index) * store.block_tokens
                made = store.scratch.rows(dtype, f"numbers {number}", vectors, store.dim)
                made = made.view(len(index), store.block_tokens, store.dim)
            self.indices.append(index)
            self.rows.append(rows)
            self.numbers.append(made)
            whole = rows if made is None else made
            views.append(whole.view(sequences, part.heads, count * store.block_tokens, store.dim)[:, :, seen])
        if store.uniform:
            self.keys, self.values = store.sides(views[0])
        else:
            self.keys, self.values = views

    def read(self, slot: int) -> tuple[Tensor, Tensor]:
        """Read one layer.

        Returns:
            Keys and values, each ``[sequences, kv_heads, tokens, dim]``; valid until the next read of the runner.
        """
        for part, index, rows, numbers in zip(self.parts, self.indices, self.rows, self.numbers, strict=True):
            torch.index_select(part.run_views[slot], 0, index, out=rows)
            if numbers is not None:
                part.coding.unpack(rows, numbers)
        keys = self.keys.to(self.dtype)
        return keys, keys if self.values is self.keys else self.values.to(self.dtype)


def check_format(group: Group) -> None:
    """Refuse what the engine does not store.

    Raises:
        InputError: names what is not stored, and what is.
    """
    if group.lifetime == "state":
        return
    fmt = group.format
    if isinstance(group.layer, Latent):
        stored = [*PLAIN, "fp8"]
        if fmt.key not in stored:
            raise InputError(
                f"key: the engine does not store latents in {fmt.key}; choose one of {', '.join(stored)}", key="key"
            )
        if fmt.rotates_keys:
            raise InputError("rotate: latents are stored as they are; leave the rotation out", key="rotate")
        group.latent  # noqa: B018 (refuses windows and indexers)
        return
    for side in ("key", "value"):
        codec = getattr(fmt, side)
        known = (*STORED, *SEALED) if side == "key" and group.lifetime in ("sealed", "lead") else STORED
        if codec not in known:
            option = "cartridge_format" if group.lifetime == "lead" else side
            raise InputError(
                f"{option}: the engine does not store {side}s in {codec}; choose one of {', '.join(known)}", key=option
            )
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
