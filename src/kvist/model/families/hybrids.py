"""Attention and Mamba-2 in one model: beside each other in Falcon-H1, by turns in Bamba and Granite 4.

Sources: the configuration and modelling files of these names in transformers 5.24.
"""

import re
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvist.model.experts import Experts, stacked
from kvist.model.families.keys import Keys
from kvist.model.families.mixtures import expert_count
from kvist.model.families.states import SILU, limits
from kvist.model.mixers.mamba import Mamba2
from kvist.model.network import Block, Mlp, Network, Norm, Part, SelfAttention, Together
from kvist.model.routing import Routing
from kvist.spec.layers import State

_DEFAULTS = {
    "hidden_act": "silu", "mamba_expand": 2, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4,
}  # fmt: skip
_EMBEDDING = "model.embed_tokens.weight"


def _state(
    keys: Keys, prefix: str, *, width: int, norm: Literal["gated", "before"] | None, out_bias: str = "mamba_proj_bias"
) -> Mamba2:
    """The Mamba-2 of these families, which have one set of names.

    Args:
        keys: of the model, completed.
        prefix: of its tensors.
        width: of all heads.
        norm: see :class:`Mamba2`.
        out_bias: key of the output's bias.
    """
    heads, groups = keys.need("mamba_n_heads"), keys.need("mamba_n_groups")
    least, most = limits(keys)
    return Mamba2(
        prefix=prefix,
        hidden=keys.need("hidden_size"),
        heads=heads,
        dim=width // heads,
        groups=groups,
        size=keys.need("mamba_d_state"),
        kernel=keys.need("mamba_d_conv"),
        conv_bias=bool(keys.get("mamba_conv_bias", True)),
        bias=bool(keys.get("mamba_proj_bias")),
        out_bias=bool(keys.get(out_bias)),
        norm=norm,
        norm_groups=groups,
        eps=keys.need("rms_norm_eps"),
        least=least,
        most=most,
    )


def _attention(keys: Keys, prefix: str, *, rope: int | None, scale: float | None = None) -> SelfAttention:
    """The attention of these families; ``scale`` in place of what the width of a head gives."""
    dim, bias = _head_dim(keys), bool(keys.get("attention_bias"))
    return SelfAttention(
        prefix=prefix,
        hidden=keys.need("hidden_size"),
        heads=keys.need("num_attention_heads"),
        kv_heads=keys.need("num_key_value_heads"),
        dim=dim,
        rope=rope,
        scale=dim**-0.5 if scale is None else scale,
        qkv_bias=bias,
        out_bias=bias,
    )


def _head_dim(keys: Keys) -> int:
    return int(keys.get("head_dim", keys.need("hidden_size") // keys.need("num_attention_heads")))


def _expanded(keys: Keys) -> int:
    return int(keys.need("mamba_expand") * keys.need("hidden_size"))


def _product(keys: Keys, prefix: str) -> Mlp:
    return Mlp(
        prefix=prefix,
        hidden=keys.need("hidden_size"),
        inner=keys.need("intermediate_size"),
        activation="silu",
        bias=bool(keys.get("mlp_bias")),
    )


def _falcon_h1(keys: Keys) -> Network:
    """Falcon-H1: attention and a state beside each other in every layer, and factors everywhere.

    Those of products are taken into their weights.
    """
    keys = keys.completed(
        {**_DEFAULTS, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mlp_multipliers": [1.0, 1.0]}
        | {"key_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5}
        | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0}
        | {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}
    )
    keys.refuse("hidden_act", "silu", SILU)
    keys.refuse("attention_bias", False, "its multipliers would have to leave biases out")
    eps, width = keys.need("rms_norm_eps"), keys.get("mamba_d_ssm", _expanded(keys))
    size, groups, heads = keys.need("mamba_d_state"), keys.need("mamba_n_groups"), keys.need("mamba_n_heads")
    into, dim = keys.need("attention_in_multiplier"), _head_dim(keys)
    norm: Literal["gated", "before"] = "before" if keys.get("mamba_norm_before_gate", True) else "gated"
    # Queries and keys are each as large as the input's factor makes them; turning them changes nothing.
    scale = dim**-0.5 * keys.need("key_multiplier") * into**2

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        return Block(
            mixer=Together(
                parts=(
                    _attention(keys, f"{prefix}.self_attn", rope=0, scale=scale),
                    _state(
                        keys,
                        f"{prefix}.mamba",
                        width=width,
                        norm=norm if keys.get("mamba_rms_norm") else None,
                        out_bias="projectors_bias",
                    ),
                ),
                factors=(into * keys.need("attention_out_multiplier"), keys.need("ssm_out_multiplier")),
            ),
            mlp=_product(keys, f"{prefix}.feed_forward"),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.pre_ff_layernorm", eps=eps),
        )

    counts = (width, width, groups * size, groups * size, heads)
    factors = torch.cat([torch.full((n,), float(f)) for n, f in zip(counts, keys.need("ssm_multipliers"), strict=True)])
    return Network(
        vocab=keys.need("vocab_size"),
        hidden=keys.need("hidden_size"),
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        ropes=(keys.rope(dim),),
        norm=Norm(name="model.final_layernorm", eps=eps),
        embedding=_EMBEDDING,
        head=_EMBEDDING if keys.need("tie_word_embeddings") else "lm_head.weight",
        embedding_scale=keys.need("embedding_multiplier"),
        logits_scale=keys.need("lm_head_multiplier"),
        parts=partial(_scaled, factors, keys.need("ssm_in_multiplier"), tuple(keys.need("mlp_multipliers"))),
    )


def _scaled(factors: Tensor, into: float, of_product: tuple[float, float], name: str) -> Part:
    """Weights times the factors by which Falcon-H1 multiplies what they give."""
    if ".mamba.in_proj." in name:
        if name.endswith(".weight"):
            return Part(name=name, take=lambda weight: weight * (into * factors).to(weight.device).unsqueeze(1))
        return Part(name=name, take=lambda bias: bias * factors.to(bias.device))
    if ".feed_forward.gate_proj." in name:
        return Part(name=name, take=lambda weight: weight * of_product[0])
    if ".feed_forward.down_proj." in name:
        return Part(name=name, take=lambda weight: weight * of_product[1])
    return Part(name=name)


def _bamba(keys: Keys) -> Network:
    """Bamba: attention that turns half of each head in some layers, states in the others."""
    keys = keys.completed({**_DEFAULTS, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5})
    keys.refuse("hidden_act", "silu", SILU)
    eps, dim = keys.need("rms_norm_eps"), _head_dim(keys)
    keys.refuse("partial_rotary_factor", 0.5, "its class turns half of a head whatever is written")
    keys.refuse("attn_rotary_emb", dim // 2, "its class turns half of a head whatever is written")
    keys.refuse("num_experts", 1, "its class has no experts")

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        state = isinstance(keys.spec.layers[index], State)
        return Block(
            mixer=_state(keys, f"{prefix}.mamba", width=_expanded(keys), norm="gated")
            if state
            else _attention(keys, f"{prefix}.self_attn", rope=0),
            mlp=_product(keys, f"{prefix}.feed_forward"),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.pre_ff_layernorm", eps=eps),
        )

    return Network(
        vocab=keys.need("vocab_size"),
        hidden=keys.need("hidden_size"),
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        ropes=(keys.rope(dim, partial=True),),
        norm=Norm(name="model.final_layernorm", eps=eps),
        embedding=_EMBEDDING,
        head=_EMBEDDING if keys.need("tie_word_embeddings") else "lm_head.weight",
    )


def _granite(keys: Keys) -> Network:
    """Granite 4: attention, mostly without positions, or a state; a shared product, and experts where there are any."""
    keys = keys.completed(
        {**_DEFAULTS, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
        | {"residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_experts_per_tok": 2, "num_local_experts": 8}
        | {"shared_intermediate_size": 1024}
    )
    keys.refuse("hidden_act", "silu", SILU)
    hidden, eps, dim = keys.need("hidden_size"), keys.need("rms_norm_eps"), _head_dim(keys)
    count = expert_count(keys, "num_local_experts")
    rope = 0 if keys.get("position_embedding_type") == "rope" else None

    def product(prefix: str) -> Mlp | Experts:
        inner = keys.need("shared_intermediate_size")
        shared = Mlp(prefix=f"{prefix}.shared_mlp", hidden=hidden, inner=inner, activation="silu")
        if not count:
            return shared
        sparse = f"{prefix}.block_sparse_moe"
        return Experts(
            prefix=f"{sparse}.experts",
            hidden=hidden,
            inner=keys.need("intermediate_size"),
            count=count,
            routing=Routing(name=f"{sparse}.router.layer", chosen=keys.need("num_experts_per_tok"), renormed=True),
            shared=shared,
        )

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        state = isinstance(keys.spec.layers[index], State)
        return Block(
            mixer=_state(keys, f"{prefix}.mamba", width=_expanded(keys), norm="gated")
            if state
            else _attention(keys, f"{prefix}.self_attn", rope=rope, scale=keys.need("attention_multiplier")),
            mlp=product(prefix),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.post_attention_layernorm", eps=eps),
            scale=keys.need("residual_multiplier"),
        )

    return Network(
        vocab=keys.need("vocab_size"),
        hidden=hidden,
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        ropes=() if rope is None else (keys.rope(dim),),
        norm=Norm(name="model.norm", eps=eps),
        embedding=_EMBEDDING,
        head=_EMBEDDING if keys.need("tie_word_embeddings") else "lm_head.weight",
        embedding_scale=keys.need("embedding_multiplier"),
        logits_scale=1 / keys.need("logits_scaling"),
        parts=_granite_part,
    )


_of_experts = stacked(turned=False)


def _granite_part(name: str) -> Part:
    """Where Granite's products lie: gate and other factor as ``input_linear``, and so of all experts of a layer."""
    found = re.fullmatch(r"(.+\.shared_mlp)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        part = _of_experts(name)
        for ours, published in (
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
        ):
            if part.name.endswith(ours):
                return Part(name=part.name.removesuffix(ours) + published, index=part.index, take=part.take)
        return part
    if found[2] == "down":
        return Part(name=f"{found[1]}.output_linear.weight")
    half = ("gate", "up").index(found[2])
    return Part(name=f"{found[1]}.input_linear.weight", take=lambda rows: rows.tensor_split(2)[half])


FAMILIES = {"falcon_h1": _falcon_h1, "bamba": _bamba, "granitemoehybrid": _granite}
