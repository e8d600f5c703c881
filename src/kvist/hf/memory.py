"""The keys and values of a batch in kvist's paged memory: stored a layer at a time, and handed out dense.

A step is one forward pass: the first layer that stores makes room for all of them, the last one ends it. Layers get
back what their queries see, decoded; new tokens among them as they will be read again, so that no answer depends on how
a prompt was cut in steps. With tails a step's own tokens are seen as they were computed, and runs that it completes are
sealed from these (see :mod:`kvist.kernels.sealing` for what the engine does, a run at a time).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.errors import InputError
from kvist.hf.blocks import Blocks
from kvist.hf.group_memory import GroupMemory
from kvist.kernels.hadamard import hadamard
from kvist.store.codecs import PLAIN, Coding
from kvist.units import counted


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a layer is: its group and its place in it, and the same of the group of its tail where it has one."""

    group: int
    slot: int
    tail: int | None = None
    tail_slot: int = 0


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Blocks of all rows to be gathered: rows of the arena's views a part, and the tokens in them that are wanted."""

    indices: list[Tensor]
    blocks: int
    seen: slice


@dataclass(kw_only=True)
class _Step:
    """What the layers of one forward pass share."""

    count: int
    done: set[int] = field(default_factory=set)
    where: dict[tuple[int, int, int], list[list[Tensor]]] = field(default_factory=dict)
    readings: dict[tuple[int, int, int], _Reading] = field(default_factory=dict)


class BatchMemory:
    """Keys and values of all layers of a model, for some sequences of one length.

    Args:
        groups: the model's, of attention alone.
        memory: most bytes of the arenas; None: as many as it takes.

    Attributes:
        places: of each layer that stores, by its index.
        blocks: who has which of them.

    Raises:
        InputError: a format is not stored.
    """

    def __init__(self, groups: Sequence[Group], memory: int | None) -> None:
        self.groups = tuple(groups)
        self.blocks = Blocks(groups, memory)
        self.places = _places(self.groups)
        self._step: _Step | None = None
        self._device = torch.device("cpu")
        self._memories = [GroupMemory(group) for group in self.groups]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arenas, whatever lies in them."""
        return self.blocks.arena_bytes

    def length(self, layer: int) -> int:
        """Tokens of each sequence that a layer has stored."""
        done = self._step is not None and layer in self._step.done
        return self.blocks.length + (self.blocks.in_flight if done else 0)

    @property
    def stepping(self) -> bool:
        """Whether layers have stored a step that others have not."""
        return self._step is not None

    def require_idle(self, key: str) -> None:
        """Raise :class:`InputError` in the middle of a step, where layers have stored tokens and others have not."""
        if self._step is not None:
            raise InputError(
                f"{key}: {len(self._step.done)} of {counted(len(self.places), 'layer')} have stored a step, and the "
                f"others not yet: call it between forward passes, or reset() after one that failed",
                key=key,
            )

    @torch.no_grad()
    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values.

        Args:
            layer: index in the model.
            keys: ``[rows, kv_heads, tokens, dim]``.
            values: likewise.

        Returns:
            What its queries see, ``[rows, kv_heads, seen tokens, dim]``: what the window leaves, and the new ones.

        Raises:
            InputError: this layer has stored a step that others have not, or they stored another number of tokens.
            DoesNotFit: the memory is bounded and too small.
        """
        count = keys.shape[2]
        if self._step is None:
            self._begin(len(keys), count, keys.device)
        step = self._step
        assert step is not None
        if layer in step.done or count != step.count:
            raise InputError(
                f"layers: layer {layer} stores {counted(count, 'token')} more; {len(step.done)} of the "
                f"{len(self.places)} layers that the cache was made for have stored {step.count} in this step: give it "
                f"the configuration of the model that runs; reset() it after a step that failed",
                key="layers",
            )
        place = self.places[layer]
        home = keys.device
        keys, values = keys.to(self._device), values.to(self._device)
        made = self._sealed(place, keys, values) if place.tail is not None else self._plain(place, keys, values)
        step.done.add(layer)
        if len(step.done) == len(self.places):
            self.blocks.end()
            self._step = None
        return made[0].to(home), made[1].to(home)

    @torch.no_grad()
    def read(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All that is held of a layer's keys and values, between steps: ``[rows, kv_heads, tokens, dim]``."""
        self._step = _Step(count=0)
        try:
            place, length = self.places[layer], self.blocks.length
            if place.tail is None:
                return self._read(place.group, place.slot, self._seen_from(place.group), length, dtype)
            sealed = self.groups[place.group].whole_tokens(length)
            body = self._read(place.group, place.slot, 0, sealed, dtype)
            tail = self._read(place.tail, place.tail_slot, sealed, length, dtype)
            return torch.cat((body[0], tail[0]), dim=2), torch.cat((body[1], tail[1]), dim=2)
        finally:
            self._step = None

    def reset(self) -> None:
        """Forget all sequences and give the memory back."""
        self._step = None
        self.blocks.reset()
        self._memories = [GroupMemory(group) for group in self.groups]

    def __getstate__(self) -> dict[str, Any]:
        self.require_idle("pickle")
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchMemory":
        self.require_idle("deepcopy")
        twin = object.__new__(BatchMemory)
        twin.groups, twin.places, twin._step, twin._device = self.groups, self.places, None, self._device
        twin.blocks = copy.copy(self.blocks)
        twin.blocks.arenas = copy.deepcopy(self.blocks.arenas, memo)
        twin.blocks.tables = copy.deepcopy(self.blocks.tables, memo)
        twin._memories = [
            memory.copied(blocks.layout) for memory, blocks in zip(self._memories, self.blocks.arenas, strict=True)
        ]
        return twin

    # -- a step ---------------------------------------------------------------------------------------------

    def _begin(self, rows: int, count: int, device: torch.device) -> None:
        copies = self.blocks.begin(rows, count)
        if not self.blocks.length:
            if device != self._device:
                self._memories = [GroupMemory(group) for group in self.groups]
            self._device = device
        for memory, blocks in zip(self._memories, self.blocks.arenas, strict=True):
            memory.fit(blocks.layout, self._device)
        for each in copies:
            self._memories[each.group].copy(each)
        self._step = _Step(count=count)

    def _plain(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        group, table = self.groups[place.group], self.blocks.tables[place.group]
        length, count, dtype = self.blocks.length, keys.shape[2], keys.dtype
        turned = self._turned(group, keys, values)
        self._append(place.group, place.slot, *turned, first=length, start=table.stored_from)
        seen = self._seen_from(place.group)
        if seen == length or table.stored_from > length or table.past is not None:
            new = self._turned(group, *self._rounded(place.group, *turned))
            if seen == length:
                return new
            past = self._read(place.group, place.slot, seen, length, dtype)
            return torch.cat((past[0], new[0]), dim=2), torch.cat((past[1], new[1]), dim=2)
        return self._read(place.group, place.slot, seen, length + count, dtype)

    def _sealed(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert place.tail is not None
        group, tail = self.groups[place.group], self.blocks.tables[place.tail]
        length, end, dtype = self.blocks.length, self.blocks.length + keys.shape[2], keys.dtype
        opened, sealed = group.whole_tokens(length), group.whole_tokens(end)
        self._append(place.tail, place.tail_slot, keys, values, first=length, start=tail.stored_from)
        if length > opened:
            rest = self._read(place.tail, place.tail_slot, opened, length, dtype)
            keys, values = torch.cat((rest[0], keys), dim=2), torch.cat((rest[1], values), dim=2)
        if sealed > opened:
            runs = self._turned(group, keys[:, :, : sealed - opened], values[:, :, : sealed - opened])
            self._append(place.group, place.slot, *runs, first=opened, start=opened)
        if not opened:
            return keys, values
        body = self._read(place.group, place.slot, 0, opened, dtype)
        return torch.cat((body[0], keys), dim=2), torch.cat((body[1], values), dim=2)

    def _seen_from(self, ordinal: int) -> int:
        """First token that the next query sees."""
        window = self.groups[ordinal].window
        return 0 if window is None else max(0, self.blocks.length - window + 1)

    # -- bytes ----------------------------------------------------------------------------------------------

    def _append(self, ordinal: int, slot: int, keys: Tensor, values: Tensor, *, first: int, start: int) -> None:
        """Store the tokens from ``start`` on, of which ``keys`` and ``values`` begin with ``first``."""
        end = first + keys.shape[2]
        if start >= end:
            return
        step, store = self._step, self._memories[ordinal].store
        assert step is not None
        where = step.where.get((ordinal, start, end))
        if where is None:
            table, size = self.blocks.tables[ordinal], store.block_tokens
            tokens = np.arange(start, end)
            blocks = table.blocks[:, tokens // size - table.first]
            found = store.vectors(blocks.ravel(), np.broadcast_to(tokens % size, blocks.shape).ravel())
            where = [[index.to(keys.device) for index in part] for part in found]
            step.where[ordinal, start, end] = where
        kv = torch.cat((keys[:, :, start - first :], values[:, :, start - first :]), dim=1)
        store.append(slot, kv.transpose(1, 2).flatten(0, 1), where)

    def _read(self, ordinal: int, slot: int, start: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tokens ``start`` to ``end``, in fresh memory, as they were before they were turned."""
        step, store, group = self._step, self._memories[ordinal].store, self.groups[ordinal]
        assert step is not None
        if end <= start:
            empty = (self.blocks.rows, store.kv_heads, 0, store.dim)
            nothing = torch.empty(empty, dtype=dtype, device=self._device)
            return nothing, nothing
        reading = step.readings.get((ordinal, start, end))
        if reading is None:
            reading = step.readings[ordinal, start, end] = self._reading(ordinal, start, end)
        sides: list[Tensor] = []
        for part, index in zip(store.parts, reading.indices, strict=True):
            runs = part.run_views[slot].index_select(0, index)
            if part.coding.quantised:
                numbers = torch.empty(len(index), store.block_tokens, store.dim, dtype=dtype, device=runs.device)
                runs = part.coding.unpack(runs, numbers)
            whole = runs.view(self.blocks.rows, part.heads, reading.blocks * store.block_tokens, store.dim)
            sides.append(whole[:, :, reading.seen].to(dtype))
        keys, values = store.sides(sides[0]) if store.uniform else sides
        return self._turned(group, keys, values)

    def _reading(self, ordinal: int, start: int, end: int) -> _Reading:
        store, table = self._memories[ordinal].store, self.blocks.tables[ordinal]
        size = store.block_tokens
        # Of a step that begins anew, older tokens lie where they did.
        older = table.past is not None and start < self.blocks.length
        blocks, first = (table.past, table.past_first) if older else (table.blocks, table.first)
        assert blocks is not None
        columns = blocks[:, start // size - first : -(-end // size) - first]
        units = store.units(columns)
        indices = []
        for part in store.parts:
            head = np.arange(part.heads)[:, None] * part.run_units
            indices.append(torch.from_numpy((units[:, None, :] + head).ravel()).to(self._device))
        behind = start // size * size
        return _Reading(indices=indices, blocks=columns.shape[1], seen=slice(start - behind, end - behind))

    def _rounded(self, ordinal: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values as they will be read again."""
        parts = self._memories[ordinal].store.parts
        key, value = parts[0].coding, parts[-1].coding
        return _as_read(key, keys), _as_read(value, values)

    def _turned(self, group: Group, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Turned where the format turns, which is its own way back."""
        turn = _turn(group.attention.key_dim, keys.dtype, keys.device) if group.format.rotates else None
        return (
            keys @ turn if turn is not None and group.format.rotates_keys else keys,
            values @ turn if turn is not None and group.format.rotates_values else values,
        )


def _places(groups: Sequence[Group]) -> dict[int, Place]:
    tails = {
        layer: (number, slot)
        for number, group in enumerate(groups)
        if group.lifetime == "tail"
        for slot, layer in enumerate(group.layers)
    }
    found = {}
    for number, group in enumerate(groups):
        if group.lifetime == "tail":
            continue
        for slot, layer in enumerate(group.layers):
            tail = tails.get(layer) if group.lifetime == "sealed" else None
            found[layer] = (
                Place(group=number, slot=slot)
                if tail is None
                else Place(group=number, slot=slot, tail=tail[0], tail_slot=tail[1])
            )
    return dict(sorted(found.items()))


def _as_read(coding: Coding, x: Tensor) -> Tensor:
    return x if PLAIN.get(coding.codec) == x.dtype else coding.rounded(x)


@cache
def _turn(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return hadamard(dim, dtype).to(device)
