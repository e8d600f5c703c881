"""Recurrent and hybrid models against transformers: real geometry, few layers, one forward pass on the meta device.

The shapes must agree layer by layer. Where transformers keeps something else than our convention says, the case names
the difference; each is written down once, in ``DIFFERENCES``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from state_oracle import Held, held_by_transformers

from kvist.spec.families import read_config
from kvist.spec.layers import Attention, Indexer, Latent, Layer, State

DATA = Path(__file__).parents[2] / "shared" / "data"
TOKENS = 24

# What transformers 5.24 keeps otherwise than our convention, and what that does to the elements of a layer.
DIFFERENCES: dict[str, str] = {
    "kernel": "a convolution keeps `kernel` columns, where `kernel - 1` are needed",
    "f32 columns": "Inkling's convolutions keep their columns in float32, where vLLM and SGLang keep bfloat16",
    "model's type": "MiniMax and xLSTM keep the recurrent state in the model's type, where the convention is float32",
    "last values": "ZAYA1's values of the last token are called a recurrent state, where they are one column in bf16",
    "window": "a window keeps `window - 1` tokens once it is full: the next query brings the last itself",
    "raw keys": "a pooled indexer keeps the key of every token, where it needs one a pool",
    "raw keys, gates and flags": "as above, and a gate of the same width and a flag for each token (GLM-5.3-Flash)",
    "token ids": "n-gram embeddings keep the last token ids in the cache, where they are the request's own",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration with real sizes, few layers, and how transformers differs."""

    config: dict[str, Any]
    differs: tuple[str, ...] = ("kernel",)
    device: str = "meta"
    tokens: int = TOKENS


# Feed-forward sizes are made small: no byte of a cache depends on them, and experts on the meta device take time.
SMALL = {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN = {
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "shared_expert_intermediate_size": 32,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
INKLING = {"head_dim": 128, "swa_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
MAMBA2 = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2}

CASES: dict[str, Case] = {
    # state-spaces/mamba-130m-hf
    "mamba": Case(config={"hidden_size": 768, "intermediate_size": 1536, "state_size": 16, "num_hidden_layers": 2}),
    # tiiuae/falcon-mamba-7b prints expand 16 and is 8,192 wide
    "falcon_mamba": Case(
        config={"hidden_size": 4096, "expand": 16, "intermediate_size": 8192, "state_size": 16, "num_hidden_layers": 1}
    ),
    # mistralai/Mamba-Codestral-7B-v0.1
    "mamba2": Case(
        config={
            "hidden_size": 4096, "intermediate_size": None, "num_heads": 128, "head_dim": 64, "state_size": 128,
            "n_groups": 8, "num_hidden_layers": 2,
        }
    ),
    # RWKV/rwkv-4-169m-pile
    "rwkv": Case(
        config={"hidden_size": 768, "attention_hidden_size": 768, "context_length": 1024, "num_hidden_layers": 2},
        differs=(),
    ),
    # NX-AI/xLSTM-7b
    "xlstm": Case(
        config={"hidden_size": 4096, "embedding_dim": 4096, "num_heads": 8, "num_hidden_layers": 1, "num_blocks": 1},
        differs=("model's type",),
    ),
    # ai21labs/Jamba-v0.1
    "jamba": Case(
        config={
            "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
            "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "num_experts": 2,
        }
    ),
    # Zyphra/Zamba-7B-v1
    "zamba": Case(
        config={
            "hidden_size": 3712, "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 16,
            "attn_layer_period": 6, "attn_layer_offset": 4, "mamba_d_state": 16, "n_mamba_heads": 2,
        }
    ),
    # Zyphra/Zamba2-7B
    "zamba2": Case(
        config={
            "hidden_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 32,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 2, "mamba_d_state": 64,
            "n_mamba_heads": 112, "num_mem_blocks": 2, "adapter_rank": 128,
        }
    ),
    # ibm-ai-platform/Bamba-9B
    "bamba": Case(
        config=MAMBA2 | {
            "hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8,
            "attn_layer_indices": [1],
        }
    ),
    # ibm-granite/granite-4.0-h-small
    "granitemoehybrid": Case(
        config=MAMBA2 | {
            "hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8,
            "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        }
    ),
    # tiiuae/Falcon-H1-34B-Instruct
    "falcon_h1": Case(
        config={
            "hidden_size": 5120, "num_hidden_layers": 2, "num_attention_heads": 20, "num_key_value_heads": 4,
            "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_d_state": 256,
            "mamba_n_groups": 2, "mamba_d_conv": 4,
        }
    ),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, without the number of layers
    "nemotron_h": Case(
        config={
            "hybrid_override_pattern": "ME*M-",
            "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
             "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
            "conv_kernel": 4, "expand": 2, "n_routed_experts": 4, "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        }
    ),
    # Qwen/Qwen3-Next-80B-A3B
    "qwen3_next": Case(config=QWEN | EXPERTS | {"num_key_value_heads": 2, "linear_num_value_heads": 32}),
    # Qwen/Qwen3.5-27B
    "qwen3_5_text": Case(
        config=QWEN | {
            "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48
        }
    ),
    # Qwen/Qwen3.5-122B-A10B
    "qwen3_5_moe_text": Case(
        config=QWEN | EXPERTS | {
            "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 2, "linear_num_value_heads": 64
        }
    ),
    # allenai/Olmo-Hybrid-7B, with the linear heads left to the class
    "olmo_hybrid": Case(config={"hidden_size": 3840, "num_hidden_layers": 4, "num_attention_heads": 30}),
    "lara_mini": Case(
        config=EXPERTS | {
            "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 4,
            "sliding_window": 16, "shared_expert_intermediate_size": 32,
        },
        differs=("kernel", "window"),
    ),
    # moonshotai/Kimi-Linear-48B-A3B-Instruct
    "kimi_linear": Case(
        config=LATENT | {
            "hidden_size": 2304, "num_hidden_layers": 4, "num_attention_heads": 32, "num_experts": 4,
            "num_experts_per_token": 2, "moe_intermediate_size": 32,
            "linear_attn_config": {
                "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        }
    ),
    # inclusionAI/Ling-3.0-flash
    "bailing_hybrid": Case(
        config=LATENT | {
            "hidden_size": 2560, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 32,
            "head_dim": 128, "layer_group_size": 6, "short_conv_kernel_size": 4, "num_experts": 8, "n_group": 4,
            "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        }
    ),
    # MiniMaxAI/MiniMax-Text-01-hf
    "minimax": Case(
        config={
            "hidden_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "num_local_experts": 2, "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        },
        differs=("model's type",),
    ),
    # google/recurrentgemma-2b, whose convolution keeps kernel - 1 columns as we count them
    "recurrent_gemma": Case(
        config={
            "hidden_size": 2560, "num_hidden_layers": 3, "num_attention_heads": 10, "num_key_value_heads": 1,
            "lru_width": 2560, "conv1d_width": 4, "attention_window_size": 16,
        },
        differs=("window",),
    ),
    # LiquidAI/LFM2-1.2B
    "lfm2": Case(
        config={
            "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8,
            "conv_L_cache": 3, "full_attn_idxs": [2],
        }
    ),
    # LiquidAI/LFM2-8B-A1B
    "lfm2_moe": Case(
        config=EXPERTS | {
            "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8,
            "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 2,
        }
    ),
    # LiquidAI/LFM3-1.7B
    "lfm3": Case(
        config={"hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 16, "sliding_window": 16},
        differs=("kernel", "window"),
    ),
    # Zyphra/ZAYA1-8B
    "zaya": Case(
        config=EXPERTS | {
            "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 128, "num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"],
            "sliding_window": 16,
        },
        differs=("last values", "window"),
    ),
    # thinkingmachines/Inkling
    "inkling_text": Case(
        config=INKLING | {
            "hidden_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8,
            "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "sliding_window_size": 16,
        },
        differs=("kernel", "f32 columns", "window"),
    ),
    # thinkingmachines/Inkling-2-Small-MXFP8
    "inkling2_text": Case(
        config=INKLING | {
            "hidden_size": 4608, "num_hidden_layers": 6, "num_attention_heads": 48, "num_key_value_heads": 8,
            "swa_num_attention_heads": 48, "swa_num_key_value_heads": 8, "sliding_window_size": 16,
        },
        differs=("kernel", "f32 columns", "window"),
    ),
    # thinkingmachines/Inkling-2-Mini: a loop of layers, each pass with a cache of its own
    "inkling2_loop_text": Case(
        config=INKLING | {
            "hidden_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 24, "num_key_value_heads": 8,
            "swa_num_attention_heads": 24, "swa_num_key_value_heads": 8, "sliding_window_size": 16,
            "loop_layer_index_start": 6, "loop_layer_index_end": 12, "loop_num_passes": 2,
        },
        differs=("kernel", "f32 columns", "window", "loops last"),
    ),
    # zai-org/GLM-5.3-Flash
    "glm5_next_text": Case(
        config={
            "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 64,
            "kv_lora_rank": 512, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256, "q_lora_rank": 1536,
            "linear_num_heads": 64, "linear_head_dim": 128, "index_kpool": 4, "index_topk": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
        differs=("kernel", "raw keys, gates and flags"),
    ),
    # Qwen/Qwen4-Exp
    "qwen4_exp_text": Case(
        config=QWEN | EXPERTS | {
            "hidden_size": 256, "num_key_value_heads": 2, "linear_num_value_heads": 32, "ple_layer_ids": [2],
            "ple_embed_dim": 256, "ngram_vocab_size_base": 100, "indexer_n_heads": 4, "indexer_kv_heads": 1,
            "indexer_head_dim": 256, "indexer_budget": 16, "indexer_compress_ratio": 8, "hc_lowrank": 8,
        },
        differs=("kernel", "raw keys", "token ids"),
        device="cpu",
    ),
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    return SMALL | CASES[name].config | {"model_type": name}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_keeps_what_transformers_keeps(name: str) -> None:
    case, config = CASES[name], published(name)
    layers = read_config(config, name=name).layers
    assert {State, Attention, Latent} & {type(part) for layer in layers for part in layer.stored}
    compare(layers, held_by_transformers(config, tokens=case.tokens, device=case.device), case.differs, case.tokens)


def compare(layers: tuple[Layer, ...], held: list[Held], differs: tuple[str, ...], tokens: int) -> None:
    if "loops last" in differs:
        # transformers appends the later passes of a loop behind all layers.
        held = sorted(held, key=lambda layer: layer.attention)
        layers = tuple(sorted(layers, key=lambda layer: expected(layer, differs, tokens).attention))
    # A class whose last layers keep nothing may leave them out.
    held = held + [Held()] * (len(layers) - len(held))
    for index, (layer, found) in enumerate(zip(layers, held, strict=True)):
        told = expected(layer, differs, tokens)
        if "last values" in differs:
            found = Held(attention=found.attention, conv=found.conv + found.recurrent)
        assert (told.attention, told.indexer, told.conv, told.recurrent) == (
            found.attention, found.indexer, found.conv, found.recurrent,
        ), f"layer {index}: {layer}"  # fmt: skip
        if found.types.get("recurrent"):
            assert found.types["recurrent"] == ("torch.bfloat16" if "model's type" in differs else "torch.float32")
        if found.types.get("conv") and "token ids" not in differs:
            assert found.types["conv"] == ("torch.float32" if "f32 columns" in differs else "torch.bfloat16")


def expected(layer: Layer, differs: tuple[str, ...], tokens: int) -> Held:
    """Elements of a layer as transformers would keep them, from ours and the differences."""
    told = Held()
    for part in layer.stored:
        match part:
            case Attention():
                width = part.kv_heads * (part.key_dim + part.value_dim)
                told.attention += width * tokens_held(part.window, differs, tokens)
                told.indexer += indexed(part.indexer, differs, tokens)
            case Latent():
                told.attention += (part.rank + part.rope_dim) * tokens_held(part.window, differs, tokens)
                told.indexer += indexed(part.indexer, differs, tokens)
            case State():
                # The n-gram convolution reaches back without a column of its own token.
                dilated = "token ids" in differs and not part.state_elements
                more = part.conv_elements // max(part.conv_columns, 1) if "kernel" in differs and not dilated else 0
                told.conv += part.conv_elements + more + (2 if dilated else 0)
                told.recurrent += part.state_elements
            case _:
                raise AssertionError(part)
    return told


def tokens_held(window: int | None, differs: tuple[str, ...], tokens: int) -> int:
    if window is None or tokens < window:
        return tokens
    return window - 1 if "window" in differs else window


def indexed(indexer: Indexer | None, differs: tuple[str, ...], tokens: int) -> int:
    if indexer is None:
        return 0
    if "raw keys" in differs:
        return tokens * indexer.heads * indexer.dim
    return tokens * (2 * indexer.dim + 1)


def deep_configs() -> list[tuple[str, dict[str, Any]]]:
    """Text models of the published files that transformers builds, with few experts: those keep nothing."""
    found = []
    for path in sorted((DATA / "configs" / "full").glob("*.json")) if DATA.is_dir() else []:
        config = json.loads(path.read_text())
        text = config.get("text_config", config)
        if text.get("model_type") not in CASES:
            continue
        text = {key: value for key, value in text.items() if key not in ("auto_map", "quantization_config", "dtype")}
        text |= {key: 8 for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in text}
        text |= {key: 2 for key in ("num_experts_per_tok", "num_experts_per_token") if key in text}
        found.append((path.stem, text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), deep_configs(), ids=lambda value: value if isinstance(value, str) else "")
def test_published_models_at_their_full_depth(name: str, config: dict[str, Any]) -> None:
    layers = read_config(config, name=name).layers
    differs = CASES[config["model_type"]].differs
    compare(layers, held_by_transformers(config, tokens=TOKENS), differs, TOKENS)


def test_every_difference_is_written_down_and_used() -> None:
    used = {difference for case in CASES.values() for difference in case.differs}
    assert used - {"loops last"} == set(DIFFERENCES)
