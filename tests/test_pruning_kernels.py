"""What compiled attention says that keys draw, against float64; and the moving of survivors, byte by byte."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures_attention import group_of, make_scene
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import BF16, kinds

from kvist.kernels import cpu as cpu_module
from kvist.kernels.dense import Scores
from kvist.kernels.moving import move
from kvist.kernels.paged import PagedAttention
from kvist.kernels.pruning import Weighing
from kvist.kernels.reference import read_sequence
from kvist.kernels.sharing import sharing_order
from kvist.store import survivors

FORMATS = [("bf16", "bf16"), ("int8", "int4"), ("int4", "fp8"), ("int4a", "int8"), ("fp8", "int4a"), ("f16", "f32")]


def weights_of(scene, span, slot, q, scale, softcap):
    """What queries ``[queries, repeats, kv_heads, dim]`` of a span weigh each key: float64 ``[kv_heads, keys]``."""
    length = span.start + span.count
    keys, _ = read_sequence(
        scene.arena, scene.group, scene.layout, 0, layer=slot, table=span.table, length=length
    )  # fmt: skip
    # As the kernels multiply them.
    keys = keys.to(BF16).double()
    scores = torch.einsum("qrhd,hkd->rhqk", q.double(), keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    ahead = torch.ones(len(q), length, dtype=torch.bool).triu(length - len(q) + 1)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1).sum((0, 2))


@settings(max_examples=15, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([0, 1, 16, 40, 130, 600]), st.sampled_from([1, 1, 2, 5, 13, 40, 70]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    leaders=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=4, max_size=4),
    heads=st.sampled_from([(1, 4), (2, 3), (3, 1), (2, 5), (17, 1), (1, 40)]),
    dim=st.sampled_from([32, 64, 96, 256]),
    block_tokens=st.sampled_from([16, 32]),
    softcap=st.sampled_from([None, None, 2.0]),
    fmt=st.sampled_from(FORMATS),
    kind=st.sampled_from(["avx512", "amx"]),
    seed=st.integers(0, 100),
)
def test_what_keys_draw(parts, leaders, heads, dim, block_tokens, softcap, fmt, kind, seed):
    """Some of a step's sequences are told, on the way and behind attention, which is as it was for all of them."""
    if kind not in kinds():
        pytest.skip(f"no {kind} kernels on this machine")
    kv_heads, repeats = heads
    group = group_of(kv_heads=kv_heads, block_tokens=block_tokens, key=fmt[0], value=fmt[1], dim=dim, layers=2)
    scene = make_scene(group, [part[:2] for part in parts], seed=seed, shared=leaders[: len(parts)])
    order = sharing_order([span.table for span in scene.spans])
    room = max(span.start + span.count for span in scene.spans) + 5
    generator = torch.Generator().manual_seed(seed)
    before = torch.rand(len(parts), 2, kv_heads, room, generator=generator)
    sums = before.clone()
    scene.spans = [replace(scene.spans[i], drawn=sums[i] if parts[i][2] else None) for i in order]
    tokens = sum(span.count for span in scene.spans)
    scores = Scores(scale=dim**-0.5, softcap=softcap)
    memory = PagedAttention(cpu_module._chosen(kind), scene.store, scores, repeats)
    for slot in range(2):
        projected = torch.randn(tokens, (repeats + 2) * kv_heads, dim, generator=generator).to(BF16)
        q = projected[:, : repeats * kv_heads].view(tokens, repeats, kv_heads, dim)
        out = memory.plan(scene.spans).attend(slot, q, projected[:, repeats * kv_heads :])
        expected = scene.expected(slot, q, scores.scale, softcap)
        assert (out.double() - expected).abs().max() < 0.03 * max(1, expected.abs().max())
        row = 0
        for index, span in zip(order, scene.spans, strict=True):
            rows, length = slice(row, row + span.count), span.start + span.count
            row += span.count
            if span.drawn is None:
                Weighing(memory, span.table, length, span.count, sums[index], BF16).add(slot, q[rows], None)
            found = (sums[index, slot] - before[index, slot]).double()
            drawn = weights_of(scene, span, slot, q[rows], scores.scale, softcap)
            # A weight is rounded to 8 bits.
            assert torch.allclose(found[:, :length], drawn, rtol=4e-3, atol=2e-5 * span.count * repeats)
            assert not found[:, length:].any()


@pytest.mark.parametrize("kind", kinds())
def test_sums_do_not_depend_on_threads(kind):
    group = group_of(kv_heads=3, block_tokens=16, key="int8", value="int4", dim=64, layers=1)
    scene = make_scene(group, [(700, 1)])
    q = torch.randn(150, 3, 3, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    memory = PagedAttention(cpu_module._chosen(kind), scene.store, Scores(scale=0.125), 3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            found.append(torch.zeros(1, 3, 900))
            Weighing(memory, scene.spans[0].table, 700, 150, found[-1], BF16).add(0, q, None)
    finally:
        torch.set_num_threads(before)
    assert found[0][..., :700].sum() == pytest.approx(150 * 9, rel=1e-3)
    assert all(torch.equal(found[0], other) for other in found)


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.sampled_from([*FORMATS, ("f32", "f32")]),
    block_tokens=st.sampled_from([4, 16, 32]),
    kv_heads=st.sampled_from([1, 3]),
    slots=st.integers(2, 150),
    share=st.floats(0.1, 1),
    still=st.floats(0, 1),
    seed=st.integers(0, 100),
)
def test_survivors_are_moved_byte_by_byte(fmt, block_tokens, kv_heads, slots, share, still, seed):
    """To blocks of which some are new and some are old ones, as the manager lends them, in all codecs."""
    kernels = cpu_module._chosen("portable") if cpu_module._module() is not None else None
    if kernels is None:
        pytest.skip("no C++ kernels were compiled")
    group = group_of(kv_heads=kv_heads, block_tokens=block_tokens, key=fmt[0], value=fmt[1], dim=64, layers=3)
    scene = make_scene(group, [(1, slots - 1), (0, slots)], seed=seed)
    rng = np.random.default_rng(seed)
    scene.arena.copy_(torch.from_numpy(rng.integers(0, 256, len(scene.arena), np.uint8)))
    source, fresh = (span.table for span in scene.spans)
    keep = max(1, int(share * slots))
    own = source[rng.random(len(source)) < still]
    target = np.concatenate((own, fresh))[: -(-keep // block_tokens)]
    # Some heads keep the beginning where it is.
    kept = torch.stack([torch.randperm(slots)[:keep].sort().values for _ in range(3 * kv_heads)])
    kept[0] = torch.arange(keep)
    kept = kept.view(3, kv_heads, keep)
    before = scene.arena.clone()
    move(scene.store, source, target, kept, kernels)
    found = scene.arena.clone()
    scene.arena.copy_(before)
    survivors.move(scene.store, source, target, kept)
    assert torch.equal(found, scene.arena)
