"""The GPU's kernels under Triton's interpreter: bytes against the codecs, attention against float64.

On a machine with a GPU, ``TRITON_INTERPRET=0`` runs the same tests on it.
"""

import os
import zlib
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from fixtures_attention import group_of, latent_group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.errors import InputError
from kvist.kernels import triton_steps
from kvist.kernels.dense import Scores
from kvist.kernels.latent import LatentHeads, LatentMemory
from kvist.kernels.reference import attend
from kvist.kernels.sharing import shared_runs
from kvist.kernels.spans import Span
from kvist.store.codecs import STORED, Coding
from kvist.store.layouts import PagedLatents, Scratch

pytest.importorskip("triton", reason="no Triton here: pip install 'kvist[gpu]'")
from kvist.kernels.triton import TritonAttention, TritonLatents
from kvist.kernels.triton_blocks import copy_blocks, gather_blocks, scatter_blocks

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Each type of computing with what it may differ by, over the largest result: dequantised numbers, weights and results
# are rounded to it once each.
WITHIN = {"f32": 2e-5, "bf16": 0.012, "f16": 0.002}
# Every codec once as key and once as value, the pair of 8 and 4 bits among them.
PAIRS = [(key, STORED[(place + 1) % len(STORED)]) for place, key in enumerate(STORED)]
SHAPES = {"64 x 3:1": (64, 3, 2), "128 x 4:1": (128, 4, 1), "256 x 4:1": (256, 4, 1)}
WINDOWS = [None, 20, 90]
# One token alone, one behind a block's beginning, a long context, and a chunk of a prompt behind a torn block.
RAGGED = [(0, 1), (36, 1), (129, 1), (31, 22)]


@pytest.fixture
def generator(request):
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch):
    """What kernels do not write is no number."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return (
            made.fill_(float("nan"))
            if made.is_floating_point()
            else made.fill_(255 if made.dtype == torch.uint8 else 0)
        )

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass
class Scene:
    """A cache of one group with the pasts of some sequences in it; all else in it is no number."""

    group: Group
    layout: ArenaLayout
    arena: torch.Tensor
    spans: list[Span]

    @property
    def codings(self):
        layer, fmt = self.group.attention, self.group.format
        return [
            Coding(codec, side=side, dim=layer.key_dim, tokens=self.group.block_tokens)
            for side, codec in (("key", fmt.key), ("value", fmt.value))
        ]

    def runs(self, arena, layer, side, table):
        """One side's runs of a sequence's blocks: uint8 ``[blocks, heads, run bytes]``, where they lie."""
        heads = self.group.attention.kv_heads
        sizes = [coding.run_bytes for coding in self.codings]
        begin = layer * heads * sum(sizes) + side * heads * sizes[0]
        per_slab = self.layout.blocks_per_slab[0]
        return [
            arena[at + begin : at + begin + heads * sizes[side]].view(heads, sizes[side])
            for at in (
                int(block) // per_slab * self.layout.slab_bytes + int(block) % per_slab * self.group.block_bytes
                for block in table
            )
        ]

    def write(self, arena, layer, side, table, start, vectors):
        """Store ``[tokens, heads, dim]`` from a position on."""
        coding, size = self.codings[side], self.group.block_tokens
        for place, block in enumerate(table):
            first, end = max(start, place * size), min(start + len(vectors), (place + 1) * size)
            if first >= end:
                continue
            (runs,) = self.runs(arena, layer, side, [block])
            coded = coding.quantise(vectors[first - start : end - start].transpose(0, 1))
            for piece, rows in zip(coding.pieces, coded, strict=True):
                piece.rows(runs, size)[:, first - place * size : end - place * size] = rows

    def read(self, arena, layer, side, table, length):
        """``[heads, length, dim]`` float64; zeros of blocks that are gone."""
        coding, size = self.codings[side], self.group.block_tokens
        heads = self.group.attention.kv_heads
        found = torch.zeros(heads, len(table), size, coding.dim, dtype=torch.float64)
        for place, block in enumerate(table):
            if block >= 0:
                (runs,) = self.runs(arena, layer, side, [block])
                found[:, place] = coding.unpack(runs, torch.zeros(heads, size, coding.dim)).double()
        return found.flatten(1, 2)[:, :length]


def scene_of(group, parts, generator, *, shared=0, dtype=torch.float32):
    """Lay sequences out; all begin with the same ``shared`` blocks."""
    size = group.block_tokens
    needed = [-(-(start + count) // size) for start, count in parts]
    layout = ArenaLayout.of([group], (sum(needed) + 5) * group.block_bytes * 2)
    arena = torch.full((layout.total_bytes,), 255, dtype=torch.uint8)
    free = torch.randperm(layout.total_blocks(0), generator=generator).tolist()
    spans = []
    scene = Scene(group, layout, arena, spans)
    common = [free.pop() for _ in range(shared)]
    for start, count in parts:
        blocks = -(-(start + count) // size)
        table = np.array([*common[:blocks], *(free.pop() for _ in range(blocks - shared))], np.int64)
        for layer in range(len(group.layers)):
            for side in (0, 1):
                past = torch.randn(start, group.attention.kv_heads, group.attention.key_dim, generator=generator)
                scene.write(arena, layer, side, table, 0, past.to(dtype))
        if group.gives_back:
            table[: group.first_live_block(start)] = -1
        spans.append(Span(table=table, start=start, count=count))
    return scene


def check(scene, generator, *, repeats, compute="f32", softcap=None, sinks=False, programs=None):
    """Run every layer; hold its bytes and its results against the oracles."""
    group, dtype = scene.group, DTYPES[compute]
    layer = group.attention
    tokens = sum(span.count for span in scene.spans)
    scores = Scores(scale=layer.key_dim**-0.5, softcap=softcap)
    arena = scene.arena.clone().to(DEVICE)
    memory = TritonAttention(arena, group, scene.layout, 0, scores, repeats, programs=programs)
    plan = memory.plan(scene.spans)
    for slot in range(len(group.layers)):
        # Wider than what attention gets: tokens have a stride of their own.
        made = torch.randn(tokens, (repeats + 2) * layer.kv_heads + 1, layer.key_dim, generator=generator).to(dtype)
        q = made[:, : repeats * layer.kv_heads].unflatten(1, (repeats, layer.kv_heads))
        kv = made[:, repeats * layer.kv_heads : -1]
        sink = torch.randn(repeats, layer.kv_heads, generator=generator) if sinks else None
        row = 0
        for span in scene.spans:
            for side in (0, 1):
                new = kv[row : row + span.count, side * layer.kv_heads : (side + 1) * layer.kv_heads]
                scene.write(scene.arena, slot, side, span.table, span.start, new)
            row += span.count
        out = plan.attend(slot, q.to(DEVICE), kv.to(DEVICE), None if sink is None else sink.to(DEVICE)).cpu()
        assert torch.equal(arena.cpu(), scene.arena), "bytes that were stored"
        assert out.dtype == dtype
        assert out.shape == (tokens, repeats * layer.kv_heads * layer.key_dim)
        expected, row = [], 0
        for span in scene.spans:
            keys, values = (scene.read(scene.arena, slot, side, span.table, span.start + span.count) for side in (0, 1))
            heads = q[row : row + span.count].double().transpose(1, 2).flatten(1, 2)
            right = attend(
                heads, keys, values, start=span.start, scale=scores.scale, window=layer.window, chunk=layer.chunk,
                softcap=softcap, sinks=None if sink is None else sink.double().t().flatten(),
            )  # fmt: skip
            expected.append(right.unflatten(1, (layer.kv_heads, -1)).transpose(1, 2).flatten(1))
            row += span.count
        right = torch.cat(expected)
        assert (out.double() - right).abs().max() < WITHIN[compute] * max(1, right.abs().max())


def every_format_shape_and_window():
    """All of them; quick ones are such that every two of a format, a shape and a window come together."""
    for number, (key, value) in enumerate(product(STORED, STORED)):
        for (place, shape), (other, window) in product(enumerate(SHAPES), enumerate(WINDOWS)):
            quick = (key, value) in PAIRS and (number + place + other) % 3 == 0
            marks = () if quick else (pytest.mark.slow,)
            yield pytest.param(key, value, shape, window, marks=marks, id=f"{key}/{value}, {shape}, {window}")


@pytest.mark.parametrize(("key", "value", "shape", "window"), list(every_format_shape_and_window()))
def test_any_format_shape_and_window(key, value, shape, window, generator):
    dim, repeats, heads = SHAPES[shape]
    group = group_of(key=key, value=value, dim=dim, kv_heads=heads, window=window, block_tokens=16, layers=1)
    check(scene_of(group, RAGGED, generator), generator, repeats=repeats)


@pytest.mark.parametrize(
    ("compute", "key", "value"),
    [("bf16", "bf16", "bf16"), ("bf16", "int8", "int4"), ("bf16", "int4a", "fp8"), ("f16", "f16", "int8")],
)
def test_types_of_computing(compute, key, value, generator):
    group = group_of(key=key, value=value, dim=64, kv_heads=2, block_tokens=16, layers=2)
    scene = scene_of(group, [(40, 1), (3, 15)], generator, dtype=DTYPES[compute])
    check(scene, generator, repeats=3, compute=compute)


def test_caps_and_sinks(generator):
    group = group_of(key="int8", value="int4", dim=64, kv_heads=2, window=40, block_tokens=16, layers=1)
    check(scene_of(group, RAGGED, generator), generator, repeats=3, softcap=2.0, sinks=True)
    group = group_of(key="f32", value="f32", dim=64, kv_heads=2, block_tokens=16, layers=1)
    check(scene_of(group, RAGGED, generator), generator, repeats=1, sinks=True)


@pytest.mark.parametrize(("dim", "block_tokens", "repeats"), [(96, 48, 17), (32, 8, 5), (80, 16, 1)])
def test_other_widths_and_blocks(dim, block_tokens, repeats, generator):
    codecs = ("int4", "int8") if dim % 32 == 0 else ("bf16", "fp8")
    group = group_of(key=codecs[0], value=codecs[1], dim=dim, kv_heads=1, block_tokens=block_tokens, layers=1)
    check(scene_of(group, [(0, 1), (70, 3)], generator), generator, repeats=repeats)


def test_chunks_of_attention(generator):
    group = group_of(key="int8", value="int4", dim=64, kv_heads=1, chunk=32, block_tokens=16, layers=1)
    check(scene_of(group, [(64, 1), (20, 30), (95, 1)], generator), generator, repeats=3)


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("codec", STORED)
def test_what_is_no_number_leaves_none(codec, where, generator):
    group = group_of(key=codec, value=codec, dim=64, kv_heads=2, block_tokens=16, layers=1)
    scene = scene_of(group, [(20, 2), (3, 1)], generator)
    arena = scene.arena.to(DEVICE)
    plan = TritonAttention(arena, group, scene.layout, 0, Scores(scale=0.125, softcap=5.0), 3).plan(scene.spans)
    q, kv = torch.randn(3, 3, 2, 64, generator=generator), torch.randn(3, 4, 64, generator=generator)
    if where == "query":
        q[0, :, 1, 3] = torch.nan
    else:
        kv[0, 1 if where == "key" else 3, 3] = torch.nan
    out = plan.attend(0, q.to(DEVICE), kv.to(DEVICE), None).cpu().view(3, 3, 2, 64)
    assert out[0, :, 1, 3].isnan().all()
    assert where == "query" or out[1, :, 1, 3].isnan().all()
    assert out[:, :, 0].isfinite().all()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_are_cut_and_merged(window, generator):
    group = group_of(key="int8", value="int4", dim=64, kv_heads=1, window=window, block_tokens=16, layers=1)
    scene = scene_of(group, [(999, 1), (40, 1)], generator)
    check(scene, generator, repeats=3, programs=8, sinks=True)


def test_contexts_that_begin_alike_are_attended_once(generator, monkeypatch):
    monkeypatch.setattr(triton_steps, "_LEAST_KEYS", 64)
    group = group_of(key="int4a", value="int4a", dim=64, kv_heads=1, block_tokens=16, layers=1)
    scene = scene_of(group, [(90, 1), (95, 1), (81, 9), (160, 1), (85, 1)], generator, shared=5)
    tables = [span.table for span in scene.spans]
    assert shared_runs(tables, [span.start // 16 for span in scene.spans])
    check(scene, generator, repeats=3)
    check(scene, generator, repeats=3, programs=100)


def test_what_cannot_be_computed_is_refused(generator):
    group = group_of(key="int8", value="int4", dim=512, kv_heads=1, block_tokens=16, layers=1)
    layout = ArenaLayout.of([group], 4 * group.block_bytes)
    arena = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    with pytest.raises(InputError, match="512 wide"):
        TritonAttention(arena, group, layout, 0, Scores(scale=1.0), 1)
    latents = latent_group_of(rank=64, rope=32, codec="int8")
    with pytest.raises(InputError, match="latents in int8; choose one of f32, f16, bf16, fp8"):
        TritonLatents(arena, latents, layout, 0, Scores(scale=1.0), 1)
    group = group_of(key="f32", value="f32", dim=64, kv_heads=1, block_tokens=16, layers=1)
    layout = ArenaLayout.of([group], 4 * group.block_bytes)
    plan = TritonAttention(arena, group, layout, 0, Scores(scale=1.0), 1).plan(
        [Span(table=np.zeros(1, np.int64), start=0, count=1)]
    )
    with pytest.raises(InputError, match="float64"):
        plan.attend(0, torch.zeros(1, 1, 1, 64, dtype=torch.float64), torch.zeros(1, 2, 64))


# -- latents --------------------------------------------------------------------------------------------------------


def latents_of(rows, rank, codec):
    """Vectors as they are read again, float64."""
    if codec != "fp8":
        return rows.to(DTYPES[codec]).double()
    latent = rows[..., :rank].float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat((latent.double(), rows[..., rank:].to(torch.bfloat16).double()), dim=-1)


@pytest.mark.parametrize(
    ("codec", "compute", "heads"),
    [("f32", "f32", 5), ("bf16", "bf16", 16), ("f16", "f32", 40), ("fp8", "f32", 16), ("fp8", "bf16", 3)],
)
def test_latents(codec, compute, heads, generator, monkeypatch):
    monkeypatch.setattr(triton_steps, "_LEAST_KEYS", 64)
    rank, rope, dtype = 96, 32, DTYPES[compute]
    group = latent_group_of(rank=rank, rope=rope, block_tokens=16, layers=2, codec=codec)
    parts = [(0, 1), (150, 1), (17, 3)]
    layout = ArenaLayout.of([group], 20 * group.block_bytes)
    arena = torch.full((layout.total_bytes,), 255, dtype=torch.uint8).to(DEVICE)
    free = torch.randperm(layout.total_blocks(0), generator=generator).tolist()
    tables = [np.array([free.pop() for _ in range(-(-(start + count) // 16))], np.int64) for start, count in parts]
    scores = Scores(scale=0.1)
    memory = TritonLatents(arena, group, layout, 0, scores, heads, programs=6)
    for slot in range(2):
        sequences = [
            torch.randn(start + count, 1, rank + rope, generator=generator).to(dtype) for start, count in parts
        ]
        # The pasts by the same verb, whose bytes other tests hold against the codecs.
        pasts = [
            (table, start, rows) for table, (start, _), rows in zip(tables, parts, sequences, strict=True) if start
        ]
        plan = memory.plan([Span(table=table, start=0, count=start) for table, start, _ in pasts])
        memory.append(slot, torch.cat([rows[:start] for _, start, rows in pasts]).to(DEVICE), plan)
        spans = [Span(table=t, start=start, count=count) for t, (start, count) in zip(tables, parts, strict=True)]
        q = torch.randn(sum(count for _, count in parts), heads, rank + rope, generator=generator).to(dtype)
        new = torch.cat([rows[start:] for rows, (start, _) in zip(sequences, parts, strict=True)])
        out = memory.plan(spans).over(slot, q.to(DEVICE), new.to(DEVICE)).cpu()
        row = 0
        for rows, (start, count) in zip(sequences, parts, strict=True):
            stored = latents_of(rows, rank, codec).transpose(0, 1)
            right = attend(q[row : row + count].double(), stored, stored[..., :rank], start=start, scale=0.1)
            difference = (out[row : row + count].double() - right).abs().max()
            assert difference < WITHIN[compute] * max(1, right.abs().max())
            row += count


@pytest.mark.parametrize("codec", ["f32", "bf16", "fp8"])
def test_latents_by_the_verb_of_layers(codec, generator):
    heads, nope, value, rank, rope = 4, 8, 12, 32, 16
    group = latent_group_of(rank=rank, rope=rope, block_tokens=16, layers=1, codec=codec)
    layout = ArenaLayout.of([group], 6 * group.block_bytes)
    spans = [Span(table=np.array([3, 1]), start=0, count=20), Span(table=np.array([2]), start=0, count=1)]
    weight = torch.randn(heads, value + nope, rank, generator=generator)
    inputs = [
        torch.randn(21, *shape, generator=generator) for shape in ((heads, nope), (heads, rope), (1, rank + rope))
    ]
    results, arenas = [], []
    for kind, extra in ((TritonLatents, (heads,)), (None, ())):
        arena = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        if kind is None:
            memory = LatentMemory(PagedLatents(arena, group, layout, 0, Scratch()), Scores(scale=0.2), torch.float32)
        else:
            memory = kind(arena, group, layout, 0, Scores(scale=0.2), *extra)
        arenas.append(arena)
        results.append(memory.plan(spans).attend(0, *inputs, LatentHeads(weight, value=value, rope=rope)))
    assert torch.equal(*arenas)
    assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].abs().max()


# -- bytes ----------------------------------------------------------------------------------------------------------


def awkward(generator, dtype):
    """Vectors that round in all ways: ties, both zeros, numbers below the smallest, scales too large for f16."""
    rows = torch.randn(48, 2, 64, generator=generator)
    rows[1] = 0.0
    rows[2] = -0.0
    rows[3] *= 1e-7
    rows[4] *= 1e-9
    rows[5] *= 1e8
    rows[6] = torch.randint(-8, 8, (2, 64), generator=generator).float()
    rows[7] = torch.randint(-16, 16, (2, 64), generator=generator) / 2
    rows[8] = torch.randint(-254, 255, (2, 64), generator=generator) / 2
    rows[9] = rows[9].sign() * 3
    rows[10] = 1000 + rows[10] / 1000
    rows[11] = torch.randint(-40, 40, (2, 64), generator=generator) / 1024
    rows[12:44] = 2.0 ** torch.randint(-12, 10, (32, 2, 64), generator=generator) * rows[12:44]
    return rows.to(dtype)


@pytest.mark.parametrize("codec", STORED)
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_bytes_of_awkward_numbers(codec, compute, generator):
    group = group_of(key=codec, value=codec, dim=64, kv_heads=1, block_tokens=16, layers=2)
    scene = scene_of(group, [(0, 48)], generator)
    kv = awkward(generator, DTYPES[compute])
    if codec == "f16":
        kv = kv.clamp(-6e4, 6e4)
    (span,) = scene.spans
    arena = scene.arena.clone().to(DEVICE)
    memory = TritonAttention(arena, group, scene.layout, 0, Scores(scale=1.0), 1)
    memory.append(1, kv.to(DEVICE), memory.plan(scene.spans))
    for side in (0, 1):
        scene.write(scene.arena, 1, side, span.table, 0, kv[:, side : side + 1])
    assert torch.equal(arena.cpu(), scene.arena)


@pytest.mark.parametrize("size", [9000, 4500, 26, 7])
def test_blocks_come_and_go(size, generator):
    arena = torch.randint(0, 256, (size * 9,), generator=generator, dtype=torch.uint8).to(DEVICE)
    rows = arena.view(9, size).clone()
    offsets = [size * 7, 0, size * 3]
    taken = gather_blocks(arena, offsets, size)
    assert torch.equal(taken, rows[[7, 0, 3]])
    scatter_blocks(arena, [size, size * 8, 0], taken)
    copy_blocks(arena, [size * 2, size * 5], [size * 4, size * 6], size)
    assert torch.equal(arena.view(9, size), rows[[3, 7, 2, 3, 2, 5, 5, 7, 0]])
    assert len(gather_blocks(arena, [], size)) == 0


# -- plans ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    parts=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 17, 90])), min_size=1, max_size=6),
    shared=st.integers(0, 20),
    repeats=st.sampled_from([1, 3, 16, 17, 71]),
    window=st.sampled_from([None, None, 1, 33, 200]),
    programs=st.sampled_from([1, 4, 300]),
    least=st.sampled_from([16, 256]),
)
def test_pieces_attend_every_key_of_every_query_once(parts, shared, repeats, window, programs, least):
    common = np.arange(shared)
    spans = []
    for start, count in parts:
        blocks = -(-(start + count) // 16)
        own = 1000 * (len(spans) + 1) + np.arange(blocks)
        whole = min(shared, start // 16)
        spans.append(Span(table=np.concatenate((common[:whole], own[whole:])), start=start, count=count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_steps, "_LEAST_KEYS", least)
        steps = triton_steps.cut(
            spans, block_tokens=16, repeats=repeats, window=window, sizes=(16, 64), step=64, programs=programs
        )
    seen: dict[tuple[int, int], list[np.ndarray]] = {}
    written: dict[int, tuple[int, int]] = {}
    alone = set()
    for size, pieces in steps.pieces.items():
        for row, fold, stop, position, table, first, end, partial, single in pieces.tolist():
            assert 0 < stop - fold <= size
            assert first < end
            for each in range(fold, stop):
                token, repeat = divmod(each, repeats)
                last = min(end, position + token + 1)
                begin = first if window is None else max(first, position + token - window + 1)
                keys = np.arange(begin, last)
                seen.setdefault((row + token, repeat), []).append(steps.tables[table + keys // 16] * 16 + keys % 16)
                if single:
                    alone.add((row + token, repeat))
                else:
                    assert written.setdefault(partial + each, (row + token, repeat)) == (row + token, repeat)
    assert sorted(written) == list(range(steps.partial_rows))
    row = 0
    for span in spans:
        for position in range(span.start, span.start + span.count):
            keys = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
            for repeat in range(repeats):
                found = np.concatenate(seen[row, repeat])
                assert sorted(found.tolist()) == sorted((span.table[keys // 16] * 16 + keys % 16).tolist())
            row += 1
    merged = {}
    for index, row in enumerate(steps.rows.tolist()):
        for source in steps.sources[steps.bounds[index] : steps.bounds[index + 1]].tolist():
            for repeat in range(repeats):
                merged[source + repeat] = (row, repeat)
    assert merged == written
    assert alone.isdisjoint(written.values())
    assert alone | set(written.values()) == set(seen)
