"""The states of a group of recurrent layers inside the arena, read and written as tensors.

A block is the whole state of one layer: the last inputs of its convolution, then its recurrent part, each in its own
codec (:mod:`kvist.cache.groups`), and laid out as its mixer wants it::

    block   conv: columns and channels | recurrent part
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.spec.layers import State
from kvist.store.codecs import PLAIN
from kvist.store.layouts import Index

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class StateSpan:
    """One sequence's part of a step: ``count`` tokens from position ``start`` on; ``table`` has a block a layer."""

    table: Index
    start: int
    count: int


class StateStore:
    """One group's states in the arena.

    Args:
        arena: uint8 ``[layout.total_bytes]``.
        layout: how it is cut.
        ordinal: of the group in the layout.
    """

    def __init__(self, arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int) -> None:
        layer = group.layer
        assert isinstance(layer, State)
        self.group = group
        self.slab_bytes = layout.slab_bytes
        self.blocks_per_slab = layout.blocks_per_slab[ordinal]
        self.conv = _View(arena, layer.conv_codec, layer.conv_elements, 0, group, layout)
        self.recurrent = _View(arena, layer.state_codec, layer.state_elements, layer.conv_bytes(), group, layout)

    def plan(self, spans: Sequence[StateSpan]) -> "StatePlan":
        """Where the states of a step's sequences are; spans in the order of its rows."""
        return StatePlan(self, spans)

    def bytes_of(self, blocks: Index) -> Index:
        """Where each block begins in the arena."""
        slab, place = np.divmod(blocks, self.blocks_per_slab)
        begins: Index = slab * self.slab_bytes + place * self.group.block_bytes
        return begins


class _View:
    """One half of every block, as the rows of a strided tensor."""

    def __init__(
        self, arena: Tensor, codec: str, elements: int, offset: int, group: Group, layout: ArenaLayout
    ) -> None:
        self.dtype = PLAIN[codec]
        self.elements = elements
        size = self.dtype.itemsize
        # Rows begin wherever a block does, whatever the group that a slab was lent to before.
        self.unit = gcd(layout.slab_bytes, group.block_bytes, offset or layout.slab_bytes)
        rows = max(0, (arena.numel() - offset - elements * size) // self.unit + 1)
        self.rows = arena.view(self.dtype).as_strided((rows, elements), (self.unit // size, 1), offset // size)


class StatePlan:
    """The states of the sequences of one step: read before a layer computes its tokens, written after.

    Attributes:
        counts: tokens of each sequence, in the order of the step's rows.
        starts: first row of each, int64 ``[sequences]``.
        fresh: sequences that begin here, as bool ``[sequences]``; None where there are none.
    """

    def __init__(self, store: StateStore, spans: Sequence[StateSpan]) -> None:
        self.store = store
        self.spans = spans
        self._made: dict[type, Any] = {}
        self.counts = [span.count for span in spans]
        self.starts = np.concatenate(([0], np.cumsum(self.counts)[:-1]))
        fresh = torch.tensor([span.start == 0 for span in spans])
        self.fresh = fresh if bool(fresh.any()) else None
        begins = store.bytes_of(np.array([span.table for span in spans], np.int64))
        self.conv_rows = torch.from_numpy(begins // store.conv.unit)
        self.state_rows = torch.from_numpy(begins // store.recurrent.unit)

    def part(self, sequences: Iterable[int]) -> "StatePlan":
        """The same of some of the sequences, in this order; its rows are theirs alone."""
        return StatePlan(self.store, [self.spans[index] for index in sequences])

    def once(self, kind: type[Made], make: Callable[["StatePlan"], Made]) -> Made:
        """What the layers of a step share: made by the first that asks for this kind."""
        found = self._made.get(kind)
        if found is None:
            found = self._made[kind] = make(self)
        made: Made = found
        return made

    def read_conv(self, slot: int, dtype: torch.dtype) -> Tensor:
        """The last inputs of a layer's convolution, ``[sequences, conv_elements]``; zeros where a sequence begins."""
        return self._read(self.store.conv, self.conv_rows, slot, dtype)

    def read_state(self, slot: int, dtype: torch.dtype) -> Tensor:
        """The recurrent part of a layer, ``[sequences, state_elements]``; zeros where a sequence begins."""
        return self._read(self.store.recurrent, self.state_rows, slot, dtype)

    def in_place(self, slot: int, dtype: torch.dtype) -> list[Tensor] | None:
        """The recurrent parts of a layer where they lie, ``[state_elements]`` each; zeros where a sequence begins.

        What is written to them is stored. None where their codec is of another type.
        """
        view = self.store.recurrent
        if view.dtype != dtype:
            return None
        parts = [view.rows[row] for row in self.state_rows[:, slot].tolist()]
        if self.fresh is not None:
            for index in self.fresh.nonzero()[:, 0].tolist():
                parts[index].zero_()
        return parts

    def write_conv(self, slot: int, conv: Tensor) -> None:
        """Store the last inputs of a layer's convolution, ``[sequences, conv_elements]``, in its codec."""
        view = self.store.conv
        view.rows.index_put_((self.conv_rows[:, slot],), conv.to(view.dtype))

    def write_state(self, slot: int, state: Tensor) -> None:
        """Store the recurrent part of a layer, ``[sequences, state_elements]``, in its codec."""
        view = self.store.recurrent
        view.rows.index_put_((self.state_rows[:, slot],), state.to(view.dtype))

    def _read(self, view: _View, rows: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
        found = view.rows.index_select(0, rows[:, slot]).to(dtype)
        if self.fresh is not None:
            found[self.fresh] = 0
        return found
