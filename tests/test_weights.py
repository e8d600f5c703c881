"""GGUF files against transformers' network with the same, quantised weights."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from test_model import COMMON, prompts_of, run_greedy, runner_of, worst_error

from kvist.errors import BadFile, UnsupportedModel
from kvist.model.network import Network, Norm
from kvist.model.weights import Checkpoint
from kvist.spec.model import ModelSpec

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip

NETWORK = Network(vocab=4, hidden=2, blocks=(), norm=Norm(name="model.norm", eps=1e-5))


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
            name, "output.weight"
        )
    _, _, index, *rest, kind = name.split(".")
    return f"blk.{index}.{LAYER['.'.join(rest)]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape)


def write_llama(path, model, *, types=TYPES, skip=(), extra=()):
    """Write a Llama, its matrices as ``types`` in turn, and give the model the values that the file then holds."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    matrices = 0
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        kind = GGMLQuantizationType[types[matrices % len(types)]]
        matrices += 1
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        stored = quantize(interleaved(values, heads) if heads else values, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        # The order of rows does not change what a row holds.
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(dequantize(quantize(values, kind), kind)))
    for name in extra:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(**settings):
    import transformers

    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        **{**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128, **settings}
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(1 if tensor.dim() == 1 else 0, 0.1)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_of_many_types_equals_transformers(tmp_path, tied):
    model = tiny_llama(tie_word_embeddings=tied)
    path = write_llama(tmp_path / "tiny.gguf", model)
    assert worst_error(model, run_greedy(runner_of(path), prompts_of(60, 5), budget=50)) < 1e-4


def test_missing_and_foreign_tensors_of_a_gguf_are_named(tmp_path):
    model = tiny_llama()
    missing = write_llama(tmp_path / "missing.gguf", model, skip=["model.layers.2.mlp.down_proj.weight"])
    with pytest.raises(BadFile, match=r"layers\.2\.mlp\.down_proj"):
        runner_of(missing)
    foreign = write_llama(tmp_path / "foreign.gguf", model, extra=["blk.0.attn_sinks.weight"])
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_sinks"):
        runner_of(foreign)


def test_a_configuration_alone_has_no_weights(tmp_path):
    spec = ModelSpec(name="paper", source="config.json", layers=(), max_context=8, config={"model_type": "llama"})
    with pytest.raises(UnsupportedModel, match="holds no weights"):
        Checkpoint(spec, torch.float32, NETWORK)
