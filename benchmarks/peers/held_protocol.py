"""What `conversations_held.py` and its workers say to each other, and how a worker looks for the most that fit.

One JSON object on the worker's standard input (`HeldJob`), one a trial on its standard output (`Trial` with the cache's
bytes). A trial is so many conversations of two turns, all of one turn submitted at once. They were held if all
of them received a token in one and the same step, in both turns, and none was preempted between: it had then begun to
answer, was not done, and missed a step in which others went on, or the engine counted it. A trial that has failed is
broken off. Trials begin at what the engine says of its capacity and go on, up or down, to the most that are held.

Only the standard library: the interpreters of all engines import this.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from time import perf_counter
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class HeldJob:
    """`talks` are lists of tokens, each long enough for the user's parts of both turns of one conversation.

    `models` maps 'gguf', 'bf16' and 'int4' to paths, `memory` is the cache's in bytes, `prompt` the length of the first
    turn's, `question` what the second turn adds to the history, `out` the answer of each. `options` are the engine's.
    """

    models: dict[str, str]
    threads: int
    memory: int
    prompt: int
    question: int
    out: int
    options: dict[str, Any]
    talks: list[list[int]]

    @property
    def tokens(self) -> int:
        """Of a whole conversation."""
        return self.prompt + self.question + 2 * self.out


class NoRoom(Exception):
    """The engine would not begin so many: its cache would need more memory than it was given."""


Step = dict[int, list[int]]  # what each conversation received, by its index; those without are left out


class Holder(Protocol):
    """An engine with its cache of a given size.

    `allocated` are the cache's bytes, `likely` the conversations to try first. `preempted` and `hit_tokens` are of the
    last turn: what the engine itself counts, None where it does not; `hits_at_least` tells that more may have been.
    """

    allocated: int
    likely: int
    preempted: int | None
    hit_tokens: int | None
    hits_at_least: bool

    def begin(self, conversations: int) -> None:
        """Room for so many, none of them known. Raises `NoRoom`."""

    def turn(self, prompts: list[list[int]], out: int) -> Iterator[Step]:
        """Submit all prompts, then run step after step; closing the iterator withdraws what is not done."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How one turn went: most conversations that received a token in the same step, and the preempted ones."""

    together: int
    preempted: int
    hit_tokens: int | None
    hits_at_least: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """So many conversations at once; without turns where the engine would not begin."""

    conversations: int
    held: bool
    turns: list[Turn]
    refused: str = ""


def run_turn(engine: Holder, prompts: list[list[int]], out: int) -> tuple[Turn, list[list[int]]]:
    """One turn of all conversations, until all are answered or it is known that they are not held together."""
    answers: list[list[int]] = [[] for _ in prompts]
    together = 0
    missed: set[int] = set()
    start = perf_counter()
    steps = engine.turn(prompts, out)
    for received in steps:
        if not received:
            continue
        for index, answer in enumerate(answers):
            if index in received:
                answer += received[index]
            elif 0 < len(answer) < out:
                missed.add(index)
        together = max(together, len(received))
        ended = any(len(answer) >= out for answer in answers)
        if missed or engine.preempted or (ended and together < len(prompts)):
            break
    seconds = perf_counter() - start
    steps.close()  # type: ignore[attr-defined]
    turn = Turn(
        together=together,
        preempted=engine.preempted or len(missed),
        hit_tokens=engine.hit_tokens,
        hits_at_least=engine.hits_at_least,
        seconds=seconds,
    )
    return turn, answers


def run_trial(engine: Holder, job: HeldJob, talks: list[list[int]]) -> Trial:
    """Both turns of so many conversations as there are talks."""
    count = len(talks)
    try:
        engine.begin(count)
    except NoRoom as error:
        return Trial(conversations=count, held=False, turns=[], refused=str(error))
    histories = [talk[: job.prompt] for talk in talks]
    turns = []
    for number in range(2):
        if number:
            histories = [
                history + talk[job.prompt : job.prompt + job.question]
                for history, talk in zip(histories, talks, strict=True)
            ]
        turn, answers = run_turn(engine, histories, job.out)
        turns.append(turn)
        if turn.together < count or turn.preempted:
            return Trial(conversations=count, held=False, turns=turns)
        if [len(answer) for answer in answers] != [job.out] * count:
            raise SystemExit(f"asked {job.out} tokens of each conversation, got other lengths")
        histories = [history + answer for history, answer in zip(histories, answers, strict=True)]
    return Trial(conversations=count, held=True, turns=turns)


def search(engine: Holder, job: HeldJob) -> Iterator[Trial]:
    """Upwards while they are held, downwards while they are not, until it turns."""
    talks = iter(job.talks)
    count, step = max(1, engine.likely), 0
    while count:
        trial = run_trial(engine, job, [next(talks) for _ in range(count)])
        yield trial
        if step and (step > 0) != trial.held:
            return
        step = 1 if trial.held else -1
        count += step


def serve(load: Callable[[HeldJob], Holder], *, distribution: str) -> None:
    """Read the job, load the engine once, and report each trial as soon as it is done."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = HeldJob(**json.load(sys.stdin))
    engine = load(job)
    for trial in search(engine, job):
        said = {"version": version(distribution), "allocated": engine.allocated, **asdict(trial)}
        print(json.dumps(said), file=report, flush=True)
