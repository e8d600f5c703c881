"""Metadata of a small model of every architecture that GGUF files name, as conversion writes it."""

from typing import Any

N = 8
BASE: dict[str, Any] = {
    "block_count": N,
    "context_length": 4096,
    "embedding_length": 512,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
WIDTHS = {"attention.key_length": 32, "attention.value_length": 32}
SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 1024, "ssm.state_size": 16, "ssm.time_step_rank": 32}
MAMBA2 = SSM | {"ssm.group_count": 4}
MLA = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 128,
    "attention.kv_lora_rank": 96,
    "attention.key_length": 112,
    "attention.value_length": 96,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
INDEXER = {"attention.indexer.head_count": 4, "attention.indexer.key_length": 24, "attention.indexer.top_k": 64}
WINDOW = {"attention.sliding_window": 128}
PATTERN = [True, True, False, True, True, False, True, False]
FLAGS = {"attention.sliding_window_pattern": PATTERN}
HYBRID = {"attention.head_count_kv": [0, 2, 0, 0, 0, 2, 0, 2]}
KDA = MLA | {"attention.head_count_kv": [0, 1, 0, 0, 0, 1, 0, 1], "kda.head_dim": 32, "ssm.conv_kernel": 4}

# Families whose every query head has a key and a value of its own.
ALL_HEADS = {"gpt2", "gptj", "gptneox", "bloom", "baichuan", "qwen", "jais", "starcoder", "refact"}

CASES: dict[str, dict[str, Any]] = {
    "falcon": {"attention.head_count_kv": 1},
    "mpt": {"attention.head_count_kv": 8},
    "deci": {"attention.head_count": [8, 8, 0, 8, 8, 8, 0, 8], "attention.head_count_kv": [2, 4, 0, 1, 8, 0, 0, 2]},
    "openelm": WIDTHS | {"attention.head_count": [4, 4, 8, 8] * 2, "attention.head_count_kv": [1, 1, 2, 4] * 2},
    "gemma2": WIDTHS | WINDOW,
    "gemma3": WIDTHS | WINDOW,
    "gemma3n": WIDTHS | WINDOW | FLAGS | {"attention.shared_kv_layers": 3},
    "gemma4": WINDOW | FLAGS | {
        "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
        "attention.value_length_swa": 32, "attention.head_count_kv": [4, 4, 1, 4, 4, 1, 4, 1],
        "attention.shared_kv_layers": 2,
    },
    "llama4": {},
    "cohere2": WINDOW,
    "cohere2moe": WINDOW,
    "exaone4": WINDOW | FLAGS,
    "exaone-moe": {},
    "gpt-oss": WINDOW,
    "granite_swa": WINDOW | FLAGS,
    "afmoe": WINDOW,
    "laguna": WINDOW,
    "mellum": WINDOW,
    "muse-glimmer": WINDOW,
    "olmo2": WINDOW,
    "smallthinker": WINDOW,
    "plamo3": WINDOW,
    "spark2_5": WINDOW | FLAGS,
    "maple": WINDOW | FLAGS,
    "mimo2": WINDOW | FLAGS | {
        "attention.key_length": 48, "attention.value_length": 32, "attention.head_count_kv": [4, 4, 2, 4, 4, 2, 4, 2],
    },
    "step35": WIDTHS | WINDOW | FLAGS | {
        "attention.head_count": [12, 12, 8, 12, 12, 8, 12, 8], "attention.head_count_kv": [4, 4, 2, 4, 4, 2, 4, 2],
    },
    "minicpm3": MLA,
    "plm": MLA,
    "deepseek2": MLA,
    "mistral4": MLA,
    "deepseek32": MLA | INDEXER,
    "glm-dsa": MLA | INDEXER,
    "hy_v4": MLA | INDEXER | {"attention.indexer.types": [not flag for flag in PATTERN]},
    "dots3note": MLA | INDEXER | WINDOW | FLAGS | {
        "attention.kv_lora_rank_swa": 64, "attention.key_length_swa": 72, "attention.value_length_swa": 64,
        "attention.key_length_mla_swa": 40, "attention.value_length_mla_swa": 32,
        "attention.indexer.types": [not flag for flag in PATTERN],
    },
    "minimax-m3": INDEXER | {"leading_dense_block_count": 2},
    "mamba": SSM | {"attention.head_count": 0},
    "mamba2": MAMBA2 | {"attention.head_count": 0},
    "jamba": SSM | HYBRID,
    "falcon-h1": MAMBA2 | WIDTHS,
    "plamo2": MAMBA2 | WIDTHS | {
        "ssm.group_count": 0, "attention.head_count": [0, 8] * 4, "attention.head_count_kv": [0, 2] * 4,
    },
    "granitehybrid": MAMBA2 | HYBRID,
    "nemotron_h": MAMBA2 | HYBRID | {"feed_forward_length": [0, 0, 64, 0, 64, 0, 64, 0]},
    "nemotron_h_moe": MAMBA2 | HYBRID | {"feed_forward_length": [0, 0, 64, 0, 64, 0, 64, 0]},
    "qwen3next": MAMBA2 | {"full_attention_interval": 4},
    "qwen35": MAMBA2 | {"full_attention_interval": 4},
    "qwen35moe": MAMBA2 | {"attention.recurrent_layers": PATTERN, "full_attention_interval": 4},
    "qwen4exp": MAMBA2 | INDEXER | {
        "full_attention_interval": 4, "attention.compress_ratios": [0, 0, 0, 16] * 2, "hyper_connection.count": 4,
    },
    "kimi-linear": KDA,
    "kimi-k3": KDA,
    "bailingmoe3": KDA,
    "glm5-next": KDA | INDEXER | {"attention.indexer.kpool": 16},
    "minimax-01": {"attention.recurrent_layers": PATTERN},
    "lfm2": HYBRID | {"shortconv.l_cache": 3},
    "lfm2moe": HYBRID | {"shortconv.l_cache": 3},
    "rwkv6": {"attention.head_count": 0, "wkv.head_size": 64},
    "rwkv7": {"attention.head_count": 0, "wkv.head_size": 64},
}  # fmt: skip


def keys_of(architecture: str) -> dict[str, Any]:
    special = CASES.get(architecture, {})
    heads = {"attention.head_count_kv": 8} if architecture in ALL_HEADS else {}
    keys = BASE | heads | special
    if keys["attention.head_count"] == 0:
        del keys["attention.head_count_kv"]
    return keys
