"""The C++ kernels of the CPU: which suit this machine, and the small operators around attention, in bf16.

Those for processors with AVX-512 and its BF16 instructions use the matrix unit (AMX) where there is one; the portable
ones (:mod:`kvist.kernels.portable`) need AVX2 to be fast. Where neither suits, or the extension was not compiled,
PyTorch's operators do the same work (:mod:`kvist.kernels.attention`). Attention is in :mod:`kvist.kernels.paged`.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvist.errors import InputError
from kvist.kernels.gradients import gradients_wanted

_log = logging.getLogger("kvist")

_VARIABLE = "KVIST_KERNELS"
_CHOICES = ("auto", "amx", "avx512", "portable", "torch")
_KINDS = {"avx512": 0, "amx": 1, "portable": 2}

# cpu_avx512.h: kMaxDim.
MOST_DIM = 256
"""Elements of the widest head that the kernels take."""


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
        return dim % 32 == 0 and dim <= MOST_DIM

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
