"""Memory of this machine: how much there is, large pieces of it, and that it stays with the process."""

import contextlib
import ctypes
import mmap
import os

import torch
from torch import Tensor

from kvist.errors import DoesNotFit
from kvist.units import format_size

_LARGE_PAGE = 2 * 2**20


def keep_pages() -> None:
    """Let glibc keep freed memory of up to 32 MiB a piece instead of giving it back to the system at once.

    The operators' results are that large while a prompt is computed, and each would fault in fresh, zeroed pages. What
    that saves has not been told apart from the machine's noise (LOG.md). Elsewhere than on glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # malloc.h
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)


def _on_large_pages(size: int) -> Tensor:
    """Zeros on pages of 2 MiB where the system grants them.

    A layer's part of a block is a few KiB, and the next lies far away: on pages of 4 KiB nearly every run would have to
    be translated anew.
    """
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    # Shared memory, Python's default, has large pages on few systems, and a forked child would write into ours.
    memory = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The arena is exactly as large as planned; what lies beside it is never touched, and so takes no memory.
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return torch.frombuffer(memory, dtype=torch.uint8, offset=-address % _LARGE_PAGE, count=size)


def machine_memory() -> int | None:
    """Bytes of this machine's memory; None where it does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def zeros(size: int) -> Tensor:
    """Memory of ``size`` zeros, uint8, on large pages where there are any.

    Raises:
        DoesNotFit: this machine does not have as much.
    """
    machine = machine_memory() or size
    try:
        if size > machine:
            raise MemoryError
        return _on_large_pages(size)
    except (RuntimeError, MemoryError, OSError) as error:
        raise DoesNotFit(
            f"memory: {format_size(size)} cannot be allocated; this machine has {format_size(machine)} in all"
        ) from error
