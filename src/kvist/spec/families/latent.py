"""Families that keep one latent vector a token (MLA), with the keys of a sparse-attention indexer or not.

A family is a line of data. Source of each line: the configuration and modelling files of that name in transformers
5.24. All of them override ``head_dim`` with the rotary width, so that what a file prints there says nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import (
    FULL,
    SLIDING,
    Reader,
    Reading,
    class_default,
    context_of,
    count_of_layers,
    finished,
    heads_and_widths,
    layer_types,
)
from kvist.spec.families.windows import hold_counts, rope_layers
from kvist.spec.layers import Indexer, Latent, Layer, Parallel, Shared

# What a file may print of a layer's latents without changing what is stored.
_OWN = ("q_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "is_mla", "use_mla")
_INDEX = ("index_n_heads", "index_topk", "indexer_rope_interleave", "index_share_for_mtp_iteration")


@dataclass(frozen=True, kw_only=True)
class MLA:
    """What is particular to a family.

    Attributes:
        context: longest sequence that the class fills in.
        rank: default of the class for ``kv_lora_rank``.
        rope: likewise for ``qk_rope_head_dim``.
        index: likewise for ``index_head_dim``; None where there is no indexer.
        schedule: which layers have an indexer; the others reuse the choice of one before them, and store no keys
            for it.
        doubled: whether each of ``num_layers`` has two attention blocks (LongCat-Flash).
        sources: whether ``kv_source_layers`` may make a layer read another's latents, and ``no_rope_layers`` drop the
            rotary key.
    """

    context: int
    rank: int = 512
    rope: int = 64
    index: int | None = None
    schedule: Callable[[ConfigKeys, int], list[bool]] | None = None
    doubled: bool = False
    sources: bool = False


def _latent(family: MLA, keys: ConfigKeys) -> Reading:
    if keys.get("use_mla") is False or ("kv_lora_rank" in keys and keys.get("kv_lora_rank") is None):
        context_of(keys, default=family.context)
        return _without_latents(keys)
    for key in (*_OWN, *(_INDEX if family.index else ())):
        keys.get(key)
    default = class_default(keys)
    context_of(keys, default=family.context)
    layers = _blocks(keys) if family.doubled else count_of_layers(keys)
    printed = keys.get("kv_lora_rank") is not None
    rank = keys.count("kv_lora_rank", default=family.rank, source=default)
    rope = keys.count("qk_rope_head_dim", default=family.rope, least=0, source=default)
    if not printed:
        _hold_width(keys, rank, rope)
    plain = full = Latent(rank=rank, rope_dim=rope)
    if family.index is not None:
        width = keys.count("index_head_dim", default=family.index, source=default)
        full = replace(plain, indexer=Indexer(heads=1, dim=width))
    choosing = family.schedule(keys, layers) if family.schedule else [True] * layers
    found: list[Layer] = [full if chooses else plain for chooses in choosing]
    if family.sources:
        found = _sharing(keys, _unturned(keys, found))
    return finished(keys, found, draft=full)


def _hold_width(keys: ConfigKeys, rank: int, rope: int) -> None:
    """``head_dim``, where a file prints it instead of the latents, must be a width that such a layer has.

    It may be the rotary width, that of a value or a query, or the whole vector (extracts of vLLM's accounts).
    """
    printed = keys.get("head_dim")
    nope, value = keys.get("qk_nope_head_dim"), keys.get("v_head_dim")
    known = [rope, rank + rope, value, nope, nope + rope if isinstance(nope, int) else None]
    if printed is not None and printed not in known:
        raise keys.unread("head_dim", f"a {keys.family} layer keeps {rank} + {rope} elements a token")


def _blocks(keys: ConfigKeys) -> int:
    """LongCat-Flash: two attention blocks in each of ``num_layers``, which is what a file must print."""
    if keys.get("num_layers") is None and keys.get("num_hidden_layers") is not None:
        raise keys.unread(
            "num_hidden_layers", "it may count layers or their attention blocks, two each: --assume num_layers=N"
        )
    blocks = 2 * keys.count("num_layers", most=5_000)
    keys.set("num_hidden_layers", blocks)
    return blocks


def glm_schedule(keys: ConfigKeys, layers: int) -> list[bool]:
    """Which layers have an indexer: every ``index_topk_freq``-th, after the first ``index_skip_topk_offset``.

    Source: GlmMoeDsaConfig of transformers.
    """
    listed = _listed_indexers(keys, layers)
    period = max(keys.count("index_topk_freq", default=1, least=0, source=class_default(keys)), 1)
    if listed is not None or period == 1:
        return listed or [True] * layers
    first = keys.count("index_skip_topk_offset", default=2, least=0, source=class_default(keys))
    return [max(index - first + 1, 0) % period == 0 for index in range(layers)]


def hy_schedule(keys: ConfigKeys, layers: int) -> list[bool]:
    """Hunyuan 4: the first layer, the second, and every fourth after it. Source: HYV4Config of transformers."""
    return _listed_indexers(keys, layers) or [index == 0 or index % 4 == 1 for index in range(layers)]


def _listed_indexers(keys: ConfigKeys, layers: int) -> list[bool] | None:
    """The printed list, or the pattern of letters F (full) and S (shared), one a layer."""
    for key in ("index_topk_freq", "index_skip_topk_offset"):
        keys.get(key)
    pattern = keys.get("index_topk_pattern")
    if keys.get("indexer_types") is None and isinstance(pattern, (str, list)):
        words = {"F": "full", "S": "shared"}
        keys.set("indexer_types", [words.get(letter, letter) for letter in map(str, pattern)])
    if keys.get("indexer_types") is None:
        return None
    kinds = keys.listed("indexer_types", layers)
    for index, kind in enumerate(kinds):
        if kind not in ("full", "shared"):
            raise keys.wrong(f"indexer_types[{index}]", "full or shared", shown=repr(kind)[:40])
    return [kind == "full" for kind in kinds]


def _unturned(keys: ConfigKeys, layers: list[Layer]) -> list[Layer]:
    """Mistral Large 4: layers that turn no positions have no rotary key beside the latent."""
    turned = rope_layers(keys, len(layers))
    return [
        layer if turns or not isinstance(layer, Latent) else replace(layer, rope_dim=0)
        for layer, turns in zip(layers, turned, strict=True)
    ]


def _sharing(keys: ConfigKeys, layers: list[Layer]) -> list[Layer]:
    """Mistral Large 4: a layer whose entry in ``kv_source_layers`` is another's reads that one's latents.

    Its indexer keeps keys of its own. Source: MistralLarge4TextConfig of transformers.
    """
    if keys.get("kv_source_layers") is None:
        return layers
    sources = keys.each("kv_source_layers", len(layers), least=0)
    found = list(layers)
    for index, source in enumerate(sources):
        if source > index or sources[source] != source:
            expected = "itself or an earlier layer that is its own"
            raise keys.wrong(f"kv_source_layers[{index}]", expected, shown=str(source))
        if source == index:
            continue
        layer = layers[index]
        shared = Shared(source=source)
        if isinstance(layer, Latent) and layer.indexer is not None:
            found[index] = Parallel(parts=(shared, Latent(rank=0, rope_dim=0, indexer=layer.indexer)))
        else:
            found[index] = shared
    return found


def _without_latents(keys: ConfigKeys) -> Reading:
    """The small models of DeepSeek-VL2 and DeepSeek-OCR: keys and values of every head, in spite of the name."""
    for key in (*_OWN, "qk_rope_head_dim", "kv_lora_rank"):
        if keys.get(key):
            raise keys.unread(key, "the file has no kv_lora_rank, so that its layers are not latents")
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None)
    full = shape.attention()
    return finished(keys, [full] * shape.layers, draft=full)


def _dots3(keys: ConfigKeys) -> Reading:
    """dots3-note: latents with an indexer on some layers, wider latents with a window on the others.

    Source: Dots3NoteTextConfig of transformers; published files call the layers with an indexer full_attention.
    """
    default = class_default(keys)
    for key in (*_OWN, *_INDEX, "use_dsa", "use_sliding_window", "head_dim"):
        keys.get(key)
    layers = count_of_layers(keys)
    context_of(keys, default=524288)
    if keys.get("layer_types") is None:
        kinds = [FULL if index < 2 or index % 4 == 1 else SLIDING for index in range(layers)]
    else:
        kinds = layer_types(keys, layers, (FULL, "indexed_attention", SLIDING))
    for key in ("use_dsa", "use_sliding_window"):
        if keys.get(key) is False:
            raise keys.unread(key, "true is read")
    hold_counts(keys, [SLIDING if kind == SLIDING else FULL for kind in kinds])
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", *_OWN):
        keys.get(f"swa_{key}")
    if keys.get("sliding_window") is None:
        keys.rename({"sliding_window": ("sliding_window_size",)})
    indexer = Indexer(heads=1, dim=keys.count("index_head_dim", default=128, source=default))
    full = Latent(
        rank=keys.count("kv_lora_rank", default=512, source=default),
        rope_dim=keys.count("qk_rope_head_dim", default=64, source=default),
        indexer=indexer,
    )
    sliding = Latent(
        rank=keys.count("swa_kv_lora_rank", default=1024, source=default),
        rope_dim=keys.count("swa_qk_rope_head_dim", default=64, source=default),
        window=keys.count("sliding_window", default=512, source=default),
    )
    return finished(keys, [sliding if kind == SLIDING else full for kind in kinds], draft=None)


_FAMILIES = {
    "deepseek_v2": MLA(context=2048),
    "deepseek_v3": MLA(context=4096),
    "kimi_k2": MLA(context=4096),
    "deepseek_v32": MLA(context=163840, index=128),
    "glm_moe_dsa": MLA(context=202752, index=128, schedule=glm_schedule),
    "glm4_moe_lite": MLA(context=202752),
    "minicpm3": MLA(context=32768, rank=256, rope=32),
    "mistral4": MLA(context=1048576, rank=256),
    "mistral_large4_text": MLA(context=1048576, index=128, schedule=glm_schedule, sources=True),
    "longcat_flash": MLA(context=131072, doubled=True),
    "youtu": MLA(context=131072),
    "sarvam_mla": MLA(context=4096),
    "axk1": MLA(context=32768),
    "axk2": MLA(context=131072, rank=128, rope=32, index=128),
    "hy_v4": MLA(context=262144, index=128, schedule=hy_schedule),
    "hy_v4_vl_text": MLA(context=262144, index=128, schedule=hy_schedule),
}

LATENT: dict[str, Reader] = {
    **{name: partial(_latent, family) for name, family in _FAMILIES.items()},
    "dots3_note": _dots3,
    "dots3_note_text": _dots3,
}
