"""Rows of requests as text says them: JSON lines, a JSON array, CSV, plain numbers."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from kvist.traces.columns import Columns, RowError
from kvist.traces.names import Places, format_of, places_of
from kvist.units import MAX_TOKENS, counted

# kvist's own format: what its head line says.
HEAD = "kvist_trace"
VERSION = 1
# Not streamed, so not for more than this.
_ARRAY_BYTES = 2**28
_PAIR = Places(prompt=0, output=1)
_ONE = Places(prompt=0)
_decode = json.JSONDecoder().raw_decode
_SEPARATORS = (",", "\t", ";")


def read_rows(lines: Iterator[bytes | None], columns: Columns) -> None:
    """Read a file's lines into columns, until as many requests are there as are wanted.

    Raises:
        BadFile: a row is no request, and bad rows are not to be left out.
    """
    numbered = _texts(enumerate(lines, 1), columns)
    for number, text in numbered:
        content = chain([(number, text)], numbered)
        if text.startswith("[") and not text.rstrip(",").endswith("]"):
            return _read_array(content, columns)
        if text[0] in "{[":
            return _read_json(content, columns)
        try:
            places = _places_of_cells(_cells(text), columns)
        except RowError as error:
            columns.bad(number, str(error))
            continue
        return _read_cells(content if places in (_ONE, _PAIR) and _all_numbers(text) else numbered, places, columns)
    return None


def _texts(lines: Iterator[tuple[int, bytes | None]], columns: Columns) -> Iterator[tuple[int, str]]:
    """Lines that say something, without a byte order mark and comments."""
    for number, line in lines:
        if line is None:
            columns.bad(number, "is longer than 16 MiB; write one request a line")
            continue
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            columns.bad(number, "is not text; write UTF-8")
            continue
        if number == 1:
            text = text.removeprefix("\ufeff").strip()
        if text and text[0] != "#":
            yield number, text


# -- JSON -------------------------------------------------------------------------------------------------------


def _read_json(lines: Iterator[tuple[int, str]], columns: Columns) -> None:
    known: dict[tuple[str, ...], Places] = {}
    first = True
    for number, text in lines:
        try:
            if not _add_split(text, known, columns):
                entry = _decoded(text)
                if first and type(entry) is dict and HEAD in entry:
                    _read_head(entry, columns)
                elif type(entry) is list and entry and all(isinstance(each, (dict, list)) for each in entry):
                    for each in entry:
                        _add_any(each, known, columns)
                        if columns.full:
                            break
                else:
                    _add_any(entry, known, columns)
            first = False
        except RowError as error:
            columns.bad(number, str(error))
        if columns.full:
            return


def _decoded(text: str) -> Any:
    try:
        entry, end = _decode(text)
    except json.JSONDecodeError as error:
        raise RowError(f"is not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"is not JSON: {str(error)[:60]}") from error
    if end != len(text):
        raise RowError(f"is not JSON: Extra data at character {end + 1}")
    return entry


def _add_split(text: str, known: dict[tuple[str, ...], Places], columns: Columns) -> bool:
    """Take a row whose only list are its blocks' ids, which are read apart; False for another row.

    Raises:
        RowError: as :meth:`Columns.add`.
    """
    start, end = text.find("["), text.rfind("]")
    if start < 1 or end < start + 2 or text[0] != "{" or text.find("[", start + 1) > 0 or text.find("]") != end:
        return False
    rest = text[: start + 1] + text[end:]
    try:
        entry, length = _decode(rest)
    except (ValueError, RecursionError):
        return False
    places = known.get(tuple(entry))
    if places is None or places.blocks is None or length != len(rest):
        return False
    values = list(entry.values())
    if values[places.blocks] != [] or values[places.prompt] is None or values[places.output or 0] is None:
        return False
    values[places.blocks] = text[start + 1 : end].encode()
    columns.add(values, places)
    return True


def _read_head(entry: dict[str, Any], columns: Columns) -> None:
    """The head line of kvist's own format.

    Raises:
        BadFile: it is of another version, or its block size is none.
    """
    version, block = entry[HEAD], entry.get("block_tokens")
    if type(version) is not int or version != VERSION:
        raise columns.source.error(
            f"is of version {str(version)[:20]} of kvist's traces; this kvist reads version {VERSION}"
        )
    if block is not None and (type(block) is not int or not 1 <= block <= MAX_TOKENS):
        raise columns.source.error(f"has block_tokens of {str(block)[:20]!r}; write a whole number of 1 or more")
    columns.block_tokens = block
    columns.format = "kvist"


def _add_entry(entry: dict[str, Any], known: dict[tuple[str, ...], Places], columns: Columns) -> None:
    names = tuple(entry)
    places = known.get(names)
    if places is None:
        if not known and columns.format != "kvist":
            columns.format = format_of(names)
        found = places_of(names, json=True)
        if found is not None:
            places = known[names] = found
    values = list(entry.values())
    if places is None or values[places.prompt] is None or (places.output is not None and values[places.output] is None):
        told = {name: value for name, value in entry.items() if value is not None}
        places = places_of(told, json=True)
        if places is None:
            raise RowError("names no length; write length, or prompt_tokens and output_tokens")
        values = list(told.values())
    columns.add(values, places)


def _add_any(entry: Any, known: dict[tuple[str, ...], Places], columns: Columns) -> None:
    """An object, ``[prompt, output]``, or one length."""
    if type(entry) is dict:
        _add_entry(entry, known, columns)
    elif type(entry) is not list:
        columns.add([entry], _ONE)
    elif len(entry) in (1, 2):
        columns.add(entry, _PAIR if len(entry) == 2 else _ONE)
    else:
        raise RowError(f"has {counted(len(entry), 'number')}; write one a line, or [prompt, output] of each request")


def _read_array(lines: Iterator[tuple[int, str]], columns: Columns) -> None:
    """A JSON array over several lines."""
    parts, size = [], 0
    for _, text in lines:
        parts.append(text)
        size += len(text)
        if size > _ARRAY_BYTES:
            raise columns.source.error("is one JSON array of more than 256 MiB; write one request a line")
    try:
        entries = json.loads("\n".join(parts))
    except (ValueError, RecursionError) as error:
        raise columns.source.error(f"not JSON: {str(error)[:80]}") from error
    known: dict[tuple[str, ...], Places] = {}
    for number, entry in enumerate(entries, 1):
        try:
            _add_any(entry, known, columns)
        except RowError as error:
            columns.bad(number, str(error), of="entry")
        if columns.full:
            return


# -- CSV and plain numbers --------------------------------------------------------------------------------------


def _read_cells(lines: Iterator[tuple[int, str]], places: Places, columns: Columns) -> None:
    last = places.last
    for number, text in lines:
        try:
            cells = _cells(text)
            if len(cells) <= last:
                raise RowError(f"has {counted(len(cells), 'column')}; one is missing")
            columns.add(cells, places)
        except RowError as error:
            columns.bad(number, str(error))
        if columns.full:
            return


def _cells(text: str) -> list[str]:
    if '"' in text:
        import csv

        try:
            return next(csv.reader([text]))
        except csv.Error as error:
            raise RowError(f"is not CSV: {error}") from error
    for separator in _SEPARATORS:
        if separator in text:
            return text.split(separator)
    parts = text.split()
    return parts if all(map(_is_number, parts)) else [text]


def _places_of_cells(cells: list[str], columns: Columns) -> Places:
    """Which column is which, by a head or, of one or two, by their order."""
    if all(_is_number(cell.strip()) for cell in cells):
        if len(cells) > 2:
            raise RowError(
                f"has {len(cells)} numbers and no head says which are lengths; write one (length), two (prompt, "
                f"output), or a head"
            )
        return _PAIR if len(cells) == 2 else _ONE
    places = places_of(cells, json=False)
    if places is None:
        names = ", ".join(cell.strip().casefold() for cell in cells)
        raise RowError(f"names no lengths ({names[:60]}); write a column length, or prompt_tokens and output_tokens")
    columns.format = format_of(cells)
    return places


def _all_numbers(text: str) -> bool:
    return all(_is_number(cell.strip()) for cell in _cells(text))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e+", "", 1).isdigit() and text.isascii()
