"""What blocks and slabs waste of reserved memory, on the Mooncake conversation trace, for models of several groups.

The trace is replayed with the simulator's clock: the engine's own scheduler and cache, every byte in its arena, block
ends, windows and states included. ``padding`` is what reserved blocks have room for and no token is in (there is no
other: blocks of no group are made as large as another's), ``tails`` what does not divide a slab into blocks; both are
means over time, of the memory that running sequences reserve.

    python benchmarks/arena.py [--requests N] [MODEL=DEVICES ...]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import process_time

from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.simulation.question import simulate
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.traces.read import read_trace
from kvist.traces.trace import Trace

TRACE = Path(__file__).resolve().parents[2] / "shared/data/traces/mooncake_fast25_conversation.jsonl.gz"
SITES = {
    "gemma-3-1b-it": "H100",
    "gpt-oss-20b": "H100",
    "jamba-v0.1": "H200",
    "qwen3-next-80b-a3b": "H200x2",
}


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Shares of reserved memory, and what was measured on."""

    padding: float
    tails: float
    finished: int
    refused: int
    hit_ratio: float
    cache_bytes: int
    steps: int

    @property
    def total(self) -> float:
        """Both together."""
        return self.padding + self.tails


def measure(trace: Trace, model: str, gpu: str) -> Waste:
    """Replay ``trace``."""
    found = simulate(trace, model=model, gpu=gpu, replicas=1).policies["prefix"]
    return Waste(
        padding=found.waste["unused"],
        tails=found.waste["slab_tails"],
        finished=found.finished,
        refused=found.refused,
        hit_ratio=found.hit_ratio,
        cache_bytes=found.cache_bytes,
        steps=found.steps,
    )


def cut(model: str, memory: int) -> str:
    """How a slab is cut, as ``full 20, window-1024 4``: blocks of each group."""
    groups = groups_of(ModelSpec.read(model), CacheFormat())
    layout = ArenaLayout.of(groups, memory)
    blocks = zip(groups, layout.blocks_per_slab, strict=True)
    return ", ".join(f"{group.name} {per_slab}" for group, per_slab in blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sites", nargs="*", metavar="MODEL=DEVICES", default=[f"{k}={v}" for k, v in SITES.items()])
    parser.add_argument("--requests", type=int, help="of the trace, from its beginning")
    args = parser.parse_args()
    if not TRACE.exists():
        sys.exit(f"{TRACE} is missing: the benchmark needs the Mooncake conversation trace")
    trace = read_trace(TRACE)
    trace = trace.part(0, args.requests or len(trace))

    print(f"{len(trace):,} requests, blocks of 16 tokens, bf16\n")
    print("| model | on | blocks a slab | cache | finished | hits | padding | tails | together | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for site in args.sites:
        model, _, gpu = site.partition("=")
        started = process_time()
        found = measure(trace, model, gpu)
        print(
            f"| {model} | {gpu} | {cut(model, found.cache_bytes)} | {found.cache_bytes / 2**30:.1f} GiB | "
            f"{found.finished:,} | {found.hit_ratio:.1%} | {found.padding:.3%} | {found.tails:.3%} | "
            f"{found.total:.3%} | {process_time() - started:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
