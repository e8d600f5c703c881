"""Gated delta nets with gated attention, with the head widths and ratios of published models."""

from served import Case

_HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip

_HALF = ["linear_attention", "full_attention"]
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
}  # fmt: skip

CASES = {
    "qwen3.5": Case(model="Qwen3_5ForCausalLM", config=_HEADS),
    # As many keys as values, as small models have them.
    "qwen3.5-equal": Case(model="Qwen3_5ForCausalLM", config=_HEADS | {"linear_num_value_heads": 2}),
    # The second layer has no experts.
    "qwen3_next": Case(model="Qwen3NextForCausalLM", config=_HEADS | _EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3.5-moe": Case(
        model="Qwen3_5MoeForCausalLM",
        config={
            **_HEADS, **_EXPERTS, "num_hidden_layers": 2, "layer_types": _HALF,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
}  # fmt: skip
