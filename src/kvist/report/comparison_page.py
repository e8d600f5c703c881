"""``kvist compare --html``: one page that needs nothing else, with the front of fidelity against memory.

The page draws itself from the JSON that is put into ``comparison.html``; it loads nothing from anywhere.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.report.comparison_tables import remarks

_TEMPLATE = Path(__file__).with_name("comparison.html")
_PLACE = "/*DATA*/null"


def write_page(content: Mapping[str, Any], path: str) -> None:
    """Write what ``Comparison.to_dict`` tells as a page.

    Raises:
        BadFile: it cannot be written.
    """
    try:
        Path(path).write_text(page(content), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise BadFile(f"{path}: cannot be written: {error.strerror or error}", key="html") from error


def page(content: Mapping[str, Any]) -> str:
    """The page as text."""
    told = {**content, "remarks": remarks(content)}
    # A name cannot end the script that it stands in.
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, text, 1)
