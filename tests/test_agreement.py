"""Descriptions held against tensors: true ones pass under every family's names, false ones do not."""

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from kvist.errors import BadFile
from kvist.spec.agreement import GGUF, HUGGING_FACE, hold_safetensors
from kvist.spec.families import FAMILIES, Reading, read_config
from kvist.spec.layers import Attention, Latent, Layer, Nothing, Parallel, State
from kvist.spec.safetensors import SafeTensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# One for each way to name or fuse projections, and each kind of memory that projections tell of.
NAMED = (
    "llama", "gpt2", "bloom", "falcon", "gpt_neox", "mpt", "opt", "phi3", "gemma3_text", "gemma3n_text", "qwen2_moe",
    "deepseek_v3", "glm_moe_dsa", "mamba", "mamba2", "jamba", "falcon_h1", "granitemoehybrid", "qwen3_next", "lfm2",
    "recurrent_gemma", "nemotron_h",
)  # fmt: skip


def on_meta(family: str) -> tuple[Reading, dict[str, SafeTensor]]:
    """A family's default configuration as read, and the tensors of the network that transformers builds of it."""
    torch = pytest.importorskip("torch")
    auto = pytest.importorskip("transformers")
    config = auto.CONFIG_MAPPING[family]()
    with torch.device("meta"):
        model = auto.AutoModelForCausalLM.from_config(config)
    published = json.loads(json.dumps(config.to_dict(), default=str)) | {"model_type": family}
    tensors = {
        name: SafeTensor(dtype="BF16", shape=tuple(weight.shape), bytes=2 * weight.numel())
        for name, weight in model.state_dict().items()
    }
    return read_config(published, name=family), tensors


def hold(reading: Reading, tensors: dict[str, SafeTensor], layers: tuple[Layer, ...] | None = None) -> None:
    hold_safetensors(layers or reading.layers, reading.config, tensors, file="config.json")


def wider(layer: Layer) -> Layer:
    match layer:
        case Attention(kv_heads=heads):
            return replace(layer, kv_heads=heads + 1)
        case Latent(rank=rank):
            return replace(layer, rank=rank + 1)
        case State(conv_elements=elements):
            return replace(layer, conv_elements=elements + 1)
        case Parallel(parts=parts):
            return replace(layer, parts=tuple(map(wider, parts)))
        case _:
            return layer


@pytest.mark.parametrize("family", NAMED)
def test_a_family_is_held_to_its_own_network(family: str) -> None:
    reading, tensors = on_meta(family)
    hold(reading, tensors)
    with pytest.raises(BadFile, match=r"config\.json: .*(values a token|last inputs)"):
        hold(reading, tensors, tuple(map(wider, reading.layers)))
    last = max(index for index, layer in enumerate(reading.layers) if not isinstance(layer, Nothing))
    cut = {name: tensor for name, tensor in tensors.items() if _layer_of(name) != last}
    with pytest.raises(BadFile, match=f"is {len(reading.layers)}, but the tensors hold"):
        hold(reading, cut)


def _layer_of(name: str) -> int | None:
    match = HUGGING_FACE.layer.fullmatch(name)
    return int(match[1]) if match else None


@pytest.mark.slow
def test_no_family_is_refused_for_its_own_network() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    held = 0
    for family in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(FAMILIES)):
        try:
            reading, tensors = on_meta(family)
        except Exception:
            # Defaults that are no whole model, or need what is not installed.
            continue
        hold(reading, tensors)
        held += 1
    assert held > 100


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.self_attn.k_proj.weight", "key"),
        ("model.language_model.layers.3.self_attn.k_proj.qweight", "key"),
        ("language_model.model.layers.3.self_attn.v_proj.weight_packed", "value"),
        ("transformer.h.3.attn.c_attn.weight", "fused"),
        ("transformer.encoder.layers.3.self_attention.query_key_value.weight", "fused"),
        ("model.layers.3.attention.wqkv.weight", "fused"),
        ("model.layers.3.self_attn.W_pack.weight", "fused"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "latent"),
        ("backbone.layers.3.mixer.conv1d.weight", "convolution"),
        ("model.layers.3.self_attn.q_conv1d.weight", "convolution"),
        ("model.layers.3.conv.conv.weight", "convolution"),
        ("model.layers.3.mlp.up_proj.weight", None),
    ],
)
def test_names_within_a_decoder(name: str, role: str | None) -> None:
    match = HUGGING_FACE.layer.fullmatch(name)
    assert match
    assert (match[1], HUGGING_FACE.role(match[2])) == ("3", role)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.layers.3.self_attn.k_proj.weight",
        "visual.blocks.3.attn.qkv.weight",
        "audio_tower.layers.3.self_attn.k_proj.weight",
        "model.encoder.layers.3.self_attn.k_proj.weight",
        "talker.model.layers.3.self_attn.k_proj.weight",
        "mtp.layers.0.self_attn.k_proj.weight",
    ],
)
def test_towers_are_no_decoders(name: str) -> None:
    assert not HUGGING_FACE.layer.fullmatch(name)


def test_gguf_names() -> None:
    match = GGUF.layer.fullmatch("blk.12.ssm_conv1d_q.weight")
    assert match
    assert GGUF.role(match[2]) == "convolution"


def llama(**config: Any) -> Reading:
    base = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return read_config(base | {"hidden_size": 64, "max_position_embeddings": 128} | config, name="x")


def tensors_of(*, layers: int = 2, rows: int = 32, kind: str = "BF16") -> dict[str, SafeTensor]:
    shapes = {"q": (64, 64), "k": (rows, 64), "v": (rows, 64)}
    return {
        f"model.layers.{index}.self_attn.{side}_proj.weight": SafeTensor(dtype=kind, shape=shape, bytes=0)
        for index in range(layers)
        for side, shape in shapes.items()
    }


def test_layers_that_draft_may_follow_when_the_configuration_counts_them() -> None:
    hold(llama(num_nextn_predict_layers=1), tensors_of(layers=3))
    with pytest.raises(BadFile, match="the tensors hold weights of 3 layers"):
        hold(llama(), tensors_of(layers=3))


def test_packed_matrices_have_other_shapes_and_the_same_layers() -> None:
    hold(llama(), tensors_of(rows=4, kind="I32"))
    with pytest.raises(BadFile, match="hold weights of 1 layer"):
        hold(llama(), tensors_of(layers=1, kind="I32"))
