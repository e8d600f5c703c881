"""Families of one shape: attention over everything or a window, a gated product, RMS norms.

What is particular to one is a line of data in :data:`FAMILIES`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvist.model.families.keys import Keys
from kvist.model.network import Block, Mlp, Network, Norm, SelfAttention

SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Dense:
    """What is particular to a family.

    Attributes:
        out_bias: whether ``attention_bias`` gives the output one as well.
        head_norm: of queries and keys, see :class:`SelfAttention`.
        norms: before and after the mixer, before and after the product; None where there is none.
        gemma: norms are stored as offsets from one, embeddings are scaled, ``query_pre_attn_scalar`` scales scores.
    """

    out_bias: bool = True
    head_norm: Literal["each", "all"] | None = None
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    gemma: bool = False


_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def read_dense(family: Dense, keys: Keys) -> Network:
    """Describe the network of such a family.

    Raises:
        UnsupportedModel: as :func:`kvist.model.families.network_of`.
    """
    hidden, dim, eps = keys.need("hidden_size"), keys.need("head_dim"), keys.need("rms_norm_eps")
    vocab, inner = keys.need("vocab_size"), keys.need("intermediate_size")
    kinds, activation = keys.need("layer_types"), keys.activation()
    tied = keys.need("tie_word_embeddings")
    bias = bool(keys.get("attention_bias"))
    ropes = [keys.rope(dim)]
    local = keys.get("rope_local_base_freq")
    if local is not None:
        ropes.append(keys.rope(dim, theta=local, scaled=False))
    scalar = keys.get("query_pre_attn_scalar", dim) if family.gemma else dim

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        norms = [None if name is None else Norm(name=f"{prefix}.{name}", eps=eps) for name in family.norms]
        return Block(
            mixer=SelfAttention(
                prefix=f"{prefix}.self_attn",
                hidden=hidden,
                heads=keys.need("num_attention_heads"),
                kv_heads=keys.need("num_key_value_heads"),
                dim=dim,
                rope=1 if local is not None and kinds[index] == SLIDING else 0,
                scale=float(scalar) ** -0.5,
                softcap=keys.get("attn_logit_softcapping"),
                qkv_bias=bias,
                out_bias=bias and family.out_bias,
                head_norm=family.head_norm,
                eps=eps,
            ),
            mlp=Mlp(
                prefix=f"{prefix}.mlp",
                hidden=hidden,
                inner=inner,
                activation=activation,
                bias=bool(keys.get("mlp_bias")),
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
        norm=Norm(name="model.norm", eps=eps),
        head="model.embed_tokens.weight" if tied else "lm_head.weight",
        embedding_scale=hidden**0.5 if family.gemma else None,
        softcap=keys.get("final_logit_softcapping"),
        norm_offset=1.0 if family.gemma else 0.0,
    )


_LLAMA = Dense()
_GEMMA3 = Dense(head_norm="each", norms=_SANDWICH, gemma=True)

FAMILIES = {
    name: partial(read_dense, family)
    for name, family in {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        # Biases on the way in only.
        "qwen2": Dense(out_bias=False),
        "qwen3": Dense(head_norm="each"),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
    }.items()
}
