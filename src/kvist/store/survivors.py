"""A pruned sequence's keys and values: read, to choose which are kept; and these moved, byte by byte.

What is kept was written once, in whatever codec, and is copied as it lies there: a token's code, scale and minimum in
each piece of a run (:mod:`kvist.store.codecs`). Nothing is quantised again.
"""

import numpy as np
import torch
from torch import Tensor

from kvist.store.layouts import Index, PagedVectors


class Keys:
    """The keys of one sequence, to be read layer by layer.

    Args:
        store: of the group's keys and values.
        table: block ids of the sequence.
        tokens: slots that are wanted, from the first.
        dtype: of the keys handed out.
    """

    def __init__(self, store: PagedVectors, table: Index, tokens: int, dtype: torch.dtype) -> None:
        self.store = store
        self.part = part = store.parts[0]
        self.tokens = tokens
        self.dtype = dtype
        units = store.units(table[: -(-tokens // store.block_tokens)])
        # Where one part holds all, the heads of the keys come first in it.
        head = np.arange(store.kv_heads)[:, None] * part.run_units
        self.index = torch.from_numpy((units + head).ravel())

    def read(self, slot: int) -> Tensor:
        """The keys of one layer, ``[kv_heads, tokens, dim]``; valid until the next are read."""
        store, part = self.store, self.part
        runs = store.scratch.rows(part.dtype, "runs of keys", len(self.index), part.width)
        torch.index_select(part.run_views[slot], 0, self.index, out=runs)
        if part.coding.quantised:
            numbers = store.scratch.rows(self.dtype, "numbers of keys", len(runs) * store.block_tokens, store.dim)
            runs = part.coding.unpack(runs, numbers.view(len(runs), store.block_tokens, store.dim))
        seen = runs.view(store.kv_heads, -1, store.dim)[:, : self.tokens]
        # Dense and in one type: products of anything else would take twice as long.
        keys = store.scratch.rows(self.dtype, "keys", store.kv_heads * self.tokens, store.dim)
        return keys.view(store.kv_heads, self.tokens, store.dim).copy_(seen)


def move(store: PagedVectors, source: Index, target: Index, kept: Tensor) -> None:
    """Copy what is kept of a sequence to its new blocks; changes the arena.

    Args:
        store: of the group.
        source: block ids where the tokens lie.
        target: block ids where the kept ones belong, one after the other; these may be among the former.
        kept: int64 ``[layers, kv_heads, tokens]``: their slots, ascending.
    """
    size, layers = store.block_tokens, len(kept)
    places, slots = np.arange(kept.shape[-1]), kept.numpy()
    to_units, to_slots = store.units(target)[places // size], places % size
    from_units, from_slots = store.units(source)[slots // size], slots % size
    for part in store.parts:
        # One part may hold the keys of all heads, and behind them their values.
        times = part.heads // store.kv_heads
        heads = np.arange(part.heads)[:, None] * part.run_units * part.unit
        for number, (piece, step) in enumerate(zip(part.coding.pieces, part.steps, strict=True)):
            per_unit, per_token = part.unit // step, piece.token_step // step
            old = np.tile(from_units * per_unit + from_slots * per_token, (times, 1)) + heads // step
            new = to_units * per_unit + to_slots * per_token + heads // step
            into, each = torch.from_numpy(new), torch.from_numpy(old)
            for layer in range(layers):
                view = part.piece_views[layer][number]
                # Read whole before anything is written: source and target may overlap.
                view.index_put_((into,), view[each[layer]])
