"""A request trace as tables."""

from collections.abc import Sequence

from kvist.report.tables import Column, print_facts, print_table
from kvist.traces.summary import Spread, Summary
from kvist.traces.trace import SkippedRow

_SHOWN = 5


def print_summary(summary: Summary, skipped: Sequence[SkippedRow] = ()) -> None:
    """Print what a trace holds, and the first of the rows that were left out."""
    facts = [("trace", summary.source), ("format", summary.format), ("requests", f"{summary.requests:,}")]
    facts.append(("span", "no times" if summary.span is None else f"{summary.span:,.1f} s"))
    if summary.rate is not None:
        facts.append(("rate", f"{summary.rate:.4g} requests/s; gaps vary by {summary.gap_cv:.3g} (Poisson: 1)"))
    if summary.sharing is None:
        facts.append(("blocks", "none named"))
    else:
        shared = summary.sharing
        facts.append(
            ("blocks", f"{shared.block_tokens:,} tokens each; {shared.references:,} named, {shared.unique:,} different")
        )
        facts.append(
            ("hits", f"{shared.hit_ratio:.2%} of prompt tokens, of a prefix cache without an end, filled by prompts")
        )
    if summary.failed:
        facts.append(("left out", f"{summary.failed:,} requests without a prompt or without an answer"))
    if summary.out_of_order:
        facts.append(("sorted", f"{summary.out_of_order:,} requests came in the file before an earlier one"))
    if summary.skipped_rows:
        facts.append(("bad rows", f"{summary.skipped_rows:,}, left out"))
        facts += [("", f"line {row.number} {row.reason}") for row in skipped[:_SHOWN]]
        if summary.skipped_rows > _SHOWN:
            facts.append(("", "…"))
    print_facts(facts)
    print_table(
        (
            Column(title="tokens"),
            *(Column(title=title, number=True) for title in ("mean", "50 %", "99 %", "most", "all")),
        ),
        [_row("prompt", summary.prompts), _row("answer", summary.outputs)],
    )


def _row(name: str, spread: Spread) -> tuple[str, ...]:
    whole = (spread.p50, spread.p99, spread.max, spread.total)
    return (name, f"{spread.mean:,.1f}", *(f"{count:,}" for count in whole))
