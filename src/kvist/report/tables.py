"""Tables for a terminal of 80 columns, from plain rows of text."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Column:
    """A heading, and how its cells stand.

    Attributes:
        title: nothing where the table has no headings.
        number: to the right, and never broken over lines.
        whole: to the left, and never broken.
    """

    title: str = ""
    number: bool = False
    whole: bool = False


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print rows under their headings; long text is folded, never cut."""
    headed = any(column.title for column in columns)
    table = Table(box=SIMPLE_HEAD if headed else None, show_header=headed, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.number else "left",
            no_wrap=column.number or column.whole,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    _print(table, title)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print name and value pairs, names in one column."""
    print_table((Column(whole=True), Column()), facts)


def print_entries(entries: Iterable[tuple[str, str, Sequence[str]]], *, title: str) -> None:
    """Print a name and a value on one line, and what belongs to them indented below."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", ratio=1)
    table.add_column(justify="right", no_wrap=True)
    for name, value, lines in entries:
        table.add_row(_plain(name), _plain(value))
        for line in lines:
            table.add_row(Padding(_plain(line), (0, 0, 0, 4)))
    _print(table, title)


def _print(table: Table, title: str) -> None:
    console = Console(file=sys.stdout, width=WIDTH, highlight=False)
    with console.capture() as captured:
        if title:
            console.print(title, style="bold", markup=False)
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n"), end="\n\n")


def _plain(cell: str) -> str:
    # File names may hold brackets, which rich would take for its markup.
    return escape(cell)
