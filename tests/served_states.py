"""Recurrent and hybrid networks to serve, with the widths of heads and states of published models."""

from served import Case

_MAMBA = {"intermediate_size": None, "num_hidden_layers": 3}
_MAMBA2 = {
    "hidden_size": 128, "intermediate_size": None, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 64,
    "state_size": 128, "n_groups": 2, "chunk_size": 32,
}  # fmt: skip
# Heads of attention are 128 wide.
_HEADS = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
_JAMBA = {
    "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_FALCON = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 256, "mamba_n_heads": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 32, "num_hidden_layers": 2,
}  # fmt: skip
_FACTORS = {
    "key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 0.7], "mlp_multipliers": [0.8, 1.4],
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.5,
}  # fmt: skip
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 32}
_GRANITE = _HEADS | _STATES | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "attention_multiplier": 0.05, "embedding_multiplier": 3, "residual_multiplier": 0.4, "logits_scaling": 2.5,
    "shared_intermediate_size": 80,
}  # fmt: skip

CASES = {
    # No width is whole panels of the kernels.
    "mamba": Case(model="MambaForCausalLM", config=_MAMBA | {"hidden_size": 72}),
    "falcon-mamba": Case(model="FalconMambaForCausalLM", config=_MAMBA | {"num_hidden_layers": 2}),
    "mamba-2": Case(model="Mamba2ForCausalLM", config=_MAMBA2),
    # Steps are cut; products and convolution have biases or none.
    "mamba-2 with limits": Case(
        model="Mamba2ForCausalLM",
        config=_MAMBA2 | {"time_step_limit": [0.2, 0.7], "use_bias": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "jamba": Case(model="JambaForCausalLM", config=_HEADS | _JAMBA),
    "falcon-h1": Case(model="FalconH1ForCausalLM", config=_FALCON | _FACTORS),
    "falcon-h1 with norms": Case(
        model="FalconH1ForCausalLM",
        config=_FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "bamba": Case(
        model="BambaForCausalLM", config=_HEADS | _STATES | {"num_hidden_layers": 3, "attn_layer_indices": [1]}
    ),
    "granite-4": Case(
        model="GraniteMoeHybridForCausalLM",
        config=_GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48},
    ),
    "granite-4 with positions": Case(
        model="GraniteMoeHybridForCausalLM",
        config=_GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
}
