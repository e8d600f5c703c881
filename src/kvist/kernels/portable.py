"""Paged attention on processors without AVX-512's BF16 instructions, and in float32 and float16 everywhere.

C++ for any processor, in float32 arithmetic, over blocks of every codec; compiled for what all processors of the
architecture have, and on x86 for AVX2 and AVX-512 besides.
"""

import torch
from torch import Tensor

from kvist.kernels.paged import CODECS, KEY_CODECS, PagedAttention, PagedPlan
from kvist.store.layouts import PagedKV

# cpu_portable.h: kMaxDim and Type.
_MOST_DIM = 512
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class PortableAttention(PagedAttention):
    """One group's memory as these kernels see it; arguments as of :class:`PagedAttention`."""

    sinks = True
    draws = False

    @staticmethod
    def suits(store: PagedKV, dtype: torch.dtype, repeats: int) -> bool:
        """Whether the kernels compute so: blocks of whole vectors of 16 tokens, heads of whole vectors."""
        return (
            dtype in _TYPES
            and store.group.format.key in KEY_CODECS
            and store.group.format.value in CODECS
            and store.block_tokens % 16 == 0
            and store.dim % 16 == 0
            and store.dim <= _MOST_DIM
        )

    @property
    def plan_type(self) -> "type[PagedPlan]":
        """Of what is planned."""
        return PortablePlan


class PortablePlan(PagedPlan):
    """What the queries of one step see in one group of layers."""

    def attend(self, slot: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store a layer's new keys and values, then attend.

        Args:
            slot: the layer's place in the group.
            q: ``[tokens, repeats, kv_heads, dim]``, rotated, dense but for the stride of its tokens; bf16, float16 or
                float32.
            kv: ``[tokens, 2 x kv_heads, dim]``, rotated keys, then values; likewise, in the type of ``q``.
            sinks: float32 ``[repeats, kv_heads]``: a score a head that takes part in the softmax and has no value.

        Returns:
            ``[tokens, repeats x kv_heads x dim]``.
        """
        out = torch.empty(len(q), q.shape[1] * q.shape[2] * q.shape[3], dtype=q.dtype)
        self.plan.attend_anywhere(
            self.kernels.build,
            _TYPES[q.dtype],
            slot,
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out
