"""Tensors of a network that files hold as rows of another, or with their rows in another order."""

import re
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from kvist.model.network import Part, whole


def fused(queries: int, keys: int, inner: int) -> Callable[[str], Part]:
    """Where queries, keys and values lie in ``qkv_proj``, gate and other factor in ``gate_up_proj``.

    Args:
        queries: rows of all heads.
        keys: rows of all KV heads.
        inner: rows of the gate.
    """
    # The last takes all that is left, so that rows too many are found.
    rows = {
        "self_attn.q_proj": ("self_attn.qkv_proj", slice(queries)),
        "self_attn.k_proj": ("self_attn.qkv_proj", slice(queries, queries + keys)),
        "self_attn.v_proj": ("self_attn.qkv_proj", slice(queries + keys, None)),
        "mlp.gate_proj": ("mlp.gate_up_proj", slice(inner)),
        "mlp.up_proj": ("mlp.gate_up_proj", slice(inner, None)),
    }

    def part(name: str) -> Part:
        found = re.fullmatch(r"(model\.layers\.[0-9]+)\.(.+)\.weight", name)
        if found is None or found[2] not in rows:
            return whole(name)
        stored, taken = rows[found[2]]
        return Part(name=f"{found[1]}.{stored}.weight", take=lambda matrix: matrix[taken])

    return part


def straight(heads: Mapping[str, int], name: str) -> Part:
    """Queries and keys whose pairs lie side by side, :func:`straightened`; ``heads`` of q and k."""
    found = re.fullmatch(r".+\.self_attn\.([qk])_proj\.(?:weight|bias)", name)
    return whole(name) if found is None else Part(name=name, take=partial(straightened, heads=heads[found[1]]))


def straightened(rows: Tensor, heads: int) -> Tensor:
    """Bring heads whose pairs lie side by side to the arrangement of Hugging Face's Llama: half a head apart.

    Args:
        rows: ``[heads x dim, …]`` of queries or keys.
        heads: in them.
    """
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
