"""What the arena holds at once, and what it wastes: the benchmarks' own counts, held to their targets."""

import importlib.util
import sys
from math import floor
from pathlib import Path
from types import ModuleType

import pytest

from kvist.traces.read import read_trace

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    # Its dataclasses look for their module there.
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


HELD = script("held_at_once")
ARENA = script("arena")


@pytest.mark.parametrize("model", HELD.MODELS)
def test_nearly_as_many_are_held_as_bytes_allow(model: str) -> None:
    found = HELD.count(model, 2**30, 8192)
    assert found.share >= 0.95
    assert all(found.held >= floor(theirs) for theirs in found.vllm)


@pytest.mark.parametrize("model", ARENA.SITES)
def test_blocks_and_slabs_waste_under_a_hundredth(model: str) -> None:
    if not ARENA.TRACE.exists():
        pytest.skip(f"{ARENA.TRACE} is not there")
    found = ARENA.measure(read_trace(ARENA.TRACE).part(0, 150), model, ARENA.SITES[model])
    assert found.finished + found.refused == 150
    assert found.finished > 100
    assert found.total < 0.01
