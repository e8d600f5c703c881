"""Tables for a terminal of 80 columns, from plain rows of text.

Laid out without rich, loading which would take as long as the plan that is printed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from unicodedata import category, east_asian_width

WIDTH = 80
_GAP = "  "
_INDENT = 4


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

    @property
    def breaks(self) -> bool:
        """Whether long text may go on in the next line."""
        return not (self.number or self.whole)


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print rows under their headings; long text is folded, never cut."""
    headed = any(column.title for column in columns)
    # A headed table has a margin, and a space more between its columns.
    margin, gap = (" ", f"{_GAP} ") if headed else ("", _GAP)
    cells = [[column.title for column in columns], *rows] if headed else [list(row) for row in rows]
    room = WIDTH - 2 * len(margin) - len(gap) * (len(columns) - 1)
    widths = _widths(columns, cells, room)
    lines = [""] if headed and title else []
    for index, row in enumerate(cells):
        lines += (margin + line for line in _row_lines(columns, row, widths, gap))
        if headed and index == 0:
            lines.append(margin + "─" * (sum(widths) + len(gap) * (len(columns) - 1)))
    _print(lines, title)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print name and value pairs, names in one column."""
    print_table((Column(whole=True), Column()), facts)


def print_entries(entries: Iterable[tuple[str, str, Sequence[str]]], *, title: str) -> None:
    """Print a name and a value on one line, and what belongs to them indented below."""
    held = list(entries)
    value_width = max((_cells(value) for _, value, _ in held), default=0)
    room = WIDTH - value_width - len(_GAP)
    needed = [_cells(name) for name, _, _ in held]
    needed += [_cells(line) + _INDENT for _, _, below in held for line in below]
    width = min(room, max(needed, default=0))
    lines: list[str] = []
    for name, value, below in held:
        columns = (Column(), Column(number=True))
        lines += _row_lines(columns, (name, value), (width, value_width), _GAP)
        lines += (" " * _INDENT + part for line in below for part in _folded(line, width - _INDENT))
    _print(lines, title)


def _print(lines: Iterable[str], title: str) -> None:
    text = "\n".join(line.rstrip() for line in ([*_folded(title, WIDTH), *lines] if title else lines)).strip("\n")
    print(text, end="\n\n")


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """How wide each column is: as wide as its text, the widest that may break narrowed until all have room.

    How wide a column is held to be counts the gap behind it, so that the last is narrowed later than its equals.
    """
    behind = [*(len(_GAP) for _ in columns[1:]), 0]
    widths = [max((_widest(row[index]) for row in rows), default=0) + behind[index] for index in range(len(columns))]
    while (excess := sum(widths) - sum(behind) - room) > 0:
        breaking = sorted({width for width, column in zip(widths, columns, strict=True) if column.breaks}, reverse=True)
        if not breaking:
            break
        least = breaking[1] if len(breaking) > 1 else 0
        widest = [
            index
            for index, (width, column) in enumerate(zip(widths, columns, strict=True))
            if column.breaks and width == breaking[0]
        ]
        most = min(excess, breaking[0] - least)
        if breaking[0] <= len(_GAP) + 1:
            break
        for left, index in zip(range(len(widest), 0, -1), widest, strict=True):
            cut = min(most, round(excess / left))
            widths[index] -= cut
            excess -= cut
    return [max(0, width - gap) for width, gap in zip(widths, behind, strict=True)]


def _row_lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int], gap: str) -> Iterable[str]:
    parts = [_cell_lines(column, cell, width) for column, cell, width in zip(columns, row, widths, strict=True)]
    for index in range(max(map(len, parts))):
        line = []
        for column, lines, width in zip(columns, parts, widths, strict=True):
            text = lines[index] if index < len(lines) else ""
            space = " " * (width - _cells(text))
            line.append(space + text if column.number else text + space)
        yield gap.join(line)


def _cell_lines(column: Column, text: str, width: int) -> list[str]:
    return _folded(text, width) if column.breaks else text.split("\n")


def _folded(text: str, width: int) -> list[str]:
    """Text in lines of at most ``width`` cells, broken between words, and within those that are longer."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in _words(paragraph):
            if _cells(line) + _cells(word.rstrip()) > width:
                if line:
                    lines.append(line.rstrip())
                    line = ""
                while _cells(word.rstrip()) > width > 0:
                    head = _head(word, width)
                    lines.append(head)
                    word = word[len(head) :]
            line += word
        lines.append(line.rstrip())
    return lines


def _words(text: str) -> Iterable[str]:
    """Words with the spaces behind them."""
    start = 0
    for index in range(1, len(text)):
        if text[index - 1] == " " and text[index] != " ":
            yield text[start:index]
            start = index
    if text:
        yield text[start:]


def _head(word: str, width: int) -> str:
    """As much of the word as fits; at least one character."""
    taken = 1
    while taken < len(word) and _cells(word[: taken + 1]) <= width:
        taken += 1
    return word[:taken]


def _widest(text: str) -> int:
    return max(map(_cells, text.split("\n")))


def _cells(text: str) -> int:
    """Columns of a terminal that a line takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if category(one) in ("Mn", "Me", "Cf") else 2 if east_asian_width(one) in ("W", "F") else 1 for one in text
    )
