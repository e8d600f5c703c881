"""Attention over latents against the reference, which reads the arena byte by byte and expands in float64."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_attention import Scene, latent_group_of, make_scene
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from served import Session, build, open_saved, prompts_of
from served_latent import CASES

import kvist
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.errors import InputError, UnsupportedModel
from kvist.kernels import latent
from kvist.kernels.dense import Scores
from kvist.kernels.latent import LatentHeads, LatentMemory, LatentPlan
from kvist.kernels.reference import attend, expand, read_latents
from kvist.kernels.spans import Span
from kvist.planning.explain import explain
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Indexer, Latent
from kvist.spec.model import ModelSpec
from kvist.store.layouts import check_format

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}
NOPE, VALUE = 16, 12


@contextmanager
def limits(*, tokens: int, expanded_bytes: int, least: int) -> Iterator[None]:
    """Expand from so many new tokens on, in pieces of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "expands", lambda span: span.count >= tokens)
        patch.setattr(latent, "_EXPANDED_BYTES", expanded_bytes)
        patch.setattr(latent, "_LEAST_TOKENS", least)
        yield


def check(
    scene: Scene,
    *,
    dtype: torch.dtype = torch.float32,
    heads: int = 3,
    seed: int = 0,
    nope: int = NOPE,
    value: int = VALUE,
) -> LatentPlan:
    """Run every layer and hold it against the oracle."""
    rank, rope = scene.group.latent.rank, scene.group.latent.rope_dim
    tokens = sum(span.count for span in scene.spans)
    generator = torch.Generator().manual_seed(seed)
    scores = Scores(scale=(nope + rope) ** -0.5)
    plan = LatentMemory(scene.store, scores, dtype).plan(scene.spans)
    for slot in range(len(scene.group.layers)):
        weight = (torch.randn(heads, value + nope, rank, generator=generator) / rank**0.5).to(dtype)
        # As projections give them: slices of wider rows.
        wide = torch.randn(tokens, heads * (nope + rope), generator=generator).to(dtype)
        new = torch.randn(tokens, 9 + rank + rope, generator=generator).to(dtype)[:, 9:]
        plain, turned = (part.unflatten(1, (heads, -1)) for part in wide.split((heads * nope, heads * rope), dim=1))
        out = plan.attend(slot, plain, turned, new[:, None], LatentHeads(weight, value=value, rope=rope))
        assert out.shape == (tokens, heads * value)
        expected, row = [], 0
        for span in scene.spans:
            length = span.start + span.count
            stored = read_latents(
                scene.arena, scene.group, scene.layout, 0, layer=slot, table=span.table, length=length
            )
            keys, values = expand(stored, weight[:, value:].double(), weight[:, :value].double())
            rows = slice(row, row + span.count)
            queries = torch.cat((plain[rows], turned[rows]), dim=-1).double()
            expected.append(attend(queries, keys, values, start=span.start, scale=scores.scale).flatten(1))
            row += span.count
        worst = torch.cat(expected)
        assert (out.double() - worst).abs().max() < TOLERANCE[dtype] * max(1, worst.abs().max())
    return plan


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 5, 13, 40])), min_size=1, max_size=5),
    leaders=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=5, max_size=5),
    heads=st.sampled_from([1, 3, 4]),
    codec=st.sampled_from(["f32", "bf16", "f16", "fp8"]),
    block_tokens=st.sampled_from([4, 16]),
    expanded=st.sampled_from([2, 6, 1000]),
    least=st.sampled_from([4, 20, 500]),
    seed=st.integers(0, 100),
)
def test_any_step_equals_the_reference(parts, leaders, heads, codec, block_tokens, expanded, least, seed) -> None:
    """Decodes, short chunks and long ones side by side, behind prefixes that some share, in every split of the work."""
    group = latent_group_of(block_tokens=block_tokens, codec=codec)
    scene = make_scene(group, parts, seed=seed, shared=leaders[: len(parts)])
    with limits(tokens=expanded, expanded_bytes=0, least=least):
        check(scene, heads=heads, seed=seed)


def test_float64() -> None:
    with limits(tokens=6, expanded_bytes=0, least=8):
        check(make_scene(latent_group_of(), [(0, 7), (20, 1), (33, 5), (30, 11)]), dtype=torch.float64)


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
@pytest.mark.parametrize("expanded", [10, 1000])
def test_the_widths_of_deepseek_v3_in_bf16(expanded: int, codec: str) -> None:
    group = latent_group_of(rank=512, rope=64, codec=codec, block_tokens=16, layers=1)
    scene = make_scene(group, [(50, 20), (64, 1), (17, 1), (0, 33)], shared=[(0, 0), (0, 3), (0, 1), (3, 0)])
    with limits(tokens=expanded, expanded_bytes=0, least=32):
        check(scene, dtype=torch.bfloat16, heads=4, nope=128, value=128)


def test_a_shared_past_is_expanded_once() -> None:
    scene = make_scene(latent_group_of(), [(80, 9), (80, 1), (84, 8)], shared=[(0, 0), (0, 20), (0, 20)])
    with limits(tokens=8, expanded_bytes=0, least=40):
        plan = check(scene)
    assert plan.expanded is not None
    assert [(rows.start, rows.stop) for rows, _ in plan.expanded.pieces] == [(0, 17), (0, 17), (9, 17)]


def test_blocks_written_in_the_same_step_are_read() -> None:
    """A chunk may begin behind blocks that another chunk of the step fills."""
    scene = make_scene(latent_group_of(), [(0, 16), (16, 5)])
    scene.spans[1].table[:4] = scene.spans[0].table[:4]
    with limits(tokens=8, expanded_bytes=0, least=8):
        check(scene)


def test_the_expanded_form_is_71_times_as_large_for_deepseek_v3() -> None:
    """Both allocated, and filled with a sequence; and the plan says so."""
    spec = ModelSpec.read("deepseek-v3")
    heads = Attention(kv_heads=128, key_dim=192, value_dim=128)
    held = []
    for layer in (spec.layers[0], heads):
        model = replace(spec, layers=(layer,), draft_layers=())
        groups = groups_of(model, CacheFormat(key="bf16", value="bf16"))
        layout = ArenaLayout.of(groups, 600 * groups[0].token_bytes)
        arena = torch.empty(layout.total_bytes, dtype=torch.uint8)
        manager = CacheManager(groups, layout)
        sequence = manager.begin(np.arange(512, dtype=np.int32))
        manager.reserve(sequence, 512)
        held.append(manager.held_bytes(sequence))
        assert held[-1] <= arena.nbytes
    assert held[0] == 512 * 576 * 2
    assert held[1] / held[0] == pytest.approx(640 / 9)
    rows = {row.what: row for row in explain(kvist.plan(spec))}
    assert rows["expanded, times the latents"].value == Fraction(640, 9)
    assert rows["expanded, bytes a token"].formula == "61 layers x 128 heads x (384 + 256 B)"


def test_a_chunk_is_expanded_where_enough_queries_see_its_past() -> None:
    def expanded(start: int, count: int) -> bool:
        return latent.expands(Span(table=np.zeros(1, np.int64), start=start, count=count))

    assert [count for count in (1, 16, 40, 2000) if expanded(0, count)] == [40, 2000]
    assert [count for count in (40, 150, 300) if expanded(4096, count)] == [300]
    assert expanded(100, 150)


def test_chunks_in_both_ways_served(tmp_path: Path) -> None:
    """Prompts in pieces that are expanded, beside decodes and short rests that are not."""
    pytest.importorskip("transformers")
    served = build(CASES["deepseek-v3"], tmp_path)
    session = Session(served, budget=40)
    with limits(tokens=20, expanded_bytes=0, least=32):
        assert session.worst_error(session.run(prompts_of(90, 7, 130, shared=40))) < 1e-4


def test_draft_layers_are_left_out(tmp_path: Path) -> None:
    """Published files hold a layer behind the last that drafts tokens; a stray tensor elsewhere is still named."""
    pytest.importorskip("transformers")
    served = build(CASES["deepseek-v3"], tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())
    for layer, says in ((2, None), (1, r"layers\.1\.eh_proj")):
        name = f"model.layers.{layer}.eh_proj.weight"
        save_file({name: torch.zeros(2, 2)}, tmp_path / f"extra-{layer}.safetensors")
        shards["weight_map"][name] = f"extra-{layer}.safetensors"
        index.write_text(json.dumps(shards))
        with nullcontext() if says is None else pytest.raises(UnsupportedModel, match=says):
            open_saved(served.directory, served.oracle)


def test_what_is_not_stored_is_named() -> None:
    with pytest.raises(InputError, match="int8") as caught:
        check_format(latent_group_of(rank=32, rope=0, codec="int8"))
    assert caught.value.key == "key"
    rotated = replace(latent_group_of(), format=CacheFormat(key="fp8", value="fp8", rotate=True))
    with pytest.raises(InputError, match="latents are stored as they are") as caught:
        check_format(rotated)
    assert caught.value.key == "rotate"
    indexed = replace(latent_group_of(), layer=Latent(rank=24, rope_dim=8, indexer=Indexer(heads=1, dim=8)))
    with pytest.raises(UnsupportedModel, match="latents over all tokens"):
        check_format(indexed)
