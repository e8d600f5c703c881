"""Lengths of sequences to plan for, from a file: one a line, CSV or JSON lines, a request trace or not, gzip or not.

A trace tells prompt and answer apart; Mooncake's also tells which blocks of prompts are the same. What columns are
called: :mod:`kvist.traces.names`.
"""

from dataclasses import dataclass
from pathlib import Path

from kvist.traces.read import named_block_tokens, read_columns
from kvist.traces.source import Source

_MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence: a prompt, and the tokens that answer it.

    Attributes:
        prompt: tokens, what was said before included.
        output: tokens; None where only the whole length is known, which is then ``prompt``.
        blocks: ids of the prompt's blocks; equal ids are equal prefixes.
    """

    prompt: int
    output: int | None = None
    blocks: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Tokens at its end."""
        return self.prompt + (self.output or 0)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What a file says of the sequences to plan for.

    Attributes:
        source: its path.
        requests: in its order.
        empty: requests of no token at all, which failed and are left out.
        block_tokens: tokens of a block, where requests name blocks.
    """

    source: str
    requests: tuple[Request, ...]
    empty: int = 0
    block_tokens: int | None = None

    @property
    def is_trace(self) -> bool:
        """Whether prompts and answers are told apart."""
        return any(request.output is not None for request in self.requests)


def read_lengths(path: str | Path) -> Lengths:
    """Read a file of lengths or a trace; unlike a trace's own reader it takes whole lengths, and requests unanswered.

    Raises:
        BadFile: it is not there, torn, or a line says no length; names the line and what would be right.
    """
    columns = read_columns(Source(path=str(path), key="lengths"), trace=False, most=_MOST_REQUESTS)
    block_tokens = named_block_tokens(columns)
    ids = columns.blocks
    requests, start = [], 0
    for prompt, output, count in zip(columns.prompts, columns.outputs, columns.counts, strict=True):
        blocks = tuple(ids[start : start + count])
        start += count
        requests.append(Request(prompt=prompt, output=None if output < 0 else output, blocks=blocks))
    return Lengths(source=str(path), requests=tuple(requests), empty=columns.failed, block_tokens=block_tokens)
