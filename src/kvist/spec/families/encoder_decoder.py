"""Decoders that attend to an encoder: BART and its kin, T5 and its kin, Whisper, and Llama 3.2 with images.

What a layer keeps of the encoder is counted apart, for each of the encoder's tokens, or in all where their number is
fixed. Source: the configuration and modelling files of that name in transformers 5.24.
"""

from dataclasses import dataclass, field
from functools import partial

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import (
    FULL,
    SLIDING,
    Reader,
    Reading,
    Size,
    class_default,
    context_of,
    finished,
    heads_and_widths,
)
from kvist.spec.families.windows import full_every, kinds_of
from kvist.spec.layers import Attention, Cross, Layer, Parallel

# Keys of the encoder and of how the two are joined; no byte of the decoder depends on them.
_JOINED = (
    "is_encoder_decoder", "add_cross_attention", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim",
    "cross_attention_hidden_size", "is_decoder",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bart:
    """A decoder with one width of head for itself and for the encoder's tokens.

    Attributes:
        context: longest sequence that the class fills in.
        contexts: names of it.
        size: what the class fills in for a part of a larger file.
        encoder_tokens: key of the encoder's length where that is fixed, and its default.
    """

    context: int
    contexts: tuple[str, ...] = ()
    size: Size = field(default_factory=Size)
    encoder_tokens: tuple[str, int] | None = None


def _bart(family: Bart, keys: ConfigKeys) -> Reading:
    for key in _JOINED:
        keys.get(key)
    default = class_default(keys)
    size = family.size if keys.part else Size()
    layers = keys.count("decoder_layers", default=size.layers, most=10_000, source=default)
    heads = keys.count("decoder_attention_heads", default=size.heads, source=default)
    hidden = keys.count("d_model", default=size.hidden, source=default)
    if hidden % heads:
        raise keys.wrong("d_model", f"a multiple of decoder_attention_heads ({heads})")
    context_of(keys, *family.contexts, default=family.context)
    fixed = None
    if family.encoder_tokens is not None:
        key, length = family.encoder_tokens
        fixed = keys.count(key, default=length, source=default)
    return _both(keys, layers, heads, hidden // heads, fixed)


def _t5(keys: ConfigKeys) -> Reading:
    """Relative positions have no longest sequence; ``n_positions``, or 512, is what T5 was trained with."""
    for key in _JOINED:
        keys.get(key)
    if keys.get("num_decoder_layers") is None:
        keys.set("num_decoder_layers", keys.get("num_layers"))
    layers = keys.count("num_decoder_layers", most=10_000)
    heads = keys.count("num_heads")
    width = keys.count("d_kv", default=64, source=class_default(keys))
    context_of(keys, "n_positions", default=512)
    return _both(keys, layers, heads, width, None)


def _both(keys: ConfigKeys, layers: int, heads: int, width: int, encoder_tokens: int | None) -> Reading:
    itself = Attention(kv_heads=heads, key_dim=width, value_dim=width)
    encoder = Cross(kv_heads=heads, key_dim=width, value_dim=width, encoder_tokens=encoder_tokens)
    for key, value in (("num_hidden_layers", layers), ("num_attention_heads", heads), ("head_dim", width)):
        keys.set(key, value)
    return finished(keys, [Parallel(parts=(itself, encoder))] * layers, draft=None)


def _t5gemma(keys: ConfigKeys) -> Reading:
    """T5Gemma's decoder: Gemma 2 with attention to an encoder in every layer."""
    for key in _JOINED:
        keys.get(key)
    shape = heads_and_widths(keys, head_dim=256, kv_heads=4, size=Size(layers=26, heads=8, hidden=2304))
    context_of(keys, default=8192)
    kinds = kinds_of(keys, shape.layers, full_every(2), window=4096)
    window = keys.count("sliding_window", default=4096, source=class_default(keys))
    encoder = Cross(kv_heads=shape.kv_heads, key_dim=shape.head_dim, value_dim=shape.head_dim)
    limits = {SLIDING: window, FULL: None}
    layers = [Parallel(parts=(shape.attention(window=limits[kind]), encoder)) for kind in kinds]
    return finished(keys, layers, draft=None)


def _mllama(keys: ConfigKeys) -> Reading:
    """Llama 3.2 with images: the layers of ``cross_attention_layers`` attend to the image and keep nothing else.

    The encoder's tokens are those of all images, 1,601 for each of up to four tiles.
    """
    size = Size(layers=40, heads=32, hidden=4096)
    shape = heads_and_widths(keys, head_dim=None, kv_heads=8, size=size)
    context_of(keys, default=131072)
    crossing = keys.get("cross_attention_layers")
    if crossing is None:
        crossing = [3, 8, 13, 18, 23, 28, 33, 38]
        keys.note("cross_attention_layers", crossing, class_default(keys))
    possible = range(shape.layers)
    if not isinstance(crossing, list) or not all(type(index) is int and index in possible for index in crossing):
        raise keys.wrong("cross_attention_layers", f"a list of layers from 0 to {shape.layers - 1}")
    full: Layer = shape.attention()
    image = Cross(kv_heads=shape.kv_heads, key_dim=shape.head_dim, value_dim=shape.head_dim)
    chosen = set(crossing)
    return finished(keys, [image if index in chosen else full for index in range(shape.layers)], draft=None)


_TARGETS = ("max_target_positions",)

_BARTS = {
    "bart": Bart(context=1024, size=Size(layers=12, heads=16, hidden=1024)),
    "mbart": Bart(context=1024, size=Size(layers=12, heads=16, hidden=1024)),
    "florence2_language": Bart(context=1024),
    "mvp": Bart(context=1024),
    "plbart": Bart(context=1024),
    "blenderbot": Bart(context=128),
    "blenderbot-small": Bart(context=512),
    "pegasus": Bart(context=1024),
    "pegasus_x": Bart(context=16384),
    "bigbird_pegasus": Bart(context=4096),
    "marian": Bart(context=1024),
    "m2m_100": Bart(context=1024),
    "nllb-moe": Bart(context=1024),
    "led": Bart(context=1024, contexts=("max_decoder_position_embeddings",)),
    "trocr": Bart(context=512, size=Size(layers=12, heads=16, hidden=1024)),
    "speech_to_text": Bart(context=1024, contexts=_TARGETS),
    "whisper": Bart(context=448, contexts=_TARGETS, encoder_tokens=("max_source_positions", 1500)),
}
ENCODER_DECODER: dict[str, Reader] = {
    **{name: partial(_bart, family) for name, family in _BARTS.items()},
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), _t5),
    "t5_gemma_module": _t5gemma,
    "mllama_text_model": _mllama,
}
