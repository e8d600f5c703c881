"""Decoders with experts, and with latent attention.

A token passes through ``num_experts_per_tok`` of a layer's experts, and through the shared ones. Source of every shape:
the family's classes in transformers; names are those of the published checkpoints.
"""

from collections.abc import Callable
from dataclasses import replace

from kvist.spec.parameters.decoders import Heads, Style, decoder, dense_mlp, grouped_attention, mlp, project, switched
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
    with_experts = Network()
    with_experts.enter(f"{net.prefix}experts.*", layer=net.layer, block=net.block)
    mlp(with_experts, hidden, width, keys, style, copies=count, used=used)
    if shared:
        with_experts.enter(f"{net.prefix}{shared_name}", layer=net.layer, block=net.block)
        mlp(with_experts, hidden, shared, keys, replace(style, mlp_bias=False))
        if shared_gate:
            with_experts.enter(net.prefix.removesuffix("."), layer=net.layer, block=net.block)
            with_experts.linear(f"{shared_name}_gate", 1, hidden, role="router")
    net.tensors.extend(with_experts.tensors)


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


def _is_dense(keys: Keys, index: int) -> bool:
    if "mlp_layer_types" in keys:
        return bool(keys.listed("mlp_layer_types", index + 1)[index] == "dense")
    every = keys.whole("moe_layer_freq", default=1, least=1)
    return index < keys.whole("first_k_dense_replace", default=0) or index % every != 0


def _deepseek(*, correction: bool, style: Style) -> Callable[[Keys], Inventory]:
    """Dense layers first, then experts and shared ones of the same width."""

    def feed_forward(net: Network, keys: Keys, style: Style, index: int) -> None:
        if _is_dense(keys, index):
            dense_mlp(net, keys, style, index)
        else:
            width = keys.whole("moe_intermediate_size")
            experts(net, keys, correction=correction, shared=width * keys.whole("n_shared_experts", default=0))

    return lambda keys: decoder(keys, replace(style, feed_forward=feed_forward))


def _mixtral(net: Network, keys: Keys, style: Style, index: int) -> None:
    net.enter(f"model.layers.{index}.block_sparse_moe", layer=index, block="mlp")
    experts(net, keys, width=keys.whole("intermediate_size"))


def _minimax_m2(net: Network, keys: Keys, style: Style, index: int) -> None:
    net.enter(f"model.layers.{index}.block_sparse_moe", layer=index, block="mlp")
    experts(net, keys, width=keys.whole("intermediate_size"), correction=True)


def qwen_experts(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Experts on every ``decoder_sparse_step``-th layer; Qwen2-MoE and Qwen3-Next share one expert, gated."""
    dense = keys.get("mlp_only_layers", [])
    step = keys.whole("decoder_sparse_step", default=1, least=1)
    if index in dense or (index + 1) % step:
        dense_mlp(net, keys, style, index)
        return
    shared = keys.whole("shared_expert_intermediate_size", default=0)
    experts(
        net, keys, width=keys.whole("moe_intermediate_size"), shared=shared, shared_name="shared_expert",
        shared_gate=shared > 0,
    )  # fmt: skip


def _plain(net: Network, keys: Keys, style: Style, index: int) -> None:
    experts(net, keys)


def _granite(net: Network, keys: Keys, style: Style, index: int) -> None:
    net.enter(f"model.layers.{index}.block_sparse_moe", layer=index, block="mlp")
    experts(net, keys, router="router", width=keys.whole("intermediate_size"))
    shared = keys.whole("shared_intermediate_size", default=0)
    if shared:
        net.enter(f"model.layers.{index}.shared_mlp", layer=index, block="mlp")
        mlp(net, keys.whole("hidden_size"), shared, keys, Style())


def _gpt_oss_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Grouped-query attention with a sink a head."""
    grouped_attention(net, keys, style, index)
    net.add("sinks", keys.whole("num_attention_heads"), units=keys.whole("num_attention_heads"))


def _gpt_oss(net: Network, keys: Keys, style: Style, index: int) -> None:
    experts(net, keys, router="router", router_bias=True, expert_bias=True, width=keys.whole("intermediate_size"))


def _llama4(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Experts and a shared one on every ``interleave_moe_layer_step``-th layer."""
    listed = keys.get("moe_layers")
    step = keys.whole("interleave_moe_layer_step", default=1, least=1)
    net.enter(f"model.layers.{index}.feed_forward", layer=index, block="mlp")
    if index in listed if isinstance(listed, list) else not (index + 1) % step:
        width = keys.whole("intermediate_size")
        experts(net, keys, router="router", width=width, shared=width, shared_name="shared_expert")
    else:
        mlp(net, keys.whole("hidden_size"), keys.whole("intermediate_size_mlp"), keys, Style())


def _ernie(net: Network, keys: Keys, style: Style, index: int) -> None:
    first, last = keys.whole("moe_layer_start_index", default=1), keys.get("moe_layer_end_index", -1)
    last = keys.whole("num_hidden_layers") - 1 if last == -1 else last
    if first <= index <= last and not (index + 1) % keys.whole("moe_layer_interval", default=1, least=1):
        width = keys.whole("moe_intermediate_size")
        shared = width * keys.whole("moe_num_shared_experts", default=0)
        experts(net, keys, correction=True, expert_bias=switched(keys, style.mlp_bias), shared=shared)
    else:
        dense_mlp(net, keys, style, index)


def _hunyuan(net: Network, keys: Keys, style: Style, index: int) -> None:
    used = keys.get("moe_topk", 1)
    used = used[index] if isinstance(used, list) else used
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
            "num_hidden_layers": keys.whole("n_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": attention.whole("kv_n_heads", least=1),
            "moe_num_experts": feed_forward.whole("moe_num_experts", least=1),
            "moe_topk": feed_forward.whole("moe_top_k", least=1),
            "intermediate_size": feed_forward.whole("ffn_hidden_size"),
            "tie_word_embeddings": keys.flag("tie_word_embeddings", default=False),
        }
    )
    return decoder(flat, Style(feed_forward=_plain))


def _mimo_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """MiMo-V2: sliding layers have twice the KV heads and a sink a head; values are narrower than keys."""
    sliding = _is_sliding(keys, index)
    query = keys.whole("num_attention_heads", least=1)
    kv = keys.whole("num_key_value_heads", least=1)
    width, value = keys.whole("head_dim"), keys.whole("v_head_dim", default=keys.whole("head_dim"))
    if sliding:
        query = keys.whole("swa_num_attention_heads", default=query)
        kv = keys.whole("swa_num_key_value_heads", default=2 * kv)
        width = keys.whole("swa_head_dim", default=width)
        value = keys.whole("swa_v_head_dim", default=value)
    heads = Heads(query=query, kv=kv, width=width)
    project(net, keys.whole("hidden_size"), heads, keys, style, value_width=value)
    with_sink = "add_swa_attention_sink_bias" if sliding else "add_full_attention_sink_bias"
    if keys.flag(with_sink, default=sliding):
        net.add("attention_sink_bias", query, units=query)


def _is_sliding(keys: Keys, index: int) -> bool:
    if "layer_types" in keys:
        return bool(keys.listed("layer_types", keys.whole("num_hidden_layers"))[index] == "sliding_attention")
    return bool(keys.listed("hybrid_layer_pattern", keys.whole("num_hidden_layers"))[index])


def _mimo(net: Network, keys: Keys, style: Style, index: int) -> None:
    layers = keys.whole("num_hidden_layers")
    if "mlp_layer_types" in keys:
        sparse = keys.listed("mlp_layer_types", layers)[index] == "sparse"
    else:
        sparse = bool(keys.listed("moe_layer_freq", layers)[index])
    if sparse:
        experts(net, keys, correction=True, width=keys.whole("moe_intermediate_size"))
    else:
        dense_mlp(net, keys, style, index)


def _longcat(keys: Keys) -> Inventory:
    """LongCat-Flash: a layer has two attentions, two MLPs and experts, of which some are identities."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    net = Network()
    net.enter("model")
    net.add("embed_tokens", vocab, hidden, role="embedding", units=vocab)
    for index in range(keys.whole("num_layers")):
        prefix = f"model.layers.{index}"
        for part in range(2):
            net.enter(f"{prefix}.self_attn.{part}", layer=index, block=f"attention {part}")
            latent_attention(net, keys, Style(qkv_bias=_BIAS, out_bias=_BIAS), index)
            net.enter(f"{prefix}.mlps.{part}", layer=index, block=f"mlp {part}")
            mlp(net, hidden, keys.whole("ffn_hidden_size"), keys, Style())
            net.enter(prefix, layer=index, block="norm")
            net.norm(f"input_layernorm.{part}", hidden)
            net.norm(f"post_attention_layernorm.{part}", hidden)
        net.enter(f"{prefix}.mlp", layer=index, block="experts")
        real, idle = keys.whole("n_routed_experts", least=1), keys.whole("zero_expert_num", default=0)
        net.linear(
            "router.classifier", real + idle, hidden, bias=keys.flag("router_bias", default=False), role="router"
        )
        net.add("router.e_score_correction_bias", real + idle)
        net.enter(f"{prefix}.mlp.experts.*", layer=index, block="experts")
        used = keys.whole("moe_topk", least=1)
        mlp(net, hidden, keys.whole("expert_ffn_hidden_size"), keys, Style(), copies=real, used=used)
    net.enter("model")
    net.norm("norm", hidden)
    tied = keys.flag("tie_word_embeddings", default=False)
    if not tied:
        net.enter("")
        net.add("lm_head", vocab, hidden, role="head", units=vocab)
    return net.inventory(tied=tied)


def _of(style: Style) -> Callable[[Keys], Inventory]:
    return lambda keys: decoder(keys, style)


_BIAS = ("attention_bias", False)
_BIASED = Style(qkv_bias=_BIAS, out_bias=_BIAS)
_LATENT = replace(_BIASED, attention=latent_attention)
_INDEXED = replace(_BIASED, attention=indexed_latent_attention)
_DEEPSEEK = _deepseek(correction=True, style=_LATENT)
_SPARSE = _deepseek(correction=True, style=_INDEXED)
_ERNIE = ("use_bias", False)

EXPERTS: dict[str, Callable[[Keys], Inventory]] = {
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek(correction=False, style=_LATENT),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _SPARSE,
    "dots1": _deepseek(correction=True, style=replace(_BIASED, query_norm="head")),
    "ernie4_5_moe": _of(
        Style(qkv_bias=_ERNIE, out_bias=_ERNIE, mlp_bias=_ERNIE, head_bias=_ERNIE, tied=True, feed_forward=_ernie)
    ),
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
    "hunyuan_v1_moe": _of(replace(_BIASED, query_norm="head", feed_forward=_hunyuan)),
    "kimi_k2": _DEEPSEEK,
    "llama4_text": _of(replace(_BIASED, feed_forward=_llama4)),
    "longcat_flash": _longcat,
    "mimo_v2_flash": _of(Style(qkv_bias=_BIAS, attention=_mimo_attention, feed_forward=_mimo)),
    "minimax_m2": _of(Style(query_norm="full", query_norm_if=("use_qk_norm", True), feed_forward=_minimax_m2)),
    "mixtral": _of(Style(feed_forward=_mixtral)),
    "olmoe": _of(replace(_BIASED, query_norm="full", feed_forward=_plain)),
    "phimoe": _of(replace(_BIASED, norm_bias=True, head_bias=("lm_head_bias", False), feed_forward=_mixtral)),
    "qwen2_moe": _of(Style(qkv_bias=("qkv_bias", True), feed_forward=qwen_experts)),
    "qwen3_moe": _of(replace(_BIASED, query_norm="head", feed_forward=qwen_experts)),
}
