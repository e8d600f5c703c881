"""Small configurations of every family whose weights are counted, one for each way in which its shapes differ."""

from typing import Any

_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
_PLAIN = {"hidden_size": 96, "intermediate_size": 208, "vocab_size": 520, "num_hidden_layers": 5} | _HEADS
_WIDE = _PLAIN | {"head_dim": 20}
_PADDED = _WIDE | {"pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
_MANY = _WIDE | _EXPERTS | {"num_experts": 8}
_LOCAL = _PLAIN | {"num_local_experts": 8, "num_experts_per_tok": 2}
_LATENT = (
    _PLAIN
    | _EXPERTS
    | {"q_lora_rank": 28, "kv_lora_rank": 36, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
    | {"first_k_dense_replace": 2, "n_shared_experts": 1, "n_routed_experts": 8, "pad_token_id": 0}
)
_INDEXED = _LATENT | {"index_n_heads": 4, "index_head_dim": 16}
_GPT2 = {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 520, "n_positions": 64}
_NEOX = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 520}
_OPT = _NEOX | {"ffn_dim": 200, "max_position_embeddings": 64, "word_embed_proj_dim": 96}
_MAMBA = {"hidden_size": 96, "num_hidden_layers": 3, "vocab_size": 520, "state_size": 8}
_MAMBA2 = {"mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}
_GRANITE = _PLAIN | _MAMBA2 | {"shared_intermediate_size": 40}
_GRANITE |= {"layer_types": ["mamba", "attention", "mamba", "mamba", "attention"]}
_NEMOTRON = _WIDE | {"mamba_num_heads": 12, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}
_NEMOTRON_MOE = _NEMOTRON | _EXPERTS | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}
_NEMOTRON_MOE |= {"hybrid_override_pattern": "MEM*E"}
_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12}
_DELTA |= {"linear_value_head_dim": 10}
_LFM2 = _PLAIN | {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}
_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
_GEMMA4 = _WIDE | _TURNS | {"global_head_dim": 24, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 530}
_GEMMA4_MOE = _GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
_GEMMA4_MOE |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
_GEMMA4_MOE |= {"hidden_size_per_layer_input": 0}
_V4 = {"hidden_size": 96, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 520, "num_hidden_layers": 5}
_V4 |= {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
_V4 |= {"q_lora_rank": 28, "o_lora_rank": 20, "o_groups": 4, "qk_rope_head_dim": 8, "index_head_dim": 16}
_V4 |= {"index_n_heads": 4, "num_hash_layers": 2, "compress_ratios": [0, 4, 128, 4, 0], "hc_mult": 4}
_KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 6, "short_conv_kernel_size": 4}

CASES: dict[str, list[dict[str, Any]]] = {
    "apertus": [_WIDE],
    "apertus1p5_text": [_WIDE],
    "arcee": [_WIDE],
    "bamba": [_PLAIN | _MAMBA2 | {"attn_layer_indices": [2]}],
    "bloom": [{"hidden_size": 96, "n_layer": 3, "n_head": 6, "vocab_size": 520}],
    "cohere": [_PLAIN, _PLAIN | {"use_qk_norm": True}],
    "cohere2": [_PLAIN],
    "cwm": [_WIDE, _WIDE | {"mlp_bias": True}],
    "dbrx": [
        {"d_model": 96, "n_heads": 6, "n_layers": 3, "vocab_size": 520}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}}
    ],
    "deepseek_v2": [_LATENT, _LATENT | {"q_lora_rank": None}],
    "deepseek_v3": [_LATENT],
    "deepseek_v32": [_INDEXED],
    "deepseek_v4": [_V4],
    "diffllama": [_WIDE, _WIDE | {"attention_bias": True}],
    "dots1": [_MANY | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 2}],
    "ernie4_5": [_WIDE, _WIDE | {"use_bias": True}],
    "ernie4_5_moe": [
        _WIDE
        | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1}
    ],
    "exaone": [_WIDE],
    "exaone4": [_WIDE],
    "exaone_moe": [_MANY | {"first_k_dense_replace": 1, "num_shared_experts": 1}],
    "falcon": [_NEOX, _NEOX | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}],
    "falcon_h1": [
        _WIDE | _MAMBA2 | {"mamba_d_ssm": 192},
        _WIDE | _MAMBA2 | {"mamba_d_ssm": 192, "mamba_rms_norm": True, "projectors_bias": True},
    ],
    "falcon_mamba": [_MAMBA | {"intermediate_size": 200}],
    "gemma": [_WIDE],
    "gemma2": [_WIDE],
    "gemma3_text": [_WIDE],
    "gemma3n_text": [
        _WIDE
        | _TURNS
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 530, "num_kv_shared_layers": 2}
        | {"laurel_rank": 12}
    ],
    "gemma4_text": [_GEMMA4 | {"hidden_size_per_layer_input": 8, "use_double_wide_mlp": True}, _GEMMA4_MOE],
    "gemma4_unified_text": [_GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}],
    "glm": [_PADDED],
    "glm4": [_PADDED],
    "glm4_moe": [
        _MANY | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "pad_token_id": 0},
        _MANY
        | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 2, "pad_token_id": 0}
        | {"use_qk_norm": True, "attention_bias": True},
    ],
    "glm4_moe_lite": [_LATENT],
    "glm_moe_dsa": [_INDEXED, _INDEXED | {"indexer_types": ["full", "shared", "shared", "full", "shared"]}],
    "gpt2": [_GPT2],
    "gpt_bigcode": [_GPT2],
    "gpt_neox": [_NEOX | {"intermediate_size": 200}],
    "gpt_oss": [_WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2}],
    "gptj": [_GPT2 | {"rotary_dim": 8}],
    "granite": [_WIDE],
    "granitemoe": [_LOCAL],
    "granitemoehybrid": [
        _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
        _GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ],
    "granitemoeshared": [_LOCAL | {"shared_intermediate_size": 32}],
    "helium": [_PLAIN | {"head_dim": 16}],
    "hunyuan_v1_dense": [_WIDE],
    "hunyuan_v1_moe": [_WIDE | {"num_experts": 8, "moe_topk": 2}],
    "hy_v3": [_MANY | {"first_k_dense_replace": 1, "num_shared_experts": 1}],
    "hyperclovax": [_WIDE, _WIDE | {"use_post_norm": False}],
    "iquestcoder": [_WIDE],
    "jais2": [_WIDE],
    "jamba": [
        _PLAIN
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8}
        | {"attn_layer_period": 3, "attn_layer_offset": 1}
    ],
    "kimi_linear": [
        {**_LATENT, "q_lora_rank": None, "num_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 4}
        | {"num_experts": 8, "linear_attn_config": _KDA}
    ],
    "lfm2": [_LFM2],
    "lfm2_moe": [_LFM2 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}],
    "llama": [_WIDE, _WIDE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "llama4_text": [
        _WIDE
        | {"intermediate_size_mlp": 300, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 2}
    ],
    "mamba": [_MAMBA],
    "mamba2": [_MAMBA | {"num_heads": 12, "head_dim": 16, "n_groups": 2, "expand": 2}],
    "mellum": [_MANY],
    "mimo_v2_flash": [_MANY | {"v_head_dim": 12, "swa_num_key_value_heads": 4, "n_routed_experts": 8}],
    "minicpm3": [_LATENT],
    "minimax": [_PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2}],
    "minimax_m2": [_WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2}],
    "ministral": [_WIDE],
    "ministral3": [_WIDE],
    "mistral": [_WIDE],
    "mixtral": [_WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2}],
    "mpt": [{"d_model": 96, "n_layers": 3, "n_heads": 6, "vocab_size": 520, "max_seq_len": 64}],
    "nemotron": [_PLAIN],
    "nemotron_h": [
        _NEMOTRON | {"hybrid_override_pattern": "M-M*-"},
        _NEMOTRON_MOE,
        _NEMOTRON_MOE | {"moe_latent_size": 40},
    ],
    "olmo": [_PLAIN],
    "olmo2": [_PLAIN],
    "olmo3": [_PLAIN],
    "olmoe": [_PLAIN | {"num_experts": 8, "num_experts_per_tok": 2}],
    "opt": [_OPT, _OPT | {"word_embed_proj_dim": 48, "do_layer_norm_before": False}],
    "phi": [{key: value for key, value in _PLAIN.items() if key != "num_key_value_heads"}],
    "phi3": [_PLAIN | {"pad_token_id": 0}],
    "phimoe": [_LOCAL | {"lm_head_bias": True, "attention_bias": True}],
    "qwen2": [_WIDE],
    "qwen2_moe": [_MANY | {"shared_expert_intermediate_size": 40}],
    "qwen3": [_WIDE, _WIDE | {"attention_bias": True}],
    "qwen3_5_moe_text": [_MANY | _DELTA | {"shared_expert_intermediate_size": 40}],
    "qwen3_5_text": [_WIDE | _DELTA],
    "qwen3_moe": [_MANY, _MANY | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}],
    "qwen3_next": [_MANY | _DELTA | {"shared_expert_intermediate_size": 40}],
    "recurrent_gemma": [
        _PLAIN | {"head_dim": 16, "lru_width": 108, "block_types": ["recurrent", "recurrent", "attention"]}
    ],
    "sarvam_mla": [_LATENT],
    "sarvam_moe": [_MANY | {"first_k_dense_replace": 1, "n_shared_experts": 1}],
    "seed_oss": [_WIDE],
    "smollm3": [_PADDED],
    "solar_open": [_MANY | {"n_routed_experts": 8, "n_shared_experts": 1}],
    "stablelm": [_PLAIN, _PLAIN | {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}],
    "starcoder2": [_PLAIN, _PLAIN | {"use_bias": False}],
    "vaultgemma": [_WIDE],
    "youtu": [_LATENT],
}

# Counted, but not built here: families that publish their own code, names under which others are nested, and LongCat,
# of whose experts transformers builds those that do nothing too.
UNBUILT = {
    "Yi", "aquila", "baichuan", "deepseek", "gpt-sw3", "internlm2", "kimi_k2", "longcat_flash", "minicpm",
    "minimax_text_01", "orion", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    "skywork", "xverse",
}  # fmt: skip
