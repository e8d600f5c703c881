"""``kvist models`` as tables: the list, and models side by side."""

from collections.abc import Callable, Sequence

from kvist.planning.catalogue import Listing
from kvist.planning.kinds import KINDS
from kvist.report.tables import Column, print_facts, print_table
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size

# Models of one table side by side; as many as 80 columns hold.
_ABREAST = 4


def print_models(found: Sequence[Listing], fmt: CacheFormat, *, dated: bool = False) -> None:
    """Print the list: a line a model, with the month of its release where ``dated``."""
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
    print(f"{len(found)} {'models' if len(found) > 1 else 'model'}{same}; keys {fmt.key}, values {fmt.value}")


def print_compared(found: Sequence[Listing], fmt: CacheFormat, lengths: Sequence[int]) -> None:
    """Print models side by side, each number with how many times that of the first it is."""
    first = found[0]
    tables = -(-len(found) // _ABREAST)
    for abreast in (found[len(found) * n // tables : len(found) * (n + 1) // tables] for n in range(tables)):
        rows = [("released", *(each.released or "" for each in abreast)), ("kind", *(each.kind for each in abreast))]
        rows.append(("exact", *("yes" if each.spec.exact else "no: assumed" for each in abreast)))
        rows.append(("layers", *(str(len(each.spec.layers)) for each in abreast)))
        measures: dict[str, Callable[[ModelSpec], float]] = {
            "append": lambda spec: float(spec.append_bytes_per_token(fmt)),
            "retained": lambda spec: float(spec.retained_bytes_per_token(fmt)),
            "state": lambda spec: spec.state_bytes(fmt),
        }
        for what, measure in measures.items():
            rows.append((what, *(_times(measure(each.spec), measure(first.spec)) for each in abreast)))
        for tokens in lengths:
            whole = first.spec.sequence_bytes(tokens, fmt)
            cells = (
                _times(each.spec.sequence_bytes(tokens, fmt), whole) + ("*" if tokens > each.spec.max_context else "")
                for each in abreast
            )
            rows.append((f"at {format_tokens(tokens)}", *cells))
        print_table(
            (Column(title=" ", whole=True), *(Column(title=_name(each), number=True) for each in abreast)), rows
        )
    notes = []
    if any(tokens > each.spec.max_context for each in found for tokens in lengths):
        notes.append(("*", "longer than the model was made for"))
    notes += [
        (each.spec.name, f"not exact: {', '.join(f'{a.key}={a.value}' for a in each.spec.assumed)} assumed")
        for each in found
        if not each.spec.exact
    ]
    print_facts([*notes, ("format", f"keys {fmt.key}, values {fmt.value}")])


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
