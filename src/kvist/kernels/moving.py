"""What is kept of a pruned sequence goes to its new blocks: in C++ where that was compiled, else by PyTorch."""

import numpy as np
from torch import Tensor

from kvist.kernels.cpu import Cpu
from kvist.store import survivors
from kvist.store.layouts import Index, PagedKV


def move(store: PagedKV, source: Index, target: Index, kept: Tensor, kernels: Cpu | None) -> None:
    """Copy what is kept of a sequence to its new blocks; changes the arena.

    Args:
        store: of the group.
        source: block ids where the tokens lie.
        target: block ids where the kept ones belong, one after the other; these may be among the former.
        kept: int64 ``[layers, kv_heads, tokens]``: their slots, ascending.
        kernels: of this machine; None where there are none.
    """
    if kernels is None:
        survivors.move(store, source, target, kept)
        return
    kernels.follow_threads()
    layers, kv_heads, count = kept.shape
    pieces, first = [], 0
    for part in store.parts:
        run = part.coding.run_bytes
        for piece in part.coding.pieces:
            pieces += [
                first + piece.offset,
                run,
                piece.token_step,
                piece.element_step,
                part.heads,
                piece.elements,
                piece.dtype.itemsize,
            ]
        first += part.heads * run
    kept = kept.contiguous()
    kernels.module.move_kept(
        store.address,
        store.group.block_bytes // layers,
        layers,
        kv_heads,
        store.block_tokens,
        np.array(pieces, np.int64),
        store.units(source) * store.unit,
        store.units(target) * store.unit,
        kept.data_ptr(),
        count,
    )
