"""Attention with grouped KV heads, over everything, a window or a chunk.

It sees the cache through one verb, :meth:`kvist.kernels.attention.AttentionPlan.attend`.
"""

import torch
from torch import Tensor

from kvist.kernels.cpu import Cpu, kernels_of
from kvist.kernels.hadamard import hadamard
from kvist.model.linear import Linear
from kvist.model.mixers.places import Pass, Places
from kvist.model.network import SelfAttention
from kvist.model.norms import RMSNorm
from kvist.model.packed import GROUP
from kvist.model.weights import Checkpoint
from kvist.spec.layers import Attention


class AttentionMixer:
    """Projections, norms of heads, rotation, attention, output.

    Where the format says so, keys are stored spread by a Hadamard matrix, and queries spread likewise, which leaves
    their products as they are; so are values, and what attention makes of them is turned back.

    Query heads are kept in the order ``[repeats, kv_heads]`` instead of the checkpoint's ``[kv_heads, repeats]``, in
    the rows of the query's weight and the columns of the output's: queries that share a KV head then lie so that
    attention needs no copy.

    Args:
        checkpoint: to read from.
        net: what is computed.
        places: where the layer's keys and values are stored.
    """

    def __init__(self, checkpoint: Checkpoint, net: SelfAttention, places: Places) -> None:
        self.group, self.slot = places.of(Attention)
        self.rope = net.rope
        self.kv_heads = net.kv_heads
        self.repeats = net.heads // net.kv_heads
        self.dim = net.dim
        heads, kv_heads, dim, hidden = net.heads, net.kv_heads, net.dim, net.hidden
        self.turned = heads + kv_heads
        self.queries = heads * dim
        prefix = net.prefix
        wide = 2 * dim if net.gated else dim
        widths = (("q_proj", heads * wide), ("k_proj", kv_heads * dim), ("v_proj", kv_heads * dim))

        def named(kind: str) -> list[str]:
            return [f"{prefix}.{part}.{kind}" for part, _ in widths]

        def stacked(kind: str, tail: tuple[int, ...]) -> Tensor:
            return by_repeats(checkpoint.rows(named(kind), [(width, *tail) for _, width in widths]))

        def by_repeats(rows: Tensor) -> Tensor:
            queries = rows[: heads * wide].view(kv_heads, self.repeats, wide, -1).transpose(0, 1)
            if net.gated:
                # All queries, then all gates: a head's lie one after the other in the file.
                queries = torch.cat((queries[:, :, :dim], queries[:, :, dim:]))
            rows[: heads * wide] = queries.reshape(heads * wide, *rows.shape[1:])
            if net.gated:
                rows = torch.cat((rows[: heads * dim], rows[heads * wide :], rows[heads * dim : heads * wide]))
            return rows

        def columns_by_repeats(weight: Tensor) -> Tensor:
            return weight.view(hidden, kv_heads, self.repeats, -1).transpose(1, 2).reshape(weight.shape)

        self.qkv = Linear(
            stacked("weight", (hidden,)),
            stacked("bias", ()) if net.qkv_bias else None,
            None if net.gated else checkpoint.codes(named("weight"), by_repeats),
        )
        self.gates = heads * dim if net.gated else 0
        name = f"{prefix}.o_proj"
        self.output = Linear(
            columns_by_repeats(checkpoint.tensor(f"{name}.weight", (hidden, heads * dim))),
            checkpoint.tensor(f"{name}.bias", (hidden,)) if net.out_bias else None,
            # A head that is no whole number of groups could not take its scales along.
            checkpoint.codes([f"{name}.weight"], columns_by_repeats) if dim % GROUP == 0 else None,
        )
        self.norm: RMSNorm | None = None
        self.whole_norms: tuple[RMSNorm, RMSNorm] | None = None
        if net.head_norm == "unit":
            self.norm = RMSNorm(torch.ones(heads + kv_heads, dim), net.eps)
        elif net.head_norm == "each":
            multipliers = torch.cat(
                [
                    checkpoint.norm(f"{prefix}.q_norm.weight", dim).expand(heads, dim),
                    checkpoint.norm(f"{prefix}.k_norm.weight", dim).expand(kv_heads, dim),
                ]
            )
            self.norm = RMSNorm(multipliers, net.eps)
        elif net.head_norm == "all":
            of_queries = checkpoint.norm(f"{prefix}.q_norm.weight", heads * dim)
            of_keys = checkpoint.norm(f"{prefix}.k_norm.weight", kv_heads * dim)
            of_queries = of_queries.view(kv_heads, self.repeats, dim).transpose(0, 1).reshape(-1)
            self.whole_norms = RMSNorm(of_queries, net.eps), RMSNorm(of_keys, net.eps)
        self.temperature = net.temperature
        fmt = places.format_of(Attention)
        # Heads of queries and keys come first, then those of values.
        self.spread = slice(
            0 if fmt.rotates_keys else self.turned, self.turned + kv_heads if fmt.rotates_values else self.turned
        )
        self.turns_back = fmt.rotates_values
        self.hadamard: Tensor | None = None
        self.spreader: Cpu | None = None
        self.factor = 0.0
        if fmt.rotates_keys or fmt.rotates_values:
            self.hadamard = hadamard(dim, checkpoint.dtype)
            self.spreader = kernels_of(checkpoint.dtype) if Cpu.spreads(dim) else None
            self.factor = float(self.hadamard[0, 0])
        self.sinks: Tensor | None = None
        if net.sinks is not None:
            sinks = checkpoint.tensor(net.sinks, (heads,)).float()
            self.sinks = sinks.view(kv_heads, self.repeats).t().contiguous()

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the tokens' keys and values. With ``rows`` only those are returned."""
        whole = self.qkv(x)
        count, width = len(x), (self.turned + self.kv_heads) * self.dim
        projected = whole[:, :width].view(count, self.turned + self.kv_heads, self.dim)
        if self.whole_norms is not None:
            keys = slice(self.queries, self.turned * self.dim)
            whole[:, : self.queries] = self.whole_norms[0](whole[:, : self.queries])
            whole[:, keys] = self.whole_norms[1](whole[:, keys])
        turned = projected[:, : self.turned]
        if self.rope is not None:
            step.rotations[self.rope].turn(turned, self.norm)
        elif self.norm is not None:
            turned.copy_(self.norm(turned))
        queries = projected[:, : self.turned - self.kv_heads].view(count, self.repeats, self.kv_heads, self.dim)
        if self.temperature is not None:
            seen = torch.floor((step.positions.float() + 1) / self.temperature.floor)
            queries.mul_((torch.log1p(seen) * self.temperature.scale + 1).to(x.dtype).view(-1, 1, 1, 1))
        if self.hadamard is not None:
            spread = projected[:, self.spread]
            if self.spreader is None:
                spread.copy_(spread @ self.hadamard)
            else:
                self.spreader.spread(spread, self.factor)
        kv = projected[:, self.turned - self.kv_heads :]
        mixed = step.attention(self.group).attend(self.slot, queries, kv, self.sinks)
        if step.observer is not None and step.observer.looks:
            step.observer.see(self.group, slice(self.slot, self.slot + 1), queries[None], self.sinks)
        if self.hadamard is not None and self.turns_back:
            # The matrix is its own inverse.
            heads = mixed.view(count, -1, self.dim)
            if self.spreader is None:
                mixed = (heads @ self.hadamard).view_as(mixed)
            else:
                self.spreader.spread(heads, self.factor)
        if self.gates:
            mixed = mixed * torch.sigmoid(whole[:, width:])
        return self.output(mixed if rows is None else mixed.index_select(0, rows))
