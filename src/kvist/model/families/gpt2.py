"""GPT-2: learned positions, layer norms, every query head with a key and a value of its own.

Matrices are stored as ``[inputs, outputs]``, those of queries, keys and values as one. Source: GPT2Config and
modeling_gpt2.py of transformers 5.24.
"""

import re
from collections.abc import Callable
from functools import partial

from torch import Tensor

from kvist.model.families.keys import Keys
from kvist.model.network import Block, Mlp, Network, Norm, Part, SelfAttention, whole

_EMBEDDING = "transformer.wte.weight"


def read_gpt2(keys: Keys) -> Network:
    """Describe the network of a GPT-2.

    Raises:
        UnsupportedModel: as :func:`kvist.model.families.network_of`.
    """
    keys = keys.completed({
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": 50257,
    })  # fmt: skip
    keys.refuse("attention_head_type", "multihead", "one key for all heads is another family")
    keys.refuse("add_cross_attention", False, "there is no encoder to attend to")
    keys.refuse("scale_attn_by_inverse_layer_idx", False, "layers share the scale of their scores")
    hidden, heads, eps = keys.need("hidden_size"), keys.need("num_attention_heads"), keys.need("layer_norm_epsilon")
    dim = keys.need("head_dim")
    activation = keys.activation("activation_function")

    def block(index: int) -> Block:
        prefix = f"transformer.h.{index}"
        return Block(
            mixer=SelfAttention(
                prefix=f"{prefix}.attn",
                hidden=hidden,
                heads=heads,
                kv_heads=heads,
                dim=dim,
                rope=None,
                scale=dim**-0.5 if keys.get("scale_attn_weights", True) else 1.0,
                qkv_bias=True,
                out_bias=True,
            ),
            mlp=Mlp(
                prefix=f"{prefix}.mlp",
                hidden=hidden,
                inner=keys.get("n_inner", 4 * hidden),
                activation=activation,
                gate=None,
                up="c_fc",
                down="c_proj",
                bias=True,
            ),
            before_mixer=Norm(name=f"{prefix}.ln_1", eps=eps, kind="layer"),
            before_mlp=Norm(name=f"{prefix}.ln_2", eps=eps, kind="layer"),
        )

    return Network(
        vocab=keys.need("vocab_size"),
        hidden=hidden,
        blocks=tuple(block(index) for index in range(keys.need("num_hidden_layers"))),
        norm=Norm(name="transformer.ln_f", eps=eps, kind="layer"),
        embedding=_EMBEDDING,
        head=_EMBEDDING if keys.need("tie_word_embeddings") else "lm_head.weight",
        positions=("transformer.wpe.weight", keys.need("max_position_embeddings")),
        parts=_part,
        # Causal masks that the first published files hold.
        ignored=(".attn.bias", ".attn.masked_bias"),
    )


def _part(name: str) -> Part:
    found = re.fullmatch(r"(transformer\.h\.[0-9]+)\.(attn\.([qkvo])_proj|mlp\.c_fc|mlp\.c_proj)\.(weight|bias)", name)
    if found is None:
        return whole(name)
    turned = found[4] == "weight"
    third = "qkv".find(found[3]) if found[3] else -1
    if third >= 0:
        return Part(name=f"{found[1]}.attn.c_attn.{found[4]}", take=partial(_third, index=third))
    stored = f"{found[1]}.attn.c_proj" if found[3] else f"{found[1]}.{found[2]}"
    take: Callable[[Tensor], Tensor] | None = Tensor.t if turned else None
    return Part(name=f"{stored}.{found[4]}", take=take)


def _third(tensor: Tensor, index: int) -> Tensor:
    return tensor.chunk(3, dim=-1)[index].t()


FAMILIES = {"gpt2": read_gpt2}
