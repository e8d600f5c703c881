"""Small pretrained weights, in formats of their own, as a ``config.json`` with safetensors beside it."""

import base64
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

WEIGHTS = Path(__file__).resolve().parents[2] / "shared/data/weights"


def pretrained(name: str) -> Path:
    """A file of the shared folder; skips where it is not there."""
    path = WEIGHTS / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors of a file of the sorter: float32 in base64, inside JSON."""
    with gzip.open(path) as file:
        content = json.load(file)
    config = content.pop("config")
    tensors = {}
    for name, tensor in content.items():
        values = np.frombuffer(base64.b64decode(tensor["data"]), "<f4").copy()
        tensors[name] = torch.from_numpy(values).view(tensor["shape"])
    return config, tensors


def save(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a model directory."""
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def convert_sorter(path: Path, directory: Path) -> Path:
    """minGPT's gpt-nano as a GPT-2, whose matrices lie transposed."""
    given, tensors = read_tensors(path)
    config = {
        "model_type": "gpt2", "n_layer": given["n_layer"], "n_head": given["n_head"], "n_embd": given["n_embd"],
        "vocab_size": given["vocab_size"], "n_positions": given["block_size"], "tie_word_embeddings": False,
    }  # fmt: skip
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return save(directory, config, {n: t.t() if n.endswith(turned) else t for n, t in tensors.items()})


def convert_llama2c(path: Path, directory: Path) -> Path:
    """A ``.bin`` file of llama2.c, first version, whose heads keep turned pairs side by side."""
    content = path.read_bytes()
    hidden, inner, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", content[:28])
    assert vocab > 0, "a table of its own for logits is not read"
    values = torch.from_numpy(np.frombuffer(content[28:], "<f4").copy())
    dim = hidden // heads
    taken = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal taken
        size = int(np.prod(shape))
        taken += size
        return values[taken - size : taken].view(shape)

    def halves(matrices: torch.Tensor) -> torch.Tensor:
        pairs = matrices.view(layers, -1, dim // 2, 2, hidden)
        return pairs.transpose(2, 3).reshape(matrices.shape)

    embedding = take(vocab, hidden)
    stacked = {
        "input_layernorm": take(layers, hidden),
        "self_attn.q_proj": halves(take(layers, hidden, hidden)),
        "self_attn.k_proj": halves(take(layers, kv_heads * dim, hidden)),
        "self_attn.v_proj": take(layers, kv_heads * dim, hidden),
        "self_attn.o_proj": take(layers, hidden, hidden),
        "post_attention_layernorm": take(layers, hidden),
        "mlp.gate_proj": take(layers, inner, hidden),
        "mlp.down_proj": take(layers, hidden, inner),
        "mlp.up_proj": take(layers, inner, hidden),
    }
    tensors = {
        f"model.layers.{index}.{name}.weight": matrices[index]
        for name, matrices in stacked.items()
        for index in range(layers)
    }
    tensors |= {"model.embed_tokens.weight": embedding, "model.norm.weight": take(hidden)}
    # What is left are tables of cosines and sines.
    assert len(values) - taken == context * dim
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": context, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    return save(directory, config, tensors)


def read_llama2c_pieces(path: Path) -> list[bytes]:
    """The text of each id of a llama2.c tokenizer."""
    content, at, pieces = path.read_bytes(), 4, []
    while at < len(content):
        (size,) = struct.unpack_from("<i", content, at + 4)
        pieces.append(content[at + 8 : at + 8 + size])
        at += 8 + size
    return pieces
