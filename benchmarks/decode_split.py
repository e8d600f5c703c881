"""Where a decode step spends its time: products, attention, gathers, appends, other operators, Python between them.

    python benchmarks/decode_split.py [--model NAME] [--dtype bf16]

Each case decodes through the engine once under PyTorch's profiler and with a clock around every call of the C++
kernels, for the shares, and once without, for the step's real time. Operators are timed on the thread that calls them;
"Python and launches" is what remains of the step.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from kvist.engine.engine import Engine
from kvist.engine.sampler import SamplingParams
from kvist.kernels.cpu import Cpu
from kvist.kernels.matrix import Matrix
from kvist.kernels.paged import PagedPlan

KINDS = {
    "products": ("linear", "int4pack", "addmm", "aten::mm", "aten::mv", "addmv", "matmul"),
    "attention": ("flash_attention",),
    "gathers": ("index_select", "aten::embedding"),
    "appends": ("index_put", "index_copy"),
}
KERNELS = {
    (Matrix, "__call__"): "products",
    (PagedPlan, "attend"): "attention",
    (Cpu, "add_norm"): "other operators",
    (Cpu, "rotate"): "other operators",
}
STEPS = 24
CASES = {
    "1 stream, 64 tokens": (1, 0, 64),
    "16 streams, 1,024 shared + 64": (16, 1024, 64),
    "16 streams, 1,088 each": (16, 0, 1088),
    "1 stream, 7,900 tokens": (1, 0, 7900),
}


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other operators")


def start(engine: Engine, streams: int, shared: int, own: int, seed: int) -> None:
    """Submit the case's prompts and step until all of them decode."""
    chance = np.random.default_rng(seed)
    common = chance.integers(100, 40_000, shared).tolist()
    params = SamplingParams(temperature=0, max_tokens=2 * STEPS + 40, ignore_eos=True)
    for _ in range(streams):
        engine.submit(common + chance.integers(100, 40_000, own).tolist(), params, on_event=lambda event: None)
    while engine.scheduler.waiting or any(r.sequence.length < r.prompt_tokens for r in engine.scheduler.running):
        engine.step()
    for _ in range(4):
        engine.step()


@contextmanager
def clocks(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the time spent in the C++ kernels by kind."""

    def timed(kind: str, inner: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args)
            seconds[kind] += time.perf_counter() - began
            return result

        return call

    before = {(owner, name): getattr(owner, name) for owner, name in KERNELS}
    for (owner, name), kind in KERNELS.items():
        setattr(owner, name, timed(kind, before[owner, name]))
    try:
        yield
    finally:
        for (owner, name), inner in before.items():
            setattr(owner, name, inner)


def split(engine: Engine) -> dict[str, float]:
    """Milliseconds of a step by kind."""
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    step = (time.perf_counter() - began) / STEPS * 1e3
    seconds: dict[str, float] = defaultdict(float)
    with clocks(seconds), profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        profiled = (time.perf_counter() - began) / STEPS * 1e3
    kinds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
    for kind, spent in seconds.items():
        kinds[kind] += spent * 1e3 / STEPS
    kinds["Python and launches"] = profiled - sum(kinds.values())
    return {"step": step, "step under the profiler": profiled, **kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    columns = ["step", "step under the profiler", *KINDS, "other operators", "Python and launches"]
    print("| case (ms a step) | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for seed, (name, case) in enumerate(CASES.items()):
        engine: Any = Engine(args.model, memory="1GiB", dtype=args.dtype)
        start(engine, *case, seed)
        row = split(engine)
        print(f"| {name} | " + " | ".join(f"{row.get(column, 0):.1f}" for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
