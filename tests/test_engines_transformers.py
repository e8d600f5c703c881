"""The account of transformers' caches against recorded runs, and against its classes as they are installed here."""

import re
from typing import Any

import pytest
import torch
from engine_peers import recorded
from hypothesis import given
from hypothesis import strategies as st
from state_oracle import held_by_transformers
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.engines import EngineBudget, engine_account
from kvist.planning.engines.transformers import resolve, sequence_bytes
from kvist.spec.families import read_config
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Layer, State
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

BF16 = CacheFormat()


def model(*layers: Layer) -> ModelSpec:
    return ModelSpec(name="a model", source="a test", layers=layers, max_context=131072)


def attention(**limits: int) -> Attention:
    return Attention(kv_heads=2, key_dim=64, value_dim=64, **limits)


def size(spec: ModelSpec, tokens: int, **settings: Any) -> int:
    return sequence_bytes(spec, resolve(BF16, settings, context=tokens), tokens)


def settings_of(cache: str) -> dict[str, Any]:
    """A recorded run's cache, such as ``QuantizedCache(hqq,nbits=4,q_group=64,residual=128)``."""
    if cache.startswith("Dynamic"):
        return {"cache": "dynamic" if "(config)" in cache else "dynamic-without-config"}
    if length := re.search(r"max_cache_len=([0-9]+)", cache):
        return {"cache": "static", "max_cache_len": int(length[1])}
    parts = re.fullmatch(r"QuantizedCache\((\w+),nbits=([0-9]),q_group=([0-9]+),residual=([0-9]+)\)", cache)
    assert parts
    return {
        "cache": "quantized", "backend": parts[1], "nbits": int(parts[2]), "q_group_size": int(parts[3]),
        "residual_length": int(parts[4]),
    }  # fmt: skip


@pytest.mark.parametrize("run", recorded("transformers"), ids=lambda run: run["id"])
def test_recorded_runs(run: dict[str, Any]) -> None:
    spec = ModelSpec.read({"hf-smol": "smollm2-135m"}[run["model"]])
    settings = settings_of(run["cache"]) | {"decoded_tokens": run["decode_steps"]}
    account = engine_account(
        spec, BF16, engine="transformers", budget=EngineBudget(), context=run["tokens"], settings=settings
    )
    assert account.allocated_bytes == run["bytes_keys_values"] + run["bytes_quantized"]
    assert account.allocated_bytes + account.details["counter_bytes"] == run["bytes_total_sum_nbytes"]


def tensors_of(cache: Any) -> int:
    """Bytes of keys and values, quantised ones included."""
    found = 0
    for layer in cache.layers:
        for name in ("keys", "values"):
            found += getattr(layer, name).nbytes
        for name in ("_quantized_keys", "_quantized_values"):
            data, scale = getattr(layer, name, None) or (torch.tensor([]), torch.tensor([]))
            found += data.nbytes + scale.nbytes
    return found


CONFIG = LlamaConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
WINDOWED = LlamaConfig(
    **CONFIG.to_dict() | {"sliding_window": 32, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
)
CHUNKED = LlamaConfig(
    **CONFIG.to_dict() | {"attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"] * 2}
)
LAYERS = {
    "plain": (CONFIG, [attention()] * 4),
    "windows": (WINDOWED, [attention(window=32)] * 3 + [attention()]),
    "chunks": (CHUNKED, [attention(chunk=32), attention()] * 2),
}
CACHES = {
    "dynamic": (lambda config: DynamicCache(config=config), {}),
    "dynamic-without-config": (lambda config: DynamicCache(), {"cache": "dynamic-without-config"}),
    "static": (lambda config: StaticCache(config, max_cache_len=48), {"cache": "static", "max_cache_len": 48}),
    "fp8": (lambda config: QuantizedCache("fp8", config), {"cache": "quantized", "backend": "fp8"}),
}


@pytest.mark.parametrize("prompt", [1, 31, 32, 40])
@pytest.mark.parametrize("which", CACHES)
@pytest.mark.parametrize("name", LAYERS)
def test_its_own_classes(name: str, which: str, prompt: int) -> None:
    config, layers = LAYERS[name]
    make, settings = CACHES[which]
    spec = model(*layers)
    if which == "fp8" and name != "plain":
        with pytest.raises(ValueError, match="only full attention"):
            make(config)
        with pytest.raises(UnsupportedModel, match="a window, which QuantizedCache refuses"):
            size(spec, prompt, **settings)
        return
    cache = make(config)
    for step in (prompt, 1, 1, 3):
        for index in range(4):
            new = torch.zeros((1, 2, step, 64), dtype=torch.bfloat16)
            cache.update(new, new, index)
    assert size(spec, prompt + 5, **settings) == tensors_of(cache)


SMALL = {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {
        "hidden_size": 256, "intermediate_size": None, "num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 2,
        "num_hidden_layers": 2,
    },
    "lfm2": {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"],
    },
    "qwen3_next": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 2,
        "num_key_value_heads": 4,
    },
    "gemma3_text": {
        "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
        "sliding_window": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_one_forward_pass(name: str) -> None:
    config = SMALL | MODELS[name] | {"model_type": name}
    held = held_by_transformers(config, tokens=24)
    bytes_held = sum((one.attention + one.indexer + one.conv) * 2 + one.recurrent * 4 for one in held)
    assert size(model(*read_config(config, name=name).layers), 24) == bytes_held


def test_the_residual_of_a_quantised_cache() -> None:
    # QuantizedLayer.update: all is quantised again when the plain part has grown to residual_length
    spec = ModelSpec.read("smollm2-135m")
    settings = {"cache": "quantized", "residual_length": 128}
    whole = size(spec, 1000, **settings)
    assert size(spec, 1000, decoded_tokens=128, **settings) == whole
    plain = size(spec, 1000, decoded_tokens=127, **settings)
    assert plain - size(spec, 873, **settings) == 127 * 23040


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cach": "static"}, r"cach=static is no setting of transformers.*known are cache, batch_size"),
        ({"cache": "paged"}, r"paged is not one of dynamic"),
        ({"cache": "quantized", "nbits": 3}, r"nbits=3; quanto is accounted for with 2 or 4"),
        ({"decoded_tokens": 2000}, r"decoded_tokens=2000; the context has 100"),
        ({"cache": "quantized", "q_group_size": 96}, r"q_group_size=96 does not divide 12800 elements"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        size(model(attention()), 100, **settings)


def test_what_transformers_does_not_keep_so() -> None:
    with pytest.raises(InputError, match="not as int8/int4"):
        resolve(CacheFormat(key="int8", value="int4"), {}, context=1)
    for layer in (Compressed(rank=448, rope_dim=64, ratio=4, window=128), State(name="rg-lru", state_elements=64)):
        with pytest.raises(UnsupportedModel, match="layer 0 of a model has"):
            size(model(layer), 100)
    with pytest.raises(UnsupportedModel, match="a state, which QuantizedCache refuses"):
        size(model(State(name="mamba2", state_elements=64)), 100, cache="quantized")


def test_a_memory_is_given_to_a_batch() -> None:
    spec = read_description(CONFIG.to_dict() | {"max_position_embeddings": 4096}, name="a model")
    one = 4 * 512 * 1000
    account = engine_account(
        spec, BF16, engine="transformers", budget=EngineBudget(cache=10 * one - 1), context=1000, settings={}
    )
    assert (account.max_concurrency, account.sequence_bytes, account.allocated_bytes) == (9.0, one, 9 * one)
    with pytest.raises(DoesNotFit, match=r"10 sequences of 1,000 tokens: "):
        engine_account(
            spec, BF16, engine="transformers", budget=EngineBudget(cache=10 * one - 1), context=1000,
            settings={"batch_size": "10"},
        )  # fmt: skip


@given(st.integers(1, 5000), st.integers(0, 5000), st.sampled_from(["dynamic", "static", "quantized"]))
def test_longer_sequences_never_take_less(tokens: int, more: int, cache: str) -> None:
    layers = [attention()] * 3 if cache == "quantized" else [attention(), attention(window=100), attention(chunk=64)]
    assert size(model(*layers), tokens, cache=cache) <= size(model(*layers), tokens + more, cache=cache)
