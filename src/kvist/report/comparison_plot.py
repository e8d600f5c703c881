"""Fidelity against memory as a picture: every setting a point, and the front that no other beats."""

from collections.abc import Mapping
from typing import Any

from kvist.report.simulation_plot import check_plot, picture_settings, write_picture

_FORMAT, _PRUNED, _BOTH, _TRAINED = "#0072b2", "#d55e00", "#7a4fc9", "#009e73"
_LINE, _FRONT = "#d5d8d0", "#59665f"
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

    rows = [row for row in content["rows"] if row["kl"] > 0]
    with picture_settings():
        figure = Figure(figsize=(9.0, 5.4), facecolor="white", layout="constrained")
        figure.suptitle(f"Ways to shrink the cache: {content['model']}", fontweight="bold", x=0.01, ha="left")
        panel = figure.subplots()
        front = sorted((row for row in rows if row["front"]), key=lambda row: row["bytes_per_token"])
        panel.plot(*_places(front), color=_FRONT, linewidth=1, linestyle="--", label="no other is smaller and closer")
        for colour, name, own in (
            (_FORMAT, "formats", [row for row in rows if row["evict"] == "none" and row["cartridge"] is None]),
            (_PRUNED, "pruning", [row for row in rows if row["evict"] != "none" and not _shrunk(content, row)]),
            (_BOTH, "both", [row for row in rows if row["evict"] != "none" and _shrunk(content, row)]),
            (_TRAINED, "cartridges", [row for row in rows if row["cartridge"] is not None]),
        ):
            if own:
                panel.errorbar(
                    *_places(own), yerr=[2 * (row["kl_error"] or 0) for row in own], fmt="o", color=colour, label=name,
                    markersize=5, elinewidth=1,
                )  # fmt: skip
        for row in rows:
            panel.annotate(
                row["setting"], (row["bytes_per_token"] / 1024, max(LEAST, row["kl"])), xytext=(6, 4),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # Names stand to the right of their points.
        panel.set_xlim(0, 1.25 * max(row["bytes_per_token"] for row in rows) / 1024 if rows else 1)
        panel.set_xlabel("KiB a token, held")
        panel.set_ylabel("KL divergence from the full cache, nats")
        panel.grid(color=_LINE, linewidth=0.6, alpha=0.7)
        panel.set_axisbelow(True)
        panel.legend(frameon=False, loc="lower left")
        write_picture(figure, path)


def _shrunk(content: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return bool(row["format"] != f"{content['dtype']}/{content['dtype']}")


def _places(rows: list[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["bytes_per_token"] / 1024 for row in rows], [max(LEAST, row["kl"]) for row in rows]
