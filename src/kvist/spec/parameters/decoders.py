"""Decoders of attention and feed-forward blocks, as a description of how each family differs from Llama.

Source of every shape: the family's classes in transformers; for families that publish their own code, that code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvist.spec.layers import Layer
from kvist.spec.parameters.inventory import Inventory, Keys, Network

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

# A constant, or a key of the configuration and what is meant where it is left out.
Switch = bool | tuple[str, bool]


def switched(keys: Keys, switch: Switch) -> bool:
    """Whether something is there."""
    return switch if isinstance(switch, bool) else keys.flag(switch[0], default=switch[1])


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a family's decoder differs from Llama's.

    Attributes:
        qkv_bias: of the query, key and value projections.
        out_bias: of the output projection.
        mlp_bias: of the feed-forward matrices.
        gated: whether a third feed-forward matrix gates the first.
        query_norm: none, one scale for all heads (``head``), one for each (``heads``), or over all at once (``full``);
            a key may switch it.
        norms: normalisations of the hidden size in a layer.
        norm_bias: whether they have shifts.
        final_norm: whether one follows the last layer.
        head_bias: of the output head.
        tied: whether the head is the embedding table where the configuration does not say.
        attention: adds the attention of a layer, where it is not grouped-query attention.
        feed_forward: adds the feed-forward part, where it is not an MLP.
        dense: which layers have an MLP all the same.
        extra: adds what else a layer has.
    """

    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    gated: bool = True
    query_norm: Literal["", "head", "heads", "full"] = ""
    query_norm_if: Switch = True
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    head_bias: Switch = False
    tied: bool = False
    attention: Callable[[Network, Keys, "Style", int], None] | None = None
    feed_forward: Callable[[Network, Keys, "Style"], None] | None = None
    dense: Callable[[Keys, int], bool] | None = None
    extra: Callable[[Network, Keys], None] | None = None


def decoder(keys: Keys, style: Style) -> Inventory:
    """Embeddings, layers, final norm and head, under Llama's names; layers that are alike are listed once."""
    hidden, vocab = keys.whole("hidden_size", least=1), keys.whole("vocab_size", least=1)
    net = Network()
    net.outside("model")
    net.add("embed_tokens", vocab, hidden, role="embedding", units=vocab)
    alike: dict[tuple[Layer, bool], list[int]] = {}
    for index, memory in enumerate(keys.layers):
        alike.setdefault((memory, style.dense is not None and style.dense(keys, index)), []).append(index)
    for (_, dense), indices in alike.items():
        net.layer("model.layers.#", indices)
        net.part("self_attn", block="attention")
        (style.attention or grouped_attention)(net, keys, style, indices[0])
        net.part("mlp", block="mlp")
        (dense_mlp if dense or style.feed_forward is None else style.feed_forward)(net, keys, style)
        net.part("", block="norm")
        for number in range(style.norms):
            net.norm(_NORMS[number], hidden, bias=style.norm_bias)
        if style.extra is not None:
            style.extra(net, keys)
    return finish(net, keys, style)


def finish(net: Network, keys: Keys, style: Style) -> Inventory:
    """Final norm and head."""
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    tied = keys.flag("tie_word_embeddings", default=style.tied)
    net.outside("model")
    if style.final_norm:
        net.norm("norm", hidden, bias=style.norm_bias)
    net.outside()
    if not tied:
        net.add("lm_head", vocab, hidden, role="head", units=vocab)
    if switched(keys, style.head_bias):
        net.add("lm_head.bias", vocab, units=vocab)
    beside = [what for key, what in _BESIDE.items() if key in keys]
    return net.inventory(tied=tied, beside=beside)


_BESIDE = {"vision_config": "a vision tower", "audio_config": "an audio tower"}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many query and KV heads there are, and how wide they are."""

    query: int
    kv: int
    width: int


def heads_of(keys: Keys) -> Heads:
    """Heads under Llama's names."""
    query = keys.whole("num_attention_heads", least=1)
    kv = keys.whole("num_key_value_heads", default=query, least=1)
    width = keys.whole("head_dim", default=keys.whole("hidden_size") // query, least=1)
    return Heads(query=query, kv=kv, width=width)


def grouped_attention(net: Network, keys: Keys, style: Style, index: int) -> None:
    """Query, key, value and output projections; scales of queries and keys."""
    project(net, keys.whole("hidden_size"), heads_of(keys), keys, style)


def project(
    net: Network, hidden: int, heads: Heads, keys: Keys, style: Style, *, value_width: int | None = None
) -> None:
    """Add the four projections for ``heads``."""
    bias, width = switched(keys, style.qkv_bias), heads.width
    value = width if value_width is None else value_width
    net.linear("q_proj", heads.query * width, hidden, bias=bias, units=heads.query)
    net.linear("k_proj", heads.kv * width, hidden, bias=bias, units=heads.kv)
    net.linear("v_proj", heads.kv * value, hidden, bias=bias, units=heads.kv)
    net.linear("o_proj", hidden, heads.query * value, bias=switched(keys, style.out_bias), units=heads.query, rows=True)
    if style.query_norm and switched(keys, style.query_norm_if):
        for name, count in (("q_norm", heads.query), ("k_norm", heads.kv)):
            if style.query_norm == "head":
                net.norm(name, width)
            else:
                net.norm(name, count * width, units=count)


def dense_mlp(net: Network, keys: Keys, style: Style) -> None:
    """A gate and an up projection, or the latter alone, and a down projection."""
    mlp(net, keys.whole("hidden_size"), keys.whole("intermediate_size"), keys, style)


def mlp(
    net: Network, hidden: int, width: int, keys: Keys, style: Style, *, within: str = "", copies: int = 1, used: int = 1
) -> None:
    """Add ``copies`` feed-forward networks of ``width``, of which a token passes through ``used``."""
    bias = switched(keys, style.mlp_bias)
    for name in ("gate_proj", "up_proj") if style.gated else ("up_proj",):
        net.linear(within + name, width, hidden, bias=bias, units=width, copies=copies, used=used)
    net.linear(f"{within}down_proj", hidden, width, bias=bias, units=width, copies=copies, used=used, rows=True)


def _parallel_norms(style: Style) -> Callable[[Keys], Inventory]:
    """One norm where attention and MLP run beside each other, two where they follow."""
    return lambda keys: decoder(
        keys, replace(style, norms=1 if keys.flag("use_parallel_residual", default=False) else 2)
    )


def _of(style: Style) -> Callable[[Keys], Inventory]:
    return lambda keys: decoder(keys, style)


def _xielu(net: Network, keys: Keys) -> None:
    """The two learned numbers of Apertus' activation, and the two fixed ones stored beside them."""
    net.add("mlp.act_fn", 4)


def _lambdas(net: Network, keys: Keys) -> None:
    """What differential attention weighs its two halves with."""
    net.part("self_attn", block="attention")
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        net.add(name, heads_of(keys).width)


_ATTENTION_BIAS: Switch = ("attention_bias", False)
_MLP_BIAS: Switch = ("mlp_bias", False)
_USE_BIAS: Switch = ("use_bias", False)
_LLAMA = Style(qkv_bias=_ATTENTION_BIAS, out_bias=_ATTENTION_BIAS, mlp_bias=_MLP_BIAS)
_QWEN2 = Style(qkv_bias=True)
_QWEN3 = Style(qkv_bias=_ATTENTION_BIAS, out_bias=_ATTENTION_BIAS, query_norm="head")
_GEMMA = Style(qkv_bias=_ATTENTION_BIAS, out_bias=_ATTENTION_BIAS, tied=True)
_NEMOTRON = replace(_LLAMA, gated=False, norm_bias=True)
_JAIS_BIAS = ("attention_bias", True)
_STARCODER = ("use_bias", True)

DECODERS: dict[str, Callable[[Keys], Inventory]] = {
    "Yi": _of(_LLAMA),
    "apertus": _of(replace(_LLAMA, gated=False, query_norm="head", extra=_xielu)),
    "apertus1p5": _of(replace(_LLAMA, gated=False, query_norm="head", extra=_xielu)),
    "aquila": _of(_LLAMA),
    "arcee": _of(replace(_LLAMA, gated=False)),
    "baichuan": _of(Style()),
    "cohere": _of(replace(_GEMMA, norms=1, query_norm="heads", query_norm_if=("use_qk_norm", False))),
    "cohere2": _of(replace(_GEMMA, norms=1)),
    "cwm": _of(Style(mlp_bias=_MLP_BIAS)),
    "diffllama": _of(replace(_LLAMA, mlp_bias=False, extra=_lambdas)),
    "ernie4_5": _of(Style(qkv_bias=_USE_BIAS, out_bias=_USE_BIAS, mlp_bias=_USE_BIAS, tied=True)),
    "exaone": _of(_LLAMA),
    "exaone4": _of(Style(query_norm="head")),
    "gemma": _of(_GEMMA),
    "gemma2": _of(replace(_GEMMA, norms=4)),
    "gemma3_text": _of(replace(_GEMMA, norms=4, query_norm="head")),
    "glm": _of(Style(qkv_bias=_ATTENTION_BIAS)),
    "glm4": _of(Style(qkv_bias=_ATTENTION_BIAS, norms=4)),
    "granite": _of(_LLAMA),
    "helium": _of(_LLAMA),
    "hunyuan_v1_dense": _of(replace(_QWEN3)),
    "hyperclovax": lambda keys: decoder(
        keys, replace(_LLAMA, norms=4 if keys.flag("use_post_norm", default=True) else 2)
    ),
    "internlm2": _of(Style(qkv_bias=("bias", False), out_bias=("bias", False))),
    "iquestcoder": _of(_LLAMA),
    "jais2": _of(replace(_NEMOTRON, qkv_bias=_JAIS_BIAS, out_bias=_JAIS_BIAS, mlp_bias=("mlp_bias", True))),
    "llama": _of(_LLAMA),
    "minicpm": _of(Style(tied=True)),
    "ministral": _of(Style()),
    "ministral3": _of(Style()),
    "mistral": _of(Style()),
    "nemotron": _of(_NEMOTRON),
    "olmo": _of(Style(qkv_bias=_ATTENTION_BIAS, out_bias=_ATTENTION_BIAS, norms=0, final_norm=False)),
    "olmo2": _of(replace(_LLAMA, query_norm="full", mlp_bias=False)),
    "olmo3": _of(replace(_LLAMA, query_norm="full", mlp_bias=False)),
    "orion": _of(Style(norm_bias=True)),
    "phi": _of(
        Style(qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, norms=1, norm_bias=True, head_bias=True)
    ),
    "phi3": _of(Style()),
    "qwen2": _of(_QWEN2),
    "qwen2_5_vl": _of(_QWEN2),
    "qwen2_vl": _of(_QWEN2),
    "qwen3": _of(_QWEN3),
    "qwen3_vl": _of(_QWEN3),
    "seed_oss": _of(
        Style(qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False), mlp_bias=_MLP_BIAS)
    ),
    "skywork": _of(_LLAMA),
    "smollm3": _of(replace(_LLAMA, tied=True)),
    "stablelm": _parallel_norms(
        Style(
            qkv_bias=("use_qkv_bias", False), norm_bias=True, query_norm="heads", query_norm_if=("qk_layernorm", False)
        )
    ),
    "vaultgemma": _of(_GEMMA),
    "xverse": _of(_LLAMA),
    "starcoder2": _of(
        Style(qkv_bias=_STARCODER, out_bias=_STARCODER, mlp_bias=_STARCODER, gated=False, norm_bias=True, tied=True)
    ),
}
