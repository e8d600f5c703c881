"""The search for the most conversations that an engine holds, on engines that fail in the ways that engines fail."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def protocol() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "peers" / "held_protocol.py"
    found = importlib.util.spec_from_file_location("held_protocol", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


HELD = protocol()
PROMPT, QUESTION, OUT = 6, 2, 4


class Engine:
    """It has room for some; what it does with one more is its ``manner``."""

    allocated = 1
    hit_tokens = None
    hits_at_least = False

    def __init__(self, room: int, manner: str, likely: int) -> None:
        self.room, self.manner, self.likely = room, manner, likely
        self.preempted: int | None = None
        self.asked: list[list[int]] = []
        self.withdrawn = 0

    def begin(self, conversations: int) -> None:
        if self.manner == "refuses" and conversations > self.room:
            raise HELD.NoRoom("a larger buffer")

    def turn(self, prompts: list[list[int]], out: int) -> Iterator[dict[int, list[int]]]:
        self.asked += prompts
        many = len(prompts) > self.room
        self.preempted = None
        try:
            yield {}
            yield {0: [7]}
            for step in range(1, out):
                # Whoever came last begins when all begin, or when the first is done; or somebody goes for a step.
                last = len(prompts) - (1 if many and self.manner == "queues" else 0)
                gone = 0 if many and self.manner == "preempts" and step == 2 else None
                if many and self.manner == "counts":
                    self.preempted = 1
                yield {index: [7] for index in range(last) if index != gone}
            yield {index: [7] for index in range(1, len(prompts))}
        finally:
            self.withdrawn += 1


def search(room: int, manner: str, likely: int) -> tuple[list[tuple[int, bool]], Engine, list[Any]]:
    job = HELD.HeldJob(
        models={}, threads=1, memory=1, prompt=PROMPT, question=QUESTION, out=OUT, options={},
        talks=[[talk] * (PROMPT + QUESTION) for talk in range(60)],
    )  # fmt: skip
    engine = Engine(room, manner, likely)
    trials = list(HELD.search(engine, job))
    return [(trial.conversations, trial.held) for trial in trials], engine, trials


@pytest.mark.parametrize("manner", ["queues", "preempts", "counts", "refuses"])
@pytest.mark.parametrize("likely", [0, 1, 3, 5])
def test_the_most_that_are_held_are_found_from_either_side(manner: str, likely: int) -> None:
    found, engine, _ = search(3, manner, likely)
    assert max(count for count, held in found if held) == 3
    assert min(count for count, held in found if not held) == 4
    # No text is asked twice, but for the same conversation's second turn.
    first = [prompt for prompt in engine.asked if len(prompt) == PROMPT]
    assert len({prompt[0] for prompt in first}) == len(first)
    assert engine.withdrawn == sum(2 if held else 0 if manner == "refuses" else 1 for _, held in found)


def test_a_second_turn_asks_for_all_that_was_said() -> None:
    _, engine, _ = search(1, "queues", 1)
    assert engine.asked[1] == [0] * PROMPT + [7] * OUT + [0] * QUESTION


def test_what_failed_is_told() -> None:
    assert search(3, "queues", 3)[2][-1].turns[-1].together == 3
    assert search(3, "preempts", 3)[2][-1].turns[-1].preempted == 1
    assert search(3, "refuses", 3)[2][-1].refused == "a larger buffer"
    assert search(0, "refuses", 2)[0] == [(2, False), (1, False)]
