"""Read a request trace, whatever its format: the first line that says something tells which it is."""

from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.traces.blocks import TURN_BLOCK, block_tokens_of, chained, clipped, of_streams, offsets_of, taken
from kvist.traces.columns import Columns
from kvist.traces.rows import read_rows
from kvist.traces.source import Source, lines_of
from kvist.traces.trace import Trace


def read_trace(path: str | Path, *, skip_bad: bool = False, limit: int | None = None, key: str = "trace") -> Trace:
    """Read a request trace: Mooncake, Azure, BurstGPT, agent sessions, ShareGPT turns, kvist's own; gzip or not.

    Requests that arrived out of order are sorted by their arrival; those of one moment stay in the file's order.
    Blocks are numbered 0, 1, 2 … in the order in which they first appear, one number for each block after each
    prefix. Requests without a prompt or without an answer, which failed, are left out. A prompt's last block may be
    partly filled; blocks that begin beyond the prompt's end are left out.

    Args:
        path: of the file; ``-`` is standard input.
        skip_bad: whether to leave rows out that are no requests, instead of raising.
        limit: requests to read, from the file's beginning; None for all.
        key: what errors call the argument that names the file.

    Raises:
        BadFile: the file is not there, torn, holds no request, or a row is none; names the line, what is wrong with it
            and what would be right.
        InputError: the limit is not positive.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit: {limit} requests; 1 or more", key="limit")
    columns = read_columns(Source(path=str(path), key=key), trace=True, skip_bad=skip_bad, limit=limit)
    return _trace_of(columns)


def read_columns(
    source: Source, *, trace: bool, skip_bad: bool = False, limit: int | None = None, most: int | None = None
) -> Columns:
    """Read a file of requests as they are, in its order.

    Args:
        source: the file.
        trace: whether each request must tell prompt and answer apart; times and conversations count only then.
        skip_bad: whether to leave bad rows out instead of raising.
        limit: requests to take; None for all.
        most: requests above which the file is refused.

    Raises:
        BadFile: as :func:`read_trace`.
    """
    columns = Columns(source, trace=trace, skip_bad=skip_bad, limit=limit, most=most)
    with source.opened() as stream:
        read_rows(lines_of(stream), columns)
    if not columns.prompts:
        count = columns.skipped_rows
        bad = "1 row is bad" if count == 1 else f"{count:,} rows are bad"
        skipped = f"; {bad}, the first: " if columns.skipped else ""
        first = f"line {columns.skipped[0].number} {columns.skipped[0].reason}" if columns.skipped else ""
        what = "requests" if trace else "lengths"
        raise source.error(f"holds no {what}{skipped}{first}; write one a line, CSV with a head, or JSON lines")
    return columns


def named_block_tokens(columns: Columns) -> int | None:
    """Tokens of the blocks that requests name; None where they name none.

    Raises:
        BadFile: no size fits.
    """
    if not columns.blocks:
        return None
    if columns.block_tokens is not None:
        return columns.block_tokens
    prompts, counts = _ints(columns.prompts), _ints(columns.counts)
    found = block_tokens_of(prompts[counts > 0], counts[counts > 0])
    if found is None:
        raise columns.source.error("hash_ids fit the prompts' lengths with no block size; leave them out")
    return found


def _trace_of(columns: Columns) -> Trace:
    prompts, outputs = _ints(columns.prompts), _ints(columns.outputs)
    block_tokens = named_block_tokens(columns)
    if block_tokens is not None:
        blocks, offsets = clipped(_ints(columns.blocks), offsets_of(_ints(columns.counts)), -(-prompts // block_tokens))
    elif prompts.size == len(columns.streams):
        block_tokens = TURN_BLOCK
        blocks, offsets = of_streams(_ints(columns.streams), prompts)
    else:
        blocks, offsets = np.zeros(0, np.int64), np.zeros(prompts.size + 1, np.int64)
    timed = bool(columns.arrivals)
    arrivals = np.frombuffer(columns.arrivals, np.float64) if timed else np.zeros(prompts.size)
    out_of_order = int(np.count_nonzero(arrivals[1:] < arrivals[:-1]))
    if out_of_order:
        order = np.argsort(arrivals, kind="stable")
        arrivals, prompts, outputs = arrivals[order], prompts[order], outputs[order]
        blocks, offsets = taken(blocks, offsets, order)
    return Trace(
        source=columns.source.name,
        format=columns.format,
        arrivals=arrivals - arrivals[0],
        timed=timed,
        prompts=prompts,
        outputs=outputs,
        block_tokens=block_tokens,
        blocks=chained(blocks, offsets),
        offsets=offsets,
        skipped=tuple(columns.skipped),
        skipped_rows=columns.skipped_rows,
        failed=columns.failed,
        out_of_order=out_of_order,
    )


def _ints(column: "array[int]") -> npt.NDArray[np.int64]:
    return np.frombuffer(column, np.int64) if column else np.zeros(0, np.int64)
