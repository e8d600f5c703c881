"""What `eviction.py` and its workers say to each other: a prompt a line, and what came of it.

Both engines are loaded all the time and asked by turns, so that a slow minute hurts both. First a worker reads
`EvictionJob`; then each line on its standard input is a `Question`, to which it writes an `Answer`, a line too.

Only the standard library: the interpreters of all engines import this.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version


@dataclass(frozen=True, kw_only=True)
class EvictionJob:
    """`models` maps 'gguf' and 'int4' to paths; `context` are tokens of the longest prompt and its answer."""

    models: dict[str, str]
    threads: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """`method` is the engine's own word, 'none' for the full cache; `budget` are tokens that are kept."""

    prompt: list[int]
    out: int
    method: str
    budget: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds until the first token and behind it; bytes of the cache that were held behind the last step, and most."""

    tokens: list[int]
    first: float
    rest: float
    held: int
    most: int


def serve(load: Callable[[EvictionJob], Callable[[Question], Answer]], *, distribution: str) -> None:
    """Load the engine once, then answer line by line."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer = load(EvictionJob(**json.loads(sys.stdin.readline())))
    print(json.dumps({"version": version(distribution)}), file=report, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(answer(Question(**json.loads(line))))), file=report, flush=True)
