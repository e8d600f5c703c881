"""What keys may be from which networks are built, where reading a model's memory has not asked already."""

import math
from collections.abc import Callable
from typing import Any

_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner",
    "max_position_embeddings", "num_experts_per_tok", "decoder_sparse_step", "interleave_moe_layer_step", "n_group",
    "topk_group", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "conv_kernel", "state_size", "num_heads", "n_groups", "expand", "mamba_d_conv",
    "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads", "expert_layer_period",
)  # fmt: skip
_WHOLE = (
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "expert_layer_offset",
)  # fmt: skip
_POSITIVE = (
    "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "attention_multiplier", "swiglu_limit",
    "rope_theta", "rope_local_base_freq", "floor_scale",
)  # fmt: skip
_REALS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
    "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier", "residual_multiplier", "logit_scale",
    "routed_scaling_factor", "swiglu_alpha", "attn_scale",
)  # fmt: skip


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _list_of(check: Callable[[Any], bool], length: int | None = None) -> Callable[[Any], bool]:
    def listed(value: Any) -> bool:
        return isinstance(value, list | tuple) and length in (None, len(value)) and all(map(check, value))

    return listed


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (lambda value: type(value) is int and value > 0, "a whole number, at least 1")),
    **dict.fromkeys(_WHOLE, (_is_whole, "a whole number, at least 0")),
    **dict.fromkeys(_POSITIVE, (lambda value: _is_real(value) and value > 0, "a number above 0")),
    **dict.fromkeys(_REALS, (_is_real, "a number")),
    **dict.fromkeys(
        ("time_step_rank", "mamba_dt_rank"),
        (lambda value: value == "auto" or (type(value) is int and value > 0), "a whole number, at least 1, or 'auto'"),
    ),
    **dict.fromkeys(("moe_layers", "mlp_only_layers"), (_list_of(_is_whole), "a list of layers' numbers")),
    "mlp_layer_types": (_list_of(lambda kind: isinstance(kind, str)), "a list of words, one a layer"),
    "mlp_multipliers": (_list_of(_is_real, 2), "a list of 2 numbers"),
    "ssm_multipliers": (_list_of(_is_real, 5), "a list of 5 numbers"),
}


def wanted(key: str, value: Any) -> str | None:
    """What a key should be, where ``value`` is not that; None where it is, or where anything may be."""
    known = _KINDS.get(key)
    return None if known is None or known[0](value) else known[1]
