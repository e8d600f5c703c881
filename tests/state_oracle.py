"""What transformers keeps of a sequence: one forward pass on the meta device, and the elements of each layer's cache.

No weight and no value is computed: tensors on the meta device have a shape and a type and nothing else.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn


@dataclass(kw_only=True)
class Held:
    """Elements that one layer keeps, and the types of its states."""

    attention: int = 0
    indexer: int = 0
    conv: int = 0
    recurrent: int = 0
    types: dict[str, str] = field(default_factory=dict)


def held_by_transformers(config: Mapping[str, Any], *, tokens: int, device: str = "meta") -> list[Held]:
    """Build the model that ``config`` describes in bf16, run it once, and read each layer's cache.

    ``device`` is another than ``meta`` for models that look at values on the way.
    """
    with quietly(), torch.device(device), torch.no_grad():
        built = transformers.AutoConfig.for_model(
            config["model_type"], **{key: value for key, value in config.items() if key != "model_type"}
        )
        built._attn_implementation = "eager"
        model = transformers.AutoModel.from_config(built, dtype=torch.bfloat16).eval()
        # Some classes hand no cache back that they were not given.
        own = {"recurrent_gemma": lambda: {"past_key_values": transformers.DynamicCache(config=built)}}
        given = own.get(config["model_type"], dict)()
        output = model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=True, **given)
        return _read(config["model_type"], model, given.get("past_key_values") or _cache(output))


@contextmanager
def quietly() -> Iterator[None]:
    import torch.fx.experimental._config as meta_config

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), meta_config.patch(meta_nonzero_assume_all_nonzero=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _cache(output: Any) -> Any:
    for name in ("past_key_values", "cache_params", "cache", "state"):
        found = getattr(output, name, None)
        if found is not None:
            return found
    raise AssertionError(f"{type(output).__name__} holds no cache")


def _read(model_type: str, model: nn.Module, cache: Any) -> list[Held]:
    match model_type:
        case "rwkv":
            # Five tensors of [1, hidden, layers]: two shifts in the model's type, then the recurrence.
            layers = [Held(types={"recurrent": str(cache[2].dtype)}) for _ in range(cache[0].shape[-1])]
            for index, tensor in enumerate(cache):
                for layer in layers:
                    elements = tensor.numel() // len(layers)
                    layer.conv += elements if index < 2 else 0
                    layer.recurrent += 0 if index < 2 else elements
            return layers
        case "xlstm":
            states = [cache.rnn_state[index] for index in sorted(cache.rnn_state)]
            return [
                Held(recurrent=sum(part.numel() for part in state), types={"recurrent": str(state[0].dtype)})
                for state in states
            ]
    layers = [_of_layer(layer) for layer in cache.layers]
    match model_type:
        case "recurrent_gemma":
            for held, layer in zip(layers, model.layers, strict=True):
                block = layer.temporal_block
                if hasattr(block, "conv1d_state"):
                    held.conv, held.recurrent = block.conv1d_state.numel(), block.rg_lru.recurrent_states.numel()
                    held.types["recurrent"] = str(block.rg_lru.recurrent_states.dtype)
        case "minimax":
            layers += [Held() for _ in range(len(cache.linear_cache) - len(layers))]
            for held, state in zip(layers, cache.linear_cache, strict=False):
                if isinstance(state, torch.Tensor):
                    held.recurrent, held.types["recurrent"] = state.numel(), str(state.dtype)
    return layers


def _of_layer(layer: Any) -> Held:
    held = Held()
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        held.attention += tensor.numel() if isinstance(tensor, torch.Tensor) else 0
    keys = getattr(layer, "indexer_keys", None)
    held.indexer = keys.numel() if isinstance(keys, torch.Tensor) else 0
    for part in ("conv", "recurrent"):
        for tensor in (getattr(layer, f"{part}_states", None) or {}).values():
            if tensor is not None:
                setattr(held, part, getattr(held, part) + tensor.numel())
                held.types[part] = str(tensor.dtype)
    return held
