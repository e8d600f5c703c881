"""Decoders of the GPT-2 generation and its contemporaries, which have names of their own for everything.

Source of every shape: the family's classes in transformers.
"""

from collections.abc import Callable

from kvist.spec.parameters.inventory import Inventory, Keys, Network


def _blocks(
    net: Network,
    layers: int,
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    attention_bias: bool = True,
    out_bias: bool | None = None,
    mlp_bias: bool = True,
    norms: int = 2,
    norm_bias: bool = True,
) -> None:
    """All layers: projections, two feed-forward matrices, norms."""
    net.layer("layers.#", range(layers))
    net.part("attn", block="attention")
    net.linear("q_proj", heads * head_dim, hidden, bias=attention_bias, units=heads)
    net.linear("k_proj", kv_heads * head_dim, hidden, bias=attention_bias, units=kv_heads)
    net.linear("v_proj", kv_heads * head_dim, hidden, bias=attention_bias, units=kv_heads)
    out = attention_bias if out_bias is None else out_bias
    net.linear("o_proj", hidden, heads * head_dim, bias=out, units=heads, rows=True)
    net.part("mlp", block="mlp")
    net.linear("up_proj", inner, hidden, bias=mlp_bias, units=inner)
    net.linear("down_proj", hidden, inner, bias=mlp_bias, units=inner, rows=True)
    net.part("", block="norm")
    for number in range(norms):
        net.norm(f"norm_{number + 1}", hidden, bias=norm_bias)


def _gpt2(keys: Keys) -> Inventory:
    """GPT-2, and GPT-BigCode with one KV head."""
    hidden, layers = keys.whole("n_embd", "hidden_size"), len(keys.layers)
    heads, vocab = keys.whole("n_head", "num_attention_heads", least=1), keys.whole("vocab_size")
    inner = keys.whole("n_inner", "intermediate_size", default=4 * hidden)
    one = keys.family == "gpt_bigcode" and keys.flag("multi_query", default=True)
    net = Network()
    net.add("wte", vocab, hidden, role="embedding", units=vocab)
    net.add("wpe", keys.whole("n_positions", "max_position_embeddings"), hidden, role="embedding")
    _blocks(
        net, layers, hidden=hidden, heads=heads, kv_heads=1 if one else heads, head_dim=hidden // heads, inner=inner
    )
    net.outside()
    net.norm("ln_f", hidden, bias=True)
    return _with_head(net, keys, vocab, hidden, tied=True)


def _gpt_neox(keys: Keys) -> Inventory:
    """Pythia, GPT-NeoX."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    heads, bias = keys.whole("num_attention_heads", least=1), keys.flag("attention_bias", default=True)
    net = Network()
    net.add("embed_in", vocab, hidden, role="embedding", units=vocab)
    _blocks(
        net,
        len(keys.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=keys.whole("intermediate_size"),
        attention_bias=bias,
    )
    net.outside()
    net.norm("final_layer_norm", hidden, bias=True)
    return _with_head(net, keys, vocab, hidden, tied=False)


def _gptj(keys: Keys) -> Inventory:
    """GPT-J: one norm a layer, a head with a bias."""
    hidden, vocab, heads = keys.whole("n_embd"), keys.whole("vocab_size"), keys.whole("n_head", least=1)
    net = Network()
    net.add("wte", vocab, hidden, role="embedding", units=vocab)
    _blocks(
        net,
        len(keys.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=keys.whole("n_inner", default=4 * hidden),
        attention_bias=False,
        norms=1,
    )
    net.outside()
    net.norm("ln_f", hidden, bias=True)
    net.add("lm_head.bias", vocab, units=vocab)
    return _with_head(net, keys, vocab, hidden, tied=False)


def _opt(keys: Keys) -> Inventory:
    """OPT: learned positions, two of them for padding; the smallest projects its embeddings."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    heads, bias = keys.whole("num_attention_heads", least=1), keys.flag("enable_bias", default=True)
    width = keys.whole("word_embed_proj_dim", default=hidden)
    affine = keys.flag("layer_norm_elementwise_affine", default=True)
    net = Network()
    net.add("embed_tokens", vocab, width, role="embedding", units=vocab)
    net.add("embed_positions", keys.whole("max_position_embeddings") + 2, hidden, role="embedding")
    if width != hidden:
        net.linear("project_in", hidden, width)
        net.linear("project_out", width, hidden)
    _blocks(
        net,
        len(keys.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=keys.whole("ffn_dim", "intermediate_size"),
        attention_bias=bias,
        mlp_bias=bias,
        norms=2 if affine else 0,
    )
    net.outside()
    if keys.flag("do_layer_norm_before", default=True) and not keys.flag("_remove_final_layer_norm", default=False):
        net.norm("final_layer_norm", hidden if affine else 0, bias=True)
    return _with_head(net, keys, vocab, width, tied=True)


def _bloom(keys: Keys) -> Inventory:
    """BLOOM: ALiBi, a norm on the embeddings."""
    hidden, vocab = keys.whole("hidden_size", "n_embed"), keys.whole("vocab_size")
    heads = keys.whole("n_head", "num_attention_heads", least=1)
    net = Network()
    net.add("word_embeddings", vocab, hidden, role="embedding", units=vocab)
    net.norm("word_embeddings_layernorm", hidden, bias=True)
    _blocks(
        net,
        len(keys.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=4 * hidden,
    )
    net.outside()
    net.norm("ln_f", hidden, bias=True)
    return _with_head(net, keys, vocab, hidden, tied=True)


def _mpt(keys: Keys) -> Inventory:
    """MPT: ALiBi, no biases."""
    hidden, vocab = keys.whole("d_model", "hidden_size"), keys.whole("vocab_size")
    heads = keys.whole("n_heads", "num_attention_heads", least=1)
    if not keys.flag("no_bias", default=True):
        raise keys.unknown("no_bias is false", "no_bias")
    net = Network()
    net.add("wte", vocab, hidden, role="embedding", units=vocab)
    _blocks(
        net,
        len(keys.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=keys.whole("expansion_ratio", default=4) * hidden,
        attention_bias=False,
        mlp_bias=False,
        norm_bias=False,
    )
    net.outside()
    net.norm("norm_f", hidden)
    return _with_head(net, keys, vocab, hidden, tied=True)


def _falcon(keys: Keys) -> Inventory:
    """Falcon: one KV head, or groups in the new architecture; one norm a layer where both parts run side by side."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    heads = keys.whole("num_attention_heads", "n_head", least=1)
    new, one = keys.flag("new_decoder_architecture", default=False), keys.flag("multi_query", default=True)
    kv_heads = keys.whole("num_kv_heads", default=heads, least=1) if new else 1 if one else heads
    bias = keys.flag("bias", default=False)
    norms = 2 if new and keys.whole("num_ln_in_parallel_attn", default=2) == 2 else 1
    if not new and not keys.flag("parallel_attn", default=True):
        norms = 2
    net = Network()
    net.add("word_embeddings", vocab, hidden, role="embedding", units=vocab)
    _blocks(
        net,
        len(keys.layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        inner=keys.whole("ffn_hidden_size", default=4 * hidden),
        attention_bias=bias,
        mlp_bias=bias,
        norms=norms,
    )
    net.outside()
    net.norm("ln_f", hidden, bias=True)
    return _with_head(net, keys, vocab, hidden, tied=True)


def _with_head(net: Network, keys: Keys, vocab: int, width: int, *, tied: bool) -> Inventory:
    tied = keys.flag("tie_word_embeddings", default=tied)
    if not tied:
        net.add("lm_head", vocab, width, role="head", units=vocab)
    return net.inventory(tied=tied)


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
