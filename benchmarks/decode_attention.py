"""Decode attention over a long context: the C++ kernels on stored formats against PyTorch's own on contiguous bf16.

    python benchmarks/decode_attention.py [--context 8192] [--rounds 7]

One token a sequence, the head shapes of SmolLM2-135M and Llama-3-8B, 1 and 16 sequences. kvist reads blocks of 16
tokens that lie in random order in one arena, and stores the step's keys and values too; PyTorch's
``scaled_dot_product_attention`` gets keys and values ``[sequences, kv heads, tokens, dim]`` that lie one after
another, with ``enable_gqa`` or with the queries of a KV head as its rows, whichever is faster. There are as many layers
as it takes to read more than any cache holds, so that every call reads from memory. All take turns.

*GB/s* are stored bytes of keys and values over time; *of a read* is its share of what a plain read of as many
bytes reaches in the same round. Two shares tell which of the machine's units binds. *Arithmetic* is what the same call
takes in the same round where all block tables name a few blocks, which the nearest caches hold: the same instructions,
and nothing to wait for. Where it is near 100 %, memory is not what holds the kernel up. *Of a product* is the share of
multiply-adds a second that PyTorch's product of two square matrices reaches there, in the type that the kernels
multiply in; widening what is stored and the softmax, the rest of their arithmetic, are not counted.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.engine.machine import zeros
from kvist.kernels.cpu import attention_kernels
from kvist.kernels.dense import Scores
from kvist.kernels.paged import PagedAttention
from kvist.kernels.portable import PortableAttention
from kvist.kernels.spans import Span
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.store.layouts import PagedKV, Scratch

SHAPES = {"SmolLM2-135M": (3, 3, 64), "Llama-3-8B": (8, 4, 128)}
FORMATS = (("bf16", "bf16"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
LEAST_BYTES = 192 * 2**20
NEAR_BYTES = 256 * 2**10
BLOCK = 16


@dataclass
class Work:
    """Something that is timed.

    Attributes:
        name: of the row.
        run: attends once in every layer.
        stored: bytes of keys and values that it reads, or multiply-adds of a product.
        seconds: of each round.
        near: the same arithmetic on what the nearest caches hold.
    """

    name: str
    run: Callable[[], None]
    stored: int
    seconds: list[float]
    near: "Work | None" = None


def ours(shape: tuple[int, int, int], sequences: int, context: int, fmt: tuple[str, str], layers: int) -> Work:
    kv_heads, repeats, dim = shape
    group = Group(
        name="full",
        layer=Attention(kv_heads=kv_heads, key_dim=dim, value_dim=dim),
        layers=tuple(range(layers)),
        block_tokens=BLOCK,
        format=CacheFormat(key=fmt[0], value=fmt[1]),
    )
    blocks = sequences * -(-context // BLOCK)
    layout = ArenaLayout.of([group], (blocks + 16) * group.block_bytes)
    kernels = attention_kernels(torch.bfloat16)
    assert kernels is not None, "no C++ kernels here"
    store = PagedKV(zeros(layout.total_bytes), group, layout, 0, Scratch())
    attention = PortableAttention if kernels.name == "portable" else PagedAttention
    memory = attention(kernels, store, Scores(scale=dim**-0.5), repeats)
    ids = np.random.default_rng(0).permutation(layout.total_blocks(0))[:blocks].reshape(sequences, -1)
    fill(memory, ids, context - 1, layers, kv_heads, repeats, dim)
    # Sequences begin with a block of their own, as tables that begin alike would be read once for all, and end with
    # one, to which they append; the blocks between, where there are any, are the near ones.
    near, between = ids.copy(), ids[:, 1:-1]
    if between.size:
        nearest = between[0, : max(1, NEAR_BYTES // (group.block_bytes // layers))]
        near[:, 1:-1] = np.random.default_rng(1).choice(nearest, between.shape)
    q = torch.randn(sequences, repeats, kv_heads, dim).bfloat16()
    kv = torch.randn(sequences, 2 * kv_heads, dim).bfloat16()

    def attend(tables: np.ndarray, slots: Sequence[int]) -> Callable[[], None]:
        plan = memory.plan([Span(table=table, start=context - 1, count=1) for table in tables])

        def run() -> None:
            for slot in slots:
                plan.attend(slot, q, kv)

        return run

    stored = sequences * context * kv_heads * sum(group.head_run_bytes) // BLOCK * layers
    name = f"kvist {fmt[0]}/{fmt[1]}"
    return Work(name, attend(ids, range(layers)), stored, [], Work(name, attend(near, [0] * layers), stored, []))


def fill(
    memory: PagedAttention, ids: np.ndarray, tokens: int, layers: int, kv_heads: int, repeats: int, dim: int
) -> None:
    """Store random keys and values as the engine does, in chunks."""
    step = 512
    for begin in range(0, tokens, step):
        count = min(step, tokens - begin)
        kv = torch.randn(count, 2 * kv_heads, dim).bfloat16()
        for table in ids:
            # A span that begins where it ends sees nothing of the past, which would take time.
            plan = memory.plan([Span(table=table[begin // BLOCK :], start=0, count=count)])
            q = torch.zeros(count, repeats, kv_heads, dim, dtype=torch.bfloat16)
            for slot in range(layers):
                plan.attend(slot, q, kv)


def theirs(shape: tuple[int, int, int], sequences: int, context: int, layers: int, *, grouped: bool) -> Work:
    kv_heads, repeats, dim = shape
    sides = [torch.randn(sequences, kv_heads, context, dim).bfloat16() for _ in range(2 * layers)]
    if grouped:
        q = torch.randn(sequences, kv_heads, repeats, dim).bfloat16()
    else:
        q = torch.randn(sequences, kv_heads * repeats, 1, dim).bfloat16()

    def run() -> None:
        for layer in range(layers):
            scaled_dot_product_attention(q, sides[2 * layer], sides[2 * layer + 1], enable_gqa=not grouped)

    stored = sum(side.numel() * 2 for side in sides)
    return Work(f"PyTorch bf16, {'queries as rows' if grouped else 'enable_gqa'}", run, stored, [])


def reading(size: int) -> Work:
    memory = torch.ones(size // 4)
    parts = memory.split(2**22)
    return Work("read", lambda: [torch.sum(part) for part in parts] and None, memory.numel() * 4, [])


def multiplying(dtype: torch.dtype) -> Work:
    size = 2048
    one, other = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return Work("product", lambda: torch.mm(one, other, out=out) is None, size**3, [])


def rows(name: str, sequences: int, context: int, rounds: int) -> Iterator[str]:
    shape = SHAPES[name]
    kv_heads, repeats, dim = shape
    compressed = sequences * context * kv_heads * dim * 52 // 32
    layers = max(1, -(-LEAST_BYTES // compressed))
    works = [ours(shape, sequences, context, fmt, layers) for fmt in FORMATS]
    works += [theirs(shape, sequences, context, layers, grouped=grouped) for grouped in (False, True)]
    works.append(reading(256 * 2**20))
    kernels = attention_kernels(torch.bfloat16)
    assert kernels is not None
    works.append(multiplying(torch.float32 if kernels.name == "portable" else torch.bfloat16))
    timed = [part for work in works for part in (work, work.near) if part is not None]
    for work in timed:
        work.run()
    for _ in range(rounds):
        for work in timed:
            started = time.perf_counter()
            work.run()
            work.seconds.append(time.perf_counter() - started)
    *compared, plain, product = works
    machine, unit = (work.stored / statistics.median(work.seconds) for work in (plain, product))
    best = min(statistics.median(work.seconds) for work in compared[-2:])
    for work in compared:
        seconds = statistics.median(work.seconds)
        speed = work.stored / seconds
        heads = sequences * context * kv_heads * layers
        near = "" if work.near is None else f"{statistics.median(work.near.seconds) / seconds:.0%}"
        yield (
            f"| {name} | {sequences} | {work.name} | {seconds / layers * 1e3:.3f} | {seconds / heads * 1e9:.2f} | "
            f"{speed / 1e9:.2f} | {speed / machine:.0%} | {near} | {heads * 2 * repeats * dim / seconds / unit:.0%} | "
            f"{best / seconds:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8192, help="tokens that are attended to")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    for option, least in (("context", args.context), ("rounds", args.rounds), ("sequences", min(args.sequences))):
        if least < 1:
            parser.error(f"--{option}: {least} is less than 1")
    torch.manual_seed(0)
    print(f"{args.context:,} tokens, {torch.get_num_threads()} threads, medians of {args.rounds} rounds\n")
    print(
        "| heads of | sequences | format | ms a layer | ns a token and KV head | GB/s | of a read | arithmetic | "
        "of a product | x PyTorch |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for name in args.shape:
            for sequences in args.sequences:
                for row in rows(name, sequences, args.context, args.rounds):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
