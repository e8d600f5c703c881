"""Models without attention, which keep the same bytes whatever the length: Mamba-1 and 2, RWKV-4 to 7, xLSTM."""

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.patterns import indices, longest, number_of_layers, own, reading
from kvist.spec.families.reading import Reader, Reading, class_default
from kvist.spec.layers import Attention, Layer, Parallel

_STATE_KEYS = ("time_step_rank", "ssm_cfg", "d_model")


def mamba_width(keys: ConfigKeys, *, expand: str = "expand") -> int:
    """Return the inner width, ``expand x hidden_size``."""
    factor = keys.number(expand, default=2, source=class_default(keys))
    width = factor * keys.count("hidden_size")
    if width != int(width):
        raise keys.wrong(expand, "a factor that makes hidden_size a whole number")
    return int(width)


def _mamba(keys: ConfigKeys) -> Reading:
    """Mamba-1; a printed ``intermediate_size`` wins over ``expand``, which Falcon-Mamba prints as 16 and means as 2.

    Sources: MambaConfig and FalconMambaConfig of transformers, which take it over from the file; vLLM.
    """
    default = class_default(keys)
    layers = number_of_layers(keys, "n_layer")
    if keys.get("intermediate_size") is None:
        keys.set("intermediate_size", mamba_width(keys))
    else:
        printed, told = keys.get("expand"), keys.count("intermediate_size")
        if isinstance(printed, int) and printed * keys.count("hidden_size") != told:
            keys.note("intermediate_size", told, f"printed; it wins over expand {printed} x hidden_size")
    state = states.mamba(
        width=keys.count("intermediate_size"),
        state=keys.count("state_size", default=16, source=default),
        kernel=keys.count("conv_kernel", default=4, source=default),
        codec=states.state_codec(keys),
    )
    own(keys, *_STATE_KEYS, prefixes=("time_step_",))
    return reading(keys, [state] * layers, max_context=longest(keys, default=None))


def _mamba2(keys: ConfigKeys) -> Reading:
    """Mamba-2.

    Source: Mamba2Config of transformers, which refuses heads that do not make up the inner width.
    """
    default = class_default(keys)
    layers = number_of_layers(keys, "n_layer")
    heads = keys.count("num_heads", default=128, source=default)
    width = heads * keys.count("head_dim", default=64, source=default)
    if width != mamba_width(keys):
        raise keys.wrong("num_heads", f"heads of head_dim that make up expand x hidden_size, {mamba_width(keys)}")
    if keys.get("intermediate_size") not in (None, width):
        raise UnsupportedModel(
            f"{keys.name}: intermediate_size is {keys.get('intermediate_size')!r}, the heads make {width}: engines "
            f"differ in which of them they take; --assume intermediate_size=null",
            key="intermediate_size",
        )
    state = states.mamba2(
        width=width,
        groups=keys.count("n_groups", default=8, source=default),
        state=keys.count("state_size", default=128, source=default),
        kernel=keys.count("conv_kernel", default=4, source=default),
        codec=states.state_codec(keys),
    )
    own(keys, *_STATE_KEYS, prefixes=("time_step_",))
    return reading(keys, [state] * layers, max_context=longest(keys, default=None))


def _mamba_ssm(keys: ConfigKeys) -> Reading:
    """The original files of Mamba and Mamba-2, which name no type; some layers may be attention with a convolution.

    Source: config_mamba.py, mamba_simple.py, mamba2.py and mha.py of the mamba_ssm package.
    """
    source = "default of the mamba_ssm package"
    layers = number_of_layers(keys, "n_layer")
    keys.set("hidden_size", keys.count("d_model"))
    own(keys, "d_intermediate")
    ssm = keys.section("ssm_cfg")
    kind = ssm.text("layer", default="Mamba1", source=source)
    width = ssm.count("expand", default=2, source=source) * keys.count("d_model")
    kernel = ssm.count("d_conv", default=4, source=source)
    if kind == "Mamba1":
        size = ssm.count("d_state", default=16, source=source)
        state = states.mamba(width=width, state=size, kernel=kernel)
    elif kind == "Mamba2":
        size = ssm.count("d_state", default=128, source=source)
        groups = ssm.count("ngroups", default=1, source=source)
        inner = width if ssm.get("d_ssm") is None else ssm.count("d_ssm")
        state = states.mamba2(width=inner, groups=groups, state=size, kernel=kernel)
    else:
        raise UnsupportedModel(
            f"{keys.name}: ssm_cfg.layer is {kind!r}; supported are Mamba1, Mamba2", key="ssm_cfg.layer"
        )
    attention = indices(keys, "attn_layer_idx", layers=layers) or set()
    kinds: list[Layer] = [state] * layers
    for index in attention:
        kinds[index] = _mamba_ssm_attention(keys.section("attn_cfg"), keys.count("d_model"))
    return reading(keys, kinds, max_context=longest(keys, default=None))


def _mamba_ssm_attention(keys: ConfigKeys, hidden: int) -> Layer:
    """Attention of the mamba_ssm package, with a convolution over queries, keys and values before it."""
    heads = keys.count("num_heads")
    stored = heads if keys.get("num_heads_kv") is None else keys.count("num_heads_kv")
    dim = hidden // heads if keys.get("head_dim") is None else keys.count("head_dim")
    attention = Attention(kv_heads=stored, key_dim=dim, value_dim=dim)
    kernel = keys.count("d_conv", default=0, least=0, source="default of the mamba_ssm package")
    if kernel < 2:
        return attention
    return Parallel(parts=(attention, states.short_conv(channels=dim * (heads + 2 * stored), kernel=kernel)))


def _rwkv4(keys: ConfigKeys) -> Reading:
    """RWKV-4: three f32 values a channel.

    Source: RwkvConfig and the state of RwkvModel in transformers, which allocates ``hidden_size`` for all of it.
    """
    layers = number_of_layers(keys)
    hidden = keys.count("hidden_size")
    if keys.get("attention_hidden_size") not in (None, hidden):
        raise UnsupportedModel(
            f"{keys.name}: attention_hidden_size is {keys.get('attention_hidden_size')!r}, hidden_size {hidden}; the "
            f"state of RWKV-4 is described for equal widths alone",
            key="attention_hidden_size",
        )
    state = states.rwkv(hidden=hidden, recurrent=3 * hidden)
    return reading(keys, [state] * layers, max_context=longest(keys, "context_length", default=1024))


def _rwkv_heads(keys: ConfigKeys) -> Reading:
    """RWKV-5, 6 and 7: a matrix a head; 7 also as fla publishes it, with ``head_dim`` and ``value_dim``.

    Sources: the configurations of RWKV-5 and 6 beside their weights, RWKV7Config of fla, ``Rwkv7StateShape`` of SGLang.
    """
    layers = number_of_layers(keys)
    hidden = keys.count("hidden_size")
    if keys.get("attn") is not None:
        raise UnsupportedModel(
            f"{keys.name}: attn is set: some layers are attention, which this family is not read with; --assume "
            f"attn=null reads all layers as recurrent",
            key="attn",
        )
    width = hidden if keys.get("attention_hidden_size") is None else keys.count("attention_hidden_size")
    name = "head_dim" if keys.get("head_size") is None and keys.get("head_dim") is not None else "head_size"
    size = keys.count(name, default=64, source=f"default of {keys.family}")
    if width % size:
        raise keys.wrong(name, f"a divisor of the width ({width})")
    heads = width // size
    # The configurations of RWKV-5 call the width of a head num_attention_heads.
    for count in ("num_heads", "num_attention_heads"):
        if keys.get(count) not in (None, heads, size):
            raise keys.wrong(count, f"{heads}, the width {width} / {size} of a head")
    values = keys.get("value_dim")
    wide = [width] * layers if values is None else [values] * layers if isinstance(values, int) else values
    if not isinstance(wide, list) or len(wide) != layers or not all(type(v) is int and v > 0 for v in wide):
        raise keys.wrong("value_dim", f"a width, or one for each of the {layers} layers")
    kinds = [states.rwkv(hidden=hidden, recurrent=size * value) for value in wide]
    return reading(keys, kinds, max_context=longest(keys, "context_length", "ctx_len", default=None))


def _xlstm(keys: ConfigKeys) -> Reading:
    """xLSTM with matrix memory; widths are rounded up to a multiple of 64.

    Source: xLSTMConfig of transformers.
    """
    default = class_default(keys)
    layers = number_of_layers(keys, "num_blocks")
    keys.rename({"hidden_size": ("embedding_dim",)})
    hidden = keys.count("hidden_size")
    heads = keys.count("num_heads", default=8, source=default)
    widths = {}
    for name, factor in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0)):
        width = -(-int(hidden * keys.number(name, default=factor, source=default)) // 64) * 64
        if width % heads:
            raise keys.wrong("num_heads", f"a divisor of the width {width} that {name} makes")
        widths[name] = width // heads
    state = states.mlstm(
        heads=heads,
        key_dim=widths["qk_dim_factor"],
        value_dim=widths["v_dim_factor"],
        codec=states.state_codec(keys, ("inference_state_dtype",)),
    )
    return reading(keys, [state] * layers, max_context=longest(keys, default=None))


RECURRENT_MODELS: dict[str, Reader] = {
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "mamba_ssm": _mamba_ssm,
    "rwkv": _rwkv4,
    "rwkv5": _rwkv_heads,
    "rwkv6": _rwkv_heads,
    "rwkv7": _rwkv_heads,
    "xlstm": _xlstm,
}
