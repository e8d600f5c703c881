"""Several cartridges before one request: what is computed behind them, and whose their blocks are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cartridge_models import LLAMA, TEXT, reading_model
from served import Case
from served_cartridges import (
    CASES,
    GREEDY,
    PROMPTS,
    asked,
    cartridge_of,
    check_against_dense,
    check_command,
    engine_of,
    finished,
    llama,
    started,
    watched,
)
from server_checks import serving

from kvist.cartridges.student import Student, to_cache
from kvist.engine.loop import EngineLoop
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.kernels.segment import Items
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge
from kvist.store.states import StateStore

__all__ = ["llama"]

pytest.importorskip("transformers")

SCALED = replace(
    LLAMA,
    config={
        **LLAMA.config,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    },
)
GPT2 = Case(model="GPT2LMHeadModel", config={"n_head": 4, "n_layer": 2, "n_embd": 48})


@pytest.fixture(scope="module", params=[*CASES, "yarn"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    reading_model(directory, CASES.get(request.param, SCALED))
    return directory


def read_at(directory: Path, first: int, tokens: int) -> dict[int, torch.Tensor]:
    """What the network stores of a text by itself at positions from ``first`` on."""
    spec = ModelSpec.read(directory)
    student = Student(spec, "f32")
    ids = Tokenizer.read(spec).encode(TEXT)[:tokens]
    items = Items(count=1, length=tokens, first=0)
    empty = {layer: part[:, :0] for layer, part in student.read(ids[:1]).items()}
    plans = student._plans(empty, items, collect=True)
    step = student._step(torch.tensor([ids]), items, plans, torch.tensor([tokens - 1]))
    with torch.no_grad():
        student.decoder.logits(replace(step, positions=torch.arange(first, first + tokens)))
    return to_cache(
        {
            layer: plan.seen[slot].float().transpose(0, 1)
            for group, plan in zip(student.groups, plans, strict=True)
            for slot, layer in enumerate(group.layers)
        }
    )


def test_the_second_stands_as_if_read_behind_the_first(network: Path) -> None:
    """Keys that were turned on are those of a text that was read at these positions."""
    first, second = cartridge_of(network), cartridge_of(network, noise=0, tokens=32, seed=1)
    engine = engine_of(network, cartridges={"first": first, "second": second})
    behind = read_at(network, first.tokens, second.tokens)
    manifest = replace(first.manifest, tokens=first.tokens + second.tokens)
    both = Cartridge.of(manifest, {layer: torch.cat((part, behind[layer])) for layer, part in first.layers.items()})
    check_against_dense(engine, ["first", "second"], network, both)


def test_order_counts_and_the_first_is_shared(llama: Path) -> None:
    parts = {name: cartridge_of(llama, tokens=tokens, seed=seed) for seed, (name, tokens) in enumerate(
        (("a", 48), ("b", 32), ("c", 16))
    )}  # fmt: skip
    engine = engine_of(llama, cartridges=parts)
    alone = {name: asked(engine, PROMPTS, name) for name in parts}
    held = engine.cache.arena.held(0)
    assert held == 3 + 2 + 1
    found = {}
    for names in (["a", "b"], ["b", "a"], ["a", "b", "c"], ["a", "c"], ["a"]):
        answers = started(engine, PROMPTS, names)
        engine.step()
        joined = engine.snapshot()["joined"]
        if len(names) > 1:
            (row,) = joined
            assert (row["names"], row["users"]) == (names, 3)
            assert row["tokens"] == sum(parts[name].tokens for name in names)
            assert row["bytes"] == (row["tokens"] - parts[names[0]].tokens) // 16 * engine.groups[0].block_bytes
        found[tuple(names)] = finished(engine, answers)
        assert {answer.account["cartridge_tokens"] for answer in answers} == {sum(parts[n].tokens for n in names)}
        assert engine.snapshot()["joined"] == []
        assert engine.cache.arena.held(0) == held, "what followed is held no longer than requests live on it"
    assert found["a",] == alone["a"]
    assert len({json.dumps(answer) for answer in found.values()}) == len(found)
    # Side by side, in the same steps, and found again after all of it was cached or not.
    for _ in range(2):
        running = {names: started(engine, PROMPTS, list(names)) for names in found}
        plain = started(engine, PROMPTS, None)
        for names, answers in running.items():
            assert finished(engine, answers) == found[names]
        assert finished(engine, plain) == asked(engine, PROMPTS, None)
        engine.cache.clear()
    assert all(loaded.users == 0 for loaded in engine.shelf.loaded.values())


def test_what_follows_is_shared_with_the_same_list_alone(llama: Path) -> None:
    engine = engine_of(llama, cartridges={"a": cartridge_of(llama), "b": cartridge_of(llama, seed=1)})
    long = PROMPTS[1]
    (before,) = asked(engine, [long], ["a", "b"])
    for cartridges, salt, hit in (
        (["a", "b"], "", True),
        (["b", "a"], "", False),
        (["a", "b"], "s", False),
        ("a", "", False),
    ):
        answers = started(engine, [long], cartridges, cache_salt=salt)
        (tokens,) = finished(engine, answers)
        assert (answers[0].account["prefix_hit_tokens"] >= 16) == hit
        assert (tokens == before) == (cartridges == ["a", "b"])
    # Unloaded while it is lived on.
    answers = started(engine, [long], ["a", "b"])
    engine.step()
    engine.unload_cartridge("b")
    assert finished(engine, answers) == [before]
    with pytest.raises(InputError, match="'b' is not loaded; loaded: a"):
        started(engine, [long], ["a", "b"])
    engine.unload_cartridge("a")
    engine.cache.clear()
    assert engine.cache.arena.free_slabs == engine.cache.layout.num_slabs


def test_another_of_the_same_name_is_another(llama: Path) -> None:
    """What the tree still has of an earlier list is not taken for it."""
    engine = engine_of(llama, cartridges={"a": cartridge_of(llama), "b": cartridge_of(llama, seed=1)})
    first = asked(engine, PROMPTS, ["a", "b"])
    engine.unload_cartridge("b")
    engine.load_cartridge("b", cartridge_of(llama, seed=2))
    second = asked(engine, PROMPTS, ["a", "b"])
    assert second != first
    fresh = engine_of(llama, cartridges={"a": cartridge_of(llama), "b": cartridge_of(llama, seed=2)})
    assert asked(fresh, PROMPTS, ["a", "b"]) == second
    # And while requests live on the first.
    living = started(engine, PROMPTS, ["a", "b"])
    engine.step()
    engine.unload_cartridge("b")
    engine.load_cartridge("b", cartridge_of(llama, seed=1))
    assert finished(engine, started(engine, PROMPTS, ["a", "b"])) == first
    assert finished(engine, living) == second
    for name in "ab":
        engine.unload_cartridge(name)
    assert engine.cache.arena.held(0) == 0


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"reuse": False}, {"evict": "h2o:64"}], ids=str)
def test_settings_of_the_engine_apply(llama: Path, settings: dict[str, object]) -> None:
    cartridges = {"a": cartridge_of(llama), "b": cartridge_of(llama, seed=1)}
    engine = engine_of(llama, cartridges=cartridges, **settings)
    answers = started(engine, PROMPTS, ["a", "b"])
    found = finished(engine, answers)
    if "evict" in settings:
        assert answers[1].account["pruned_tokens"] > 0
    else:
        assert found == asked(engine_of(llama, cartridges=cartridges), PROMPTS, ["a", "b"])
    assert engine.cache.arena.held(0) == 6


def test_formats_store_what_was_turned(tmp_path: Path) -> None:
    fmt = CacheFormat(key="int8", value="int4", rotate=True)
    reading_model(tmp_path, replace(LLAMA, config={**LLAMA.config, "head_dim": 32}))
    a, b = cartridge_of(tmp_path), cartridge_of(tmp_path, noise=0, tokens=32, seed=1)
    coarse = engine_of(tmp_path, format=fmt, cartridges={"a": a, "b": b})
    whole = engine_of(tmp_path, cartridges={"a": a, "b": b})
    seen = [watched(engine) for engine in (whole, coarse)]
    for engine in (whole, coarse):
        asked(engine, PROMPTS[:1], ["a", "b"])
    one, other = (logits[0].log_softmax(1) for logits in seen)
    assert 0 < float((one.exp() * (one - other)).sum()) < 0.05
    assert not any(isinstance(store, StateStore) for store in coarse.runner.stores)


def test_little_memory(llama: Path) -> None:
    """Requests behind a list are preempted like others; what has been promised to those who wait is kept."""
    cartridges = {"a": cartridge_of(llama), "b": cartridge_of(llama, tokens=32, seed=1)}
    prompts = [f"{number}: {PROMPTS[1]}" for number in range(12)]
    before = asked(engine_of(llama, cartridges=cartridges), prompts, ["a", "b"])
    block = engine_of(llama).groups[0].block_bytes
    small = engine_of(llama, memory=24 * block, cartridges=cartridges)
    answers = started(small, prompts, ["a", "b"])
    assert finished(small, answers) == before
    assert small.scheduler.counters.preempted > 0
    # 24 blocks, of which 5 are pinned: 19 to one sequence, but 17 where 2 more are pinned behind the first.
    (longest,) = started(small, ["x" * 290], None)
    with pytest.raises(DoesNotFit, match=r"a \+ b would take what requests before this one have been promised"):
        started(small, ["x"], ["a", "b"])
    assert finished(small, [longest])
    assert asked(small, prompts[:1], ["a", "b"]) == before[:1]
    tiny = engine_of(llama, memory=6 * block, cartridges=cartridges)
    with pytest.raises(DoesNotFit, match="a cartridge of 32 tokens takes"):
        started(tiny, ["x"], ["a", "b"])
    assert tiny.cache.arena.held(0) == 5
    assert all(loaded.users == 0 for loaded in tiny.shelf.loaded.values())


def test_learned_positions_cannot_be_turned(tmp_path: Path) -> None:
    reading_model(tmp_path, GPT2)
    engine = engine_of(tmp_path, cartridges={"a": cartridge_of(tmp_path), "b": cartridge_of(tmp_path, seed=1)})
    assert asked(engine, PROMPTS, ["a"]) == asked(engine, PROMPTS, "a")
    with pytest.raises(UnsupportedModel, match=r"learned positions .* the keys of 'b' cannot be turned"):
        engine.submit([5], GREEDY, cartridge=["a", "b"], on_event=print)
    with pytest.raises(InputError, match="an empty list"):
        engine.submit([5], GREEDY, cartridge=[], on_event=print)
    assert all(loaded.users == 0 for loaded in engine.shelf.loaded.values())


def test_commands_and_server_take_lists(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(llama)
    paths = [tmp_path / "a.cartridge", tmp_path / "b.cartridge"]
    for seed, path in enumerate(paths):
        cartridge_of(llama, seed=seed).save(path, engine.groups)
        engine.load_cartridge(path.stem, path)
    (before,) = asked(engine, PROMPTS[:1], ["a", "b"])
    err = check_command(llama, paths, before, capsys)
    assert f"behind 96 tokens of {paths[0]} and {paths[1]}" in err

    loop = EngineLoop(engine)
    loop.start()
    with serving(loop) as served:
        body = {"model": served.model, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, answer, _ = served.call("POST", "/v1/completions", {**body, "cartridge": ["a", "b"]})
        assert status == 200
        assert answer["choices"][0]["text"] == engine.tokenizer.decode(before)
        for wrong in ([], ["a"] * 17, ["a", 1], 5, {"a": 1}):
            status, answer, _ = served.call("POST", "/v1/completions", {**body, "cartridge": wrong})
            assert (status, answer["error"]["param"]) == (400, "cartridge")
            assert "a list of 1 to 16 names" in answer["error"]["message"]
        status, answer, _ = served.call("POST", "/v1/completions", {**body, "cartridge": ["a", "other"]})
        assert (status, answer["error"]["param"]) == (400, "cartridge")
