"""What a reader finds, and what readers of attention share: heads and widths, kinds of layers, the network's keys."""

from dataclasses import dataclass
from typing import Any

from kvist.errors import UnsupportedModel
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
        draft_layers: of heads that draft tokens ahead (multi-token prediction); no part of ``layers``.
    """

    layers: tuple[Layer, ...]
    max_context: int
    config: dict[str, Any]
    assumed: tuple[Assumption, ...]
    draft_layers: tuple[Layer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many layers, KV heads of each, and how wide a head is."""

    layers: int
    kv_heads: int
    head_dim: int


def heads_and_widths(
    keys: ConfigKeys, *, head_dim: int | None, kv_heads: int | None, heads: int | None = None
) -> Shape:
    """Heads and widths; ``None`` for a default that the class derives instead of naming.

    An explicit null for KV heads means as many as query heads, in every class.
    """
    default = class_default(keys)
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
    return Shape(layers=layers, kv_heads=stored_heads, head_dim=width)


def complete_network(
    keys: ConfigKeys,
    *,
    context: int,
    theta: float,
    bias: bool | None,
    tied: bool = False,
    local_theta: float | None = None,
) -> None:
    """Complete what a network needs beyond the cache: rotary bases, norms, biases, tied embeddings."""
    default = class_default(keys)
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


def layer_types(keys: ConfigKeys, layers: int) -> list[str]:
    """Return the published list of kinds, one a layer, full or sliding."""
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


def only_full(keys: ConfigKeys, layers: int) -> None:
    """Refuse a published list that has windows, in a family that has none."""
    if keys.get("layer_types") is not None and SLIDING in layer_types(keys, layers):
        raise UnsupportedModel(
            f"{keys.name}: layer_types has {SLIDING}; model_type {keys.family} attends to everything",
            key="layer_types",
        )


def class_default(keys: ConfigKeys) -> str:
    """Return the source of a default, as it is listed."""
    return f"default of {keys.family} in transformers"


def reading_of(keys: ConfigKeys, shape: Shape, kinds: list[str], window: int | None) -> Reading:
    """Return layers of one shape, those called sliding with ``window``."""
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
