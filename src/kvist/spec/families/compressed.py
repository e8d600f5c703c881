"""DeepSeek-V4: a window of single tokens on every layer, and compressed entries of many tokens on most.

Source: DeepseekV4Config and the cache layers of transformers 5.24; the layers' bytes follow DeepSeek's description:
keys and values are one vector of ``head_dim`` elements a token or entry.
"""

from dataclasses import replace

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import (
    Reader,
    Reading,
    class_default,
    context_of,
    count_of_layers,
    draft_count,
    finished,
)
from kvist.spec.layers import Compressed, Indexer, Latent, Layer

_SPARSE, _HEAVY, _WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_RATIOS = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
# Keys of the mechanism on which no byte depends: queries, outputs, and which entries are picked.
_OWN = ("q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads", "index_topk", "num_attention_heads")


def _deepseek_v4(keys: ConfigKeys) -> Reading:
    """Entries of 4 tokens come with an indexer, those of 128 without.

    ``compress_ratios`` has one entry more for each draft layer (multi-token prediction).
    """
    for key in _OWN:
        keys.get(key)
    default = class_default(keys)
    layers = count_of_layers(keys)
    context_of(keys, default=1048576)
    if keys.get("num_key_value_heads") not in (None, 1):
        raise keys.unread("num_key_value_heads", "one vector a token is read")
    width = keys.count("head_dim", default=512, source=default)
    rope = keys.count("qk_rope_head_dim", default=64, most=width, source=default)
    window = keys.count("sliding_window", default=128, source=default)
    indexer = Indexer(heads=1, dim=keys.count("index_head_dim", default=128, source=default))
    single = Latent(rank=width - rope, rope_dim=rope, window=window)
    heavy = Compressed(rank=width - rope, rope_dim=rope, ratio=1, window=window)
    sparse = replace(heavy, indexer=indexer)

    def layer(kind: str) -> Layer:
        ratio = _ratio(keys, kind)
        return replace(sparse if kind == _SPARSE else heavy, ratio=ratio) if ratio else single

    kinds = _kinds(keys, layers)
    meanings = {kind: layer(kind) for kind in set(kinds)}
    keys.set("layer_types", kinds[:layers])
    draft = meanings[kinds[layers]] if len(kinds) > layers else None
    return finished(keys, [meanings[kind] for kind in kinds[:layers]], draft=draft)


def _ratio(keys: ConfigKeys, kind: str) -> int:
    """Tokens of one entry; 0 where there are none. ``compress_rates`` may change what a kind means."""
    ratio = next(number for number, meaning in _RATIOS.items() if meaning == kind)
    rates = keys.section("compress_rates")
    return rates.count(kind) if ratio and rates.get(kind) is not None else ratio


def _kinds(keys: ConfigKeys, layers: int) -> list[str]:
    """The kinds of all layers, and of the draft layers where the file has them."""
    ratios = keys.get("compress_ratios")
    if keys.get("layer_types") is not None:
        keys.get("compress_ratios")
        kinds = keys.listed("layer_types", layers)
        for index, kind in enumerate(kinds):
            if kind not in _RATIOS.values():
                raise keys.unread("layer_types", f"entry {index} must be one of {', '.join(_RATIOS.values())}")
        return kinds
    if ratios is None:
        keys.note("compress_ratios", None, f"{class_default(keys)}: two of 128, then 128 and 4 by turns")
        return [_SPARSE if index > 2 and index % 2 else _HEAVY for index in range(layers)]
    counted = keys.get("num_nextn_predict_layers") is not None
    drafts = draft_count(keys)
    if not isinstance(ratios, list) or len(ratios) < layers or (counted and len(ratios) > layers + drafts):
        found = len(ratios) if isinstance(ratios, list) else repr(ratios)[:40]
        raise keys.wrong("compress_ratios", f"one entry for each of the {layers} layers", shown=f"of length {found}")
    for index, ratio in enumerate(ratios):
        if type(ratio) is not int or ratio not in _RATIOS:
            raise keys.unread("compress_ratios", f"entry {index} must be one of {', '.join(map(str, _RATIOS))}")
    return [_RATIOS[ratio] for ratio in ratios]


COMPRESSED: dict[str, Reader] = {"deepseek_v4": _deepseek_v4}
