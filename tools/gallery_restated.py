"""Configurations restated by hand: the keys that matter, and where each was read.

For models of which the folders given to :mod:`gallery` have no file.
"""

from typing import Any

_SIMULATOR = "PyPI kvcache-simulator 0.1.3: models.yaml[{}], from {}'s config.json as of {}"
_CONFIGURATOR = "github.com/ai-dynamo/aiconfigurator: model_configs/{}_config.json"
_CLASS = "PyPI transformers 5.24.0: defaults of {}, which are {}"


def _simulated(hub: str, row: str, when: str, **config: Any) -> dict[str, Any]:
    return {"_model": hub, "_source": _SIMULATOR.format(row, hub, when), **config}


def _configured(hub: str, **config: Any) -> dict[str, Any]:
    return {"_model": hub, "_source": _CONFIGURATOR.format(hub.replace("/", "--")), **config}


_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 128,
    "num_key_value_heads": 128, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
_KIMI_K2 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "vocab_size": 163840, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 64,
    "num_key_value_heads": 64, "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_CODER_30B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 262144, "use_sliding_window": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip

RESTATED: tuple[dict[str, Any], ...] = (
    _simulated("deepseek-ai/DeepSeek-V3", "deepseek-v3", "2026-05", **_DEEPSEEK_V3),
    _simulated("deepseek-ai/DeepSeek-R1", "deepseek-r1", "2026-05", **_DEEPSEEK_V3),
    _simulated(
        "zai-org/GLM-5.2", "glm-5.2", "2026-06",
        max_position_embeddings=1048576, num_hidden_layers=78, kv_lora_rank=512, qk_nope_head_dim=192,
        qk_rope_head_dim=64, qk_head_dim=256, v_head_dim=256, num_key_value_heads=64, index_head_dim=128,
        index_n_heads=32, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3,
        index_share_for_mtp_iteration=True, indexer_full_layers=21, indexer_shared_layers=57,
        num_nextn_predict_layers=1, draft_indexer_layers=1,
    ),
    _configured("moonshotai/Kimi-K2.5", **_KIMI_K2),
    _simulated("moonshotai/Kimi-K2.6", "kimi-k2.6", "2026-05", **_KIMI_K2),
    _simulated("moonshotai/Kimi-K2.7-Code", "kimi-k2.7-code", "2026-09", **_KIMI_K2),
    _simulated(
        "moonshotai/Kimi-K3", "kimi-k3", "2026-07",
        max_position_embeddings=1048576, num_hidden_layers=93, full_attention_layers=24, kda_layers=69,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, num_key_value_heads=96,
        kda_num_heads=96, kda_head_dim=128, kda_num_key_heads=96, kda_key_head_dim=128, kda_num_value_heads=96,
        kda_value_head_dim=128, kda_conv_kernel_size=4, kda_conv_state_bytes_per_element=2,
        kda_recurrent_state_bytes_per_element=4,
    ),
    _simulated(
        "Qwen/Qwen3.6-35B-A3B", "qwen3.6-35b-a3b", "2026-05",
        max_position_embeddings=262144, num_hidden_layers=40, full_attention_layers=10, linear_attention_layers=30,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_key_head_dim=128, linear_num_value_heads=32, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        mtp_num_hidden_layers=1,
    ),
    _simulated(
        "Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-coder-32b", "2026-05",
        max_position_embeddings=32768, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
        head_dim=128, hidden_size=5120, intermediate_size=27648,
    ),
    _simulated(
        "google/gemma-4-31B", "gemma-4-31b", "2026-05",
        max_position_embeddings=262144, num_hidden_layers=60, stored_layers=60, num_kv_shared_layers=0,
        full_attention_layers=10, sliding_attention_layers=50, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, head_dim=256, global_head_dim=512, sliding_window=1024,
    ),
    _configured(
        "Qwen/Qwen3.5-397B-A17B",
        model_type="qwen3_5_moe",
        tie_word_embeddings=False,
        vision_config={"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
        text_config={
            "model_type": "qwen3_5_moe_text", "num_hidden_layers": 60, "full_attention_interval": 4,
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 64, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
            "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 512,
            "num_experts_per_tok": 10, "mlp_only_layers": [], "vocab_size": 248320, "mtp_num_hidden_layers": 1,
            "attn_output_gate": True, "dtype": "bfloat16",
        },
    ),
    _configured(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        model_type="llama4",
        torch_dtype="bfloat16",
        vision_config={"model_type": "llama4_vision_model", "num_hidden_layers": 34, "hidden_size": 1408},
        text_config={
            "model_type": "llama4_text", "attention_chunk_size": 8192, "num_hidden_layers": 48, "hidden_size": 5120,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "num_local_experts": 16,
            "num_experts_per_tok": 1, "use_qk_norm": True, "vocab_size": 202048,
            "max_position_embeddings": 10485760, "torch_dtype": "bfloat16",
        },
    ),
    _configured(
        "zai-org/GLM-4.7-Flash",
        model_type="glm4_moe_lite", num_hidden_layers=47, hidden_size=2048, num_attention_heads=20,
        num_key_value_heads=20, head_dim=64, intermediate_size=10240, vocab_size=154880,
        max_position_embeddings=202752, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
        moe_intermediate_size=1536, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=768,
        qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, torch_dtype="bfloat16",
        tie_word_embeddings=False,
    ),
    {
        "_model": "mistralai/Mixtral-8x7B-v0.1",
        "_source": _CLASS.format("MixtralConfig", "this model's, but for its context"),
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    {
        "_model": "EleutherAI/gpt-j-6b",
        "_source": _CLASS.format("GPTJConfig", "this model's"),
        "model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "n_positions": 2048, "vocab_size": 50400,
        "tie_word_embeddings": False,
    },
    {
        "_model": "bigcode/starcoder2-3b",
        "_source": _CLASS.format("Starcoder2Config", "this model's, but for its context and window"),
        "model_type": "starcoder2", "num_hidden_layers": 30, "hidden_size": 3072, "intermediate_size": 12288,
        "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152,
        "max_position_embeddings": 16384, "sliding_window": 4096, "torch_dtype": "bfloat16",
    },
    {
        "_model": "openai/gpt-oss-20b",
        "_source": "arXiv 2508.10925, table 1 and section 2.2: 24 layers, 32 experts, else as gpt-oss-120b",
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "vocab_size": 201088, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    {
        "_model": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "_source": "config.json of Qwen/Qwen3-Coder-30B-A3B-Instruct: as Qwen3-30B-A3B, with a longer context",
        **_QWEN3_CODER_30B,
    },
    {
        "_model": "xai-org/grok-2",
        "_source": "config.json of xai-org/grok-2",
        "num_hidden_layers": 64, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "vocab_size": 131072,
    },
)  # fmt: skip
