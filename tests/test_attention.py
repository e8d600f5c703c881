"""The engine's attention against the reference, which reads the arena byte by byte."""

import numpy as np
import pytest
import torch
from fixtures_attention import group_of, make_scene
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import InputError
from kvist.kernels import decoding
from kvist.kernels.attention import AttentionPlan, new_vectors
from kvist.kernels.dense import Scores
from kvist.kernels.hadamard import hadamard
from kvist.kernels.reference import read_sequence
from kvist.kernels.sharing import shared_runs, sharing_order

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}


def check(scene, *, dtype=torch.float32, repeats=3, softcap=None, sinks=None, seed=0, tolerance=None):
    """Run every layer and hold it against the oracle."""
    group = scene.group
    tokens = sum(span.count for span in scene.spans)
    scores = Scores(scale=group.layer.key_dim**-0.5, softcap=softcap)
    plan = AttentionPlan(scene.store, scene.spans, scores, dtype)
    generator = torch.Generator().manual_seed(seed)
    heads, dim = group.layer.kv_heads, group.layer.key_dim
    for slot in range(len(group.layers)):
        # As the fused projection gives them: slices of wider rows.
        projected = torch.randn(tokens, (repeats + 2) * heads, dim, generator=generator).to(dtype)
        q = projected[:, : repeats * heads].view(tokens, repeats, heads, dim)
        out = plan.attend(slot, q, projected[:, repeats * heads :], sinks)
        assert out.shape == (tokens, repeats * heads * dim)
        expected = scene.expected(slot, q, scores.scale, softcap, sinks)
        limit = TOLERANCE[dtype] if tolerance is None else tolerance
        assert (out.double() - expected).abs().max() < limit * max(1, expected.abs().max())
    return plan


parts = st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 5, 13, 40])), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    parts=parts,
    leaders=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=5, max_size=5),
    limit=st.sampled_from([{}, {}, {"window": 3}, {"window": 8}, {"window": 17}, {"chunk": 16}, {"chunk": 48}]),
    heads=st.sampled_from([(1, 4), (2, 3), (3, 1)]),
    codecs=st.sampled_from([("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16"), ("f16", "f32")]),
    block_tokens=st.sampled_from([4, 16]),
    seed=st.integers(0, 100),
)
def test_any_step_equals_the_reference(parts, leaders, limit, heads, codecs, block_tokens, seed):
    group = group_of(kv_heads=heads[0], **limit, block_tokens=block_tokens, key=codecs[0], value=codecs[1], layers=2)
    check(make_scene(group, parts, seed=seed, shared=leaders[: len(parts)]), repeats=heads[1], seed=seed)


@pytest.mark.parametrize("limit", [{}, {"window": 9}, {"chunk": 12}])
def test_float64_and_soft_caps(limit):
    group = group_of(**limit)
    parts = [(0, 7), (20, 1), (33, 5), (11, 1)]
    check(make_scene(group, parts), softcap=2.0, dtype=torch.float64)


@pytest.mark.parametrize("limit", [{}, {"window": 9}, {"chunk": 12}])
def test_sinks_take_their_share_of_the_softmax(limit):
    group = group_of(**limit)
    sinks = torch.tensor([[0.5, -1.0], [3.0, 0.0], [-4.0, 1.5]])
    parts = [(90, 1), (88, 1), (0, 30), (33, 5)]
    scene = make_scene(group, parts, shared=[(0, 0), (0, 20), (2, 0), (3, 0)])
    plan = check(scene, sinks=sinks)
    assert limit or plan.others
    check(make_scene(group, [(5, 1)]), sinks=sinks)


def test_chunks_of_attention_are_whole_blocks():
    with pytest.raises(InputError, match="chunks of 10 tokens are not whole blocks of 4; choose") as caught:
        make_scene(group_of(chunk=10), [(0, 1)])
    assert caught.value.key == "block_tokens"


@pytest.mark.parametrize("window", [None, 24])
def test_bf16_stays_close(window):
    group = group_of(window=window, key="bf16", value="bf16", dim=64, block_tokens=16)
    check(
        make_scene(group, [(50, 20), (64, 1), (17, 1), (0, 33)], shared=[(0, 0), (0, 3), (0, 1), (3, 0)]),
        dtype=torch.bfloat16,
    )


def test_a_shared_run_is_attended_once():
    group = group_of(block_tokens=4)
    parts = [(90, 1), (88, 1), (85, 6), (30, 1), (81, 1)]
    scene = make_scene(group, parts, shared=[(0, 0), (0, 20), (0, 20), (3, 0), (0, 10)])
    order = sharing_order([span.table for span in scene.spans])
    scene.spans = [scene.spans[index] for index in order]
    plan = check(scene)
    shared = [dense for dense in plan.others if dense.rows.stop - dense.rows.start > 6]
    # Ten blocks for all four, ten more for three of them.
    assert sorted(dense.gathering.keys.shape[2] for dense in shared) == [40, 40]


def test_blocks_written_in_the_same_step_are_read():
    """A chunk may begin behind blocks that another chunk of the step fills."""
    group = group_of(block_tokens=4)
    scene = make_scene(group, [(0, 16), (16, 5)])
    scene.spans[1].table[:4] = scene.spans[0].table[:4]
    check(scene)


def test_long_windows_are_exact():
    group = group_of(window=40, block_tokens=16, kv_heads=1, dim=8, layers=1)
    plan = check(make_scene(group, [(600, 300), (650, 1), (39, 2), (0, 290)]), repeats=2)
    # The work of a band does not grow with what lies before it.
    band = plan.first[0]
    assert band.gathering.indices[0].shape == (3 * 2,)
    assert max(tile.high - tile.low for tile in band.tiles) <= 256 + 39


def test_decodes_of_many_lengths_make_few_buckets():
    group = group_of(kv_heads=1, dim=8, layers=1, block_tokens=4)
    plan = check(make_scene(group, [(length, 1) for length in [*range(1, 60, 3), 150, 151]]))
    assert len(plan.first) <= 4


def test_shared_runs_are_found_at_every_level():
    tables = [
        np.array(blocks)
        for blocks in (
            [*range(40), 90, 91],
            [*range(40), 95, 96],
            [*range(20), *range(50, 80)],
            [*range(20), *range(50, 80), 81],
            [7, 8, 9],
        )
    ]
    runs = {(r.first_span, r.end_span, r.first_block, r.end_block) for r in shared_runs(tables, [40, 40, 50, 50, 3])}
    assert runs == {(0, 4, 0, 20), (0, 2, 20, 40), (2, 4, 20, 50)}
    assert shared_runs(tables[:1], [40]) == []
    assert shared_runs(tables, [0] * 5) == []


def test_sharing_order_puts_equal_beginnings_together():
    tables = [np.array(t, np.int64) for t in ([1, 2, 3], [9, 9], [1, 2, 4], [9, 8], [1, 2, 3, 7])]
    order = sharing_order(tables)
    firsts = [int(tables[index][0]) for index in order]
    assert firsts in ([1, 1, 1, 9, 9], [9, 9, 1, 1, 1])


QUANTISED = ["fp8", "int8", "int4", "int4a"]


@settings(max_examples=30, deadline=None)
@given(
    parts=parts,
    leaders=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=5, max_size=5),
    limit=st.sampled_from([{}, {}, {"window": 8}, {"window": 17}, {"chunk": 16}]),
    heads=st.sampled_from([(1, 4), (2, 3)]),
    codecs=st.tuples(st.sampled_from(QUANTISED), st.sampled_from([*QUANTISED, "f32", "bf16"])),
    turned=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    block_tokens=st.sampled_from([4, 16]),
    seed=st.integers(0, 100),
)
def test_any_step_over_codes(parts, leaders, limit, heads, codecs, turned, softcap, block_tokens, seed):
    """Quantised keys, values or both; in memory that reads as NaN before it is written."""
    key, value = codecs[::-1] if turned else codecs
    group = group_of(kv_heads=heads[0], dim=32, **limit, block_tokens=block_tokens, key=key, value=value, layers=2)
    scene = make_scene(group, parts, seed=seed, shared=leaders[: len(parts)])
    check(scene, repeats=heads[1], seed=seed, softcap=softcap)


@pytest.mark.parametrize("value", QUANTISED)
@pytest.mark.parametrize("key", QUANTISED)
def test_every_pair_of_codes_in_every_type(key, value):
    group = group_of(dim=64, layers=2, block_tokens=16, key=key, value=value)
    sinks = torch.tensor([[0.5, -1.0], [3.0, 0.0], [-4.0, 1.5]])
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        parts = [(50, 20), (64, 1), (17, 1), (0, 33)]
        scene = make_scene(group, parts, shared=[(0, 0), (0, 3), (0, 1), (3, 0)])
        # Numbers are made in float32 of codes, and computed with in the type.
        check(scene, dtype=dtype, sinks=sinks.to(dtype), tolerance=1e-6 if dtype == torch.float64 else 0.03)


@pytest.mark.parametrize("value", QUANTISED)
@pytest.mark.parametrize("key", QUANTISED)
def test_what_is_appended_is_what_was_given(key, value):
    """Read byte by byte: within a step of its codec, in the right place, and nothing beside it."""
    group = group_of(dim=64, layers=2, block_tokens=4, key=key, value=value)
    scene = make_scene(group, [(0, 9), (0, 2)])
    kv = torch.randn(11, 4, 64, generator=torch.Generator().manual_seed(3))
    where = new_vectors(scene.store, scene.spans)
    before = scene.arena.clone()
    for slot in range(2):
        scene.store.append(slot, kv * (slot + 1), where)
    for slot in range(2):
        for span, rows in zip(scene.spans, (kv[:9], kv[9:]), strict=True):
            read = read_sequence(scene.arena, group, scene.layout, 0, layer=slot, table=span.table, length=span.count)
            for codec, numbers, wanted in zip((key, value), read, rows.split(2, dim=1), strict=True):
                wanted = wanted.transpose(0, 1) * (slot + 1)
                limit = {"fp8": 0.07, "int8": 0.005, "int4": 0.13, "int4a": 0.07}[codec] * wanted.abs().max()
                assert (numbers - wanted).abs().max() < limit
            rounded = scene.store.rounded(rows * (slot + 1)).transpose(0, 1).double()
            assert (torch.cat(read) - rounded).abs().max() < 1e-6
    changed = int((scene.arena != before).sum())
    assert 0.9 * 11 * group.token_bytes < changed <= 11 * group.token_bytes


@pytest.mark.parametrize("dim", [1, 2, 64, 80, 96, 256])
def test_a_rotation_is_its_own_inverse_and_spreads(dim):
    matrix = hadamard(dim, torch.float64)
    assert torch.equal(matrix, matrix.T)
    assert (matrix @ matrix - torch.eye(dim)).abs().max() < 1e-12
    size = dim & -dim
    assert torch.allclose(matrix[0].abs(), torch.where(torch.arange(dim) < size, size**-0.5, 0.0).double())


@pytest.mark.parametrize("length", [1151, 1152, 1153, 1166])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("gather_bytes", [2**21, 2**14])
def test_a_lone_long_decode_is_cut(length, kv_heads, gather_bytes, monkeypatch):
    monkeypatch.setattr(decoding, "_GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(decoding, "_PART_TOKENS", 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        group = group_of(kv_heads=kv_heads, dim=8, layers=1, block_tokens=16)
        plan = check(make_scene(group, [(length, 1)]), repeats=2)
    finally:
        torch.set_num_threads(threads)
    tail = plan.first[0]
    assert isinstance(tail, decoding.Tails if kv_heads == 2 and gather_bytes == 2**21 else decoding.LongTail)
    if isinstance(tail, decoding.LongTail):
        assert tail.parts == (1 if kv_heads == 2 else 2)
        assert (len(tail.pieces) > 1) == (gather_bytes == 2**14)
