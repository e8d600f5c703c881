"""Open a file that must be a regular one: a pipe would wait forever, a device has no end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from kvist.errors import BadFile

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open ``path`` for reading.

    Raises:
        BadFile: it is a pipe, a device or a socket.
        OSError: it is not there, or may not be read.
    """
    # Non-blocking, so that a pipe without a writer is opened and looked at instead of waited for.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise not_regular(path, mode)
    return file


def not_regular(path: object, mode: int, *, key: str = "model") -> BadFile:
    """Return the error for a path that is no regular file, of the argument ``key``; ``model`` needs no name."""
    kind = next((name for test, name in _KINDS if test(mode)), "of another kind")
    of = "" if key == "model" else f"{key}: "
    return BadFile(f"{of}{path}: is not a regular file but {kind}", key=key)
