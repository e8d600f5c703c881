"""What transformers keeps of a model's tokens, as a :class:`ModelSpec`: shapes as kvist reads them, lifetimes as its.

Masks are made for what transformers' own cache would hold, so that this decides which layers have a window: of GPT-Neo
it keeps all tokens and lets a mask hide some, and a chunk of Llama 4 is a window to it.
"""

from dataclasses import dataclass, replace
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PretrainedConfig

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.layers import Attention, Latent, Layer, Nothing
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model as transformers keeps it.

    Attributes:
        spec: with one entry a layer: attention over all tokens or a window, or nothing where it stores none.
        own: what transformers' own cache has for each layer; fewer where its version leaves out the last ones.
    """

    spec: ModelSpec
    own: tuple[Any, ...]


def describe(config: object) -> Description:
    """Read a configuration of transformers as what its attention keeps in a :class:`~transformers.Cache`.

    Args:
        config: of a model that has a decoder and no encoder; of one that sees more than text, its text model counts.

    Raises:
        InputError: it is no configuration.
        UnsupportedModel: a layer remembers something else than keys and values, or the model is none that is read.
    """
    if not isinstance(config, PretrainedConfig):
        hint = (
            "pass its .config" if isinstance(getattr(config, "config", None), PretrainedConfig) else "pass model.config"
        )
        raise InputError(
            f"config: {type(config).__name__} is not a configuration of transformers; {hint}", key="config"
        )
    text = config.get_text_config(decoder=True)
    name = str(getattr(config, "name_or_path", "") or text.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"config: {name} is an encoder with a decoder, which keeps keys and values of both; KvistCache holds those "
            f"of decoders alone: leave the cache out",
            key="config",
        )
    spec = read_description(text.to_dict(), name=name)
    # Some of its versions leave out layers at the end that store nothing.
    kept = _kept(text, name)
    missing = [None] * (len(spec.layers) - len(kept))
    layers = tuple(
        _as_kept(layer, own, f"layer {index} of {name}")
        for index, (layer, own) in enumerate(zip(spec.layers, [*kept, *missing], strict=True))
    )
    return Description(spec=replace(spec, layers=layers, source="config"), own=tuple(kept))


def _kept(text: PretrainedConfig, name: str) -> list[Any]:
    try:
        return list(DynamicCache(config=text).layers)
    except KeyError as error:
        raise UnsupportedModel(
            f"config: {name} has layers of type {error}, which transformers keeps in no cache of its own: leave the "
            f"cache out",
            key="config",
        ) from error


def _as_kept(layer: Layer, own: object, which: str) -> Layer:
    """A layer as transformers keeps it; ``own`` is its cache of that layer."""
    if own is None or type(own).__name__ == "DummyLayer":
        if isinstance(layer, Attention):
            raise _refused(f"{which} keeps keys and values, and transformers none of them")
        return Nothing()
    if isinstance(layer, Latent):
        raise _refused(f"{which} keeps latents (MLA), which transformers stores expanded to keys of all heads")
    if not isinstance(layer, Attention) or type(own) not in (DynamicLayer, DynamicSlidingWindowLayer):
        kind = layer.kind if type(own) is DynamicLayer else type(own).__name__
        raise _refused(f"{which} keeps something else than keys and values of its tokens ({kind})")
    if layer.indexer is not None:
        raise _refused(f"{which} keeps the keys of an indexer beside its own")
    if layer.key_dim != layer.value_dim:
        raise _refused(
            f"{which} has keys of {layer.key_dim} elements and values of {layer.value_dim}, not of one width"
        )
    window = own.sliding_window if isinstance(own, DynamicSlidingWindowLayer) else None
    return replace(layer, window=window, chunk=None)


def _refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"config: {what}; KvistCache does not hold it: leave the cache out", key="config")
