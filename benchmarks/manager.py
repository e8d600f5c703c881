"""The cache manager against vLLM's, on the first 2,000 requests of the Mooncake conversation trace.

Both replay the same tokens (made from the trace's 512-token block ids) in blocks of 16 through a pool of 3,000,000
tokens with 32 requests alive: each prompt is matched, reserved, stored and, when its turn comes, released. Only manager
calls are timed. vLLM hashes a request's blocks when it is made, so its rate counts the hashing; ours takes an array of
token ids, and the rate from Python lists, conversion included, is printed beside it.

    python benchmarks/manager.py [--rounds 3] [--json FILE]

The peer's interpreter is looked for in $KVIST_PEERS (default ~/.cache/kvist/peers), which ``benchmarks/peers/setup.sh``
fills.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention

HERE = Path(__file__).resolve().parent
TRACE = HERE.parents[1] / "shared/data/traces/mooncake_fast25_conversation.jsonl.gz"
TRACE_BLOCK = 512
BLOCK = 16


def prompts(trace: Path, limit: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """The token ids that the peer's replay makes, as int32 arrays."""
    made = []
    with gzip.open(trace, "rt") as lines:
        for _, line in zip(range(limit), lines, strict=False):
            row = json.loads(line)
            ids = np.array(row["hash_ids"], np.int64)[:, None] * TRACE_BLOCK + np.arange(TRACE_BLOCK)
            made.append((ids % 2**31).ravel()[: row["input_length"]].astype(np.int32))
    return made


def replay(arrays: list[Any], pool_tokens: int, alive_limit: int, *, from_lists: bool) -> dict[str, Any]:
    """One replay on a fresh manager."""
    group = Group(
        name="full",
        layer=Attention(kv_heads=1, key_dim=32, value_dim=32),
        layers=(0,),
        block_tokens=BLOCK,
        format=CacheFormat(),
    )
    layout = ArenaLayout.of((group,), pool_tokens // BLOCK * group.block_bytes)
    manager = CacheManager((group,), layout)
    alive: deque[Any] = deque()
    hits: list[int] = []
    seconds = 0.0
    forced = 0
    gc.collect()
    for array in arrays:
        prompt = array.tolist() if from_lists else array
        start = perf_counter()
        if len(alive) == alive_limit:
            manager.release(alive.popleft())
        sequence = manager.begin(prompt)
        while not (reservation := manager.reserve(sequence, array.size)).granted:
            manager.release(alive.popleft())
            forced += 1
        manager.commit(sequence, reservation.limit)
        seconds += perf_counter() - start
        alive.append(sequence)
        hits.append(reservation.hit_tokens)
    return {"requests_per_s": len(arrays) / seconds, "hits": hits, "hit_tokens": sum(hits), "freed_early": forced}


def peer(args: argparse.Namespace) -> dict[str, Any]:
    """The peer's replay, by its own interpreter."""
    python = Path(os.environ.get("KVIST_PEERS", "~/.cache/kvist/peers")).expanduser() / "vllm/bin/python"
    if not python.exists():
        sys.exit(f"{python} is missing: run benchmarks/peers/setup.sh, or point KVIST_PEERS at what it made")
    with tempfile.TemporaryDirectory() as folder:
        hits = Path(folder) / "hits.json"
        command = [str(python), str(HERE / "peers/replay_vllm.py"), str(args.trace), "--requests", str(args.requests)]
        command += ["--pool-tokens", str(args.pool_tokens), "--alive", str(args.alive), "--hits", str(hits)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        answer["hits"] = json.loads(hits.read_text())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pool-tokens", type=int, default=3_000_000)
    parser.add_argument("--alive", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.trace.exists():
        sys.exit(f"{args.trace} is missing: the benchmark needs the Mooncake conversation trace; --trace names another")

    arrays = prompts(args.trace, args.requests)
    ours: list[dict[str, Any]] = []
    lists: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        ours.append(replay(arrays, args.pool_tokens, args.alive, from_lists=False))
        lists.append(replay(arrays, args.pool_tokens, args.alive, from_lists=True))
        theirs.append(peer(args))

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    rate = middle([run["requests_per_s"] for run in ours])
    from_lists = middle([run["requests_per_s"] for run in lists])
    print("| manager | requests/s (median) | min - max | hit tokens | ratio ours/this |")
    print("|---|---|---|---|---|")
    speeds = [run["requests_per_s"] for run in ours]
    print(f"| kvist | {rate:,.0f} | {min(speeds):,.0f} - {max(speeds):,.0f} | {ours[0]['hit_tokens']:,} | 1 |")
    speeds = [run["requests_per_s"] for run in lists]
    print(
        f"| kvist, from Python lists | {from_lists:,.0f} | {min(speeds):,.0f} - {max(speeds):,.0f} | "
        f"{lists[0]['hit_tokens']:,} | {rate / from_lists:.2f} |"
    )
    for index, first in enumerate(theirs[0]["runs"]):
        speeds = [answer["runs"][index]["requests_per_s"] for answer in theirs]
        bare = [answer["runs"][index]["requests_per_s_without_hashing"] for answer in theirs]
        for name, values in ((f"vLLM, {first['hash']}", speeds), (f"vLLM, {first['hash']}, hashing not counted", bare)):
            print(
                f"| {name} | {middle(values):,.0f} | {min(values):,.0f} - {max(values):,.0f} | "
                f"{first['hit_tokens']:,} | {rate / middle(values):.1f} |"
            )
    differ = sum(mine != other for mine, other in zip(ours[0]["hits"], theirs[0]["hits"], strict=True))
    print(f"\nrequests whose hits differ: {differ} of {len(arrays)}")
    if args.json:
        for run in (*ours, *lists, *theirs):
            run.pop("hits")
        args.json.write_text(json.dumps({"kvist": ours, "kvist_from_lists": lists, "vllm": theirs}, indent=1))


if __name__ == "__main__":
    main()
