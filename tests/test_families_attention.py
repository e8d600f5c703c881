"""Readers of attention: published models, every way to say which layer keeps what, traps, refusals."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.spec.families import FAMILIES, Reading, read_config
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Indexer, Latent, Layer, Nothing, Parallel, Shared
from kvist.spec.rates import total
from kvist.spec.read import read_description

BF16 = CacheFormat()
FULL, SLIDING = "full_attention", "sliding_attention"


def read(config: dict[str, Any], **overrides: Any) -> Reading:
    return read_config(config, name="config", overrides=overrides)


def assumed(reading: Reading) -> dict[str, Any]:
    return {entry.key: entry.value for entry in reading.assumed}


def shape(layers: int, heads: int, kv_heads: int | None, hidden: int, **more: Any) -> dict[str, Any]:
    found = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, **more}
    return found if kv_heads is None else found | {"num_key_value_heads": kv_heads}


MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a published file says of its memory, and what follows from it in KiB a token."""

    config: dict[str, Any]
    append: float
    retained: float | None = None
    indexer: float = 0
    drafts: int = 0


PUBLISHED = {
    # GPT-2 and its generation
    "facebook/opt-66b": Published(config={"model_type": "opt", **shape(64, 72, None, 9216)}, append=2304),
    "bigscience/bloom-7b1": Published(
        config={"model_type": "bloom", "n_layer": 30, "num_attention_heads": 32, "n_embed": 4096, "seq_length": 2048},
        append=480,
    ),
    "bigcode/starcoder": Published(
        config={"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "n_positions": 8192,
                "multi_query": True},
        append=20,
    ),
    "bigcode/santacoder": Published(
        config={"model_type": "gpt2", "n_layer": 24, "n_head": 16, "n_embd": 2048, "n_positions": 2048,
                "attention_head_type": "multiquery"},
        append=12,
    ),
    "mosaicml/mpt-30b": Published(
        config={"model_type": "mpt", "n_layers": 48, "n_heads": 64, "d_model": 7168, "max_seq_len": 8192,
                "attn_config": {"alibi": True, "attn_type": "multihead_attention", "clip_qkv": None}},
        append=1344,
    ),
    "databricks/dbrx-base": Published(
        config={"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "max_seq_len": 32768,
                "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}},
        append=160,
    ),
    "EleutherAI/gpt-neo-2.7B": Published(
        config={"model_type": "gpt_neo", "num_layers": 32, "num_heads": 20, "hidden_size": 2560, "window_size": 256,
                "attention_layers": ["global", "local"] * 16, "attention_types": [[["global", "local"], 16]]},
        append=320, retained=160,
    ),
    "tiiuae/falcon-40b": Published(
        config={"model_type": "falcon", **shape(60, 128, None, 8192), "num_kv_heads": 8,
                "new_decoder_architecture": True, "multi_query": True},
        append=120,
    ),
    "tiiuae/falcon-7b, as first published": Published(
        config={"model_type": "RefinedWebModel", "n_layer": 32, "n_head": 71, "hidden_size": 4544,
                "multi_query": True},
        append=8,
    ),
    "tiiuae/falcon-40b, as first published": Published(
        config={"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192},
        append=120,
    ),
    "tiiuae/falcon-rw-1b": Published(
        config={"model_type": "falcon", **shape(24, 32, None, 2048), "multi_query": False, "alibi": True,
                "new_decoder_architecture": False},
        append=192,
    ),
    "Qwen/Qwen-7B": Published(
        config={"model_type": "qwen", **shape(32, 32, None, 4096), "kv_channels": 128, "seq_length": 8192,
                "max_position_embeddings": 32768},
        append=512,
    ),
    "THUDM/chatglm2-6b": Published(
        config={"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096,
                "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 32768},
        append=28,
    ),
    "baichuan-inc/Baichuan2-13B-Chat": Published(
        config={"model_type": "baichuan", **shape(40, 40, None, 5120), "model_max_length": 4096}, append=800
    ),
    # One shape for all layers
    "microsoft/phi-2": Published(config={"model_type": "phi", **shape(32, 32, 32, 2560)}, append=320),
    "stabilityai/stablelm-2-12b": Published(config={"model_type": "stablelm", **shape(40, 32, 8, 5120)}, append=200),
    "HuggingFaceTB/SmolLM3-3B": Published(
        config={"model_type": "smollm3", **shape(36, 16, 4, 2048), "no_rope_layers": [1, 1, 1, 0] * 9,
                "use_sliding_window": False, "sliding_window": None, "layer_types": [FULL] * 36},
        append=72,
    ),
    "zai-org/GLM-4.5": Published(
        config={"model_type": "glm4_moe", **shape(92, 96, 8, 5120), "head_dim": 128, "num_nextn_predict_layers": 1},
        append=368, drafts=1,
    ),
    "XiaomiMiMo/MiMo-7B-RL, whose window is off": Published(
        config={"model_type": "mimo", **shape(36, 32, 8, 4096), "use_sliding_window": False,
                "sliding_window": 32768, "max_window_layers": 36, "num_nextn_predict_layers": 1,
                "max_position_embeddings": 32768},
        append=144, drafts=1,
    ),
    "xai-org/grok-2, of a type that is another's": Published(
        config={"model_type": "git", "architectures": ["Grok1ForCausalLM"], **shape(64, 64, 8, 8192),
                "head_dim": 128, "max_position_embeddings": 131072},
        append=256,
    ),
    "stepfun-ai/step3": Published(
        config={"model_type": "step3_text", "num_hidden_layers": 61, "num_attention_heads": 64, "head_dim": 256,
                "hidden_size": 7168, "num_attention_groups": 1, "max_seq_len": 65536},
        append=61,
    ),
    "jetmoe/jetmoe-8b": Published(
        config={"model_type": "jetmoe", "num_hidden_layers": 24, "num_key_value_heads": 16, "kv_channels": 128,
                "hidden_size": 2048, "num_experts_per_tok": 2},
        append=192,
    ),
    # Windows and chunks
    "mistralai/Ministral-8B-Instruct-2410": Published(
        config={"model_type": "mistral", **shape(36, 32, 8, 4096), "head_dim": 128, "sliding_window": 32768},
        append=144, retained=0,
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": Published(
        config={"model_type": "cohere2", **shape(32, 32, 8, 4096), "sliding_window": 4096,
                "sliding_window_pattern": 4, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first"},
        append=128, retained=32,
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": Published(
        config={"model_type": "exaone4", **shape(64, 40, 8, 5120), "head_dim": 128, "sliding_window": 4096,
                "sliding_window_pattern": "LLLG"},
        append=256, retained=64,
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": Published(
        config={"model_type": "exaone4", **shape(30, 32, 8, 2048), "sliding_window": None,
                "sliding_window_pattern": None},
        append=60,
    ),
    "stepfun-ai/Step-3.7-Flash": Published(
        config={"model_type": "step3p7", **shape(45, 64, 8, 4096), "head_dim": 128, "sliding_window": 512,
                "layer_types": [SLIDING if index % 4 else FULL for index in range(45)],
                "num_nextn_predict_layers": 3},
        append=180, retained=48,
    ),
    "poolside/Laguna-XS.2": Published(
        config={"model_type": "laguna", **shape(40, 48, 8, 2048), "head_dim": 128, "sliding_window": 512,
                "layer_types": [SLIDING if index % 4 else FULL for index in range(40)],
                "num_attention_heads_per_layer": [64 if index % 4 else 48 for index in range(40)]},
        append=160, retained=40,
    ),
    "meta-llama/Llama-4-Scout-17B-16E": Published(
        config={"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", **shape(48, 40, 8, 5120), "head_dim": 128, "attention_chunk_size": 8192,
            "max_position_embeddings": 10485760}},
        append=192, retained=48,
    ),
    # Layers that differ
    "apple/OpenELM-270M": Published(
        config={"model_type": "openelm", "num_transformer_layers": 16, "head_dim": 64, "max_context_length": 2048,
                "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4, "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
                "num_gqa_groups": 4},
        append=15.75,
    ),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1: 31 of 80 layers hold no attention": Published(
        config={"model_type": "nemotron-nas", **shape(80, 64, None, 8192), "num_key_value_heads": None,
                "max_position_embeddings": 131072, "block_configs": [
                    {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False,
                                   "window_length": None}}
                    if index < 49 else {"attention": {"n_heads_in_group": None, "no_op": True}}
                    for index in range(80)]},
        append=196,
    ),
    "tencent/Tencent-Hunyuan-Large": Published(
        config={"model_type": "hunyuan", **shape(64, 80, 8, 6400), "attention_head_dim": 128, "use_cla": True,
                "cla_share_factor": 2, "use_mla": False, "kv_lora_rank": None},
        append=128 * 80 / 80,
    ),
    "tencent/Hunyuan-A13B-Instruct": Published(
        config={"model_type": "hunyuan_v1_moe", **shape(32, 32, 8, 4096), "attention_head_dim": 128,
                "use_cla": False, "cla_share_factor": 2},
        append=128,
    ),
    "google/gemma-3n-E2B": Published(
        config={"model_type": "gemma3n", "text_config": {
            "model_type": "gemma3n_text", **shape(30, 8, 2, 2048), "num_kv_shared_layers": 10,
            "sliding_window": 512}},
        append=40, retained=8,
    ),
    "google/gemma-4-31B": Published(
        config={"model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", **shape(60, 32, 16, 5376), "head_dim": 256, "global_head_dim": 512,
            "num_global_key_value_heads": 4, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
            "sliding_window": 1024}},
        append=880, retained=80,
    ),
    # Latents
    "deepseek-ai/DeepSeek-V2-Lite": Published(
        config={"model_type": "deepseek_v2", **shape(27, 16, 16, 2048), **MLA, "q_lora_rank": None}, append=30.375
    ),
    "deepseek-ai/deepseek-vl2-tiny, without latents": Published(
        config={"model_type": "deepseek_vl_v2", "language_config": {
            "model_type": "deepseek_v2", **shape(12, 10, 10, 1280), "use_mla": False, "kv_lora_rank": None,
            "q_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 0}},
        append=60,
    ),
    "moonshotai/Kimi-VL-A3B-Instruct": Published(
        config={"model_type": "kimi_vl", "text_config": {
            "model_type": "deepseek_v3", **shape(27, 16, 16, 2048), **MLA}},
        append=30.375,
    ),
    "moonshotai/Kimi-K2.5": Published(
        config={"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", **shape(61, 64, 64, 7168), **MLA}},
        append=68.625,
    ),
    "openbmb/MiniCPM3-4B": Published(
        config={"model_type": "minicpm3", **shape(62, 40, 40, 2560), **MLA, "kv_lora_rank": 256,
                "qk_rope_head_dim": 32},
        append=34.875,
    ),
    "meituan-longcat/LongCat-Flash-Chat": Published(
        config={"model_type": "longcat_flash", "num_layers": 28, "num_attention_heads": 64, "hidden_size": 6144, **MLA},
        append=63,
    ),
    "zai-org/GLM-5.2: indexers in 21 of 78 layers": Published(
        config={"model_type": "glm_moe_dsa", **shape(78, 64, 64, 6144), **MLA, "index_head_dim": 128,
                "index_n_heads": 32, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3,
                "num_nextn_predict_layers": 1},
        append=93, indexer=5.25, drafts=1,
    ),
    "MiniMaxAI/MiniMax-M3": Published(
        config={"model_type": "minimax_m3_vl", "text_config": {
            "model_type": "minimax_m3_vl_text", **shape(60, 64, 4, 6144), "head_dim": 128,
            "sparse_attention_config": {"sparse_num_index_heads": 4, "sparse_index_dim": 128,
                                        "sparse_attention_freq": [0] * 3 + [1] * 57}}},
        append=134.25, indexer=14.25,
    ),
    # Sparse parts of larger models
    "llava-hf/llava-1.5-7b-hf": Published(
        config={"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096}},
        append=512,
    ),
    "HuggingFaceM4/idefics2-8b": Published(
        config={"model_type": "idefics2", "text_config": {"model_type": "mistral", "max_position_embeddings": 32768}},
        append=128, retained=0,
    ),
    "mistral-community/pixtral-12b": Published(
        config={"model_type": "llava", "text_config": {
            "model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120, "head_dim": 128,
            "num_key_value_heads": 8, "sliding_window": None}},
        append=160,
    ),
    "Qwen/Qwen2-Audio-7B": Published(
        config={"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2", "max_position_embeddings": 8192}},
        append=512,
    ),
    "google/paligemma-3b-pt-224": Published(
        config={"model_type": "paligemma", "text_config": {"model_type": "gemma", **shape(18, 8, 1, 2048)}}, append=18
    ),
    "OpenGVLab/InternVL3-8B": Published(
        config={"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2", **shape(28, 28, 4, 3584)}},
        append=56,
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct, flat": Published(
        config={"model_type": "qwen2_5_vl", **shape(28, 28, 4, 3584), "use_sliding_window": False,
                "sliding_window": 32768, "max_window_layers": 28, "vision_config": {"depth": 32}},
        append=56,
    ),
    "Qwen/Qwen2.5-Omni-7B": Published(
        config={"model_type": "qwen2_5_omni", "thinker_config": {
            "model_type": "qwen2_5_omni_thinker", "text_config": {"model_type": "qwen2_5_omni_text"}}},
        append=56,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_cost_what_they_cost(name: str) -> None:
    case = PUBLISHED[name]
    spec = read_description(case.config, name=name)
    assert spec.append_bytes_per_token(BF16) == case.append * 1024
    assert spec.retained_bytes_per_token(BF16) == (case.append if case.retained is None else case.retained) * 1024
    assert spec.indexer_bytes_per_token(BF16) == case.indexer * 1024
    assert len(spec.draft_layers) == case.drafts


@pytest.mark.parametrize(
    ("config", "append", "cross", "encoder_tokens"),
    [
        # openai/whisper-large-v3
        (
            {"model_type": "whisper", "decoder_layers": 32, "decoder_attention_heads": 20, "d_model": 1280,
             "encoder_layers": 32, "num_hidden_layers": 32, "is_encoder_decoder": True, "max_source_positions": 1500},
            160, 160, 1500,
        ),
        # google/flan-t5-xxl
        (
            {"model_type": "t5", "num_layers": 24, "num_decoder_layers": 24, "num_heads": 64, "d_kv": 64,
             "d_model": 4096, "is_encoder_decoder": True, "n_positions": 512},
            384, 384, None,
        ),
        # meta-llama/Llama-3.2-11B-Vision
        (
            {"model_type": "mllama", "text_config": {
                "model_type": "mllama_text_model", **shape(40, 32, 8, 4096),
                "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}},
            128, 32, None,
        ),
        # naver-clova-ix/donut-base
        (
            {"model_type": "vision-encoder-decoder", "decoder": {
                "model_type": "mbart", "decoder_layers": 4, "d_model": 1024, "decoder_attention_heads": 16,
                "add_cross_attention": True, "is_decoder": True}},
            16, 16, None,
        ),
    ],
)  # fmt: skip
def test_attention_to_an_encoder_is_counted_apart(
    config: dict[str, Any], append: int, cross: int, encoder_tokens: int | None
) -> None:
    spec = read_description(config, name="model")
    assert spec.append_bytes_per_token(BF16) == append * 1024
    assert spec.cross_bytes_per_encoder_token(BF16) == cross * 1024
    assert spec.cross_bytes(BF16) == (encoder_tokens and encoder_tokens * cross * 1024)


def test_every_family_names_its_reader_once() -> None:
    families = list(FAMILIES)
    assert len(families) == len(set(families)) == len(FAMILIES) > 300
    assert "no such family" not in FAMILIES


LLAMA = shape(4, 8, 2, 64)


def windows(reading: Reading) -> list[int | None]:
    return [layer.window for layer in reading.layers if isinstance(layer, Attention)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gemma2"}, [4096, None, 4096, None]),
        ({"model_type": "gpt_oss"}, [128, None, 128, None]),
        ({"model_type": "olmo3"}, [4096, 4096, 4096, None]),
        ({"model_type": "cohere2", "sliding_window_pattern": 2}, [4096, None, 4096, None]),
        ({"model_type": "cohere2", "sliding_window_pattern": 2, "layer_types": [FULL] * 4}, [None] * 4),
        ({"model_type": "afmoe", "global_attn_every_n_layers": 3}, [1024, 1024, None, 1024]),
        ({"model_type": "cwm"}, [None, 8192, 8192, 8192]),
        ({"model_type": "flint"}, [None, None, 513, None]),
        ({"model_type": "beam"}, [512, 512, 512, None]),
        ({"model_type": "muse_glimmer_text"}, [2048, 2048, 2048, None]),
        ({"model_type": "modernbert-decoder", "num_key_value_heads": 8}, [None, 64, 64, None]),
        ({"model_type": "modernbert-decoder", "num_key_value_heads": 8, "local_attention": 32}, [None, 16, 16, None]),
        ({"model_type": "cohere2_moe", "first_k_dense_replace": 1}, [None, 4096, 4096, 4096]),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 2}, [4096, None, None, None]),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 64}, [64] * 4),
        ({"model_type": "qwen3_moe", "use_sliding_window": False, "sliding_window": 64}, [None] * 4),
        ({"model_type": "dots1", "sliding_window": 64, "max_window_layers": 3}, [None, None, None, 64]),
        ({"model_type": "dots1", "sliding_window": None}, [None] * 4),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64}, [None, None, None, 64]),
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 4),
        ({"model_type": "phi3"}, [None] * 4),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LG"}, [64, None, 64, None]),
        ({"model_type": "mellum", "sliding_window": 64, "layer_types": [SLIDING, FULL] * 2}, [64, None, 64, None]),
    ],
)
def test_windows_lie_where_the_family_has_them(config: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read(LLAMA | config)) == expected


def test_llama4_has_chunks_on_the_layers_that_turn_positions() -> None:
    config = LLAMA | {"model_type": "llama4_text", "attention_chunk_size": 64}

    def chunks(**more: Any) -> list[int | None]:
        return [layer.chunk for layer in read(config | more).layers if isinstance(layer, Attention)]

    assert chunks() == [64, 64, 64, None]
    assert chunks(no_rope_layers=[1, 0, 1, 0]) == [64, None, 64, None]
    assert chunks(no_rope_layers=[]) == [64, 64, 64, None]
    assert chunks(attention_chunk_size=None) == [None] * 4
    assert chunks(layer_types=["chunked_attention", FULL, FULL, FULL]) == [64, None, None, None]


@pytest.mark.parametrize("family", ["ministral", "dots1", "exaone4", "mistral"])
def test_a_window_of_the_class_is_not_taken_where_null_means_none(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"sliding_window is missing.* --assume sliding_window=null"):
        read(LLAMA | {"model_type": family})
    assert windows(read(LLAMA | {"model_type": family}, sliding_window=None)) == [None] * 4


@pytest.mark.parametrize("family", ["llama", "qwen3_vl_text", "olmo2", "deepseek_v3", "cohere"])
def test_a_list_may_name_windows_only_where_the_family_has_them(family: str) -> None:
    config = LLAMA | {"model_type": family, "layer_types": [SLIDING] * 4, "sliding_window": 64}
    with pytest.raises(UnsupportedModel, match=r"layer_types|sliding_window"):
        read(config)


def test_own_names_and_standard_ones_must_agree() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 8, "n_embd": 64}
    assert read(gpt2 | {"num_hidden_layers": 2}).layers == read(gpt2).layers
    with pytest.raises(BadFile, match="num_hidden_layers is 3; it must be as n_layer says"):
        read(gpt2 | {"num_hidden_layers": 3})
    assert len(read(gpt2, num_hidden_layers=3).layers) == len(read(gpt2, n_layer=3).layers) == 3
    with pytest.raises(BadFile, match="n_layer is missing; a gpt2 configuration names it"):
        read({"model_type": "gpt2", "n_head": 8, "n_embd": 64})
    with pytest.raises(BadFile, match="n_head is 'x'"):
        read(gpt2 | {"n_head": "x"})


def test_what_an_override_would_have_cost() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 8, "n_embd": 64}
    assert read(gpt2, num_key_value_heads=1).layers == (Attention(kv_heads=1, key_dim=8, value_dim=8),) * 2
    falcon = {"model_type": "falcon", **shape(2, 71, None, 4544), "num_kv_heads": 71, "multi_query": True}
    assert read(falcon).layers[0] == Attention(kv_heads=1, key_dim=64, value_dim=64)
    assert read(falcon, num_key_value_heads=71).layers[0] == Attention(kv_heads=71, key_dim=64, value_dim=64)
    deepseek = {"model_type": "deepseek_v3", **shape(2, 128, 128, 7168), **MLA}
    assert read(deepseek, kv_lora_rank=256).layers[0] == Latent(rank=256, rope_dim=64)


def test_a_number_of_kv_heads_that_the_class_does_not_know_is_refused() -> None:
    for family in ("opt", "gpt_neox", "persimmon", "qwen", "baichuan"):
        with pytest.raises(UnsupportedModel, match=r"num_key_value_heads is 2; .* stores 8 heads here"):
            read(LLAMA | {"model_type": family})
        assert read(LLAMA | {"model_type": family, "num_key_value_heads": 8}).layers


def test_defaults_of_code_that_is_published_apart_are_not_taken_for_kv_heads() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config = bare | {"model_type": "internlm2", "max_position_embeddings": 512}
    with pytest.raises(BadFile, match="num_key_value_heads is missing; a internlm2 configuration names it"):
        read(config)
    assert read(config | {"num_key_value_heads": None}).layers == (Attention(kv_heads=8, key_dim=8, value_dim=8),) * 4
    phi = {"model_type": "phi-msft", "n_layer": 2, "n_head": 8, "n_embd": 64}
    assert read(phi | {"n_head_kv": None}).layers[0] == Attention(kv_heads=8, key_dim=8, value_dim=8)
    assert read(phi | {"n_head_kv": 2}).layers[0] == Attention(kv_heads=2, key_dim=8, value_dim=8)
    assert [entry.source for entry in read(phi).assumed] == ["default of phi-msft in the code published with it"]


def test_parts_take_the_defaults_of_their_class_and_whole_files_do_not() -> None:
    part = {"model_type": "llava", "text_config": {"model_type": "qwen2"}}
    reading = read(part)
    assert reading.layers == (Attention(kv_heads=32, key_dim=128, value_dim=128),) * 32
    filled = assumed(reading)
    assert {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}.items() <= filled.items()
    with pytest.raises(BadFile, match="num_hidden_layers is missing"):
        read({"model_type": "qwen2"})
    assert read({"model_type": "llava", "text_config": {}}).layers == read(
        {"model_type": "llava", "text_config": {"model_type": "llama"}}
    ).layers  # fmt: skip


def test_wrappers_say_where_the_decoder_is_missing_or_strange() -> None:
    with pytest.raises(BadFile, match="text_config is missing; a llava configuration names it"):
        read({"model_type": "llava"})
    with pytest.raises(BadFile, match="text_config is 3; it must be an object"):
        read({"model_type": "llava", "text_config": 3})
    with pytest.raises(UnsupportedModel, match="text_config: model_type is 'siglip'"):
        read({"model_type": "llava", "text_config": {"model_type": "siglip"}})
    with pytest.raises(UnsupportedModel, match="kv_lora_rank is 512: it means attention over latents"):
        read({"model_type": "llava", "text_config": {"model_type": "llama"}, "kv_lora_rank": 512})
    for family in ("llama", "granite", "cohere2", "gemma2"):
        part = {"model_type": family, **LLAMA, "kv_lora_rank": 512}
        with pytest.raises(UnsupportedModel, match="text_config: kv_lora_rank is 512: it means attention over latents"):
            read({"model_type": "llava", "text_config": part})
    assert read({"model_type": "qwen3_vl", **LLAMA, "head_dim": 16}).layers[0] == Attention(
        kv_heads=2, key_dim=16, value_dim=16
    )
    inner = {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2", **LLAMA}}
    assert read(inner, num_key_value_heads=8).layers[0] == Attention(kv_heads=8, key_dim=8, value_dim=8)


def test_one_layer_may_have_a_configuration_of_its_own() -> None:
    config = LLAMA | {"model_type": "gemma2", "sliding_window": 64}
    own = {"1": {"num_key_value_heads": 4}, SLIDING: {"head_dim": 16, "sliding_window": 32}}
    layers = read(config | {"head_dim": 8, "per_layer_config": own}).layers
    assert layers[0] == Attention(kv_heads=2, key_dim=16, value_dim=16, window=32)
    assert layers[1] == Attention(kv_heads=4, key_dim=8, value_dim=8)
    with pytest.raises(UnsupportedModel, match=r"per_layer_config\.1: attention_sinks is 4"):
        read(config | {"per_layer_config": {"1": {"attention_sinks": 4}}})
    for wrong in (3, {"9": {}}, {"1": 3}):
        with pytest.raises(BadFile, match="per_layer_config is"):
            read(config | {"per_layer_config": wrong})
    with pytest.raises(UnsupportedModel, match=r"per_layer_config is .*: it means layers of several kinds"):
        read(LLAMA | {"model_type": "llama", "per_layer_config": {"0": {"head_dim": 4}}})


def test_gemma_shares_the_last_layer_of_each_kind() -> None:
    config = shape(10, 8, 2, 64) | {"model_type": "gemma3n_text", "num_kv_shared_layers": 4, "sliding_window": 64}
    layers = read(config).layers
    assert [layer.source if isinstance(layer, Shared) else None for layer in layers] == [None] * 6 + [5, 5, 5, 4]
    with pytest.raises(BadFile, match="num_kv_shared_layers is 8; it must be so few that a layer of kind full"):
        read(config | {"num_kv_shared_layers": 8})
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention is 'all'; an encoder keeps no cache"):
        read(config | {"use_bidirectional_attention": "all"})


def test_gemma4_ends_with_a_full_layer_and_has_its_own_heads_there() -> None:
    config = shape(4, 8, 4, 64) | {"model_type": "gemma4_text", "head_dim": 16, "sliding_window": 64}
    layers = read(config).layers
    assert layers[0] == Attention(kv_heads=4, key_dim=16, value_dim=16, window=64)
    assert layers[3] == Attention(kv_heads=4, key_dim=512, value_dim=512)
    own = {"global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    assert read(config | own).layers[3] == Attention(kv_heads=2, key_dim=32, value_dim=32)
    # Without equal keys and values the number of its own heads does not count.
    assert read(config | own | {"attention_k_eq_v": False}).layers[3] == Attention(kv_heads=4, key_dim=32, value_dim=32)
    # As transformers 5 saves it.
    saved = {"per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 2}}, "attention_k_eq_v": True}
    assert read(config | saved).layers == read(config | own).layers


def test_block_configurations_say_what_each_layer_holds() -> None:
    def layers(*attention: dict[str, Any]) -> tuple[Layer, ...]:
        blocks = [{"attention": own, "ffn": {}} for own in attention]
        return read(shape(len(blocks), 8, None, 64) | {"model_type": "nemotron-nas", "block_configs": blocks}).layers

    assert layers({"n_heads_in_group": 4}, {"no_op": True}, {"replace_with_linear": True}) == (
        Attention(kv_heads=2, key_dim=8, value_dim=8),
        Nothing(),
        Nothing(),
    )
    with pytest.raises(BadFile, match=r"block_configs\[0\]\.attention\.n_heads_in_group is 3; it must be a divisor"):
        layers({"n_heads_in_group": 3})
    with pytest.raises(UnsupportedModel, match="window_length is 512; it is not read for one layer"):
        layers({"n_heads_in_group": 4, "window_length": 512})
    with pytest.raises(BadFile, match=r"block_configs is of length 1; it must be one entry for each of the 2 layers"):
        read(shape(2, 8, None, 64) | {"model_type": "deci", "block_configs": [{}]})
    with pytest.raises(UnsupportedModel, match="block_configs is missing"):
        read(shape(2, 8, 8, 64) | {"model_type": "deci"})
    older = shape(2, 8, 8, 64) | {"model_type": "deci", "num_key_value_heads_per_layer": [4, 1]}
    assert [layer.kv_heads for layer in read(older).layers if isinstance(layer, Attention)] == [4, 1]


def test_hunyuan_shares_across_layers_when_that_is_switched_on() -> None:
    config = LLAMA | {"model_type": "hunyuan", "cla_share_factor": 2}
    full = Attention(kv_heads=2, key_dim=8, value_dim=8)
    assert read(config | {"use_cla": True}).layers == (full, Shared(source=0), full, Shared(source=2))
    assert read(config | {"use_cla": False}).layers == (full,) * 4


DEEPSEEK = {"model_type": "deepseek_v32", **shape(3, 8, 8, 64), **MLA, "index_head_dim": 128}
V4 = {"model_type": "deepseek_v4", **shape(4, 8, 1, 64), "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128}


def test_indexers_lie_where_the_schedule_has_them() -> None:
    indexed = Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128))
    plain = Latent(rank=512, rope_dim=64)
    assert read(DEEPSEEK).layers == (indexed,) * 3
    glm = DEEPSEEK | {"model_type": "glm_moe_dsa"}
    assert read(glm).layers == (indexed,) * 3
    assert read(glm | {"indexer_types": ["full", "shared", "full"]}).layers == (indexed, plain, indexed)
    assert read(glm | {"index_topk_pattern": "FSS"}).layers == (indexed, plain, plain)
    assert read(glm | {"index_topk_freq": 2, "index_skip_topk_offset": 1}).layers == (indexed, plain, indexed)
    assert read(glm | {"model_type": "hy_v4"}).layers == (indexed, indexed, plain)
    with pytest.raises(BadFile, match=r"indexer_types\[1\] is 'half'; it must be full or shared"):
        read(glm | {"indexer_types": ["full", "half", "full"]})
    with pytest.raises(UnsupportedModel, match=r"indexer_types is .*: it means an indexer"):
        read(DEEPSEEK | {"indexer_types": ["full", "shared", "full"]})


def test_latents_of_a_file_that_prints_a_width_instead() -> None:
    # deepseek-ai/DeepSeek-V3.2-Exp, as vLLM's accounts print it
    bare = {"model_type": "deepseek_v32", **shape(3, 128, 128, 7168), "head_dim": 576, "is_mla": True}
    reading = read(bare)
    assert reading.layers == (Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128)),) * 3
    assert assumed(reading)["kv_lora_rank"] == 512
    with pytest.raises(UnsupportedModel, match="head_dim is 320; a deepseek_v32 layer keeps 512"):
        read(bare | {"head_dim": 320})


def test_latents_may_be_read_from_another_layer() -> None:
    config = DEEPSEEK | {
        "model_type": "mistral_large4_text",
        "kv_source_layers": [0, 0, 2],
        "no_rope_layers": [1, 1, 0],
    }
    layers = read(config | {"indexer_types": ["full", "shared", "full"]}).layers
    assert layers[1:] == (Shared(source=0), Latent(rank=512, rope_dim=0, indexer=Indexer(heads=1, dim=128)))
    own = read(config).layers[1]
    assert isinstance(own, Parallel)
    assert own.append_bytes(BF16) == own.indexer_bytes(BF16) == 256
    for wrong in ([1, 1, 2], [0, 1, 3], [0, 0, 1]):
        with pytest.raises(BadFile, match=r"kv_source_layers\[\d\] is \d; it must be itself or an earlier layer"):
            read(config | {"kv_source_layers": wrong})


def test_longcat_counts_two_blocks_a_layer_and_will_not_guess_which_it_is_told() -> None:
    config = {"model_type": "longcat_flash", "num_attention_heads": 8, "hidden_size": 64, **MLA}
    assert len(read(config | {"num_layers": 2}).layers) == 4
    with pytest.raises(
        UnsupportedModel, match="num_hidden_layers is 28; it may count layers or their attention blocks"
    ):
        read(config | {"num_hidden_layers": 28})


def test_compressed_layers_by_ratios_or_kinds() -> None:
    window = Latent(rank=448, rope_dim=64, window=128)
    sparse = Compressed(rank=448, rope_dim=64, ratio=4, window=128, indexer=Indexer(heads=1, dim=128))
    heavy = Compressed(rank=448, rope_dim=64, ratio=128, window=128)
    expected = (window, heavy, sparse, heavy)
    assert read(V4 | {"compress_ratios": [0, 128, 4, 128]}).layers == expected
    drafting = read(V4 | {"compress_ratios": [0, 128, 4, 128, 0], "num_nextn_predict_layers": 1})
    assert (drafting.layers, drafting.draft_layers) == (expected, (window,))
    kinds = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
    rated = V4 | {"layer_types": [*kinds, kinds[1]], "compress_rates": {"heavily_compressed_attention": 64}}
    assert read(rated).layers[1] == Compressed(rank=448, rope_dim=64, ratio=64, window=128)
    assert read(V4).layers == (heavy, heavy, heavy, sparse)
    assert "compress_ratios" in assumed(read(V4))
    with pytest.raises(UnsupportedModel, match=r"compress_ratios is .*; entry 1 must be one of 0, 4, 128"):
        read(V4 | {"compress_ratios": [0, 2, 4, 128]})
    with pytest.raises(BadFile, match="compress_ratios is of length 3"):
        read(V4 | {"compress_ratios": [0, 4, 128]})


def test_mimo_prints_a_chunk_that_repeats_the_window() -> None:
    config = shape(2, 8, 4, 64) | {"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128}
    config |= {"sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128}
    config |= {"swa_num_key_value_heads": 8, "hybrid_layer_pattern": [0, 1]}
    assert read(config).layers == (
        Attention(kv_heads=4, key_dim=192, value_dim=128),
        Attention(kv_heads=8, key_dim=192, value_dim=128, window=128),
    )
    with pytest.raises(UnsupportedModel, match="attention_chunk_size is 64; no layer has chunks"):
        read(config | {"attention_chunk_size": 64})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "chatglm", "num_layers": 2, "num_attention_heads": 8, "multi_query_group_num": 2},
         "multi_query_attention is missing.*--assume multi_query_attention=true"),
        ({"model_type": "mpt", "n_layers": 2, "n_heads": 8, "d_model": 64, "attn_config": {"attn_type": "paged"}},
         "attn_type is 'paged'; supported are multihead_attention"),
        ({"model_type": "mpt", "n_layers": 2, "n_heads": 8, "d_model": 64, "attn_config": {"sliding_window_size": 9}},
         "sliding_window_size is 9; it is not read for model_type mpt"),
        ({"model_type": "minimax_m2", **LLAMA, "attn_type_list": [1, 0, 1, 1]}, "attn_type_list is .*attention"),
        ({"model_type": "phi3", **LLAMA, "full_attn_mod": 2}, "full_attn_mod is 2; 1 is read"),
        ({"model_type": "openelm", "num_transformer_layers": 2, "head_dim": 8, "num_kv_heads": 2},
         "num_kv_heads is 2; a list"),
        ({"model_type": "deepseek_v2", **LLAMA, "use_mla": False, "qk_rope_head_dim": 64},
         "qk_rope_head_dim is 64; the file has no kv_lora_rank"),
        ({"model_type": "dots3_note", **LLAMA, "use_dsa": False}, "use_dsa is False; true is read"),
        ({"model_type": "deepseek_v4", **LLAMA}, "num_key_value_heads is 2; one vector a token"),
        ({"model_type": "gpt2", "n_layer": 2, "n_head": 8, "n_embd": 64, "attention_head_type": "grouped"},
         "attention_head_type is 'grouped'; supported are multihead, multiquery"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_exactly_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        read(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gpt_neo", "num_layers": 2, "num_heads": 8, "hidden_size": 64}, "attention_types is missing"),
        ({"model_type": "gpt_neo", "num_layers": 2, "num_heads": 8, "hidden_size": 64, "attention_types": [["a", 2]]},
         r"attention_types is .*; it must be a list of \[kinds, how often\]"),
        ({"model_type": "gpt_neo", "num_layers": 2, "num_heads": 8, "hidden_size": 64,
          "attention_types": [[["global"], 1]]}, "global or local for each of the 2 layers"),
        ({"model_type": "bart", "decoder_layers": 2, "decoder_attention_heads": 3, "d_model": 64},
         "d_model is 64; it must be a multiple of decoder_attention_heads"),
        ({"model_type": "mllama_text_model", **LLAMA, "cross_attention_layers": [9]},
         "cross_attention_layers is .*; it must be a list of layers from 0 to 3"),
        ({"model_type": "llama4_text", **LLAMA, "no_rope_layers": [1]}, "no_rope_layers is of length 1"),
        ({"model_type": "exaone4", **LLAMA, "sliding_window": 8, "sliding_window_pattern": "LX"},
         "sliding_window_pattern is 'LX'"),
        ({"model_type": "glm4_moe", **LLAMA, "num_attention_heads": 6}, "or give head_dim"),
        ({"model_type": "cohere2", **LLAMA, "full_attention_layers": 2}, "full_attention_layers is 2; it must be 1"),
        ({"model_type": "mimo_v2_flash", **LLAMA, "hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern is of length"),
    ],
)  # fmt: skip
def test_values_out_of_range_name_key_and_value(config: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile, match=says):
        read(config)


UNTYPED = LLAMA | {"head_dim": 8, "max_position_embeddings": 512, "vocab_size": 100, "_source": "an extract"}
FULL_LAYER = Attention(kv_heads=2, key_dim=8, value_dim=8)


def test_a_file_without_a_type_is_read_where_every_count_is_explicit() -> None:
    reading = read(UNTYPED)
    assert reading.layers == (FULL_LAYER,) * 4
    assert assumed(reading) == {"model_type": None}
    kinds = [SLIDING, FULL] * 2
    assert windows(read(UNTYPED | {"layer_types": kinds, "sliding_window": 64})) == [64, None, 64, None]
    counted = {"full_attention_layers": 1, "sliding_attention_layers": 3, "sliding_window": 64}
    assert windows(read(UNTYPED | counted)) == [None, 64, 64, 64]
    own = {"swa_num_key_value_heads": 4, "swa_head_dim": 16, "v_head_dim": 4, "swa_v_head_dim": 12}
    assert read(UNTYPED | counted | own).layers[:2] == (
        Attention(kv_heads=2, key_dim=8, value_dim=4),
        Attention(kv_heads=4, key_dim=16, value_dim=12, window=64),
    )
    shared = counted | {"sliding_attention_layers": 1, "num_kv_shared_layers": 2, "stored_layers": 2}
    assert read(UNTYPED | shared | {"global_head_dim": 32}).layers == (
        Attention(kv_heads=2, key_dim=32, value_dim=32),
        Attention(kv_heads=2, key_dim=8, value_dim=8, window=64),
        Shared(source=0),
        Shared(source=0),
    )
    assert read(UNTYPED | {"use_sliding_window": False, "sliding_window": 64}).layers == (FULL_LAYER,) * 4
    latents = read(
        {key: UNTYPED[key] for key in UNTYPED if key != "head_dim"}
        | MLA
        | {"index_head_dim": 128, "indexer_full_layers": 1}
    ).layers
    assert total(layer.indexer_bytes(BF16) for layer in latents) == 256


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": None}, "and so is head_dim, which its class might fill in"),
        ({"num_key_value_heads": None}, "and so is num_key_value_heads"),
        ({"num_hidden_layers": None}, "and so is num_hidden_layers"),
        ({"sliding_window": 64}, "sliding_window is 64: which layers have it depends on the type"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: what it means depends on the type"),
        ({"mystery": 0}, "mystery is 0: what it means depends on the type"),
        ({"layer_types": [SLIDING] * 4}, "it names windows, but sliding_window is missing"),
        ({"full_attention_layers": 3}, "the numbers by kind do not make up 4 layers"),
        ({"kv_lora_rank": 512}, "and so is qk_rope_head_dim"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}, "and so is indexer_full_layers"),
    ],
)
def test_a_file_without_a_type_is_refused_where_a_type_would_matter(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"model_type is missing.*{says}") as caught:
        read(UNTYPED | changes)
    assert caught.value.key == "model_type"
    assert "--assume model_type=TYPE" in str(caught.value)


def test_an_unknown_type_is_read_by_its_class_and_that_is_said() -> None:
    reading = read(LLAMA | {"model_type": "my_llama", "architectures": ["LlamaForCausalLM"]})
    assert reading.layers == (FULL_LAYER,) * 4
    assert assumed(reading)["model_type"] == "llama"
    with pytest.raises(UnsupportedModel, match=r"model_type is 'lama', .* \(nearest: .*llama.*\)"):
        read(LLAMA | {"model_type": "lama"})
    with pytest.raises(UnsupportedModel, match="model_type is missing"):
        read(UNTYPED | {"architectures": ["UnheardOfForCausalLM"]})


def test_a_printed_window_that_no_layer_has_is_refused_unless_it_is_off() -> None:
    config = LLAMA | {"model_type": "olmo2", "sliding_window": 64}
    with pytest.raises(UnsupportedModel, match="sliding_window is 64: it means a window"):
        read(config)
    assert read(config | {"use_sliding_window": False}).layers == (FULL_LAYER,) * 4


@pytest.mark.parametrize("family", ["olmo2", "gemma2", "deepseek_v3", "gpt2", "bart", "t5", "llama4_text", "openelm"])
@pytest.mark.parametrize("key", ["ssm_state_size", "linear_num_key_heads", "hybrid_override_pattern", "kda_num_heads"])
def test_keys_of_another_memory_are_refused(family: str, key: str) -> None:
    base = LLAMA | MLA | {
        "n_layer": 4, "n_head": 8, "n_embd": 64, "decoder_layers": 4, "decoder_attention_heads": 8, "d_model": 64,
        "num_layers": 4, "num_heads": 8, "d_kv": 8, "num_transformer_layers": 4, "head_dim": 8,
        "num_query_heads": [8] * 4, "num_kv_heads": [2] * 4, "attention_head_type": "multihead",
    }  # fmt: skip
    kept = {"deepseek_v3": {*LLAMA, *MLA}, "gpt2": {"n_layer", "n_head", "n_embd"}, "t5": {"num_layers", "num_heads"}}
    kept |= {"bart": {"decoder_layers", "decoder_attention_heads", "d_model"}}
    kept |= {"openelm": {"num_transformer_layers", "num_query_heads", "num_kv_heads", "head_dim"}}
    config = {"model_type": family, **{name: base[name] for name in kept.get(family, set(LLAMA))}}
    assert read(config).layers
    with pytest.raises(UnsupportedModel, match=rf"{key} is .*: it means .*; --assume {key}=null") as caught:
        read(config | {key: "M-M*" if key == "hybrid_override_pattern" else 16})
    assert caught.value.key == key
    assert read(config | {key: None}).layers == read(config).layers


def test_drafts_are_counted_apart_under_all_their_names() -> None:
    llama = LLAMA | {"model_type": "glm4_moe"}
    for printed, count in (
        ({"num_nextn_predict_layers": 2}, 2),
        ({"num_mtp_layers": 1}, 1),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_mtp_modules": 3, "mtp_transformer_layers": 2, "use_mtp": True}, 6),
        ({"num_mtp_modules": 3, "use_mtp": False}, 0),
    ):
        assert read(llama | printed).draft_layers == (FULL_LAYER,) * count
    windowed = read(LLAMA | {"model_type": "gemma2", "num_nextn_predict_layers": 1})
    assert windowed.draft_layers == ()
    assert "draft_layers" in assumed(windowed)
    with pytest.raises(BadFile, match="num_nextn_predict_layers is -1"):
        read(llama | {"num_nextn_predict_layers": -1})


def test_an_override_that_no_reader_asks_for_is_an_error_of_the_call() -> None:
    with pytest.raises(InputError, match="'kv_heads' is no key that is read for model_type gemma2"):
        read(LLAMA | {"model_type": "gemma2"}, kv_heads=8)


def test_a_cross_layer_of_whisper_knows_its_length() -> None:
    layer = read({"model_type": "whisper", "decoder_layers": 1, "decoder_attention_heads": 8, "d_model": 64}).layers[0]
    assert isinstance(layer, Parallel)
    assert layer.parts[1] == Cross(kv_heads=8, key_dim=8, value_dim=8, encoder_tokens=1500)
