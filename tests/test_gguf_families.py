"""GGUF files of dense families against transformers' network with the same, quantised weights.

The files are written here as conversion writes them, under the names that the ``gguf`` package gives the tensors of a
checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from served import Case, Session, build, open_saved, prompts_of
from served_dense import CASES, LONGROPE

pytest.importorskip("transformers")

TYPES = ["F32", "Q8_0", "BF16", "Q4_0", "F16"]
Values = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class File:
    """How one family is written.

    Attributes:
        case: to serve.
        architecture: its name in files.
        keys: beyond those of all, from the configuration.
        change: what conversion does to a tensor of this name.
        extra: further tensors.
    """

    case: Case
    architecture: str
    keys: Callable[[Any], dict[str, Any]]
    change: Callable[[str, Values], Values] = lambda name, values: values
    extra: Mapping[str, list[float]] = field(default_factory=dict)


def attention(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }


def gemma2(config: Any) -> dict[str, Any]:
    return attention(config) | {
        "attention.sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def phi3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    keys = attention(config) | {
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(rope["partial_rotary_factor"] * config.hidden_size) // config.num_attention_heads,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        keys["rope.scaling.attn_factor"] = float((1 + np.log(rope["factor"]) / np.log(original)) ** 0.5)
    return keys


def gpt2(config: Any) -> dict[str, Any]:
    return {
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


FILES = {
    "gpt2": File(
        case=CASES["gpt2"],
        architecture="gpt2",
        keys=gpt2,
        change=lambda name, values: values.T if ".c_" in name and values.ndim == 2 else values,
    ),
    "gemma2": File(
        case=Case(model="Gemma2ForCausalLM", config={**CASES["gemma2"].config, "query_pre_attn_scalar": 256}),
        architecture="gemma2",
        keys=gemma2,
        change=lambda name, values: values + 1 if name.endswith("norm.weight") else values,
    ),
    "phi3": File(case=CASES["phi3"], architecture="phi3", keys=phi3),
    "phi3-longrope": File(
        case=CASES["phi3-longrope"],
        architecture="phi3",
        keys=phi3,
        extra={f"rope_factors_{side}.weight": LONGROPE[f"{side}_factor"] for side in ("long", "short")},
    ),
    "olmo2": File(
        case=CASES["olmo2"],
        architecture="olmo2",
        keys=lambda config: attention(config) | {"rope.freq_base": 10000.0},
    ),
}


def write(path: Path, file: File, oracle: Any) -> Path:
    """Write the network, its matrices as several types in turn, and give it the values that the file then holds."""
    config = oracle.config
    writer = gguf.GGUFWriter(path, file.architecture)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        **file.keys(config),
    }
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{file.architecture}.{key}", value)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = bool(config.tie_word_embeddings)
    matrices = 0
    for name, tensor in oracle.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        values = np.ascontiguousarray(file.change(name, tensor.numpy()))
        if values.ndim == 1:
            writer.add_tensor(stored_name, values)
            continue
        kind = gguf.GGMLQuantizationType[TYPES[matrices % len(TYPES)]]
        matrices += 1
        stored = quantize(values, kind)
        writer.add_tensor(stored_name, stored, raw_dtype=kind)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(file.change(name, dequantize(stored, kind))))
    for name, factors in file.extra.items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", list(FILES))
def test_a_gguf_equals_transformers(family: str, tmp_path: Path) -> None:
    """In float32 to rounding; in bf16, where some weights stay packed, closely."""
    file = FILES[family]
    oracle = build(file.case, tmp_path).oracle
    path = write(tmp_path / "tiny.gguf", file, oracle)
    prompts = prompts_of(130, 5, 40)
    session = Session(open_saved(path, oracle), budget=60)
    assert session.worst_error(session.run(prompts, steps=4)) < 1e-4
    narrow = Session(open_saved(path, oracle, dtype="bf16"), budget=60)
    narrow.run(prompts, steps=1)
    for exact, near in zip(session.logits.values(), narrow.logits.values(), strict=True):
        assert float((exact[0] - near[0]).abs().max() / exact[0].abs().max()) < 0.1
