"""Attention by the C++ kernels, in bf16, on blocks where they lie: one group's memory, and a step's plan."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.cpu import MOST_DIM, Cpu
from kvist.kernels.dense import Scores
from kvist.kernels.sharing import SharedRun, shared_runs
from kvist.kernels.spans import Span, in_chunks, positions_of
from kvist.store.layouts import Index, PagedKV

# cpu_blocks.h: kMaxTiles of 16 queries.
_MOST_REPEATS = 256
CODECS = {name: number for number, name in enumerate(("bf16", "f16", "f32", "fp8", "int8", "int4", "int4a"))}
KEY_CODECS = CODECS | {"int4c": len(CODECS)}
"""The codecs that are read, by their numbers in cpu.h."""


class PagedAttention:
    """One group's memory as the kernels see it.

    Args:
        kernels: of this machine.
        store: of the group; :meth:`suits` it.
        scores: scale and cap.
        repeats: query heads of a KV head.
    """

    # Whether sinks take part, and whether attention tells keys what they draw.
    sinks = False
    draws = True

    def __init__(self, kernels: Cpu, store: PagedKV, scores: Scores, repeats: int) -> None:
        self.kernels = kernels
        self.store = store
        self.scores = scores
        group = store.group
        key_run_bytes, value_run_bytes = group.head_run_bytes
        self.geometry = kernels.module.Geometry(
            slab_bytes=store.slab_bytes,
            blocks_per_slab=store.blocks_per_slab,
            block_bytes=group.block_bytes,
            layer_bytes=store.kv_heads * (key_run_bytes + value_run_bytes),
            key_run_bytes=key_run_bytes,
            value_run_bytes=value_run_bytes,
            key=KEY_CODECS[group.format.key],
            value=CODECS[group.format.value],
            block_tokens=group.block_tokens,
            kv_heads=store.kv_heads,
            dim=store.dim,
            repeats=repeats,
        )

    @staticmethod
    def suits(store: PagedKV, dtype: torch.dtype, repeats: int) -> bool:
        """Whether the kernels compute so: in bf16, on blocks of whole vectors of 16 tokens.

        One token's queries of a KV head must fit into what a thread works in.
        """
        return (
            dtype == torch.bfloat16
            and store.group.format.key in KEY_CODECS
            and store.group.format.value in CODECS
            and store.block_tokens % 16 == 0
            and store.dim % 32 == 0
            and store.dim <= MOST_DIM
            and repeats <= _MOST_REPEATS
        )

    def segment(self, spans: Sequence[Span], seen: Index, layers: Sequence[int] | None = None) -> Any:
        """What a step's rows see in this memory, as a plan takes it.

        Args:
            spans: the sequences' blocks, and how many rows each has.
            seen: int64 ``[rows]``: the last place of its sequence's that a row sees; below 0 where it sees none.
            layers: place in the group of each layer of the plan; all of them, in their order, where it is not said.
        """
        lengths = [len(span.table) for span in spans]
        return self.kernels.module.Segment(
            geometry=self.geometry,
            arena=self.store.address,
            layers=list(range(len(self.store.group.layers)) if layers is None else layers),
            blocks=np.concatenate([span.table for span in spans]),
            begin=np.cumsum([0, *lengths[:-1]]),
            count=np.array([span.count for span in spans]),
            seen=seen,
        )

    def plan(self, spans: Sequence[Span], *, further: Sequence[Any] = ()) -> "PagedPlan":
        """Plan a step; ``spans`` as for :class:`kvist.kernels.attention.AttentionPlan`.

        ``further`` segments, of :meth:`segment`, are what the rows see besides: no window then, and a row that is told
        what its keys draw sees nothing there.
        """
        store = self.store
        if store.group.chunk is not None:
            spans = in_chunks(spans, store.group.chunk, store.block_tokens)
        window = store.group.window
        runs: Sequence[SharedRun] = ()
        if window is None and len(spans) > 1:
            # What a key draws is known with all that its query sees, in one piece.
            limits = [0 if span.drawn is not None else span.start // store.block_tokens for span in spans]
            runs = shared_runs([span.table for span in spans], limits)
        drawn = [(index, span.drawn) for index, span in enumerate(spans) if span.drawn is not None]
        assert window is None or not drawn, "keys behind a window draw nothing that could be told"
        segments = [self.segment(spans, positions_of(spans)), *further]
        return self.plan_of(segments, window=window or 0, runs=runs, drawn=drawn)

    def plan_of(
        self,
        segments: Sequence[Any],
        *,
        window: int = 0,
        runs: Sequence[SharedRun] = (),
        open_segment: int = 0,
        sealed: Index | None = None,
        drawn: Sequence[tuple[int, Tensor]] = (),
    ) -> "PagedPlan":
        """Plan a step over segments; shared runs are of the first, of which the window is too.

        Args:
            segments: of :meth:`segment`.
            window: tokens that a query sees; 0 for all.
            runs: blocks that several sequences begin with.
            open_segment: where the rows are stored.
            sealed: int64 ``[tokens, 4]``: block and slot of the open segment, and those of the first, of each token
                that moves there.
            drawn: spans of the first segment, whose rows see no other, and what is added to of each: as
                :class:`kvist.kernels.spans.Span` has it.
        """
        self.kernels.follow_threads()
        places = [(run.first_span, run.end_span, run.first_block, run.end_block) for run in runs]
        plan = self.kernels.module.Plan(
            segments=list(segments),
            open=open_segment,
            scale=self.scores.scale,
            softcap=self.scores.softcap or 0.0,
            window=window,
            runs=np.array(places, np.int64).ravel(),
            sealed=np.empty(0, np.int64) if sealed is None else sealed.ravel(),
            drawn=[number for i, sums in drawn for number in (i, sums.data_ptr(), *sums.stride()[:2])],
        )
        return self.plan_type(self.kernels, plan, [self.store, *(sums for _, sums in drawn)])

    @property
    def plan_type(self) -> "type[PagedPlan]":
        """Of what :meth:`plan_of` returns."""
        return PagedPlan


class PagedPlan:
    """What the queries of one step see in one group of layers; the same verb as :class:`AttentionPlan`."""

    def __init__(self, kernels: Cpu, plan: Any, held: Sequence[object]) -> None:
        self.kernels = kernels
        self.plan = plan
        # Read and written by address.
        self.held = held

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store a layer's new keys and values, then attend.

        Args:
            slot: the layer's place in the group.
            q: bf16 ``[tokens, repeats, kv_heads, dim]``, rotated, dense but for the stride of its tokens.
            kv: bf16 ``[tokens, 2 x kv_heads, dim]``, rotated keys, then values; likewise.
            sinks: None; these kernels have none.

        Returns:
            ``[tokens, repeats x kv_heads x dim]``.
        """
        assert sinks is None, "layers with sinks attend by PyTorch's operators"
        out = torch.empty(len(q), q.shape[1] * q.shape[2] * q.shape[3], dtype=q.dtype)
        self.plan.attend(
            self.kernels.kind,
            slot,
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            out.data_ptr(),
        )
        return out

    def weigh(self, slot: int, q: Tensor) -> None:
        """Add to the spans' ``drawn`` what these queries weigh the keys, which are stored already, and nothing else.

        Args:
            slot: the layer's place in the group.
            q: as for :meth:`attend`.
        """
        self.plan.weigh(self.kernels.name == "amx", slot, q.data_ptr(), q.stride(0))
