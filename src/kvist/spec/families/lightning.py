"""Attention and lightning attention in one model: MiniMax-Text-01, M1 and VL-01, Ring-linear, MiniCPM-SALA."""

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.patterns import (
    RECURRENT,
    listed,
    longest,
    missing_pattern,
    number_of_layers,
    own,
    reading,
    split,
)
from kvist.spec.families.reading import FULL, Reader, Reading, draft_count, heads_and_widths
from kvist.spec.layers import Attention, Layer, State

_WORDS = {"linear_attention": RECURRENT, "full_attention": FULL, "attention": FULL}


def _placed(kinds: list[str], attention: Attention, state: State) -> list[Layer]:
    return [attention if kind == FULL else state for kind in kinds]


def _minimax(keys: ConfigKeys) -> Reading:
    """MiniMax-Text-01 and what is made from it: 1 means attention and 0 lightning in ``attn_type_list``.

    The state is f32 here; transformers and vLLM keep it in the model's type. Sources: configuration_minimax_text_01.py
    beside the weights; MiniMaxConfig of transformers, whose alternating default no published file means.
    """
    layers = number_of_layers(keys)
    kinds = listed(keys, "layer_types", layers=layers, words=_WORDS)
    numbers = keys.get("attn_type_list")
    if numbers is not None:
        listing = keys.each("attn_type_list", layers, least=0)
        if set(listing) - {0, 1}:
            raise keys.unread("attn_type_list", "0 is lightning attention, 1 full attention, and nothing else is known")
        by_number = [FULL if number else RECURRENT for number in listing]
        if kinds not in (None, by_number):
            raise keys.wrong("layer_types", "the same as attn_type_list")
        kinds = by_number
    if kinds is None:
        raise missing_pattern(keys, "attn_type_list", "it says which layers are attention")
    if keys.get("sliding_window") is not None:
        raise keys.unread("sliding_window", "no published model of the family has one; --assume sliding_window=null")
    shape = heads_and_widths(keys, head_dim=None, kv_heads=8)
    attention = shape.attention()
    codec = states.state_codec(keys)
    state = states.lightning(heads=keys.count("num_attention_heads"), dim=shape.head_dim, codec=codec)
    own(keys, prefixes=("linear_",))
    found = _placed(kinds, attention, state)
    # MiniMaxText01Config of vLLM names the length max_model_len where a file has it so.
    return reading(keys, found, max_context=longest(keys, "max_model_len", default=131072))


def group_kinds(keys: ConfigKeys, layers: int) -> list[str]:
    """Return Bailing's kinds: attention at the end of each ``layer_group_size`` layers, or as listed.

    What a group that is not whole would be differs (vLLM and the code beside the weights: attention; transformers and
    SGLang: linear), and no published model has one.
    """
    kinds = listed(keys, "layer_types", "layers_block_type", layers=layers, words=_WORDS)
    if kinds is not None:
        own(keys, "layer_group_size")
        return kinds
    group = keys.get("layer_group_size")
    if group is None:
        raise missing_pattern(keys, "layer_group_size", "it says which layers are attention")
    if isinstance(group, list):
        flags = keys.each("layer_group_size", layers, least=0)
        return [RECURRENT if flag == 1 else FULL for flag in flags]
    size = keys.count("layer_group_size", most=10_000)
    if layers % size:
        raise keys.unread(
            "layer_group_size", f"{layers} layers are no whole groups, and engines differ: add layer_types"
        )
    return split(layers, range(size - 1, layers, size))


def _bailing_linear(keys: ConfigKeys) -> Reading:
    """Ring-linear 2.0: grouped-query attention and lightning attention.

    Sources: BailingMoeLinearConfig of SGLang; bailing_moe_linear.py of mlx-lm.
    """
    layers = number_of_layers(keys)
    kinds = group_kinds(keys, layers)
    shape = heads_and_widths(keys, head_dim=None, kv_heads=4)
    attention = shape.attention()
    heads = keys.count("num_attention_heads")
    state = states.lightning(heads=heads, dim=shape.head_dim, codec=states.state_codec(keys))
    own(keys, prefixes=("linear_",))
    found = _placed(kinds, attention, state)
    return reading(keys, found, max_context=longest(keys, default=32768), draft=[attention] * draft_count(keys))


def _minicpm_sala(keys: ConfigKeys) -> Reading:
    """MiniCPM-SALA: lightning attention, and attention that may be sparse.

    Sparse attention keeps compressed keys besides, in two sizes whose bytes engines do not agree on.
    Source: modeling_minicpm_sala.py beside the weights.
    """
    layers = number_of_layers(keys)
    words = {"minicpm4": FULL, "lightning-attn": RECURRENT, "lightning": RECURRENT}
    kinds = listed(keys, "mixer_types", layers=layers, words=words)
    if kinds is None:
        raise keys.missing("mixer_types")
    if keys.get("sparse_config") is not None:
        raise keys.unread(
            "sparse_config", "the compressed keys of its attention are not described; --assume sparse_config=null"
        )
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None)
    attention = shape.attention()
    heads = keys.count("lightning_nh")
    if keys.count("lightning_nkv", default=heads, source="as many as lightning_nh") != heads:
        raise keys.unread("lightning_nkv", f"lightning_nh is {heads}: a state for each of either is not settled")
    state = states.lightning(heads=heads, dim=keys.count("lightning_head_dim"), codec=states.state_codec(keys))
    own(keys, prefixes=("lightning_",))
    return reading(keys, _placed(kinds, attention, state), max_context=longest(keys, default=None))


LIGHTNING: dict[str, Reader] = {
    "minimax": _minimax,
    "minimax_text_01": _minimax,
    "minimax_m1": _minimax,
    "bailing_moe_linear": _bailing_linear,
    "bailing_moe_linear_v2": _bailing_linear,
    "minicpm_sala": _minicpm_sala,
}
