"""Gated delta nets in three layers of four, attention with an output gate in the fourth: Qwen3-Next and Qwen3.5.

Sources: the configuration and modelling files of that name in transformers 5.24.
"""

from functools import partial

from kvist.model.families.keys import Keys
from kvist.model.families.mixtures import qwen_experts
from kvist.model.mixers.gated_delta import GatedDelta
from kvist.model.network import Block, Mlp, Network, Norm, SelfAttention
from kvist.spec.layers import State

_DEFAULTS = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_EMBEDDING = "model.embed_tokens.weight"


def _read(keys: Keys, *, joined: bool, experts: bool) -> Network:
    """Describe the network of such a family.

    Args:
        keys: of the model.
        joined: how the projections of a gated delta net are stored, see :class:`GatedDelta`.
        experts: whether there may be experts, and then a shared one behind a gate.

    Raises:
        UnsupportedModel: as :func:`kvist.model.families.network_of`.
    """
    keys = keys.completed(_DEFAULTS)
    keys.refuse("hidden_act", "silu", "convolution and gate of a gated delta net have silu")
    keys.refuse("attn_output_gate", True, "attention has an output gate")
    hidden, eps, dim = keys.need("hidden_size"), keys.need("rms_norm_eps"), keys.need("head_dim")
    bias = bool(keys.get("attention_bias"))

    def mixer(index: int) -> GatedDelta | SelfAttention:
        prefix = f"model.layers.{index}"
        if isinstance(keys.spec.layers[index], State):
            return GatedDelta(
                prefix=f"{prefix}.linear_attn",
                hidden=hidden,
                key_heads=keys.need("linear_num_key_heads"),
                heads=keys.need("linear_num_value_heads"),
                key_dim=keys.need("linear_key_head_dim"),
                value_dim=keys.need("linear_value_head_dim"),
                kernel=keys.need("linear_conv_kernel_dim"),
                eps=eps,
                joined=joined,
            )
        return SelfAttention(
            prefix=f"{prefix}.self_attn",
            hidden=hidden,
            heads=keys.need("num_attention_heads"),
            kv_heads=keys.need("num_key_value_heads"),
            dim=dim,
            rope=0,
            scale=dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            head_norm="each",
            eps=eps,
            gated=True,
        )

    def product(prefix: str) -> Mlp:
        return Mlp(prefix=prefix, hidden=hidden, inner=keys.need("intermediate_size"), activation="silu")

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        return Block(
            mixer=mixer(index),
            mlp=(qwen_experts(keys, index, shared=True) if experts else None) or product(f"{prefix}.mlp"),
            before_mixer=Norm(name=f"{prefix}.input_layernorm", eps=eps),
            before_mlp=Norm(name=f"{prefix}.post_attention_layernorm", eps=eps),
        )

    return Network(
        vocab=keys.need("vocab_size"),
        hidden=hidden,
        blocks=tuple(block(index) for index in range(len(keys.spec.layers))),
        ropes=(keys.rope(dim, partial=True),),
        norm=Norm(name="model.norm", eps=eps),
        head=_EMBEDDING if keys.need("tie_word_embeddings") else "lm_head.weight",
        norm_offset=1.0,
    )


FAMILIES = {
    "qwen3_next": partial(_read, joined=True, experts=True),
    "qwen3_5_text": partial(_read, joined=False, experts=False),
    "qwen3_5_moe_text": partial(_read, joined=False, experts=True),
}
