"""What the GPU's two kinds of memory share: the arena as kernels read it, and a step's plan on the device."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import triton
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.kernels.dense import Scores
from kvist.kernels.spans import Span
from kvist.kernels.triton_append import append_side
from kvist.kernels.triton_attention import merge_pieces
from kvist.kernels.triton_sides import Side
from kvist.kernels.triton_steps import Steps
from kvist.store.codecs import GROUP
from kvist.store.layouts import Index

_LOG2E = 1.4426950408889634
# Tokens that one program quantises.
_APPENDED = 16
# Programs a multiprocessor that make a GPU busy: below, long contexts are cut further.
_BUSY = 2


class TritonMemory:
    """What the two kinds of memory share.

    Args:
        arena: uint8 ``[layout.total_bytes]`` on the device that computes.
        group: of layers.
        layout: how the arena is cut.
        ordinal: of the group in the layout.
        scores: scale and cap.
        programs: that run at once; None asks the device, and is 1 on a CPU.
    """

    def __init__(
        self, arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, scores: Scores, programs: int | None
    ) -> None:
        self.arena = arena
        self.group = group
        self.scores = scores
        self.block_tokens = group.block_tokens
        self.layer_bytes = group.block_bytes // len(group.layers)
        self.slab_bytes = layout.slab_bytes
        self.blocks_per_slab = layout.blocks_per_slab[ordinal]
        if programs is None and arena.is_cuda:
            programs = _BUSY * torch.cuda.get_device_properties(arena.device).multi_processor_count
        self.programs = programs or 1
        self._views: dict[torch.dtype, Tensor] = {}

    def seen_as(self, dtype: torch.dtype) -> Tensor:
        """The arena as elements of a type."""
        if dtype not in self._views:
            self._views[dtype] = self.arena.view(dtype)
        return self._views[dtype]

    def offsets(self, blocks: Index) -> Index:
        """Byte at which each block begins; of those that are gone one that nothing reads."""
        slab, place = np.divmod(np.maximum(blocks, 0), self.blocks_per_slab)
        found: Index = slab * self.slab_bytes + place * self.group.block_bytes
        return found

    def moved(self, values: np.ndarray) -> Tensor:
        """A host's array on the arena's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.arena.device)

    @cached_property
    def scale(self) -> tuple[float, float]:
        """What products are multiplied with, and the cap or 0; as the kernels want them, to base 2."""
        if self.scores.softcap is None:
            return self.scores.scale * _LOG2E, 0.0
        return self.scores.scale / self.scores.softcap, self.scores.softcap * _LOG2E


class StepPlan:
    """A step cut into pieces, with what it needs on the device."""

    def __init__(self, memory: TritonMemory, steps: Steps, spans: Sequence[Span]) -> None:
        size = memory.block_tokens
        positions = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
        blocks = np.concatenate([span.table[np.arange(span.start, span.start + span.count) // size] for span in spans])
        self.tokens = len(positions)
        self.at = memory.moved(memory.offsets(blocks))
        self.slots = memory.moved(positions % size)
        self.tables = memory.moved(memory.offsets(steps.tables))
        self.pieces = {rows: memory.moved(pieces) for rows, pieces in steps.pieces.items()}
        self.partial_rows = steps.partial_rows
        self.merged = len(steps.rows)
        self.rows, self.bounds, self.sources = (
            memory.moved(part) for part in (steps.rows, steps.bounds, steps.sources)
        )

    def partials(self, heads: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for the results of pieces that are not alone, and for their log-sum-exps."""
        rows = max(1, self.partial_rows)
        return (
            torch.empty(rows, heads, width, dtype=torch.float32, device=device),
            torch.empty(rows, heads, dtype=torch.float32, device=device),
        )

    def merge(
        self, partial: Tensor, lse: Tensor, out: Tensor, sinks: Tensor | None, *, heads: int, repeats: int, width: int
    ) -> None:
        """Merge what several pieces found for one query."""
        if not self.merged:
            return
        rows = min(16, triton.next_power_of_2(repeats))
        merge_pieces[(self.merged, heads, -(-repeats // rows))](
            partial,
            lse,
            out,
            lse if sinks is None else sinks,
            self.rows,
            self.bounds,
            self.sources,
            DIM=width,
            KV_HEADS=heads,
            REPEATS=repeats,
            SINKS=sinks is not None,
            ROWS=rows,
            COLUMNS=triton.next_power_of_2(width),
        )


def append_vectors(memory: TritonMemory, x: Tensor, side: Side, begin: int, plan: StepPlan) -> None:
    """Store one side of a step's tokens; changes the arena.

    Args:
        x: ``[tokens, heads, width]``, dense but for the strides of its tokens and heads.
        side: how it is stored.
        begin: byte of a block at which the side of the layer begins.
        plan: of the step.
    """
    tokens, heads, _ = x.shape
    constants = constants_of(side)
    append_side[(-(-tokens // _APPENDED), heads)](
        x,
        x.stride(0),
        memory.seen_as(side.dtype),
        memory.seen_as(torch.float16),
        plan.at,
        plan.slots,
        tokens,
        begin,
        CODEC=side.codec,
        RUN_BYTES=constants.pop("RUN"),
        TOKENS=_APPENDED,
        X_ITEM_STEP=x.stride(1),
        **constants,
    )


def constants_of(side: Side, prefix: str = "") -> dict[str, int]:
    """What kernels are compiled for."""
    each = max(16, triton.next_power_of_2(side.columns))
    if side.scale_slot_step:
        each = GROUP // 2 if side.high else GROUP
    named = {
        "COLUMNS": side.columns,
        "HIGH": side.high,
        "ITEM": side.dtype.itemsize,
        "RUN": side.run_bytes,
        "SCALE_BYTES": side.scale_bytes,
        "SLOT_STEP": side.slot_step,
        "COLUMN_STEP": side.column_step,
        "SCALE_SLOT_STEP": side.scale_slot_step,
        "SCALE_GROUP_STEP": side.scale_group_step,
        "MINIMUM_STEP": side.minimum_step,
        "GROUPS": triton.next_power_of_2(side.groups),
        "EACH": each,
    }
    return {prefix + name: value for name, value in named.items()}
