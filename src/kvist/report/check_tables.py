"""A log held against the plan, as a table."""

from collections.abc import Mapping
from typing import Any

from kvist.planning.logs.figures import LogCheck
from kvist.report.tables import Column, print_facts, print_table
from kvist.units import format_size


def print_check(check: LogCheck) -> None:
    """Print figures of the log beside those of the plan, then whether they agree."""
    found, planned = _flat(check.found), _flat(check.planned)
    print_table(
        (Column(title=check.engine), Column(title="log", number=True), Column(title="plan", number=True)),
        [
            (_label(key), _shown(key, found), _shown(key, planned))
            for key in dict.fromkeys((*found, *planned))
            if found.get(key) or planned.get(key)
        ],
    )
    settings = ", ".join(f"{key}={value}" for key, value in check.found.get("settings", {}).items())
    verdict = "agree" if check.agrees else f"differ by {_difference(check.difference_bytes)}"
    explained = check.explained_by
    if not check.agrees and not explained:
        explained = ("no known effect; --set says settings that are not in the log",)
    print_facts(
        [
            *([("model in the log", check.found["model"])] if "model" in check.found else []),
            *([("settings", settings)] if settings else []),
            ("log and plan", verdict),
            *(("explained by", effect) for effect in explained),
        ]
    )


def _label(key: str) -> str:
    return key.removesuffix("_bytes").replace("_0_21", " 0.21").replace("_", " ")


def _difference(size: int) -> str:
    if not size:
        return "less than a block"
    return f"{format_size(abs(size))} {'more' if size > 0 else 'less'} than planned"


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by name; those of several caches under the names of their caches."""
    flat = {key: value for key, value in figures.items() if key not in ("model", "settings", "caches")}
    for index, cache in enumerate(figures.get("caches", ())):
        for key in ("cells", "key_bytes", "value_bytes"):
            flat[f"cache_{index + 1}_{key}"] = cache[key]
    return flat


def _shown(key: str, figures: Mapping[str, Any]) -> str:
    value = figures.get(key)
    if value is None:
        return ""
    if key.endswith("_bytes"):
        return format_size(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
