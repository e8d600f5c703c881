"""Which model is loaded where none is named, in which type it computes, and where its weights are."""

from dataclasses import replace

import torch

from kvist.errors import UnsupportedModel
from kvist.kernels.cpu import cpu
from kvist.model_files import locate
from kvist.spec.attention import Attention
from kvist.spec.known import KNOWN
from kvist.spec.model import ModelSpec

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("f32", "bf16", "f16")


def best_dtype(spec: ModelSpec) -> str:
    """The compute type in which this machine is fastest for a model: ``bf16`` or ``f32``.

    ``bf16`` where the machine multiplies bf16 matrices in hardware, or where the kernels compute all that is much:
    products and attention, but neither latents nor states.
    """
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bf16"
    on_kernels = cpu() is not None and all(isinstance(layer, Attention) for layer in spec.layers)
    return "bf16" if on_kernels else "f32"


def with_weights(spec: ModelSpec) -> ModelSpec:
    """The same model with its file on disk; a known name's is fetched.

    Raises:
        UnsupportedModel: it was read from a description without weights.
        KvistError: it cannot be fetched.
    """
    if spec.path is not None:
        return spec
    # By its source, not by its name: a config.json may be called anything.
    if spec.name not in KNOWN or spec.source != KNOWN[spec.name].source:
        raise UnsupportedModel(
            f"model: {spec.source} describes a model but holds no weights; name its directory with safetensors, or a "
            f".gguf file",
            key="model",
        )
    return replace(ModelSpec.read(locate(spec.name)), name=spec.name)
