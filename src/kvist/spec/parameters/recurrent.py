"""Decoders with recurrent layers, alone or beside attention; which layer is which, its memory says.

Source of every shape: the family's classes in transformers. A rank of tensor parallelism holds a share of the heads
or, in Mamba-1 and short convolutions, of the channels.
"""

from collections.abc import Callable
from dataclasses import replace

from kvist.spec.layers import Attention, Latent, State
from kvist.spec.parameters.decoders import Style, decoder, dense_mlp, finish, grouped_attention, heads_of, mlp, project
from kvist.spec.parameters.experts import experts, latent_attention, qwen_dense, qwen_experts
from kvist.spec.parameters.inventory import Inventory, Keys, Network

_Part = Callable[[Network, Keys], None]


def _mixed(recurrent: _Part) -> Callable[[Network, Keys, Style, int], None]:
    """Attention where a layer keeps keys and values, the recurrence where it keeps a state."""

    def mix(net: Network, keys: Keys, style: Style, index: int) -> None:
        if keys.keeps(index, Attention):
            grouped_attention(net, keys, style, index)
        if keys.keeps(index, State):
            recurrent(net, keys)

    return mix


def _mamba1(net: Network, keys: Keys, *, names: str, norms: bool, biases: tuple[str, str]) -> None:
    """Mamba: a projection to twice the width, a convolution, and a state of ``state_size`` a channel."""
    hidden = keys.whole("hidden_size")
    expand = keys.whole(f"{names}expand", default=2, least=1)
    width = expand * hidden if names else keys.whole("intermediate_size", default=expand * hidden)
    state = keys.whole("mamba_d_state" if names else "state_size", least=1)
    kernel = keys.whole("mamba_d_conv" if names else "conv_kernel", least=1)
    given = keys.get("mamba_dt_rank" if names else "time_step_rank", "auto")
    rank = -(-hidden // 16) if given == "auto" else keys.whole("mamba_dt_rank" if names else "time_step_rank")
    bias, conv_bias = keys.flag(biases[0], default=False), keys.flag(biases[1], default=True)
    net.linear("in_proj", 2 * width, hidden, bias=bias, units=width)
    net.add("conv1d", width, 1, kernel, units=width)
    net.add("conv1d.bias", width if conv_bias else 0, units=width)
    net.linear("x_proj", rank + 2 * state, width, units=width, rows=True)
    net.linear("dt_proj", width, rank, bias=True, units=width)
    net.add("A_log", width, state, units=width)
    net.add("D", width, units=width)
    net.linear("out_proj", hidden, width, bias=bias, units=width, rows=True)
    if norms:
        net.norm("dt_layernorm", rank)
        net.norm("b_layernorm", state)
        net.norm("c_layernorm", state)


def _mamba2(
    net: Network,
    keys: Keys,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
    bias: bool,
    out_bias: bool | None = None,
    conv_bias: bool,
    norm: bool = True,
) -> None:
    """Mamba-2: heads with one decay each; inputs and outputs of the state are shared by groups of heads."""
    hidden, width = keys.whole("hidden_size"), heads * head_dim
    channels = width + 2 * groups * state
    net.linear("in_proj", width + channels + heads, hidden, bias=bias, units=heads)
    net.add("conv1d", channels, 1, kernel, units=heads)
    net.add("conv1d.bias", channels if conv_bias else 0, units=heads)
    for name in ("dt_bias", "A_log", "D"):
        net.add(name, heads, units=heads)
    if norm:
        net.norm("norm", width, units=heads)
    net.linear("out_proj", hidden, width, bias=bias if out_bias is None else out_bias, units=heads, rows=True)


def _mamba2_of_hybrid(net: Network, keys: Keys, *, bias: str = "mamba_proj_bias", norm: bool = True) -> None:
    """The names of Bamba, Granite 4 and Falcon-H1."""
    inner = keys.whole("mamba_d_ssm", default=keys.whole("mamba_expand", default=2) * keys.whole("hidden_size"))
    heads = keys.whole("mamba_n_heads", default=128, least=1)
    _mamba2(
        net, keys, heads=heads, head_dim=inner // heads, groups=keys.whole("mamba_n_groups", default=1),
        state=keys.whole("mamba_d_state"), kernel=keys.whole("mamba_d_conv"), bias=keys.flag(bias, default=False),
        out_bias=keys.flag("projectors_bias", bias, default=False),
        conv_bias=keys.flag("mamba_conv_bias", default=True), norm=norm,
    )  # fmt: skip


def _gated_delta(net: Network, keys: Keys) -> None:
    """Gated delta net of Qwen3-Next and Qwen3.5, whose fused projections Qwen3.5 stores apart."""
    hidden = keys.whole("hidden_size")
    key_heads, value_heads = keys.whole("linear_num_key_heads", least=1), keys.whole("linear_num_value_heads", least=1)
    key = key_heads * keys.whole("linear_key_head_dim")
    value_dim = keys.whole("linear_value_head_dim")
    value = value_heads * value_dim
    net.linear("in_proj_qkvz", 2 * (key + value), hidden, units=key_heads)
    net.linear("in_proj_ba", 2 * value_heads, hidden, units=value_heads, role="router")
    net.add("conv1d", 2 * key + value, 1, keys.whole("linear_conv_kernel_dim"), units=key_heads)
    net.add("dt_bias", value_heads, units=value_heads)
    net.add("A_log", value_heads, units=value_heads)
    net.norm("norm", value_dim)
    net.linear("out_proj", hidden, value, units=value_heads, rows=True)


def _qwen_next(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Attention whose queries bring a gate as wide as themselves, or a gated delta net."""
    if not keys.keeps(index, Attention):
        net.part("linear_attn", block="attention")
        _gated_delta(net, keys)
        return
    heads, hidden = heads_of(keys), keys.whole("hidden_size")
    project(net, hidden, heads, keys, style)
    if keys.flag("attn_output_gate", default=True):
        net.linear("q_proj.gate", heads.query * heads.width, hidden, units=heads.query)


def _qwen_next_dense(keys: Keys, index: int) -> bool:
    return not keys.whole("num_experts", default=0) or qwen_dense(keys, index)


def _only_mamba(keys: Keys) -> Inventory:
    """Mamba, Falcon-Mamba and Mamba-2: one norm and one mixer a layer."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    net = Network()
    net.outside("backbone")
    net.add("embeddings", vocab, hidden, role="embedding", units=vocab)
    net.layer("backbone.layers.#", range(len(keys.layers)))
    net.norm("norm", hidden)
    net.part("mixer", block="attention")
    if keys.family == "mamba2":
        heads = keys.whole("num_heads", least=1)
        _mamba2(
            net, keys, heads=heads, head_dim=keys.whole("head_dim"), groups=keys.whole("n_groups"),
            state=keys.whole("state_size"), kernel=keys.whole("conv_kernel"),
            bias=keys.flag("use_bias", default=False), conv_bias=keys.flag("use_conv_bias", default=True),
        )  # fmt: skip
    else:
        _mamba1(net, keys, names="", norms=False, biases=("use_bias", "use_conv_bias"))
    return finish(net, keys, Style(tied=keys.family != "mamba2"))


def _nemotron_h(keys: Keys) -> Inventory:
    """Nemotron-H and Nemotron 3: a layer is a Mamba-2, an attention, an MLP or experts; none is gated."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    plain = Style(gated=False, mlp_bias=("mlp_bias", False))
    net = Network()
    net.outside("backbone")
    net.add("embeddings", vocab, hidden, role="embedding", units=vocab)
    kinds = _nemotron_kinds(keys)
    for kind in dict.fromkeys(kinds):
        indices = [index for index, other in enumerate(kinds) if other == kind]
        net.layer("backbone.layers.#", indices)
        net.norm("norm", hidden)
        net.part("mixer", block="attention" if kind in "M*" else "mlp")
        if kind == "M":
            _mamba2(
                net, keys, heads=keys.whole("mamba_num_heads", least=1), head_dim=keys.whole("mamba_head_dim"),
                groups=keys.whole("n_groups"), state=keys.whole("ssm_state_size"), kernel=keys.whole("conv_kernel"),
                bias=keys.flag("use_bias", default=False), conv_bias=keys.flag("use_conv_bias", default=True),
            )  # fmt: skip
        elif kind == "*":
            grouped_attention(net, keys, Style(), indices[0])
        elif kind == "-":
            dense_mlp(net, keys, plain)
        else:
            _nemotron_experts(net, keys, plain)
    return finish(net, keys, Style())


def _nemotron_kinds(keys: Keys) -> str:
    """``M``, ``*``, ``-`` or ``E`` for each layer; only the published list tells MLPs from experts."""
    layers = len(keys.layers)
    pattern = keys.get("hybrid_override_pattern")
    listed = list(pattern) if isinstance(pattern, str) else keys.listed("layers_block_type", layers)
    if len(listed) != layers:
        raise keys.unknown(
            f"hybrid_override_pattern has no letter for each of the {layers} layers", "layers_block_type"
        )
    kinds = ""
    for index, word in enumerate(listed):
        if keys.keeps(index, Attention):
            kinds += "*"
        elif keys.keeps(index, State):
            kinds += "M"
        else:
            kinds += "E" if word in ("E", "moe") else "-"
    return kinds


def _nemotron_experts(net: Network, keys: Keys, style: Style) -> None:
    """Experts, in Nemotron 3 Super behind a projection to a narrower width."""
    hidden, count = keys.whole("hidden_size"), keys.whole("n_routed_experts", least=1)
    inner = keys.whole("moe_latent_size", default=hidden)
    net.linear("gate", count, hidden, role="router")
    net.add("gate.e_score_correction_bias", count)
    if inner != hidden:
        net.linear("fc1_latent_proj", inner, hidden)
        net.linear("fc2_latent_proj", hidden, inner)
    used = min(count, keys.whole("num_experts_per_tok", least=1))
    width = keys.whole("moe_intermediate_size")
    mlp(net, inner, width, keys, replace(style, mlp_bias=False), within="experts.*.", copies=count, used=used)
    mlp(net, hidden, keys.whole("moe_shared_expert_intermediate_size"), keys, style, within="shared_experts.")


def _jamba_experts(net: Network, keys: Keys, style: Style) -> None:
    experts(net, keys, router="router", width=keys.whole("intermediate_size"))


def _jamba_dense(keys: Keys, index: int) -> bool:
    period, offset = keys.whole("expert_layer_period", default=2, least=1), keys.whole("expert_layer_offset", default=1)
    return keys.whole("num_experts", default=16) < 2 or index % period != offset


def _granite_feed_forward(net: Network, keys: Keys, style: Style) -> None:
    if keys.whole("num_local_experts", default=0):
        net.part("block_sparse_moe", block="mlp")
        experts(net, keys, router="router", width=keys.whole("intermediate_size"))
    net.part("shared_mlp", block="mlp")
    mlp(net, keys.whole("hidden_size"), keys.whole("shared_intermediate_size", default=1024), keys, Style())


def _falcon_h1(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Attention and Mamba-2 side by side in every layer."""
    grouped_attention(net, keys, style, index)
    net.part("mamba", block="mamba")
    _mamba2_of_hybrid(net, keys, norm=keys.flag("mamba_rms_norm", default=False))


def _lfm2_mixer(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Attention, or a short convolution between two gates."""
    if keys.keeps(index, Attention):
        grouped_attention(net, keys, style, index)
        return
    hidden, bias = keys.whole("hidden_size"), keys.flag("conv_bias", default=False)
    net.part("conv", block="attention")
    net.linear("in_proj", 3 * hidden, hidden, bias=bias, units=hidden)
    net.add("conv", hidden, 1, keys.whole("conv_L_cache", least=1), units=hidden)
    net.add("conv.bias", hidden if bias else 0, units=hidden)
    net.linear("out_proj", hidden, hidden, bias=bias, units=hidden, rows=True)


def _lfm2_mlp(net: Network, keys: Keys, style: Style) -> None:
    """An MLP whose width is cut to two thirds and rounded up, unless it is said to be the width itself."""
    width = keys.whole("intermediate_size", "block_ff_dim")
    if keys.flag("block_auto_adjust_ff_dim", default=True):
        multiple = keys.whole("block_multiple_of", default=256, least=1)
        factor = keys.get("block_ffn_dim_multiplier", 1.0)
        if not isinstance(factor, (int, float)) or not 0 < factor < 2**20:
            raise keys.unknown("block_ffn_dim_multiplier is no number", "block_ffn_dim_multiplier")
        width = -(-int(factor * (2 * width // 3)) // multiple) * multiple
    mlp(net, keys.whole("hidden_size"), width, keys, Style())


def _lfm2_experts(net: Network, keys: Keys, style: Style) -> None:
    experts(net, keys, width=keys.whole("moe_intermediate_size"))
    if keys.flag("use_expert_bias", default=True):
        net.add("expert_bias", keys.whole("num_experts"))


def _lfm2_dense(keys: Keys, index: int) -> bool:
    return index < keys.whole("num_dense_layers", default=2)


def _recurrent_gemma_mixer(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Attention, or a gated linear recurrence with block-diagonal gates."""
    if keys.keeps(index, Attention):
        grouped_attention(net, keys, style, index)
        return
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", least=1)
    width = keys.whole("lru_width", default=hidden)
    net.linear("linear_y", width, hidden, bias=True, units=heads)
    net.linear("linear_x", width, hidden, bias=True, units=heads)
    net.add("conv_1d", width, 1, keys.whole("conv1d_width", default=4), units=heads)
    net.add("conv_1d.bias", width, units=heads)
    net.add("rg_lru.recurrent_param", width, units=heads)
    for gate in ("input_gate", "recurrent_gate"):
        net.add(f"rg_lru.{gate}_weight", heads, width // heads, width // heads, units=heads)
        net.add(f"rg_lru.{gate}_bias", width, units=heads)
    net.linear("linear_out", hidden, width, bias=True, units=heads, rows=True)


def _recurrent_gemma_feed_forward(net: Network, keys: Keys, style: Style) -> None:
    mlp(net, keys.whole("hidden_size"), keys.whole("intermediate_size") // 2, keys, style)


def _lightning(net: Network, keys: Keys) -> None:
    """Linear attention of MiniMax-Text-01, with a gate on its output."""
    heads, hidden = heads_of(keys), keys.whole("hidden_size")
    width = heads.query * heads.width
    net.norm("norm", width, units=heads.query)
    net.linear("qkv_proj", 3 * width, hidden, units=heads.query)
    net.linear("output_gate", width, hidden, units=heads.query)
    net.linear("out_proj", hidden, width, units=heads.query, rows=True)


def _minimax_feed_forward(net: Network, keys: Keys, style: Style) -> None:
    net.part("block_sparse_moe", block="mlp")
    experts(net, keys, width=keys.whole("intermediate_size"))


def _kimi_mixer(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Latent attention, or Kimi Delta Attention: a delta net that forgets channel by channel."""
    if keys.keeps(index, Latent):
        latent_attention(net, keys, style, index)
        return
    part, hidden = keys.part("linear_attn_config"), keys.whole("hidden_size")
    heads, dim = part.whole("num_heads", least=1), part.whole("head_dim", least=1)
    width = heads * dim
    for name in ("q", "k", "v"):
        net.linear(f"{name}_proj", width, hidden, units=heads)
        net.add(f"{name}_conv1d", width, 1, part.whole("short_conv_kernel_size", least=1), units=heads)
    for name in ("f", "g"):
        net.linear(f"{name}_a_proj", dim, hidden)
        net.linear(f"{name}_b_proj", width, dim, units=heads)
    net.add("dt_bias", width, units=heads)
    net.add("A_log", heads, units=heads)
    net.linear("b_proj", heads, hidden, units=heads)
    net.norm("o_norm", dim)
    net.linear("o_proj", hidden, width, units=heads, rows=True)


def _kimi_experts(net: Network, keys: Keys, style: Style) -> None:
    width = keys.whole("moe_intermediate_size")
    net.part("block_sparse_moe", block="mlp")
    experts(net, keys, correction=True, width=width, shared=width * keys.whole("num_shared_experts", default=0))


def _kimi_dense(keys: Keys, index: int) -> bool:
    return index < keys.whole("first_k_dense_replace", default=0)


def _of(style: Style) -> Callable[[Keys], Inventory]:
    return lambda keys: decoder(keys, style)


def _jamba(net: Network, keys: Keys) -> None:
    _mamba1(net, keys, names="mamba_", norms=True, biases=("mamba_proj_bias", "mamba_conv_bias"))


_ATTENTION_BIAS = ("attention_bias", False)
_BIASED = Style(qkv_bias=_ATTENTION_BIAS, out_bias=_ATTENTION_BIAS)
_MLP_BIAS = ("mlp_bias", False)
_QWEN_NEXT = _of(
    replace(_BIASED, query_norm="head", attention=_qwen_next, feed_forward=qwen_experts, dense=_qwen_next_dense)
)
_LFM2 = Style(query_norm="head", tied=True, attention=_lfm2_mixer)

RECURRENT: dict[str, Callable[[Keys], Inventory]] = {
    "bamba": _of(replace(_BIASED, mlp_bias=_MLP_BIAS, attention=_mixed(_mamba2_of_hybrid))),
    "falcon_h1": _of(replace(_BIASED, mlp_bias=_MLP_BIAS, attention=_falcon_h1)),
    "falcon_mamba": _only_mamba,
    "granitemoehybrid": _of(replace(_BIASED, attention=_mixed(_mamba2_of_hybrid), feed_forward=_granite_feed_forward)),
    "jamba": _of(Style(attention=_mixed(_jamba), feed_forward=_jamba_experts, dense=_jamba_dense)),
    "kimi_linear": _of(replace(_BIASED, attention=_kimi_mixer, feed_forward=_kimi_experts, dense=_kimi_dense)),
    "lfm2": _of(replace(_LFM2, feed_forward=_lfm2_mlp)),
    "lfm2_moe": _of(replace(_LFM2, feed_forward=_lfm2_experts, dense=_lfm2_dense)),
    "mamba": _only_mamba,
    "mamba2": _only_mamba,
    "minimax": _of(Style(attention=_mixed(_lightning), feed_forward=_minimax_feed_forward)),
    "minimax_text_01": _of(Style(attention=_mixed(_lightning), feed_forward=_minimax_feed_forward)),
    "nemotron_h": _nemotron_h,
    "qwen3_5": _QWEN_NEXT,
    "qwen3_5_moe": _QWEN_NEXT,
    "qwen3_next": _QWEN_NEXT,
    "recurrent_gemma": _of(
        Style(
            qkv_bias=_ATTENTION_BIAS,
            out_bias=True,
            mlp_bias=True,
            tied=True,
            attention=_recurrent_gemma_mixer,
            feed_forward=_recurrent_gemma_feed_forward,
        )
    ),
}
