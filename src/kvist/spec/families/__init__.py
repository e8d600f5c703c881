"""One reader a family: a configuration under Hugging Face's names becomes layers.

A reader answers exactly or raises; a key that the configuration leaves out gets the default of the family's class
in transformers, which is what every engine loads, and is listed as an assumption.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.convolutions import CONVOLUTIONS
from kvist.spec.families.decoders import DECODERS
from kvist.spec.families.gated_delta import GATED_DELTA
from kvist.spec.families.kda import KDA
from kvist.spec.families.lightning import LIGHTNING
from kvist.spec.families.mamba_hybrids import MAMBA_HYBRIDS
from kvist.spec.families.reading import Reading
from kvist.spec.families.recurrent import RECURRENT_MODELS
from kvist.spec.foreign import refuse_foreign

__all__ = ["FAMILIES", "Reading", "read_config"]

FAMILIES: dict[str, Callable[[ConfigKeys], Reading]] = {
    **DECODERS,
    **RECURRENT_MODELS,
    **MAMBA_HYBRIDS,
    **GATED_DELTA,
    **KDA,
    **LIGHTNING,
    **CONVOLUTIONS,
}

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}


def _type_of_architecture(config: Mapping[str, Any]) -> str | None:
    match config.get("architectures"):
        case [str(only)]:
            return _CLASSES.get(only)
        case _:
            return None


def read_config(config: Mapping[str, Any], *, name: str, overrides: Mapping[str, Any] | None = None) -> Reading:
    """Read a ``config.json``.

    Args:
        config: its content.
        name: what messages call it.
        overrides: values in place of what is published, by key.

    Raises:
        InputError: a key of ``overrides`` is none that the family reads.
        UnsupportedModel: of a family, or with a mechanism, that cannot be read exactly; names the key.
        BadFile: a key is missing, of another kind or out of range; names it, its value and what would be right.
    """
    keys = ConfigKeys(config, name=name, overrides=overrides)
    family = keys.text("model_type", default=_type_of_architecture(config), source="implied by `architectures`")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"{name}: model_type is {family!r}; supported are {', '.join(FAMILIES)}", key="model_type"
        )
    reading = FAMILIES[family](keys)
    refuse_foreign(keys)
    for key in keys.overrides:
        if key not in keys.asked:
            raise InputError(f"assume: {key!r} is no key that is read for model_type {family}", key="assume")
    return reading
