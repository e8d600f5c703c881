"""What a trace holds, in a few numbers."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of some tokens: their mean, middle, 99 %, most, and sum. Percentiles are those of requests that there are."""

    mean: float
    p50: int
    p99: int
    max: int
    total: int

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int64]) -> "Spread":
        """Of at least one request's tokens."""
        middle, high = np.percentile(tokens, [50, 99], method="inverted_cdf")
        return cls(
            mean=float(tokens.mean()), p50=int(middle), p99=int(high), max=int(tokens.max()), total=int(tokens.sum())
        )


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What prompts have in common.

    Attributes:
        block_tokens: tokens of a block.
        references: blocks that requests name.
        unique: different ones among them.
        hit_tokens: prompt tokens in blocks that an earlier request named: what a prefix cache without an end, filled
            by prompts alone, would hit.
        hit_ratio: those of all prompt tokens.
    """

    block_tokens: int
    references: int
    unique: int
    hit_tokens: int
    hit_ratio: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A trace in a few numbers.

    Attributes:
        source: the file.
        format: whose format it has.
        requests: in it.
        span: seconds from the first arrival to the last; None where no times are named.
        rate: requests a second: gaps between arrivals by the span; None without a span.
        gap_cv: coefficient of variation of the gaps, 1 of a Poisson process; None without a span.
        prompts: their tokens.
        outputs: their tokens.
        sharing: None where no blocks are named.
        failed: requests without prompt or answer, left out.
        skipped_rows: rows that are no requests, left out.
        out_of_order: requests that were sorted.
    """

    source: str
    format: str
    requests: int
    span: float | None
    rate: float | None
    gap_cv: float | None
    prompts: Spread
    outputs: Spread
    sharing: Sharing | None
    failed: int
    skipped_rows: int
    out_of_order: int

    @classmethod
    def of(cls, trace: Trace) -> "Summary":
        """Of a trace of at least one request."""
        span = float(trace.arrivals[-1]) if trace.timed else 0.0
        gaps = np.diff(trace.arrivals)
        return cls(
            source=trace.source,
            format=trace.format,
            requests=len(trace),
            span=span if trace.timed else None,
            rate=gaps.size / span if span else None,
            gap_cv=float(gaps.std() / gaps.mean()) if span else None,
            prompts=Spread.of(trace.prompts),
            outputs=Spread.of(trace.outputs),
            sharing=_sharing(trace),
            failed=trace.failed,
            skipped_rows=trace.skipped_rows,
            out_of_order=trace.out_of_order,
        )

    def to_dict(self) -> dict[str, Any]:
        """As ``kvist trace info --json`` prints it."""
        return asdict(self)


def _sharing(trace: Trace) -> Sharing | None:
    if trace.block_tokens is None:
        return None
    # Ids name all that comes before them, so a request's blocks that are known are its first ones.
    unique, first = np.unique(trace.blocks, return_index=True)
    new = np.zeros(trace.blocks.size + 1, np.int64)
    new[first + 1] = 1
    news = np.cumsum(new)[trace.offsets]
    known = np.diff(trace.offsets) - np.diff(news)
    hits = int(np.minimum(known * trace.block_tokens, trace.prompts).sum())
    return Sharing(
        block_tokens=trace.block_tokens,
        references=int(trace.blocks.size),
        unique=int(unique.size),
        hit_tokens=hits,
        hit_ratio=hits / int(trace.prompts.sum()),
    )
