"""Attention and short convolutions or a gated recurrence: RecurrentGemma, LFM2 and 3, ZAYA1, Inkling."""

from dataclasses import replace

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.nested import Nesting, read_inside
from kvist.spec.families.patterns import (
    CONV,
    NONE,
    RECURRENT,
    indices,
    listed,
    longest,
    number_of_layers,
    own,
    placed,
    reading,
    split,
)
from kvist.spec.families.reading import (
    FULL,
    SLIDING,
    Reader,
    Reading,
    Size,
    class_default,
    draft_count,
    heads_and_widths,
)
from kvist.spec.layers import Attention, Layer, Nothing, Parallel, State


def _recurrent_gemma(keys: ConfigKeys) -> Reading:
    """RecurrentGemma: a gated linear recurrence, and attention with a window, in a pattern that repeats.

    Source: RecurrentGemmaConfig of transformers; its heads are all stored unless a number is printed.
    """
    default = class_default(keys)
    layers = number_of_layers(keys)
    words = {"recurrent": RECURRENT, "attention": SLIDING, "linear_attention": RECURRENT, "sliding_attention": SLIDING}
    period = listed(keys, "block_types", layers=None, words=words)
    kinds = listed(keys, "layer_types", "layers_block_type", layers=layers, words=words)
    if period is None and kinds is None:
        keys.note("block_types", ["recurrent", "recurrent", "attention"], default)
        period = [RECURRENT, RECURRENT, SLIDING]
    if period is not None:
        repeated = [period[index % len(period)] for index in range(layers)]
        if kinds not in (None, repeated):
            raise keys.wrong("layer_types", "block_types, repeated")
        kinds = repeated
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None)
    window = keys.count("attention_window_size", default=2048, source=default)
    hidden = keys.count("hidden_size")
    attention = shape.attention(window=window)
    state = states.rg_lru(
        width=hidden if keys.get("lru_width") is None else keys.count("lru_width"),
        kernel=keys.count("conv1d_width", default=4, source=default),
    )
    found: list[Layer] = [attention if kind == SLIDING else state for kind in kinds or ()]
    # Only windows and a recurrence: no length is the longest.
    return reading(keys, found, max_context=longest(keys, default=None))


def _lfm2(keys: ConfigKeys) -> Reading:
    """LFM2, dense or of experts: gated short convolutions and full attention.

    Sources: Lfm2Config and Lfm2MoeConfig of transformers; ``lfm2.py`` of vLLM for ``conv_dim``.
    """
    size = Size(layers=32, heads=32, hidden=2560 if keys.family == "lfm2" else 2048)
    layers = number_of_layers(keys, size=size)
    kinds = listed(keys, "layer_types", layers=layers, words={"conv": CONV, "full_attention": FULL})
    picked = indices(keys, "full_attn_idxs", layers=layers)
    if kinds is None and picked is None:
        raise UnsupportedModel(
            f"{keys.name}: layer_types is missing; without it and full_attn_idxs no layer would be a convolution, "
            f"which no published model means: add one of them",
            key="layer_types",
        )
    if picked is not None:
        by_index = split(layers, picked, otherwise=CONV)
        if kinds not in (None, by_index):
            raise keys.wrong("full_attn_idxs", "the layers that layer_types calls full_attention")
        kinds = by_index
    found = {CONV: _lfm_convolution(keys, kernel=3, size=size), FULL: _heads(keys, kv_heads=8, size=size)}
    return reading(keys, placed(kinds or (), found), max_context=longest(keys, default=128000))


def _heads(keys: ConfigKeys, *, kv_heads: int, size: Size, head_dim: int | None = None) -> Attention:
    return heads_and_widths(keys, head_dim=head_dim, kv_heads=kv_heads, size=size).attention()


def _lfm_convolution(keys: ConfigKeys, *, kernel: int, size: Size) -> State:
    default = class_default(keys)
    hidden = keys.count("hidden_size", default=size.hidden if keys.part else None, source=default)
    if keys.get("conv_dim") not in (None, hidden):
        raise keys.unread("conv_dim", f"hidden_size is {hidden}; engines differ in which they take")
    return states.short_conv(channels=hidden, kernel=keys.count("conv_L_cache", default=kernel, source=default))


def _lfm3(keys: ConfigKeys) -> Reading:
    """LFM3: short convolutions, windowed and full attention, in a pattern of four where none is printed.

    Source: Lfm3Config of transformers.
    """
    default = class_default(keys)
    size = Size(layers=24, heads=16, hidden=2048)
    layers = number_of_layers(keys, size=size)
    words = {"conv": CONV, "full_attention": FULL, "sliding_attention": SLIDING}
    kinds = listed(keys, "layer_types", layers=layers, words=words)
    if kinds is None:
        keys.note("layer_types", "a window in each fourth layer but the first, full two later", default)
        kinds = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(layers)]
    full = _heads(keys, kv_heads=4, size=size, head_dim=128)
    window = keys.count("sliding_window", default=256, source=default)
    sliding = replace(full, window=window)
    found = {CONV: _lfm_convolution(keys, kernel=7, size=size), FULL: full, SLIDING: sliding}
    return reading(keys, placed(kinds, found), max_context=longest(keys, default=128000))


def _zaya(keys: ConfigKeys) -> Reading:
    """ZAYA1: attention over convolved queries and keys, whose values are half the last token's.

    Kept beside the cache are the columns that both convolutions reach back together, and half a token's values;
    SGLang keeps the whole hidden state of the last token instead. The first files count attention and experts as
    layers of their own: by turns, or as ``zaya_layers`` lists them ("a" for attention). Sources: ZayaConfig and the
    attention of transformers; ``configs/zaya.py`` of SGLang.
    """
    default = class_default(keys)
    kinds = _zaya_kinds(keys)
    shape = heads_and_widths(keys, head_dim=128, kv_heads=2)
    full = shape.attention()
    reach = sum(keys.count(name, default=2, source=default) - 1 for name in ("cca_time0", "cca_time1"))
    stored = shape.kv_heads * shape.head_dim
    channels = keys.count("num_attention_heads") * shape.head_dim + stored
    state = State(
        name="short-conv",
        conv_elements=channels * reach + stored // 2,
        conv_columns=reach,
        conv_codec=states.state_codec(keys, ("mamba_cache_dtype",), default="bf16"),
    )
    found: dict[str, Layer] = {FULL: Parallel(parts=(full, state)), NONE: Nothing()}
    if SLIDING in kinds:
        window = keys.count("sliding_window")
        found[SLIDING] = Parallel(parts=(shape.attention(window=window), state))
    if keys.get("kv_channels") not in (None, shape.head_dim):
        raise keys.wrong("kv_channels", f"the width of a head ({shape.head_dim})")
    return reading(keys, placed(kinds, found), max_context=longest(keys, default=131072))


def _zaya_kinds(keys: ConfigKeys) -> list[str]:
    old = keys.get("zaya_layers")
    marks = ("zaya_layers", "ffn_hidden_size", "activation_func")
    if keys.get("layer_types") is not None or all(keys.get(mark) is None for mark in marks):
        layers = number_of_layers(keys)
        words = {"hybrid": FULL, "hybrid_sliding": SLIDING}
        return listed(keys, "layer_types", layers=layers, words=words) or [FULL] * layers
    if old is None:
        kinds = [NONE if index % 2 else FULL for index in range(number_of_layers(keys))]
    elif isinstance(old, list) and old:
        kinds = [FULL if entry == "a" else NONE for entry in old]
        keys.set("num_hidden_layers", len(kinds))
    else:
        raise keys.wrong("zaya_layers", "a list with an entry a layer")
    if keys.get("swa_layers"):
        raise keys.unread("swa_layers", "windows of single layers are not described; --assume swa_layers=null")
    for name, total in (
        ("cca_num_q_heads", "num_attention_heads"),
        ("num_query_groups_list", "num_key_value_heads"),
        ("num_query_groups", "num_key_value_heads"),
    ):
        count = keys.get(total)
        one_each = [count if kind == FULL else 0 for kind in kinds]
        if keys.get(name) not in (None, count, one_each):
            raise keys.unread(name, f"all attention layers have {count} heads ({total}) in what is described")
    return kinds


def _inkling(*, layers: int, heads: int, kv_heads: int, swa_kv_heads: int, hidden: int, window: int) -> Reader:
    size = Size(layers=layers, heads=heads, hidden=hidden)

    def read(keys: ConfigKeys) -> Reading:
        """Inkling 1 and 2: full or windowed attention with convolved keys, values and outputs of both halves.

        Four convolutions a layer, two over its keys and values and two over the hidden size. Draft layers are read
        from ``num_mtp_layers``. Sources: InklingTextConfig and Inkling2TextConfig of transformers; ``inkling`` of
        vLLM and of SGLang, which keep the columns in bf16 where transformers keeps f32.
        """
        default = class_default(keys)
        number = number_of_layers(keys, size=size)
        keys.rename({"conv_kernel_size": ("sconv_kernel_size",), "sliding_window_size": ("sliding_window",)})
        words = {"hybrid": FULL, "hybrid_sliding": SLIDING}
        kinds = listed(keys, "layer_types", layers=number, words=words)
        local = indices(keys, "local_layer_ids", layers=number)
        if kinds is None and local is not None:
            kinds = split(number, local, then=SLIDING, otherwise=FULL)
        if kinds is None:
            keys.note("layer_types", "full attention in every sixth layer", default)
            kinds = split(number, range(5, number, 6), otherwise=SLIDING)
        wide = heads_and_widths(keys, head_dim=128, kv_heads=kv_heads, size=size)
        near = Attention(
            kv_heads=keys.count("swa_num_key_value_heads", default=swa_kv_heads, source=default),
            key_dim=keys.count("swa_head_dim", default=128, source=default),
            value_dim=keys.count("swa_head_dim"),
            window=keys.count("sliding_window_size", default=window, source=default),
        )
        far = wide.attention()
        kernel = keys.count("conv_kernel_size", default=4, source=default)
        for name, attention in (("v_head_dim", far), ("swa_v_head_dim", near)):
            if keys.get(name) not in (None, attention.value_dim):
                raise keys.unread(name, f"keys and values of one width ({attention.value_dim}) are described")
        stream = keys.count("hidden_size", default=hidden if keys.part else None, source=default)
        found: dict[str, Layer] = {}
        for kind, attention in ((FULL, far), (SLIDING, near)):
            channels = 2 * attention.kv_heads * attention.key_dim + 2 * stream
            found[kind] = Parallel(parts=(attention, states.short_conv(channels=channels, kernel=kernel)))
        own(keys, prefixes=("swa_", "mtp_"))
        if keys.get("use_sconv") is False:
            raise keys.unread("use_sconv", "the four convolutions of a layer are what is described")
        draft = _inkling_drafts(keys, found)
        looped = placed(_looped(keys, kinds), found)
        context = longest(keys, "model_max_length", default=131072 if layers == 66 else 1048576)
        return reading(keys, looped, max_context=context, draft=draft)

    return read


def _inkling_drafts(keys: ConfigKeys, found: dict[str, Layer]) -> list[Layer]:
    """Draft layers, full unless ``mtp_local_layer_ids`` names them."""
    steps = draft_count(keys)
    near = indices(keys, "mtp_local_layer_ids", layers=steps) or set()
    extent = keys.get("mtp_local_extent")
    sliding = found[SLIDING]
    if extent is not None and isinstance(sliding, Parallel):
        window = keys.count("mtp_local_extent")
        parts = (replace(part, window=window) if isinstance(part, Attention) else part for part in sliding.parts)
        sliding = Parallel(parts=tuple(parts))
    return [sliding if index in near else found[FULL] for index in range(steps)]


def _inkling_mm(keys: ConfigKeys) -> Reading:
    """Inkling with its towers, whose files describe the draft layers beside the text model."""
    drafts, text = keys.section("mtp_config"), keys.get("text_config")
    if isinstance(text, dict):
        for name, inner in (
            ("num_nextn_predict_layers", "num_mtp_layers"),
            ("local_layer_ids", "mtp_local_layer_ids"),
            ("local_extent", "mtp_local_extent"),
        ):
            if drafts.get(name) is not None and text.get(inner) is None:
                text = text | {inner: drafts.get(name)}
        keys.set("text_config", text)
    return read_inside(Nesting(inside=(("text_config",),), family="inkling_text"), keys, _INKLING)


def _looped(keys: ConfigKeys, kinds: list[str]) -> list[str]:
    """Kinds with the layers of a loop as often as they run: each pass has a cache of its own (Inkling-2-Mini)."""
    if not keys.family.startswith("inkling2_loop"):
        return kinds
    default = class_default(keys)
    loop = keys.get("loop_config") or {}
    for name, key, taken in (
        ("core_start", "loop_layer_index_start", 6),
        ("core_end", "loop_layer_index_end", 18),
        ("num_passes", "loop_num_passes", 3),
    ):
        if isinstance(loop, dict) and loop.get(name) is not None:
            keys.set(key, loop[name])
        keys.count(key, default=taken, source=default)
    start, end = keys.count("loop_layer_index_start"), keys.count("loop_layer_index_end")
    if not start < end <= len(kinds):
        raise keys.wrong("loop_layer_index_end", f"from {start + 1} to {len(kinds)}")
    return kinds[:start] + kinds[start:end] * keys.count("loop_num_passes") + kinds[end:]


_inkling1 = _inkling(layers=66, heads=64, kv_heads=8, swa_kv_heads=16, hidden=6144, window=512)
_inkling2 = _inkling(layers=48, heads=48, kv_heads=8, swa_kv_heads=8, hidden=4608, window=1024)
_inkling2_loop = _inkling(layers=24, heads=24, kv_heads=8, swa_kv_heads=8, hidden=2304, window=1024)
_INKLING = {"inkling_text": _inkling1, "inkling_model": _inkling1}

CONVOLUTIONS: dict[str, Reader] = {
    "recurrent_gemma": _recurrent_gemma,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": _lfm3,
    "zaya": _zaya,
    **_INKLING,
    "inkling_mm_model": _inkling_mm,
    "inkling2_text": _inkling2,
    "inkling2_loop_text": _inkling2_loop,
}
