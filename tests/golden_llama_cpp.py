"""What llama.cpp (of llama-cpp-python 0.3.36) printed for small models of zeros (``ask_llama_cpp.py``)."""

from dataclasses import dataclass
from typing import Any

from kvist.spec.layers import Attention, Latent, Layer, Nothing, Parallel, State


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model, and the ``size =`` lines of the caches of each context that was asked for.

    ``metadata`` is that of the GGUF file beside :func:`common`; ``layers`` is what it says, in our words.
    """

    architecture: str
    model_type: str
    layers: list[Layer]
    metadata: dict[str, Any]
    contexts: list[tuple[dict[str, Any], list[str]]]

    def gguf(self) -> dict[str, Any]:
        """All metadata, under the architecture's prefix."""
        prefixed = {f"{self.architecture}.{key}": value for key, value in (common() | self.metadata).items()}
        return {"general.architecture": self.architecture, "general.name": self.architecture} | prefixed


def common() -> dict[str, Any]:
    """Four query and two KV heads of 64, four layers."""
    return {
        "context_length": 32768, "embedding_length": 256, "block_count": 4, "feed_forward_length": 64, "vocab_size": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": 64, "attention.value_length": 64,
    }  # fmt: skip


def heads(**limits: int) -> Attention:
    return Attention(kv_heads=2, key_dim=64, value_dim=64, **limits)


def state(name: str, conv: int, recurrent: int) -> State:
    return State(name=name, conv_elements=conv, state_elements=recurrent)


ASKED: dict[str, Asked] = {
    "llama": Asked(
        architecture="llama", model_type="llama",
        layers=[heads()] * 4,
        metadata={"rope.dimension_count": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "8.00 MiB (4096 cells, 4 layers, 1/1 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
            ]),
            ({"n_ctx": 1000, "n_seq_max": 3}, [
                "3.00 MiB (512 cells, 4 layers, 3/3 seqs), K (f16): 1.50 MiB, V (f16): 1.50 MiB",
            ]),
            ({"n_ctx": 5000, "n_seq_max": 3, "kv_unified": True}, [
                "10.00 MiB (5120 cells, 4 layers, 3/1 seqs), K (f16): 5.00 MiB, V (f16): 5.00 MiB",
            ]),
            ({"n_ctx": 2048, "type_k": "q8_0", "type_v": "q5_1"}, [
                "1.81 MiB (2048 cells, 4 layers, 1/1 seqs), K (q8_0): 1.06 MiB, V (q5_1): 0.75 MiB",
            ]),
            ({"n_ctx": 2048, "type_k": "q4_1", "type_v": "iq4_nl"}, [
                "1.19 MiB (2048 cells, 4 layers, 1/1 seqs), K (q4_1): 0.62 MiB, V (iq4_nl): 0.56 MiB",
            ]),
            ({"n_ctx": 2048, "type_k": "q5_0", "flash_attn": False}, [
                "2.69 MiB (2048 cells, 4 layers, 1/1 seqs), K (q5_0): 0.69 MiB, V (f16): 2.00 MiB",
            ]),
            ({"n_ctx": 2048, "type_v": "q4_0", "flash_attn": False}, []),
        ],
    ),
    "gemma3": Asked(
        architecture="gemma3", model_type="gemma3_text",
        layers=[*[heads(window=512)] * 10, *[heads()] * 2],
        metadata={"block_count": 12, "attention.sliding_window": 512},
        contexts=[
            ({"n_ctx": 4096}, [
                "4.00 MiB (4096 cells, 2 layers, 1/1 seqs), K (f16): 2.00 MiB, V (f16): 2.00 MiB",
                "5.00 MiB (1024 cells, 10 layers, 1/1 seqs), K (f16): 2.50 MiB, V (f16): 2.50 MiB",
            ]),
            ({"n_ctx": 1000, "n_seq_max": 3}, [
                "1.50 MiB (512 cells, 2 layers, 3/3 seqs), K (f16): 0.75 MiB, V (f16): 0.75 MiB",
                "7.50 MiB (512 cells, 10 layers, 3/3 seqs), K (f16): 3.75 MiB, V (f16): 3.75 MiB",
            ]),
            ({"n_ctx": 5000, "n_seq_max": 3, "kv_unified": True}, [
                "5.00 MiB (5120 cells, 2 layers, 3/1 seqs), K (f16): 2.50 MiB, V (f16): 2.50 MiB",
                "10.00 MiB (2048 cells, 10 layers, 3/1 seqs), K (f16): 5.00 MiB, V (f16): 5.00 MiB",
            ]),
            ({"n_ctx": 2048, "type_k": "q8_0", "type_v": "q5_1"}, [
                "0.91 MiB (2048 cells, 2 layers, 1/1 seqs), K (q8_0): 0.53 MiB, V (q5_1): 0.38 MiB",
                "2.27 MiB (1024 cells, 10 layers, 1/1 seqs), K (q8_0): 1.33 MiB, V (q5_1): 0.94 MiB",
            ]),
            ({"n_ctx": 8192, "n_ubatch": 128}, [
                "8.00 MiB (8192 cells, 2 layers, 1/1 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
                "3.75 MiB (768 cells, 10 layers, 1/1 seqs), K (f16): 1.88 MiB, V (f16): 1.88 MiB",
            ]),
            ({"n_ctx": 8192, "swa_full": True}, [
                "8.00 MiB (8192 cells, 2 layers, 1/1 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
                "40.00 MiB (8192 cells, 10 layers, 1/1 seqs), K (f16): 20.00 MiB, V (f16): 20.00 MiB",
            ]),
            ({"n_ctx": 300}, [
                "0.50 MiB (512 cells, 2 layers, 1/1 seqs), K (f16): 0.25 MiB, V (f16): 0.25 MiB",
                "2.50 MiB (512 cells, 10 layers, 1/1 seqs), K (f16): 1.25 MiB, V (f16): 1.25 MiB",
            ]),
            ({"n_ctx": 8192, "n_seq_max": 4}, [
                "8.00 MiB (2048 cells, 2 layers, 4/4 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
                "20.00 MiB (1024 cells, 10 layers, 4/4 seqs), K (f16): 10.00 MiB, V (f16): 10.00 MiB",
            ]),
            ({"n_ctx": 8192, "n_seq_max": 4, "kv_unified": True}, [
                "8.00 MiB (8192 cells, 2 layers, 4/1 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
                "12.50 MiB (2560 cells, 10 layers, 4/1 seqs), K (f16): 6.25 MiB, V (f16): 6.25 MiB",
            ]),
            ({"n_ctx": 8192, "n_batch": 64}, [
                "8.00 MiB (8192 cells, 2 layers, 1/1 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
                "3.75 MiB (768 cells, 10 layers, 1/1 seqs), K (f16): 1.88 MiB, V (f16): 1.88 MiB",
            ]),
        ],
    ),
    "cohere2": Asked(
        architecture="cohere2", model_type="cohere2",
        layers=[*[heads(window=1024)] * 3, heads()],
        metadata={"attention.sliding_window": 1024, "attention.layer_norm_epsilon": 1e-05, "logit_scale": 0.25,
            "rope.dimension_count": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "2.00 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "2.25 MiB (1536 cells, 3 layers, 1/1 seqs), K (f16): 1.12 MiB, V (f16): 1.12 MiB",
            ]),
            ({"n_ctx": 1000, "n_seq_max": 3}, [
                "0.75 MiB (512 cells, 1 layers, 3/3 seqs), K (f16): 0.38 MiB, V (f16): 0.38 MiB",
                "2.25 MiB (512 cells, 3 layers, 3/3 seqs), K (f16): 1.12 MiB, V (f16): 1.12 MiB",
            ]),
        ],
    ),
    "gpt-oss": Asked(
        architecture="gpt-oss", model_type="gpt_oss",
        layers=[*[heads(window=128)] * 2, *[heads()] * 2],
        metadata={"attention.sliding_window": 128, "expert_count": 4, "expert_used_count": 2,
            "expert_feed_forward_length": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "4.00 MiB (4096 cells, 2 layers, 1/1 seqs), K (f16): 2.00 MiB, V (f16): 2.00 MiB",
                "0.75 MiB (768 cells, 2 layers, 1/1 seqs), K (f16): 0.38 MiB, V (f16): 0.38 MiB",
            ]),
            ({"n_ctx": 1000, "n_seq_max": 3}, [
                "1.50 MiB (512 cells, 2 layers, 3/3 seqs), K (f16): 0.75 MiB, V (f16): 0.75 MiB",
                "1.50 MiB (512 cells, 2 layers, 3/3 seqs), K (f16): 0.75 MiB, V (f16): 0.75 MiB",
            ]),
        ],
    ),
    "llama4": Asked(
        architecture="llama4", model_type="llama4_text",
        layers=[*[heads(chunk=8192)] * 3, heads()],
        metadata={"expert_count": 4, "expert_used_count": 1, "interleave_moe_layer_step": 1,
            "expert_feed_forward_length": 64, "rope.dimension_count": 64, "attention.chunk_size": 8192},
        contexts=[
            ({"n_ctx": 32768}, [
                "16.00 MiB (32768 cells, 1 layers, 1/1 seqs), K (f16): 8.00 MiB, V (f16): 8.00 MiB",
                "12.75 MiB (8704 cells, 3 layers, 1/1 seqs), K (f16): 6.38 MiB, V (f16): 6.38 MiB",
            ]),
            ({"n_ctx": 4096}, [
                "2.00 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "6.00 MiB (4096 cells, 3 layers, 1/1 seqs), K (f16): 3.00 MiB, V (f16): 3.00 MiB",
            ]),
        ],
    ),
    "olmo2-swa": Asked(
        architecture="olmo2", model_type="olmo3",
        layers=[*[heads(window=4096)] * 3, heads()],
        metadata={"attention.sliding_window": 4096, "rope.dimension_count": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "2.00 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "6.00 MiB (4096 cells, 3 layers, 1/1 seqs), K (f16): 3.00 MiB, V (f16): 3.00 MiB",
            ]),
            ({"n_ctx": 1000, "n_seq_max": 3}, [
                "0.75 MiB (512 cells, 1 layers, 3/3 seqs), K (f16): 0.38 MiB, V (f16): 0.38 MiB",
                "2.25 MiB (512 cells, 3 layers, 3/3 seqs), K (f16): 1.12 MiB, V (f16): 1.12 MiB",
            ]),
        ],
    ),
    "gemma3n": Asked(
        architecture="gemma3n", model_type="gemma3n_text",
        layers=[*[heads(window=512)] * 8, *[heads()] * 2],
        metadata={"block_count": 10, "attention.sliding_window": 512,
            "attention.sliding_window_pattern": [True, True, True, True, False, True, True, True, True, False],
            "attention.shared_kv_layers": 5, "embedding_length_per_layer_input": 32},
        contexts=[
            ({"n_ctx": 4096}, [
                "4.00 MiB (4096 cells, 2 layers, 1/1 seqs), K (f16): 2.00 MiB, V (f16): 2.00 MiB",
                "4.00 MiB (1024 cells, 8 layers, 1/1 seqs), K (f16): 2.00 MiB, V (f16): 2.00 MiB",
            ]),
            ({"n_ctx": 1000, "n_seq_max": 3}, [
                "1.50 MiB (512 cells, 2 layers, 3/3 seqs), K (f16): 0.75 MiB, V (f16): 0.75 MiB",
                "6.00 MiB (512 cells, 8 layers, 3/3 seqs), K (f16): 3.00 MiB, V (f16): 3.00 MiB",
            ]),
        ],
    ),
    "mamba": Asked(
        architecture="mamba", model_type="mamba",
        layers=[state("mamba", 3 * 512, 512 * 16)] * 4,
        metadata={"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 16},
        contexts=[
            ({"n_ctx": 4096}, [
                "0.15 MiB (1 cells, 4 layers, 1 seqs 0 rs_seq), R (f32): 0.02 MiB, S (f32): 0.12 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3}, [
                "0.45 MiB (3 cells, 4 layers, 3 seqs 0 rs_seq), R (f32): 0.07 MiB, S (f32): 0.38 MiB",
            ]),
        ],
    ),
    "mamba2": Asked(
        architecture="mamba2", model_type="mamba2",
        layers=[state("mamba2", 3 * 1024, 512 * 128)] * 4,
        metadata={"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 128, "ssm.time_step_rank": 8,
            "ssm.group_count": 2},
        contexts=[
            ({"n_ctx": 4096}, [
                "1.05 MiB (1 cells, 4 layers, 1 seqs 0 rs_seq), R (f32): 0.05 MiB, S (f32): 1.00 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3}, [
                "3.14 MiB (3 cells, 4 layers, 3 seqs 0 rs_seq), R (f32): 0.14 MiB, S (f32): 3.00 MiB",
            ]),
        ],
    ),
    "jamba": Asked(
        architecture="jamba", model_type="jamba",
        layers=[*[state("mamba", 3 * 512, 512 * 16)] * 7, heads()],
        metadata={"block_count": 8, "attention.head_count_kv": [0, 0, 0, 0, 2, 0, 0, 0], "ssm.conv_kernel": 4,
            "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 16, "expert_count": 2,
            "expert_used_count": 1},
        contexts=[
            ({"n_ctx": 4096}, [
                "2.00 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "0.26 MiB (1 cells, 8 layers, 1 seqs 0 rs_seq), R (f32): 0.04 MiB, S (f32): 0.22 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3}, [
                "2.25 MiB (1536 cells, 1 layers, 3/3 seqs), K (f16): 1.12 MiB, V (f16): 1.12 MiB",
                "0.78 MiB (3 cells, 8 layers, 3 seqs 0 rs_seq), R (f32): 0.12 MiB, S (f32): 0.66 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3, "kv_unified": True}, [
                "2.00 MiB (4096 cells, 1 layers, 3/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "0.78 MiB (3 cells, 8 layers, 3 seqs 0 rs_seq), R (f32): 0.12 MiB, S (f32): 0.66 MiB",
            ]),
        ],
    ),
    "granitehybrid": Asked(
        architecture="granitehybrid", model_type="granitemoehybrid",
        layers=[*[state("mamba2", 3 * 768, 512 * 128)] * 4, *[heads()] * 2],
        metadata={"block_count": 6, "attention.head_count_kv": [0, 0, 2, 0, 0, 2], "ssm.conv_kernel": 4,
            "ssm.inner_size": 512, "ssm.state_size": 128, "ssm.time_step_rank": 8, "ssm.group_count": 1,
            "attention.scale": 1.0, "rope.dimension_count": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "4.00 MiB (4096 cells, 2 layers, 1/1 seqs), K (f16): 2.00 MiB, V (f16): 2.00 MiB",
                "1.04 MiB (1 cells, 6 layers, 1 seqs 0 rs_seq), R (f32): 0.04 MiB, S (f32): 1.00 MiB",
            ]),
        ],
    ),
    "falcon-h1": Asked(
        architecture="falcon-h1", model_type="falcon_h1",
        layers=[Parallel(parts=(heads(), state("mamba2", 3 * 768, 512 * 128)))] * 4,
        metadata={"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 128, "ssm.time_step_rank": 8,
            "ssm.group_count": 1, "rope.dimension_count": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "8.00 MiB (4096 cells, 4 layers, 1/1 seqs), K (f16): 4.00 MiB, V (f16): 4.00 MiB",
                "1.04 MiB (1 cells, 4 layers, 1 seqs 0 rs_seq), R (f32): 0.04 MiB, S (f32): 1.00 MiB",
            ]),
        ],
    ),
    "lfm2": Asked(
        architecture="lfm2", model_type="lfm2",
        layers=[*[state("short-conv", 2 * 256, 0)] * 3, heads()],
        metadata={"attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3, "rope.dimension_count": 64},
        contexts=[
            ({"n_ctx": 4096}, [
                "2.00 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "0.01 MiB (1 cells, 4 layers, 1 seqs 0 rs_seq), R (f32): 0.01 MiB, S (f32): 0.00 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3}, [
                "2.25 MiB (1536 cells, 1 layers, 3/3 seqs), K (f16): 1.12 MiB, V (f16): 1.12 MiB",
                "0.02 MiB (3 cells, 4 layers, 3 seqs 0 rs_seq), R (f32): 0.02 MiB, S (f32): 0.00 MiB",
            ]),
        ],
    ),
    "qwen3next": Asked(
        architecture="qwen3next", model_type="qwen3_next",
        layers=[*[state("gated-delta", 3 * 1024, 512 * 64)] * 6, *[heads()] * 2],
        metadata={"block_count": 8, "ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 64,
            "ssm.time_step_rank": 8, "ssm.group_count": 4, "expert_count": 4, "expert_used_count": 2,
            "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 64, "rope.dimension_count": 16},
        contexts=[
            ({"n_ctx": 4096}, [
                "4.00 MiB (4096 cells, 2 layers, 1/1 seqs), K (f16): 2.00 MiB, V (f16): 2.00 MiB",
                "0.82 MiB (1 cells, 8 layers, 1 seqs 0 rs_seq), R (f32): 0.07 MiB, S (f32): 0.75 MiB",
            ]),
        ],
    ),
    "deepseek2": Asked(
        architecture="deepseek2", model_type="deepseek_v3",
        layers=[Latent(rank=512, rope_dim=64)] * 4,
        metadata={"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
            "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512,
            "attention.q_lora_rank": 64, "rope.dimension_count": 64, "leading_dense_block_count": 4,
            "expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 64, "expert_shared_count": 1,
            "expert_weights_scale": 1.0},
        contexts=[
            ({"n_ctx": 4096}, [
                "18.00 MiB (4096 cells, 4 layers, 1/1 seqs), K (f16): 18.00 MiB, V (f16): 0.00 MiB",
            ]),
            ({"n_ctx": 4096, "type_k": "q8_0"}, []),
            ({"n_ctx": 4096, "type_k": "q8_0", "type_v": "q8_0"}, [
                "9.56 MiB (4096 cells, 4 layers, 1/1 seqs), K (q8_0): 9.56 MiB, V (q8_0): 0.00 MiB",
            ]),
            ({"n_ctx": 4096, "flash_attn": False}, [
                "18.00 MiB (4096 cells, 4 layers, 1/1 seqs), K (f16): 18.00 MiB, V (f16): 0.00 MiB",
            ]),
        ],
    ),
    "rwkv7": Asked(
        architecture="rwkv7", model_type="rwkv7",
        layers=[state("rwkv", 2 * 256, 256 * 64)] * 4,
        metadata={"attention.head_count": 0, "attention.layer_norm_epsilon": 1e-05, "wkv.head_size": 64,
            "attention.decay_lora_rank": 64, "attention.iclr_lora_rank": 64,
            "attention.value_residual_mix_lora_rank": 32, "attention.gate_lora_rank": 128, "token_shift_count": 2},
        contexts=[
            ({"n_ctx": 4096}, [
                "0.26 MiB (1 cells, 4 layers, 1 seqs 0 rs_seq), R (f32): 0.01 MiB, S (f32): 0.25 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3}, [
                "0.77 MiB (3 cells, 4 layers, 3 seqs 0 rs_seq), R (f32): 0.02 MiB, S (f32): 0.75 MiB",
            ]),
        ],
    ),
    "nemotron_h": Asked(
        architecture="nemotron_h", model_type="nemotron_h",
        layers=[*[state("mamba2", 3 * 1024, 512 * 128)] * 3, heads(), Nothing(), Nothing()],
        metadata={"block_count": 6, "feed_forward_length": [0, 64, 0, 0, 64, 0],
            "attention.head_count_kv": [0, 0, 2, 0, 0, 0], "ssm.conv_kernel": 4, "ssm.inner_size": 512,
            "ssm.state_size": 128, "ssm.time_step_rank": 8, "ssm.group_count": 2,
            "attention.layer_norm_epsilon": 1e-05},
        contexts=[
            ({"n_ctx": 4096}, [
                "2.00 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 1.00 MiB, V (f16): 1.00 MiB",
                "0.79 MiB (1 cells, 6 layers, 1 seqs 0 rs_seq), R (f32): 0.04 MiB, S (f32): 0.75 MiB",
            ]),
        ],
    ),
    "kimi-linear": Asked(
        architecture="kimi-linear", model_type="kimi_linear",
        layers=[*[state("kda", 9 * 256, 4 * 64 * 64)] * 3, Latent(rank=512, rope_dim=64)],
        metadata={"attention.head_count_kv": [0, 0, 0, 1], "attention.key_length": 576,
            "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
            "attention.kv_lora_rank": 512, "kda.head_dim": 64, "expert_gating_func": 2, "ssm.conv_kernel": 4,
            "rope.dimension_count": 64, "expert_count": 4, "expert_used_count": 1,
            "expert_feed_forward_length": 64, "expert_shared_count": 1, "leading_dense_block_count": 4,
            "expert_weights_scale": 1.0},
        contexts=[
            ({"n_ctx": 4096}, [
                "4.50 MiB (4096 cells, 1 layers, 1/1 seqs), K (f16): 4.50 MiB, V (f16): 0.00 MiB",
                "0.21 MiB (1 cells, 4 layers, 1 seqs 0 rs_seq), R (f32): 0.03 MiB, S (f32): 0.19 MiB",
            ]),
            ({"n_ctx": 4096, "n_seq_max": 3}, [
                "5.06 MiB (1536 cells, 1 layers, 3/3 seqs), K (f16): 5.06 MiB, V (f16): 0.00 MiB",
                "0.64 MiB (3 cells, 4 layers, 3 seqs 0 rs_seq), R (f32): 0.08 MiB, S (f32): 0.56 MiB",
            ]),
        ],
    ),
}  # fmt: skip
