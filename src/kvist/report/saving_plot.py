"""A picture of what a cache saves: tokens a second against length, and the time that an answer takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvist.report.saving import Saving, Stretch
from kvist.report.simulation_plot import check_plot, picture_settings, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WITH, _WITHOUT = "#0072b2", "#d55e00"
_LINE = "#d5d8d0"
# More stretches than the table has, and few enough that the noise of single steps is gone.
_POINTS = 32


def plot_saving(saving: Saving, model: str, path: str) -> None:
    """Draw it into a PNG or SVG, by the suffix of ``path``.

    Raises:
        InputError: the name ends in neither ``.png`` nor ``.svg``, or matplotlib is not installed.
        BadFile: it cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    with picture_settings():
        figure = Figure(figsize=(9.0, 3.9), facecolor="white", layout="constrained")
        figure.suptitle(f"What the cache saves: {model}", fontweight="bold", fontsize=12, x=0.01, ha="left")
        speed, time = figure.subplots(1, 2)
        stretches = saving.stretches(_POINTS)
        _speed(speed, stretches)
        _time(time, saving)
        for panel in (speed, time):
            panel.set_xlabel("tokens of the sequence, prompt included")
            panel.grid(color=_LINE, linewidth=0.6, alpha=0.7)
            panel.set_axisbelow(True)
        write_picture(figure, path)


def _speed(panel: "Axes", stretches: Sequence[Stretch]) -> None:
    lengths = [each.length for each in stretches]
    for name, colour, rates in (
        ("with the cache", _WITH, [each.cached for each in stretches]),
        ("without", _WITHOUT, [each.uncached for each in stretches]),
    ):
        panel.plot(lengths, rates, color=colour, linewidth=1.8, marker="o", markersize=3, label=name)
    panel.set_ylim(bottom=0)
    panel.set_title("tokens a second", loc="left", fontsize=10)
    panel.legend(frameon=False)


def _time(panel: "Axes", saving: Saving) -> None:
    count = saving.compared
    lengths = saving.prompt_tokens + np.arange(1, count + 1)
    for colour, seconds in ((_WITH, saving.cached), (_WITHOUT, saving.uncached)):
        panel.plot(lengths, seconds[:count], color=colour, linewidth=1.8)
    panel.set_ylim(bottom=0)
    panel.set_title("seconds since the request", loc="left", fontsize=10)
