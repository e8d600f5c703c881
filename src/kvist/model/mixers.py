"""What mixes tokens: attention with grouped KV heads, over everything or a window.

A mixer sees the cache through one verb, :meth:`kvist.kernels.attention.AttentionPlan.attend`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvist.kernels.attention import AttentionPlan
from kvist.kernels.cpu import PagedPlan
from kvist.model.linear import Linear
from kvist.model.norms import RMSNorm
from kvist.model.packed import GROUP
from kvist.model.rotary import FusedRotation, Rotation
from kvist.model.weights import Checkpoint


class AttentionMixer:
    """Projections, norms of heads, rotation, attention, output.

    Query heads are kept in the order ``[repeats, kv_heads]`` instead of the checkpoint's ``[kv_heads, repeats]``, in
    the rows of the query's weight and the columns of the output's: queries that share a KV head then lie so that
    attention needs no copy.

    Args:
        checkpoint: to read from.
        config: of the model.
        prefix: of the parameters' names, such as ``model.layers.0.self_attn``.
        slot: the layer's place in its group.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], prefix: str, slot: int) -> None:
        self.slot = slot
        self.kv_heads: int = config["num_key_value_heads"]
        self.repeats: int = config["num_attention_heads"] // self.kv_heads
        self.dim: int = config["head_dim"]
        heads, kv_heads, dim, hidden = self.repeats * self.kv_heads, self.kv_heads, self.dim, config["hidden_size"]
        self.turned = heads + kv_heads
        bias = bool(config.get("attention_bias"))
        widths = (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))

        def named(kind: str) -> list[str]:
            return [f"{prefix}.{part}.{kind}" for part, _ in widths]

        def stacked(kind: str, tail: tuple[int, ...]) -> Tensor:
            return by_repeats(checkpoint.rows(named(kind), [(count * dim, *tail) for _, count in widths]))

        def by_repeats(rows: Tensor) -> Tensor:
            queries = rows[: heads * dim].view(kv_heads, self.repeats, dim, -1)
            rows[: heads * dim] = queries.transpose(0, 1).reshape(heads * dim, *rows.shape[1:])
            return rows

        def columns_by_repeats(weight: Tensor) -> Tensor:
            return weight.view(hidden, kv_heads, self.repeats, -1).transpose(1, 2).reshape(weight.shape)

        self.qkv = Linear(
            stacked("weight", (hidden,)),
            stacked("bias", ()) if bias else None,
            checkpoint.codes(named("weight"), by_repeats),
        )
        name = f"{prefix}.o_proj"
        # Qwen 2 has biases on the way in only.
        output_bias = bias and config["model_type"] != "qwen2"
        self.output = Linear(
            columns_by_repeats(checkpoint.tensor(f"{name}.weight", (hidden, heads * dim))),
            checkpoint.tensor(f"{name}.bias", (hidden,)) if output_bias else None,
            # A head that is no whole number of groups could not take its scales along.
            checkpoint.codes([f"{name}.weight"], columns_by_repeats) if dim % GROUP == 0 else None,
        )
        self.norm: RMSNorm | None = None
        if config["model_type"] in ("qwen3", "gemma3", "gemma3_text"):
            multipliers = torch.cat(
                [
                    checkpoint.norm(f"{prefix}.q_norm.weight", dim).expand(heads, dim),
                    checkpoint.norm(f"{prefix}.k_norm.weight", dim).expand(kv_heads, dim),
                ]
            )
            self.norm = RMSNorm(multipliers, config["rms_norm_eps"])

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation | FusedRotation,
        attention: AttentionPlan | PagedPlan,
        rows: Tensor | None,
    ) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the tokens' keys and values. With ``rows`` only those are returned."""
        projected = self.qkv(x).view(len(x), self.turned + self.kv_heads, self.dim)
        rotation.turn(projected[:, : self.turned], self.norm)
        queries = projected[:, : self.turned - self.kv_heads].view(len(x), self.repeats, self.kv_heads, self.dim)
        mixed = attention.attend(self.slot, queries, projected[:, self.turned - self.kv_heads :])
        return self.output(mixed if rows is None else mixed.index_select(0, rows))
