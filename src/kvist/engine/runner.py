"""From a batch to logits: index tensors once a step, then the network."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvist.batch import Batch, Chunk
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.sequence import BlockCopy, Compaction, Move, Sequence
from kvist.engine.machine import keep_pages, zeros
from kvist.engine.memories import Memory, leads_of, memory_of, tails_of
from kvist.engine.tiers import TierBytes
from kvist.kernels.cpu import attention_kernels
from kvist.kernels.leading import Before, LedAttention, LedMemory
from kvist.kernels.moving import move
from kvist.kernels.sealing import SealedAttention, SealedMemory
from kvist.kernels.sharing import sharing_order
from kvist.kernels.spans import Span
from kvist.model.decoder import Decoder, Step
from kvist.model.mixers.places import Observer, Plan
from kvist.model.weights import dtype_named
from kvist.spec.formats import CODECS, KEY_CODECS
from kvist.spec.layers import Latent, State
from kvist.spec.model import ModelSpec
from kvist.store.layouts import Index, PagedKV, Scratch, check_format
from kvist.store.states import StateSpan, StateStore
from kvist.store.stores import store_of


class Runner:
    """A model with the memory of its cache.

    Args:
        spec: of a model whose files are on disk.
        groups: of its layers.
        layout: how the arena is cut; the runner allocates it.
        dtype: to compute in: ``f32``, ``bf16`` or ``f16``.

    Attributes:
        arena_bytes: allocated for keys and values.
        tiers: memory behind the arena, where there is any.
        watch: makes of a step's chunks, in the order of their rows, what looks at its queries; None: nothing does.

    Raises:
        InputError: a type or format is not computed with.
        UnsupportedModel, BadFile: the weights do not make this model.
    """

    def __init__(self, spec: ModelSpec, groups: tuple[Group, ...], layout: ArenaLayout, *, dtype: str) -> None:
        compute = dtype_named(dtype)
        self.layout = layout
        self.tiers: TierBytes | None = None
        self.watch: Callable[[Seq[Chunk]], Observer | None] | None = None
        for group in groups:
            check_format(group)
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        keep_pages()
        with torch.inference_mode():
            # Zeroed, so that what no token has written yet is a number.
            self.arena = zeros(layout.total_bytes)
            self.decoder = Decoder(spec, groups, compute)
            scratch = Scratch()
            self.stores = [store_of(self.arena, group, layout, n, scratch) for n, group in enumerate(groups)]
            self.groups = groups
            self.tails, self.leads = tails_of(groups), leads_of(groups)
            self.memories = [memory_of(number, groups, self.stores, self.decoder) for number in range(len(groups))]
        self.arena_bytes = self.arena.numel()
        # Windows have no shared runs, states no tokens; without a full group any order will do.
        self.shared_group = next((n for n, group in enumerate(groups) if group.keeps_all), None)
        codecs = {codec for group in groups for codec in _codecs(group)}
        # Groups whose memory may have held bytes of another meaning: another codec's, or codes where scales are now.
        # Within one group every byte of a block keeps its meaning.
        mixed = len(groups) > 1 and (len(codecs) > 1 or any((CODECS | KEY_CODECS)[codec].group > 1 for codec in codecs))
        self.unclean = [n for n, group in enumerate(groups) if mixed and group.fixed_blocks is None]

    def run(self, batch: Batch) -> Tensor:
        """Compute a batch and store its keys and values in the arena.

        Returns:
            float32 logits ``[sampling chunks, vocab]``, in the batch's order.
        """
        with torch.inference_mode():
            for group in self.unclean:
                self._clear(group, batch.chunks)
            return self.decoder.logits(self._step(batch.chunks))

    def score(self, chunks: Seq[Chunk]) -> Tensor:
        """Compute chunks as :meth:`run` does, and return what stands behind each of their tokens.

        Returns:
            float32 logits ``[tokens, vocab]``; sequences that share blocks stand beside each other, in no order of
            the caller's, so that it scores one at a time where the order matters.
        """
        with torch.inference_mode():
            for group in self.unclean:
                self._clear(group, chunks)
            step = self._step(chunks)
            return self.decoder.logits(replace(step, sampled=torch.arange(len(step.tokens))))

    def _clear(self, group: int, chunks: Seq[Chunk]) -> None:
        """Zero the blocks that these chunks begin and do not fill.

        Attention reads whole blocks and gives what lies behind the end no weight; but what was written there with
        another meaning may read as no number at all, which nothing times zero is.
        """
        size, whole = self.groups[group].block_tokens, self.groups[group].whole_tokens
        for chunk in chunks:
            sequence = chunk.request.sequence
            start = chunk.start - sequence.dropped[group]
            last = (whole(start + chunk.count) - 1) // size
            if last * size >= whole(start):
                self._zero(group, int(sequence.tables[group][last]))

    def _zero(self, group: int, block: int) -> None:
        begin = self.layout.offset(group, block)
        self.arena[begin : begin + self.layout.block_bytes[group]].zero_()

    def compact(self, moved: Compaction, kept: Tensor) -> None:
        """Move what is kept of a pruned sequence to its new blocks.

        Args:
            moved: where its tokens lie, and where the kept ones belong.
            kept: int64 ``[layers, kv_heads, tokens]``: their slots, ascending.
        """
        store = self.stores[moved.group]
        assert isinstance(store, PagedKV)
        with torch.inference_mode():
            last = int(moved.target[-1])
            if moved.group in self.unclean and last not in moved.source:
                self._zero(moved.group, last)
            move(store, moved.source, moved.target, kept, attention_kernels(self.decoder.dtype))

    def copy(self, moves: Seq[Move]) -> None:
        """Copy whole blocks, all layers of their group: states, what a fork needs, what goes to tiers and comes back.

        In order, and before the arena is written to otherwise. What a tier could not do it tells later
        (:attr:`TierBytes.torn`).
        """
        with torch.inference_mode():
            for move in moves:
                if isinstance(move, BlockCopy):
                    size = self.layout.block_bytes[move.group]
                    source, target = (self.layout.offset(move.group, block) for block in (move.source, move.target))
                    self.arena[target : target + size] = self.arena[source : source + size]
                else:
                    assert self.tiers is not None
                    self.tiers.move(move, self.arena)

    def _step(self, chunks: Seq[Chunk]) -> Step:
        order = list(range(len(chunks)))
        if self.shared_group is not None and len(chunks) > 1:
            group = self.shared_group
            order = sharing_order([self._shared_table(chunk.request.sequence, group) for chunk in chunks])
        ordered = [chunks[index] for index in order]
        sequences = [chunk.request.sequence for chunk in ordered]
        counts = np.array([chunk.count for chunk in ordered])
        ends = np.cumsum(counts)
        starts = np.array([s.first_position + chunk.start for s, chunk in zip(sequences, ordered, strict=True)])
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        tokens = np.concatenate(
            [s.tokens[chunk.start : chunk.start + chunk.count] for s, chunk in zip(sequences, ordered, strict=True)]
        )
        last_row = np.empty(len(chunks), np.int64)
        last_row[order] = ends - 1
        sampled = last_row[[chunk.samples for chunk in chunks]]
        observer = None if self.watch is None else self.watch(ordered)
        return Step(
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            positions=torch.from_numpy(positions),
            plans=[self._plan(number, memory, ordered, observer) for number, memory in enumerate(self.memories)],
            sampled=torch.from_numpy(sampled),
            observer=observer,
        )

    def _plan(self, number: int, memory: Memory | None, chunks: Seq[Chunk], observer: Observer | None) -> Plan:
        if memory is None:
            return None
        parts = [(chunk.request.sequence, chunk.start, chunk.count) for chunk in chunks]
        if isinstance(memory, StateStore):
            return memory.plan(
                [StateSpan(table=s.tables[number], start=start, count=count) for s, start, count in parts]
            )
        spans, *tails = [
            [
                Span(
                    table=s.tables[group],
                    start=start - s.dropped[group],
                    count=count,
                    drawn=None if observer is None else observer.drawn(group, place),
                )
                for place, (s, start, count) in enumerate(parts)
            ]
            for group in (number, *([self.tails[number]] if number in self.tails else ()))
        ]
        if isinstance(memory, LedAttention | LedMemory):
            lead = self.leads[number]
            before = [Before(table=s.tables[lead], tokens=s.first_position, count=count) for s, _, count in parts]
            return memory.plan(before, spans, *tails)
        if isinstance(memory, SealedAttention | SealedMemory):
            return memory.plan(spans, *tails)
        return memory.plan(spans)

    def _shared_table(self, sequence: Sequence, group: int) -> Index:
        """What a sequence's keys begin with, by which neighbours are chosen: of its lead, then blocks of its own."""
        table = sequence.tables[group]
        if sequence.lead is None:
            return table
        # Blocks of two groups, of which none is to be taken for another.
        return np.concatenate((-1 - sequence.tables[self.leads[group]], table))


def _codecs(group: Group) -> set[str]:
    """The types of what a group stores."""
    if isinstance(group.layer, State):
        layer = group.layer
        parts = ((layer.conv_codec, layer.conv_elements), (layer.state_codec, layer.state_elements))
        return {codec for codec, elements in parts if elements}
    if isinstance(group.layer, Latent):
        return {"fp8", "bf16"} if group.format.key == "fp8" else {group.format.key}
    return {group.format.key, group.format.value}
