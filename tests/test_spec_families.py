"""Family readers: what each reads, fills in, and refuses."""

from typing import Any

import pytest

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.spec.families import Reading, read_config
from kvist.spec.families.decoders import DECODERS
from kvist.spec.known import KNOWN
from kvist.spec.layers import Attention

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN = LLAMA | {"head_dim": 16, "max_window_layers": 1, "sliding_window": 128}
GEMMA = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 12, "head_dim": 256, "sliding_window": 512}


def read(config: dict[str, Any], **overrides: Any) -> Reading:
    return read_config(config, name="config", overrides=overrides)


def windows(reading: Reading) -> list[int | None]:
    return [layer.window for layer in reading.layers]


def assumed(reading: Reading) -> dict[str, Any]:
    return {entry.key: entry.value for entry in reading.assumed}


def test_llama_derives_its_head_width_and_assumes_nothing() -> None:
    reading = read(LLAMA)
    assert reading.layers == (Attention(kv_heads=2, key_dim=8, value_dim=8),) * 2
    assert reading.max_context == 512
    assert reading.assumed == ()
    assert reading.config["head_dim"] == 8
    assert reading.config["layer_types"] == ["full_attention"] * 2


def test_a_given_head_width_wins_over_the_derived_one() -> None:
    assert read(LLAMA | {"head_dim": 16, "hidden_size": 50}).layers[0].key_dim == 16


def test_left_out_keys_are_filled_in_and_said() -> None:
    kept = {"model_type", "num_hidden_layers", "num_attention_heads", "hidden_size"}
    reading = read({key: value for key, value in LLAMA.items() if key in kept})
    assert assumed(reading) == {
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }


def test_the_class_names_the_family_where_the_type_is_left_out() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert assumed(read(config | {"architectures": ["LlamaForCausalLM"]})) == {"model_type": "llama"}
    for architectures in (None, [], ["OtherForCausalLM"], "LlamaForCausalLM", [1]):
        with pytest.raises(UnsupportedModel, match="model_type is missing"):
            read(config | {"architectures": architectures})


def test_a_window_that_llama_prints_is_not_used_and_that_is_said() -> None:
    reading = read(LLAMA | {"sliding_window": 128})
    assert windows(reading) == [None, None]
    assert assumed(reading) == {"sliding_window": None}


@pytest.mark.parametrize("version5", [{"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}])
def test_rotary_keys_of_both_transformers_versions_mean_the_same(version5: dict[str, Any]) -> None:
    old = read(LLAMA | {"rope_theta": 5e5, "rope_scaling": None}).config
    bare = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = read(bare | {"rope_parameters": version5}).config
    for key in ("rope_theta", "rope_scaling"):
        assert old[key] == new[key]
    scaled = read(bare | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}}).config
    assert scaled["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert (
        read(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).config["rope_scaling"]["rope_type"]
        == "linear"
    )


def test_mistral_has_the_window_that_is_printed() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert windows(read(mistral | {"sliding_window": 128})) == [128, 128]
    assert windows(read(mistral | {"sliding_window": None})) == [None, None]
    with pytest.raises(UnsupportedModel, match="sliding_window is missing"):
        read(mistral)
    assert windows(read(mistral, sliding_window=None)) == [None, None]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_begin_at_max_window_layers_and_only_when_switched_on(family: str) -> None:
    qwen = QWEN | {"model_type": family, "num_hidden_layers": 3}
    assert windows(read(qwen)) == [None] * 3
    assert windows(read(qwen | {"use_sliding_window": False})) == [None] * 3
    assert windows(read(qwen | {"use_sliding_window": True})) == [None, 128, 128]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(read(qwen | {"use_sliding_window": True, "layer_types": kinds})) == [128, None, None]
    with pytest.raises(UnsupportedModel, match="use_sliding_window is off"):
        read(qwen | {"layer_types": kinds})


def test_qwen3_head_width_does_not_follow_from_the_hidden_size() -> None:
    config = {key: value for key, value in QWEN.items() if key != "head_dim"} | {"model_type": "qwen3"}
    reading = read(config)
    assert reading.layers[0].key_dim == 128
    assert assumed(reading) == {"head_dim": 128}


def test_gemma3_has_five_windows_then_a_full_layer() -> None:
    reading = read(GEMMA)
    assert windows(reading) == ([512] * 5 + [None]) * 2
    assert assumed(reading) == {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
    assert windows(read(GEMMA | {"sliding_window_pattern": 2})) == [512, None] * 6
    kinds = ["full_attention"] * 11 + ["sliding_attention"]
    assert windows(read(GEMMA | {"layer_types": kinds})) == [None] * 11 + [512]


def test_gemma3_takes_both_rotary_bases_from_version_5() -> None:
    bare = {key: value for key, value in GEMMA.items() if key != "rope_theta"}
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    }
    config = read(bare | {"rope_parameters": parameters}).config
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (2e6, 20000.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_gemma3_with_a_vision_tower_is_its_text_model() -> None:
    # As google/gemma-3-4b-it publishes it: all but four keys are left to the class.
    config = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"num_hidden_layers": 27},
    }
    reading = read(config)
    full = Attention(kv_heads=4, key_dim=256, value_dim=256)
    sliding = Attention(kv_heads=4, key_dim=256, value_dim=256, window=1024)
    assert reading.layers == tuple(full if (index + 1) % 6 == 0 else sliding for index in range(34))
    filled = assumed(reading)
    assert filled == {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    assert reading.config["eos_token_id"] == [1, 106]
    assert read(config, num_key_value_heads=8).layers[0].kv_heads == 8
    with pytest.raises(BadFile, match="text_config is missing"):
        read({"model_type": "gemma3"})
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type is 'gemma2'"):
        read(config | {"text_config": {"model_type": "gemma2"}})


FOREIGN: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "mamba_d_state": 128,
    "mamba_anything_new": 1,
    "ssm_state_size": 128,
    "cross_attention_layers": [3, 8],
    "num_kv_shared_layers": 18,
    "attention_chunk_size": 8192,
    "layers_block_type": ["mamba", "attention"],
    "hybrid_override_pattern": "M-M*",
    "linear_num_key_heads": 16,
    "linear_attn_config": {"head_dim": 128},
    "full_attention_interval": 4,
    "index_topk": 2048,
    "indexer_types": ["full"],
    "compress_ratios": [0, 4],
    "is_encoder_decoder": True,
    "v_head_dim": 128,
}


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize("family", DECODERS)
def test_keys_of_another_memory_are_refused_in_every_family(family: str, key: str) -> None:
    config = QWEN | {"model_type": family, key: FOREIGN[key]}
    if family == "gemma3":
        inner = QWEN | {"model_type": "gemma3_text"}
        with pytest.raises(UnsupportedModel, match=f"{key} is "):
            read({"model_type": family, "text_config": inner, key: FOREIGN[key]})
        config = {"model_type": family, "text_config": inner | {key: FOREIGN[key]}}
    with pytest.raises(UnsupportedModel, match=rf"{key} is .*: it means .*; --assume {key}=null") as caught:
        read(config)
    assert caught.value.key == key
    if family != "gemma3":
        assert read(config, **{key: None}).layers


@pytest.mark.parametrize("off", [None, False, 0, "", [], {}])
def test_keys_of_another_memory_may_be_switched_off(off: Any) -> None:
    assert read(LLAMA | dict.fromkeys(FOREIGN, off)).layers == read(LLAMA).layers


def test_a_pattern_of_windows_is_read_by_gemma_alone() -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window_pattern is 4: it means layers of several kinds"):
        read(LLAMA | {"sliding_window_pattern": 4})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"mlp_bias": "no"}, "mlp_bias is 'no'; it must be true or false"),
        ({"hidden_act": 3}, "hidden_act is 3; it must be a string"),
        ({"torch_dtype": "brain"}, "torch_dtype is 'brain'; it must be a type such as bfloat16"),
        ({"dtype": 16}, "dtype is 16"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'; it must be a positive number or null"),
        ({"rope_scaling": {}}, "rope_scaling is of rope_type None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0; it must be a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": "1"}}, "rope_scaling.low_freq_factor is '1'"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1, -1]}}, "rope_scaling.long_factor is"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": [2]}}, r"rope_scaling.factor is \[2\]"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"model_type": "gemma3_text", "hidden_activation": ["x"]}, "hidden_activation is"),
    ],
)
def test_what_the_network_is_built_from_is_checked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile, match=says):
        read(QWEN | {"model_type": "llama"} | changes)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "torch.float32", "float8_e4m3fn", None])
def test_stored_types_of_published_files_are_known(name: str | None) -> None:
    assert read(LLAMA | {"torch_dtype": name, "dtype": name}).layers == read(LLAMA).layers


def test_an_encoder_of_the_family_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        read(GEMMA | {"use_bidirectional_attention": True})


@pytest.mark.parametrize("family", ["llama5", "bert", "t5-small", ""])
def test_other_families_are_named_not_guessed(family: str) -> None:
    says = rf"model_type is '{family}', which is not among the \d+ that are read.*; --assume model_type=TYPE"
    with pytest.raises(UnsupportedModel, match=says):
        read(LLAMA | {"model_type": family})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers is 2\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": [2]}, r"num_hidden_layers is \[2\]"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must be a divisor of num_attention_heads \(8\)"),
        ({"num_key_value_heads": 16}, "num_key_value_heads is 16"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8"),
        ({"hidden_size": 65}, "hidden_size is 65; it must be a multiple of num_attention_heads"),
        ({"head_dim": "64"}, "head_dim is '64'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"model_type": 7}, "model_type is 7"),
        ({"layer_types": ["full_attention"]}, "layer_types is of length 1; it must be one entry for each of the 2"),
        ({"layer_types": "full"}, "layer_types is of length 'full'"),
    ],
)
def test_values_out_of_range_name_key_value_and_remedy(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile, match=says):
        read(LLAMA | changes)


def test_unknown_layer_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"layer_types\[1\] is 'linear_attention'"):
        read(LLAMA | {"layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(UnsupportedModel, match="attends to everything"):
        read(LLAMA | {"layer_types": ["full_attention", "sliding_attention"]})


def test_an_override_must_be_a_key_that_is_read() -> None:
    assert read(LLAMA, num_key_value_heads=8).layers[0].kv_heads == 8
    with pytest.raises(InputError, match="'kv_heads' is no key that is read for model_type llama"):
        read(LLAMA, kv_heads=8)


@pytest.mark.parametrize("name", list(KNOWN))
def test_completed_configurations_have_what_a_network_needs(name: str) -> None:
    config = read_config(KNOWN[name].config, name=name).config
    needed = {"head_dim", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act", "attention_bias", "layer_types"}
    assert needed | {"tie_word_embeddings", "sliding_window", "vocab_size", "intermediate_size"} <= set(config)


@pytest.mark.parametrize("family", [family for family in DECODERS if family != "gemma3"])
def test_readers_agree_with_the_configuration_classes_of_transformers(family: str) -> None:
    """Key by key: what we fill in is what the family's class fills in."""
    from transformers import CONFIG_MAPPING

    config = {
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 512,
        "use_sliding_window": True,
        "sliding_window": 256,
        "max_window_layers": 5,
    }
    theirs = CONFIG_MAPPING[family](**config)
    ours = read({"model_type": family, **config}).config
    for key in ("head_dim", "layer_types", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        if hasattr(theirs, key):
            assert ours[key] == (getattr(theirs, key) or ours[key]), key
    kinds = getattr(theirs, "layer_types", None) or ours["layer_types"]
    assert ours["layer_types"] == kinds
