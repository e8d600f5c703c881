"""Families whose layers differ in heads, widths or windows by keys of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.own_keys import all_heads
from kvist.spec.families.reading import (
    FULL,
    SLIDING,
    Reader,
    Reading,
    class_default,
    context_of,
    count_of_layers,
    draft_count,
    finished,
    heads_and_widths,
    layer_types,
    per_layer,
)
from kvist.spec.layers import Attention, Indexer, Layer, Nothing


def _gpt_neo(keys: ConfigKeys) -> Reading:
    """GPT-Neo: global and local layers by ``attention_types``, a list of [kinds, how often].

    Source: GPTNeoConfig of transformers, which keeps all tokens of local layers too.
    """
    keys.rename({"num_hidden_layers": ("num_layers",), "num_attention_heads": ("num_heads",)})
    all_heads(keys)
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None)
    context_of(keys, default=2048)
    full = shape.attention()
    window = keys.count("window_size", default=256, source=class_default(keys))
    meanings: dict[Any, Layer] = {"global": full, "local": replace(full, window=window)}
    kinds = keys.get("attention_layers")
    if kinds is None:
        kinds = _expanded(keys, shape.layers)
    keys.get("attention_types")
    known = isinstance(kinds, list) and all(kind in ("global", "local") for kind in kinds)
    if not known or len(kinds) != shape.layers:
        raise keys.wrong("attention_types", f"global or local for each of the {shape.layers} layers")
    return finished(keys, [meanings[kind] for kind in kinds], draft=None)


def _expanded(keys: ConfigKeys, layers: int) -> list[str]:
    types = keys.get("attention_types")
    if types is None:
        raise keys.missing("attention_types")
    kinds: list[str] = []
    for item in types if isinstance(types, list) else [types]:
        match item:
            case [list(once), int(times)] if 0 < times <= layers and len(once) <= layers:
                kinds.extend(once * times)
            case _:
                raise keys.wrong("attention_types", "a list of [kinds, how often]")
    return kinds


def _mimo_v2(keys: ConfigKeys) -> Reading:
    """MiMo-V2: keys of another width than values, and windows with KV heads of their own.

    ``hybrid_layer_pattern`` has a 1 for a window. transformers sees one token more than ``sliding_window`` prints.
    Source: the code published with XiaomiMiMo/MiMo-V2-Flash, and MiMoV2FlashConfig of transformers.
    """
    default = class_default(keys)
    shape = heads_and_widths(keys, head_dim=192, kv_heads=4)
    value = keys.count("v_head_dim", default=128, source=default)
    context_of(keys, default=131072)
    full = Attention(kv_heads=shape.kv_heads, key_dim=shape.head_dim, value_dim=value)
    keys.rename({"sliding_window": ("sliding_window_size",)})
    sliding = Attention(
        kv_heads=keys.count("swa_num_key_value_heads", default=8, source=default),
        key_dim=keys.count("swa_head_dim", default=shape.head_dim, source="as head_dim"),
        value_dim=keys.count("swa_v_head_dim", default=value, source="as v_head_dim"),
        window=keys.count("sliding_window", default=128, source=default),
    )
    for key in ("swa_num_attention_heads", "swa_rope_theta"):
        keys.get(key)
    if keys.get("attention_chunk_size") not in (None, keys.get("sliding_window")):
        raise keys.unread("attention_chunk_size", "no layer has chunks; it repeats the window in published files")
    pattern = keys.get("hybrid_layer_pattern")
    if keys.get("layer_types") is not None:
        kinds = layer_types(keys, shape.layers)
    elif pattern is not None:
        kinds = [SLIDING if flag else FULL for flag in keys.each("hybrid_layer_pattern", shape.layers, least=0)]
    else:
        keys.note("hybrid_layer_pattern", None, f"{default}: the first layer and every sixth are full")
        kinds = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(shape.layers)]
    keys.set("layer_types", kinds)
    return finished(keys, [sliding if kind == SLIDING else full for kind in kinds], draft=None)


def _step3p5(keys: ConfigKeys) -> Reading:
    """Step 3.5: windows with query heads of their own, and KV heads that may differ.

    ``layer_types`` has one entry more for each draft layer. Source: Step3p7TextConfig of transformers.
    """
    default = class_default(keys)
    keys.rename({"num_key_value_heads": ("num_attention_groups",)})
    shape = heads_and_widths(keys, head_dim=128, kv_heads=8)
    context_of(keys, "max_seq_len", default=128000)
    full = shape.attention()
    drafts = draft_count(keys)
    listed = keys.get("layer_types")
    padded = isinstance(listed, list) and len(listed) == shape.layers + drafts
    kinds = layer_types(keys, shape.layers + (drafts if padded else 0)) if listed is not None else [FULL] * shape.layers
    keys.get("sliding_window")
    layer = {FULL: full}
    if SLIDING in kinds:
        other = keys.section("attention_other_setting")
        layer[SLIDING] = Attention(
            kv_heads=other.count("num_attention_groups", default=shape.kv_heads, source="as num_attention_groups"),
            key_dim=other.count("head_dim", default=shape.head_dim, source="as head_dim"),
            value_dim=other.count("head_dim", default=shape.head_dim, source="as head_dim"),
            window=keys.count("sliding_window", source=default),
        )
    keys.set("layer_types", kinds[: shape.layers])
    found = per_layer(keys, kinds[: shape.layers], [layer[kind] for kind in kinds[: shape.layers]])
    drafted = layer[kinds[shape.layers]] if padded and drafts else full if listed is None else None
    return finished(keys, found, draft=drafted)


def _minimax_m3(keys: ConfigKeys) -> Reading:
    """MiniMax-M3: attention with an indexer on the layers that are sparse.

    The indexer has one key a token, whatever its query heads. Source: MiniMaxM3VLIndexer of transformers.
    """
    default = class_default(keys)
    shape = heads_and_widths(keys, head_dim=128, kv_heads=4)
    context_of(keys, default=524288)
    full = shape.attention()
    sparse = keys.section("sparse_attention_config")
    if sparse.get("sparse_index_dim") is not None and keys.get("index_head_dim") is None:
        keys.settle("index_head_dim", sparse.count("sparse_index_dim"))
    width = keys.count("index_head_dim", default=128, source=default)
    for key in ("index_n_heads", "index_block_size", "index_topk_blocks", "index_local_blocks"):
        keys.get(key)
    if keys.get("layer_types") is not None:
        kinds = layer_types(keys, shape.layers, (FULL, "minimax_m3_sparse"))
        chosen = [kind != FULL for kind in kinds]
    elif sparse.get("sparse_attention_freq") is not None:
        chosen = [flag != 0 for flag in sparse.each("sparse_attention_freq", shape.layers, least=0)]
    else:
        chosen = [False] * shape.layers
    indexed = replace(full, indexer=Indexer(heads=1, dim=width))
    return finished(keys, [indexed if flag else full for flag in chosen], draft=None)


def _openelm(keys: ConfigKeys) -> Reading:
    """OpenELM: query and KV heads by layer. Source: the code published with apple/OpenELM."""
    keys.rename({"num_hidden_layers": ("num_transformer_layers",)})
    layers = count_of_layers(keys)
    width = keys.count("head_dim")
    context_of(keys, "max_context_length", default=2048)
    queries, stored = keys.get("num_query_heads"), keys.get("num_kv_heads")
    if not isinstance(stored, list) or not isinstance(queries, list):
        raise keys.unread("num_kv_heads", "a list with one number a layer is read, as published files print it")
    keys.each("num_query_heads", layers)
    heads = keys.each("num_kv_heads", layers)
    return finished(keys, [Attention(kv_heads=count, key_dim=width, value_dim=width) for count in heads], draft=None)


def _deci(keys: ConfigKeys) -> Reading:
    """Models found by search over layers: DeciLM, and NVIDIA's Nemotron of 49B, 51B and 253B.

    ``block_configs`` gives each layer's queries a KV head, no attention at all, or a linear layer in its place; older
    files list ``num_key_value_heads_per_layer``. Source: the code published with these models.
    """
    layers = count_of_layers(keys)
    queries = keys.count("num_attention_heads")
    context_of(keys, default=2048)
    keys.get("num_key_value_heads")
    if keys.get("head_dim") is None:
        hidden = keys.count("hidden_size")
        if hidden % queries:
            raise keys.wrong("hidden_size", f"a multiple of num_attention_heads ({queries})")
        keys.set("head_dim", hidden // queries)
    width = keys.count("head_dim")
    if keys.get("num_key_value_heads_per_layer") is not None:
        heads = keys.each("num_key_value_heads_per_layer", layers)
        found: list[Layer] = [Attention(kv_heads=count, key_dim=width, value_dim=width) for count in heads]
        return finished(keys, found, draft=None)
    if keys.get("block_configs") is None:
        raise UnsupportedModel(
            f"{keys.name}: block_configs is missing; a {keys.family} configuration says by it, or by "
            f"num_key_value_heads_per_layer, what each layer holds",
            key="block_configs",
        )
    blocks = keys.listed("block_configs", layers)
    held = [_block(keys, index, block, queries, width) for index, block in enumerate(blocks)]
    return finished(keys, held, draft=None)


def _block(keys: ConfigKeys, index: int, block: Any, queries: int, width: int) -> Layer:
    where = f"block_configs[{index}].attention"
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise keys.wrong(where, "an object", shown=repr(attention)[:40])
    inner = ConfigKeys({**attention, "model_type": keys.family}, name=f"{keys.name}: {where}")
    if inner.flag("no_op", default=False) or inner.flag("replace_with_linear", default=False):
        return Nothing()
    for key in ("window_length", "num_sink_tokens", "sparsify", "unshifted_sink", "is_mamba", "mamba", "llama4"):
        if inner.get(key):
            raise inner.unread(key, "it is not read for one layer")
    group = inner.count("n_heads_in_group")
    if queries % group:
        raise keys.wrong(f"{where}.n_heads_in_group", f"a divisor of num_attention_heads ({queries})", shown=str(group))
    return Attention(kv_heads=queries // group, key_dim=width, value_dim=width)


OWN_SHAPES: dict[str, Reader] = {
    "gpt_neo": _gpt_neo,
    "mimo_v2_flash": _mimo_v2,
    "mimo_v2": _mimo_v2,
    "step3p5": _step3p5,
    "minimax_m3_vl_text": _minimax_m3,
    "minimax_m3": _minimax_m3,
    "openelm": _openelm,
    "deci": _deci,
    "nemotron-nas": _deci,
}
