"""Whole blocks to and from other memory: what a tier, a fork or a transfer moves, in one pass of the GPU's kernel."""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words of a program.
_WORDS = 2048


@triton.jit
def copy_words(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_at_ptr: tl.tensor,
    target_at_ptr: tl.tensor,
    words: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Copy pieces of memory, a grid of ``(pieces, words / WORDS)``; places and lengths in words."""
    piece = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = tl.load(source_at_ptr + piece) + word
    target = tl.load(target_at_ptr + piece) + word
    tl.store(target_ptr + target, tl.load(source_ptr + source, mask=word < words, other=0), mask=word < words)


def gather_blocks(arena: Tensor, offsets: Sequence[int], block_bytes: int) -> Tensor:
    """Copy blocks out of the arena.

    Args:
        arena: uint8, flat.
        offsets: byte at which each block begins.
        block_bytes: of a block.

    Returns:
        uint8 ``[blocks, block_bytes]`` on the arena's device.
    """
    rows = torch.empty(len(offsets), block_bytes, dtype=torch.uint8, device=arena.device)
    _move(arena, rows.view(-1), offsets, range(0, rows.numel(), block_bytes), block_bytes)
    return rows


def scatter_blocks(arena: Tensor, offsets: Sequence[int], rows: Tensor) -> None:
    """Copy blocks into the arena, the other way round; places are distinct.

    Args:
        arena: uint8, flat; changed.
        offsets: byte at which each block begins.
        rows: uint8 ``[blocks, block_bytes]``, dense, on the arena's device or where that can read.
    """
    block_bytes = rows.shape[1]
    _move(rows.view(-1), arena, range(0, rows.numel(), block_bytes), offsets, block_bytes)


def copy_blocks(arena: Tensor, sources: Sequence[int], targets: Sequence[int], block_bytes: int) -> None:
    """Copy blocks inside the arena, as a fork needs; no target is a source."""
    _move(arena, arena, sources, targets, block_bytes)


def _move(source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int], size: int) -> None:
    if not len(sources):
        return
    # The widest word that all places and lengths are multiples of.
    word = gcd(8, size, source.numel(), target.numel(), *sources, *targets)
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    at = torch.tensor([[place // word for place in sources], [place // word for place in targets]], dtype=torch.int64)
    at = at.to(target.device)
    grid = (len(sources), -(-size // word // _WORDS))
    copy_words[grid](source.view(dtype), target.view(dtype), at[0], at[1], size // word, WORDS=_WORDS)
