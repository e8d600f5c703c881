"""Lengths of sequences from a file: one a line, CSV or JSON lines, a request trace or not, gzip or not.

A trace tells prompt and answer apart; Mooncake's also tells which blocks of prompts are the same. The names of columns
are those of Mooncake, Azure 2023, BurstGPT and ShareGPT-style files, and a few obvious others.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from kvist.errors import BadFile
from kvist.spec.files import not_regular
from kvist.units import MAX_TOKENS

_PROMPT = (
    "input_length", "prompt_tokens", "contexttokens", "request tokens", "input_tokens", "prompt_length", "prompt_len",
    "num_prefill_tokens", "prompt", "input",
)  # fmt: skip
_OUTPUT = (
    "output_length", "completion_tokens", "generatedtokens", "response tokens", "output_tokens", "generated_tokens",
    "output_len", "num_decode_tokens", "completion", "output",
)  # fmt: skip
_WHOLE = ("length", "tokens", "total_tokens", "total tokens", "len", "sequence_length")
# What a conversation said before the prompt, where it is counted apart.
_HISTORY = "history_tokens"
_BLOCKS = "hash_ids"
_MOST_REQUESTS = 10_000_000
_LINE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence: a prompt, and the tokens that answer it.

    Attributes:
        prompt: tokens, what was said before included.
        output: tokens; None where only the whole length is known, which is then ``prompt``.
        blocks: ids of the prompt's blocks; equal ids are equal prefixes.
    """

    prompt: int
    output: int | None = None
    blocks: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Tokens at its end."""
        return self.prompt + (self.output or 0)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What a file says of the sequences to plan for.

    Attributes:
        source: its path.
        requests: in its order.
        empty: requests of no token at all, which failed and are left out.
        block_tokens: tokens of a block, where requests name blocks.
    """

    source: str
    requests: tuple[Request, ...]
    empty: int = 0
    block_tokens: int | None = None

    @property
    def is_trace(self) -> bool:
        """Whether prompts and answers are told apart."""
        return any(request.output is not None for request in self.requests)


def read_lengths(path: str | Path) -> Lengths:
    """Read a file of lengths or a trace.

    Raises:
        BadFile: it is not there, torn, or a line says no length; names the line and what would be right.
    """
    source = str(path)
    try:
        if not source:
            raise BadFile("lengths: '' is no file; name one", key="lengths")
        file = Path(source).expanduser()
        if not file.is_file():
            if file.exists():
                raise not_regular(source, file.stat().st_mode, key="lengths")
            raise BadFile(f"lengths: {source}: no such file", key="lengths")
        with file.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(file, "rb") if zipped else file.open("rb") as stream:
            found = list(_requests(stream, source))
    except (OSError, EOFError, zlib.error, ValueError, RuntimeError) as error:
        if isinstance(error, BadFile):
            raise
        torn = "; fetch the file again" if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)) else ""
        why = getattr(error, "strerror", None) or error
        raise BadFile(f"lengths: {source}: {why}{torn}", key="lengths") from error
    requests = tuple(request for request in found if request.total)
    if not requests:
        raise BadFile(
            f"lengths: {source}: holds no lengths; write one a line, CSV with a head, or JSON lines", key="lengths"
        )
    return Lengths(
        source=source,
        requests=requests,
        empty=len(found) - len(requests),
        block_tokens=_block_tokens(requests, source),
    )


def _requests(stream: IO[bytes] | gzip.GzipFile, source: str) -> Iterator[Request]:
    lines = _lines(stream, source)
    first = next(lines, None)
    if first is None:
        return
    content = chain([first], lines)
    found: Iterator[Request]
    if first.text.startswith("[") and not first.text.rstrip(",").endswith("]"):
        found = _array("\n".join(line.text for line in content), source)
    elif first.text[0] in "{[":
        found = chain.from_iterable(_of_json(line, source) for line in content)
    else:
        found = _of_rows(content, source)
    for count, request in enumerate(found):
        if count >= _MOST_REQUESTS:
            raise BadFile(
                f"lengths: {source}: more than {_MOST_REQUESTS:,} requests; plan with a sample", key="lengths"
            )
        yield request


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    number: int
    text: str


def _lines(stream: IO[bytes] | gzip.GzipFile, source: str) -> Iterator[_Line]:
    """Lines that say something, without a byte order mark and comments."""
    for number in range(1, 2**62):
        raw = stream.readline(_LINE_BYTES)
        if not raw:
            return
        if len(raw) == _LINE_BYTES:
            raise BadFile(f"lengths: {source}: line {number} is longer than {_LINE_BYTES >> 20} MiB", key="lengths")
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise BadFile(f"lengths: {source}: line {number} is not text", key="lengths") from error
        if text and not text.startswith("#"):
            yield _Line(number=number, text=text)


def _of_rows(lines: Iterator[_Line], source: str) -> Iterator[Request]:
    """Plain numbers, or CSV with a head or without."""
    first = next(lines)
    cells = _cells(first.text)
    if all(_is_number(cell) for cell in cells):
        columns = _unnamed(len(cells), first, source)
        yield _of_cells(cells, columns, first, source)
    else:
        columns = _named([cell.casefold() for cell in cells], first, source)
    for line in lines:
        yield _of_cells(_cells(line.text), columns, line, source)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Where a row says what; None where it does not."""

    prompt: int
    output: int | None = None
    history: int | None = None


def _cells(text: str) -> list[str]:
    if "," not in text and "\t" not in text and ";" not in text:
        return text.split() if all(map(_is_number, text.split())) else [text]
    if '"' in text:
        import csv

        return [cell.strip() for cell in next(csv.reader([text]))]
    separator = next(mark for mark in (",", "\t", ";") if mark in text)
    return [cell.strip() for cell in text.split(separator)]


def _unnamed(count: int, line: _Line, source: str) -> _Columns:
    if count > 2:
        raise BadFile(
            f"lengths: {source}: line {line.number} has {count} numbers and no head says which are lengths; "
            f"write one (length), two (prompt, output), or a head",
            key="lengths",
        )
    return _Columns(prompt=0, output=1 if count == 2 else None)


def _named(names: Sequence[str], line: _Line, source: str) -> _Columns:
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    prompt = next((places[name] for name in _PROMPT if name in places), None)
    output = next((places[name] for name in _OUTPUT if name in places), None)
    if prompt is not None and output is not None:
        return _Columns(prompt=prompt, output=output, history=places.get(_HISTORY))
    whole = next((places[name] for name in _WHOLE if name in places), None)
    if whole is None:
        raise BadFile(
            f"lengths: {source}: line {line.number} names no lengths ({', '.join(names)[:60]}); write a column length, "
            f"or prompt_tokens and output_tokens",
            key="lengths",
        )
    return _Columns(prompt=whole)


def _of_cells(cells: Sequence[str], columns: _Columns, line: _Line, source: str) -> Request:
    def number(place: int) -> int:
        if place >= len(cells):
            raise _wrong(source, line, f"has {len(cells)} columns; one is missing")
        return _length(cells[place], source, line)

    output = None if columns.output is None else number(columns.output)
    before = 0 if columns.history is None else number(columns.history)
    return Request(prompt=number(columns.prompt) + before, output=output)


def _array(text: str, source: str) -> Iterator[Request]:
    """A JSON array over several lines."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"lengths: {source}: not JSON: {error}", key="lengths") from error
    for number, entry in enumerate(entries, 1):
        yield _of_entry(entry, _Line(number=number, text=""), source)


def _of_json(line: _Line, source: str) -> Iterator[Request]:
    """One entry, or a whole array of them."""
    try:
        entry = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise _wrong(source, line, f"is not JSON: {str(error)[:60]}") from error
    several = isinstance(entry, list) and all(isinstance(each, (dict, list)) for each in entry)
    for each in entry if several else [entry]:
        yield _of_entry(each, line, source)


def _of_entry(entry: object, line: _Line, source: str) -> Request:
    if isinstance(entry, list) and len(entry) in (1, 2):
        output = _length(entry[1], source, line) if len(entry) == 2 else None
        return Request(prompt=_length(entry[0], source, line), output=output)
    if isinstance(entry, list):
        raise _wrong(source, line, f"has {len(entry)} numbers; write one a line, or [prompt, output] of each request")
    if not isinstance(entry, dict):
        return Request(prompt=_length(entry, source, line))
    named = {str(key).casefold(): value for key, value in entry.items()}
    prompt, answer = _first(named, _PROMPT), _first(named, _OUTPUT)
    if prompt is None or answer is None:
        whole = _first(named, _WHOLE)
        if whole is None:
            raise _wrong(source, line, "names no length; write length, or prompt_tokens and output_tokens")
        return Request(prompt=_length(whole, source, line))
    before = named.get(_HISTORY)
    total = _length(prompt, source, line) + (0 if before is None else _length(before, source, line))
    blocks = named.get(_BLOCKS)
    return Request(prompt=total, output=_length(answer, source, line), blocks=_ids(blocks, source, line))


def _ids(blocks: object, source: str, line: _Line) -> tuple[int, ...]:
    if blocks is None:
        return ()
    if not isinstance(blocks, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in blocks):
        raise _wrong(source, line, f"has {_BLOCKS} that are no list of whole numbers")
    return tuple(blocks)


def _first(named: Mapping[str, Any], keys: Sequence[str]) -> object:
    return next((named[key] for key in keys if named.get(key) is not None), None)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e+", "", 1).isdigit() and text.isascii()


def _length(value: object, source: str, line: _Line) -> int:
    """A whole number of tokens; ``12.0`` is one."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        number = -1.0
    if not 0 <= number <= MAX_TOKENS or number != int(number):
        raise _wrong(source, line, f"has a length of {str(value)[:40]!r}; write a whole number, at most {MAX_TOKENS:,}")
    return int(number)


def _wrong(source: str, line: _Line, what: str) -> BadFile:
    return BadFile(f"lengths: {source}: line {line.number} {what}", key="lengths")


def _block_tokens(requests: Sequence[Request], source: str) -> int | None:
    """Tokens of the blocks that a trace names: the size that its prompts' lengths agree on.

    Raises:
        BadFile: none does.
    """
    named = [request for request in requests if request.blocks]
    if not named:
        return None
    for size in (512, 256, 128, 64, 32, 16, 1024, 8, 2048, 4096):
        if all(-(-request.prompt // size) == len(request.blocks) for request in named[:1000]):
            return size
    # Some traces leave the last, partly filled block out.
    for size in (512, 256, 128, 64, 32, 16, 1024, 8, 2048, 4096):
        if all(0 <= request.prompt - size * len(request.blocks) < size for request in named[:1000]):
            return size
    raise BadFile(
        f"lengths: {source}: {_BLOCKS} fit the prompts' lengths with no block size; leave them out, or plan with a "
        f"shared prefix",
        key="lengths",
    )
