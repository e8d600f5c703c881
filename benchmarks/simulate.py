"""How fast `kvist simulate` is, and where the same question is asked, how fast kvcache-simulator is.

    bash benchmarks/peers/setup.sh simulator
    python benchmarks/simulate.py [hits] [clock] [linear] [million]

``hits``     the Mooncake conversation trace (12,031 requests, 512-token blocks) without a clock: requests a second
             of one core, beside a bare ordered dictionary and kvcache-simulator's two back ends on the same
             question: prefix hits of the last half under LRU, three sizes of cache.
``clock``    the same trace with a clock: Llama-3.1-8B on an H100, 16-token blocks, three policies.
``linear``   1, 10 and 100 times 1,000 requests, with 1 and 10 times the memory: seconds a token of new work.
``million``  a million synthetic requests, and the process's peak memory.

Reading files and start-up are left out, of peers as well. Times are of one process on one core.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from kvist.simulation.cache_only import cache_hits
from kvist.simulation.question import simulate
from kvist.traces.laws import Arrivals, Lognormal
from kvist.traces.read import read_trace
from kvist.traces.synthesise import Tree, synthesise
from kvist.traces.trace import Trace

HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("KVIST_PEERS", "~/.cache/kvist/peers")).expanduser()
TRACE = HERE.parents[1] / "shared" / "data" / "traces" / "mooncake_fast25_conversation.jsonl.gz"
BLOCKS = (819, 6553, 26214)
ROUNDS = 5
# Of Llama-3.1-8B in bf16: 128 KiB a token.
BLOCK_BYTES = 512 * 128 * 1024


def last_half(trace: Trace, blocks: int) -> float:
    found = cache_hits(trace, blocks)
    half = len(trace) // 2
    return float(found.request_hits[half:].sum() / trace.prompts[half:].sum())


def bare(trace: Trace, blocks: int) -> int:
    """The least that an LRU can do: one ordered dictionary, no prompts' ends, nothing else."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    ids = trace.blocks.tolist()
    offsets = trace.offsets.tolist()
    for start, stop in pairwise(offsets):
        own = ids[start:stop]
        alive = True
        for block in own:
            alive = alive and block in cache
            hits += alive
        for block in reversed(own):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


def hits() -> None:
    trace = read_trace(TRACE)
    print(f"### {len(trace):,} requests without a clock, LRU, {', '.join(f'{b:,}' for b in BLOCKS)} blocks\n")
    rows = []
    seconds: dict[str, list[float]] = {"kvist": [], "a bare ordered dictionary": []}
    ratios: dict[str, list[float]] = {"kvist": [last_half(trace, size) for size in BLOCKS]}
    for _ in range(ROUNDS):
        for name, run in (("kvist", last_half), ("a bare ordered dictionary", bare)):
            started = perf_counter()
            for size in BLOCKS:
                run(trace, size)
            seconds[name].append(perf_counter() - started)
    python = PEERS / "simulator" / "bin" / "python"
    for backend, label in (("python", "kvcache-simulator, Python"), ("cpp", "kvcache-simulator, C++")):
        if not python.exists():
            print(f"{python} is not there: bash benchmarks/peers/setup.sh simulator", file=sys.stderr)
            break
        job = {
            "trace": str(TRACE), "blocks": BLOCKS, "model": "llama-3.1-8b", "bytes_per_block": BLOCK_BYTES,
            "backend": backend,
        }  # fmt: skip
        for _ in range(3):
            done = subprocess.run(
                [python, HERE / "peers" / "replay_simulator.py"], input=json.dumps(job), text=True, check=True,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            found = json.loads(done.stdout)
            seconds.setdefault(label, []).append(found["seconds"])
            ratios[label] = found["hit_ratios"]
    for name, times in seconds.items():
        median = sorted(times)[len(times) // 2]
        rate = len(BLOCKS) * len(trace) / median
        shown = " / ".join(f"{ratio:.2%}" for ratio in ratios.get(name, []))
        rows.append((name, f"{rate:,.0f}", shown))
    print("| | requests/s | hits of the last half |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def clock() -> None:
    trace = read_trace(TRACE)
    print(f"### {len(trace):,} requests with a clock: Llama-3.1-8B, H100, 16-token blocks\n")
    print("| policy | seconds | requests/s | tokens computed one by one | steps | hit ratio | preempted |")
    print("|---|---|---|---|---|---|---|")
    for policy in ("prefix", "paged", "slab"):
        started = process_time()
        found = simulate(trace, model="llama-3.1-8b", gpu="H100", policies=[policy]).policies[policy]
        seconds = process_time() - started
        print(
            f"| {policy} | {seconds:.1f} | {len(trace) / seconds:,.0f} | {int(trace.outputs.sum()):,} | "
            f"{found.steps:,} | {found.hit_ratio:.1%} | {found.preempted:,} |",
            flush=True,
        )
    print()


def conversations(requests: int, answer: int = 200) -> Trace:
    return synthesise(
        requests,
        seed=1,
        arrivals=Arrivals(rate=4.0),
        prompt=Lognormal(mean=1500, cv=1.0),
        output=Lognormal(mean=answer, cv=1.0),
        tree=Tree(systems=20, system_tokens=1024, turns=3.0, turn=Lognormal(mean=200, cv=1.0)),
        block_tokens=128,
    )


def linear() -> None:
    print("### Cost against work and memory\n")
    print("| requests | cache | seconds | microseconds a token of new work |\n|---|---|---|---|")
    for requests in (1_000, 10_000, 100_000):
        trace = conversations(requests)
        for memory in ("40GiB", "320GiB"):
            started = process_time()
            found = simulate(trace, model="llama-3.1-8b", gpu="H100", memory=memory).policies["prefix"]
            seconds = process_time() - started
            work = int(trace.prompts.sum() + trace.outputs.sum()) - found.hit_tokens
            print(
                f"| {requests:,} | {found.cache_bytes / 2**30:.0f} GiB | {seconds:.1f} | {seconds / work * 1e6:.2f} |",
                flush=True,
            )
    print()


def million() -> None:
    trace = conversations(1_000_000, answer=24)
    size = sum(getattr(trace, name).nbytes for name in ("arrivals", "prompts", "outputs", "blocks", "offsets"))
    started = process_time()
    found = cache_hits(trace, 50_000)
    print("### A million requests\n")
    print(f"The trace takes {size / 2**20:,.0f} MiB.", f"Without a clock: {process_time() - started:.0f} s, ", end="")
    print(f"{found.hit_ratio:.1%} hits. ", end="", flush=True)
    started = process_time()
    done = simulate(trace, model="llama-3.1-8b", gpu="H100").policies["prefix"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"With a clock: {process_time() - started:,.0f} s for {int(trace.outputs.sum()):,} generated tokens, "
        f"{done.finished:,} finished. Peak memory of the process: {peak / 2**30:.2f} GiB.\n"
    )


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["hits", "clock", "linear", "million"]
    known = {"hits": hits, "clock": clock, "linear": linear, "million": million}
    if wrong := [name for name in chosen if name not in known]:
        raise SystemExit(f"{wrong[0]!r} is no part; choose of {', '.join(known)}")
    np.seterr(all="raise")
    for name in chosen:
        known[name]()
