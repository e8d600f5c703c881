"""A request trace in columns: when requests came, how long they were, and which of their blocks are the same.

A million requests are a few arrays, not a million objects.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A row that was left out, and why.

    Attributes:
        number: of its line in the file, or of its entry in a JSON array, from 1.
        reason: what is wrong with it, and what would be right.
    """

    number: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        source: file, or how it was made.
        arrivals: float64 ``[requests]``, seconds since the first; ascending. All 0 where the source names no times.
        timed: whether the source names times.
        prompts: int64 ``[requests]``, tokens of each prompt, at least 1; what was said before it included.
        outputs: int64 ``[requests]``, tokens generated, at least 1.
        block_tokens: tokens of a named block; None where prompts name none.
        blocks: int64 ``[named blocks of all requests]``. An id stands for the block's tokens *and all before them*:
            equal ids are equal prefixes.
        offsets: int64 ``[requests + 1]``; request ``i`` names ``blocks[offsets[i]:offsets[i + 1]]``, from the
            beginning of its prompt; tokens behind them are its own. All 0 where ``block_tokens`` is None.
        skipped: rows that were left out because they are no requests, the first hundred of them.
        skipped_rows: all of those.
        failed: requests without a prompt or without an answer, left out.
        out_of_order: requests that the file names before one that arrived earlier; they are sorted.
        format: whose format the file has.
    """

    source: str
    arrivals: npt.NDArray[np.float64]
    timed: bool
    prompts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    block_tokens: int | None
    blocks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    skipped: tuple[SkippedRow, ...] = ()
    skipped_rows: int = 0
    failed: int = 0
    out_of_order: int = 0
    format: str = "kvist"

    def __len__(self) -> int:
        return self.prompts.size

    def blocks_of(self, index: int) -> npt.NDArray[np.int64]:
        """Ids of the blocks that a request names, int64 ``[blocks]``."""
        return self.blocks[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together; 0 of an empty trace."""
        return int((self.prompts + self.outputs).max(initial=0))

    def part(self, start: int, stop: int) -> "Trace":
        """Requests ``start … stop - 1``; arrivals are counted from the first of them."""
        stop = min(stop, len(self))
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        arrivals = self.arrivals[start:stop]
        return replace(
            self,
            arrivals=arrivals - arrivals[0] if arrivals.size else arrivals,
            prompts=self.prompts[start:stop],
            outputs=self.outputs[start:stop],
            blocks=self.blocks[first:last],
            offsets=self.offsets[start : stop + 1] - first,
        )

    def sped_up(self, factor: float) -> "Trace":
        """The same requests, arriving ``factor`` times as fast."""
        return replace(self, arrivals=self.arrivals / factor)
