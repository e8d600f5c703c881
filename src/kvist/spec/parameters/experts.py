"""Decoders with experts, and with latent attention.

A token passes through ``num_experts_per_tok`` of a layer's experts, and through the shared ones. Source of every shape:
the family's classes in transformers; names are those of the published checkpoints.
"""

from collections.abc import Callable
from dataclasses import replace

from kvist.spec.layers import Attention
from kvist.spec.parameters.decoders import Heads, Style, decoder, finish, grouped_attention, mlp, project, switched
from kvist.spec.parameters.inventory import Inventory, Keys, Network

_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_WIDTH = ("moe_intermediate_size", "intermediate_size")


def experts(
    net: Network,
    keys: Keys,
    *,
    router: str = "gate",
    router_bias: bool = False,
    correction: bool = False,
    expert_bias: bool = False,
    width: int | None = None,
    shared: int = 0,
    shared_name: str = "shared_experts",
    shared_gate: bool = False,
) -> None:
    """Add a router, its experts of ``width`` and one shared expert of width ``shared``.

    Args:
        net: in the layer's feed-forward part.
        keys: the configuration.
        router: its name.
        router_bias: whether it has one.
        correction: whether a score is stored for each expert, by which load is balanced.
        expert_bias: whether the experts' matrices have biases.
        width: of one expert; by default as the configuration says.
        shared: width of what every token passes through; 0 where nothing is.
        shared_name: its name.
        shared_gate: whether it is gated.
    """
    hidden, count = keys.whole("hidden_size", "d_model"), keys.whole(*_COUNT, least=1)
    used = min(count, keys.whole(*_USED, least=1))
    width = keys.whole(*_WIDTH) if width is None else width
    net.linear(router, count, hidden, bias=router_bias, role="router")
    if correction:
        net.add(f"{router}.e_score_correction_bias", count)
    style = Style(mlp_bias=expert_bias)
    mlp(net, hidden, width, keys, style, within="experts.*.", copies=count, used=used)
    if shared:
        mlp(net, hidden, shared, keys, replace(style, mlp_bias=False), within=f"{shared_name}.")
        if shared_gate:
            net.linear(f"{shared_name}_gate", 1, hidden, role="router")


def latent_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Multi-head latent attention of DeepSeek-V2 and later; every rank has all of what makes the latent."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", least=1)
    nope, rope = keys.whole("qk_nope_head_dim"), keys.whole("qk_rope_head_dim")
    value, rank = keys.whole("v_head_dim"), keys.whole("kv_lora_rank", least=1)
    bias = switched(keys, style.qkv_bias)
    if "q_lora_rank" in keys:
        low = keys.whole("q_lora_rank", least=1)
        net.linear("q_a_proj", low, hidden, bias=bias)
        net.norm("q_a_layernorm", low)
        net.linear("q_b_proj", heads * (nope + rope), low, units=heads)
    else:
        net.linear("q_proj", heads * (nope + rope), hidden, units=heads)
    net.linear("kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
    net.norm("kv_a_layernorm", rank)
    net.linear("kv_b_proj", heads * (nope + value), rank, units=heads)
    net.linear("o_proj", hidden, heads * value, bias=switched(keys, style.out_bias), units=heads, rows=True)


def indexed_latent_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """The same with the indexer of DeepSeek-V3.2, which GLM-5 has on some layers only."""
    latent_attention(net, keys, style, index)
    kinds = keys.get("indexer_types")
    if isinstance(kinds, list) and index < len(kinds) and kinds[index] == "shared":
        return
    hidden, dim = keys.whole("hidden_size"), keys.whole("index_head_dim", least=1)
    heads = keys.whole("index_n_heads", least=1)
    net.linear("indexer.wq_b", heads * dim, keys.whole("q_lora_rank"))
    net.linear("indexer.wk", dim, hidden)
    net.norm("indexer.k_norm", dim, bias=True)
    net.linear("indexer.weights_proj", heads, hidden, role="router")


def _first_dense(keys: Keys, index: int) -> bool:
    if "mlp_layer_types" in keys:
        return bool(keys.listed("mlp_layer_types", index + 1)[index] == "dense")
    every = keys.whole("moe_layer_freq", default=1, least=1)
    return index < keys.whole("first_k_dense_replace", default=0) or index % every != 0


def _deepseek(*, correction: bool, style: Style) -> Callable[[Keys], Inventory]:
    """Dense layers first, then experts and shared ones of the same width."""

    def feed_forward(net: Network, keys: Keys, style: Style) -> None:
        width = keys.whole("moe_intermediate_size")
        experts(
            net,
            keys,
            correction=correction,
            shared=width * keys.whole("n_shared_experts", "num_shared_experts", default=0),
        )

    return lambda keys: decoder(keys, replace(style, feed_forward=feed_forward, dense=_first_dense))


def _mixtral(net: Network, keys: Keys, style: Style) -> None:
    net.part("block_sparse_moe", block="mlp")
    experts(net, keys, width=keys.whole("intermediate_size"))


def _minimax_m2(net: Network, keys: Keys, style: Style) -> None:
    net.part("block_sparse_moe", block="mlp")
    experts(net, keys, width=keys.whole("intermediate_size"), correction=True)


def qwen_experts(net: Network, keys: Keys, style: Style) -> None:
    """Experts; Qwen2-MoE and Qwen3-Next share one, gated."""
    shared = keys.whole("shared_expert_intermediate_size", default=0)
    experts(
        net, keys, width=keys.whole("moe_intermediate_size"), shared=shared, shared_name="shared_expert",
        shared_gate=shared > 0,
    )  # fmt: skip


def qwen_dense(keys: Keys, index: int) -> bool:
    """MLPs on the layers that are listed, and on all but every ``decoder_sparse_step``-th."""
    step = keys.whole("decoder_sparse_step", default=1, least=1)
    listed = keys.get("mlp_only_layers", [])
    if not isinstance(listed, (list, tuple)):
        raise keys.unknown("mlp_only_layers is no list", "mlp_only_layers")
    return index in listed or (index + 1) % step != 0


def _plain(net: Network, keys: Keys, style: Style) -> None:
    experts(net, keys)


def _granite(net: Network, keys: Keys, style: Style) -> None:
    net.part("block_sparse_moe", block="mlp")
    experts(net, keys, router="router", width=keys.whole("intermediate_size"))
    shared = keys.whole("shared_intermediate_size", default=0)
    if shared:
        net.part("shared_mlp", block="mlp")
        mlp(net, keys.whole("hidden_size"), shared, keys, Style())


def _gpt_oss_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Grouped-query attention with a sink a head."""
    grouped_attention(net, keys, style, index)
    net.add("sinks", keys.whole("num_attention_heads"), units=keys.whole("num_attention_heads"))


def _gpt_oss(net: Network, keys: Keys, style: Style) -> None:
    experts(net, keys, router="router", router_bias=True, expert_bias=True, width=keys.whole("intermediate_size"))


def _llama4(keys: Keys) -> Inventory:
    """Experts and a shared one on every ``interleave_moe_layer_step``-th layer; MLPs have a width of their own."""
    with_mlp = Keys({**keys.config, "intermediate_size": keys.get("intermediate_size_mlp")}, keys.layers)

    def feed_forward(net: Network, _: Keys, style: Style) -> None:
        net.part("feed_forward", block="mlp")
        width = keys.whole("intermediate_size")
        experts(net, keys, router="router", width=width, shared=width, shared_name="shared_expert")

    def dense(_: Keys, index: int) -> bool:
        listed = keys.get("moe_layers")
        if isinstance(listed, list):
            return index not in listed
        return (index + 1) % keys.whole("interleave_moe_layer_step", default=1, least=1) != 0

    return decoder(with_mlp, replace(_BIASED, feed_forward=feed_forward, dense=dense))


def _ernie(net: Network, keys: Keys, style: Style) -> None:
    shared = keys.whole("moe_intermediate_size") * keys.whole("moe_num_shared_experts", default=0)
    experts(net, keys, correction=True, expert_bias=switched(keys, style.mlp_bias), shared=shared)


def _ernie_dense(keys: Keys, index: int) -> bool:
    first, final = keys.whole("moe_layer_start_index", default=1), len(keys.layers) - 1
    last = final if keys.get("moe_layer_end_index") == -1 else keys.whole("moe_layer_end_index", default=final)
    return not first <= index <= last or (index + 1) % keys.whole("moe_layer_interval", default=1, least=1) != 0


def _hunyuan(net: Network, keys: Keys, style: Style) -> None:
    """Experts and a shared one; how many are chosen may be listed by layer, and then the first counts."""
    used = keys.get("moe_topk", 1)
    used = next(iter(used), None) if isinstance(used, list) else used
    width = keys.whole("intermediate_size")
    experts(
        net, Keys({**keys.config, "num_experts_per_tok": used}), width=width, shared=width, shared_name="shared_mlp"
    )


def _dbrx(keys: Keys) -> Inventory:
    """DBRX has its attention and experts in objects of their own."""
    attention, feed_forward = keys.part("attn_config"), keys.part("ffn_config")
    heads = keys.whole("n_heads", least=1)
    hidden = keys.whole("d_model")
    flat = Keys(
        {
            "model_type": "dbrx",
            "hidden_size": hidden,
            "vocab_size": keys.whole("vocab_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": attention.whole("kv_n_heads", least=1),
            "moe_num_experts": feed_forward.whole("moe_num_experts", least=1),
            "moe_topk": feed_forward.whole("moe_top_k", least=1),
            "intermediate_size": feed_forward.whole("ffn_hidden_size"),
            "tie_word_embeddings": keys.flag("tie_word_embeddings", default=False),
        },
        keys.layers,
    )
    return decoder(flat, Style(feed_forward=_plain))


def _mimo_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """MiMo-V2: sliding layers have KV heads of their own and a sink a head; values are narrower than keys."""
    memory = keys.layers[index]
    if not isinstance(memory, Attention):
        raise keys.unknown(f"layer {index} has no keys and values", "layer_types")
    sliding = memory.window is not None
    query = keys.whole("num_attention_heads", least=1)
    if sliding:
        query = keys.whole("swa_num_attention_heads", default=query)
    heads = Heads(query=query, kv=memory.kv_heads, width=memory.key_dim)
    project(net, keys.whole("hidden_size"), heads, keys, style, value_width=memory.value_dim)
    if keys.flag("add_swa_attention_sink_bias" if sliding else "add_full_attention_sink_bias", default=sliding):
        net.add("attention_sink_bias", query, units=query)


def _mimo(net: Network, keys: Keys, style: Style) -> None:
    experts(net, keys, correction=True, width=keys.whole("moe_intermediate_size"))


def _mimo_dense(keys: Keys, index: int) -> bool:
    if "mlp_layer_types" in keys:
        return bool(keys.listed("mlp_layer_types", len(keys.layers))[index] == "dense")
    return not keys.listed("moe_layer_freq", len(keys.layers))[index]


def _longcat(keys: Keys) -> Inventory:
    """LongCat-Flash: a layer has two attentions, two MLPs and experts, of which some are identities."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    net = Network()
    net.outside("model")
    net.add("embed_tokens", vocab, hidden, role="embedding", units=vocab)
    # Each of a layer's attentions has a cache of its own.
    net.layer("model.layers.#", range(min(keys.whole("num_layers"), len(keys.layers))))
    for half in ("0", "1"):
        net.part(f"self_attn.{half}", block=f"attention {half}")
        latent_attention(net, keys, _BIASED, 0)
        net.part(f"mlps.{half}", block=f"mlp {half}")
        mlp(net, hidden, keys.whole("ffn_hidden_size"), keys, Style())
        net.part("", block="norm")
        net.norm(f"input_layernorm.{half}", hidden)
        net.norm(f"post_attention_layernorm.{half}", hidden)
    net.part("mlp", block="experts")
    real, idle = keys.whole("n_routed_experts", least=1), keys.whole("zero_expert_num", default=0)
    bias = keys.flag("router_bias", default=False)
    net.linear("router.classifier", real + idle, hidden, bias=bias, role="router")
    net.add("router.e_score_correction_bias", real + idle)
    width, used = keys.whole("expert_ffn_hidden_size"), keys.whole("moe_topk", least=1)
    mlp(net, hidden, width, keys, Style(), within="experts.*.", copies=real, used=used)
    return finish(net, keys, Style())


def _of(style: Style) -> Callable[[Keys], Inventory]:
    return lambda keys: decoder(keys, style)


_BIAS = ("attention_bias", False)
_BIASED = Style(qkv_bias=_BIAS, out_bias=_BIAS)
_LATENT = replace(_BIASED, attention=latent_attention)
_INDEXED = replace(_BIASED, attention=indexed_latent_attention)
_DEEPSEEK = _deepseek(correction=True, style=_LATENT)
_SPARSE = _deepseek(correction=True, style=_INDEXED)
_ERNIE = ("use_bias", False)
_QWEN3 = _of(replace(_BIASED, query_norm="head", feed_forward=qwen_experts, dense=qwen_dense))

EXPERTS: dict[str, Callable[[Keys], Inventory]] = {
    "dbrx": _dbrx,
    "deepseek": _deepseek(correction=False, style=_BIASED),
    "deepseek_v2": _deepseek(correction=False, style=_LATENT),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _SPARSE,
    "dots1": _deepseek(correction=True, style=replace(_BIASED, query_norm="head")),
    "ernie4_5_moe": _of(
        Style(
            qkv_bias=_ERNIE,
            out_bias=_ERNIE,
            mlp_bias=_ERNIE,
            head_bias=_ERNIE,
            tied=True,
            feed_forward=_ernie,
            dense=_ernie_dense,
        )
    ),
    "exaone_moe": _deepseek(correction=True, style=Style(query_norm="head")),
    "glm4_moe": _deepseek(
        correction=True, style=Style(qkv_bias=_BIAS, query_norm="head", query_norm_if=("use_qk_norm", False))
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _SPARSE,
    "gpt_oss": _of(
        Style(
            qkv_bias=("attention_bias", True),
            out_bias=("attention_bias", True),
            attention=_gpt_oss_attention,
            feed_forward=_gpt_oss,
        )
    ),
    "granitemoe": _of(replace(_BIASED, feed_forward=_granite)),
    "granitemoeshared": _of(replace(_BIASED, feed_forward=_granite)),
    "hy_v3": _deepseek(correction=True, style=replace(_BIASED, query_norm="head")),
    "hunyuan_v1_moe": _of(replace(_BIASED, query_norm="head", feed_forward=_hunyuan)),
    "kimi_k2": _DEEPSEEK,
    "llama4_text": _llama4,
    "longcat_flash": _longcat,
    "mimo_v2_flash": _of(Style(qkv_bias=_BIAS, attention=_mimo_attention, feed_forward=_mimo, dense=_mimo_dense)),
    "mellum": _QWEN3,
    "minicpm3": _of(replace(_LATENT, mlp_bias=("mlp_bias", False), tied=True)),
    "minimax_m2": _of(Style(query_norm="full", query_norm_if=("use_qk_norm", True), feed_forward=_minimax_m2)),
    "mixtral": _of(Style(feed_forward=_mixtral)),
    "olmoe": _of(replace(_BIASED, query_norm="full", feed_forward=_plain)),
    "phimoe": _of(replace(_BIASED, norm_bias=True, head_bias=("lm_head_bias", False), feed_forward=_mixtral)),
    "sarvam_mla": _DEEPSEEK,
    "sarvam_moe": _deepseek(correction=True, style=Style(qkv_bias=_BIAS, query_norm="head")),
    "solar_open": _deepseek(correction=True, style=Style(qkv_bias=_BIAS)),
    "youtu": _of(replace(_LATENT, tied=True)),
    "qwen2_moe": _of(Style(qkv_bias=("qkv_bias", True), feed_forward=qwen_experts, dense=qwen_dense)),
    "qwen3_moe": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
