"""Standard output and error that are closed, full or no longer read: said in one line, never a traceback."""

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

# Writing to standard output fails like this; whatever else a command writes has errors of its own.
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def prepare_streams() -> None:
    """Make both streams safe to print to."""
    if sys.stderr is None:
        # Otherwise notes and errors would be printed among the answers.
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A file name that is not UTF-8 is shown escaped rather than ending the command.
            stream.reconfigure(errors="backslashreplace")


def finish_output(code: int) -> int:
    """Write out what is buffered and return ``code``.

    Raises:
        OSError: the output cannot be written.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def is_output_error(error: OSError) -> bool:
    """Whether a failed operation was a write to standard output: it names no file."""
    return error.errno in _OUTPUT_ERRORS and error.filename is None


def drop_output() -> None:
    """Send what is still buffered to nowhere: Python must not complain again when it flushes at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
