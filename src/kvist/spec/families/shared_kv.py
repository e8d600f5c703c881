"""Families whose later layers read the keys and values of earlier ones: Gemma 3n and 4, Hunyuan-Large."""

from dataclasses import dataclass, replace
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
    per_layer,
    refuse_encoder,
)
from kvist.spec.families.windows import full_every, kinds_of
from kvist.spec.layers import Attention, Layer, Shared


@dataclass(frozen=True, kw_only=True)
class Gemma:
    """What tells one Gemma that shares from another.

    Attributes:
        size: what the class fills in for a part of a larger file.
        kv_heads: default of the class.
        context: likewise.
        period: of full layers.
        window: default width.
        shared: layers that share where the key is left out.
        wide: width of a head on full layers; None where all layers have one width.
    """

    size: Size
    kv_heads: int
    context: int
    period: int
    window: int
    shared: int
    wide: int | None = None


def _gemma(family: Gemma, keys: ConfigKeys) -> Reading:
    """The last ``num_kv_shared_layers`` read what the last layer of their kind before them has stored.

    Gemma 4's full layers have wider heads, and with ``attention_k_eq_v`` a number of their own of them; values are
    stored beside keys although they are equal. Its last layer is always full. Source: Gemma3nTextConfig and
    Gemma4TextConfig of transformers.
    """
    refuse_encoder(keys)
    shape = heads_and_widths(keys, head_dim=256, kv_heads=family.kv_heads, heads=8, size=family.size)
    context_of(keys, default=family.context)
    default = class_default(keys)
    kinds = kinds_of(keys, shape.layers, full_every(family.period), window=family.window)
    window = keys.count("sliding_window", default=family.window, source=default)
    full = shape.attention()
    sliding = replace(full, window=window)
    if family.wide is not None:
        kinds[-1] = FULL
        keys.get("attention_k_eq_v")
        if keys.get("per_layer_config") is None:
            full = _wide(keys, full, family.wide)
    keys.set("layer_types", kinds)
    stored = per_layer(keys, kinds, [sliding if kind == SLIDING else full for kind in kinds])
    shared = keys.count("num_kv_shared_layers", default=family.shared, least=0, most=shape.layers, source=default)
    first = shape.layers - shared
    layers: list[Layer] = list(stored[:first])
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    for kind in kinds[first:]:
        if kind not in last:
            raise keys.wrong("num_kv_shared_layers", f"so few that a layer of kind {kind} stores something")
        layers.append(Shared(source=last[kind]))
    return finished(keys, layers, draft=None)


def _wide(keys: ConfigKeys, full: Attention, width: int) -> Attention:
    """The full layers of Gemma 4."""
    width = keys.count("global_head_dim", default=width, source=class_default(keys))
    heads = full.kv_heads
    if keys.flag("attention_k_eq_v", default=False) and keys.get("num_global_key_value_heads") is not None:
        heads = keys.count("num_global_key_value_heads")
    keys.get("num_global_key_value_heads")
    return Attention(kv_heads=heads, key_dim=width, value_dim=width)


def _hunyuan(keys: ConfigKeys) -> Reading:
    """Hunyuan: with ``use_cla`` (Hunyuan-Large), ``cla_share_factor`` layers read what the first of them stores.

    Later models print the factor and switch it off. Source: the code published with tencent/Tencent-Hunyuan-Large.
    """
    keys.rename({"head_dim": ("attention_head_dim",)})
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None, size=Size(layers=32, heads=32, hidden=4096))
    context_of(keys, default=2048)
    full = shape.attention()
    group = keys.count("cla_share_factor") if keys.flag("use_cla", default=False) else 1
    keys.get("cla_share_factor")
    layers = [Shared(source=index - index % group) if index % group else full for index in range(shape.layers)]
    return finished(keys, layers, draft=full)


_GEMMA3N = Gemma(
    size=Size(layers=35, hidden=2048), kv_heads=2, context=32768, period=5, window=512, shared=15
)  # fmt: skip
_GEMMA4 = Gemma(
    size=Size(layers=30, hidden=2304), kv_heads=4, context=131072, period=6, window=512, shared=0, wide=512
)  # fmt: skip

SHARED_KV: dict[str, Reader] = {
    "gemma3n_text": partial(_gemma, _GEMMA3N),
    "gemma4_text": partial(_gemma, _GEMMA4),
    "gemma4_unified_text": partial(_gemma, replace(_GEMMA4, context=262144, window=1024)),
    "hunyuan": _hunyuan,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan,
    "hunyuan_vl_text": _hunyuan,
}
