"""What kind of memory a model has, in one word: for lists, filters and colours."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvist.planning.sharding import query_heads
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Layer, Parallel, State
from kvist.spec.model import ModelSpec

# In the order in which a model is asked: the first that fits.
KINDS: Mapping[str, str] = {
    "state": "recurrent states alone: nothing grows",
    "hybrid": "states in some layers, attention in others",
    "compressed": "one entry for several tokens",
    "latent": "one latent vector a token in place of keys and values (MLA)",
    "window": "some layers see only the last tokens, or their chunk",
    "MQA": "one KV head for all query heads",
    "GQA": "a KV head for several query heads",
    "MHA": "a KV head for each query head",
}


def kind_of(spec: ModelSpec) -> str:
    """Return the kind of a model, one of :data:`KINDS`.

    Whether each query head has a KV head of its own is told from the configuration; where that does not say how many
    query heads there are, several KV heads are ``GQA``.
    """
    pieces = set(_pieces(spec.layers))
    attention = {piece for piece in pieces if isinstance(piece, Attention)}
    grows = attention or any(isinstance(piece, Latent | Compressed) for piece in pieces)
    if any(isinstance(piece, State) for piece in pieces):
        return "hybrid" if grows else "state"
    for kind, name in ((Compressed, "compressed"), (Latent, "latent")):
        if any(isinstance(piece, kind) for piece in pieces):
            return name
    if any(piece.window is not None or piece.chunk is not None for piece in attention):
        return "window"
    heads = {piece.kv_heads for piece in attention}
    if heads == {1}:
        return "MQA"
    return "MHA" if heads == {_query_heads(spec.config)} else "GQA"


def _pieces(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for layer in layers:
        if isinstance(layer, Parallel):
            yield from _pieces(layer.parts)
        elif not isinstance(layer, Cross):
            yield layer


def _query_heads(config: Mapping[str, Any]) -> int | None:
    found = query_heads(config)
    inner = config.get("text_config")
    return query_heads(inner) if found is None and isinstance(inner, Mapping) else found
