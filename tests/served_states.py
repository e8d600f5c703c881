"""Recurrent and hybrid networks to serve."""

from served import Case

_MAMBA2 = {"hidden_size": 96, "intermediate_size": None, "num_heads": 6, "head_dim": 32, "expand": 2, "n_groups": 2}
_MAMBA2 |= {"state_size": 32, "chunk_size": 32, "num_hidden_layers": 3}
_JAMBA = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_state": 16, "attn_layer_period": 4}
_JAMBA |= {"attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts_per_tok": 2}
_FALCON = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 4}
_FALCON |= {
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
    "num_hidden_layers": 2,
}
_FACTORS = {"key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7}
_FACTORS |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 0.7]}
_FACTORS |= {"mlp_multipliers": [0.8, 1.4], "embedding_multiplier": 1.5, "lm_head_multiplier": 0.5}

CASES = {
    "mamba": Case(model="MambaForCausalLM", config={"intermediate_size": None, "num_hidden_layers": 3}),
    "mamba-2": Case(model="Mamba2ForCausalLM", config=_MAMBA2),
    "jamba": Case(model="JambaForCausalLM", config=_JAMBA | {"num_experts": 4}),
    "falcon-h1": Case(model="FalconH1ForCausalLM", config=_FALCON | _FACTORS),
    "falcon-h1 with norms": Case(
        model="FalconH1ForCausalLM", config=_FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
}
