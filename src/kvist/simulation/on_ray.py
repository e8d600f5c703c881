"""Simulations as tasks of a Ray cluster (extra ``kvist[ray]``), which is loaded only here."""

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvist.errors import InputError, KvistError
from kvist.traces.trace import Trace

if TYPE_CHECKING:
    from kvist.simulation.sweep import Outcomes

LOCAL = "local"


def outcomes_on_ray(trace: Trace, asked: Sequence[Mapping[str, Any]], address: str, jobs: int | None) -> "Outcomes":
    """Outcomes with their indices, in the order in which they are there; a task a simulation.

    Args:
        trace: put into the cluster's store once.
        asked: fields of the questions.
        address: ``local`` starts a Ray of this machine's processors; what else Ray takes is connected to. A Ray that
            this process has initialised already is used as it is.
        jobs: processors of a local one.

    Raises:
        InputError: Ray is not installed or not reached, or `jobs` are named for a cluster.
        KvistError: a task was ended.
    """
    if jobs is not None and address != LOCAL:
        raise InputError("jobs: a cluster has the processors that it has; leave it out", key="jobs")
    if find_spec("ray") is None:
        raise InputError("ray: it is not installed: pip install 'kvist[ray]'", key="ray")
    # By name: what has types where it is installed must not be needed to check ours.
    ray: Any = import_module("ray")
    ours = not ray.is_initialized()
    if ours:
        _start(ray, address, jobs)
    try:
        yield from _outcomes(ray, trace, asked)
    finally:
        if ours:
            ray.shutdown()


def _start(ray: Any, address: str, jobs: int | None) -> None:
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        options |= {"include_dashboard": False, "num_cpus": jobs}
    try:
        ray.init(**options)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"ray: {address!r} is not reached: {reason}", key="ray") from error


def _outcomes(ray: Any, trace: Trace, asked: Sequence[Mapping[str, Any]]) -> "Outcomes":
    from kvist.simulation.sweep import answer

    held = ray.put(trace)
    task = ray.remote(answer)
    indices = {task.remote(held, dict(each)): index for index, each in enumerate(asked)}
    waiting = list(indices)
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            for reference in ready:
                yield indices[reference], ray.get(reference)
    except ray.exceptions.RayTaskError:
        # Our own failure, told with its traceback.
        raise
    except ray.exceptions.RayError as error:
        raise KvistError(f"sweep: a task of Ray was ended: {str(error).strip().partition(chr(10))[0]}") from error
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)
