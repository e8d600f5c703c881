"""Made-up paged caches: sequences with random keys and values in a poisoned arena."""

from dataclasses import dataclass

import numpy as np
import torch

from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.kernels.reference import attend_paged
from kvist.kernels.spans import Span
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Latent
from kvist.store.codecs import PLAIN
from kvist.store.layouts import PagedKV, PagedLatents, PagedVectors, Scratch


def group_of(
    *,
    kv_heads=2,
    dim=16,
    window=None,
    chunk=None,
    layers=2,
    block_tokens=4,
    key="f32",
    value="f32",
    name="full",
    first_layer=0,
) -> Group:
    return Group(
        name=name,
        layer=Attention(kv_heads=kv_heads, key_dim=dim, value_dim=dim, window=window, chunk=chunk),
        layers=tuple(range(first_layer, first_layer + layers)),
        block_tokens=block_tokens,
        format=CacheFormat(key=key, value=value),
    )


def latent_group_of(*, rank=24, rope=8, layers=2, block_tokens=4, codec="f32") -> Group:
    return Group(
        name="latent",
        layer=Latent(rank=rank, rope_dim=rope),
        layers=tuple(range(layers)),
        block_tokens=block_tokens,
        format=CacheFormat(key=codec, value=codec),
    )


def poisoned_arena(layout: ArenaLayout, group: Group) -> torch.Tensor:
    """What no token has written holds large numbers, or, where the codecs differ or have scales, what reads as NaN."""
    arena = torch.empty(layout.total_bytes, dtype=torch.uint8)
    if group.format.key != group.format.value or group.format.key not in PLAIN:
        return arena.fill_(255)
    arena.view(PLAIN[group.format.key]).fill_(1e4)
    return arena


@dataclass
class Scene:
    """A cache of one group, with the sequences of a step in it."""

    group: Group
    layout: ArenaLayout
    arena: torch.Tensor
    store: PagedVectors
    spans: list[Span]

    def expected(
        self,
        slot: int,
        q: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The oracle's answer to ``[tokens, repeats, kv_heads, dim]``, read from the arena."""
        return attend_paged(
            self.arena, self.group, self.layout, 0, layer=slot, spans=self.spans, q=q, scale=scale, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip


def make_scene(
    group: Group, parts: list[tuple[int, int]], *, seed: int = 0, shared: list[tuple[int, int]] | None = None
) -> Scene:
    """Lay sequences out.

    Args:
        parts: ``(start, count)`` a sequence.
        shared: ``(leader, blocks)`` a sequence: its first blocks are those of an earlier one; ``(i, 0)`` for none.
    """
    rng = np.random.default_rng(seed)
    size = group.block_tokens
    needed = [-(-(start + count) // size) for start, count in parts]
    layout = ArenaLayout.of([group], (sum(needed) + 5) * group.block_bytes * 2)
    arena = poisoned_arena(layout, group)
    kind = PagedLatents if isinstance(group.layer, Latent) else PagedKV
    store = kind(arena, group, layout, 0, Scratch())
    free = rng.permutation(layout.total_blocks(0)).tolist()
    spans: list[Span] = []
    whole: list[np.ndarray] = []
    generator = torch.Generator().manual_seed(seed)
    for index, (start, count) in enumerate(parts):
        leader, blocks = shared[index] if shared else (index, 0)
        table = np.array([free.pop() for _ in range(needed[index])], np.int64)
        blocks = min(blocks, start // size)
        if leader < index:
            blocks = min(blocks, spans[leader].start // size)
            table[:blocks] = whole[leader][:blocks]
        else:
            blocks = 0
        dead = group.first_live_block(start)
        past = np.arange(blocks * size, start)
        where = store.vectors(table[past // size], past % size)
        for layer in range(len(group.layers)):
            # What it stores elsewhere than the oracle reads, that finds poison there.
            heads = sum(part.heads for part in store.parts)
            store.append(layer, torch.randn(past.size, heads, store.dim, generator=generator), where)
        whole.append(table.copy())
        if group.gives_back:
            table[:dead] = -1
        spans.append(Span(table=table, start=start, count=count))
    return Scene(group, layout, arena, store, spans)
