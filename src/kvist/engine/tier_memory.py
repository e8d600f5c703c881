"""Where the bytes of one tier are: in the machine's memory, or in a file that nobody else sees."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvist.engine.machine import zeros
from kvist.errors import DoesNotFit, InputError
from kvist.units import format_size

# The system's own offsets have 63 bits.
_LARGEST = 2**63 - 1


class Store(Protocol):
    """The bytes of one tier."""

    size: int

    def read(self, offset: int, into: Tensor) -> None:
        """Copy bytes that begin at ``offset`` into uint8 ``[count]``, contiguous."""
        ...

    def write(self, offset: int, data: Tensor) -> None:
        """Copy uint8 ``[count]``, contiguous, to where bytes begin at ``offset``."""
        ...

    def restore(self) -> None:
        """Have all the memory again, whatever lies in it, where something took a part of it."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Host:
    """Memory of the machine.

    Raises:
        DoesNotFit: it does not have as much.
    """

    def __init__(self, size: int) -> None:
        self.bytes = zeros(size)
        self.size = self.bytes.numel()

    def read(self, offset: int, into: Tensor) -> None:
        """Copy from here."""
        into.copy_(self.bytes[offset : offset + into.numel()])

    def write(self, offset: int, data: Tensor) -> None:
        """Copy to here."""
        self.bytes[offset : offset + data.numel()].copy_(data)

    def restore(self) -> None:
        """Nothing can take it."""

    def close(self) -> None:
        """Give the memory back."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


class Disk:
    """A file in a directory, allocated whole and at once; its name is gone as soon as it is open.

    So nothing is left behind however the process ends, and no other reads it.

    Raises:
        InputError: nothing can be written there.
        DoesNotFit: there is not so much space.
    """

    def __init__(self, size: int, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.file, name = tempfile.mkstemp(prefix="tier-", dir=directory)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            name = str(directory) if str(directory).isprintable() else repr(str(directory))
            raise InputError(
                f"tier_directory: {name}: {why}; name one that can be written to",
                key="tier_directory",
            ) from error
        try:
            try:
                Path(name).unlink()
                _allocate(self.file, size)
            except OSError as error:
                raise DoesNotFit(
                    f"tier: disk={format_size(size)}: {directory}: {error.strerror}; ask for less, or name another "
                    f"directory"
                ) from error
        except BaseException:
            os.close(self.file)
            raise
        self.size = os.fstat(self.file).st_size

    def read(self, offset: int, into: Tensor) -> None:
        """Copy from here."""
        self._require_whole()
        view = into.numpy().data
        while view:
            count = os.preadv(self.file, [view], offset)
            if not count:
                raise OSError(f"the file ends at {offset}")
            view, offset = view[count:], offset + count

    def write(self, offset: int, data: Tensor) -> None:
        """Copy to here."""
        self._require_whole()
        view = data.numpy().data
        while view:
            count = os.pwrite(self.file, view, offset)
            if not count:
                raise OSError(f"nothing more can be written at {offset}")
            view, offset = view[count:], offset + count

    def _require_whole(self) -> None:
        # What is written behind the end makes the file longer again, with zeros where other blocks have been.
        size = os.fstat(self.file).st_size
        if size < self.size:
            raise OSError(f"the file was cut to {size} of {self.size} bytes")

    def restore(self) -> None:
        """Allocate again what was cut off."""
        with contextlib.suppress(OSError):
            if os.fstat(self.file).st_size < self.size:
                _allocate(self.file, self.size)

    def close(self) -> None:
        """Give the space back."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def _allocate(file: int, size: int) -> None:
    """Take the space of a file now, so that no later write finds the disk full."""
    if size > _LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    system = os.fstatvfs(file)
    if system.f_bavail * system.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.truncate(file, size)
