"""The C++ kernels of the CPU: attention that reads blocks in place, and the small operators around it, in bf16.

Those for processors with AVX-512 and its BF16 instructions use the matrix unit (AMX) where there is one; the portable
ones (:mod:`kvist.kernels.portable`) need AVX2 to be fast. Where neither suits, or the extension was not compiled,
PyTorch's operators do the same work (:mod:`kvist.kernels.attention`).
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.errors import InputError
from kvist.kernels.dense import Scores
from kvist.kernels.gradients import gradients_wanted
from kvist.kernels.sharing import SharedRun, shared_runs
from kvist.kernels.spans import Span, in_chunks, positions_of
from kvist.store.layouts import Index, PagedKV

_log = logging.getLogger("kvist")

_VARIABLE = "KVIST_KERNELS"
_CHOICES = ("auto", "amx", "avx512", "portable", "torch")
_KINDS = {"avx512": 0, "amx": 1, "portable": 2}

# cpu_avx512.h and cpu_blocks.h: kMaxDim, and kMaxTiles of 16 queries.
_MOST_DIM = 256
_MOST_REPEATS = 256
CODECS = {name: number for number, name in enumerate(("bf16", "f16", "f32", "fp8", "int8", "int4", "int4a"))}
KEY_CODECS = CODECS | {"int4c": len(CODECS)}
"""The codecs that are read, by their numbers in cpu.h."""


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The compiled kernels, ready to run.

    Attributes:
        name: ``amx``, ``avx512`` or ``portable``.
        module: the extension.
        build: of the portable kernels: 0 for what every processor of the architecture has, 1 for AVX2, 2 for AVX-512.
    """

    name: str
    module: Any
    build: int = 0

    @property
    def kind(self) -> int:
        """The kernels' number in cpu_kinds.h."""
        return _KINDS[self.name] + self.build * (self.name == "portable")

    def follow_threads(self) -> None:
        """Run on as many threads as PyTorch does now."""
        self.module.borrow_threads(_team(), torch.get_num_threads())

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, multiplier: Tensor | None, eps: float) -> None:
        """Norm each head, where there is a multiplier, and turn it, in place.

        Args:
            heads: bf16 ``[tokens, heads, dim]``, dense but for the stride of its tokens.
            cos: float32 ``[tokens, dim / 2]``.
            sin: likewise.
            multiplier: float32 ``[heads, dim]`` of an RMS norm, or None.
            eps: of that norm.
        """
        tokens, count, dim = heads.shape
        weight = 0 if multiplier is None else multiplier.data_ptr()
        self.module.rotate(
            self.kind,
            heads.data_ptr(),
            tokens,
            heads.stride(0),
            count,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            weight,
            eps,
        )

    def spread(self, heads: Tensor, factor: float) -> None:
        """Turn each head by :func:`kvist.kernels.hadamard.hadamard`'s matrix, in place, computed in float32.

        Args:
            heads: bf16 ``[tokens, heads, dim]``, dense but for the stride of its tokens; :meth:`spreads` its heads.
            factor: of which all elements of the matrix are, or its negative.
        """
        tokens, count, dim = heads.shape
        self.module.spread(self.kind, heads.data_ptr(), tokens, heads.stride(0), count, dim, factor)

    @staticmethod
    def spreads(dim: int) -> bool:
        """Whether heads of this width can be turned: whole vectors, which must fit into registers."""
        return dim % 32 == 0 and dim <= _MOST_DIM

    def add_norm(
        self, stream: Tensor, change: Tensor | None, after: Tensor | None, multiplier: Tensor, eps: float
    ) -> Tensor:
        """Add a change to the stream in place, and norm the sum.

        Args:
            stream: bf16 ``[rows, width]``, dense.
            change: likewise; None adds nothing.
            after: float32 ``[width]``: the multiplier of a norm that the change goes through first, or None.
            multiplier: float32 ``[width]``.
            eps: of both norms.

        Returns:
            bf16 ``[rows, width]``.
        """
        out = torch.empty_like(stream)
        rows, width = stream.shape
        self.module.add_norm(
            self.kind,
            stream.data_ptr(),
            0 if change is None else change.data_ptr(),
            0 if after is None else after.data_ptr(),
            multiplier.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
        )
        return out


def cpu() -> Cpu | None:
    """Return the kernels of all operators in bf16 that suit this machine; None where there are none.

    The environment variable ``KVIST_KERNELS`` chooses: ``auto``, which empty means too, ``amx``, ``avx512``,
    ``portable``, on any processor and with attention in any type, or ``torch`` for none.

    Raises:
        InputError: the variable asks for something else, or for what this machine cannot do.
    """
    return _chosen(_choice())


def kernels_of(dtype: torch.dtype) -> Cpu | None:
    """Return the kernels that compute in this type: those of :func:`cpu` in bf16, none in others.

    None either where gradients are wanted (:mod:`kvist.kernels.gradients`).

    Raises:
        InputError: as :func:`cpu`, in every type.
    """
    found = cpu()
    return found if dtype == torch.bfloat16 and not gradients_wanted() else None


def attention_kernels(dtype: torch.dtype) -> Cpu | None:
    """Return the kernels that attend in this type; None where PyTorch's operators are to.

    Those of :func:`kernels_of`; else the portable ones, which decode in a third of PyTorch's time with AVX2 and
    AVX-512 (LOG.md has the figures), where they were compiled for more than every processor has.

    Raises:
        InputError: as :func:`kernels_of`.
    """
    choice = _choice()
    found = kernels_of(dtype)
    if choice == "portable" or (found is None and choice == "auto" and _chosen(choice) is not None):
        return _chosen("portable")
    return found


def _choice() -> str:
    choice = os.environ.get(_VARIABLE) or "auto"
    if choice not in _CHOICES:
        raise InputError(f"{_VARIABLE}: {choice!r} is no choice; choose one of {', '.join(_CHOICES)}", key=_VARIABLE)
    return choice


@cache
def _chosen(choice: str) -> Cpu | None:
    if choice == "torch":
        return None
    found = _module()
    if found is None:
        _log.warning(
            "the C++ kernels were not built when kvist was installed (no compiler?): PyTorch's operators serve, and "
            "prompts and answers take up to twice as long"
        )
    kinds = [] if found is None else ["portable"]
    if found is not None and found.has_avx512():
        kinds.insert(0, "avx512")
        if choice not in ("avx512", "portable") and found.ask_for_amx():
            kinds.insert(0, "amx")
    if choice != "auto" and choice not in kinds:
        raise InputError(
            f"{_VARIABLE}: {choice!r} is not to be had here; choose one of {', '.join([*kinds, 'torch'])}",
            key=_VARIABLE,
        )
    if found is None:
        return None
    name, build = kinds[0] if choice == "auto" else choice, max(found.portable_builds())
    if choice == "auto" and name == "portable" and build == 0:
        return None
    kernels = Cpu(name=name, module=found, build=build)
    kernels.follow_threads()
    return kernels


def _module() -> Any:
    try:
        from kvist.kernels import _cpu
    except ImportError:
        return None
    return _cpu


@cache
def _team() -> int:
    """Address of what starts PyTorch's own team of threads: two teams would push each other off the cores.

    0 where it is not found; the kernels then run on the thread that calls them.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


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
            and store.dim <= _MOST_DIM
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
