"""Read a small JSON file that holds one object."""

import json
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.files import open_regular

_MAX_BYTES = 2**24


def read_object(path: Path) -> dict[str, Any]:
    """Read ``path``.

    Raises:
        BadFile: it cannot be opened, is larger than 16 MiB, or holds anything but one JSON object.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_BYTES:
        raise BadFile(f"{path}: larger than 16 MiB; a configuration was expected")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise BadFile(f"{path}: is not JSON{where}; a config.json was expected") from error
    if not isinstance(content, dict):
        raise BadFile(f"{path}: holds {type(content).__name__}, not a JSON object; a config.json was expected")
    return content
