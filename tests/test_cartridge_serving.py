"""Cartridges in an engine: what is computed behind them, who shares their blocks, and when these go back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cartridge_models import LLAMA, reading_model
from served_cartridges import (
    CASES,
    GREEDY,
    OPTIONS,
    PROMPTS,
    TOKENS,
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
from server_checks import CHAT, serving

from kvist.cli import main
from kvist.engine.answer import Answer
from kvist.engine.loop import EngineLoop
from kvist.errors import BadFile, DoesNotFit, InputError
from kvist.kernels.hadamard import hadamard
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge, load
from kvist.store.layouts import Gathering

__all__ = ["llama"]

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=CASES)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    reading_model(directory, CASES[request.param])
    return directory


def test_what_is_served_is_what_was_trained(network: Path) -> None:
    cartridge = cartridge_of(network)
    engine = engine_of(network, cartridges={"varde": cartridge})
    check_against_dense(engine, "varde", network, cartridge)


def test_many_share_one_copy_beside_ordinary_requests(network: Path) -> None:
    cartridge = cartridge_of(network)
    plain = engine_of(network)
    alone = asked(plain, PROMPTS, None)
    engine = engine_of(network, cartridges={"varde": cartridge})
    behind = [asked(engine, [prompt], "varde")[0] for prompt in PROMPTS]
    loaded = engine.shelf.loaded["varde"]
    held = [engine.cache.arena.held(group) for group in range(len(engine.groups))]
    assert held == [loaded.pin.blocks(group) for group in range(len(engine.groups))]

    answers = [*started(engine, PROMPTS, "varde"), *started(engine, PROMPTS, None), *started(engine, PROMPTS, "varde")]
    engine.step()
    for group, table in enumerate(loaded.pin.tables):
        # Of windows some have passed over it already.
        users = engine.cache.arena.refs[group][table[table >= 0]] - 1
        assert (users <= 2 * len(PROMPTS) if engine.groups[group].gives_back else users == 2 * len(PROMPTS)).all()
    assert engine.snapshot()["cartridges"][0]["users"] == 2 * len(PROMPTS)
    found = finished(engine, answers)
    assert found == [*behind, *alone, *behind]
    assert behind != alone
    for answer in [*answers[:3], *answers[6:]]:
        assert answer.account["cartridge_tokens"] == TOKENS
        assert answer.account["prefix_hit_tokens"] <= answer.prompt_tokens
    # Pinned, and nothing else held.
    assert [engine.cache.arena.held(group) for group in range(len(engine.groups))] == held
    for group, table in enumerate(loaded.pin.tables):
        assert (engine.cache.arena.refs[group][table[table >= 0]] == 1).all()


def test_pinned_until_it_is_unloaded(llama: Path) -> None:
    engine = engine_of(llama, cartridges={"varde": cartridge_of(llama)})
    before = asked(engine, PROMPTS, "varde")
    engine.cache.clear()
    assert engine.cache.arena.held(0) == TOKENS // 16
    assert asked(engine, PROMPTS, "varde") == before, "nothing reclaims it"
    with pytest.raises(InputError, match="'varde' is loaded already"):
        engine.load_cartridge("varde", cartridge_of(llama))

    answers = started(engine, PROMPTS, "varde")
    engine.step()
    engine.unload_cartridge("varde")
    with pytest.raises(InputError, match="'varde' is not loaded; loaded: none"):
        started(engine, PROMPTS, "varde")
    engine.cache.clear()
    assert finished(engine, answers) == before, "who lives on it finishes"
    engine.cache.clear()
    assert engine.cache.arena.held(0) == engine.cache.arena.cached(0) == 0
    assert engine.cache.arena.free_slabs == engine.cache.layout.num_slabs
    # And again, under two names: one copy.
    for name in ("one", "two"):
        engine.load_cartridge(name, cartridge_of(llama))
    assert engine.cache.arena.held(0) == TOKENS // 16
    engine.unload_cartridge("one")
    assert asked(engine, PROMPTS, "two") == before


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"reuse": False}], ids=str)
def test_without_a_prefix_cache_it_is_there_all_the_same(llama: Path, settings: dict[str, bool]) -> None:
    cartridge = cartridge_of(llama)
    before = asked(engine_of(llama, cartridges={"varde": cartridge}), PROMPTS, "varde")
    assert asked(engine_of(llama, cartridges={"varde": cartridge}, **settings), PROMPTS, "varde") == before


def test_little_memory_changes_no_token(llama: Path) -> None:
    """Requests are preempted, and computed again behind what is pinned."""
    cartridge = cartridge_of(llama)
    prompts = [f"{number}: {PROMPTS[1]}" for number in range(12)]
    before = asked(engine_of(llama, cartridges={"varde": cartridge}), prompts, "varde")
    block = engine_of(llama).groups[0].block_bytes
    small = engine_of(llama, memory=20 * block, cartridges={"varde": cartridge})
    answers = started(small, prompts, "varde")
    answers += started(small, ["x" * 150], None)
    finished(small, answers)
    assert small.scheduler.counters.preempted > 0
    assert [answer.tokens for answer in answers[:-1]] == before
    # 20 blocks, of which 3 are pinned.
    assert small.context_behind("varde") == 17 * 16 + 1
    with pytest.raises(DoesNotFit, match="it holds 272 tokens of one sequence"):
        small.submit([5] * 280, GREEDY, on_event=print)


@pytest.mark.parametrize("evict", ["h2o:1.0", "snapkv:100", "streaming:0.9"])
def test_pruning_takes_what_is_pinned_into_blocks_of_its_own(llama: Path, evict: str) -> None:
    """So that a pruned request may need more than one that shares all of the cartridge; what is promised is kept."""
    cartridge = cartridge_of(llama)
    block = engine_of(llama).groups[0].block_bytes
    # 70 tokens and 59 of the answer take 9 blocks beside the 3 that are pinned. Pruned, all 118 of cartridge and prompt
    # and 32 more take 10, or 100 and the answer, or 107 and 32 more.
    prompt, params = [5] * 70, replace(GREEDY, max_tokens=60)
    needed = 3 + {"h2o:1.0": 10, "snapkv:100": 10, "streaming:0.9": 9}[evict]
    for blocks in (needed - 1, needed):
        engine = engine_of(llama, memory=blocks * block, cartridges={"varde": cartridge})
        answer = Answer(prompt_tokens=70)
        how: dict[str, Any] = {"cartridge": "varde", "evict": evict, "on_event": answer.add}
        if blocks < needed:
            with pytest.raises(DoesNotFit, match=r"would be pruned together|it holds"):
                engine.submit(prompt, params, **how)
            engine.submit(prompt, replace(params, max_tokens=None), **how)
        else:
            engine.submit(prompt, params, **how)
        for _ in range(400):
            engine.step()
        assert answer.finish_reason == "length"
        assert len(answer.tokens) == 60 or blocks < needed
        assert answer.account["pruned_tokens"] > 0 or blocks < needed
    waiting = engine.submit(prompt, params, **how)
    with pytest.raises(DoesNotFit, match="would take what requests before it have been promised"):
        engine.load_cartridge("other", cartridge_of(llama, seed=1))
    engine.abort(waiting)
    engine.step()
    assert list(engine.shelf.loaded) == ["varde"]
    assert engine.cache.arena.held(0) == 3


@pytest.mark.parametrize(
    "fmt",
    [
        CacheFormat(key="int8", value="int4"),
        CacheFormat(key="int8", value="int8", rotate=True),
        CacheFormat(key="int8", value="int4", rotate=True, keep_layers=1),
    ],
    ids=str,
)
def test_formats_apply(tmp_path_factory: pytest.TempPathFactory, fmt: CacheFormat) -> None:
    """What lies in the arena is what was trained, spread and rounded as the format says."""
    directory = tmp_path_factory.mktemp("formats")
    reading_model(directory, replace(LLAMA, config={**LLAMA.config, "head_dim": 32, "num_hidden_layers": 3}))
    cartridge = cartridge_of(directory)
    plain = engine_of(directory, cartridges={"varde": cartridge})
    engine = engine_of(directory, format=fmt, cartridges={"varde": cartridge})
    pin = engine.shelf.loaded["varde"].pin
    for number, (group, store) in enumerate(zip(engine.groups, engine.runner.stores, strict=True)):
        matrix = hadamard(32, torch.float32)
        for slot, layer in enumerate(group.layers):
            trained = cartridge.layers[layer]
            keys, values = trained.split(2, dim=1)
            if group.format.rotates_keys:
                keys = keys @ matrix
            if group.format.rotates_values:
                values = values @ matrix
            with torch.inference_mode():
                rounded = store.rounded(torch.cat((keys, values), dim=1))
                found = Gathering(store, pin.tables[number][None], torch.float32).read(slot)
            assert torch.equal(torch.cat([side[0] for side in found]).transpose(0, 1), rounded)
            assert (rounded - torch.cat((keys, values), dim=1)).abs().max() < 0.2 * trained.abs().max()
    assert engine.snapshot()["cartridges"][0]["bytes"] == ModelSpec.read(directory).sequence_bytes(
        TOKENS, engine.format
    )
    assert engine.snapshot()["cartridges"][0]["bytes"] < plain.snapshot()["cartridges"][0]["bytes"]
    seen = [watched(plain), watched(engine)]
    for served in (plain, engine):
        asked(served, PROMPTS[:1], "varde")
    whole, coarse = (logits[0].log_softmax(1) for logits in seen)
    assert 0 < float((whole.exp() * (whole - coarse)).sum()) < 0.05


def test_tenants_share_the_cartridge_and_nothing_behind_it(llama: Path) -> None:
    engine = engine_of(llama, cartridges={"varde": cartridge_of(llama)})
    before = asked(engine, PROMPTS[1:2], "varde")
    for salt in ("a", "a", "b"):
        answers = started(engine, PROMPTS[1:2], "varde", cache_salt=salt)
        assert finished(engine, answers) == before
        assert answers[0].account["prefix_hit_tokens"] == 0
    answers = started(engine, PROMPTS[1:2], "varde")
    finished(engine, answers)
    assert answers[0].account["prefix_hit_tokens"] >= 16, "without a salt what stands behind it is shared as ever"


@pytest.mark.parametrize("evict", ["h2o:0.5", "snapkv:32", "streaming:4+40"])
def test_behind_a_cartridge_requests_are_pruned_too(llama: Path, evict: str) -> None:
    """Its survivors move out; the cartridge stays as it is for the others."""
    engine = engine_of(llama, cartridges={"varde": cartridge_of(llama)})
    before = asked(engine, PROMPTS[1:2], "varde")
    answers = started(engine, PROMPTS[1:2], "varde", evict=evict)
    finished(engine, answers)
    assert answers[0].account["pruned_tokens"] > 0
    assert engine.cache.arena.held(0) == TOKENS // 16
    assert asked(engine, PROMPTS[1:2], "varde") == before


def test_what_does_not_go_is_refused(llama: Path, tmp_path: Path) -> None:
    cartridge = cartridge_of(llama)
    engine = engine_of(llama, max_context=100, cartridges={"varde": cartridge})
    for prompt, cartridge_name, message in (
        ([5], "other", "'other' is not loaded; loaded: varde"),
        ([], "varde", "it has no tokens"),
        ([5] * 50, "varde", "the context is 52 tokens behind the cartridge of 48"),
    ):
        with pytest.raises(InputError, match=message):
            engine.submit(prompt, GREEDY, cartridge=cartridge_name, on_event=print)
    assert engine.shelf.loaded["varde"].users == 0
    with pytest.raises(InputError, match="48 tokens are no whole blocks of 32"):
        engine_of(llama, block_tokens=32, cartridges={"varde": cartridge})
    with pytest.raises(DoesNotFit, match="a cartridge of 48 tokens takes"):
        engine_of(llama, memory=2 * engine.groups[0].block_bytes, cartridges={"varde": cartridge})
    with pytest.raises(InputError, match="is no name"):
        engine.load_cartridge("", cartridge)
    other = tmp_path / "other"
    other.mkdir()
    reading_model(other, replace(LLAMA, spread=0.2))
    with pytest.raises(InputError, match="its keys mean nothing to another model"):
        engine_of(other, cartridges={"varde": cartridge})
    lacking = Cartridge.of(cartridge.manifest, {0: cartridge.layers[0]})
    with pytest.raises(BadFile, match="lacks layer 1"):
        engine.load_cartridge("lacking", lacking)
    assert engine.cache.arena.held(0) == TOKENS // 16


def test_commands_and_server_take_files(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cartridge = cartridge_of(llama)
    path = tmp_path / "varde.cart"
    engine = engine_of(llama)
    cartridge.save(path, engine.groups)
    assert load(path).digest == cartridge.digest
    engine.load_cartridge("varde", path)
    (before,) = asked(engine, PROMPTS[:1], "varde")
    err = check_command(llama, [path], before, capsys)
    assert f"behind 48 tokens of {path}" in err
    assert main(["serve", str(llama), "--cartridge", f"a={path}", "--cartridge", f"a={path}", "--port", "0"]) == 2
    assert "two are called 'a'" in capsys.readouterr().err
    assert main(["generate", str(llama), "x", *OPTIONS, "--cartridge", str(llama / "config.json")]) == 2
    assert "torn, or no cartridge" in capsys.readouterr().err

    loop = EngineLoop(engine)
    loop.start()
    with serving(loop) as served:
        body = {"model": served.model, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, answer, _ = served.call("POST", "/v1/completions", {**body, "cartridge": "varde"})
        assert status == 200
        assert answer["choices"][0]["text"] == engine.tokenizer.decode(before)
        assert answer["usage"]["prompt_tokens"] == len(engine.tokenizer.encode(PROMPTS[0], special=False))
        status, answer, _ = served.call("POST", "/v1/completions", {**body, "cartridge": "other"})
        assert (status, answer["error"]["param"]) == (400, "cartridge")
        status, answer, _ = served.call("GET", "/cache", None)
        assert [row["name"] for row in answer["cartridges"]] == ["varde"]
        assert [node["pinned"] for node in answer["tree"]["nodes"] if node["parent"] is None].count(True) == 1
        assert CHAT
