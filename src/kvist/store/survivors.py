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
        """The keys of one layer, ``[kv_heads, tokens, dim]``."""
        store, part = self.store, self.part
        runs = part.run_views[slot].index_select(0, self.index)
        if part.coding.quantised:
            numbers = torch.empty(len(runs), store.block_tokens, store.dim, dtype=self.dtype)
            runs = part.coding.unpack(runs, numbers)
        return runs.view(store.kv_heads, -1, store.dim)[:, : self.tokens].to(self.dtype)


def move(store: PagedVectors, source: Index, target: Index, kept: Tensor) -> None:
    """Copy what is kept of a sequence to its new blocks; changes the arena.

    Args:
        store: of the group.
        source: block ids where the tokens lie.
        target: block ids where the kept ones belong, one after the other; these may be among the former.
        kept: int64 ``[layers, kv_heads, tokens]``: their slots, ascending.
    """
    size = store.block_tokens
    # [kv_heads, tokens] of a layer, once for keys and once for values where one part holds both.
    places = np.arange(kept.shape[-1])
    to_units, to_slots = store.units(target)[places // size], places % size
    from_units = store.units(source)
    for layer, slots in enumerate(kept.numpy()):
        units, rows = from_units[slots // size], slots % size
        for part in store.parts:
            times = part.heads // store.kv_heads
            heads = np.arange(part.heads)[:, None] * part.run_units * part.unit
            for view, piece, step in zip(part.piece_views[layer], part.coding.pieces, part.steps, strict=True):
                per_unit, per_token = part.unit // step, piece.token_step // step
                old = np.tile(units * per_unit + rows * per_token, (times, 1)) + heads // step
                new = to_units * per_unit + to_slots * per_token + heads // step
                # Read whole before anything is written: source and target may overlap.
                view.index_put_((torch.from_numpy(new),), view[torch.from_numpy(old)])
