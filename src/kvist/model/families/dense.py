"""Families of one shape: attention over everything or a window, then a product for each token.

What is particular to one is a line of data in :data:`FAMILIES`: what its class in transformers 5.24 fills in where a
file leaves a key out, and where it differs from Llama.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from kvist.model.experts import Experts
from kvist.model.families.keys import Keys
from kvist.model.network import Block, Mlp, Network, Norm, Part, SelfAttention, whole
from kvist.model.parts import fused, straight
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.windows import rope_layers

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
        interleaved: a head's pairs that are turned together lie side by side, not half a head apart.
        turned: layers with rotary positions: all, those that ``no_rope_layers`` has a 1 for, or those with a window.
        partial: ``partial_rotary_factor`` may leave a part of each head unturned.
        local_rope: layers with a window have the base ``rope_local_base_freq``, and no scaling.
        experts: what a layer has in place of the product, or None where it has the product.
        parallel: the product sees what the mixer sees, instead of what it has added.
        sinks: attention has them.
        gemma: norms are stored as offsets from one, embeddings are scaled, ``query_pre_attn_scalar`` scales scores.
        caps: keys of soft caps that the class computes with.
        granite: there are factors of embeddings, scores and all that layers add, and a divisor of logits.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str | None, str | None, str | None] = ("attention_bias", "attention_bias", "mlp_bias")
    head_norm: Literal["each", "all", "unit"] | None = None
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    norm: tuple[Literal["rms", "layer", "unbiased"], str] = ("rms", "rms_norm_eps")
    activation: str = "hidden_act"
    mlp: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False
    interleaved: bool = False
    turned: Literal["all", "listed", "windows"] = "all"
    partial: bool = False
    local_rope: bool = False
    parallel: bool = False
    sinks: bool = False
    gemma: bool = False
    caps: tuple[str, ...] = ()
    experts: Callable[[Keys, int], Experts | Mlp | None] = lambda keys, index: None
    granite: bool = False


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
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
    if family.head_norm is None:
        keys.refuse("use_qk_norm", False, "a norm of heads is another family's")
    for cap in _CAPS:
        if cap not in family.caps:
            keys.refuse(cap, None, "its class has no such cap")
    kind, eps_key = family.norm
    hidden, dim, eps = keys.need("hidden_size"), keys.need("head_dim"), keys.need(eps_key)
    vocab, inner = keys.need("vocab_size"), keys.need("intermediate_size")
    heads, kv_heads = keys.need("num_attention_heads"), keys.need("num_key_value_heads")
    kinds, activation = keys.need("layer_types"), keys.activation(family.activation)
    tied = keys.need("tie_word_embeddings")
    qkv_bias, out_bias, mlp_bias = (key is not None and bool(keys.get(key)) for key in family.biases)
    gate, up, down = family.mlp
    parts: Callable[[str], Part] = whole
    if family.fused:
        parts = fused(heads * dim, kv_heads * dim, inner)
    elif family.interleaved:
        parts = partial(straight, {"q": heads, "k": kv_heads})
    ropes = [keys.rope(dim, by_kind=family.local_rope, partial=family.partial)]
    if family.local_rope:
        ropes.append(keys.rope(dim, theta=keys.need("rope_local_base_freq"), scaled=False, by_kind=True))
    layers = keys.need("num_hidden_layers")
    turned = _turned(family, keys, kinds, layers)
    scale, residual_scale = float(dim) ** -0.5, None
    embedding_scale, logits_scale = None, keys.get("logit_scale") if "logit_scale" in family.defaults else None
    if family.gemma:
        scale, embedding_scale = float(keys.get("query_pre_attn_scalar", dim)) ** -0.5, hidden**0.5
    if family.granite:
        scale, residual_scale = keys.need("attention_multiplier"), keys.need("residual_multiplier")
        embedding_scale, logits_scale = keys.need("embedding_multiplier"), 1 / keys.need("logits_scaling")

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
                rope=(1 if family.local_rope and kinds[index] == SLIDING else 0) if turned[index] else None,
                scale=scale,
                softcap=keys.get("attn_logit_softcapping"),
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                head_norm=family.head_norm,
                eps=eps,
                sinks=f"{prefix}.self_attn.sinks" if family.sinks else None,
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
            parallel=family.parallel,
            scale=residual_scale,
        )

    return Network(
        vocab=vocab,
        hidden=hidden,
        blocks=tuple(block(index) for index in range(layers)),
        ropes=tuple(ropes),
        norm=Norm(name="model.norm", eps=eps, kind=kind),
        head=_EMBEDDING if tied else "lm_head.weight",
        embedding_scale=embedding_scale,
        softcap=keys.get("final_logit_softcapping"),
        logits_scale=logits_scale,
        norm_offset=1.0 if family.gemma else 0.0,
        parts=parts,
    )


def _turned(family: Dense, keys: Keys, kinds: Sequence[str], layers: int) -> Sequence[bool]:
    """Which layers have rotary positions."""
    match family.turned:
        case "windows":
            return [kind == SLIDING for kind in kinds]
        case "listed":
            return rope_layers(ConfigKeys(keys.config, name=keys.spec.name), layers)
    return [True] * layers


def _gemma1(keys: Keys) -> Network:
    """Gemma 1: what its first files call gelu is the approximation by tanh, which the class takes too."""
    keys.refuse("query_pre_attn_scalar", keys.get("head_dim"), "scores are scaled by the width of a head")
    if keys.get("hidden_act") == "gelu":
        keys = Keys(keys.spec, {**keys.config, "hidden_act": "gelu_pytorch_tanh"})
    return read_dense(Dense(defaults=_GEMMA, gemma=True), keys)


_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_SILU = {"hidden_act": "silu"}
_COHERE = Dense(
    defaults=_SILU | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625},
    biases=("attention_bias", "attention_bias", None),
    norms=("input_layernorm", None, None, None),
    norm=("unbiased", "layer_norm_eps"),
    interleaved=True,
    parallel=True,
)
_LLAMA = Dense()
_OLMO2 = Dense(
    defaults=_SILU | {"rms_norm_eps": 1e-5},
    biases=("attention_bias", "attention_bias", None),
    head_norm="all",
    norms=_AFTER,
)
_GEMMA3 = Dense(head_norm="each", norms=_SANDWICH, gemma=True, local_rope=True, caps=_CAPS[1:])

FAMILIES = {
    name: partial(read_dense, family)
    for name, family in {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        # Biases on the way in only.
        "qwen2": Dense(biases=("attention_bias", None, "mlp_bias")),
        "qwen3": Dense(head_norm="each"),
        "gemma2": Dense(
            defaults=_GEMMA | _GEMMA2, norms=_SANDWICH, gemma=True, activation="hidden_activation", caps=_CAPS
        ),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
        "phi3": Dense(defaults=_SILU | {"rms_norm_eps": 1e-5}, biases=(None, None, None), fused=True, partial=True),
        "olmo2": _OLMO2,
        "olmo3": replace(
            _OLMO2,
            defaults={**_OLMO2.defaults, "rope_theta": 500000.0, "rope_local_base_freq": 500000.0},
            local_rope=True,
        ),
        "granite": Dense(
            defaults=_SILU | {
                "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
            },
            granite=True,
        ),
        "starcoder2": Dense(
            defaults={
                "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True,
            },
            biases=("use_bias", "use_bias", "use_bias"),
            norm=("layer", "norm_epsilon"),
            mlp=(None, "c_fc", "c_proj"),
        ),
        "smollm3": Dense(
            defaults=_SILU | {"rms_norm_eps": 1e-6, "rope_theta": 2000000.0, "tie_word_embeddings": True},
            turned="listed",
        ),
        "helium": Dense(
            defaults=_SILU | {"rms_norm_eps": 1e-8, "rope_theta": 100000.0},
            biases=("attention_bias", None, "mlp_bias"),
            interleaved=True,
        ),
        "seed_oss": Dense(
            defaults=_SILU | {"rms_norm_eps": 1e-6, "attention_bias": True},
            biases=("attention_bias", "attention_out_bias", "mlp_bias"),
        ),
        "cohere": replace(_COHERE, defaults={**_COHERE.defaults, "rope_theta": 500000.0}),
        "cohere2": replace(_COHERE, turned="windows"),
    }.items()
} | {"gemma": _gemma1}  # fmt: skip
