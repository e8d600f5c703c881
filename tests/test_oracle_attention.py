"""Models of attention against transformers: real geometry, few layers, one forward pass on the meta device.

The sizes of all layers must agree, layer by layer. Where transformers keeps something else than our convention says,
the case names the difference; each is written down once, in ``DIFFERENCES``.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from cache_oracle import Kept, kept_by_cross_attention, kept_by_transformers, kept_with_an_encoder

from kvist.spec.families import read_config
from kvist.spec.layers import Attention, Compressed, Cross, Indexer, Latent, Layer, Parallel

TOKENS, WINDOW = 24, 8

# What transformers 5.24 keeps otherwise than our convention, and what that does to the elements of a layer.
DIFFERENCES = {
    "window": "a window or chunk keeps `window - 1` tokens once it is full: the next query brings the last itself",
    "everything": "local layers of GPT-Neo keep all tokens, and a mask hides those before the window",
    "all heads": "Falcon of the new architecture repeats its KV heads for all queries before it stores them",
    "twice": "layers of DeepSeek-V4 that are windows alone keep their one vector as key and as value",
    "one more": "MiMo-V2 adds one to the window that the file prints",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration with real sizes, few layers, and how transformers differs."""

    config: dict[str, Any]
    differs: str = "window"
    device: str = "meta"
    slow: bool = True


def shape(layers: int, heads: int, kv_heads: int | None, width: int | None, hidden: int, **more: Any) -> dict[str, Any]:
    """Heads and widths under Llama's names."""
    found = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, **more}
    return found | {
        key: value for key, value in (("num_key_value_heads", kv_heads), ("head_dim", width)) if value is not None
    }


# Feed-forward sizes are made small: no byte of a cache depends on them.
SMALL = {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOWED = {"sliding_window": WINDOW}
GPT = {"n_layer": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
INDEX = {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 8}
SPARSE = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
SPARSE_INDEX = {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 8, "index_topk_blocks": 2}
DENSE_FIRST = {"first_k_dense_replace": 8}

CASES: dict[str, Case] = {
    # One shape for all layers.
    "llama": Case(config=shape(2, 32, 8, None, 4096), slow=False),
    "qwen3": Case(config=shape(2, 16, 8, 128, 1024), slow=False),
    "mistral": Case(config=shape(2, 32, 8, None, 4096, **WINDOWED), slow=False),
    "gemma3_text": Case(config=shape(7, 8, 4, 256, 2560, **WINDOWED), slow=False),
    "qwen2": Case(config=shape(4, 28, 4, None, 3584, use_sliding_window=True, max_window_layers=2, **WINDOWED)),
    "gpt2": Case(config={"n_layer": 2, "n_head": 25, "n_embd": 1600}, device="cpu", slow=False),
    "gpt_bigcode": Case(config={**GPT, "n_head": 48, "n_embd": 6144, "multi_query": True}, slow=False),
    "codegen": Case(config={**GPT, "n_head": 16, "n_embd": 1024, "rotary_dim": 32}),
    "gptj": Case(config={**GPT, "n_head": 16, "n_embd": 4096, "rotary_dim": 64}),
    "ctrl": Case(config={**GPT, "n_head": 16, "n_embd": 1280}),
    "gpt_neox": Case(config=shape(2, 64, None, None, 6144)),
    "gpt_neox_japanese": Case(config=shape(2, 32, None, None, 2560)),
    "opt": Case(config=shape(2, 56, None, None, 7168, ffn_dim=64)),
    "biogpt": Case(config=shape(2, 16, None, None, 1024)),
    "persimmon": Case(config=shape(2, 64, None, None, 4096)),
    "xglm": Case(config={"num_layers": 2, "attention_heads": 16, "d_model": 1024, "ffn_dim": 64}),
    "bloom": Case(config={"n_layer": 2, "n_head": 32, "hidden_size": 4096}, slow=False),
    "mpt": Case(config={"n_layers": 2, "n_heads": 32, "d_model": 4096}),
    # tiiuae/falcon-7b prints 71 KV heads, and stores one.
    "falcon": Case(
        config=shape(2, 71, None, None, 4544, num_kv_heads=71, multi_query=True, new_decoder_architecture=False),
        slow=False,
    ),
    "falcon of the new architecture": Case(
        config=shape(2, 128, None, None, 8192, num_kv_heads=8, new_decoder_architecture=True, model_type="falcon"),
        differs="all heads",
    ),
    "dbrx": Case(
        config={
            "n_layers": 1, "n_heads": 48, "d_model": 6144,
            "attn_config": {"kv_n_heads": 8, "rope_theta": 5e5, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        device="cpu",
    ),
    "apertus": Case(config=shape(2, 32, 8, None, 4096)),
    "arcee": Case(config=shape(2, 20, 4, 128, 2560)),
    "aria_text": Case(config=shape(2, 20, 20, None, 2560, moe_num_experts=4, moe_topk=2)),
    "bitnet": Case(config=shape(2, 20, 5, None, 2560)),
    "cohere": Case(config=shape(2, 64, 64, None, 8192)),
    "diffllama": Case(config=shape(2, 32, 8, None, 2048)),
    "doge": Case(config=shape(2, 8, 4, None, 1024)),
    "emu3_text_model": Case(config=shape(2, 32, 8, None, 4096)),
    "ernie4_5": Case(config=shape(2, 16, 2, 128, 1024)),
    "ernie4_5_moe": Case(config=shape(2, 20, 4, None, 2560, moe_num_experts=4, moe_k=2)),
    "exaone": Case(config={**shape(2, 32, 8, None, 4096)}),
    "flex_olmo": Case(config=shape(2, 32, 32, None, 4096, **EXPERTS)),
    "gemma": Case(config=shape(2, 8, 1, 256, 2048), slow=False),
    "glm": Case(config=shape(2, 32, 2, 128, 4096)),
    "glm4": Case(config=shape(2, 48, 2, 128, 6144)),
    "glm4_moe": Case(config=shape(2, 96, 8, 128, 5120, **ROUTED)),
    "glm4v_text": Case(
        config=shape(2, 32, 2, None, 4096)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12],
                               "partial_rotary_factor": 0.5}}
    ),
    "granite": Case(config=shape(2, 32, 8, None, 4096)),
    "granitemoe": Case(config=shape(2, 24, 8, None, 1536, **LOCAL)),
    "granitemoeshared": Case(config=shape(2, 24, 8, None, 1536, **LOCAL)),
    "helium": Case(config=shape(2, 20, 20, 128, 2560)),
    "hunyuan_v1_dense": Case(config=shape(2, 32, 8, 128, 4096)),
    "hunyuan_v1_moe": Case(config=shape(2, 32, 8, 128, 4096, num_experts=4, moe_topk=2)),
    "hy_v3": Case(config=shape(2, 64, 8, 128, 4096, **EXPERTS)),
    "hyperclovax": Case(config=shape(2, 24, 8, 128, 3072)),
    "internlm3": Case(config=shape(2, 32, 2, 128, 4096)),
    "jais2": Case(config=shape(2, 26, 26, 128, 3328)),
    # jetmoe/jetmoe-8b: 32 query heads are 2 experts of 16 heads each.
    "jetmoe": Case(
        config={
            "num_hidden_layers": 1, "num_key_value_heads": 16, "kv_channels": 128, "hidden_size": 64,
            "num_experts_per_tok": 2, "num_local_experts": 2,
        },
        device="cpu",
    ),
    "minimax_m2": Case(config=shape(2, 48, 8, 128, 3072, **LOCAL)),
    "molmo2_text": Case(config=shape(2, 32, 8, 128, 4096)),
    "nanochat": Case(config=shape(2, 6, 6, None, 768)),
    "nemotron": Case(config=shape(2, 48, 8, 128, 6144)),
    "olmo": Case(config=shape(2, 32, 32, None, 4096)),
    "olmo2": Case(config=shape(2, 40, 8, None, 5120)),
    "olmoe": Case(config=shape(2, 16, 16, None, 2048, **EXPERTS)),
    "paddleocr_vl_text": Case(config=shape(2, 16, 2, 128, 1024) | MROPE),
    "phi": Case(config=shape(2, 32, 32, None, 2560)),
    "qwen3_vl_text": Case(config=shape(2, 32, 8, 128, 4096)),
    "qwen3_vl_moe_text": Case(config=shape(2, 32, 4, 128, 2048, **EXPERTS)),
    "sarvam_moe": Case(config=shape(2, 64, 4, 64, 4096, **ROUTED)),
    "seed_oss": Case(config=shape(2, 80, 8, 128, 5120)),
    "solar_open": Case(config=shape(2, 64, 8, 128, 4096, **ROUTED)),
    "stablelm": Case(config=shape(2, 32, 32, None, 2560)),
    # Windows and chunks.
    "ministral": Case(config=shape(2, 32, 8, 128, 4096, **WINDOWED)),
    "ministral3": Case(config=shape(2, 32, 8, 128, 3072)),
    "mixtral": Case(config=shape(2, 48, 8, 128, 6144, **LOCAL)),
    "phi3": Case(config=shape(2, 32, 32, None, 3072, **WINDOWED), slow=False),
    "phimoe": Case(config=shape(2, 32, 8, None, 4096, **LOCAL, **WINDOWED)),
    "starcoder2": Case(config=shape(2, 36, 4, None, 4608, **WINDOWED)),
    "qwen2_moe": Case(
        config=shape(6, 28, 4, None, 3584, use_sliding_window=True, max_window_layers=4, **EXPERTS, **WINDOWED)
    ),
    "qwen3_moe": Case(config=shape(2, 64, 4, 128, 4096, use_sliding_window=True, **EXPERTS, **WINDOWED), slow=False),
    "qwen2_vl_text": Case(config=shape(2, 28, 4, None, 3584) | MROPE),
    "qwen2_5_vl_text": Case(config=shape(2, 28, 4, None, 3584) | MROPE),
    "qwen2_5_omni_text": Case(config=shape(2, 28, 4, None, 3584) | MROPE),
    "qwen3_omni_moe_text": Case(
        config=shape(2, 32, 4, 128, 2048, **EXPERTS)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}}
    ),
    "smollm3": Case(config=shape(5, 16, 4, None, 2048, use_sliding_window=True, **WINDOWED)),
    "dots1": Case(config=shape(3, 32, 32, 128, 4096, max_window_layers=1, **ROUTED, **WINDOWED, **DENSE_FIRST)),
    "afmoe": Case(config=shape(5, 16, 4, 128, 2048, **EXPERTS, **WINDOWED)),
    "cohere2": Case(config=shape(5, 96, 8, 128, 12288, **WINDOWED), slow=False),
    "cohere2_moe": Case(config=shape(6, 64, 8, 128, 8192, first_k_dense_replace=2, **EXPERTS, **WINDOWED)),
    "cwm": Case(config=shape(5, 48, 8, 128, 6144, **WINDOWED)),
    "exaone4": Case(config=shape(5, 40, 8, 128, 5120, **WINDOWED)),
    "exaone_moe": Case(config=shape(5, 64, 8, 128, 6144, **EXPERTS, **WINDOWED)),
    "flint": Case(config=shape(7, 32, 4, 128, 2048, **EXPERTS, **WINDOWED)),
    "gemma2": Case(config=shape(3, 8, 4, 256, 2304, **WINDOWED), slow=False),
    "gpt_oss": Case(config=shape(3, 64, 8, 64, 2880, **LOCAL, **WINDOWED), slow=False),
    "granite_swa": Case(config=shape(5, 20, 4, None, 2560, **WINDOWED)),
    "granitemoe_swa": Case(config=shape(5, 20, 4, None, 2560, **LOCAL, **WINDOWED)),
    "kolibri1": Case(config=shape(6, 48, 4, 128, 2560, **LOCAL, **WINDOWED)),
    "modernbert-decoder": Case(config=shape(4, 12, None, None, 768, local_attention=2 * WINDOW)),
    "muse_glimmer_text": Case(config=shape(5, 32, 2, 128, 6656, **WINDOWED)),
    "muse_spark_text": Case(
        config=shape(5, 128, 16, 64, 8192, **EXPERTS, **WINDOWED, moe_hidden_size=64, mlp_layer_types=["dense"] * 5)
    ),
    "olmo3": Case(config=shape(5, 40, 8, None, 5120, **WINDOWED)),
    "vaultgemma": Case(config=shape(3, 4, 1, 256, 1152, **WINDOWED)),
    "laguna": Case(
        config=shape(3, 48, 8, 128, 2048, **EXPERTS, **WINDOWED)
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    ),
    "mellum": Case(
        config=shape(3, 32, 4, 128, 2304, **LOCAL, **WINDOWED, moe_intermediate_size=32)
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    ),
    # meta-llama/Llama-4-Maverick-17B-128E
    "llama4_text": Case(
        config=shape(5, 40, 8, 128, 5120, attention_chunk_size=WINDOW, **LOCAL, intermediate_size_mlp=64), slow=False
    ),
    # Layers that differ by keys of their own.
    "gpt_neo": Case(
        config={
            "num_layers": 4, "num_heads": 16, "hidden_size": 2048, "window_size": WINDOW,
            "attention_types": [[["global", "local"], 2]],
        },
        differs="everything",
        slow=False,
    ),
    # XiaomiMiMo/MiMo-V2-Flash
    "mimo_v2_flash": Case(
        config=shape(6, 64, 4, 192, 4096, v_head_dim=128, **ROUTED)
        | {
            "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
            "sliding_window": WINDOW, "sliding_window_size": WINDOW, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        },
        differs="one more",
        slow=False,
    ),
    # stepfun-ai/Step-3.5-Flash
    "step3p5": Case(
        config=shape(3, 64, 8, 128, 4096, **WINDOWED, **ROUTED)
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
        },
    ),
    "minimax_m3_vl_text": Case(
        config=shape(3, 64, 4, 128, 6144, layer_types=SPARSE, dense_intermediate_size=64, **LOCAL, **SPARSE_INDEX),
        slow=False,
    ),
    # google/gemma-3n-E4B: the last layers read what those before them have stored.
    "gemma3n_text": Case(
        config=shape(12, 8, 2, 256, 64, num_kv_shared_layers=5, vocab_size_per_layer_input=64, **WINDOWED),
        device="cpu",
        slow=False,
    ),
    # google/gemma-4-26B-A4B: full layers with 2 heads of 512.
    "gemma4_text": Case(
        config=shape(7, 16, 8, 256, 2816, **WINDOWED)
        | {
            "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        },
        slow=False,
    ),
    # google/gemma-4-E4B: 24 of 42 layers store something.
    "gemma4_text that shares": Case(
        config=shape(12, 8, 2, 256, 2560, **WINDOWED, global_head_dim=512, num_kv_shared_layers=6)
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "model_type": "gemma4_text"},
    ),
    # Latents.
    "deepseek_v3": Case(config=shape(2, 128, 128, None, 256, **MLA, **ROUTED, **DENSE_FIRST), slow=False),
    "deepseek_v2": Case(config=shape(2, 128, 128, None, 256, **MLA, **ROUTED, **DENSE_FIRST)),
    "deepseek_v32": Case(
        config=shape(2, 128, 128, None, 256, **MLA, **INDEX, **ROUTED, **DENSE_FIRST), slow=False
    ),
    # zai-org/GLM-5.2: an indexer in every fourth layer after the first three.
    "glm_moe_dsa": Case(
        config=shape(8, 64, 64, None, 256, **MLA, **INDEX, **ROUTED, **DENSE_FIRST)
        | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        slow=False,
    ),
    "glm4_moe_lite": Case(config=shape(2, 20, 20, None, 256, **MLA, **ROUTED)),
    "minicpm3": Case(config=shape(2, 40, 40, None, 2560) | MLA | {"kv_lora_rank": 256, "qk_rope_head_dim": 32}),
    "longcat_flash": Case(
        config={
            "num_layers": 2, "num_attention_heads": 64, "hidden_size": 256, "ffn_hidden_size": 64, **MLA,
            "n_routed_experts": 8, "moe_topk": 2, "expert_ffn_hidden_size": 32, "zero_expert_num": 4,
        },
        device="cpu",
    ),
    "youtu": Case(config=shape(2, 16, 16, None, 2048, **MLA)),
    "mistral4": Case(
        config=shape(2, 32, 32, None, 256, **MLA, **ROUTED, **DENSE_FIRST)
    ),
    "axk1": Case(config=shape(2, 64, 64, None, 256, **MLA, **ROUTED, **DENSE_FIRST)),
    "axk2": Case(config=shape(2, 32, 32, None, 256, **MLA, **INDEX, **ROUTED, **DENSE_FIRST)),
    "hy_v4": Case(config=shape(6, 32, 32, None, 256, **MLA, **INDEX, **ROUTED)),
    "mistral_large4_text": Case(
        config=shape(6, 64, 64, None, 256, **MLA, **INDEX, **ROUTED, **DENSE_FIRST)
        | {"kv_source_layers": [0, 1, 0, 3, 1, 5], "indexer_types": ["full", "full", "full", "full", "shared", "full"]}
    ),
    "dots3_note_text": Case(
        config=shape(5, 128, 128, None, 256, **MLA, **INDEX, **ROUTED, **WINDOWED)
        | {"swa_kv_lora_rank": 1024, "swa_num_attention_heads": 64, "swa_q_lora_rank": 64},
    ),
    # Compressed entries: 24 tokens are 6 of 4, and none of 128.
    "deepseek_v4": Case(
        config=shape(4, 64, 1, 512, 256, **INDEX, **WINDOWED, **ROUTED)
        | {"compress_ratios": [0, 128, 4, 128], "qk_rope_head_dim": 64, "q_lora_rank": 64, "o_lora_rank": 64},
        differs="twice",
        slow=False,
    ),
}  # fmt: skip


def held(layer: Layer, differs: str) -> Kept:
    """What our layer holds of ``TOKENS``, as transformers counts it."""
    match layer:
        case Parallel():
            parts = [held(part, differs) for part in layer.parts]
            return Kept(
                itself=sum(part.itself for part in parts),
                indexer=sum(part.indexer for part in parts),
                encoder=sum(part.encoder for part in parts),
            )
        case Attention():
            tokens = in_window(layer.window or layer.chunk, differs)
            return Kept(
                itself=layer.kv_heads * (layer.key_dim + layer.value_dim) * tokens, indexer=keys_of(layer.indexer)
            )
        case Latent():
            tokens = in_window(layer.window, differs)
            times = 2 if differs == "twice" else 1
            return Kept(itself=(layer.rank + layer.rope_dim) * tokens * times, indexer=keys_of(layer.indexer))
        case Compressed():
            entries = TOKENS // layer.ratio
            singles = in_window(layer.window, differs)
            return Kept(
                itself=(layer.rank + layer.rope_dim) * (entries + singles),
                indexer=keys_of(layer.indexer) * entries // TOKENS,
            )
        case Cross():
            return Kept(itself=0, encoder=layer.kv_heads * (layer.key_dim + layer.value_dim))
    return Kept(itself=0)


def in_window(window: int | None, differs: str) -> int:
    if window is None or differs == "everything":
        return TOKENS
    return min(TOKENS, window if differs == "one more" else window - 1)


def keys_of(indexer: Indexer | None) -> int:
    return indexer.heads * indexer.dim * TOKENS if indexer else 0


def cases() -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if case.slow else [], id=name) for name, case in CASES.items()]


@pytest.mark.parametrize("name", cases())
def test_a_forward_pass_keeps_what_the_layers_say(name: str) -> None:
    case = CASES[name]
    config = {"model_type": name, **SMALL, **case.config}
    theirs = kept_by_transformers(config, tokens=TOKENS, device=case.device)
    ours = [held(layer, case.differs) for layer in read_config(config, name=name).layers]
    if case.differs == "all heads":
        times = config["num_attention_heads"] // config["num_kv_heads"]
        ours = [Kept(itself=layer.itself * times) for layer in ours]
    while ours and ours[-1] == Kept(itself=0) and len(ours) > len(theirs):
        ours.pop()
    assert ours == theirs
    assert case.differs in DIFFERENCES


BART = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
ENCODERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    # facebook/bart-large-cnn
    "bart": (
        BART | {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "d_model": 1024}, {"input_ids": (1, 37)}
    ),
    # google/flan-t5-xxl: 64 heads of 64 in a model of 4,096; decoder and encoder need not be as deep.
    "t5": (
        {"num_layers": 1, "num_decoder_layers": 2, "num_heads": 64, "d_kv": 64, "d_model": 1024, "d_ff": 64},
        {"input_ids": (1, 37)},
    ),
    # google/t5gemma-2b-2b: Gemma 2 with windows on every other layer, and the encoder in all of them.
    "t5gemma": (
        {
            part: {"model_type": "t5_gemma_module", **shape(2, 8, 4, 256, 64), **SMALL, **WINDOWED}
            for part in ("encoder", "decoder")
        },
        {"input_ids": (1, 37)},
    ),
    # openai/whisper-large-v3: half a minute of sound is 1,500 tokens.
    "whisper": (
        BART | {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "d_model": 1280, "num_mel_bins": 128},
        {"input_features": (1, 128, 3000)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_a_decoder_keeps_its_encoder_once(name: str) -> None:
    sizes, inputs = ENCODERS[name]
    config = {"model_type": name, "vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 0, **sizes}
    device = "cpu" if name == "t5gemma" else "meta"
    theirs = kept_with_an_encoder(config, tokens=TOKENS, inputs=inputs, device=device)
    layers = read_config(config, name=name).layers
    length = 1500 if name == "whisper" else 37
    for ours, kept in zip(layers, theirs, strict=True):
        one = held(ours, "window")
        assert (one.itself, one.encoder * length) == (kept.itself, kept.encoder)
        assert isinstance(ours, Parallel)
        assert [part.encoder_tokens for part in ours.parts if isinstance(part, Cross)] == [
            1500 if name == "whisper" else None
        ]


def test_llama_with_images_keeps_them_in_layers_of_their_own() -> None:
    # meta-llama/Llama-3.2-11B-Vision: one image of four tiles is 6,404 tokens.
    config = {"model_type": "mllama_text_model", **SMALL, **shape(5, 32, 8, None, 4096)}
    config |= {"cross_attention_layers": [3], "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    theirs = kept_by_cross_attention(config, tokens=TOKENS, states=6404)
    ours = [held(layer, "window") for layer in read_config(config, name="mllama").layers]
    assert [(layer.itself, layer.encoder * 6404) for layer in ours] == [(kept.itself, kept.encoder) for kept in theirs]
