"""Families with experts to serve, with the head widths of published models."""

from served import Case

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_QWEN = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1}

CASES = {
    "mixtral": Case(
        model="MixtralForCausalLM",
        config=_HEADS | {"head_dim": 128, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    # The second layer has no experts.
    "qwen2_moe": Case(
        model="Qwen2MoeForCausalLM",
        config=_HEADS | _QWEN | {"hidden_size": 128, "mlp_only_layers": [1], "shared_expert_intermediate_size": 80},
    ),
    "qwen3_moe": Case(
        model="Qwen3MoeForCausalLM",
        config=_HEADS | _QWEN | {"head_dim": 128, "num_experts": 16, "norm_topk_prob": True},
    ),
    "gpt_oss": Case(
        model="GptOssForCausalLM",
        config={
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    # Chunks are 4 blocks; the last layer has no positions; every other one has experts.
    "llama4": Case(
        model="Llama4ForCausalLM",
        config={
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_chunk_size": 64,
            "floor_scale": 40,
            "attn_scale": 0.3,
            "intermediate_size": 64,
            "intermediate_size_mlp": 160,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 2,
        },
    ),
}
