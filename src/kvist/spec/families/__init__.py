"""One reader a family: a configuration under Hugging Face's names becomes layers.

A reader answers exactly or raises; a key that the configuration leaves out gets the default of the family's class
in transformers, which is what every engine loads, and is listed as an assumption.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import Reader, Reading
from kvist.spec.foreign import refuse_foreign

__all__ = ["FAMILIES", "Reading", "read_config"]

# The files and the dict of readers in each, in the order in which a family is looked for.
_FILES = {
    "decoders": "DECODERS",
    "llamas": "LLAMAS",
    "windowed": "WINDOWED",
    "latent": "LATENT",
    "gpt": "GPT",
    "own_shapes": "OWN_SHAPES",
    "shared_kv": "SHARED_KV",
    "compressed": "COMPRESSED",
    "nested": "WRAPPERS",
    "encoder_decoder": "ENCODER_DECODER",
    "gated_delta": "GATED_DELTA",
    "kda": "KDA",
    "lightning": "LIGHTNING",
    "mamba_hybrids": "MAMBA_HYBRIDS",
    "recurrent": "RECURRENT_MODELS",
    "convolutions": "CONVOLUTIONS",
    "gguf_only": "GGUF_ONLY",
}


class _Families(Mapping[str, Reader]):
    """The readers of all files. A file is imported when a family is looked for that no file before it has.

    One model needs one reader, and importing all of them would take most of the time that planning it takes.
    """

    def __getitem__(self, family: str) -> Reader:
        for readers in self._files():
            if family in readers:
                return readers[family]
        raise KeyError(family)

    def __iter__(self) -> Iterator[str]:
        for readers in self._files():
            yield from readers

    def __len__(self) -> int:
        return sum(len(readers) for readers in self._files())

    def _files(self) -> Iterator[Mapping[str, Reader]]:
        for file, name in _FILES.items():
            readers: Mapping[str, Reader] = getattr(import_module(f"{__name__}.{file}"), name)
            yield readers


FAMILIES: Mapping[str, Reader] = _Families()


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
    family = keys.get("model_type")
    if isinstance(family, str) and family in FAMILIES:
        return FAMILIES[family]
    from kvist.spec.families.classes import family_of_class

    of_class = family_of_class(keys.config)
    if family is None and of_class is None and not keys.get("architectures"):
        from kvist.spec.families.untyped import read_untyped

        return read_untyped
    family = keys.text("model_type", default=of_class, source="implied by `architectures`")
    if of_class is not None and family != of_class:
        keys.note("model_type", of_class, f"implied by `architectures`; {family!r} is no type that is known")
        keys.set("model_type", of_class)
    if of_class is not None:
        return FAMILIES[of_class]
    from difflib import get_close_matches

    near = ", ".join(get_close_matches(family[:100], FAMILIES, n=3))
    raise UnsupportedModel(
        f"{keys.name}: model_type is {family[:60]!r}, which is not among the {len(FAMILIES)} that are read"
        f"{f' (nearest: {near})' if near else ''}; --assume model_type=TYPE reads it as another",
        key="model_type",
    )
