"""Ways to shrink the cache side by side, for a terminal."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from kvist.report.tables import WIDTH, Column, print_table
from kvist.units import counted

_COLUMNS = (
    Column(title="setting"),
    Column(title="KiB/tok", number=True),
    Column(title="×", number=True),
    Column(title="KL", number=True),
    Column(title="top-1", number=True),
    Column(title="ppl", number=True),
    Column(title="facts", number=True),
    Column(title="tok/s", number=True),
)
# Where the user's questions have answers to choose from.
_ANSWERED = Column(title="right", number=True)


def print_comparison(content: Mapping[str, Any]) -> None:
    """Print what ``Comparison.to_dict`` tells."""
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    chosen = any(row["answered"] is not None for row in rows)
    columns = (*_COLUMNS, _ANSWERED) if chosen else _COLUMNS
    cells = [
        [*_cells(row), *(["–" if row["answered"] is None else f"{row['answered']:.0%}"] if chosen else [])]
        for row in rows
    ]
    print_table(columns, cells, title=f"{content['model']}, computed in {content['dtype']}")
    pieces = counted(content["pieces"], "piece")
    read = f"{pieces} of {content['context']:,} tokens, {content['following']:,} behind each."
    where = "behind the pieces"
    if content["asked"]:
        read = f"the whole text of {content['context']:,} tokens, and questions behind it."
        where = "of the answers"
    about = (
        f"{read} KiB a token as held in the "
        "arena, × how many times less. KL divergence from the full cache, agreement with its likeliest token, and "
        f"perplexity, {where}. facts: share of hidden ones that were found, asked for after pruning / before. "
        "● no other is smaller and closer."
    )
    if chosen:
        about += " right: share of the questions whose right choice was the likeliest."
    print()
    for line in remarks(content, about):
        print(fill(line, WIDTH))


def remarks(content: Mapping[str, Any], *first: str) -> list[str]:
    """What is said below the rows."""
    reasons: dict[str, list[str]] = {}
    for name, why in content["left_out"].items():
        reasons.setdefault(why, []).append(name)
    left_out = [f"left out {', '.join(names)}: {why}" for why, names in reasons.items()]
    return [*first, *content["notes"], *noise(content["rows"]), *left_out]


def _cells(row: Mapping[str, Any]) -> list[str]:
    known = f"/{row['needle_known']:.0%}" if row["evict"] != "none" else ""
    return [
        f"{row['setting']}{' ●' if row['front'] else ''}",
        f"{row['bytes_per_token'] / 1024:.2f}",
        f"{row['memory_ratio']:.2f}",
        f"{row['kl']:.4f}" if row["kl"] < 10 else f"{row['kl']:.1f}",
        f"{row['top1_agreement']:.1%}",
        f"{row['perplexity']:.2f}" if row["perplexity"] < 1e4 else f"{row['perplexity']:.1e}",
        "–" if row["needle"] is None else f"{row['needle']:.0%}{known}",
        f"{row['decode_tokens_per_second']:.1f}",
    ]


def noise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences that say whose divergences are within noise of each other; each pair once."""
    said: set[frozenset[str]] = set()
    lines = []
    for row in rows:
        others = [name for name in row["within_noise_of"] if frozenset((row["setting"], name)) not in said]
        said |= {frozenset((row["setting"], name)) for name in others}
        if others:
            lines.append(f"within noise of {row['setting']}: {', '.join(others)}")
    return lines
