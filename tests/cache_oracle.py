"""What transformers keeps of a sequence in attention alone: one forward pass on the meta device.

Beside :mod:`state_oracle`, for text models that no auto class knows, encoders with decoders, and compressed caches.
Nothing is computed on the meta device: tensors have a shape and a type and nothing else.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from state_oracle import quietly
from torch import nn

# Text models whose class is not called after their configuration's.
_CALLED = {
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "voxtral_realtime_text": "VoxtralRealtimeTextModel",
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Elements of one layer's cache: of the sequence itself, of its indexer, of an encoder."""

    itself: int
    indexer: int = 0
    encoder: int = 0


def kept_by_transformers(config: Mapping[str, Any], *, tokens: int, device: str = "meta") -> list[Kept]:
    """Build the decoder that ``config`` describes, run it once over ``tokens``, and measure each layer's cache."""
    built = _config(config)
    with quietly(), torch.device(device), torch.no_grad():
        model = _decoder(built, str(config["model_type"])).eval()
        output = model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=True)
    return [_of_layer(layer) for layer in output.past_key_values.layers]


def kept_with_an_encoder(
    config: Mapping[str, Any], *, tokens: int, inputs: Mapping[str, tuple[int, ...]], device: str = "meta"
) -> list[Kept]:
    """The same of a decoder of ``tokens`` behind an encoder.

    Args:
        config: of both.
        tokens: of the decoder.
        inputs: of the encoder: shapes of ``input_ids`` or ``input_features``.
        device: another than ``meta`` for models that look at values on the way.
    """
    built = _config(config)
    with quietly(), torch.device(device), torch.no_grad():
        model = transformers.AutoModel.from_config(built, dtype=torch.bfloat16).eval()
        types = {"input_ids": torch.long, "input_features": torch.bfloat16}
        given = {name: torch.zeros(shape, dtype=types[name]) for name, shape in inputs.items()}
        output = model(decoder_input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=True, **given)
    cache = output.past_key_values
    itself, encoder = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
    return [
        Kept(itself=_of_layer(own).itself, encoder=_of_layer(cross).itself)
        for own, cross in zip(itself, encoder, strict=True)
    ]


def kept_by_cross_attention(config: Mapping[str, Any], *, tokens: int, states: int) -> list[Kept]:
    """The same of a Llama 3.2 text model that sees ``states`` tokens of images."""
    built = _config(config)
    with quietly(), torch.device("meta"), torch.no_grad():
        model = _decoder(built, str(config["model_type"])).eval()
        image = torch.zeros((1, states, built.hidden_size), dtype=torch.bfloat16)
        ids = torch.zeros((1, tokens), dtype=torch.long)
        output = model(input_ids=ids, cross_attention_states=image, use_cache=True)
    crossing = set(built.cross_attention_layers)
    sizes = [_of_layer(layer).itself for layer in output.past_key_values.layers]
    return [
        Kept(itself=0, encoder=size) if index in crossing else Kept(itself=size) for index, size in enumerate(sizes)
    ]


def _config(config: Mapping[str, Any]) -> Any:
    with quietly():
        built = transformers.AutoConfig.for_model(
            config["model_type"], **{key: value for key, value in config.items() if key != "model_type"}
        )
    built._attn_implementation = "eager"
    return built


def _decoder(built: Any, model_type: str) -> nn.Module:
    if type(built) in transformers.MODEL_MAPPING and model_type not in _CALLED:
        return transformers.AutoModel.from_config(built, dtype=torch.bfloat16)
    kind = type(built)
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    name = _CALLED.get(model_type, kind.__name__.removesuffix("Config") + "Model")
    return getattr(module, name)(built).to(torch.bfloat16)


def _of_layer(layer: Any) -> Kept:
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    # DeepSeek-V4's values are its keys.
    stored = [keys] if keys is values else [keys, values]
    itself = sum(tensor.numel() for tensor in stored if isinstance(tensor, torch.Tensor))
    entries = getattr(layer, "compressed_kv", None) or {}
    sizes = {name: tensor.numel() for name, tensor in entries.items() if tensor is not None}
    indexer = sum(
        tensor.numel()
        for name in ("indexer_keys", "idx_keys")
        if isinstance(tensor := getattr(layer, name, None), torch.Tensor)
    )
    return Kept(itself=itself + sizes.get("compressor", 0), indexer=indexer + sizes.get("indexer", 0))
