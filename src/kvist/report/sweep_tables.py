"""What a sweep found, as tables: a row a combination."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.report.simulation_tables import format_rate, format_seconds, format_share
from kvist.report.tables import WIDTH, Column, print_facts, print_table
from kvist.simulation.results import PolicyResult, SimulationResult
from kvist.simulation.sweep import SweepCell, SweepResult

_GAP = 3
_MARGINS = 2
# Of the width, for the values that were swept; longer ones go on in the next line.
_MOST_FOR_AXES = 40
_NOTHING = "—"


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A column.

    Attributes:
        title: its heading.
        read: a cell; None where a result has none.
        times: whether it is of the clock's, which stand together.
    """

    title: str
    read: Callable[[PolicyResult], str | None]
    times: bool = False


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """A column as it is printed: a cell a row."""

    title: str
    cells: list[str]
    times: bool

    @property
    def width(self) -> int:
        return max(map(len, (*self.title.split("\n"), *self.cells)))


_FIGURES = (
    _Figure(title="hit\nratio", read=lambda each: format_share(each.hit_ratio)),
    _Figure(title="finished", read=lambda each: f"{each.finished:,}"),
    _Figure(title="refused", read=lambda each: f"{each.refused:,}" if each.refused else None),
    _Figure(title="preempted", read=lambda each: f"{each.preempted:,}" if each.ttft else None),
    _Figure(title="mean\nrunning", read=lambda each: f"{each.mean_running:,.1f}" if each.ttft else None),
    _Figure(title="waste", read=lambda each: format_share(each.waste_ratio) if each.ttft else None),
    _Figure(title="TTFT\np50", read=lambda each: format_seconds(each.ttft.p50) if each.ttft else None, times=True),
    _Figure(title="TTFT\np99", read=lambda each: format_seconds(each.ttft.p99) if each.ttft else None, times=True),
    _Figure(title="tokens/s", read=lambda each: format_rate(each.tokens_per_second) if each.ttft else None, times=True),
    _Figure(title="makespan", read=lambda each: format_seconds(each.makespan) if each.ttft else None, times=True),
)


def print_sweep(sweep: SweepResult) -> None:
    """Print a sweep: what all have in common, a row a combination, and why some have no result.

    Where simulations have several policies, each has a row. Columns that no result has are left out; as many stand in
    one table as have room, and the rest in another below.
    """
    results = [cell.outcome.result for cell in sweep.cells if cell.outcome.result is not None]
    print_facts(_facts(results, len(sweep.cells)))
    rows = [row for cell in sweep.cells for row in _rows(cell)]
    names = list(sweep.axes)
    if any(len(result.policies) > 1 for result in results):
        names.append("policy")
    else:
        rows = [_Row(axes=row.axes[: len(names)], result=row.result) for row in rows]
    columns = [
        _Cells(title=figure.title, cells=[cell or _NOTHING for cell in cells], times=figure.times)
        for figure in _FIGURES
        if any(cells := [None if row.result is None else figure.read(row.result) for row in rows])
    ]
    first = [max(len(name), *(len(row.axes[index]) for row in rows)) for index, name in enumerate(names)]
    taken = min(_MOST_FOR_AXES, sum(first) + _GAP * (len(first) - 1))
    parts = _parts(columns, taken)
    if len(parts) > 1:
        parts = [
            part for times in (False, True) for part in _parts([one for one in columns if one.times is times], taken)
        ]
    for part in parts:
        headings = [*(Column(title=name) for name in names), *(Column(title=one.title, number=True) for one in part)]
        print_table(headings, ([*row.axes, *(one.cells[at] for one in part)] for at, row in enumerate(rows)))
    print_facts(_remarks(sweep, results))


@dataclass(frozen=True, kw_only=True)
class _Row:
    axes: tuple[str, ...]
    result: PolicyResult | None


def _rows(cell: SweepCell) -> list[_Row]:
    """One a policy, whose name follows the axes."""
    values = tuple(cell.axes.values())
    if cell.outcome.result is None:
        return [_Row(axes=(*values, _NOTHING), result=None)]
    return [_Row(axes=(*values, name), result=each) for name, each in cell.outcome.result.policies.items()]


def _parts(columns: Sequence[_Cells], first: int) -> list[list[_Cells]]:
    """Columns that have room beside the axes, at least one in each part."""
    parts: list[list[_Cells]] = []
    taken = WIDTH
    for column in columns:
        if taken + column.width + _GAP > WIDTH - _MARGINS:
            parts.append([])
            taken = first
        parts[-1].append(column)
        taken += column.width + _GAP
    return parts


def _facts(results: Sequence[SimulationResult], cells: int) -> list[tuple[str, str]]:
    """What all results have in common."""
    facts = []
    for name in ("trace", "model", "format", "machine"):
        found = {getattr(result, name) for result in results}
        # Of a machine the cache is told, which those without a result do not have.
        common = len(found) == 1 and (name != "machine" or len(results) == cells)
        if common and (only := found.pop()):
            facts.append((name, only))
    counts = {result.requests for result in results}
    if len(counts) == 1:
        facts.append(("requests", f"{counts.pop():,}"))
    return [*facts, ("simulations", f"{cells:,}")]


def _remarks(sweep: SweepResult, results: Sequence[SimulationResult]) -> list[tuple[str, str]]:
    """Why there is no result, and what a reader should know of how many."""
    refused = [
        (" ".join(f"{name}={value}" for name, value in cell.axes.items()), cell.outcome.error)
        for cell in sweep.cells
        if cell.outcome.error is not None
    ]
    notes = Counter(note for result in results for note in result.notes)
    return [
        *(("no result", f"{cell}: {error}") for cell, error in refused),
        *(
            ("note", note if count == len(results) else f"{note} ({count:,} of {len(results):,})")
            for note, count in notes.items()
        ),
    ]
