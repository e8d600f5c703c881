"""Keys of a configuration that mean another kind of memory than the family's, wherever they appear.

A family reader knows which keys it reads. These are the keys by which published models say that layers remember
something else (latents, states, chunks, shared layers, an indexer, an encoder); with one of them set, the family's
formula would be a guess. Source: the configuration classes of transformers, and published configurations.
"""

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys

_LATENT = "attention over latents"
_STATE = "layers with a state"
_LINEAR = "linear attention"
_MIX = "layers of several kinds"
_INDEX = "an indexer beside the keys"
_CROSS = "attention to an encoder"
_HEADS = "heads of other widths or numbers"
_SHARED = "layers that share a cache"
_WINDOW = "a window"

FOREIGN_KEYS = {
    "kv_lora_rank": _LATENT, "q_lora_rank": _LATENT, "qk_rope_head_dim": _LATENT, "qk_nope_head_dim": _LATENT,
    "is_mla": _LATENT, "use_mla": _LATENT,
    "state_size": _STATE, "d_state": _STATE, "d_conv": _STATE, "time_step_rank": _STATE, "conv_L_cache": _STATE,
    "lru_width": _STATE, "block_types": _STATE, "n_mamba_heads": _STATE, "conv_kernel": _STATE,
    "attn_type_list": _MIX, "layers_block_type": _MIX, "layer_type_counts": _MIX, "hybrid_override_pattern": _MIX,
    "hybrid_layer_pattern": _MIX, "hybrid_layer_ids": _MIX, "attn_layer_indices": _MIX, "attn_layer_period": _MIX,
    "attn_layer_offset": _MIX, "block_configs": _MIX, "full_attention_interval": _MIX, "full_attn_mod": _MIX,
    "full_attention_layers": _MIX, "sliding_attention_layers": _MIX, "global_attn_every_n_layers": _MIX,
    "sliding_window_pattern": _MIX, "attention_types": _MIX, "attention_layers": _MIX, "per_layer_config": _MIX,
    "sliding_window": _WINDOW, "local_attention": _WINDOW,
    "attention_chunk_size": "attention in chunks", "attention_window_size": _WINDOW,
    "compress_ratios": "compressed attention", "compress_ratio": "compressed attention",
    "num_kv_shared_layers": _SHARED, "kv_source_layer_ids": _SHARED, "attention_k_eq_v": _SHARED,
    "kv_source_layers": _SHARED, "cla_share_factor": _SHARED, "use_cla": _SHARED,
    "is_encoder_decoder": _CROSS, "add_cross_attention": _CROSS, "encoder_layers": _CROSS,
    "multi_query": _HEADS, "multi_query_attention": _HEADS, "multi_query_group_num": _HEADS, "num_kv_heads": _HEADS,
    "n_head_kv": _HEADS, "kv_channels": _HEADS, "v_head_dim": _HEADS, "qk_head_dim": _HEADS,
    "attention_head_type": _HEADS, "num_key_value_heads_per_layer": _HEADS, "num_attention_groups": _HEADS,
    "global_head_dim": _HEADS, "num_global_key_value_heads": _HEADS,
}  # fmt: skip

FOREIGN_PREFIXES = {
    "mamba_": _STATE, "ssm_": _STATE, "rwkv_": _STATE, "linear_": _LINEAR, "kda_": _LINEAR, "lightning_": _LINEAR,
    "gated_delta": _LINEAR, "index_": _INDEX, "indexer_": _INDEX, "cross_attention": _CROSS, "swa_": _HEADS,
}  # fmt: skip

_PREFIXES = tuple(FOREIGN_PREFIXES)


def refuse_foreign(keys: ConfigKeys) -> None:
    """Refuse a configuration with such a key, unless its family reads it or its value switches it off.

    Null, false, 0 and empty values are off, and so is a window where ``use_sliding_window`` is.

    Raises:
        UnsupportedModel: names the key and its value.
    """
    if keys.get("use_sliding_window") is False:
        keys.get("sliding_window")
    for key in list(keys.config):
        meaning = _meaning(key)
        if meaning is None or key in keys.asked:
            continue
        value = keys.get(key)
        if value is None or value is False or value in (0, "", [], {}):
            continue
        shown = repr(value)
        raise UnsupportedModel(
            f"{keys.name}: {key} is {shown if len(shown) <= 60 else shown[:57] + '…'}: it means {meaning}, which "
            f"model_type {keys.family} is not read with; --assume {key}=null reads it as if it were not there",
            key=key,
        )


def _meaning(key: object) -> str | None:
    if not isinstance(key, str):
        return None
    if key in FOREIGN_KEYS:
        return FOREIGN_KEYS[key]
    # Asked at once of all prefixes: most keys have none of them.
    if not key.startswith(_PREFIXES):
        return None
    return next((meaning for prefix, meaning in FOREIGN_PREFIXES.items() if key.startswith(prefix)), None)
