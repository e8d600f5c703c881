"""Write a request trace: kvist's own JSON lines, or Mooncake's; zipped where the name ends in ``.gz``."""

import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.traces.blocks import block_tokens_of, offsets_of
from kvist.traces.rows import HEAD, VERSION
from kvist.traces.source import STDIN
from kvist.traces.trace import Trace

_SLICE = 2**15
# Of traces that name no blocks, in Mooncake's format, which does.
_MOONCAKE_BLOCK = 512


def write_trace(trace: Trace, path: str | Path, *, format: str = "kvist") -> None:
    """Write a trace.

    Args:
        trace: to write.
        path: of the file; ``-`` is standard output.
        format: ``kvist``, which says all that a trace knows; or ``mooncake``, whose times are whole milliseconds and
            which names every block of a prompt: those that the trace names none for get ids of their own.

    Raises:
        InputError: the format is not known or cannot say what the trace does, or the file cannot be written.
    """
    if format not in FORMATS:
        raise InputError(f"format: {format!r} is not written; choose one of {', '.join(FORMATS)}", key="format")
    lines = FORMATS[format](trace)
    try:
        with _opened(str(path)) as stream:
            for part in lines:
                stream.write(part.encode())
    except BrokenPipeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"out: {path}: cannot be written: {why}", key="out") from error


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with Path(path).expanduser().open("wb") as file:
        if not path.endswith(".gz"):
            yield file
            return
        # No time and no name inside, so that equal traces are equal files.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as zipped:
            yield zipped  # type: ignore[misc]


def _kvist(trace: Trace) -> Iterator[str]:
    block = "null" if trace.block_tokens is None else trace.block_tokens
    yield f'{{"{HEAD}": {VERSION}, "requests": {len(trace)}, "block_tokens": {block}}}\n'
    for rows in _slices(trace, trace.blocks, trace.offsets):
        lines = []
        for arrival, prompt, output, blocks in zip(rows.arrivals, rows.prompts, rows.outputs, rows.blocks, strict=True):
            time = f'"arrival": {arrival!r}, ' if trace.timed else ""
            named = f', "blocks": {blocks}' if blocks else ""
            lines.append(f'{{{time}"prompt_tokens": {prompt}, "output_tokens": {output}{named}}}\n')
        yield "".join(lines)


def _mooncake(trace: Trace) -> Iterator[str]:
    if not trace.timed:
        raise InputError(
            "format: mooncake names times, which this trace does not; write kvist, or synthesise arrivals",
            key="format",
        )
    block = trace.block_tokens or _MOONCAKE_BLOCK
    counts = -(-trace.prompts // block)
    if block_tokens_of(trace.prompts, counts) != block:
        raise InputError(
            f"format: mooncake does not say that blocks have {block} tokens, and prompts of these lengths do not tell "
            f"it; write kvist",
            key="format",
        )
    return _mooncake_lines(trace, counts)


def _mooncake_lines(trace: Trace, counts: npt.NDArray[np.int64]) -> Iterator[str]:
    # In the order of the prompts; the blocks that are not named are numbered behind those that are.
    named = np.diff(trace.offsets)
    free = int(trace.blocks.max(initial=-1)) + 1
    own = offsets_of(counts - named) + free
    for rows in _slices(trace, trace.blocks, trace.offsets):
        lines = []
        for index, (arrival, prompt, output, blocks) in enumerate(
            zip(rows.arrivals, rows.prompts, rows.outputs, rows.blocks, strict=True), rows.start
        ):
            ids = blocks + list(range(own[index], own[index + 1]))
            lines.append(
                f'{{"timestamp": {round(arrival * 1000)}, "input_length": {prompt}, "output_length": {output}, '
                f'"hash_ids": {ids}}}\n'
            )
        yield "".join(lines)


FORMATS = {"kvist": _kvist, "mooncake": _mooncake}


@dataclass(frozen=True, kw_only=True)
class _Rows:
    start: int
    arrivals: list[float]
    prompts: list[int]
    outputs: list[int]
    blocks: list[list[int]]


def _slices(trace: Trace, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> Iterator[_Rows]:
    """Python's own numbers of a few thousand requests at a time."""
    for start in range(0, len(trace), _SLICE):
        stop = min(len(trace), start + _SLICE)
        ends = (offsets[start : stop + 1] - offsets[start]).tolist()
        ids = blocks[offsets[start] : offsets[stop]].tolist()
        yield _Rows(
            start=start,
            arrivals=trace.arrivals[start:stop].tolist(),
            prompts=trace.prompts[start:stop].tolist(),
            outputs=trace.outputs[start:stop].tolist(),
            blocks=[ids[first:last] for first, last in pairwise(ends)],
        )
