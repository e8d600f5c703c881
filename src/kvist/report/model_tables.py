"""``kvist models`` as tables: the list, and models side by side."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvist.planning.catalogue import Listing
from kvist.planning.kinds import KINDS
from kvist.report.tables import WIDTH, Column, print_facts, print_table
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size

# Of a table with headings, as :mod:`kvist.report.tables` lays it out: its margins, and what is between columns.
_MARGINS = 2
_GAP = 3
# Longer names are folded.
_NAME = 18


def print_models(
    found: Sequence[Listing], fmt: CacheFormat, *, dated: bool = False, left_out: Mapping[str, str] | None = None
) -> None:
    """Print the list: a line a model, with the month of its release where ``dated``; and what cannot be stored so."""
    dates = (Column(title="since", whole=True),) if dated else ()
    print_table(
        (
            Column(title="model"),
            *dates,
            Column(title="kind", whole=True),
            Column(title="append", number=True),
            Column(title="retained", number=True),
            Column(title="state", number=True),
            Column(title="limit", number=True),
        ),
        [
            (
                each.spec.name,
                *((each.released or "",) if dated else ()),
                each.kind,
                format_size(float(each.spec.append_bytes_per_token(fmt))),
                format_size(float(each.spec.retained_bytes_per_token(fmt))),
                format_size(each.spec.state_bytes(fmt)) if each.spec.state_bytes(fmt) else "",
                format_tokens(each.spec.max_context),
            )
            for each in found
        ],
    )
    kinds = {each.kind for each in found}
    print_facts(
        [
            ("append", "bytes of one more token while every layer grows"),
            ("retained", "the same once every window is full"),
            ("state", "bytes of a sequence whatever its length"),
            *((kind, text) for kind, text in KINDS.items() if kind in kinds),
        ]
    )
    copies = sum(each.like is not None for each in found)
    same = f", {copies} of them copies with the memory of another" if copies else ""
    print(f"{len(found)} {'models' if len(found) > 1 else 'model'}{same}; {fmt.words}")
    if left_out:
        print_facts([(f"{len(left_out)} left out", f"{fmt} cannot store {', '.join(left_out)}")])


def print_compared(found: Sequence[Listing], fmt: CacheFormat, lengths: Sequence[int]) -> None:
    """Print models side by side, each number with how many times that of the first it is."""
    heads = ["released", "kind", "exact", "layers", "append", "retained", "state"]
    heads += [f"at {format_tokens(tokens)}" for tokens in lengths]
    columns = [_compared(each, found[0], fmt, lengths) for each in found]
    for abreast in _abreast(columns, room=WIDTH - max(map(len, heads))):
        print_table(
            (Column(title=" ", whole=True), *(Column(title=title, number=True) for title, *_ in abreast)),
            list(zip(heads, *(cells for _, *cells in abreast), strict=True)),
        )
    notes = []
    if any(tokens > each.spec.max_context for each in found for tokens in lengths):
        notes.append(("*", "longer than the model was made for"))
    notes += [
        (each.spec.name, f"not exact: {', '.join(f'{a.key}={a.value}' for a in each.spec.assumed)} assumed")
        for each in found
        if not each.spec.exact
    ]
    print_facts([*notes, ("format", fmt.words)])


def _compared(each: Listing, first: Listing, fmt: CacheFormat, lengths: Sequence[int]) -> list[str]:
    """A model's column: its name, then its cells."""
    measures: list[Callable[[ModelSpec], float]] = [
        lambda spec: float(spec.append_bytes_per_token(fmt)),
        lambda spec: float(spec.retained_bytes_per_token(fmt)),
        lambda spec: spec.state_bytes(fmt),
    ]
    return [
        _folded_name(_name(each)),
        each.released or "",
        each.kind,
        "yes" if each.spec.exact else "no: assumed",
        str(len(each.spec.layers)),
        *(_times(measure(each.spec), measure(first.spec)) for measure in measures),
        *(
            _times(each.spec.sequence_bytes(tokens, fmt), first.spec.sequence_bytes(tokens, fmt))
            + ("*" if tokens > each.spec.max_context else "")
            for tokens in lengths
        ),
    ]


def _abreast(columns: Sequence[list[str]], *, room: int) -> Iterator[list[list[str]]]:
    """Columns in tables of as many as the room holds, at least one."""
    table: list[list[str]] = []
    used = _MARGINS
    for column in columns:
        width = _GAP + max(len(line) for cell in column for line in cell.split("\n"))
        if table and used + width > room:
            yield table
            table, used = [], _MARGINS
        table.append(column)
        used += width
    yield table


def _folded_name(name: str) -> str:
    """A long name in several lines, broken behind hyphens and spaces."""
    lines = [""]
    for part in re.findall(r"[^- ]*[- ]?", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.strip() for line in lines)


def format_tokens(count: int) -> str:
    """A number of tokens as people write it: ``8k``, ``1M``, ``131,000``."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if count >= size and count % size == 0:
            return f"{count // size:,}{unit}"
    return f"{count:,}"


def _name(each: Listing) -> str:
    return each.spec.name if each.spec.exact else f"{each.spec.name}, assumed"


def _times(size: float, of_first: float) -> str:
    if not size:
        return "0"
    if not of_first:
        return format_size(size)
    ratio = size / of_first
    return f"{format_size(size)} x{ratio:.2f}" if ratio < 9.995 else f"{format_size(size)} x{ratio:.0f}"
