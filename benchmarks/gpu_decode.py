"""One token a sequence on a GPU: the kernels over stored formats, against copying memory and PyTorch's attention.

    python benchmarks/gpu_decode.py [--memory 8GiB] [--context 8192] [--formats int8/int4,bf16/bf16]

A cache of one layer of Llama-3-8B's heads (8 of 128, 4 queries each) is filled to its last block with random bytes of
small scales, and as many sequences as it holds attend at once. A line a format: time, bytes of keys and values read a
second, and that as a share of what a copy of the same memory reads and writes a second. Then PyTorch's attention in
bf16 over dense tensors of as many of the tokens as fit beside it, its time scaled to all of them.

Has not been run on a GPU yet. Without one it runs in Triton's interpreter (``TRITON_INTERPRET=1``), which tells
nothing of speed but that the script works: ``--memory 1MiB --context 40``.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.kernels.dense import Scores
from kvist.kernels.spans import Span
from kvist.kernels.triton import TritonAttention
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.units import format_size, parse_size

HEADS, REPEATS, DIM, BLOCK = 8, 4, 128, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median of some runs behind one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def copy_rate(memory: int, repeats: int) -> float:
    """Bytes a second that a copy inside this much memory reads and writes."""
    source = torch.ones(memory // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return memory / seconds(lambda: target.copy_(source), repeats)


def stored(fmt: CacheFormat, memory: int, context: int, repeats: int) -> tuple[float, int, int]:
    """Seconds of a step, bytes it reads, and sequences of it."""
    layer = Attention(kv_heads=HEADS, key_dim=DIM, value_dim=DIM)
    group = Group(name="full", layer=layer, layers=(0,), block_tokens=BLOCK, format=fmt)
    layout = ArenaLayout.of([group], memory)
    # Every two bytes are 0x11xx: codes of all kinds, and f16 and bf16 that are small.
    arena = torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8, device=DEVICE)
    arena[1::2] = 0x11
    each = -(-context // BLOCK)
    sequences = max(1, layout.total_blocks(0) // each)
    ids = np.random.default_rng(0).permutation(layout.total_blocks(0))[: sequences * each].reshape(sequences, each)
    memory_of = TritonAttention(arena, group, layout, 0, Scores(scale=DIM**-0.5), REPEATS)
    plan = memory_of.plan([Span(table=table, start=context - 1, count=1) for table in ids])
    q = torch.randn(sequences, REPEATS, HEADS, DIM, device=DEVICE).to(torch.bfloat16)
    kv = torch.randn(sequences, 2 * HEADS, DIM, device=DEVICE).to(torch.bfloat16)
    took = seconds(lambda: plan.attend(0, q, kv), repeats)
    return took, sequences * context * group.token_bytes, sequences


def dense(context: int, sequences: int, memory: int, repeats: int) -> float:
    """Seconds of PyTorch's attention in bf16, for all sequences."""
    fit = max(1, min(sequences, memory // (2 * context * HEADS * DIM * 2)))
    keys, values = (torch.randn(fit, HEADS, context, DIM, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(fit, HEADS * REPEATS, 1, DIM, device=DEVICE).to(torch.bfloat16)
    run = lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)  # noqa: E731
    return seconds(run, repeats) * sequences / fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--formats", default="int8/int4,int8/int8,fp8/fp8,int4a/int4a,bf16/bf16")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    memory = parse_size(given.memory)
    copied = copy_rate(memory, given.repeats)
    print(f"copy           {copied / 1e9:8.1f} GB/s read and written")
    for name in given.formats.split(","):
        key, value = name.split("/")
        took, size, sequences = stored(CacheFormat(key=key, value=value), memory, given.context, given.repeats)
        rate = size / took
        other = dense(given.context, sequences, memory, given.repeats)
        print(
            f"{name:14} {rate / 1e9:8.1f} GB/s, {rate / copied:.0%} of a copy; {sequences} sequences, "
            f"{format_size(size)} in {took * 1e3:.3f} ms; PyTorch in bf16 {other * 1e3:.3f} ms, {other / took:.2f}x"
        )


if __name__ == "__main__":
    main()
