"""A file of requests as its lines: opened, unzipped, and never more than a few MiB of it in memory."""

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvist.errors import BadFile
from kvist.spec.files import not_regular

STDIN = "-"
_GZIP = b"\x1f\x8b"
_CHUNK = 2**20
_LINE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where requests come from, as errors name it.

    Attributes:
        path: of the file; ``-`` is standard input.
        key: the argument that named it.
    """

    path: str
    key: str

    @property
    def name(self) -> str:
        """As people call it."""
        return "standard input" if self.path == STDIN else self.path

    def error(self, what: str) -> BadFile:
        """The error that says what is wrong with it."""
        return BadFile(f"{self.key}: {self.name}: {what}", key=self.key)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open it; whatever the system says against that, now or while it is read, becomes one line.

        Raises:
            BadFile: it is not there, no regular file, torn, or cannot be read.
        """
        try:
            if self.path == STDIN:
                yield self._standard_input()
                return
            if not self.path:
                raise BadFile(f"{self.key}: '' is no file; name one", key=self.key)
            file = Path(self.path).expanduser()
            if not file.is_file():
                if file.exists():
                    raise not_regular(self.path, file.stat().st_mode, key=self.key)
                raise self.error("no such file")
            with file.open("rb") as stream:
                yield stream
        except (EOFError, zlib.error) as error:
            raise self.error(f"{error}; fetch the file again") from error
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, BadFile):
                raise
            raise self.error(str(getattr(error, "strerror", None) or error)) from error

    def _standard_input(self) -> BinaryIO:
        if sys.stdin is None:
            raise self.error("is closed; name a file")
        if sys.stdin.isatty():
            raise self.error("is a terminal; pipe a trace into it, or name a file")
        return sys.stdin.buffer


def lines_of(stream: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file, gzip or not, without their ends; None for one above 16 MiB, which is not kept.

    Raises:
        EOFError: a gzip file ends early.
        zlib.error: it is damaged.
        OSError: it cannot be read.
    """
    rest = b""
    lost = False
    for chunk in _unzipped(stream):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        if lost and lines:
            yield None
            lost = False
            del lines[0]
        if len(rest) > _LINE_BYTES:
            rest, lost = b"", True
        yield from lines
    if lost:
        yield None
    elif rest:
        yield rest


def _unzipped(stream: BinaryIO) -> Iterator[bytes]:
    head = stream.read(len(_GZIP))
    if head != _GZIP:
        while head:
            yield head
            head = stream.read(_CHUNK)
        return
    data = head
    while data:
        # Several files that were zipped one after the other are one.
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if not data:
                data = stream.read(_CHUNK)
                if not data:
                    raise EOFError("compressed data end before their end mark")
            content = member.decompress(data, _CHUNK)
            data = member.unconsumed_tail
            if content:
                yield content
        data = member.unused_data.lstrip(b"\0")
        while not data and (more := stream.read(_CHUNK)):
            data = more.lstrip(b"\0")
