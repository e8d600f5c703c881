"""Attention and gated delta nets in one model: Qwen3-Next, Qwen3.5, OLMo Hybrid, GigaChat 3.5, Jet-Nemotron, Lara."""

from dataclasses import dataclass

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.patterns import (
    PLAIN,
    RECURRENT,
    every,
    hold_counts,
    indices,
    listed,
    longest,
    missing_pattern,
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
from kvist.spec.layers import Indexer, Latent, Layer, Parallel, State


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """Defaults of the linear layers' heads: how many keys and values, None where they follow from others."""

    keys: int | None
    values: int | None


def _state(keys: ConfigKeys, heads: _Heads) -> State:
    """The layer that Qwen and its kin call ``linear_attention``; the names are Qwen3-Next's."""
    default = class_default(keys)
    key_heads = keys.count("linear_num_key_heads", default=heads.keys, source=default)
    value_heads = keys.count("linear_num_value_heads", default=heads.values, source=default)
    if value_heads % key_heads:
        raise keys.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    state = states.gated_delta(
        key_heads=key_heads,
        key_dim=keys.count("linear_key_head_dim", default=128, source=default),
        value_heads=value_heads,
        value_dim=keys.count("linear_value_head_dim", default=128, source=default),
        kernel=keys.count("linear_conv_kernel_dim", default=4, source=default),
        codec=states.state_codec(keys),
    )
    own(keys, prefixes=("linear_", "mamba_"))
    return state


def _qwen_kinds(keys: ConfigKeys, layers: int) -> list[str]:
    """Published as a list, or left to the class: full attention in every fourth layer."""
    kinds = listed(keys, "layer_types", layers=layers, words={"linear_attention": RECURRENT, "full_attention": FULL})
    if kinds is None:
        kinds = every(keys, "full_attention_interval", layers=layers, default=4)
    own(keys, "full_attention_interval")
    hold_counts(keys, kinds)
    return kinds


def _qwen3(*, kv_heads: int, size: Size) -> Reader:
    def read(keys: ConfigKeys) -> Reading:
        """Qwen3-Next and the text models of Qwen3.5 to 3.8, dense or of experts.

        Sources: Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig of transformers. Draft layers are full
        attention (``qwen3_next_mtp.py`` of vLLM).
        """
        layers = number_of_layers(keys, size=size)
        kinds = _qwen_kinds(keys, layers)
        shape = heads_and_widths(keys, head_dim=256, kv_heads=kv_heads, size=size)
        attention = shape.attention()
        state = _state(keys, _Heads(keys=16, values=32))
        found = placed(kinds, {FULL: attention, RECURRENT: state})
        return reading(keys, found, max_context=longest(keys, default=32768), draft=[attention] * draft_count(keys))

    return read


_qwen3_5 = _qwen3(kv_heads=4, size=Size(layers=32, heads=16))
_qwen3_5_moe = _qwen3(kv_heads=2, size=Size(layers=40, heads=16))


def _olmo_hybrid(keys: ConfigKeys) -> Reading:
    """OLMo Hybrid: as many linear heads as of attention; keys of 3/4 of the hidden size together, values twice as wide.

    Source: OlmoHybridConfig of transformers.
    """
    default = class_default(keys)
    layers = number_of_layers(keys)
    kinds = listed(keys, "layer_types", layers=layers, words={"linear_attention": RECURRENT, "full_attention": FULL})
    if kinds is None:
        kinds = split(layers, range(3, layers, 4))
        keys.note("layer_types", "full attention in every fourth layer", default)
        if FULL not in kinds:
            kinds[-1] = FULL
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None)
    heads = keys.count("num_attention_heads")
    key_heads = heads if keys.get("linear_num_key_heads") is None else keys.count("linear_num_key_heads")
    if keys.get("linear_key_head_dim") is None:
        dim = int(0.75 * keys.count("hidden_size") / key_heads)
        keys.count("linear_key_head_dim", default=dim, source=f"{default}: 0.75 x hidden_size / linear_num_key_heads")
    twice = 2 * keys.count("linear_key_head_dim")
    keys.count("linear_value_head_dim", default=twice, source=f"{default}: 2 x linear_key_head_dim")
    attention = shape.attention()
    state = _state(keys, _Heads(keys=heads, values=heads))
    found = placed(kinds, {FULL: attention, RECURRENT: state})
    return reading(keys, found, max_context=longest(keys, default=65536))


_LARA = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def _lara_mini(keys: ConfigKeys) -> Reading:
    """Lara Mini: linear, windowed and full layers, in a pattern of five where none is printed.

    Source: LaraMiniConfig of transformers.
    """
    default = class_default(keys)
    layers = number_of_layers(keys)
    if keys.get("layer_types") is None:
        keys.set("layer_types", [_LARA[index % len(_LARA)] for index in range(layers)])
        keys.note("layer_types", list(_LARA), f"{default}, repeated")
    words = PLAIN | {"sliding_attention": SLIDING}
    kinds = listed(keys, "layer_types", layers=layers, words=words) or []
    shape = heads_and_widths(keys, head_dim=128, kv_heads=4)
    window = keys.count("sliding_window", default=512, source=default)
    full = shape.attention()
    sliding = shape.attention(window=window)
    state = _state(keys, _Heads(keys=8, values=16))
    found = {FULL: full, SLIDING: sliding, RECURRENT: state}
    return reading(keys, placed(kinds, found), max_context=longest(keys, default=131072))


def _gigachat3_5(keys: ConfigKeys) -> Reading:
    """GigaChat 3.5: latent attention in the layers that the file names, gated delta nets in the others.

    Source: ``configs/gigachat35.py`` of SGLang.
    """
    layers = number_of_layers(keys)
    kinds = listed(keys, "layer_types", layers=layers)
    picked = indices(keys, "full_attention_layers", layers=layers)
    if kinds is None and picked is None:
        raise missing_pattern(keys, "layer_types", "it says which layers are attention")
    kinds = kinds or split(layers, picked or ())
    latent = Latent(rank=keys.count("kv_lora_rank"), rope_dim=keys.count("qk_rope_head_dim", least=0))
    own(keys, "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_head_dim")
    state = _state(keys, _Heads(keys=None, values=None))
    found = placed(kinds, {FULL: latent, RECURRENT: state})
    return reading(keys, found, max_context=longest(keys, default=4096), draft=[latent] * draft_count(keys))


def _jet_nemotron(keys: ConfigKeys) -> Reading:
    """Jet-Nemotron: full, windowed and JetBlock layers; a JetBlock convolves its values alone.

    Sources: ``jetai/modeling/hf/jet_block.py`` of NVlabs/Jet-Nemotron; ``models/jet_nemotron.py`` of SGLang, which
    reserves columns for queries and keys too and leaves them empty.
    """
    layers = number_of_layers(keys)
    kinds = listed(keys, "layer_types", layers=layers, words={"jet": RECURRENT, "attn": FULL, "swa": SLIDING})
    if kinds is None:
        raise keys.missing("layer_types")
    parts = keys.section("efficient_attention_config")
    jet, swa = parts.section("jet"), parts.section("swa")
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None)
    found: dict[str, Layer] = {FULL: shape.attention()}
    if SLIDING in kinds:
        window = swa.count("window_size")
        found[SLIDING] = shape.attention(window=window)
    if RECURRENT in kinds:
        heads, dim = jet.count("num_heads"), jet.count("head_dim")
        value_dim = int(dim * jet.number("expand_v", default=2.0, source="default of JetBlock"))
        columns = jet.count("conv_size") - 1
        found[RECURRENT] = State(
            name="gated-delta",
            conv_elements=heads * value_dim * columns,
            conv_columns=columns,
            state_elements=heads * dim * value_dim,
            state_codec=states.state_codec(keys),
        )
    return reading(keys, placed(kinds, found), max_context=longest(keys, default=None))


def _qwen4_exp(keys: ConfigKeys) -> Reading:
    """Qwen4-Exp: gated delta nets, attention with a pooled indexer, and n-gram embeddings with a dilated convolution.

    The indexer's keys are counted as it uses them, one for each ``indexer_compress_ratio`` tokens; transformers keeps
    a raw one of every token. The last token ids that an n-gram needs are the request's own and not counted.
    Sources: Qwen4ExpTextConfig of transformers; ``models/qwen4_exp`` of vLLM.
    """
    default = class_default(keys)
    size = Size(layers=40, heads=16, hidden=2048)
    layers = number_of_layers(keys, size=size)
    words = {"linear_attention": RECURRENT, "full_attention": FULL, "indexed_attention": FULL}
    words |= {"qwen_sparse_attention": FULL}
    kinds = listed(keys, "layer_types", layers=layers, words=words)
    if kinds is None:
        kinds = every(keys, "full_attention_interval", layers=layers, default=4)
    own(keys, "full_attention_interval")
    shape = heads_and_widths(keys, head_dim=256, kv_heads=2, size=size)
    indexer = None
    if keys.get("indexer_n_heads") is not None:
        pool = keys.count("indexer_compress_ratio")
        indexer = Indexer(heads=keys.count("indexer_kv_heads"), dim=keys.count("indexer_head_dim"), pool=pool)
    attention = shape.attention(indexer=indexer)
    state = _state(keys, _Heads(keys=16, values=32))
    embedded = indices(keys, "ple_layer_ids", layers=layers, first=1) or set()
    found: list[Layer] = [attention if kind == FULL else state for kind in kinds]
    for index in embedded:
        if kinds[index] != RECURRENT:
            raise keys.wrong("ple_layer_ids", "layers of linear attention, counted from 1")
        kernel = keys.count("ple_conv_kernel_size", default=4, source=default)
        dilation = keys.count("ngram_size", default=3, source=default)
        hidden = keys.count("hidden_size", default=size.hidden if keys.part else None, source=default)
        channels = keys.count("hc_count", default=4, source=default) * hidden
        reach = states.short_conv(channels=channels, kernel=(kernel - 1) * dilation + 1)
        found[index] = Parallel(parts=(state, reach))
    own(keys, prefixes=("indexer_",))
    return reading(keys, found, max_context=longest(keys, default=32768), draft=[attention] * draft_count(keys))


GATED_DELTA: dict[str, Reader] = {
    "qwen3_next": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "olmo_hybrid": _olmo_hybrid,
    "lara_mini": _lara_mini,
    "gigachat3_5": _gigachat3_5,
    "jet_nemotron": _jet_nemotron,
    "qwen4_exp_text": _qwen4_exp,
}
