"""What a reader finds, and what readers of attention share: heads and widths, kinds of layers, the network's keys."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.foreign import refuse_foreign
from kvist.spec.layers import Attention, Indexer, Layer
from kvist.spec.model import Assumption
from kvist.units import counted

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


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


Reader = Callable[[ConfigKeys], Reading]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many layers, KV heads of each, and how wide a head is."""

    layers: int
    kv_heads: int
    head_dim: int

    def attention(self, *, window: int | None = None, indexer: Indexer | None = None) -> Attention:
        """Return a layer of these heads, whose keys and values have one width."""
        return Attention(
            kv_heads=self.kv_heads, key_dim=self.head_dim, value_dim=self.head_dim, window=window, indexer=indexer
        )


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a family's class fills in where a part of a larger file leaves it out."""

    layers: int | None = None
    heads: int | None = None
    hidden: int | None = None


def class_default(keys: ConfigKeys) -> str:
    """Return the source of a default, as it is listed."""
    return f"default of {keys.family} {keys.origin}"


def count_of_layers(keys: ConfigKeys, size: Size | None = None) -> int:
    """Return the number of layers."""
    default = size.layers if size and keys.part else None
    return keys.count("num_hidden_layers", default=default, most=10_000, source=class_default(keys))


def heads_and_widths(
    keys: ConfigKeys, *, head_dim: int | None, kv_heads: int | None, heads: int | None = None, size: Size | None = None
) -> Shape:
    """Heads and widths; ``None`` for a default that the class derives instead of naming.

    An explicit null for KV heads means as many as query heads, in every class. ``size`` is what the class fills in
    for a part of a larger file; a whole file that leaves out its layers is torn.
    """
    default = class_default(keys)
    layers = count_of_layers(keys, size)
    if size and keys.part:
        heads = heads or size.heads
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
        hidden = keys.count("hidden_size", default=size.hidden if size and keys.part else None, source=default)
        if hidden % query_heads:
            raise keys.wrong("hidden_size", f"a multiple of num_attention_heads ({query_heads}), or give head_dim")
        width = hidden // query_heads
        keys.set("head_dim", width)
    return Shape(layers=layers, kv_heads=stored_heads, head_dim=width)


def context_of(keys: ConfigKeys, *names: str, default: int | None) -> int:
    """Return the longest sequence: the first of ``names`` that is printed, ``max_position_embeddings``, ``default``."""
    for name in names:
        if keys.get(name) is not None and "max_position_embeddings" not in keys.overrides:
            keys.set("max_position_embeddings", keys.count(name))
            break
    return keys.count("max_position_embeddings", default=default, source=class_default(keys))


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


def layer_types(keys: ConfigKeys, layers: int, kinds: Iterable[str] = (FULL, SLIDING)) -> list[str]:
    """Return the published list of kinds, one a layer.

    Raises:
        UnsupportedModel: a layer is of a kind that is not among ``kinds``.
    """
    listed = keys.listed("layer_types", layers)
    for index, kind in enumerate(listed):
        if kind not in kinds:
            raise UnsupportedModel(
                f"{keys.name}: layer_types[{index}] is {kind!r}; supported are {', '.join(kinds)}", key="layer_types"
            )
    return list(listed)


def refuse_encoder(keys: ConfigKeys, *, causal: tuple[object, ...] = (None, False, "vision")) -> None:
    """Refuse a model whose tokens see those behind them, and so keep nothing; those of one image may.

    Raises:
        UnsupportedModel: ``use_bidirectional_attention`` is not among ``causal``.
    """
    if keys.get("use_bidirectional_attention") not in causal:
        raise keys.unread("use_bidirectional_attention", "an encoder keeps no cache")


def only_full(keys: ConfigKeys, layers: int) -> None:
    """Refuse a published list that has windows, in a family that has none."""
    if keys.get("layer_types") is not None and SLIDING in layer_types(keys, layers):
        raise UnsupportedModel(
            f"{keys.name}: layer_types has {SLIDING}; model_type {keys.family} attends to everything",
            key="layer_types",
        )


def reading_of(keys: ConfigKeys, shape: Shape, kinds: list[str], window: int | None) -> Reading:
    """Return layers of one shape, those called sliding with ``window``."""
    refuse_foreign(keys)
    keys.set("layer_types", kinds)
    keys.set("sliding_window", window)
    full = shape.attention()
    limited = {FULL: full, SLIDING: replace(full, window=window)}
    return finished(keys, [limited[kind] for kind in kinds], draft=None if SLIDING in kinds else full)


def finished(keys: ConfigKeys, layers: Iterable[Layer], *, draft: Layer | None) -> Reading:
    """Return what was found, once nothing in the configuration means another memory.

    Args:
        keys: with the context read.
        layers: first to last.
        draft: what each draft layer remembers; None where it is not published.
    """
    drafted = draft_count(keys)
    if drafted and draft is None:
        keys.note(
            "draft_layers", None, f"{counted(drafted, 'draft layer')} published, but not of which kind: not counted"
        )
    return Reading(
        layers=tuple(layers),
        max_context=keys.count("max_position_embeddings"),
        config=dict(keys.config),
        assumed=tuple(keys.assumed),
        draft_layers=(draft,) * drafted if draft else (),
    )


_MOST_DRAFTS = 1000


def draft_count(keys: ConfigKeys) -> int:
    """How many layers draft tokens ahead, under the names of all families; none where none are printed."""
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        if keys.get(key) is not None:
            return keys.count(key, least=0, most=_MOST_DRAFTS)
    # MiniMax: modules of so many layers each.
    if keys.get("num_mtp_modules") is not None and keys.flag("use_mtp", default=True):
        modules = keys.count("num_mtp_modules", least=0, most=_MOST_DRAFTS)
        return modules * keys.count("mtp_transformer_layers", default=1, most=_MOST_DRAFTS, source="one a module")
    return 0


# Keys of one layer in `per_layer_config` that no byte of a cache depends on.
_HARMLESS_IN_A_LAYER = frozenset(
    {"num_attention_heads", "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts"}
    | {"n_routed_experts", "num_experts_per_tok", "mlp_bias", "hidden_act", "rope_theta", "rope_parameters"}
)


def per_layer(keys: ConfigKeys, kinds: list[str], layers: Iterable[Attention]) -> list[Attention]:
    """Apply ``per_layer_config``, by which transformers 5 writes what one layer or one kind of layer has of its own."""
    given = keys.get("per_layer_config")
    found = list(layers)
    if given is None:
        return found
    if not isinstance(given, Mapping):
        raise keys.wrong("per_layer_config", "an object of objects")
    meant: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        meant.setdefault(kind, []).append(index)
        meant[str(index)] = [index]
    for where, own in given.items():
        chosen = meant.get(str(where))
        if not chosen or not isinstance(own, Mapping):
            raise keys.wrong(
                "per_layer_config", "an object for layer indices or kinds of layers", shown=f"for {where!r}"
            )
        for index in chosen:
            found[index] = _of_its_own(keys, found[index], own, f"per_layer_config.{where}")
    return found


def _of_its_own(keys: ConfigKeys, layer: Attention, own: Mapping[str, Any], where: str) -> Attention:
    inner = ConfigKeys(own, name=f"{keys.name}: {where}")
    for key in own:
        match key:
            case "num_key_value_heads":
                layer = replace(layer, kv_heads=inner.count(key))
            case "head_dim":
                layer = replace(layer, key_dim=inner.count(key), value_dim=inner.count(key))
            case "sliding_window" if layer.window is not None:
                layer = replace(layer, window=inner.count(key))
            case _ if key not in _HARMLESS_IN_A_LAYER:
                raise inner.unread(key, "it is not read for one layer")
    return layer
