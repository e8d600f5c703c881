"""Networks with parts that no other family has: Gemma 3n and 4, DeepSeek-V4.

Source of every shape: the family's classes in transformers; names are those of the published checkpoints.
"""

from collections.abc import Callable

from kvist.spec.layers import Attention, Compressed, Layer, Shared
from kvist.spec.parameters.decoders import Heads, Style, finish, mlp
from kvist.spec.parameters.experts import experts
from kvist.spec.parameters.inventory import Inventory, Keys, Network

_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def _gemma_attention(net: Network, keys: Keys, memory: Layer) -> None:
    """Attention of a layer that may read another's keys and values, and whose values may be its keys."""
    own = memory
    if isinstance(memory, Shared):
        own = keys.layers[memory.source]
    if not isinstance(own, Attention):
        raise keys.unknown("a layer has no keys and values", "layer_types")
    hidden, query = keys.whole("hidden_size"), keys.whole("num_attention_heads", least=1)
    heads = Heads(query=query, kv=own.kv_heads, width=own.key_dim)
    bias = keys.flag("attention_bias", default=False)
    net.linear("q_proj", query * heads.width, hidden, bias=bias, units=query)
    net.norm("q_norm", heads.width)
    if not isinstance(memory, Shared):
        net.linear("k_proj", heads.kv * heads.width, hidden, bias=bias, units=heads.kv)
        net.norm("k_norm", heads.width)
        if own.window is not None or not keys.flag("attention_k_eq_v", default=False):
            net.linear("v_proj", heads.kv * heads.width, hidden, bias=bias, units=heads.kv)
    net.linear("o_proj", hidden, query * heads.width, bias=bias, units=query, rows=True)


def _per_layer_inputs(net: Network, keys: Keys, layers: int) -> None:
    """A second table that gives each layer an input of its own, and what mixes it in."""
    width = keys.whole("hidden_size_per_layer_input", default=0)
    if width:
        table = keys.whole("vocab_size_per_layer_input", default=keys.whole("vocab_size"))
        net.add("embed_tokens_per_layer", table, layers * width, role="embedding", units=table)
        net.linear("per_layer_model_projection", layers * width, keys.whole("hidden_size"))
        net.norm("per_layer_projection_norm", width)


def _per_layer_input_of(net: Network, keys: Keys) -> None:
    hidden, width = keys.whole("hidden_size"), keys.whole("hidden_size_per_layer_input", default=0)
    if width:
        net.linear("per_layer_input_gate", width, hidden)
        net.linear("per_layer_projection", hidden, width)
        net.norm("post_per_layer_input_norm", hidden)


def _gemma4(keys: Keys) -> Inventory:
    """Gemma 4: layers that share a cache, per-layer inputs, and an MLP with experts beside it."""
    hidden, vocab, layers = keys.whole("hidden_size"), keys.whole("vocab_size"), len(keys.layers)
    net = Network()
    net.outside("model")
    net.add("embed_tokens", vocab, hidden, role="embedding", units=vocab)
    _per_layer_inputs(net, keys, layers)
    for memory in dict.fromkeys(keys.layers):
        net.layer("model.layers.#", [index for index, other in enumerate(keys.layers) if other == memory])
        net.add("layer_scalar", 1)
        for name in _GEMMA_NORMS:
            net.norm(name, hidden)
        _per_layer_input_of(net, keys)
        net.part("self_attn", block="attention")
        _gemma_attention(net, keys, memory)
        wide = isinstance(memory, Shared) and keys.flag("use_double_wide_mlp", default=False)
        net.part("mlp", block="mlp")
        mlp(net, hidden, keys.whole("intermediate_size") * (2 if wide else 1), keys, Style())
        if keys.flag("enable_moe_block", default=False):
            _gemma_experts(net, keys)
    return finish(net, keys, Style(tied=True))


def _gemma_experts(net: Network, keys: Keys) -> None:
    hidden, count = keys.whole("hidden_size"), keys.whole("num_experts", least=1)
    net.part("", block="mlp")
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        net.norm(name, hidden)
    net.add("router.scale", hidden)
    net.add("router.per_expert_scale", count)
    net.linear("router.proj", count, hidden, role="router")
    used = min(count, keys.whole("top_k_experts", least=1))
    width = keys.whole("moe_intermediate_size")
    mlp(net, hidden, width, keys, Style(), within="experts.*.", copies=count, used=used)


def _gemma3n(keys: Keys) -> Inventory:
    """Gemma 3n: several streams beside the hidden one, low-rank bypasses, per-layer inputs."""
    hidden, vocab, layers = keys.whole("hidden_size"), keys.whole("vocab_size"), len(keys.layers)
    streams, rank = keys.whole("altup_num_inputs", default=4), keys.whole("laurel_rank", default=64)
    widths = keys.get("intermediate_size", 16384)
    widths = widths if isinstance(widths, list) else [widths] * layers
    if len(widths) != layers or not all(isinstance(width, int) for width in widths):
        raise keys.unknown("intermediate_size is no width for each layer", "intermediate_size")
    net = Network()
    net.outside("model")
    net.add("embed_tokens", vocab, hidden, role="embedding", units=vocab)
    _per_layer_inputs(net, keys, layers)
    for number in range(1, streams):
        net.linear(f"altup_projections.{number}", hidden, hidden)
        net.linear(f"altup_unembed_projections.{number}", hidden, hidden)
    for memory, width in dict.fromkeys(zip(keys.layers, widths, strict=True)):
        alike = [index for index in range(layers) if (keys.layers[index], widths[index]) == (memory, width)]
        net.layer("model.layers.#", alike)
        for name in _GEMMA_NORMS:
            net.norm(name, hidden)
        _per_layer_input_of(net, keys)
        net.part("altup", block="altup")
        net.add("correct_output_scale", hidden)
        net.linear("correction_coefs", streams, streams, role="router")
        net.linear("prediction_coefs", streams * streams, streams, role="router")
        net.linear("modality_router", streams, hidden, role="router")
        net.norm("router_norm", hidden)
        net.part("laurel", block="laurel")
        net.linear("linear_left", rank, hidden)
        net.linear("linear_right", hidden, rank)
        net.norm("post_laurel_norm", hidden)
        net.part("self_attn", block="attention")
        _gemma_attention(net, keys, memory)
        net.part("mlp", block="mlp")
        mlp(net, hidden, width, keys, Style())
    return finish(net, keys, Style(tied=True))


def _deepseek_v4(keys: Keys) -> Inventory:
    """DeepSeek-V4: compressed attention, low-rank output, several residual streams, experts chosen by word at first."""
    hidden, vocab, layers = keys.whole("hidden_size"), keys.whole("vocab_size"), len(keys.layers)
    streams = keys.whole("hc_mult", least=1)
    hashed = _hashed(keys)
    net = Network()
    net.outside()
    net.add("embed", vocab, hidden, role="embedding", units=vocab)
    for memory, by_word in dict.fromkeys(zip(keys.layers, hashed, strict=True)):
        net.layer("layers.#", [i for i in range(layers) if (keys.layers[i], hashed[i]) == (memory, by_word)])
        for name in ("attn_norm", "ffn_norm"):
            net.norm(name, hidden)
        mixing = streams * (streams + 2)
        for name in ("hc_attn", "hc_ffn"):
            net.add(f"{name}_fn", mixing, streams * hidden)
            net.add(f"{name}_base", mixing)
            net.add(f"{name}_scale", 3)
        net.part("attn", block="attention")
        _compressed_attention(net, keys, memory)
        net.part("ffn", block="mlp")
        shared = keys.whole("moe_intermediate_size") * keys.whole("n_shared_experts", default=0)
        experts(net, keys, correction=not by_word, width=keys.whole("moe_intermediate_size"), shared=shared)
        if by_word:
            net.add("gate.tid2eid", vocab, keys.whole("num_experts_per_tok"))
    net.outside()
    net.add("hc_head_fn", streams, streams * hidden)
    net.add("hc_head_base", streams)
    net.add("hc_head_scale", 1)
    return finish(net, keys, Style())


def _hashed(keys: Keys) -> list[bool]:
    """Which layers choose their experts by the word alone."""
    layers = len(keys.layers)
    if "mlp_layer_types" in keys:
        return [kind == "hash_moe" for kind in keys.listed("mlp_layer_types", layers)]
    first = keys.whole("num_hash_layers", default=0)
    return [index < first for index in range(layers)]


def _compressed_attention(net: Network, keys: Keys, memory: Layer) -> None:
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", least=1)
    width, low = keys.whole("head_dim", least=1), keys.whole("q_lora_rank", least=1)
    groups, rank = keys.whole("o_groups", least=1), keys.whole("o_lora_rank", least=1)
    net.add("attn_sink", heads, units=heads)
    net.linear("wq_a", low, hidden)
    net.norm("q_norm", low)
    net.linear("wq_b", heads * width, low, units=heads)
    net.linear("wkv", width, hidden)
    net.norm("kv_norm", width)
    net.linear("wo_a", groups * rank, heads * width // groups, units=groups)
    net.linear("wo_b", hidden, groups * rank, units=groups, rows=True)
    if not isinstance(memory, Compressed):
        return
    # Where an indexer picks among entries, these overlap: each is made from two halves.
    sparse = memory.indexer is not None
    _compressor(net, "compressor", memory.ratio, hidden, width, halves=2 if sparse else 1)
    if sparse:
        dim, count = keys.whole("index_head_dim", least=1), keys.whole("index_n_heads", least=1)
        _compressor(net, "indexer.compressor", memory.ratio, hidden, dim, halves=2)
        net.linear("indexer.wq_b", count * dim, low)
        net.linear("indexer.weights_proj", count, hidden, role="router")


def _compressor(net: Network, name: str, ratio: int, hidden: int, width: int, *, halves: int) -> None:
    net.add(f"{name}.ape", ratio, halves * width)
    net.linear(f"{name}.wkv", halves * width, hidden)
    net.linear(f"{name}.wgate", halves * width, hidden)
    net.norm(f"{name}.norm", width)


SPECIAL: dict[str, Callable[[Keys], Inventory]] = {
    "deepseek_v4": _deepseek_v4,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4,
}
