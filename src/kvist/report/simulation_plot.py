"""A picture of a simulation for a file: memory over time by owner, requests, and what bound, a column a policy.

Drawn by matplotlib (extra ``kvist[plot]``), which is loaded only here, and without pyplot: no window, no state that
outlives the call. Colours are those of Okabe and Ito, "Color Universal Design" (2008), which differ for every kind of
colour vision; the same picture is written as the same bytes.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvist.errors import BadFile, InputError
from kvist.report.simulation_tables import format_seconds, format_share
from kvist.simulation.results import BOUNDS, PolicyResult, SimulationResult, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

SUFFIXES = (".png", ".svg")
DPI = 150

OWNERS = ("running", "cached", "waste", "free")
_OWNER_COLOURS = {"running": "#0072b2", "cached": "#56b4e9", "waste": "#d55e00", "free": "#ecece6"}
_BOUND_COLOURS = {
    "idle": "#dcdcd4", "compute": "#e69f00", "bandwidth": "#7fc4ae", "memory": "#b5447f", "slots": "#4b3a78",
    "tiers": "#56a0d3",
}  # fmt: skip
_RUNNING, _WAITING = "#0072b2", "#5c6670"
_INK, _MUTED, _LINE = "#1b211e", "#59665f", "#d5d8d0"
_POINTS, _TITLE_POINTS, _NAME_POINTS = 8.5, 12.0, 10.5
# Any: matplotlib's own type lists every key that it knows, and which those are differs between its versions.
_SETTINGS: Any = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "font.size": _POINTS,
    "text.color": _INK, "axes.labelcolor": _MUTED, "xtick.color": _MUTED, "ytick.color": _MUTED,
    "axes.edgecolor": _LINE, "axes.linewidth": 0.8, "xtick.major.width": 0.8, "ytick.major.width": 0.8,
    "xtick.major.size": 3, "ytick.major.size": 3, "axes.spines.top": False, "axes.spines.right": False,
    "axes.unicode_minus": False, "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "kvist",
}  # fmt: skip

# Inches.
_MOST_COLUMNS = 3
_LEFT, _RIGHT, _GAP = 0.72, 0.22, 0.3
_WIDTHS = {1: 8.2, 2: 5.2, 3: 4.3}
_HEAD, _FOOT, _BETWEEN = 0.98, 0.86, 0.62
_HEADING = 0.5
# Memory, running, waiting, what bound.
_HEIGHTS, _SPACE = (2.5, 0.85, 0.85, 0.15), 0.16
# Stretches of time in a panel: more would be thinner than a pixel.
_MOST_STRETCHES = 400


@dataclass(frozen=True, kw_only=True)
class _Unit:
    name: str
    size: float


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A timeline as it is drawn; ``edges``, float64 ``[stretches + 1]``, are where stretches begin and end, seconds."""

    edges: npt.NDArray[np.float64]
    line: Timeline


def check_plot(path: str) -> None:
    """Tell before long work what would keep its picture from being written.

    Raises:
        InputError: the name ends in neither ``.png`` nor ``.svg``, or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"plot: {path!r} names no kind of picture; write a name that ends in .png or .svg", key="plot")
    if find_spec("matplotlib") is None:
        raise InputError("plot: matplotlib is not installed to draw it: pip install 'kvist[plot]'", key="plot")


def plot(result: SimulationResult, path: str) -> None:
    """Draw the simulation into a PNG or SVG, by the suffix of ``path``.

    Policies with a timeline have a column each, of one time and one scale. Where none has one, as without a clock,
    bars show what each found in the cache.

    Raises:
        InputError: the name ends in neither ``.png`` nor ``.svg``, or matplotlib is not installed.
        BadFile: it cannot be written.
    """
    check_plot(path)
    with picture_settings():
        timed = {
            name: _drawn(each.timeline)
            for name, each in result.policies.items()
            if each.timeline is not None and each.timeline.seconds.size
        }
        write_picture(_timelines(result, timed) if timed else _bars(result), path)


def write_picture(figure: "Figure", path: str) -> None:
    """Write a figure as a PNG or SVG, by the suffix of ``path``; the same one as the same bytes.

    Raises:
        BadFile: it cannot be written.
    """
    suffix = Path(path).suffix.lower()
    try:
        # Neither format says when it was made.
        figure.savefig(path, format=suffix[1:], dpi=DPI, metadata={"Date": None} if suffix == ".svg" else None)
    except OSError as error:
        raise BadFile(f"{path}: cannot be written: {error.strerror or error}", key="plot") from error


@contextmanager
def picture_settings() -> Iterator[None]:
    """Letters, lines and colours of every picture."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(_SETTINGS):
        # A name in letters that the font lacks is drawn as boxes; no reason to speak up.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _timelines(result: SimulationResult, timed: Mapping[str, _Drawn]) -> "Figure":
    columns = min(_MOST_COLUMNS, len(timed))
    rows = -(-len(timed) // columns)
    width = _LEFT + _RIGHT + columns * _WIDTHS[columns] + (columns - 1) * _GAP
    tall = _HEADING + sum(_HEIGHTS) + _SPACE * (len(_HEIGHTS) - 1)
    figure = _sheet(result, width, _HEAD + rows * tall + (rows - 1) * _BETWEEN + _FOOT)
    span = max(float(each.edges[-1]) for each in timed.values())
    lines = [each.line for each in timed.values()]
    clock, memory = _time_unit(span), _memory_unit(max(_total(line) for line in lines))
    limits = {
        "memory": max(_total(line) for line in lines) / memory.size or 1,
        "running": max(float(line.running.max()) for line in lines) * 1.08 or 1,
        "waiting": max(float(line.waiting.max()) for line in lines) * 1.08 or 1,
    }
    for index, (name, each) in enumerate(timed.items()):
        row, column = divmod(index, columns)
        top = _HEAD + row * (tall + _BETWEEN)
        left = _LEFT + column * (_WIDTHS[columns] + _GAP)
        _column(
            figure, _grid(figure, left=left, top=top + _HEADING, width=_WIDTHS[columns]), each,
            clock=clock, memory=memory, span=span, limits=limits, width=_WIDTHS[columns], labelled=column == 0,
        )  # fmt: skip
        _heading(figure, result.policies[name], _shown(name, _WIDTHS[columns], _NAME_POINTS), left=left, top=top)
    _key(figure, "memory", [(owner, _OWNER_COLOURS[owner]) for owner in OWNERS], right=width - _RIGHT, top=0.62)
    seen = sorted({int(code) for line in lines for code in line.bound})
    _key(
        figure, "what bound", [(BOUNDS[code], _BOUND_COLOURS[BOUNDS[code]]) for code in seen],
        right=width - _RIGHT, top=figure.get_figheight() - 0.3,
    )  # fmt: skip
    return figure


def _sheet(result: SimulationResult, width: float, height: float) -> "Figure":
    """An empty figure with its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    room = width - _LEFT - _RIGHT
    title = f"{_shown(result.trace, room - 2, _TITLE_POINTS)}: {result.requests:,} requests"
    what = ", ".join(filter(None, (result.model, result.format, result.machine)))
    for text, top, style in (
        (title, 0.18, {"fontsize": _TITLE_POINTS, "fontweight": "bold"}),
        (_shown(what, room), 0.44, {"color": _MUTED}),
    ):
        figure.text(_LEFT / width, 1 - top / height, text, va="top", **style)
    return figure


def _shown(text: str, inches: float, points: float = _POINTS) -> str:
    """A name as a picture can hold it: printable, and about as long as it has room in letters of this size."""
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    # A bold letter of DejaVu Sans is some 0.68 of its size wide, of 72 points to the inch.
    half = int(inches * 72 / (0.68 * points) / 2)
    return printable if len(printable) <= 2 * half else f"{printable[: half - 1]}…{printable[-half:]}"


def _grid(figure: "Figure", *, left: float, top: float, width: float) -> "GridSpec":
    from matplotlib.gridspec import GridSpec

    wide, tall = figure.get_figwidth(), figure.get_figheight()
    below = top + sum(_HEIGHTS) + _SPACE * (len(_HEIGHTS) - 1)
    return GridSpec(
        len(_HEIGHTS), 1, figure=figure, height_ratios=_HEIGHTS, hspace=_SPACE * len(_HEIGHTS) / sum(_HEIGHTS),
        left=left / wide, right=(left + width) / wide, top=1 - top / tall, bottom=1 - below / tall,
    )  # fmt: skip


def _heading(figure: "Figure", result: PolicyResult, name: str, *, left: float, top: float) -> None:
    wide, tall = figure.get_figwidth(), figure.get_figheight()
    figure.text(left / wide, 1 - top / tall, name, va="top", fontsize=_NAME_POINTS, fontweight="bold")
    facts = [f"hits {format_share(result.hit_ratio)}", f"waste {format_share(result.waste_ratio)}"]
    if result.ttft is not None and result.finished:
        facts.append(f"first token {format_seconds(result.ttft.p50)}, p99 {format_seconds(result.ttft.p99)}")
    figure.text(left / wide, 1 - (top + 0.23) / tall, "  ·  ".join(facts), va="top", color=_MUTED)


def _column(
    figure: "Figure", grid: "GridSpec", drawn: _Drawn, *, clock: _Unit, memory: _Unit, span: float,
    limits: Mapping[str, float], width: float, labelled: bool,
) -> None:  # fmt: skip
    from matplotlib.ticker import MaxNLocator

    edges, line = drawn.edges / clock.size, drawn.line
    axes = [figure.add_subplot(grid[row]) for row in range(len(_HEIGHTS))]
    _stack(axes[0], edges, [getattr(line, f"{owner}_bytes") / memory.size for owner in OWNERS])
    for panel, values, colour in ((axes[1], line.running, _RUNNING), (axes[2], line.waiting, _WAITING)):
        panel.fill_between(edges, _stairs(values), step="post", color=colour, alpha=0.28, linewidth=0)
        panel.step(edges, _stairs(values), where="post", color=colour, linewidth=1)
    _strip(axes[3], edges, line.bound)
    for panel, name, label in zip(
        axes,
        ("memory", "running", "waiting", ""),
        (f"memory, {memory.name}", "running", "waiting", "bound"),
        strict=True,
    ):
        panel.set_xlim(0, span / clock.size)
        panel.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
        panel.tick_params(axis="x", labelbottom=not name, length=0 if name else 3)
        panel.tick_params(axis="y", labelleft=labelled)
        if name:
            panel.set_ylim(0, limits[name])
            marks = MaxNLocator(5, steps=[1, 2, 4, 5, 8, 10]) if name == "memory" else MaxNLocator(2, integer=True)
            panel.yaxis.set_major_locator(marks)
            panel.grid(axis="y", color=_LINE, linewidth=0.6, alpha=0.7)
            panel.set_axisbelow(name != "memory")
        if labelled:
            panel.set_ylabel(
                label, rotation=90 if name else 0, ha="center" if name else "right", va="bottom" if name else "center"
            )
            # Labels of all panels stand in one line.
            panel.yaxis.set_label_coords(-0.5 / width if name else -0.08 / width, 0.5)
    axes[3].set_xlabel(f"{clock.name} since the first arrival")


def _stack(panel: "Axes", edges: npt.NDArray[np.float64], layers: Sequence[npt.NDArray[np.float64]]) -> None:
    """Layers on top of each other; each is drawn down to the floor, so that no seam shows between two."""
    heights = np.cumsum(layers, axis=0)
    for owner, height in reversed(list(zip(OWNERS, heights, strict=True))):
        panel.fill_between(edges, _stairs(height), step="post", color=_OWNER_COLOURS[owner], linewidth=0)


def _strip(panel: "Axes", edges: npt.NDArray[np.float64], bound: npt.NDArray[np.int8]) -> None:
    """A coloured bar for each stretch of time in which the same thing bound."""
    starts = np.flatnonzero(np.diff(bound, prepend=-1))
    stops = np.append(starts[1:], bound.size)
    for code in np.unique(bound):
        mine = bound[starts] == code
        bars = [
            (edges[start], edges[stop] - edges[start]) for start, stop in zip(starts[mine], stops[mine], strict=True)
        ]
        panel.broken_barh(bars, (0, 1), facecolors=_BOUND_COLOURS[BOUNDS[code]], linewidth=0)
    panel.set_ylim(0, 1)
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)


def _drawn(line: Timeline) -> _Drawn:
    """Means of neighbouring stretches where there are more than a panel shows."""
    starts = np.arange(0, line.seconds.size, -(-line.seconds.size // _MOST_STRETCHES))
    lengths = np.diff(line.edges)
    columns: dict[str, Any] = {
        name: np.add.reduceat(getattr(line, name) * lengths, starts) / np.add.reduceat(lengths, starts)
        for name in line.__dataclass_fields__
        if name != "bound"
    }
    # What bound for most of them; of equals the first in `BOUNDS`.
    votes = [np.add.reduceat((line.bound == code).astype(np.int64), starts) for code in range(len(BOUNDS))]
    bound = np.argmax(votes, axis=0).astype(np.int8)
    return _Drawn(edges=np.append(line.edges[starts], line.edges[-1]), line=Timeline(**columns, bound=bound))


def _stairs(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Heights at the edges of stretches: each holds until the next."""
    return np.append(values, values[-1])


def _total(line: Timeline) -> float:
    return float(sum(getattr(line, f"{owner}_bytes") for owner in OWNERS).max())


def _time_unit(span: float) -> _Unit:
    if span < 120:
        return _Unit(name="seconds", size=1)
    return _Unit(name="minutes", size=60) if span < 10 * 3600 else _Unit(name="hours", size=3600)


def _memory_unit(size: float) -> _Unit:
    power = 3 if size >= 2**30 else 2 if size >= 2**20 else 1
    return _Unit(name=("KiB", "MiB", "GiB")[power - 1], size=2.0 ** (10 * power))


def _key(figure: "Figure", title: str, entries: Sequence[tuple[str, str]], *, right: float, top: float) -> None:
    """What the colours stand for, in one line that ends at ``right``."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in entries]
    figure.legend(
        handles=[Patch(visible=False, label=f"{title}:"), *handles], ncols=len(entries) + 1, frameon=False,
        loc="center right", bbox_to_anchor=(right / figure.get_figwidth(), 1 - top / figure.get_figheight()),
        handlelength=1, handleheight=1, handletextpad=0.5, columnspacing=1.3, borderaxespad=0, borderpad=0,
    )  # fmt: skip


def _bars(result: SimulationResult) -> "Figure":
    """What each policy found in the cache, by the tier where it lay."""
    names = list(result.policies)
    width, room = 8.2, 0.42
    left, right, top, foot = 1.5, 1.0, 1.1, 0.6
    figure = _sheet(result, width, top + room * max(1, len(names)) + foot)
    height = figure.get_figheight()
    tall = (height - top - foot) / height
    panel = figure.add_axes((left / width, foot / height, (width - left - right) / width, tall))
    tiers = ["memory", *dict.fromkeys(tier for each in result.policies.values() for tier in each.tier_hit_tokens)]
    colours = dict(zip(tiers, ("#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#009e73"), strict=False))
    for index, each in enumerate(result.policies.values()):
        found, begin = max(1, each.hit_tokens), 0.0
        elsewhere = sum(each.tier_hit_tokens.values())
        for tier in tiers:
            tokens = each.hit_tokens - elsewhere if tier == "memory" else each.tier_hit_tokens.get(tier, 0)
            share = 100 * each.hit_ratio * tokens / found
            panel.barh(index, share, left=begin, height=0.62, color=colours.get(tier, _MUTED), linewidth=0)
            begin += share
        panel.annotate(
            format_share(each.hit_ratio), (100 * each.hit_ratio, index), (6, 0), textcoords="offset points",
            va="center_baseline", fontweight="bold", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    panel.set_yticks(range(len(names)), [_shown(name, left - 0.2) for name in names], color=_INK)
    panel.set_ylim(max(1, len(names)) - 0.5, -0.5)
    panel.set_xlim(0, max([1.0, *(108 * each.hit_ratio for each in result.policies.values())]))
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color=_LINE, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_xlabel("% of prompt tokens found in the cache")
    if len(tiers) > 1:
        _key(figure, "found in", [(tier, colours.get(tier, _MUTED)) for tier in tiers], right=width - 0.22, top=0.8)
    return figure
