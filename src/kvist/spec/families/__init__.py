"""One reader a family: a configuration under Hugging Face's names becomes layers.

A reader answers exactly or raises; a key that the configuration leaves out gets the default of the family's class
in transformers, which is what every engine loads, and is listed as an assumption.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.classes import family_of_class
from kvist.spec.families.compressed import COMPRESSED
from kvist.spec.families.convolutions import CONVOLUTIONS
from kvist.spec.families.decoders import DECODERS
from kvist.spec.families.dense import read_dense
from kvist.spec.families.encoder_decoder import ENCODER_DECODER
from kvist.spec.families.gated_delta import GATED_DELTA
from kvist.spec.families.gguf_only import GGUF_ONLY
from kvist.spec.families.gpt import GPT
from kvist.spec.families.kda import KDA
from kvist.spec.families.latent import LATENT
from kvist.spec.families.lightning import LIGHTNING
from kvist.spec.families.llamas import LLAMAS
from kvist.spec.families.mamba_hybrids import MAMBA_HYBRIDS
from kvist.spec.families.nested import NESTED, read_inside
from kvist.spec.families.own_shapes import OWN_SHAPES
from kvist.spec.families.reading import Reader, Reading
from kvist.spec.families.recurrent import RECURRENT_MODELS
from kvist.spec.families.shared_kv import SHARED_KV
from kvist.spec.families.untyped import read_untyped
from kvist.spec.families.windowed import WINDOWED
from kvist.spec.foreign import refuse_foreign

__all__ = ["FAMILIES", "Reading", "read_config"]

FAMILIES: dict[str, Reader] = {
    **DECODERS,
    **{name: partial(read_dense, family) for name, family in {**GPT, **LLAMAS, **WINDOWED, **GGUF_ONLY}.items()},
    **OWN_SHAPES,
    **SHARED_KV,
    **LATENT,
    **COMPRESSED,
    **ENCODER_DECODER,
    **RECURRENT_MODELS,
    **MAMBA_HYBRIDS,
    **GATED_DELTA,
    **KDA,
    **LIGHTNING,
    **CONVOLUTIONS,
}
FAMILIES |= {name: partial(read_inside, nesting, FAMILIES) for name, nesting in NESTED.items()}


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
    reading = _reader(keys)(keys)
    refuse_foreign(keys)
    for key in keys.overrides:
        if key not in keys.asked:
            raise InputError(f"assume: {key!r} is no key that is read for model_type {keys.family}", key="assume")
    return reading


def _reader(keys: ConfigKeys) -> Reader:
    """The reader of the type that is named, else of the class that is."""
    of_class = family_of_class(keys.config)
    if keys.get("model_type") is None and of_class is None and not keys.get("architectures"):
        return read_untyped
    family = keys.text("model_type", default=of_class, source="implied by `architectures`")
    if family not in FAMILIES and of_class in FAMILIES:
        keys.note("model_type", of_class, f"implied by `architectures`; {family!r} is no type that is known")
        keys.set("model_type", of_class)
        return FAMILIES[of_class]
    if family not in FAMILIES:
        from difflib import get_close_matches

        near = get_close_matches(family, FAMILIES, n=3)
        raise UnsupportedModel(
            f"{keys.name}: model_type is {family[:60]!r}, which is not among the {len(FAMILIES)} that are read"
            f"{f' (nearest: {chr(44).join(near)})' if near else ''}; --assume model_type=TYPE reads it as another",
            key="model_type",
        )
    return FAMILIES[family]
