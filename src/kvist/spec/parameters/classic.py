"""Decoders of the GPT-2 generation and its contemporaries, which have names of their own for everything.

Source of every shape: the family's classes in transformers.
"""

from collections.abc import Callable

from kvist.spec.parameters.inventory import Inventory, Keys, Network


def _opened(keys: Keys, table: str, width: int) -> Network:
    """A network that begins with a table of words."""
    net, vocab = Network(), keys.whole("vocab_size")
    net.add(table, vocab, width, role="embedding", units=vocab)
    return net


def _blocks(
    net: Network,
    keys: Keys,
    *,
    hidden: int,
    heads: int,
    inner: int,
    kv_heads: int | None = None,
    attention_bias: bool = True,
    mlp_bias: bool = True,
    norms: int = 2,
    norm_bias: bool = True,
) -> None:
    """All layers: projections, two feed-forward matrices, norms; KV heads are as many as heads unless given."""
    kv_heads, width = heads if kv_heads is None else kv_heads, hidden // heads
    net.layer("layers.#", range(len(keys.layers)))
    net.part("attn", block="attention")
    net.linear("q_proj", heads * width, hidden, bias=attention_bias, units=heads)
    net.linear("k_proj", kv_heads * width, hidden, bias=attention_bias, units=kv_heads)
    net.linear("v_proj", kv_heads * width, hidden, bias=attention_bias, units=kv_heads)
    net.linear("o_proj", hidden, heads * width, bias=attention_bias, units=heads, rows=True)
    net.part("mlp", block="mlp")
    net.linear("up_proj", inner, hidden, bias=mlp_bias, units=inner)
    net.linear("down_proj", hidden, inner, bias=mlp_bias, units=inner, rows=True)
    net.part("", block="norm")
    for number in range(norms):
        net.norm(f"norm_{number + 1}", hidden, bias=norm_bias)


def _closed(
    net: Network, keys: Keys, norm: str, hidden: int, *, norm_bias: bool = True, width: int | None = None, tied: bool
) -> Inventory:
    """The network with its last norm, left out where ``hidden`` is 0, and its head, which reads ``width``."""
    net.outside()
    net.norm(norm, hidden, bias=norm_bias)
    tied = keys.flag("tie_word_embeddings", default=tied)
    if not tied:
        vocab = keys.whole("vocab_size")
        net.add("lm_head", vocab, hidden if width is None else width, role="head", units=vocab)
    return net.inventory(tied=tied)


def _gpt2(keys: Keys) -> Inventory:
    """GPT-2, and GPT-BigCode with one KV head."""
    hidden, heads = keys.whole("n_embd", "hidden_size"), keys.whole("n_head", "num_attention_heads", least=1)
    one = keys.family == "gpt_bigcode" and keys.flag("multi_query", default=True)
    net = _opened(keys, "wte", hidden)
    net.add("wpe", keys.whole("n_positions", "max_position_embeddings"), hidden, role="embedding")
    inner = keys.whole("n_inner", "intermediate_size", default=4 * hidden)
    _blocks(net, keys, hidden=hidden, heads=heads, kv_heads=1 if one else heads, inner=inner)
    return _closed(net, keys, "ln_f", hidden, tied=True)


def _gpt_neox(keys: Keys) -> Inventory:
    """Pythia, GPT-NeoX."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", least=1)
    bias = keys.flag("attention_bias", default=True)
    net = _opened(keys, "embed_in", hidden)
    _blocks(net, keys, hidden=hidden, heads=heads, inner=keys.whole("intermediate_size"), attention_bias=bias)
    return _closed(net, keys, "final_layer_norm", hidden, tied=False)


def _gptj(keys: Keys) -> Inventory:
    """GPT-J: one norm a layer, a head with a bias."""
    hidden, heads, vocab = keys.whole("n_embd"), keys.whole("n_head", least=1), keys.whole("vocab_size")
    net = _opened(keys, "wte", hidden)
    inner = keys.whole("n_inner", default=4 * hidden)
    _blocks(net, keys, hidden=hidden, heads=heads, inner=inner, attention_bias=False, norms=1)
    net.outside()
    net.add("lm_head.bias", vocab, units=vocab)
    return _closed(net, keys, "ln_f", hidden, tied=False)


def _opt(keys: Keys) -> Inventory:
    """OPT: learned positions, two of them for padding; the smallest projects its embeddings."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", least=1)
    bias, affine = keys.flag("enable_bias", default=True), keys.flag("layer_norm_elementwise_affine", default=True)
    width = keys.whole("word_embed_proj_dim", default=hidden)
    net = _opened(keys, "embed_tokens", width)
    net.add("embed_positions", keys.whole("max_position_embeddings") + 2, hidden, role="embedding")
    if width != hidden:
        net.linear("project_in", hidden, width)
        net.linear("project_out", width, hidden)
    inner, norms = keys.whole("ffn_dim", "intermediate_size"), 2 if affine else 0
    _blocks(net, keys, hidden=hidden, heads=heads, inner=inner, attention_bias=bias, mlp_bias=bias, norms=norms)
    before = keys.flag("do_layer_norm_before", default=True)
    last = affine and before and not keys.flag("_remove_final_layer_norm", default=False)
    return _closed(net, keys, "final_layer_norm", hidden if last else 0, width=width, tied=True)


def _bloom(keys: Keys) -> Inventory:
    """BLOOM: ALiBi, a norm on the embeddings."""
    hidden, heads = keys.whole("hidden_size", "n_embed"), keys.whole("n_head", "num_attention_heads", least=1)
    net = _opened(keys, "word_embeddings", hidden)
    net.norm("word_embeddings_layernorm", hidden, bias=True)
    _blocks(net, keys, hidden=hidden, heads=heads, inner=4 * hidden)
    return _closed(net, keys, "ln_f", hidden, tied=True)


def _mpt(keys: Keys) -> Inventory:
    """MPT: ALiBi, no biases."""
    hidden, heads = keys.whole("d_model", "hidden_size"), keys.whole("n_heads", "num_attention_heads", least=1)
    if not keys.flag("no_bias", default=True):
        raise keys.unknown("no_bias is false", "no_bias")
    net = _opened(keys, "wte", hidden)
    inner = keys.whole("expansion_ratio", default=4) * hidden
    _blocks(
        net, keys, hidden=hidden, heads=heads, inner=inner, attention_bias=False, mlp_bias=False, norm_bias=False
    )  # fmt: skip
    return _closed(net, keys, "norm_f", hidden, norm_bias=False, tied=True)


def _falcon(keys: Keys) -> Inventory:
    """Falcon: one KV head, or groups in the new architecture; one norm a layer where both parts run side by side."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", "n_head", least=1)
    new, one = keys.flag("new_decoder_architecture", default=False), keys.flag("multi_query", default=True)
    kv_heads = keys.whole("num_kv_heads", default=heads, least=1) if new else 1 if one else heads
    bias = keys.flag("bias", default=False)
    norms = 2 if new and keys.whole("num_ln_in_parallel_attn", default=2) == 2 else 1
    if not new and not keys.flag("parallel_attn", default=True):
        norms = 2
    net = _opened(keys, "word_embeddings", hidden)
    inner = keys.whole("ffn_hidden_size", default=4 * hidden)
    _blocks(
        net, keys, hidden=hidden, heads=heads, kv_heads=kv_heads, inner=inner, attention_bias=bias, mlp_bias=bias,
        norms=norms,
    )  # fmt: skip
    return _closed(net, keys, "ln_f", hidden, tied=True)


CLASSIC: dict[str, Callable[[Keys], Inventory]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt-sw3": _gpt2,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "mpt": _mpt,
    "opt": _opt,
}
