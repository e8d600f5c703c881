"""Multi-head latent attention (MLA, arXiv:2405.04434 section 2.1): what is stored of a token is one latent vector.

It sees the cache through one verb, :meth:`kvist.kernels.latent.LatentPlan.attend`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvist.kernels.latent import LatentHeads
from kvist.model.linear import Linear
from kvist.model.mixers.places import Pass, Places
from kvist.model.norms import RMSNorm
from kvist.model.weights import Checkpoint
from kvist.spec.layers import Latent, Layer


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention over latents, of which keys and values of every head are made.

    Attributes:
        prefix: of its tensors, such as ``model.layers.0.self_attn``.
        hidden: width of the stream.
        heads: of queries, and of the keys and values that are made.
        nope: width of the part of queries and keys that is not rotated.
        rope_dim: of the part that is, whose key all heads share.
        value: width of a value.
        rank: of the latents.
        query_rank: of the vector of which queries are made; None where they are made of the stream.
        rope: which of the network's rotary positions.
        interleaved: the rotary part's pairs are stored side by side, instead of as two halves.
        scale: of the scores.
        bias: whether the products of the stream, and the output, have one.
        eps: of the norms of latents and of queries' vectors.
    """

    prefix: str
    hidden: int
    heads: int
    nope: int
    rope_dim: int
    value: int
    rank: int
    query_rank: int | None
    rope: int
    scale: float
    interleaved: bool = True
    bias: bool = False
    eps: float = 1e-6

    stores: ClassVar[tuple[type[Layer], ...]] = (Latent,)


class LatentMixer:
    """Projections, norms, rotation, attention, output.

    Queries are kept as the unrotated parts of all heads, then the rotated ones, each turned from the order of the file
    into halves.

    Args:
        checkpoint: to read from.
        net: what is computed.
        places: where the layer's latents are stored.
    """

    def __init__(self, checkpoint: Checkpoint, net: LatentAttention, places: Places) -> None:
        self.net = net
        self.group, self.slot = places.of(Latent)
        heads, key = net.heads, net.nope + net.rope_dim
        prefix = net.prefix
        order = torch.arange(net.rope_dim)
        if net.interleaved:
            order = order.view(-1, 2).t().flatten()

        def queries(rows: Tensor) -> Tensor:
            split = rows.view(heads, key, -1)
            return torch.cat((split[:, : net.nope].flatten(0, 1), split[:, net.nope :][:, order].flatten(0, 1)))

        def stacked(kind: str, tail: tuple[int, ...]) -> Tensor:
            first = "q_proj" if net.query_rank is None else "q_a_proj"
            height = heads * key if net.query_rank is None else net.query_rank
            rows = torch.zeros(height + net.rank + net.rope_dim, *tail, dtype=checkpoint.dtype)
            # Queries that are made of the stream itself have no bias.
            if kind == "weight" or net.query_rank is not None:
                checkpoint.read(f"{prefix}.{first}.{kind}", (height, *tail), rows[:height])
            checkpoint.read(f"{prefix}.kv_a_proj_with_mqa.{kind}", (len(rows) - height, *tail), rows[height:])
            if net.query_rank is None:
                rows[:height] = queries(rows[:height]).view(height, *tail)
            rows[height + net.rank :] = rows[height + net.rank :][order]
            return rows

        self.down = Linear(stacked("weight", (net.hidden,)), stacked("bias", ()) if net.bias else None)
        self.query_norm: RMSNorm | None = None
        self.up: Linear | None = None
        if net.query_rank is not None:
            self.query_norm = RMSNorm(checkpoint.norm(f"{prefix}.q_a_layernorm.weight", net.query_rank), net.eps)
            rows = checkpoint.tensor(f"{prefix}.q_b_proj.weight", (heads * key, net.query_rank))
            self.up = Linear(queries(rows))
        self.latent_norm = RMSNorm(checkpoint.norm(f"{prefix}.kv_a_layernorm.weight", net.rank), net.eps)
        made = checkpoint.tensor(f"{prefix}.kv_b_proj.weight", (heads * (net.nope + net.value), net.rank))
        made = made.view(heads, net.nope + net.value, net.rank)
        # Values first, as they are made.
        weight = torch.cat((made[:, net.nope :], made[:, : net.nope]), dim=1)
        self.heads = LatentHeads(weight, value=net.value, rope=net.rope_dim)
        self.output = Linear(
            checkpoint.tensor(f"{prefix}.o_proj.weight", (net.hidden, heads * net.value)),
            checkpoint.tensor(f"{prefix}.o_proj.bias", (net.hidden,)) if net.bias else None,
        )

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the tokens' latents. With ``rows`` only those are returned."""
        net, count = self.net, len(x)
        whole = self.down(x)
        stored = whole[:, -(net.rank + net.rope_dim) :]
        queries = whole
        if self.up is not None and self.query_norm is not None:
            queries = self.up(self.query_norm(whole[:, : net.query_rank]))
        unturned = net.heads * net.nope
        nope = queries[:, :unturned].view(count, net.heads, net.nope)
        rope = queries[:, unturned : unturned + net.heads * net.rope_dim].view(count, net.heads, net.rope_dim)
        rotation = step.rotations[net.rope]
        rotation.turn(rope, None)
        rotation.turn(stored[:, net.rank :].view(count, 1, net.rope_dim), None)
        stored[:, : net.rank] = self.latent_norm(stored[:, : net.rank])
        mixed = step.latents(self.group).attend(self.slot, nope, rope, stored[:, None], self.heads)
        return self.output(mixed if rows is None else mixed.index_select(0, rows))
