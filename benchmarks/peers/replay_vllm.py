"""Replay a block-id request trace through vLLM's KV-cache manager and time its calls.

Run by an interpreter that has vLLM (see `setup.sh`). The replay makes the calls that vLLM's scheduler makes
for a request whose whole prompt is computed in one step, and no others: hash the prompt's blocks,
`get_computed_blocks`, `allocate_slots`, later `free`. Building the token lists is not timed; building the
`Request` objects is, but stays out of the rates.

Prints one JSON line; `--hits FILE` keeps the hit tokens of each request, in trace order, for an exact
comparison.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TRACE_BLOCK = 512  # tokens behind one id of the trace


def prompts(trace: Path, limit: int) -> Iterator[list[int]]:
    """Token ids of the first `limit` requests: equal trace ids give equal tokens, others different ones."""
    with gzip.open(trace, "rt") as lines:
        for index, line in enumerate(lines):
            if index == limit:
                return
            row = json.loads(line)
            tokens = [
                (block * TRACE_BLOCK + offset) % 2**31 for block in row["hash_ids"] for offset in range(TRACE_BLOCK)
            ]
            yield tokens[: row["input_length"]]


def make_manager(blocks: int, block_tokens: int, max_model_len: int) -> Any:
    """vLLM's manager over one full-attention group of `blocks` usable blocks, all optional recording off."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks + 1,  # vLLM sets one aside as its null block
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
    )
    return KVCacheManager(
        kv_cache_config=config,
        max_model_len=max_model_len,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
        enable_caching=True,
        log_stats=False,
    )


def replay(args: argparse.Namespace, hash_name: str) -> tuple[dict[str, Any], list[int]]:
    """One replay on a fresh manager: the figures, and the hit tokens of each request."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(hash_name)
    hash_function(())  # raises where the optional package is missing
    init_none_hash(hash_function)
    hash_blocks = get_request_block_hasher(args.block_tokens, hash_function)
    manager = make_manager(args.pool_tokens // args.block_tokens, args.block_tokens, args.max_model_len)
    sampling = SamplingParams(max_tokens=1)

    seconds = dict.fromkeys(("construct", "hash", "lookup", "allocate", "free"), 0.0)
    cpu_seconds = dict(seconds)  # the same on this thread's CPU clock, which other processes do not disturb
    alive: deque[Request] = deque()
    hits: list[int] = []
    prompt_tokens = forced = 0

    def timed(name: str, call: Any, *arguments: Any) -> Any:
        start, cpu_start = perf_counter(), thread_time()
        result = call(*arguments)
        cpu_seconds[name] += thread_time() - cpu_start
        seconds[name] += perf_counter() - start
        return result

    gc.collect()
    gc.freeze()  # as vLLM's engine does after start-up
    for index, tokens in enumerate(prompts(args.trace, args.requests)):
        if len(alive) == args.alive:
            timed("free", manager.free, alive.popleft())
        request = timed("construct", Request, str(index), tokens, sampling, None)
        request.block_hashes = timed("hash", hash_blocks, request)
        while True:
            found, hit, _ = timed("lookup", manager.get_computed_blocks, request)
            slots = timed("allocate", manager.allocate_slots, request, len(tokens) - hit, hit, found)
            if slots is not None:
                break
            if not alive:
                raise SystemExit(f"request {index} of {len(tokens)} tokens can never fit the pool")
            forced += 1
            timed("free", manager.free, alive.popleft())
        alive.append(request)
        hits.append(hit)
        prompt_tokens += len(tokens)
    gc.unfreeze()

    def rate(clock: dict[str, float], *names: str) -> float:
        return len(hits) / sum(clock[name] for name in names)

    calls = ("lookup", "allocate", "free")
    return {
        "hash": hash_name,
        "requests": len(hits),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": sum(hits),
        "freed_early": forced,
        "requests_per_s": rate(seconds, "hash", *calls),
        "requests_per_s_without_hashing": rate(seconds, *calls),
        "requests_per_cpu_s": rate(cpu_seconds, "hash", *calls),
        "requests_per_cpu_s_without_hashing": rate(cpu_seconds, *calls),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }, hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="gzipped JSON lines with input_length and hash_ids")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=3_000_000)
    parser.add_argument("--alive", type=int, default=32, help="requests that hold blocks at once")
    parser.add_argument("--max-model-len", type=int, default=1 << 20)
    parser.add_argument("--hash", nargs="+", default=["sha256", "xxhash"], help="vLLM's names; sha256 is its default")
    parser.add_argument("--hits", type=Path, help="write the hit tokens of each request here, as JSON")
    args = parser.parse_args()

    import vllm

    runs: list[dict[str, Any]] = []
    reference: list[int] | None = None
    for name in args.hash:
        try:
            run, hits = replay(args, name)
        except ModuleNotFoundError as error:
            print(f"skipping {name}: {error}", file=sys.stderr)
            continue
        if reference is not None and hits != reference:
            raise SystemExit(f"{name} found other hits than {args.hash[0]}")
        reference = hits
        runs.append(run)
    if args.hits and reference is not None:
        args.hits.write_text(json.dumps(reference))
    print(json.dumps({"engine": "vllm", "version": vllm.__version__, "runs": runs}))


if __name__ == "__main__":
    main()
