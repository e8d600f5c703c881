"""What `serving.py` and its workers say to each other.

One JSON object on the worker's standard input (`Job`); on its standard output one JSON object once the
engine is loaded (`version`, `load_seconds`), then one per finished work (`Outcome` and the work's name), in
the order asked. Engines print freely, so a worker keeps the real standard output for itself and sends
everybody else's to standard error. Only the standard library: the interpreters of all engines import this.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from time import perf_counter
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Work:
    """Streams that arrive together; the first `shared` tokens of all prompts are equal."""

    name: str
    prompts: list[list[int]]
    shared: int
    out: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """`models` maps 'gguf', 'bf16' and 'int4' to paths; `options` are the engine's own, see its worker."""

    models: dict[str, str]
    threads: int
    context: int
    options: dict[str, Any]
    works: list[Work]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Seconds from submission: to the end of the last stream, and to the first token of each stream."""

    total: float
    first: list[float]
    answers: list[list[int]]


Run = Callable[[Work], Outcome]


def serve(load: Callable[[Job], Run], *, distribution: str) -> None:
    """Read the job, load the engine once, run the works in order and report each as soon as it is done."""
    start = perf_counter()
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    raw = json.load(sys.stdin)
    job = Job(**{**raw, "works": [Work(**work) for work in raw["works"]]})
    run = load(job)
    loaded = {"version": version(distribution), "load_seconds": perf_counter() - start}
    print(json.dumps(loaded), file=report, flush=True)
    for work in job.works:
        outcome = run(work)
        if [len(answer) for answer in outcome.answers] != [work.out] * len(work.prompts):
            raise SystemExit(f"{work.name}: asked {work.out} tokens of each stream, got other lengths")
        print(json.dumps({"work": work.name, **asdict(outcome)}), file=report, flush=True)
