"""Llama 4: attention in chunks, some layers without positions, experts between dense layers.

Layers with rotary positions see their chunk, the others everything; what far into a sequence means is told to these by
a temperature alone. Sources: Llama4TextConfig and modeling_llama4.py of transformers 5.24.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvist.errors import UnsupportedModel
from kvist.model.experts import Experts, stacked
from kvist.model.families.dense import Dense, read_dense
from kvist.model.families.keys import Keys
from kvist.model.families.mixtures import expert_count
from kvist.model.network import Block, Mlp, Network, Part, Temperature
from kvist.model.routing import Routing

_DEFAULTS = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 202048, "hidden_size": 5120,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "use_qk_norm": True,
    "interleave_moe_layer_step": 1, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
# Turned vectors are as long as before, so that the norm behind the rotation may as well come before it.
_KEEP_LENGTHS = ("default", "linear", "llama3")


def read_llama4(keys: Keys) -> Network:
    """Describe the network of a Llama 4's text model.

    Raises:
        UnsupportedModel: as :func:`kvist.model.families.network_of`.
    """
    keys = keys.completed(_DEFAULTS)
    normed = bool(keys.need("use_qk_norm"))
    scaling = (keys.get("rope_scaling") or {}).get("rope_type", "default")
    if normed and scaling not in _KEEP_LENGTHS:
        raise UnsupportedModel(
            f"rope_scaling: {scaling!r} is not computed beside use_qk_norm; supported are {', '.join(_KEEP_LENGTHS)}",
            key="rope_scaling",
        )
    temperature = None
    if keys.need("attn_temperature_tuning"):
        temperature = Temperature(floor=keys.need("floor_scale"), scale=keys.need("attn_scale"))
    family = Dense(
        biases=("attention_bias", "attention_bias", None),
        head_norm="unit" if normed else None,
        interleaved=True,
        turned="listed",
        experts=_product,
    )
    network = read_dense(family, keys)

    def block(read: Block) -> Block:
        if read.mixer.rope is not None:
            return read
        return replace(read, mixer=replace(read.mixer, head_norm=None, temperature=temperature))

    return replace(
        network,
        blocks=tuple(block(read) for read in network.blocks),
        parts=partial(_part, network.parts),
    )


def _product(keys: Keys, index: int) -> Mlp | Experts:
    prefix, hidden, activation = f"model.layers.{index}.feed_forward", keys.need("hidden_size"), keys.activation()
    step, mixed = keys.need("interleave_moe_layer_step"), keys.get("moe_layers")
    if (index + 1) % step if mixed is None else index not in mixed:
        return Mlp(prefix=prefix, hidden=hidden, inner=keys.need("intermediate_size_mlp"), activation=activation)
    inner = keys.need("intermediate_size")
    return Experts(
        prefix=f"{prefix}.experts",
        hidden=hidden,
        inner=inner,
        count=expert_count(keys, "num_local_experts"),
        routing=Routing(
            name=f"{prefix}.router", chosen=keys.need("num_experts_per_tok"), score="sigmoid", on_input=True
        ),
        activation=activation,
        shared=Mlp(prefix=f"{prefix}.shared_expert", hidden=hidden, inner=inner, activation=activation),
    )


def _part(straight: Callable[[str], Part], name: str) -> Part:
    return straight(name) if ".self_attn." in name else _stacked(name)


_stacked = stacked(turned=True)

FAMILIES = {"llama4": read_llama4, "llama4_text": read_llama4}
