"""Attention over latents (MLA) in the space of latents, against expanding the latents in every step.

    python benchmarks/latent_decode.py [--heads 16] [--context 4096]

One layer with DeepSeek-V3's widths of a head. "absorbed" is what the engine runs: it stores the step's latents in the
paged arena and attends to them there. "expanded" is what there is without it: latents in one dense tensor a batch (no
gathering of blocks), of which keys and values of every head are made in each step by one product, then PyTorch's own
attention over them. Both begin with projected, rotated queries and end with the heads' values; both alternate, and
walk over several layers' memory, as a step does. The second table is a chunk of a prompt behind that context, by both
ways of the engine: where the expanded one begins to win is where the plan goes over to it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.kernels import latent
from kvist.kernels.attention import new_vectors
from kvist.kernels.dense import Scores
from kvist.kernels.latent import LatentHeads, LatentMemory, LatentPlan
from kvist.kernels.spans import Span
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Latent
from kvist.store.layouts import PagedLatents, Scratch

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
LAYERS = 4
BLOCK = 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Case:
    """One layer's inputs, for both."""

    plan: LatentPlan
    dense: list[Tensor]
    nope: Tensor
    rope: Tensor
    new: Tensor
    heads: LatentHeads

    def absorbed(self, slot: int) -> Tensor:
        """``[tokens, heads x value]``."""
        return self.plan.attend(slot, self.nope, self.rope, self.new, self.heads)

    def expanded(self, slot: int) -> Tensor:
        """The same from dense latents, ``[sequences, context + 1, rank + rope]``."""
        stored, heads = self.dense[slot], self.heads
        stored[:, -1] = self.new[:, 0]
        made = F.linear(stored[..., :RANK].contiguous(), heads.rows).unflatten(-1, (heads.heads, VALUE + NOPE))
        # One buffer of which keys and values are views, values as wide as keys: PyTorch's fast kernel wants both so.
        both = torch.empty(*made.shape[:3], VALUE + NOPE + ROPE, dtype=made.dtype)
        both[..., : VALUE + NOPE] = made
        both[..., VALUE + NOPE :] = stored[:, :, None, RANK:]
        keys, values = both[..., VALUE:].transpose(1, 2), both[..., : NOPE + ROPE].transpose(1, 2)
        queries = torch.cat((self.nope, self.rope), dim=-1)[:, :, None]
        return F.scaled_dot_product_attention(queries, keys, values, scale=SCALE)[..., :VALUE].flatten(1)


def case_of(dtype: str, sequences: int, context: int, heads: int, new_tokens: int = 1) -> Case:
    """Sequences of ``context`` tokens with as many new ones each."""
    group = Group(
        name="latent",
        layer=Latent(rank=RANK, rope_dim=ROPE),
        layers=tuple(range(LAYERS)),
        block_tokens=BLOCK,
        format=CacheFormat(key=dtype, value=dtype),
    )
    blocks = -(-(context + new_tokens) // BLOCK)
    layout = ArenaLayout.of([group], (sequences * blocks + 8) * group.block_bytes)
    kind = DTYPES[dtype]
    arena = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    store = PagedLatents(arena, group, layout, 0, Scratch())
    order = np.random.default_rng(1).permutation(layout.total_blocks(0))
    spans = [
        Span(table=order[number * blocks : (number + 1) * blocks].astype(np.int64), start=context, count=new_tokens)
        for number in range(sequences)
    ]
    dense = [torch.randn(sequences, context + 1, RANK + ROPE).to(kind) for _ in range(LAYERS)]
    before = [Span(table=span.table, start=0, count=context) for span in spans]
    for slot, stored in enumerate(dense):
        store.append(slot, stored[:, :context].flatten(0, 1)[:, None], new_vectors(store, before))
    rows = sequences * new_tokens
    return Case(
        plan=LatentMemory(store, Scores(scale=SCALE), kind).plan(spans),
        dense=dense,
        nope=torch.randn(rows, heads, NOPE).to(kind),
        rope=torch.randn(rows, heads, ROPE).to(kind),
        new=torch.randn(rows, 1, RANK + ROPE).to(kind),
        heads=LatentHeads((torch.randn(heads, VALUE + NOPE, RANK) / RANK**0.5).to(kind), value=VALUE, rope=ROPE),
    )


def milliseconds(ways: dict[str, Callable[[int], Tensor]], seconds: float) -> dict[str, float]:
    """Median of each, alternating."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    slots = cycle(range(LAYERS))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(spent[next(iter(ways))]) < 5:
        for name, way in ways.items():
            slot = next(slots)
            began = time.perf_counter()
            way(slot)
            spent[name].append((time.perf_counter() - began) * 1e3)
        next(slots)
    return {name: statistics.median(times) for name, times in spent.items()}


def decodes(args: argparse.Namespace) -> None:
    """The first table."""
    print("| type | sequences | absorbed ms | expanded ms | times as fast | memory, times as small |")
    print("|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for sequences in (1, 8):
            case = case_of(dtype, sequences, args.context, args.heads)
            one, other = case.absorbed(0), case.expanded(0)
            assert (one - other).abs().max() < (0.05 if dtype == "bf16" else 1e-4)
            found = milliseconds({"absorbed": case.absorbed, "expanded": case.expanded}, args.seconds)
            ratio = args.heads * (NOPE + ROPE + VALUE) / (RANK + ROPE)
            print(
                f"| {dtype} | {sequences} | {found['absorbed']:.2f} | {found['expanded']:.2f} "
                f"| {found['expanded'] / found['absorbed']:.1f} | {ratio:.1f} |",
                flush=True,
            )


def chunks(args: argparse.Namespace) -> None:
    """The second table."""
    print("\n| type | new tokens | absorbed ms | expanded ms |")
    print("|---|---|---|---|")
    for dtype in DTYPES:
        for tokens in (32, 64, 96, 128, 192, 256):
            ways: dict[str, Callable[[int], Tensor]] = {}
            for name in ("absorbed", "expanded"):
                latent.expands = partial(lambda expanded, span: expanded, name == "expanded")
                ways[name] = case_of(dtype, 1, args.context, args.heads, tokens).absorbed
                ways[name](0)
            found = milliseconds(ways, args.seconds)
            print(f"| {dtype} | {tokens} | {found['absorbed']:.1f} | {found['expanded']:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row")
    parser.add_argument("--chunks", action="store_true", help="the second table too")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        decodes(args)
        if args.chunks:
            chunks(args)


if __name__ == "__main__":
    main()
