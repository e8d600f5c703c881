"""The GPU's kernels, in Triton: store a step's tokens quantised, then attend to blocks in place; planned once a step.

The same verbs as :mod:`kvist.kernels.paged`: a memory is laid over a group's part of the arena, plans a step, and every
layer attends by the plan. Needs the ``gpu`` extra; whoever imports this module has Triton.

The kernels are checked by Triton's interpreter, on the CPU (``TRITON_INTERPRET=1``, set before the first import), and
compile for NVIDIA's compute capability 9.0; they have not run on a GPU yet. The engine does not use them by itself.
"""

from collections.abc import Sequence
from math import gcd

import torch
import triton
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.errors import InputError
from kvist.kernels.dense import Scores
from kvist.kernels.latent import LatentHeads
from kvist.kernels.spans import Span, in_chunks
from kvist.kernels.triton_attention import attend_pages
from kvist.kernels.triton_latent import attend_latents
from kvist.kernels.triton_memory import StepPlan, TritonMemory, append_vectors, constants_of
from kvist.kernels.triton_sides import Side, side_of
from kvist.kernels.triton_steps import cut
from kvist.store.codecs import PLAIN, Coding

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIM = 256


class TritonAttention(TritonMemory):
    """One group's keys and values as the kernels see them.

    Args:
        arena, group, layout, ordinal: as of :class:`kvist.store.layouts.PagedKV`.
        scores: scale and cap.
        repeats: query heads of a KV head.
        programs: that run at once, by which long contexts are cut; None asks the device.

    Raises:
        InputError: the layers or their codecs are not computed by these kernels.
    """

    def __init__(
        self,
        arena: Tensor,
        group: Group,
        layout: ArenaLayout,
        ordinal: int,
        scores: Scores,
        repeats: int,
        *,
        programs: int | None = None,
    ) -> None:
        super().__init__(arena, group, layout, ordinal, scores, programs)
        layer = group.attention
        if layer.key_dim != layer.value_dim or layer.key_dim > _MOST_DIM:
            raise InputError(
                f"{group.name}: keys are {layer.key_dim} wide, values {layer.value_dim}; the GPU's kernels compute "
                f"equal widths up to {_MOST_DIM}",
                key="head_dim",
            )
        self.kv_heads, self.dim, self.repeats = layer.kv_heads, layer.key_dim, repeats
        fmt, tokens = group.format, group.block_tokens
        self.key = side_of(Coding(fmt.key, side="key", dim=self.dim, tokens=tokens))
        self.value = side_of(Coding(fmt.value, side="value", dim=self.dim, tokens=tokens))
        sizes = (layout.slab_bytes, group.block_bytes, self.layer_bytes, self.key.run_bytes, self.value.run_bytes)
        self.align = gcd(16, *sizes)

    def plan(self, spans: Sequence[Span]) -> "TritonPlan":
        """Plan a step; ``spans`` as for :class:`kvist.kernels.attention.AttentionPlan`."""
        return TritonPlan(self, spans)

    def append(self, slot: int, kv: Tensor, plan: StepPlan) -> None:
        """Store a step's keys and values of one layer; changes the arena.

        Args:
            slot: the layer's place in the group.
            kv: ``[tokens, 2 x kv_heads, dim]``, keys, then values, dense but for the stride of its tokens.
            plan: of the step.
        """
        begin = slot * self.layer_bytes
        for number, side in enumerate((self.key, self.value)):
            x = kv[:, number * self.kv_heads : (number + 1) * self.kv_heads]
            append_vectors(self, x, side, begin, plan)
            begin += self.kv_heads * side.run_bytes


class TritonPlan(StepPlan):
    """What the queries of one step see in one group of layers."""

    def __init__(self, memory: TritonAttention, spans: Sequence[Span]) -> None:
        group = memory.group
        if group.chunk is not None:
            spans = in_chunks(spans, group.chunk, group.block_tokens)
        self.memory = memory
        self.keys = 64 if memory.dim <= 128 else 32
        steps = cut(
            spans,
            block_tokens=group.block_tokens,
            repeats=memory.repeats,
            window=group.window,
            sizes=(16, 64 if memory.dim <= 128 else 32),
            step=self.keys,
            programs=-(-memory.programs // memory.kv_heads),
        )
        super().__init__(memory, steps, spans)

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store a layer's new keys and values, then attend.

        Args:
            slot: the layer's place in the group.
            q: bf16, f16 or f32 ``[tokens, repeats, kv_heads, dim]``, rotated, dense but for the stride of its tokens.
            kv: ``[tokens, 2 x kv_heads, dim]``, rotated keys, then values; likewise.
            sinks: float32 ``[repeats, kv_heads]``: a score a head that takes part in the softmax and has no value.

        Returns:
            ``[tokens, repeats x kv_heads x dim]`` in the type of ``q``.

        Raises:
            InputError: queries are of another type.
        """
        memory = self.memory
        _check(q)
        memory.append(slot, kv, self)
        heads, repeats, dim = memory.kv_heads, memory.repeats, memory.dim
        out = torch.empty(self.tokens, repeats * heads * dim, dtype=q.dtype, device=q.device)
        partial, lse = self.partials(heads, dim, q.device)
        key_begin = slot * memory.layer_bytes
        scale, cap = memory.scale
        for rows, pieces in self.pieces.items():
            attend_pages[(len(pieces), heads)](
                q,
                q.stride(0),
                out,
                partial,
                lse,
                lse if sinks is None else sinks,
                memory.seen_as(memory.key.dtype),
                memory.seen_as(memory.value.dtype),
                memory.seen_as(torch.float16),
                self.tables,
                pieces,
                key_begin,
                key_begin + heads * memory.key.run_bytes,
                scale,
                cap,
                KEY=memory.key.codec,
                VALUE=memory.value.codec,
                TOKENS=memory.block_tokens,
                DIM=dim,
                KV_HEADS=heads,
                REPEATS=repeats,
                WINDOW=memory.group.window or 0,
                CAPPED=memory.scores.softcap is not None,
                SINKS=sinks is not None,
                ALIGN=memory.align,
                ROWS=rows,
                KEYS=self.keys,
                **constants_of(memory.key, "KEY_"),
                **constants_of(memory.value, "VALUE_"),
                num_warps=4 if rows == 16 else 8,
                num_stages=2,
            )
        self.merge(partial, lse, out, sinks, heads=heads, repeats=repeats, width=dim)
        return out


class TritonLatents(TritonMemory):
    """One group's latents as the kernels see them, attended to in their own space.

    Args:
        arena, group, layout, ordinal: as of :class:`kvist.store.layouts.PagedLatents`.
        scores: scale and cap.
        heads: query heads.
        programs: that run at once, by which long contexts are cut; None asks the device.

    Raises:
        InputError: latents are not computed in this codec.
    """

    def __init__(
        self,
        arena: Tensor,
        group: Group,
        layout: ArenaLayout,
        ordinal: int,
        scores: Scores,
        heads: int,
        *,
        programs: int | None = None,
    ) -> None:
        super().__init__(arena, group, layout, ordinal, scores, programs)
        codec = group.format.key_codec
        if codec.group > 1:
            raise InputError(
                f"key: the GPU's kernels do not compute latents in {codec.name}; choose one of f32, f16, bf16, fp8",
                key="key",
            )
        self.heads, self.rank, self.rope_dim = heads, group.latent.rank, group.latent.rope_dim
        self.codec = codec.name
        # The rotary part keeps 16 bits beside a latent in 8.
        self.latent_dtype = PLAIN.get(codec.name, torch.uint8)
        self.rope_dtype = PLAIN.get(codec.name, torch.bfloat16)
        self.rope_bytes = self.rank * self.latent_dtype.itemsize
        self.vector_bytes = self.rope_bytes + self.rope_dim * self.rope_dtype.itemsize
        sizes = (layout.slab_bytes, group.block_bytes, self.layer_bytes, self.vector_bytes, self.rope_bytes)
        self.align = gcd(16, *sizes)

    def plan(self, spans: Sequence[Span]) -> "TritonLatentPlan":
        """Plan a step; ``spans`` as for :class:`kvist.kernels.latent.LatentPlan`."""
        return TritonLatentPlan(self, spans)

    def append(self, slot: int, new: Tensor, plan: StepPlan) -> None:
        """Store a step's latents of one layer, ``[tokens, 1, rank + rope]``; changes the arena."""
        begin = slot * self.layer_bytes
        parts = (
            (self.codec, self.latent_dtype, new[..., : self.rank], begin),
            (
                self.codec if self.codec in PLAIN else "bf16",
                self.rope_dtype,
                new[..., self.rank :],
                begin + self.rope_bytes,
            ),
        )
        for codec, dtype, x, first in parts:
            steps = self.vector_bytes // dtype.itemsize
            append_vectors(self, x, Side(codec=codec, dtype=dtype, columns=x.shape[-1], slot_step=steps), first, plan)


class TritonLatentPlan(StepPlan):
    """What the queries of one step see in one group of latents; verb of :class:`kvist.kernels.latent.LatentPlan`."""

    def __init__(self, memory: TritonLatents, spans: Sequence[Span]) -> None:
        self.memory = memory
        self.keys = 32
        steps = cut(
            spans,
            block_tokens=memory.block_tokens,
            repeats=memory.heads,
            window=None,
            sizes=(16, 16),
            step=self.keys,
            programs=memory.programs,
        )
        super().__init__(memory, steps, spans)

    def attend(self, slot: int, nope: Tensor, rope: Tensor, new: Tensor, heads: LatentHeads) -> Tensor:
        """Store a layer's new latents, then attend; arguments and result as of the verb's first."""
        mixed = self.over(slot, heads.absorb(nope, rope)[:, :, 0], new)
        return heads.values(mixed).reshape(self.tokens, -1)

    def over(self, slot: int, q: Tensor, new: Tensor) -> Tensor:
        """Store a layer's new latents, then attend in their space.

        Args:
            slot: the layer's place in the group.
            q: bf16, f16 or f32 ``[tokens, heads, rank + rope]``, dense but for the strides of tokens and heads.
            new: latents and rotated keys, ``[tokens, 1, rank + rope]``.

        Returns:
            ``[tokens, heads, rank]``: means of latents.

        Raises:
            InputError: queries are of another type.
        """
        memory = self.memory
        _check(q)
        memory.append(slot, new, self)
        out = torch.empty(self.tokens, memory.heads, memory.rank, dtype=q.dtype, device=q.device)
        partial, lse = self.partials(1, memory.rank, q.device)
        scale, cap = memory.scale
        for rows, pieces in self.pieces.items():
            attend_latents[(len(pieces),)](
                q,
                q.stride(0),
                q.stride(1),
                out,
                partial,
                lse,
                memory.seen_as(memory.latent_dtype),
                memory.seen_as(memory.rope_dtype),
                self.tables,
                pieces,
                slot * memory.layer_bytes,
                scale,
                cap,
                CODEC=memory.codec,
                TOKENS=memory.block_tokens,
                RANK=memory.rank,
                ROPE=memory.rope_dim,
                HEADS=memory.heads,
                CAPPED=memory.scores.softcap is not None,
                ALIGN=memory.align,
                ROWS=rows,
                KEYS=self.keys,
                LATENT_ITEM=memory.latent_dtype.itemsize,
                ROPE_ITEM=memory.rope_dtype.itemsize,
                ROPE_BYTES=memory.rope_bytes,
                VECTOR_BYTES=memory.vector_bytes,
                LATENT_COLUMNS=max(16, triton.next_power_of_2(memory.rank)),
                ROPE_COLUMNS=max(16, triton.next_power_of_2(memory.rope_dim)),
                num_warps=8,
                num_stages=2,
            )
        self.merge(partial, lse, out, None, heads=1, repeats=memory.heads, width=memory.rank)
        return out


def _check(q: Tensor) -> None:
    if q.dtype not in _DTYPES:
        raise InputError(f"dtype: the GPU's kernels do not compute in {q.dtype}; choose bf16, f16 or f32", key="dtype")
