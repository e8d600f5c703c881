"""DeepSeek-V2 and V3, and what has their shape: latents, a gated product in the first layers, experts in the others.

What is particular to one is a line of data in :data:`FAMILIES`: what its class in transformers 5.24 fills in where a
file leaves a key out, and how it differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.model.experts import Experts
from kvist.model.families.keys import Keys
from kvist.model.families.mixtures import expert_count
from kvist.model.mixers.latent import LatentAttention
from kvist.model.network import Block, Mlp, Network, Norm
from kvist.model.rotary import yarn_length
from kvist.model.routing import Routing

_EMBEDDING = "model.embed_tokens.weight"
# More than any file holds.
_MOST_DRAFTS = 8
_WIDTHS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to a family.

    Attributes:
        defaults: of its class, by key.
        routing: how a layer's experts are chosen, given the name of its gate.
        sparse: whether a layer has experts.
    """

    defaults: Mapping[str, Any]
    routing: Callable[[Keys, str], Routing] | None
    sparse: Callable[[Keys, int], bool]


def read_deepseek(family: Family, keys: Keys) -> Network:
    """Describe the network of such a family.

    Raises:
        UnsupportedModel: as :func:`kvist.model.families.network_of`.
    """
    keys = keys.completed({"hidden_act": "silu", "rms_norm_eps": 1e-6, **_WIDTHS, **family.defaults})
    hidden, heads, eps = keys.need("hidden_size"), keys.need("num_attention_heads"), keys.need("rms_norm_eps")
    layers, activation = keys.need("num_hidden_layers"), keys.activation()
    nope, rope_dim, value = (keys.need(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if value > nope + rope_dim:
        raise UnsupportedModel(
            f"v_head_dim: {value}, wider than the {nope} + {rope_dim} elements of a key, is not computed",
            key="v_head_dim",
        )
    scaling = keys.get("rope_scaling") or {}
    scale = (nope + rope_dim) ** -0.5
    if scaling.get("mscale_all_dim") and scaling.get("factor"):
        # What YaRN would make queries and keys longer by.
        scale *= yarn_length(scaling["factor"], scaling["mscale_all_dim"]) ** 2

    def mlp(prefix: str, inner: int) -> Mlp:
        return Mlp(prefix=prefix, hidden=hidden, inner=inner, activation=activation, bias=bool(keys.get("mlp_bias")))

    def product(index: int) -> Mlp | Experts:
        prefix = f"model.layers.{index}.mlp"
        if family.routing is None or not family.sparse(keys, index):
            return mlp(prefix, keys.need("intermediate_size"))
        inner, shared = keys.need("moe_intermediate_size"), keys.get("n_shared_experts")
        return Experts(
            prefix=f"{prefix}.experts",
            hidden=hidden,
            inner=inner,
            count=expert_count(keys, "n_routed_experts"),
            routing=family.routing(keys, f"{prefix}.gate"),
            activation=activation,
            shared=mlp(f"{prefix}.shared_experts", inner * shared) if shared else None,
        )

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        return Block(
            mixer=LatentAttention(
                prefix=f"{prefix}.self_attn",
                hidden=hidden,
                heads=heads,
                nope=nope,
                rope_dim=rope_dim,
                value=value,
                rank=keys.need("kv_lora_rank"),
                query_rank=keys.get("q_lora_rank"),
                rope=0,
                scale=scale,
                # A null is printed, and so is no default.
                interleaved=bool(keys.config.get("rope_interleave", True)),
                bias=bool(keys.get("attention_bias")),
            ),
            mlp=product(index),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.post_attention_layernorm", eps=eps),
        )

    return Network(
        vocab=keys.need("vocab_size"),
        hidden=hidden,
        blocks=tuple(block(index) for index in range(layers)),
        ropes=(keys.rope(rope_dim),),
        norm=Norm(name="model.norm", eps=eps),
        head=_EMBEDDING if keys.need("tie_word_embeddings") else "lm_head.weight",
        # Published files hold layers that draft the tokens after the next behind the model's own.
        drafts=tuple(f"model.layers.{layers + draft}." for draft in range(_MOST_DRAFTS)),
    )


def _behind_dense(keys: Keys, index: int) -> bool:
    return bool(index >= keys.need("first_k_dense_replace"))


def _listed(keys: Keys, index: int) -> bool:
    kinds = keys.get("mlp_layer_types")
    if kinds is not None and len(kinds) != len(keys.spec.layers):
        raise UnsupportedModel(
            f"mlp_layer_types: {len(kinds)} kinds for {len(keys.spec.layers)} layers", key="mlp_layer_types"
        )
    return index > 0 if kinds is None else bool(kinds[index] == "sparse")


def _softmax(keys: Keys, name: str) -> Routing:
    """DeepSeek-V2: the best of all experts, or of the groups with the best one."""
    keys.refuse("norm_topk_prob", False, "DeepSeek-V2 takes weights as they are")
    keys.refuse("scoring_func", "softmax", "DeepSeek-V2 takes a softmax")
    keys.refuse("moe_layer_freq", 1, "every layer behind the dense ones has experts")
    method = keys.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method: {method!r} is not computed; supported are greedy and group_limited_greedy", key="topk_method"
        )
    limited = method == "group_limited_greedy"
    return Routing(
        name=name,
        chosen=keys.need("num_experts_per_tok"),
        scale=keys.need("routed_scaling_factor"),
        groups=keys.need("n_group") if limited else 1,
        kept_groups=keys.need("topk_group") if limited else 1,
    )


def _sigmoid(keys: Keys, name: str) -> Routing:
    """DeepSeek-V3: a correction balances experts, and groups are as good as the sum of their two best."""
    keys.refuse("scoring_func", "sigmoid", "DeepSeek-V3 takes a sigmoid")
    keys.refuse("topk_method", "noaux_tc", "DeepSeek-V3 limits experts to groups, by corrected scores")
    keys.refuse("moe_layer_freq", 1, "every layer behind the dense ones has experts")
    return Routing(
        name=name,
        chosen=keys.need("num_experts_per_tok"),
        score="sigmoid",
        renormed=bool(keys.need("norm_topk_prob")),
        scale=keys.need("routed_scaling_factor"),
        groups=keys.need("n_group"),
        kept_groups=keys.need("topk_group"),
        group_best=2,
        correction=f"{name}.e_score_correction_bias",
    )


_V2_DEFAULTS = {
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}  # fmt: skip
_V3_DEFAULTS = {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
}  # fmt: skip
_GLM_DEFAULTS = {
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
    "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
_V3 = Family(defaults=_V3_DEFAULTS, routing=_sigmoid, sparse=_behind_dense)

FAMILIES = {
    name: partial(read_deepseek, family)
    for name, family in {
        "deepseek_v2": Family(defaults=_V2_DEFAULTS, routing=_softmax, sparse=_behind_dense),
        "deepseek_v3": _V3,
        "kimi_k2": _V3,
        "glm4_moe_lite": Family(defaults=_GLM_DEFAULTS, routing=_sigmoid, sparse=_listed),
        "youtu": Family(defaults={"tie_word_embeddings": True}, routing=None, sparse=lambda keys, index: False),
    }.items()
}
