"""Runs in kvcache-simulator's environment: hits of a trace's last half under LRU, for some cache sizes.

Standard input is JSON: the trace's path, sizes of the cache in blocks, a model's id, its bytes per block, and the back
end, ``cpp`` or ``python``. Prints ``{"hit_ratios": [...], "seconds": total}``. The seconds leave out reading the file,
compiling and process start: a first sweep over one size warms up.
"""

import json
import sys
from time import perf_counter

from kvcache_sim.simulator import run_sweep
from kvcache_sim.trace import parse_trace_file

job = json.load(sys.stdin)
trace = parse_trace_file(job["trace"], block_size=512)


def sweep(sizes: list[int]) -> list[float]:
    budgets = [(size + 0.5) * job["bytes_per_block"] / 2**30 for size in sizes]
    found = run_sweep(
        trace, model_id=job["model"], budgets_gib=budgets, policies=["lru"], backend=job["backend"], jobs=1
    )
    ratios = {point["cacheBlocks"]: point["results"]["lru"]["hitRate"] for point in found["points"]}
    return [ratios[size] for size in sizes]


sweep(job["blocks"][:1])
started = perf_counter()
ratios = sweep(job["blocks"])
print(json.dumps({"hit_ratios": ratios, "seconds": perf_counter() - started, "requests": trace.request_count}))
