"""Many simulations of one trace: every combination of some values, over processes or a Ray cluster."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvist.errors import InputError, KvistError
from kvist.simulation.axes import Axis
from kvist.simulation.question import Question, simulate
from kvist.simulation.results import SimulationResult
from kvist.traces.trace import Trace

# Told how many cells are done, and how many there are.
WatchCells = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one simulation: a result, or why there is none.

    Attributes:
        result: None where there is none.
        error: why; None where there is a result.
        exit_code: of that error at the command line, 0 without one.
    """

    result: SimulationResult | None = None
    error: str | None = None
    exit_code: int = 0


# With their indices, in the order in which they are there.
Outcomes = Generator[tuple[int, Outcome], None, None]


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One combination of values.

    Attributes:
        axes: values by axis, as they were written.
        outcome: of its simulation.
    """

    axes: Mapping[str, str]
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """The axes with a ``result`` or an ``error``."""
        result = self.outcome.result
        found = {"error": self.outcome.error} if result is None else {"result": result.to_dict()}
        return {"axes": dict(self.axes), **found}


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Every combination, the values of the last axis varying fastest.

    Attributes:
        axes: their names, in the order in which they were given.
        cells: one a combination.
    """

    axes: tuple[str, ...]
    cells: tuple[SweepCell, ...]

    @property
    def exit_code(self) -> int:
        """0 where there is any result, else that of the first error."""
        return 0 if any(cell.outcome.result for cell in self.cells) else self.cells[0].outcome.exit_code

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``kvist simulate --sweep``."""
        return {"sweep": [cell.to_dict() for cell in self.cells]}


def sweep(
    trace: Trace | str | Path,
    question: Question | Mapping[str, Any],
    axes: Mapping[str, str | Sequence[Any]],
    *,
    jobs: int | None = None,
    ray: str | None = None,
    watch: WatchCells | None = None,
) -> SweepResult:
    """Simulate every combination of some values; one that is refused is told beside the others.

    Args:
        trace: requests, or a file of them; it is handed over once a process.
        question: what all have in common, or its fields by name.
        axes: what is varied, by the names of the command's options (`AXES`): ``{"memory": "20GiB,40GiB"}`` or
            ``{"max-len": [4096, 8192]}``.
        jobs: processes; as many as there are processors where left out. One is this process.
        ray: where to simulate instead: ``local`` starts a Ray of its own, on `jobs` processors; else the address of
            a cluster, ``auto`` for the one that this machine belongs to.
        watch: told how many are done.

    Raises:
        InputError: an axis or a value is wrong, no combination of them can be asked, or Ray cannot be reached.
        KvistError: a process was ended.
    """
    read = [Axis.of(name, given) for name, given in axes.items()]
    if not read:
        raise InputError("sweep: nothing is swept; name an axis, such as memory=20GiB,40GiB", key="sweep")
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs: {jobs}; 1 or more", key="jobs")
    common = (
        {field.name: getattr(question, field.name) for field in fields(question)}
        if isinstance(question, Question)
        else dict(question)
    )
    _check_once(read, common)
    choices = [list(zip(axis.values, axis.fields, strict=True)) for axis in read]
    cells = list(product(*choices))
    asked = [{**common, **{key: value for _, given in cell for key, value in given.items()}} for cell in cells]
    _check_some(asked)
    if not isinstance(trace, Trace):
        from kvist.traces.read import read_trace

        trace = read_trace(trace)
    outcomes: list[Outcome | None] = [None] * len(cells)
    with closing(_outcomes(trace, asked, jobs, ray)) as found:
        for done, (index, outcome) in enumerate(found, 1):
            outcomes[index] = outcome
            if watch is not None:
                watch(done, len(cells))
    names = tuple(axis.name for axis in read)
    return SweepResult(
        axes=names,
        cells=tuple(
            SweepCell(axes=dict(zip(names, (word for word, _ in cell), strict=True)), outcome=outcome)
            for cell, outcome in zip(cells, outcomes, strict=True)
            if outcome is not None
        ),
    )


def answer(trace: Trace, asked: Mapping[str, Any]) -> Outcome:
    """Simulate one combination."""
    try:
        return Outcome(result=simulate(trace, Question.of(asked)))
    except KvistError as error:
        return Outcome(error=str(error), exit_code=error.exit_code)


def _check_once(axes: Sequence[Axis], common: Mapping[str, Any]) -> None:
    """Raise where two axes, or an axis and the question, give the same."""
    taken: dict[str, str] = {}
    for axis in axes:
        for field in axis.fields[0]:
            if field in taken:
                raise InputError(f"sweep: {axis.name} is there twice; give all its values at once", key="sweep")
            taken[field] = axis.name
            default = Question.__dataclass_fields__[field].default
            if common.get(field, default) != default:
                raise InputError(f"sweep: {axis.name} is swept and given beside it; leave one out", key="sweep")


def _check_some(asked: Sequence[Mapping[str, Any]]) -> None:
    """Raise what is wrong with the first combination where something is wrong with all."""
    first: InputError | None = None
    for each in asked:
        try:
            Question.of(each)
            return
        except InputError as error:
            first = first or error
    assert first is not None
    raise first


def _outcomes(trace: Trace, asked: Sequence[Mapping[str, Any]], jobs: int | None, ray: str | None) -> Outcomes:
    if ray is not None:
        from kvist.simulation.on_ray import outcomes_on_ray

        return outcomes_on_ray(trace, asked, ray, jobs)
    count = min(len(asked), jobs or _processors())
    if count > 1:
        return _outcomes_of_processes(trace, asked, count)
    return ((index, answer(trace, each)) for index, each in enumerate(asked))


def _processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcomes_of_processes(trace: Trace, asked: Sequence[Mapping[str, Any]], count: int) -> Outcomes:
    # Fresh processes: what is forked from threads may hang, and elsewhere than on Linux nothing is.
    context = get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(trace, theirs))
    try:
        with _interrupted_later():
            indices = {pool.submit(_answer_held, each): index for index, each in enumerate(asked)}
        for future in as_completed(indices):
            yield indices[future], future.result()
    except BrokenProcessPool as error:
        raise KvistError(
            "sweep: a process was ended; where memory ran out, fewer `jobs` need less. "
            "A script that sweeps does so below `if __name__ == '__main__':`"
        ) from error
    except BaseException:
        # Whoever interrupts does not wait for the cells that run.
        ours.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold Ctrl-C back while processes are started, which then never see it: the parent's word is enough for them."""
    handler = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and callable(handler)
    if not ours or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    # Children inherit the mask; here another thread, such as one of NumPy's, may be told nevertheless.
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(signal.SIGINT, None)


_held: Trace | None = None


def _begin(trace: Trace, parent: Connection) -> None:
    """In a new process: keep the trace, and end when the parent does or says so."""
    global _held
    _held = trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    try:
        parent.recv()
    except (EOFError, OSError):
        os._exit(1)


def _answer_held(asked: Mapping[str, Any]) -> Outcome:
    assert _held is not None
    return answer(_held, asked)
