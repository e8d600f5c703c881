"""Dense families to serve, with the head widths of published models."""

from served import Case

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * index for index in range(36)],
    "long_factor": [1.0 + index for index in range(36)],
}  # fmt: skip

CASES = {
    "llama": Case(
        model="LlamaForCausalLM", config={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    ),
    "gpt2": Case(model="GPT2LMHeadModel", config={"hidden_size": 128, "num_attention_heads": 2}),
    "gemma2": Case(
        model="Gemma2ForCausalLM",
        config={
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 48,
            "query_pre_attn_scalar": 144, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
        },
    ),
    "phi3": Case(
        model="Phi3ForCausalLM",
        config={"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 100},
    ),
    # As Phi-4-mini: three quarters of a head are turned; the context fits into what the model was first trained on.
    "phi3-longrope": Case(
        model="Phi3ForCausalLM",
        config={
            "hidden_size": 288, "num_attention_heads": 3, "num_key_value_heads": 1,
            "original_max_position_embeddings": 2048, "rope_parameters": LONGROPE | {"factor": 32.0},
        },
    ),
    "olmo2": Case(
        model="Olmo2ForCausalLM", config={"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    ),
    "olmo3": Case(
        model="Olmo3ForCausalLM",
        config={
            "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 48,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": Case(
        model="GraniteForCausalLM",
        config={
            "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "embedding_multiplier": 12.0,
            "attention_multiplier": 0.03, "residual_multiplier": 0.22, "logits_scaling": 8.0,
        },
    ),
    "starcoder2": Case(
        model="Starcoder2ForCausalLM",
        config={"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 100},
    ),
    "smollm3": Case(
        model="SmolLM3ForCausalLM", config={"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    "helium": Case(
        model="HeliumForCausalLM",
        config={"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "seed_oss": Case(
        model="SeedOssForCausalLM", config={"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    ),
    "cohere": Case(
        model="CohereForCausalLM",
        config={
            "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True,
            "logit_scale": 0.25,
        },
    ),
    "cohere2": Case(
        model="Cohere2ForCausalLM",
        config={"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 48},
    ),
    "gemma": Case(
        model="GemmaForCausalLM", config={"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
    ),
}  # fmt: skip
