"""Families of one shape: attention over everything or a window, then a product for each token.

What is particular to one is a line of data in :data:`FAMILIES`: what its class in transformers 5.24 fills in where a
file leaves a key out, and where it differs from Llama.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from kvist.model.experts import Experts
from kvist.model.families.keys import Keys
from kvist.model.network import Block, Mlp, Network, Norm, Part, SelfAttention, whole

SLIDING = "sliding_attention"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Dense:
    """What is particular to a family.

    Attributes:
        defaults: of its class, by key.
        biases: keys that give biases to queries, keys and values, to the output and to the product; None for none.
        head_norm: of queries and keys, see :class:`SelfAttention`.
        norms: before and after the mixer, before and after the product; None where there is none.
        norm: their kind, and the key of what is added.
        activation: its key.
        mlp: names of the gate's product, None where there is no gate, and of those up and down.
        fused: queries, keys and values are stored as one matrix, and so are gate and other factor.
        local_rope: layers with a window have the base ``rope_local_base_freq``, and no scaling.
        experts: the experts of a layer in place of its product, or None where it has the product.
        gemma: norms are stored as offsets from one, embeddings are scaled, ``query_pre_attn_scalar`` scales scores.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str | None, str | None, str | None] = ("attention_bias", "attention_bias", "mlp_bias")
    head_norm: Literal["each", "all"] | None = None
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    norm: tuple[Literal["rms", "layer"], str] = ("rms", "rms_norm_eps")
    activation: str = "hidden_act"
    mlp: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False
    local_rope: bool = False
    gemma: bool = False
    experts: Callable[[Keys, int], Experts | None] = lambda keys, index: None


_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_dense(family: Dense, keys: Keys) -> Network:
    """Describe the network of such a family.

    Raises:
        UnsupportedModel: as :func:`kvist.model.families.network_of`.
    """
    keys = keys.completed(family.defaults)
    kind, eps_key = family.norm
    hidden, dim, eps = keys.need("hidden_size"), keys.need("head_dim"), keys.need(eps_key)
    vocab, inner = keys.need("vocab_size"), keys.need("intermediate_size")
    heads, kv_heads = keys.need("num_attention_heads"), keys.need("num_key_value_heads")
    kinds, activation = keys.need("layer_types"), keys.activation(family.activation)
    tied = keys.need("tie_word_embeddings")
    qkv_bias, out_bias, mlp_bias = (key is not None and bool(keys.get(key)) for key in family.biases)
    gate, up, down = family.mlp
    ropes = [keys.rope(dim)]
    if family.local_rope:
        ropes.append(keys.rope(dim, theta=keys.need("rope_local_base_freq"), scaled=False))
    scalar = keys.get("query_pre_attn_scalar", dim) if family.gemma else dim

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        norms = [None if name is None else Norm(name=f"{prefix}.{name}", eps=eps, kind=kind) for name in family.norms]
        return Block(
            mixer=SelfAttention(
                prefix=f"{prefix}.self_attn",
                hidden=hidden,
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                rope=1 if family.local_rope and kinds[index] == SLIDING else 0,
                scale=float(scalar) ** -0.5,
                softcap=keys.get("attn_logit_softcapping"),
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                head_norm=family.head_norm,
                eps=eps,
            ),
            mlp=family.experts(keys, index)
            or Mlp(
                prefix=f"{prefix}.mlp",
                hidden=hidden,
                inner=inner,
                activation=activation,
                gate=gate,
                up=up,
                down=down,
                bias=mlp_bias,
            ),
            before_mixer=norms[0],
            after_mixer=norms[1],
            before_mlp=norms[2],
            after_mlp=norms[3],
        )

    return Network(
        vocab=vocab,
        hidden=hidden,
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        ropes=tuple(ropes),
        norm=Norm(name="model.norm", eps=eps, kind=kind),
        head=_EMBEDDING if tied else "lm_head.weight",
        embedding_scale=hidden**0.5 if family.gemma else None,
        softcap=keys.get("final_logit_softcapping"),
        norm_offset=1.0 if family.gemma else 0.0,
        parts=_fused(heads * dim, kv_heads * dim, inner) if family.fused else whole,
    )


def _fused(queries: int, keys: int, inner: int) -> Callable[[str], Part]:
    """Rows of ``qkv_proj`` and ``gate_up_proj``."""
    rows = {
        "self_attn.q_proj": ("self_attn.qkv_proj", 0, queries),
        "self_attn.k_proj": ("self_attn.qkv_proj", queries, keys),
        "self_attn.v_proj": ("self_attn.qkv_proj", queries + keys, keys),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0, inner),
        "mlp.up_proj": ("mlp.gate_up_proj", inner, inner),
    }

    def part(name: str) -> Part:
        found = re.fullmatch(r"(model\.layers\.[0-9]+)\.(.+)\.weight", name)
        if found is None or found[2] not in rows:
            return whole(name)
        stored, first, count = rows[found[2]]
        return Part(name=f"{found[1]}.{stored}.weight", take=lambda matrix: matrix[first : first + count])

    return part


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA2 = {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_LLAMA = Dense()
_GEMMA3 = Dense(head_norm="each", norms=_SANDWICH, gemma=True, local_rope=True)

FAMILIES = {
    name: partial(read_dense, family)
    for name, family in {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        # Biases on the way in only.
        "qwen2": Dense(biases=("attention_bias", None, "mlp_bias")),
        "qwen3": Dense(head_norm="each"),
        "gemma2": Dense(defaults=_GEMMA | _GEMMA2, norms=_SANDWICH, gemma=True, activation="hidden_activation"),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "phi3": Dense(defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5}, biases=(None, None, None), fused=True),
        "olmo2": Dense(
            defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5}, biases=("attention_bias", "attention_bias", None),
            head_norm="all", norms=_AFTER,
        ),
    }.items()
}  # fmt: skip
