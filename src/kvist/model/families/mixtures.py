"""Families of Llama's shape with experts in place of a layer's product.

Sources: the configuration and modelling files of that name in transformers 5.24.
"""

from dataclasses import replace
from functools import partial

from kvist.model.experts import Clamp, Experts, stacked
from kvist.model.families.dense import Dense, read_dense
from kvist.model.families.keys import Keys
from kvist.model.network import Mlp, Network
from kvist.model.routing import Routing


def expert_count(keys: Keys, name: str) -> int:
    """How many experts a layer has.

    Args:
        keys: of the model.
        name: of the key in the family's published files; transformers 5 writes ``num_local_experts`` for most.
    """
    count = keys.get("num_local_experts")
    return int(keys.need(name) if count is None else count)


def _mixtral(keys: Keys, index: int) -> Experts:
    prefix = f"model.layers.{index}.block_sparse_moe"
    return Experts(
        prefix=f"{prefix}.experts",
        hidden=keys.need("hidden_size"),
        inner=keys.need("intermediate_size"),
        count=expert_count(keys, "num_local_experts"),
        routing=Routing(name=f"{prefix}.gate", chosen=keys.need("num_experts_per_tok"), renormed=True),
        activation=keys.activation(),
        gate="w1",
        up="w3",
        down="w2",
    )


def qwen_experts(keys: Keys, index: int, *, shared: bool) -> Experts | None:
    """The experts of Qwen 2, 3 and 3-Next; None for a layer with a product alone.

    Args:
        keys: of the model, completed.
        index: of the layer.
        shared: whether there is a shared product, behind a gate.
    """
    dense = keys.get("mlp_only_layers", [])
    count = expert_count(keys, "num_experts")
    if index in dense or count == 0 or (index + 1) % keys.need("decoder_sparse_step"):
        return None
    prefix = f"model.layers.{index}.mlp"
    hidden, activation = keys.need("hidden_size"), keys.activation()
    product = None
    if shared:
        inner = keys.need("shared_expert_intermediate_size")
        product = Mlp(prefix=f"{prefix}.shared_expert", hidden=hidden, inner=inner, activation=activation)
    return Experts(
        prefix=f"{prefix}.experts",
        hidden=hidden,
        inner=keys.need("moe_intermediate_size"),
        count=count,
        routing=Routing(
            name=f"{prefix}.gate", chosen=keys.need("num_experts_per_tok"), renormed=keys.need("norm_topk_prob")
        ),
        activation=activation,
        shared=product,
        shared_gate=f"{prefix}.shared_expert_gate.weight" if shared else None,
    )


def _gpt_oss_experts(keys: Keys, index: int) -> Experts:
    prefix = f"model.layers.{index}.mlp"
    return Experts(
        prefix=f"{prefix}.experts",
        hidden=keys.need("hidden_size"),
        inner=keys.need("intermediate_size"),
        count=expert_count(keys, "num_local_experts"),
        routing=Routing(name=f"{prefix}.router", chosen=keys.need("num_experts_per_tok"), renormed=True, bias=True),
        bias=True,
        clamp=Clamp(alpha=keys.need("swiglu_alpha"), limit=keys.need("swiglu_limit")),
    )


_GPT_OSS = Dense(
    defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
    },
    biases=("attention_bias", "attention_bias", None), sinks=True, experts=_gpt_oss_experts,
)  # fmt: skip
_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss(keys: Keys) -> Network:
    """gpt-oss: sinks, windows in every other layer, experts with biases whose gate is clamped.

    Its class fills in YaRN where a file says nothing of positions. Weights in MXFP4, as they are published, are not
    read: ``quantization_config`` is refused.
    """
    if keys.get("rope_scaling") is None and keys.get("rope_parameters") is None:
        keys = Keys(keys.spec, {**keys.config, "rope_scaling": _GPT_OSS_YARN})
    return replace(read_dense(_GPT_OSS, keys), parts=stacked(turned=True, interleaved=True))


_QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "decoder_sparse_step": 1, "norm_topk_prob": False}
_QWEN2 = {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "qkv_bias": True}
_QWEN3 = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}

FAMILIES = {
    "gpt_oss": _gpt_oss,
} | {
    name: partial(read_dense, family)
    for name, family in {
        "mixtral": Dense(
            defaults={
                "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2,
            },
            biases=(None, None, None), experts=_mixtral,
        ),
        "qwen2_moe": Dense(
            defaults=_QWEN | _QWEN2 | {"shared_expert_intermediate_size": 5632}, biases=("qkv_bias", None, None),
            experts=partial(qwen_experts, shared=True),
        ),
        "qwen3_moe": Dense(
            defaults=_QWEN | _QWEN3, biases=("attention_bias", "attention_bias", None), head_norm="each",
            experts=partial(qwen_experts, shared=False),
        ),
    }.items()
}  # fmt: skip
