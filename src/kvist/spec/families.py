"""One reader a family: a configuration under Hugging Face's names becomes layers.

A reader answers exactly or raises; a key that the configuration leaves out gets the default of the family's class
in transformers, which is what every engine loads, and is listed as an assumption. The completed configuration has
the same keys whatever its source, so that a network can be built from it without asking again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.foreign import refuse_foreign
from kvist.spec.layers import Attention
from kvist.spec.model import Assumption, Layer

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a family reader finds.

    Attributes:
        layers: first to last.
        max_context: longest sequence in tokens.
        config: the configuration, completed.
        assumed: what was filled in.
    """

    layers: tuple[Layer, ...]
    max_context: int
    config: dict[str, Any]
    assumed: tuple[Assumption, ...]


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


def _llama(keys: ConfigKeys) -> Reading:
    """Llama and all that publish under its name: every layer attends to everything.

    Source: LlamaConfig and LlamaAttention of transformers.
    """
    shape = _shape(keys, head_dim=None, kv_heads=None)
    if keys.get("sliding_window") is not None:
        keys.note("sliding_window", None, "printed, but attention of the llama family has no window")
    _only_full(keys, shape.layers)
    _network(keys, context=2048, theta=10000.0, bias=False)
    keys.flag("mlp_bias", default=False)
    keys.set("sliding_window", None)
    return _reading(keys, shape, [FULL] * shape.layers, None)


def _mistral(keys: ConfigKeys) -> Reading:
    """Mistral: one window for all layers, or none.

    Every published file prints ``sliding_window``, a number or null. Copies that drop their nulls mean none where
    MistralConfig of transformers would take 4,096, so a file without the key cannot be read exactly.
    """
    shape = _shape(keys, head_dim=None, kv_heads=8)
    if "sliding_window" not in keys:
        raise UnsupportedModel(
            f"{keys.name}: sliding_window is missing; a mistral configuration says null or a width: "
            f"write it, or --assume sliding_window=null",
            key="sliding_window",
        )
    window = None if keys.get("sliding_window") is None else keys.count("sliding_window")
    kinds = [SLIDING if window else FULL] * shape.layers
    if keys.get("layer_types") is not None and _layer_types(keys, shape.layers) != kinds:
        raise UnsupportedModel(
            f"{keys.name}: layer_types mixes layers; model_type mistral has one kind", key="layer_types"
        )
    _network(keys, context=131072, theta=10000.0, bias=False)
    return _reading(keys, shape, kinds, window)


def _qwen2(keys: ConfigKeys) -> Reading:
    """Qwen 1.5 to 2.5.

    Source: Qwen2Config of transformers.
    """
    shape = _shape(keys, head_dim=None, kv_heads=32)
    keys.set("attention_bias", True)
    return _qwen(keys, shape)


def _qwen3(keys: ConfigKeys) -> Reading:
    """Qwen 3, dense; its head width does not follow from the hidden size.

    Source: Qwen3Config of transformers.
    """
    shape = _shape(keys, head_dim=128, kv_heads=32)
    keys.flag("attention_bias", default=False)
    return _qwen(keys, shape)


def _qwen(keys: ConfigKeys, shape: "_Shape") -> Reading:
    """A window, when switched on, is on the layers from ``max_window_layers`` on: the first ones stay full."""
    window = None
    if keys.flag("use_sliding_window", default=False):
        window = keys.count("sliding_window", default=4096, source=_class_default(keys))
    if keys.get("layer_types") is not None:
        kinds = _layer_types(keys, shape.layers)
        if window is None and SLIDING in kinds:
            raise UnsupportedModel(
                f"{keys.name}: layer_types has {SLIDING}, but use_sliding_window is off", key="layer_types"
            )
    elif window is None:
        kinds = [FULL] * shape.layers
    else:
        first = keys.count("max_window_layers", default=28, least=0, source=_class_default(keys))
        kinds = [SLIDING if index >= first else FULL for index in range(shape.layers)]
    _network(keys, context=32768, theta=10000.0, bias=None)
    return _reading(keys, shape, kinds, window)


def _gemma3(keys: ConfigKeys) -> Reading:
    """Gemma 3, text or with its vision tower, whose images become text tokens and so cost what tokens cost.

    Source: Gemma3Config of transformers; the text model lies under ``text_config``.
    """
    inner = keys.nested("text_config", model_type="gemma3_text")
    return _gemma3_text(inner)


def _gemma3_text(keys: ConfigKeys) -> Reading:
    """Gemma 3's decoder: five layers with a window, then one without.

    Source: Gemma3TextConfig of transformers.
    """
    if keys.flag("use_bidirectional_attention", default=False):
        raise UnsupportedModel(
            f"{keys.name}: use_bidirectional_attention is true; an encoder keeps no cache",
            key="use_bidirectional_attention",
        )
    default = _class_default(keys)
    shape = _shape(keys, head_dim=256, kv_heads=4, heads=8)
    window = keys.count("sliding_window", default=4096, source=default)
    if keys.get("layer_types") is not None:
        kinds = _layer_types(keys, shape.layers)
    else:
        period = keys.count("sliding_window_pattern", default=6, source=default)
        kinds = [FULL if (index + 1) % period == 0 else SLIDING for index in range(shape.layers)]
    keys.fill("query_pre_attn_scalar", 256)
    keys.fill("hidden_activation", "gelu_pytorch_tanh")
    keys.optional_text("hidden_activation")
    keys.set("hidden_act", keys.get("hidden_activation"))
    for scale in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        keys.set(scale, keys.optional_number(scale))
    _network(keys, context=131072, theta=1_000_000.0, bias=False, tied=True, local_theta=10000.0)
    return _reading(keys, shape, kinds, window)


FAMILIES: dict[str, Callable[[ConfigKeys], Reading]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3_text,
    "gemma3": _gemma3,
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


@dataclass(frozen=True, kw_only=True)
class _Shape:
    layers: int
    kv_heads: int
    head_dim: int


def _shape(keys: ConfigKeys, *, head_dim: int | None, kv_heads: int | None, heads: int | None = None) -> _Shape:
    """Heads and widths; ``None`` for a default that the class derives instead of naming.

    An explicit null for KV heads means as many as query heads, in every class.
    """
    default = _class_default(keys)
    layers = keys.count("num_hidden_layers", most=10_000)
    query_heads = keys.count("num_attention_heads", default=heads, source=default)
    if kv_heads is None or ("num_key_value_heads" in keys and keys.get("num_key_value_heads") is None):
        kv_heads, kv_source = query_heads, "as many as num_attention_heads"
    else:
        kv_source = default
    stored_heads = keys.count("num_key_value_heads", default=kv_heads, source=kv_source)
    if query_heads % stored_heads:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({query_heads})")
    if keys.get("head_dim") is not None:
        width = keys.count("head_dim")
    elif head_dim is not None:
        width = keys.count("head_dim", default=head_dim, source=default)
    else:
        hidden = keys.count("hidden_size")
        if hidden % query_heads:
            raise keys.wrong("hidden_size", f"a multiple of num_attention_heads ({query_heads}), or give head_dim")
        width = hidden // query_heads
        keys.set("head_dim", width)
    return _Shape(layers=layers, kv_heads=stored_heads, head_dim=width)


def _network(
    keys: ConfigKeys,
    *,
    context: int,
    theta: float,
    bias: bool | None,
    tied: bool = False,
    local_theta: float | None = None,
) -> None:
    """Complete what a network needs beyond the cache: rotary bases, norms, biases, tied embeddings."""
    default = _class_default(keys)
    keys.count("max_position_embeddings", default=context, source=default)
    for optional in ("hidden_size", "intermediate_size", "vocab_size"):
        if keys.get(optional) is not None:
            keys.count(optional)
    keys.flatten_rope(theta=theta, local_theta=local_theta, source=default)
    keys.number("rms_norm_eps", default=1e-6, source=default)
    keys.fill("hidden_act", "silu")
    keys.optional_text("hidden_act")
    if bias is not None:
        keys.flag("attention_bias", default=bias)
    keys.flag("tie_word_embeddings", default=tied)
    keys.optional_number("partial_rotary_factor")
    keys.stored_type()


def _layer_types(keys: ConfigKeys, layers: int) -> list[str]:
    kinds = keys.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        found = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise keys.wrong("layer_types", f"one entry for each of the {layers} layers", shown=f"of length {found}")
    for index, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise UnsupportedModel(
                f"{keys.name}: layer_types[{index}] is {kind!r}; supported are {FULL}, {SLIDING}", key="layer_types"
            )
    return list(kinds)


def _only_full(keys: ConfigKeys, layers: int) -> None:
    if keys.get("layer_types") is not None and SLIDING in _layer_types(keys, layers):
        raise UnsupportedModel(
            f"{keys.name}: layer_types has {SLIDING}; model_type {keys.family} attends to everything",
            key="layer_types",
        )


def _class_default(keys: ConfigKeys) -> str:
    return f"default of {keys.family} in transformers"


def _reading(keys: ConfigKeys, shape: _Shape, kinds: list[str], window: int | None) -> Reading:
    refuse_foreign(keys)
    keys.set("layer_types", kinds)
    keys.set("sliding_window", window)
    full = Attention(kv_heads=shape.kv_heads, key_dim=shape.head_dim, value_dim=shape.head_dim)
    sliding = Attention(kv_heads=shape.kv_heads, key_dim=shape.head_dim, value_dim=shape.head_dim, window=window)
    return Reading(
        layers=tuple(sliding if kind == SLIDING else full for kind in kinds),
        max_context=keys.count("max_position_embeddings"),
        config=dict(keys.config),
        assumed=tuple(keys.assumed),
    )
