"""Tokens that stand for those of a trace's requests, which traces do not tell.

A named block becomes its id, as often as it has tokens: equal prefixes get equal tokens, others differ in their first.
What no block names, and what is generated, belongs to its request alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes prompts one by one.

    Attributes:
        trace: whose requests they are.
        ids: int32, for each of the trace's blocks its id, counted from 0.
    """

    trace: Trace
    ids: npt.NDArray[np.int32]

    @classmethod
    def of(cls, trace: Trace) -> "Prompts":
        """Number the ids of a trace anew, so that each is a token."""
        if not trace.blocks.size:
            return cls(trace=trace, ids=np.empty(0, np.int32))
        _, ids = np.unique(trace.blocks, return_inverse=True)
        return cls(trace=trace, ids=ids.astype(np.int32))

    def longest(self, index: int) -> int:
        """Tokens of prompt and answer of request ``index``."""
        return int(self.trace.prompts[index]) + int(self.trace.outputs[index])

    def own(self, index: int) -> int:
        """The token that only request ``index`` has."""
        return -1 - index

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """The prompt of request ``index``, int32 ``[prompt]``."""
        trace = self.trace
        size = int(trace.prompts[index])
        tokens = np.full(size, self.own(index), np.int32)
        block = trace.block_tokens
        if block is not None:
            ids = self.ids[trace.offsets[index] : trace.offsets[index + 1]]
            whole = min(ids.size, size // block)
            tokens[: whole * block].reshape(whole, block)[:] = ids[:whole, None]
            if whole < ids.size:
                # A last block that the prompt does not fill.
                tokens[whole * block : (whole + 1) * block] = ids[whole]
        return tokens
