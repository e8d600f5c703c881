"""Attention and Mamba in one model: Jamba, Zamba, Bamba, Granite 4, Falcon-H1, Nemotron-H, PLaMo 2, SambaY."""

from collections.abc import Sequence

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.patterns import (
    BOTH,
    NONE,
    PLAIN,
    RECURRENT,
    indices,
    listed,
    longest,
    missing_pattern,
    number_of_layers,
    own,
    reading,
    spelled,
    split,
)
from kvist.spec.families.reading import FULL, Reader, Reading, class_default, draft_count, heads_and_widths
from kvist.spec.families.recurrent import mamba_width
from kvist.spec.layers import Attention, Layer, Nothing, Parallel, Shared, State

_LETTERS = {"M": RECURRENT, "*": FULL, "-": NONE, "E": NONE}
_NEMOTRON = PLAIN | {"mlp": NONE, "moe": NONE}
_ZAMBA = {"mamba": RECURRENT, "linear_attention": RECURRENT, "hybrid": BOTH}
_MIXER_KEYS = ("mamba_", "ssm_", "time_step_")


def _layers(kinds: Sequence[str], *, attention: Layer, state: State) -> list[Layer]:
    meanings = {FULL: attention, RECURRENT: state, BOTH: Parallel(parts=(attention, state)), NONE: Nothing()}
    return [meanings[kind] for kind in kinds]


def _attention(keys: ConfigKeys, *, kv_heads: int | None, head_dim: int | None = None) -> Attention:
    return heads_and_widths(keys, head_dim=head_dim, kv_heads=kv_heads).attention()


def _jamba(keys: ConfigKeys) -> Reading:
    """Jamba: attention once in ``attn_layer_period`` layers, Mamba-1 in the others.

    Source: JambaConfig of transformers.
    """
    default = class_default(keys)
    layers = number_of_layers(keys)
    kinds = listed(keys, "layers_block_type", "layer_types", layers=layers)
    if kinds is None:
        period = keys.count("attn_layer_period", default=8, source=default)
        offset = keys.count("attn_layer_offset", default=4, least=0, source=default)
        if offset >= period:
            raise keys.wrong("attn_layer_offset", f"less than attn_layer_period ({period})")
        kinds = split(layers, range(offset, layers, period))
    attention = _attention(keys, kv_heads=8)
    state = _mamba1(keys)
    own(keys, "attn_layer_period", "attn_layer_offset", prefixes=_MIXER_KEYS)
    return reading(keys, _layers(kinds, attention=attention, state=state), max_context=longest(keys, default=262144))


def _mamba1(keys: ConfigKeys) -> State:
    """The Mamba-1 layer of Jamba and Zamba."""
    default = class_default(keys)
    return states.mamba(
        width=mamba_width(keys, expand="mamba_expand"),
        state=keys.count("mamba_d_state", default=16, source=default),
        kernel=keys.count("mamba_d_conv", default=4, source=default),
        codec=states.state_codec(keys),
    )


def _zamba(keys: ConfigKeys) -> Reading:
    """Zamba: Mamba-1 everywhere, and before some of these one attention block that they share, each with its own cache.

    Source: ZambaConfig of transformers.
    """
    default = class_default(keys)
    layers = number_of_layers(keys)
    kinds = listed(keys, "layers_block_type", layers=layers, words=_ZAMBA)
    if kinds is None:
        period = keys.count("attn_layer_period", default=6, source=default)
        offset = keys.count("attn_layer_offset", default=4, least=0, source=default)
        later = {index + 3 for index in range(layers - 3) if index % period == offset}
        kinds = split(layers, {2} | later, then=BOTH)
    heads = keys.count("num_attention_heads", default=16, source=default)
    dim = 2 * keys.count("hidden_size") // heads
    dim = keys.count("attention_head_dim") if keys.get("attention_head_dim") is not None else dim
    stored = keys.count("num_key_value_heads", default=16, source=default)
    attention = Attention(kv_heads=stored, key_dim=dim, value_dim=dim)
    state = _mamba1(keys)
    own(keys, "n_mamba_heads", "attn_layer_period", "attn_layer_offset", prefixes=_MIXER_KEYS)
    return reading(keys, _layers(kinds, attention=attention, state=state), max_context=longest(keys, default=4096))


# Zamba2-2.7B, the default of Zamba2Config: which of 54 layers have the shared attention before them.
_ZAMBA2_HYBRID = (6, 12, 18, 24, 30, 36, 42, 47, 51)


def _zamba2(keys: ConfigKeys) -> Reading:
    """Zamba2: Mamba-2 everywhere, and before some of these a shared attention block of twice the width.

    Source: Zamba2Config of transformers; ``state_size`` is the name of ``mamba_d_state`` in the first files.
    """
    default = class_default(keys)
    layers = number_of_layers(keys)
    kinds = listed(keys, "layers_block_type", "layer_types", layers=layers, words=_ZAMBA)
    if kinds is None:
        picked = indices(keys, "hybrid_layer_ids", layers=layers)
        if picked is None and layers == 54:
            keys.note("layers_block_type", list(_ZAMBA2_HYBRID), f"{default}: the hybrid layers")
            picked = set(_ZAMBA2_HYBRID)
        elif picked is None:
            raise keys.missing("layers_block_type")
        kinds = split(layers, picked, then=BOTH)
    elif indices(keys, "hybrid_layer_ids", layers=layers) not in (None, {i for i, k in enumerate(kinds) if k == BOTH}):
        raise keys.wrong("hybrid_layer_ids", "the layers that layers_block_type calls hybrid")
    heads = keys.count("num_attention_heads", default=32, source=default)
    stored = keys.count("num_key_value_heads", default=heads, source="as many as num_attention_heads")
    dim = 2 * keys.count("hidden_size") // heads
    if keys.get("attention_head_dim") not in (None, dim):
        raise keys.wrong("attention_head_dim", f"2 x hidden_size / num_attention_heads ({dim}), as the class takes it")
    keys.rename({"mamba_d_state": ("state_size",)})
    state = states.mamba2(
        width=mamba_width(keys, expand="mamba_expand"),
        groups=keys.count("mamba_ngroups", default=1, source=default),
        state=keys.count("mamba_d_state", default=64, source=default),
        kernel=keys.count("mamba_d_conv", default=4, source=default),
        codec=states.state_codec(keys),
    )
    attention = Attention(kv_heads=stored, key_dim=dim, value_dim=dim)
    own(keys, "n_mamba_heads", "kv_channels", prefixes=_MIXER_KEYS)
    context = longest(keys, default=4096)
    if keys.flag("use_long_context", default=False):
        context = 16384
    return reading(keys, _layers(kinds, attention=attention, state=state), max_context=context)


def _mamba2_of(keys: ConfigKeys, *, width: int, size: int) -> State:
    """The Mamba-2 layer of Bamba, Granite 4 and Falcon-H1: one set of names and of defaults.

    The heads are the class's to check; their number changes no byte.
    """
    default = class_default(keys)
    state = states.mamba2(
        width=width,
        groups=keys.count("mamba_n_groups", default=1, source=default),
        state=keys.count("mamba_d_state", default=size, source=default),
        kernel=keys.count("mamba_d_conv", default=4, source=default),
        codec=states.state_codec(keys),
    )
    own(keys, prefixes=_MIXER_KEYS)
    heads, dim = keys.get("mamba_n_heads"), keys.get("mamba_d_head")
    if isinstance(heads, int) and isinstance(dim, int) and heads * dim != width:
        raise keys.wrong("mamba_n_heads", f"heads of mamba_d_head ({dim}) that make up the inner width ({width})")
    return state


def _bamba(keys: ConfigKeys) -> Reading:
    """Bamba: attention in the layers that ``attn_layer_indices`` names, Mamba-2 in the others.

    Source: BambaConfig of transformers.
    """
    layers = number_of_layers(keys)
    kinds = listed(keys, "layers_block_type", "layer_types", layers=layers)
    picked = indices(keys, "attn_layer_indices", layers=layers)
    if kinds is None and picked is None:
        raise UnsupportedModel(
            f"{keys.name}: attn_layer_indices is missing; without it no layer would be attention, which no published "
            f"model means: add it, or --assume attn_layer_indices=[]",
            key="attn_layer_indices",
        )
    if picked is not None:
        given, kinds = kinds, split(layers, picked)
        if given not in (None, kinds):
            raise keys.wrong("attn_layer_indices", "the layers that layers_block_type calls attention")
    assert kinds is not None
    attention = _attention(keys, kv_heads=8)
    state = _mamba2_of(keys, width=mamba_width(keys, expand="mamba_expand"), size=256)
    return reading(keys, _layers(kinds, attention=attention, state=state), max_context=longest(keys, default=262144))


def _granite(keys: ConfigKeys) -> Reading:
    """Granite 4, hybrid or dense: attention or Mamba-2, as ``layer_types`` lists them.

    Source: GraniteMoeHybridConfig of transformers, whose default (Mamba-2 alone) no published file means.
    """
    layers = number_of_layers(keys)
    kinds = listed(keys, "layer_types", "layers_block_type", layers=layers)
    if kinds is None:
        kinds = _counted(keys, layers)
    attention = _attention(keys, kv_heads=None)
    if RECURRENT not in kinds:
        own(keys, prefixes=_MIXER_KEYS)
        return reading(keys, [attention] * layers, max_context=longest(keys, default=2048))
    state = _mamba2_of(keys, width=mamba_width(keys, expand="mamba_expand"), size=256)
    return reading(keys, _layers(kinds, attention=attention, state=state), max_context=longest(keys, default=2048))


def _counted(keys: ConfigKeys, layers: int) -> list[str]:
    """Kinds from numbers of layers by kind, which extracts give; on their order no byte depends."""
    counts = keys.section("layer_type_counts")
    if keys.get("layer_type_counts") is None:
        raise missing_pattern(keys, "layer_types", "it names each layer mamba or attention")
    attention, mamba = (counts.count(name, least=0) for name in ("attention", "mamba"))
    if attention + mamba != layers:
        raise keys.wrong("layer_type_counts", f"mamba and attention layers that make up the {layers}")
    keys.note("layer_types", None, "left out: on the order of the layers no byte depends")
    return [FULL] * attention + [RECURRENT] * mamba


def _falcon_h1(keys: ConfigKeys) -> Reading:
    """Falcon-H1: attention and Mamba-2 side by side in every layer; a null ``mamba_d_ssm`` means the expanded width.

    Source: FalconH1Config of transformers.
    """
    layers = number_of_layers(keys)
    attention = _attention(keys, kv_heads=8)
    if "mamba_d_ssm" in keys and keys.get("mamba_d_ssm") is None:
        width = mamba_width(keys, expand="mamba_expand")
    else:
        width = keys.count("mamba_d_ssm", default=1024, source=class_default(keys))
    state = _mamba2_of(keys, width=width, size=256)
    return reading(keys, [Parallel(parts=(attention, state))] * layers, max_context=longest(keys, default=8192))


def _nemotron_h(keys: ConfigKeys) -> Reading:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2, attention or feed-forward, a letter or a word a layer.

    The pattern alone tells how many layers there are, and some files leave the number out. Mamba's width is its heads',
    whatever ``expand`` says. Source: NemotronHConfig and NemotronHMamba2Mixer of transformers.
    """
    default = class_default(keys)
    pattern = "hybrid_override_pattern"
    spelt = spelled(keys, pattern, _LETTERS)
    kinds = listed(keys, "layers_block_type", "layer_types", layers=None, words=_NEMOTRON)
    if kinds is not None and spelt not in (None, kinds):
        raise keys.wrong(pattern, "the same as layers_block_type")
    kinds = kinds or spelt
    if kinds is None:
        raise keys.missing(pattern)
    if keys.get("num_hidden_layers") is None:
        keys.set("num_hidden_layers", len(kinds))
        keys.note("num_hidden_layers", len(kinds), "length of the pattern of layers")
    elif number_of_layers(keys) != len(kinds):
        raise keys.wrong("num_hidden_layers", f"{len(kinds)}, the length of the pattern of layers")
    keys.rename({"head_dim": ("attention_head_dim",)})
    if keys.get("sliding_window") is not None:
        raise keys.unread("sliding_window", "engines differ: vLLM has a window then, transformers none; --assume null")
    attention = _attention(keys, kv_heads=8, head_dim=128)
    keys.rename({"n_groups": ("mamba_n_groups",), "conv_kernel": ("mamba_d_conv",)})
    heads = keys.count("mamba_num_heads", default=128, source=default)
    state = states.mamba2(
        width=heads * keys.count("mamba_head_dim", default=64, source=default),
        groups=keys.count("n_groups", default=8, source=default),
        state=keys.count("ssm_state_size", default=128, source=default),
        kernel=keys.count("conv_kernel", default=4, source=default),
        codec=states.state_codec(keys),
    )
    own(keys, prefixes=_MIXER_KEYS)
    layers = _layers(kinds, attention=attention, state=state)
    draft = _layers(_nemotron_draft(keys), attention=attention, state=state)
    return reading(keys, layers, max_context=longest(keys, default=4096), draft=draft)


def _nemotron_draft(keys: ConfigKeys) -> list[str]:
    """Kinds of the draft layers; source: NemotronHConfig, and nemotron_h_mtp.py of vLLM for their number."""
    steps = draft_count(keys)
    spelt = spelled(keys, "mtp_hybrid_override_pattern", _LETTERS)
    kinds = listed(keys, "mtp_layers_block_type", layers=None, words=_NEMOTRON) or spelt
    if not steps:
        return []
    if kinds is None:
        kinds = [FULL, NONE]
        keys.note("mtp_layers_block_type", ["full_attention", "moe"], class_default(keys))
    return kinds * steps


def _plamo2(keys: ConfigKeys) -> Reading:
    """PLaMo 2: Mamba-2 without convolved ``B`` and ``C``, attention at the middle of every ``mamba_step`` layers.

    Attention has a window except in ``full_attention_idx``. Sources: modeling_plamo.py of pfnet/plamo-2-8b; plamo2.py
    of vLLM 0.10 and of mlx-lm.
    """
    default = "default of plamo2"
    layers = number_of_layers(keys)
    step = keys.count("mamba_step", default=2, least=2, source=default)
    if not keys.flag("mamba_enabled", default=True):
        kinds = [FULL] * layers
    elif layers <= step // 2:
        kinds = split(layers, {layers - 1})
    else:
        kinds = split(layers, range(step // 2, layers, step))
    dim = keys.count("hidden_size_per_head", default=128, source=default)
    stored = keys.count("num_key_value_heads")
    window = keys.count("attention_window_size", default=2048, source=default)
    unlimited = indices(keys, "full_attention_idx", layers=layers) or set()
    width = keys.count("mamba_num_heads", default=64, source=default) * dim
    state = states.mamba2(
        width=width,
        groups=0,
        state=keys.count("mamba_d_state", default=64, source=default),
        kernel=keys.count("mamba_d_conv", default=4, source=default),
        codec=states.state_codec(keys),
    )
    found: list[Layer] = [
        state
        if kind == RECURRENT
        else Attention(kv_heads=stored, key_dim=dim, value_dim=dim, window=None if index in unlimited else window)
        for index, kind in enumerate(kinds)
    ]
    own(keys, prefixes=_MIXER_KEYS)
    return reading(keys, found, max_context=longest(keys, default=10 * 2**20))


def _phi4_flash(keys: ConfigKeys) -> Reading:
    """Phi-4-mini-flash (SambaY): Mamba-1 and windowed attention, then one full layer whose cache the rest reads.

    The second half keeps nothing: its attention reads the full layer in the middle, and its gated memory units the
    output of the last Mamba layer. Source: configuration_phi4flash.py and SambaYCache in modeling_phi4flash.py of
    microsoft/Phi-4-mini-flash-reasoning.
    """
    default = "default of phi4flash"
    layers = number_of_layers(keys)
    if keys.count("mb_per_layer", default=2, source=default) != 2 or layers % 4:
        raise keys.unread("mb_per_layer", f"2 is described, in a multiple of four layers; there are {layers}")
    window = keys.count("sliding_window", default=2047, source=default)
    full = _attention(keys, kv_heads=4)
    sliding = Attention(kv_heads=full.kv_heads, key_dim=full.key_dim, value_dim=full.value_dim, window=window)
    state = states.mamba(
        width=mamba_width(keys, expand="mamba_expand"),
        state=keys.count("mamba_d_state", default=16, source=default),
        kernel=keys.count("mamba_d_conv", default=4, source=default),
        codec=states.state_codec(keys),
    )
    own(keys, prefixes=_MIXER_KEYS)
    middle = layers // 2 + 1
    found: list[Layer] = [sliding if index % 2 else state for index in range(middle)]
    found.append(full)
    found += [Shared(source=middle) if index % 2 else Nothing() for index in range(middle + 1, layers)]
    return reading(keys, found, max_context=longest(keys, default=4096))


MAMBA_HYBRIDS: dict[str, Reader] = {
    "jamba": _jamba,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "plamo2": _plamo2,
    "phi4flash": _phi4_flash,
}
