"""Models of states alone, Mamba 1 and 2, and Mamba-1 between attention: Jamba.

Sources: the configuration and modelling files of these names in transformers 5.24.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.model.experts import Experts
from kvist.model.families.keys import Keys
from kvist.model.mixers.mamba import Mamba, Mamba2
from kvist.model.network import Block, Mlp, Network, Norm, SelfAttention
from kvist.model.routing import Routing
from kvist.spec.layers import State

SILU = "the convolution and the gate of a state have silu"
"""Why no other activation is computed."""

_JAMBA_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def limits(keys: Keys) -> tuple[float, float]:
    """Shortest and longest step of Mamba-2, which ``time_step_limit`` gives.

    Raises:
        UnsupportedModel: they are no two numbers.
    """
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


def _alone(keys: Keys, mixer: Callable[[str], Mamba | Mamba2]) -> Network:
    """A network of states alone: no product follows them."""
    keys.refuse("hidden_act", "silu", SILU)
    eps = keys.need("layer_norm_epsilon")

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
        wide=bool(keys.get("residual_in_fp32", True)),
    )


def _mamba(keys: Keys, *, normed: bool) -> Network:
    """Mamba-1; where ``normed``, what makes steps, inputs and outputs goes through norms without multipliers."""
    keys = keys.completed(
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "expand": 2, "state_size": 16, "conv_kernel": 4}
        | {"mixer_rms_eps": 1e-6}
    )
    hidden = keys.need("hidden_size")

    def mixer(prefix: str) -> Mamba:
        return Mamba(
            prefix=prefix,
            hidden=hidden,
            channels=keys.get("intermediate_size", keys.need("expand") * hidden),
            size=keys.need("state_size"),
            rank=_rank(keys, "time_step_rank"),
            kernel=keys.need("conv_kernel"),
            conv_bias=bool(keys.get("use_conv_bias", True)),
            bias=bool(keys.get("use_bias")),
            norms=(None, keys.need("mixer_rms_eps")) if normed else None,
        )

    return _alone(keys, mixer)


def _rank(keys: Keys, key: str) -> int:
    rank: Any = keys.get(key, "auto")
    return int(-(-keys.need("hidden_size") // 16) if rank == "auto" else rank)


def _mamba2(keys: Keys) -> Network:
    keys = keys.completed(
        {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-5, "head_dim": 64, "n_groups": 8, "state_size": 128}
        | {"num_heads": 128, "conv_kernel": 4}
    )
    eps, bias = keys.need("layer_norm_epsilon"), bool(keys.get("use_bias"))
    least, most = limits(keys)

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

    return _alone(keys, mixer)


def _jamba(keys: Keys) -> Network:
    keys = keys.completed(
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
        | {"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    )
    keys.refuse("hidden_act", "silu", SILU)
    hidden, eps, inner = keys.need("hidden_size"), keys.need("rms_norm_eps"), keys.need("intermediate_size")
    heads, count = keys.need("num_attention_heads"), keys.need("num_experts")
    dim = keys.get("head_dim", hidden // heads)

    def mixer(index: int) -> Mamba | SelfAttention:
        prefix = f"model.layers.{index}"
        if isinstance(keys.spec.layers[index], State):
            return Mamba(
                prefix=f"{prefix}.mamba",
                hidden=hidden,
                channels=keys.need("mamba_expand") * hidden,
                size=keys.need("mamba_d_state"),
                rank=_rank(keys, "mamba_dt_rank"),
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


FAMILIES: dict[str, Callable[[Keys], Network]] = {
    "mamba": partial(_mamba, normed=False),
    "falcon_mamba": partial(_mamba, normed=True),
    "mamba2": _mamba2,
    "jamba": _jamba,
}
