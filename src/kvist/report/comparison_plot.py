"""Fidelity against memory as a picture: every setting a point, and the front that no other beats."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvist.report.simulation_plot import check_plot, picture_settings, write_picture

_FORMAT, _PRUNED, _BOTH, _TRAINED = "#0072b2", "#d55e00", "#7a4fc9", "#009e73"
_LINE, _FRONT = "#d5d8d0", "#59665f"
# Of a name, in points.
_LETTER, _LINE_HEIGHT = 4.8, 9.0
LEAST = 1e-5
"""Divergences below are drawn here: the axis is logarithmic."""


def plot_comparison(content: Mapping[str, Any], path: str) -> None:
    """Draw what ``Comparison.to_dict`` tells into a PNG or SVG, by the suffix of ``path``.

    Raises:
        InputError: the name ends in neither ``.png`` nor ``.svg``, or matplotlib is not installed.
        BadFile: it cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    # From the top down, as names are put.
    rows = sorted((row for row in content["rows"] if row["kl"] > 0), key=lambda row: -row["kl"])
    largest = max((row["bytes_per_token"] for row in rows), default=1024.0)
    # Small models keep less than a KiB.
    unit, scale = ("bytes", 1) if largest < 4096 else ("KiB", 1024)
    with picture_settings():
        figure = Figure(figsize=(9.0, 5.4), facecolor="white", layout="constrained")
        figure.suptitle(f"Ways to shrink the cache: {content['model']}", fontweight="bold", x=0.01, ha="left")
        panel = figure.subplots()
        front = sorted((row for row in rows if row["front"]), key=lambda row: row["bytes_per_token"])
        panel.plot(
            *_places(front, scale), color=_FRONT, linewidth=1, linestyle="--", label="no other is smaller and closer"
        )
        for colour, name, own in (
            (_FORMAT, "formats", [row for row in rows if row["evict"] == "none" and row["cartridge"] is None]),
            (_PRUNED, "pruning", [row for row in rows if row["evict"] != "none" and not _shrunk(content, row)]),
            (_BOTH, "both", [row for row in rows if row["evict"] != "none" and _shrunk(content, row)]),
            (_TRAINED, "cartridges", [row for row in rows if row["cartridge"] is not None]),
        ):
            if own:
                panel.errorbar(
                    *_places(own, scale), yerr=[2 * (row["kl_error"] or 0) for row in own], fmt="o", color=colour,
                    label=name, markersize=5, elinewidth=1,
                )  # fmt: skip
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # Names stand to the right of their points.
        panel.set_xlim(0, 1.25 * largest / scale)
        panel.set_xlabel(f"{unit} a token, held")
        panel.set_ylabel("KL divergence from the full cache, nats")
        panel.grid(color=_LINE, linewidth=0.6, alpha=0.7)
        panel.set_axisbelow(True)
        panel.legend(frameon=False, loc="lower left")
        figure.draw_without_rendering()
        places = list(zip(*_places(rows, scale), strict=True))
        points: list[list[float]] = (panel.transData.transform(places) * 72 / figure.dpi).tolist() if rows else []
        for row, place, offset in zip(rows, places, offsets(rows, points), strict=True):
            panel.annotate(row["setting"], place, xytext=(6, offset), textcoords="offset points", fontsize=8)
        write_picture(figure, path)


def _shrunk(content: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return bool(row["format"] != f"{content['dtype']}/{content['dtype']}")


def _places(rows: list[Mapping[str, Any]], scale: int) -> tuple[list[float], list[float]]:
    return [row["bytes_per_token"] / scale for row in rows], [max(LEAST, row["kl"]) for row in rows]


def offsets(rows: Sequence[Mapping[str, Any]], points: Sequence[Sequence[float]]) -> list[float]:
    """How far above its point each row's name stands, in points: names that would lie on others go below them.

    Args:
        rows: from the top down.
        points: where each lies, in points from the lower left.
    """
    names: list[tuple[float, float, float]] = []
    found = []
    for row, (left, below) in zip(rows, points, strict=True):
        right, place = left + _LETTER * len(row["setting"]), below + 4
        for begin, end, other in sorted(names, key=lambda name: -name[2]):
            if begin < right and left < end and abs(other - place) < _LINE_HEIGHT:
                place = other - _LINE_HEIGHT
        names.append((left, right, place))
        found.append(place - below)
    return found
