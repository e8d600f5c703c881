"""Families with latents to serve: DeepSeek-V3's widths of a head, few heads and layers."""

from served import Case

WIDTHS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

CASES = {
    "deepseek-v3": Case(
        model="DeepseekV3ForCausalLM",
        config={**WIDTHS, **EXPERTS, "q_lora_rank": 48, "rope_parameters": YARN},
        spread=0.06,
    ),
    # V2-Lite: queries of the stream itself, without biases, the best of all experts; another share of YaRN's length.
    "deepseek-v2-lite": Case(
        model="DeepseekV2ForCausalLM",
        config={
            **WIDTHS,
            **EXPERTS,
            "rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.707},
            "attention_bias": True,
        },
        nulls=("q_lora_rank",),
        spread=0.06,
    ),
    "deepseek-v2": Case(
        model="DeepseekV2ForCausalLM",
        config={**WIDTHS, **EXPERTS, "q_lora_rank": 48, "topk_method": "group_limited_greedy"},
        spread=0.06,
    ),
    "glm4_moe_lite": Case(
        model="Glm4MoeLiteForCausalLM",
        config={
            **WIDTHS,
            **EXPERTS,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        spread=0.06,
    ),
    # No experts; the rotary part's pairs as two halves.
    "youtu": Case(
        model="YoutuForCausalLM",
        config={**WIDTHS, "q_lora_rank": 48, "rope_interleave": False, "attention_bias": True},
        spread=0.06,
    ),
}
