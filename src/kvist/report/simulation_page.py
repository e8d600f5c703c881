"""``kvist simulate --html``: one page that needs nothing else, with what happened to the memory over time.

The page draws itself from the JSON that is put into ``simulation.html``; it loads nothing from anywhere.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvist.errors import BadFile
from kvist.report.simulation_tables import comparison
from kvist.simulation.results import BOUNDS, PolicyResult, SimulationResult, Timeline

_TEMPLATE = Path(__file__).with_name("simulation.html")
_PLACE = "/*DATA*/null"


def write_page(result: SimulationResult, path: str) -> None:
    """Write the page.

    Raises:
        BadFile: it cannot be written.
    """
    try:
        # A file's name may hold bytes that are no letters: escaped, as JSON has them too.
        Path(path).write_text(page(result), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise BadFile(f"{path}: cannot be written: {error.strerror or error}", key="html") from error


def page(result: SimulationResult) -> str:
    """The page as text."""
    policies = list(result.policies.values())
    content = {
        **result.to_dict(),
        "policies": [_policy(name, each) for name, each in result.policies.items()],
        "bounds": BOUNDS,
        "rows": [row for group in comparison(policies) for row in group],
    }
    # A name cannot end the script that it stands in.
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, text, 1)


def _policy(name: str, result: PolicyResult) -> dict[str, Any]:
    line = result.timeline
    drawn = line is not None and line.seconds.size > 0
    return {"name": name, **result.to_dict(), "timeline": _columns(line) if line is not None and drawn else None}


def _columns(line: Timeline) -> dict[str, Any]:
    """As the page draws them: the edges of stretches, bytes whole, what bound by its index."""
    columns: dict[str, Any] = {"edges": np.round(line.edges, 6).tolist()}
    for name in ("running", "waiting"):
        columns[name] = np.round(getattr(line, name), 3).tolist()
    for name in ("running_bytes", "cached_bytes", "waste_bytes", "free_bytes"):
        columns[name] = np.rint(getattr(line, name)).astype(np.int64).tolist()
    return {**columns, "bound": line.bound.tolist()}
