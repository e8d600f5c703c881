"""The few lines of a log that matter, whatever the log is: of any length, binary, compressed or without an end."""

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, cast

from kvist.errors import BadFile

# A start-up says its figures long before: 256 MiB.
MOST_BYTES = 2**28
_CHUNK = 2**20
_LINE = 2**16
# What neighbouring pieces of an endless line share, so that no figure is cut.
_OVERLAP = 2**10
# As a terminal has them, and as they are escaped in logs that are JSON.
_COLOURS = re.compile(rb"(?:\x1b|\\u001b|\\x1b|\\033)\[[0-9;]{0,20}[A-Za-z]")
_ENDS = re.compile(rb"[\r\n]+")


def lines_with(stream: IO[bytes], words: Sequence[bytes], *, source: str) -> Iterator[str]:
    """The lines that hold one of ``words``, without colours; the rest of the log is only searched.

    Reads at most :data:`MOST_BYTES`, and holds a megabyte of it at a time. UTF-16 (a redirected PowerShell) and gzip
    are told by their first bytes; a progress bar's carriage return ends a line too.

    Args:
        stream: the log, in bytes.
        words: of which every wanted line has one.
        source: the log's name, for errors.

    Raises:
        BadFile: it cannot be read, or its gzip is torn.
    """
    carry = b""
    try:
        for chunk in _chunks(stream):
            text = carry + chunk
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            whole, carry = text[:end], text[end:]
            if len(carry) > _LINE:
                whole, carry = text, text[-_OVERLAP:]
            yield from _wanted(whole, words)
        yield from _wanted(carry, words)
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(f"log: {source}: {getattr(error, 'strerror', None) or error}", key="log") from error


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    read: Callable[[int], bytes] = _reader(stream)
    chunk = read(_CHUNK)
    decode: Callable[[bytes], bytes] = bytes
    if chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")

        def decode(content: bytes) -> bytes:
            return decoder.decode(content).encode("utf-8", "replace")

    seen = 0
    while chunk and seen < MOST_BYTES:
        seen += len(chunk)
        yield decode(chunk)
        chunk = read(_CHUNK)


def _reader(stream: IO[bytes]) -> Callable[[int], bytes]:
    """What reads the plain log: as much as is there, so that a log that is still written is read as it comes."""
    buffered: Any = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, stream))
    if buffered.peek(2)[:2] == b"\x1f\x8b":
        buffered = gzip.GzipFile(fileobj=buffered)
    read: Callable[[int], bytes] = buffered.read1
    return read


def _wanted(text: bytes, words: Sequence[bytes]) -> Iterator[str]:
    text = _COLOURS.sub(b"", text)
    if not any(word in text for word in words):
        return
    for line in _ENDS.split(text):
        for start in range(0, max(len(line) - _OVERLAP, 1), _LINE - _OVERLAP):
            piece = line[start : start + _LINE]
            if any(word in piece for word in words):
                yield piece.decode("utf-8", "replace")
