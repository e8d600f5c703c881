"""Pruning as the engine, the command line and the server offer it."""

from pathlib import Path

import pytest
import torch
from fixtures_models import smollm2_path
from server_checks import CHAT, serving
from tiny_tokenizers import byte_level, write_directory

from kvist.cli import main
from kvist.engine.engine import Engine
from kvist.engine.loop import EngineLoop
from kvist.engine.sampler import SamplingParams
from kvist.errors import InputError, UnsupportedModel

__all__ = ["smollm2_path"]
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
MLA = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


def saved(folder: Path, model: str, **config: object) -> Path:
    network = getattr(transformers, model)
    write_directory(folder, byte_level())
    torch.manual_seed(3)
    network(network.config_class(**SIZES, **config)).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


def test_the_engine_prunes_as_it_is_told_and_each_request_as_it_wants(llama: Path) -> None:
    engine = Engine(llama, memory="2MiB", dtype="f32", evict="streaming:0.5", prefix_cache=False)
    prompt = [list(range(3, 123))]
    how = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    pruned = {evict: engine.generate(prompt, evict=evict, **how)[0].account for evict in (None, "none", "snapkv:32")}
    assert [account["pruned_tokens"] for account in pruned.values()] == [60, 0, 88]
    assert [account["blocks"] for account in pruned.values()] == [4, 8, 3]
    assert all(account["planned_bytes"] == account["allocated_bytes"] for account in pruned.values())
    shown = engine.snapshot()
    assert shown["evict"] == "streaming:0.5"
    assert shown["counters"]["pruned_tokens"] == 148
    assert engine.cache.arena.held(0) == 0
    with pytest.raises(InputError, match=r"evict: 'lru:5' is no method"):
        engine.generate(prompt, evict="lru:5", **how)


def test_aborts_leave_nothing_behind(llama: Path) -> None:
    engine = Engine(llama, memory="2MiB", dtype="f32", max_batch_tokens=32)
    for steps in range(1, 40, 3):
        made = [
            engine.submit(
                list(range(3, 83)), SamplingParams(max_tokens=60, ignore_eos=True), evict=evict,
                on_event=lambda event: None,
            )
            for evict in ("h2o:20", "snapkv:20", "none", "streaming:4+16")
        ]  # fmt: skip
        for _ in range(steps):
            engine.step()
        for request in made:
            engine.abort(request)
        engine.step()
        assert engine.cache.arena.held(0) == 0
        assert not engine.pruner._watched


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("MistralForCausalLM", {"sliding_window": 32}),
        ("MambaForCausalLM", {}),
        ("DeepseekV3ForCausalLM", {**MLA, "first_k_dense_replace": 2, "n_routed_experts": 4}),
    ],
)
def test_models_without_keys_to_drop_are_named(tmp_path: Path, model: str, config: dict[str, object]) -> None:
    folder = saved(tmp_path, model, **config)
    with pytest.raises(
        UnsupportedModel, match=rf"evict: {folder.name} keeps nothing that h2o:0.5 could prune"
    ) as caught:
        Engine(folder, memory="2MiB", dtype="f32", evict="h2o:0.5")
    assert caught.value.key == "evict"


def test_a_slip_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no such model", "Hello", "--evict", "h2o:2.5"]) == 2
    assert "--evict: 2.5 of the prompt; a share is above 0 and at most 1" in capsys.readouterr().err


def test_a_served_request_says_how_it_is_pruned(smollm2_path: Path) -> None:
    loop = EngineLoop(Engine(smollm2_path, memory="64MiB", dtype="f32", max_context=1024, evict="snapkv:32"))
    loop.start()
    with serving(loop) as served:
        found = []
        for fields in ({}, {"evict": "none"}, {"evict": "streaming:4+20"}, {"evict": None}):
            status, answer, _ = served.call("POST", CHAT, served.chat(n=1, max_tokens=3, ignore_eos=True, **fields))
            assert status == 200
            (entry,) = answer["kvist"]
            assert entry["account"]["planned_bytes"] == entry["account"]["allocated_bytes"] > 0
            found.append(answer["usage"]["prompt_tokens"] - entry["account"]["pruned_tokens"])
        prompt = answer["usage"]["prompt_tokens"]
        assert found == [min(32, prompt), prompt, min(24, prompt), min(32, prompt)]
