"""Models with a state: Mamba 1 and 2 alone, Mamba-1 between attention (Jamba), Mamba-2 beside it (Falcon-H1).

Sources: the configuration and modelling files of these names in transformers 5.24.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvist.errors import UnsupportedModel
from kvist.model.experts import Experts
from kvist.model.families.keys import Keys
from kvist.model.mixers.mamba import Mamba, Mamba2
from kvist.model.network import Block, Mlp, Network, Norm, Part, SelfAttention, Together
from kvist.model.routing import Routing
from kvist.spec.layers import State

_SILU = "the convolution and the gate of a state have silu"
_JAMBA_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def _limits(keys: Keys) -> tuple[float, float]:
    found: Any = keys.get("time_step_limit", [0.0, float("inf")])
    # transformers 5 writes what JSON has no number for as {"__float__": "Infinity"}.
    try:
        limits = [value.get("__float__") if isinstance(value, dict) else value for value in found]
        least, most = (float(str(value)) for value in limits)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"time_step_limit: {found!r} is not computed; two numbers are", key="time_step_limit"
        ) from error
    return least, most


def _alone(keys: Keys, eps: float, mixer: Callable[[str], Mamba | Mamba2]) -> Network:
    """A network of states alone: no product follows them."""
    keys.refuse("hidden_act", "silu", _SILU)

    def block(index: int) -> Block:
        prefix = f"backbone.layers.{index}"
        return Block(mixer=mixer(f"{prefix}.mixer"), before_mixer=Norm(name=f"{prefix}.norm", eps=eps))

    embedding = "backbone.embeddings.weight"
    return Network(
        vocab=keys.need("vocab_size"),
        hidden=keys.need("hidden_size"),
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        norm=Norm(name="backbone.norm_f", eps=eps),
        embedding=embedding,
        head=embedding if keys.need("tie_word_embeddings") else "lm_head.weight",
    )


def _mamba(keys: Keys) -> Network:
    keys = keys.completed(
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "expand": 2, "state_size": 16, "conv_kernel": 4}
    )
    hidden = keys.need("hidden_size")
    rank = keys.get("time_step_rank", "auto")

    def mixer(prefix: str) -> Mamba:
        return Mamba(
            prefix=prefix,
            hidden=hidden,
            channels=keys.get("intermediate_size", keys.need("expand") * hidden),
            size=keys.need("state_size"),
            rank=-(-hidden // 16) if rank == "auto" else rank,
            kernel=keys.need("conv_kernel"),
            conv_bias=bool(keys.get("use_conv_bias", True)),
            bias=bool(keys.get("use_bias")),
        )

    return _alone(keys, keys.need("layer_norm_epsilon"), mixer)


def _mamba2(keys: Keys) -> Network:
    keys = keys.completed(
        {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-5, "head_dim": 64, "n_groups": 8, "state_size": 128}
        | {"num_heads": 128, "conv_kernel": 4}
    )
    eps, bias = keys.need("layer_norm_epsilon"), bool(keys.get("use_bias"))
    least, most = _limits(keys)

    def mixer(prefix: str) -> Mamba2:
        return Mamba2(
            prefix=prefix,
            hidden=keys.need("hidden_size"),
            heads=keys.need("num_heads"),
            dim=keys.need("head_dim"),
            groups=keys.need("n_groups"),
            size=keys.need("state_size"),
            kernel=keys.need("conv_kernel"),
            conv_bias=bool(keys.get("use_conv_bias", True)),
            bias=bias,
            out_bias=bias,
            norm="gated",
            norm_groups=keys.need("n_groups"),
            eps=eps,
            least=least,
            most=most,
        )

    return _alone(keys, eps, mixer)


def _jamba(keys: Keys) -> Network:
    keys = keys.completed(
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
        | {"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    )
    keys.refuse("hidden_act", "silu", _SILU)
    hidden, eps, inner = keys.need("hidden_size"), keys.need("rms_norm_eps"), keys.need("intermediate_size")
    heads, count = keys.need("num_attention_heads"), keys.need("num_experts")
    dim = keys.get("head_dim", hidden // heads)
    rank = keys.get("mamba_dt_rank", "auto")

    def mixer(index: int) -> Mamba | SelfAttention:
        prefix = f"model.layers.{index}"
        if isinstance(keys.spec.layers[index], State):
            return Mamba(
                prefix=f"{prefix}.mamba",
                hidden=hidden,
                channels=keys.need("mamba_expand") * hidden,
                size=keys.need("mamba_d_state"),
                rank=-(-hidden // 16) if rank == "auto" else rank,
                kernel=keys.need("mamba_d_conv"),
                conv_bias=bool(keys.get("mamba_conv_bias", True)),
                bias=bool(keys.get("mamba_proj_bias")),
                norms=(_JAMBA_NORMS, eps),
            )
        return SelfAttention(
            prefix=f"{prefix}.self_attn",
            hidden=hidden,
            heads=heads,
            kv_heads=keys.need("num_key_value_heads"),
            dim=dim,
            rope=None,
            scale=dim**-0.5,
        )

    def product(index: int) -> Mlp | Experts:
        prefix = f"model.layers.{index}.feed_forward"
        if count == 1 or index % keys.need("expert_layer_period") != keys.need("expert_layer_offset"):
            return Mlp(prefix=prefix, hidden=hidden, inner=inner, activation="silu")
        routing = Routing(name=f"{prefix}.router", chosen=keys.need("num_experts_per_tok"))
        return Experts(prefix=f"{prefix}.experts", hidden=hidden, inner=inner, count=count, routing=routing)

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        return Block(
            mixer=mixer(index),
            mlp=product(index),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.pre_ff_layernorm", eps=eps),
        )

    embedding = "model.embed_tokens.weight"
    return Network(
        vocab=keys.need("vocab_size"),
        hidden=hidden,
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        norm=Norm(name="model.final_layernorm", eps=eps),
        embedding=embedding,
        head=embedding if keys.need("tie_word_embeddings") else "lm_head.weight",
    )


def _falcon_h1(keys: Keys) -> Network:
    keys = keys.completed(
        {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "mamba_expand": 2, "mamba_d_ssm": 1024}
        | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
        | {"key_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0]}
        | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5}
        | {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}
    )
    keys.refuse("hidden_act", "silu", _SILU)
    keys.refuse("attention_bias", False, "its multipliers would have to leave biases out")
    hidden, eps, heads = keys.need("hidden_size"), keys.need("rms_norm_eps"), keys.need("num_attention_heads")
    dim = keys.get("head_dim", hidden // heads)
    size, groups, state_heads = keys.need("mamba_d_state"), keys.need("mamba_n_groups"), keys.need("mamba_n_heads")
    width = keys.get("mamba_d_ssm", keys.need("mamba_expand") * hidden)
    state_dim = width // state_heads if keys.config["mamba_d_head"] == "auto" else keys.need("mamba_d_head")
    if width != state_heads * state_dim:
        raise UnsupportedModel(
            f"mamba_d_head: {state_heads} heads of {state_dim} are not mamba_d_ssm, {width}", key="mamba_d_head"
        )
    into = keys.need("attention_in_multiplier")
    least, most = _limits(keys)
    norm: Literal["gated", "before"] = "before" if keys.get("mamba_norm_before_gate", True) else "gated"

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        attention = SelfAttention(
            prefix=f"{prefix}.self_attn",
            hidden=hidden,
            heads=heads,
            kv_heads=keys.need("num_key_value_heads"),
            dim=dim,
            rope=0,
            # Queries and keys are each as large as the input's factor makes them; turning them changes nothing.
            scale=dim**-0.5 * keys.need("key_multiplier") * into**2,
        )
        state = Mamba2(
            prefix=f"{prefix}.mamba",
            hidden=hidden,
            heads=state_heads,
            dim=state_dim,
            groups=groups,
            size=size,
            kernel=keys.need("mamba_d_conv"),
            conv_bias=bool(keys.get("mamba_conv_bias", True)),
            bias=bool(keys.get("mamba_proj_bias")),
            out_bias=bool(keys.get("projectors_bias")),
            norm=norm if keys.get("mamba_rms_norm") else None,
            norm_groups=groups,
            eps=eps,
            least=least,
            most=most,
        )
        return Block(
            mixer=Together(
                parts=(attention, state),
                factors=(into * keys.need("attention_out_multiplier"), keys.need("ssm_out_multiplier")),
            ),
            mlp=Mlp(
                prefix=f"{prefix}.feed_forward",
                hidden=hidden,
                inner=keys.need("intermediate_size"),
                activation="silu",
                bias=bool(keys.get("mlp_bias")),
            ),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.pre_ff_layernorm", eps=eps),
        )

    counts = (width, width, groups * size, groups * size, state_heads)
    factors = torch.cat([torch.full((n,), float(f)) for n, f in zip(counts, keys.need("ssm_multipliers"), strict=True)])
    embedding = "model.embed_tokens.weight"
    return Network(
        vocab=keys.need("vocab_size"),
        hidden=hidden,
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        ropes=(keys.rope(dim),),
        norm=Norm(name="model.final_layernorm", eps=eps),
        embedding=embedding,
        head=embedding if keys.need("tie_word_embeddings") else "lm_head.weight",
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


FAMILIES = {"mamba": _mamba, "mamba2": _mamba2, "jamba": _jamba, "falcon_h1": _falcon_h1}
