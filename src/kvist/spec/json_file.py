"""Read a small JSON file that holds one object, within bounds of time and memory whatever it holds."""

import json
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.files import open_regular

MAX_CONFIG = 2**22
# The index of a model of 200,000 tensors takes 20 MiB.
MAX_INDEX = 3 * 2**24

# What a value, however short, costs once it is an object: with as many as an index may have, 120 MiB and half a second.
_MAX_VALUES = 3 * 2**18
_MAX_CONFIG_VALUES = 2**17


def read_object(path: Path, *, most: int = MAX_CONFIG) -> dict[str, Any]:
    """Read ``path``, of at most ``most`` bytes.

    Raises:
        BadFile: it cannot be opened, is too large, or is no JSON object; see :func:`parse_object`.
    """
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_object(data, name=str(path), most=most)


def parse_object(data: bytes, *, name: str, most: int = MAX_CONFIG) -> dict[str, Any]:
    """Parse the content of a file, in UTF-8, UTF-16 or UTF-32, with or without a byte order mark.

    Args:
        data: the content.
        name: what messages call it.
        most: bytes that are taken.

    Raises:
        BadFile: it is larger than ``most``, holds anything but one JSON object, or gives a key twice with two values,
            of which readers would take different ones.
    """
    # Text with a character beyond ASCII can take four bytes for each character in memory.
    weight = len(data) if data.isascii() else 4 * len(data)
    if len(data) > most or weight > 2 * MAX_INDEX:
        raise BadFile(f"{name}: larger than {most // 2**20} MiB; a small JSON file was expected")
    values = sum(map(data.count, b"[{,:"))
    limit = _MAX_VALUES if most > MAX_CONFIG else _MAX_CONFIG_VALUES
    if values > limit:
        raise BadFile(f"{name}: holds about {values:,} values; a small JSON file has at most {limit:,}")
    try:
        content = json.loads(data, object_pairs_hook=lambda pairs: _unique(pairs, name))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadFile):
            raise
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise BadFile(f"{name}: is not JSON{where}; a JSON object was expected") from error
    if not isinstance(content, dict):
        raise BadFile(f"{name}: holds {type(content).__name__}, not a JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            # Compared as text: a NaN does not equal itself.
            if repr(value) != repr(found[key]):
                raise BadFile(
                    f"{name}: {shown(key)} is given twice, as {shown(value)} and as {shown(found[key])}; keep one",
                    key=key,
                )
    return found


def shown(value: object, most: int = 40) -> str:
    """Return how a message shows a value out of a file: its ``repr``, cut at ``most`` characters."""
    if isinstance(value, str):
        value = value[:most]
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"
