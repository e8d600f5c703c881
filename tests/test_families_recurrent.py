"""Readers of recurrent and hybrid models: published numbers, traps, every way to say which layer is which, refusals."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.spec.families import FAMILIES, Reading, read_config
from kvist.spec.families.convolutions import CONVOLUTIONS
from kvist.spec.families.gated_delta import GATED_DELTA
from kvist.spec.families.kda import KDA
from kvist.spec.families.lightning import LIGHTNING
from kvist.spec.families.mamba_hybrids import MAMBA_HYBRIDS
from kvist.spec.families.patterns import UNBOUNDED
from kvist.spec.families.recurrent import RECURRENT_MODELS
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Indexer, Latent, Layer, Nothing, Parallel, Shared, State
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

DATA = Path(__file__).parents[2] / "shared" / "data"
BF16 = CacheFormat()
OURS = {**RECURRENT_MODELS, **MAMBA_HYBRIDS, **GATED_DELTA, **KDA, **LIGHTNING, **CONVOLUTIONS}

shared_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")

# Facts of published configurations that the shared folder lacks.
QWEN3_5_397B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip
KIMI_K3_FULL = [*range(4, 93, 4), 93]
KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear", "num_hidden_layers": 93, "hidden_size": 7168, "num_attention_heads": 96,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "mla_use_nope": True, "max_position_embeddings": 1048576,
        "linear_attn_config": {
            "full_attn_layers": KIMI_K3_FULL, "kda_layers": [i for i in range(1, 94) if i not in KIMI_K3_FULL],
            "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        },
    },
}  # fmt: skip
FALCON_MAMBA = {
    "model_type": "falcon_mamba", "hidden_size": 4096, "expand": 16, "intermediate_size": 8192, "state_size": 16,
    "conv_kernel": 4, "num_hidden_layers": 64,
}  # fmt: skip
PHI4_FLASH = {
    "model_type": "phi4flash", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 40,
    "num_key_value_heads": 20, "mb_per_layer": 2, "sliding_window": 512, "max_position_embeddings": 262144,
}  # fmt: skip
RING_MINI_LINEAR = {
    "model_type": "bailing_moe_linear", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "layer_group_size": 5, "max_position_embeddings": 131072,
}  # fmt: skip
LING_3_FLASH = {
    "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "num_hidden_layers": 42,
    "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None, "layer_group_size": 6,
    "short_conv_kernel_size": 4, "kda_safe_gate": True, "max_position_embeddings": 262144,
}  # fmt: skip
JET_2B = {
    "model_type": "jet_nemotron", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "max_position_embeddings": 131072,
    "layer_types": ["jet"] * 14 + ["attn"] + ["jet"] * 4 + ["attn", "swa", "swa"] + ["jet"] * 6,
    "efficient_attention_config": {
        "jet": {"conv_size": 4, "expand_v": 2.6666666667, "head_dim": 96, "num_heads": 12, "norm_eps": "1e-5"},
        "swa": {"window_size": 1152},
    },
}  # fmt: skip
PLAMO2_1B = {
    "model_type": "plamo2", "hidden_size": 2048, "hidden_size_per_head": 128, "mamba_d_conv": 4, "mamba_d_state": 64,
    "mamba_enabled": True, "mamba_num_heads": 32, "mamba_step": 2, "num_attention_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 1,
}  # fmt: skip
INKLING_SMALL = {
    "model_type": "inkling_mm_model",
    "text_config": {
        "model_max_length": 1048576, "hidden_size": 4096, "num_hidden_layers": 42, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8,
        "swa_head_dim": 128, "sliding_window_size": 512, "local_layer_ids": [i for i in range(42) if (i + 1) % 6],
        "use_sconv": True, "sconv_kernel_size": 4,
    },
    "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7]},
}  # fmt: skip
ZAYA_FIRST = {
    "model_type": "zaya", "cca": True, "ffn_hidden_size": 4096, "hidden_size": 2048, "head_dim": 128,
    "kv_channels": 128, "mamba_cache_dtype": "float32", "num_attention_heads": 8, "num_hidden_layers": 80,
    "num_key_value_heads": 2, "num_query_groups": 2, "max_position_embeddings": 131072,
}  # fmt: skip
MAMBA_SSM = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}, "model_type": "mamba_ssm"}
HYBRID = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
JAMBA = HYBRID | {"model_type": "jamba", "num_hidden_layers": 8}
GRANITE = HYBRID | {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
}
NEMOTRON = HYBRID | {"model_type": "nemotron_h", "head_dim": 16, "hybrid_override_pattern": "M*-E"}
QWEN = HYBRID | {"model_type": "qwen3_next", "num_hidden_layers": 8}
MINIMAX = HYBRID | {"model_type": "minimax_text_01", "num_hidden_layers": 2, "attn_type_list": [1, 0]}
LFM2 = HYBRID | {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
GRIFFIN = HYBRID | {"model_type": "recurrent_gemma", "num_hidden_layers": 5}


def read(config: dict[str, Any], **overrides: Any) -> Reading:
    return read_config(config, name="config", overrides=overrides)


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_description(config, name="config")


def kinds(layers: tuple[Layer, ...]) -> str:
    """One letter a layer: S state, A attention, W window, L latent, P parallel, R reads another's, - nothing."""
    letters = {State: "S", Latent: "L", Parallel: "P", Shared: "R", Nothing: "-"}
    return "".join(
        letters[type(layer)] if not isinstance(layer, Attention) else "W" if layer.window else "A" for layer in layers
    )


def assumed(reading: Reading) -> dict[str, Any]:
    return {entry.key: entry.value for entry in reading.assumed}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# KiB a token that stays once windows are full; ../shared/data/README.md.
@pytest.mark.parametrize(("config", "kib"), [(QWEN3_5_397B, 30), (KIMI_K3, 27)], ids=["Qwen3.5-397B", "Kimi-K3"])
def test_published_numbers(config: dict[str, Any], kib: float) -> None:
    spec = spec_of(config)
    assert spec.append_bytes_per_token(BF16) == spec.retained_bytes_per_token(BF16) == kib * 1024


@shared_data
@pytest.mark.parametrize(
    ("file", "kib"),
    [
        ("full/kimi-linear-48b", 7.875),  # printed as 7.9
        ("facts/moonshotai--Kimi-Linear-48B-A3B-Instruct", 7.875),
        ("full/nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6),
        ("full/Qwen--Qwen3.5-27B", 64),
        ("facts/Qwen--Qwen3.5-27B", 64),
    ],
)
def test_published_numbers_of_shared_files(file: str, kib: float) -> None:
    spec = ModelSpec.read(DATA / "configs" / f"{file}.json")
    assert spec.retained_bytes_per_token(BF16) == kib * 1024


def expected() -> list[dict[str, Any]]:
    path = DATA / "expected" / "models.json"
    return [case for case in json.loads(path.read_text())["cases"] if case["state_bytes"]] if path.is_file() else []


@pytest.mark.parametrize("case", expected(), ids=lambda case: case["id"])
def test_verified_answers_to_the_byte(case: dict[str, Any]) -> None:
    spec = ModelSpec.read(DATA / "configs" / "full" / case["file"])
    assert spec.append_bytes_per_token(BF16) == case["append_bytes_per_token"]
    assert spec.retained_bytes_per_token(BF16) == case["retained_bytes_per_token"]
    assert spec.state_bytes(BF16) == case["state_bytes"]
    for tokens, size in case["total_bytes"].items():
        assert spec.sequence_bytes(int(tokens), BF16) == size
    held = Counter(type(layer).__name__ for layer in spec.layers)
    assert held["State"] == case["state"]["layers"]
    alternates = case["alternates"]
    states = [layer for layer in spec.layers if isinstance(layer, State)]
    whole = sum(state.state_elements * 4 + 2 * _with_kernel_columns(state) for state in states)
    assert whole == alternates.get("state_conv_k_columns_ssm_fp32 (transformers)", whole)
    narrow = sum(2 * (state.state_elements + state.conv_elements) for state in states)
    assert narrow == alternates["state_all_bf16 (an engine that keeps SSM state in the model dtype)"]
    drafts = alternates.get("mtp_draft_layers_not_counted", {"layers": 0, "append_bytes_per_token": 0})
    assert len(spec.draft_layers) == drafts["layers"]
    assert spec.draft_append_bytes_per_token(BF16) == drafts["append_bytes_per_token"]


def _with_kernel_columns(state: State) -> int:
    return state.conv_elements // max(state.conv_columns, 1) * (state.conv_columns + 1) if state.conv_elements else 0


# Files of recurrent and hybrid models that cannot be read, and the key that stopped them.
REFUSED: dict[str, str] = {}


def shared_files() -> list[Path]:
    return sorted((DATA / "configs").glob("*/*.json")) if DATA.is_dir() else []


RECURRENT_KEYS = ("mamba_", "ssm_", "linear_", "kda_", "sconv_", "state_size", "lru_width", "conv_L_cache", "rwkv")


def is_recurrent(config: dict[str, Any]) -> bool:
    text = config.get("text_config", config)
    return text.get("model_type") in OURS or any(key.startswith(RECURRENT_KEYS) and text[key] for key in text)


@shared_data
def test_every_shared_recurrent_file_answers_or_is_refused_by_the_key_that_stopped_it() -> None:
    stopped, answered = {}, 0
    for path in shared_files():
        config = json.loads(path.read_text())
        if not is_recurrent(config):
            continue
        name = f"{path.parent.name}/{path.stem}"
        try:
            spec = ModelSpec.read(path)
        except UnsupportedModel as error:
            stopped[name] = error.key
        else:
            assert spec.state_bytes(BF16) > 0, name
            answered += 1
    assert stopped == REFUSED
    assert answered >= 59


GLM_5_3_FLASH = {"model_type": "glm5_next", "text_config": {"num_hidden_layers": 45, "index_kpool": 4}}


@shared_data
@pytest.mark.parametrize(
    ("extract", "whole"),
    [
        ("thinkingmachines--Inkling-Small", INKLING_SMALL),
        ("zai-org--GLM-5.3-Flash", GLM_5_3_FLASH),
        ("Qwen--Qwen3.6-27B", "full/nvidia--Qwen3.6-27B-NVFP4.json"),
    ],
)
def test_an_extract_without_a_type_costs_what_the_whole_file_costs(extract: str, whole: dict[str, Any] | str) -> None:
    short = ModelSpec.read(DATA / "configs" / "facts" / f"{extract}.json")
    full = ModelSpec.read(DATA / "configs" / whole) if isinstance(whole, str) else spec_of(whole)
    assert len(short.layers) == len(full.layers)
    for tokens in (1, 511, 513, 8192):
        assert short.sequence_bytes(tokens, BF16) == full.sequence_bytes(tokens, BF16)
    assert short.append_bytes_per_token(BF16) == full.append_bytes_per_token(BF16)
    assert short.retained_bytes_per_token(BF16) == full.retained_bytes_per_token(BF16)
    assert {"model_type", "layer_types"} <= {entry.key for entry in short.assumed}


@pytest.mark.parametrize("family", OURS)
def test_an_empty_file_is_refused_with_a_key(family: str) -> None:
    assert FAMILIES[family] is not None
    with pytest.raises(InputError) as caught:
        read({"model_type": family})
    assert caught.value.key
    assert "config" in str(caught.value)


def test_falcon_mamba_is_as_wide_as_it_says_and_not_as_it_expands() -> None:
    reading = read(FALCON_MAMBA)
    state = reading.layers[0]
    assert isinstance(state, State)
    assert (state.conv_elements, state.state_elements) == (8192 * 3, 8192 * 16)
    assert assumed(reading)["intermediate_size"] == 8192
    assert read(without(FALCON_MAMBA, "intermediate_size") | {"expand": 2}).layers == reading.layers


def test_a_recurrence_has_no_longest_sequence_and_that_is_said() -> None:
    reading = read(FALCON_MAMBA)
    assert reading.max_context == assumed(reading)["max_position_embeddings"] == UNBOUNDED
    assert spec_of(FALCON_MAMBA).sequence_bytes(1, BF16) == spec_of(FALCON_MAMBA).sequence_bytes(UNBOUNDED, BF16)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (JAMBA, "SSSSASSS"),
        (JAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1}, "SA" * 4),
        (JAMBA | {"layers_block_type": ["attention", *["mamba"] * 7]}, "A" + "S" * 7),
        (GRANITE, "SAS"),
        (without(GRANITE, "layer_types") | {"layers_block_type": ["attention"] * 3}, "AAA"),
        (NEMOTRON, "SA--"),
        (
            without(NEMOTRON, "hybrid_override_pattern") | {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
            "SA--",
        ),
        (QWEN, "SSSASSSA"),
        (QWEN | {"full_attention_interval": 2}, "SA" * 4),
        (QWEN | {"layer_types": ["linear_attention"] * 7 + ["full_attention"]}, "SSSSSSSA"),
        (LFM2, "SSA"),
        (without(LFM2, "layer_types") | {"full_attn_idxs": [1]}, "SAS"),
        (GRIFFIN, "SSWSS"),
        (GRIFFIN | {"block_types": ["attention", "recurrent"]}, "WSWSW"),
        (GRIFFIN | {"layer_types": ["recurrent", "attention", "recurrent", "attention", "recurrent"]}, "SWSWS"),
        (HYBRID | {"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2]}, "SSAS"),
        (HYBRID | {"model_type": "falcon_h1", "num_hidden_layers": 2}, "PP"),
        (HYBRID | {"model_type": "zamba", "num_hidden_layers": 9}, "SSPSSSSPS"),
        (HYBRID | {"model_type": "zamba2", "num_hidden_layers": 3, "hybrid_layer_ids": [1]}, "SPS"),
        (HYBRID | {"model_type": "minimax_text_01", "num_hidden_layers": 3, "attn_type_list": [0, 0, 1]}, "SSA"),
        (
            HYBRID | {
                "model_type": "minimax", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]
            },
            "SA",
        ),
        (PHI4_FLASH, "SW" * 8 + "SA" + "-R" * 7),
        (PLAMO2_1B, "SW" * 8),
        (PLAMO2_1B | {"full_attention_idx": [15]}, "SW" * 7 + "SA"),
        (PLAMO2_1B | {"mamba_enabled": False}, "W" * 16),
        (RING_MINI_LINEAR, "SSSSA" * 4),
        (RING_MINI_LINEAR | {"layer_group_size": [1, 0] * 10}, "SA" * 10),
        (LING_3_FLASH, "SSSSSL" * 7),
        (JET_2B, "S" * 14 + "ASSSSAWW" + "S" * 6),
        (ZAYA_FIRST, "P-" * 40),
        (ZAYA_FIRST | {"zaya_layers": ["a", 16, 16, "a"]}, "P--P"),
        (without(ZAYA_FIRST, "ffn_hidden_size") | {"num_hidden_layers": 2}, "PP"),
        (HYBRID | {"model_type": "olmo_hybrid", "num_hidden_layers": 8}, "SSSASSSA"),
        (HYBRID | {"model_type": "olmo_hybrid", "num_hidden_layers": 2}, "SA"),
        (
            HYBRID | {
                "model_type": "gigachat3_5", "num_hidden_layers": 3, "full_attention_layers": [2], "kv_lora_rank": 512,
                "qk_rope_head_dim": 64, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
            },
            "SSL",
        ),
    ],
)  # fmt: skip
def test_which_layer_is_which(config: dict[str, Any], expected: str) -> None:
    assert kinds(read(config).layers) == expected


def test_windows_of_a_hybrid_are_what_the_file_says() -> None:
    assert {layer.window for layer in read(PHI4_FLASH).layers if isinstance(layer, Attention)} == {512, None}
    assert {layer.window for layer in read(JET_2B).layers if isinstance(layer, Attention)} == {1152, None}
    assert {layer.window for layer in read(GRIFFIN).layers if isinstance(layer, Attention)} == {2048}
    assert assumed(read(GRIFFIN))["attention_window_size"] == 2048


def test_layers_that_read_another_point_at_the_full_one() -> None:
    layers = read(PHI4_FLASH).layers
    sources = {layer.source for layer in layers if isinstance(layer, Shared)}
    assert sources == {17}
    assert layers[17] == Attention(kv_heads=20, key_dim=64, value_dim=64)


def test_a_pattern_gives_the_number_of_layers_that_a_file_leaves_out() -> None:
    reading = read(NEMOTRON)
    assert len(reading.layers) == reading.config["num_hidden_layers"] == assumed(reading)["num_hidden_layers"] == 4
    with pytest.raises(BadFile, match="num_hidden_layers is 5; it must be 4"):
        read(NEMOTRON | {"num_hidden_layers": 5})


def test_nemotron_drafts_are_counted_apart() -> None:
    drafting = read(NEMOTRON | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]})
    assert kinds(drafting.draft_layers) == "A-"
    assert kinds(read(NEMOTRON | {"num_nextn_predict_layers": 2}).draft_layers) == "A-A-"
    assert (
        kinds(read(NEMOTRON | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}).draft_layers)
        == "A-"
    )
    assert read(NEMOTRON).draft_layers == ()


def test_inkling_convolves_keys_values_and_both_outputs() -> None:
    reading = read(INKLING_SMALL)
    states = {part for layer in reading.layers for part in layer.stored if isinstance(part, State)}
    # Eight heads of 128 in keys and in values, 4,096 after attention and after the feed-forward part, three columns.
    assert {state.conv_elements for state in states} == {3 * (2 * 8 * 128 + 2 * 4096)}
    windows = Counter(part.window for layer in reading.layers for part in layer.stored if isinstance(part, Attention))
    assert windows == {512: 35, None: 7}
    drafts = Counter(
        part.window for layer in reading.draft_layers for part in layer.stored if isinstance(part, Attention)
    )
    assert drafts == {512: 6, None: 2}
    assert reading.max_context == 1048576


def test_a_loop_of_layers_keeps_a_cache_for_each_pass() -> None:
    loop = {
        "model_type": "inkling2_loop_text", "num_hidden_layers": 12, "hidden_size": 2304, "num_attention_heads": 24,
        "loop_config": {"core_start": 6, "core_end": 12, "num_passes": 3},
    }  # fmt: skip
    assert len(read(loop).layers) == 6 + 3 * 6


def test_zaya_says_in_which_type_its_columns_are() -> None:
    (state,) = {part for layer in read(ZAYA_FIRST).layers for part in layer.stored if isinstance(part, State)}
    # Two columns of ten heads of 128, and half of two heads' values of the last token.
    assert (state.conv_elements, state.conv_codec) == (2 * 10 * 128 + 128, "f32")
    plain = {part for layer in read(without(ZAYA_FIRST, "mamba_cache_dtype")).layers for part in layer.stored}
    assert {part.conv_codec for part in plain if isinstance(part, State)} == {"bf16"}


def test_a_pooled_indexer_keeps_a_key_for_each_pool() -> None:
    glm = {
        "model_type": "glm5_next_text", "num_hidden_layers": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 0,
        "index_head_dim": 128, "index_kpool": 4, "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 4,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 1048576,
    }  # fmt: skip
    reading = read(glm)
    indexed = Latent(rank=512, rope_dim=0, indexer=Indexer(heads=1, dim=128, pool=4))
    assert [layer for layer in reading.layers if isinstance(layer, Latent)] == [indexed] * 4
    assert reading.draft_layers == (indexed,)
    shared = read(glm | {"indexer_types": ["full"] * 5 + ["shared"] * 3})
    assert Counter(layer.indexer is None for layer in shared.layers if isinstance(layer, Latent)) == {False: 2, True: 2}
    assert read(glm | {"index_topk_pattern": "FFFFFSSS"}).layers == shared.layers


def test_ling_3_and_ling_2_5_share_a_name_and_not_a_memory() -> None:
    new, old = read(LING_3_FLASH), read(
        without(LING_3_FLASH, "short_conv_kernel_size") | {"architectures": ["BailingMoeV2_5ForCausalLM"]}
    )  # fmt: skip
    (kda,) = {layer for layer in new.layers if isinstance(layer, State)}
    (lightning,) = {layer for layer in old.layers if isinstance(layer, State)}
    assert (kda.name, kda.conv_elements, kda.state_elements) == ("kda", 3 * 3 * 32 * 128, 32 * 128 * 128)
    assert (lightning.name, lightning.conv_elements, lightning.state_elements) == ("lightning", 0, 32 * 128 * 128)
    saved = without(LING_3_FLASH, "short_conv_kernel_size") | {
        "head_dim": 64, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4
    }  # fmt: skip
    assert read(saved).layers == new.layers


@pytest.mark.parametrize("name", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
@pytest.mark.parametrize(
    ("value", "codec"), [("float32", "f32"), ("bfloat16", "bf16"), ("torch.float16", "f16"), ("auto", "f32")]
)
def test_a_state_has_the_type_that_the_file_says(name: str, value: str, codec: str) -> None:
    states = {layer for layer in read(QWEN | {name: value}).layers if isinstance(layer, State)}
    assert {(state.conv_codec, state.state_codec) for state in states} == {("bf16", codec)}


def test_an_override_reaches_a_state() -> None:
    wide, narrow = read(QWEN), read(QWEN, mamba_ssm_dtype="bfloat16", linear_num_value_heads=64)
    first, second = wide.layers[0], narrow.layers[0]
    assert isinstance(first, State)
    assert isinstance(second, State)
    assert second.state_elements == 2 * first.state_elements
    assert second.state_codec == "bf16"


def test_the_first_mamba_files_name_no_type_and_have_defaults_of_their_package() -> None:
    one, two = read(MAMBA_SSM).layers[0], read(MAMBA_SSM | {"ssm_cfg": {"layer": "Mamba2"}}).layers[0]
    assert one == State(name="mamba", conv_elements=5120 * 3, conv_columns=3, state_elements=5120 * 16)
    assert two == State(name="mamba2", conv_elements=(5120 + 256) * 3, conv_columns=3, state_elements=5120 * 128)
    attention = {"causal": True, "d_conv": 4, "head_dim": 128, "num_heads": 30, "rotary_emb_dim": 64}
    untyped = read(without(MAMBA_SSM, "model_type"))
    assert untyped.layers[0] == one
    assert assumed(untyped)["model_type"] == "mamba_ssm"
    mixed = read(MAMBA_SSM | {"ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [9, 18], "attn_cfg": attention})
    assert kinds(mixed.layers).count("P") == 2
    assert mixed.layers[9].stored == (
        Attention(kv_heads=30, key_dim=128, value_dim=128),
        State(name="short-conv", conv_elements=3 * 128 * 90, conv_columns=3),
    )


def test_rwkv_keeps_a_matrix_a_head_and_two_shifts() -> None:
    base = {"num_hidden_layers": 1, "hidden_size": 512}
    for family in ("rwkv5", "rwkv6", "rwkv7"):
        assert read(base | {"model_type": family, "head_size": 64}).layers == (
            State(name="rwkv", conv_elements=1024, conv_columns=1, state_elements=512 * 64),
        )
    fla = base | {"model_type": "rwkv7", "head_dim": 64, "num_heads": 8, "value_dim": [512], "attn": None}
    assert read(fla).layers[0].state_bytes(BF16) == 1024 * 2 + 512 * 64 * 4
    assert read(base | {"model_type": "rwkv"}).layers == (
        State(name="rwkv", conv_elements=1024, conv_columns=1, state_elements=3 * 512),
    )
    # RWKV-5 calls the width of a head num_attention_heads.
    assert read(base | {"model_type": "rwkv5", "head_size": 64, "num_attention_heads": 64}).layers


def test_what_a_class_fills_in_is_listed() -> None:
    bare = {"model_type": "bamba", "num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32}
    assert assumed(read(bare | {"attn_layer_indices": [1]})) == {
        "num_key_value_heads": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "max_position_embeddings": 262144,
    }  # fmt: skip
    nested = {"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2", "layer_types": ["conv"] * 32}}
    assert assumed(read(nested)) == {
        "num_hidden_layers": 32, "hidden_size": 2560, "conv_L_cache": 3, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 128000,
    }  # fmt: skip


def test_an_extract_of_a_multimodal_file_is_read() -> None:
    inner = QWEN3_5_397B["text_config"]
    assert isinstance(inner, dict)
    flat = read(inner | {"model_type": "qwen3_5_moe"})
    assert flat.layers == read(QWEN3_5_397B).layers


def test_extracts_that_count_layers_are_held_against_the_pattern() -> None:
    counted = {"full_attention_layers": 2, "linear_attention_layers": 6}
    assert kinds(read(QWEN | counted).layers) == "SSSASSSA"
    with pytest.raises(BadFile, match="full_attention_layers is 3; it must be 2"):
        read(QWEN | {"full_attention_layers": 3})
    mixed = read(without(GRANITE, "layer_types") | {"layer_type_counts": {"mamba": 2, "attention": 1}})
    assert Counter(kinds(mixed.layers)) == {"S": 2, "A": 1}
    assert "layer_types" in assumed(mixed)


# What cannot be read exactly: the key that stops it, and what the message says besides.
UNREADABLE: list[tuple[dict[str, Any], str, str]] = [
    (without(GRANITE, "layer_types"), "layer_types", "names each layer mamba or attention"),
    (without(LFM2, "layer_types"), "layer_types", "add one of them"),
    (without(JAMBA) | {"model_type": "bamba"}, "attn_layer_indices", re.escape("--assume attn_layer_indices=[]")),
    (NEMOTRON | {"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern", re.escape("supported are M * - E")),
    (NEMOTRON | {"sliding_window": 512}, "sliding_window", "--assume null"),
    (QWEN | {"layer_types": ["retention"] * 8}, "layer_types", r"layer_types\[0\] is 'retention'"),
    (QWEN | {"mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype", "--assume mamba_ssm_dtype=float32"),
    (QWEN | {"mamba_ssm_dtype": "float32", "mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_dtype", "another type"),
    (QWEN | {"kv_lora_rank": 512}, "kv_lora_rank", "attention over latents"),
    (HYBRID | {"model_type": "minimax_m1", "num_hidden_layers": 2}, "attn_type_list", "which layers are attention"),
    (
        HYBRID | {"model_type": "minimax_text_01", "num_hidden_layers": 2, "attn_type_list": [0, 2]},
        "attn_type_list", "nothing else is known",
    ),
    (HYBRID | {"model_type": "kimi_linear", "num_hidden_layers": 4}, "layer_types", "which layers are linear"),
    (without(LING_3_FLASH, "architectures", "short_conv_kernel_size"), "short_conv_kernel_size", "--assume"),
    (LING_3_FLASH | {"num_hidden_layers": 43}, "layer_group_size", "add layer_types"),
    (LING_3_FLASH | {"use_mla_nope": True}, "use_mla_nope", "--assume false"),
    (PHI4_FLASH | {"mb_per_layer": 3}, "mb_per_layer", "2 is described"),
    (ZAYA_FIRST | {"cca_num_q_heads": 4}, "cca_num_q_heads", "8 heads"),
    (ZAYA_FIRST | {"swa_layers": [1]}, "swa_layers", "--assume swa_layers=null"),
    (
        HYBRID | {
            "model_type": "minicpm_sala", "num_hidden_layers": 1, "mixer_types": ["minicpm4"], "sparse_config": {"a": 1}
        },
        "sparse_config", "--assume sparse_config=null",
    ),
    ({"model_type": "rwkv7", "num_hidden_layers": 1, "hidden_size": 64, "attn": {"layers": [0]}}, "attn", "attn=null"),
    (
        {"model_type": "rwkv", "num_hidden_layers": 1, "hidden_size": 64, "attention_hidden_size": 32},
        "attention_hidden_size", "equal widths",
    ),
    (MAMBA_SSM | {"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer", "supported are Mamba1, Mamba2"),
    (
        {
            "model_type": "mamba2", "num_hidden_layers": 1, "hidden_size": 64, "num_heads": 2, "head_dim": 64,
            "intermediate_size": 256,
        },
        "intermediate_size", "engines differ",
    ),
    (LFM2 | {"conv_dim": 128}, "conv_dim", "engines differ"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "key", "said"), UNREADABLE, ids=[f"{c['model_type']}-{k}" for c, k, _ in UNREADABLE]
)
def test_what_cannot_be_read_exactly_is_refused_by_its_key(config: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said) as caught:
        read(config)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GRANITE | {"layer_types": ["mamba"] * 2}, "layer_types"),
        (GRANITE | {"layer_types": ["mamba"] * 3, "layers_block_type": ["attention"] * 3}, "layers_block_type"),
        (GRANITE | {"layer_types": "mamba"}, "layer_types"),
        (NEMOTRON | {"layers_block_type": ["mamba"] * 4}, "hybrid_override_pattern"),
        (JAMBA | {"attn_layer_offset": 8}, "attn_layer_offset"),
        (HYBRID | {"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [2]}, "attn_layer_indices"),
        (HYBRID | {"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [1, 1]}, "attn_layer_indices"),
        (LFM2 | {"full_attn_idxs": [0]}, "full_attn_idxs"),
        (GRIFFIN | {"block_types": ["recurrent"], "layer_types": ["attention"] * 5}, "layer_types"),
        (QWEN | {"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "linear_num_value_heads"),
        ({"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 64, "expand": 1.3}, "expand"),
        ({"model_type": "mamba2", "num_hidden_layers": 1, "hidden_size": 64, "num_heads": 3}, "num_heads"),
        ({"model_type": "rwkv6", "num_hidden_layers": 1, "hidden_size": 100}, "head_size"),
        ({"model_type": "rwkv6", "num_hidden_layers": 1, "hidden_size": 128, "num_heads": 3}, "num_heads"),
        (KIMI_K3 | {"text_config": KIMI_K3["text_config"] | {"num_hidden_layers": 94}}, "linear_attn_config"),  # type: ignore[operator]
        (GRANITE | {"mamba_n_heads": 3, "mamba_d_head": 64}, "mamba_n_heads"),
    ],
)
def test_what_cannot_be_is_a_bad_file_that_names_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(BadFile) as caught:
        read(config)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("outer", "inside", "text"),
    [
        ("qwen3_5", "text_config", QWEN | {"model_type": "qwen3_5_text"}),
        ("lfm2_vl", "text_config", LFM2),
        ("NemotronH_Nano_VL_V2", "llm_config", NEMOTRON),
        ("nemotron_h_omni", "text_config", NEMOTRON),
        ("minimax_vl_01", "text_config", MINIMAX),
        ("bailing_moe_v3_vl", "text_config", LING_3_FLASH),
    ],
)
def test_a_decoder_inside_a_larger_model_is_the_decoder(outer: str, inside: str, text: dict[str, Any]) -> None:
    assert read({"model_type": outer, inside: text}).layers == read(text).layers


@pytest.mark.parametrize("family", ["jamba", "granitemoehybrid", "nemotron_h", "qwen3_next", "lfm2", "falcon_mamba"])
def test_the_class_stands_in_for_a_type_that_is_left_out(family: str) -> None:
    classes = {
        "jamba": "JambaForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM", "lfm2": "Lfm2ForCausalLM",
        "nemotron_h": "NemotronHForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
        "falcon_mamba": "FalconMambaForCausalLM",
    }  # fmt: skip
    config = next(c for c in (JAMBA, GRANITE, NEMOTRON, QWEN, LFM2, FALCON_MAMBA) if c["model_type"] == family)
    reading = read(without(config, "model_type") | {"architectures": [classes[family]]})
    assert reading.layers == read(config).layers
    assert assumed(reading)["model_type"] == family


@given(pattern=st.text(alphabet="M*-E", min_size=1, max_size=60))
def test_any_pattern_of_letters_is_its_layers(pattern: str) -> None:
    reading = read(NEMOTRON | {"hybrid_override_pattern": pattern})
    assert kinds(reading.layers) == pattern.translate(str.maketrans("M*E", "SA-"))
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    listed = without(NEMOTRON, "hybrid_override_pattern") | {"layers_block_type": [words[letter] for letter in pattern]}
    assert read(listed).layers == reading.layers


@given(
    heads=st.integers(1, 64), groups=st.integers(1, 16), state=st.integers(1, 256), kernel=st.integers(2, 8),
    dim=st.integers(1, 128),
)  # fmt: skip
def test_a_mamba2_state_is_its_shapes(heads: int, groups: int, state: int, kernel: int, dim: int) -> None:
    config = NEMOTRON | {
        "mamba_num_heads": heads, "mamba_head_dim": dim, "n_groups": groups, "ssm_state_size": state,
        "conv_kernel": kernel,
    }  # fmt: skip
    # Two tensors of vLLM: [kernel - 1, heads x dim + 2 x groups x state] in bf16 and [heads, dim, state] in f32.
    size = 2 * (kernel - 1) * (heads * dim + 2 * groups * state) + 4 * heads * dim * state
    assert read(config).layers[0].state_bytes(BF16) == size
