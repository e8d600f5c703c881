"""Gated delta nets: queries, keys and values through a short convolution, then a matrix a head that they change.

Source: arXiv:2412.06464, in the form of Qwen3-Next and Qwen3.5. What a layer keeps of a sequence is the last columns
of its convolution, each with all channels, and the matrices.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.kernels.delta_rule import CHUNK, Chunks, chunked, step
from kvist.model.linear import Linear
from kvist.model.mixers.places import Pass, Places
from kvist.model.weights import Checkpoint
from kvist.spec.layers import Layer, State
from kvist.store.states import StatePlan

# Of the norm of queries and keys; no configuration names another.
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net.

    Attributes:
        prefix: of its tensors, such as ``model.layers.0.linear_attn``.
        hidden: width of the stream.
        key_heads: of queries and keys.
        heads: of values; neighbours share a query and a key.
        key_dim: of a query or key.
        value_dim: of a value.
        kernel: columns of the convolution.
        eps: of the norm of what the heads give.
        joined: whether ``in_proj_qkvz`` and ``in_proj_ba`` hold all projections, one key head after the other;
            else they are apart.
    """

    prefix: str
    hidden: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    joined: bool

    stores: ClassVar[tuple[type[Layer], ...]] = (State,)


class GatedDeltaMixer:
    """Projections, convolution, delta rule, gated norm, output.

    Args:
        checkpoint: to read from.
        net: what is computed.
        places: where the layer's state is stored.
    """

    def __init__(self, checkpoint: Checkpoint, net: GatedDelta, places: Places) -> None:
        self.group, self.slot = places.of(State)
        self.net = net
        self.keys, self.values = net.key_heads * net.key_dim, net.heads * net.value_dim
        self.channels = 2 * self.keys + self.values
        self.projection = Linear(_projections(checkpoint, net))
        kernel = checkpoint.vector(f"{net.prefix}.conv1d.weight", self.channels, 1, net.kernel)
        self.kernel = kernel[:, 0].t().contiguous()
        self.rates = -checkpoint.vector(f"{net.prefix}.A_log", net.heads).exp()
        self.bias = checkpoint.vector(f"{net.prefix}.dt_bias", net.heads)
        # Queries are scaled as well.
        self.scales = torch.tensor([net.key_dim**-0.5, 1.0]).view(2, 1, 1)
        self.multiplier = checkpoint.vector(f"{net.prefix}.norm.weight", net.value_dim)
        self.output = Linear(checkpoint.tensor(f"{net.prefix}.out_proj.weight", (net.hidden, self.values)))

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the sequences' states. With ``rows`` only those are returned."""
        net = self.net
        work = step.states(self.group).once(_Work, lambda plan: _Work(plan, net))
        whole = self.projection(x)
        qkv, z = whole[:, : self.channels], whole[:, self.channels : self.channels + self.values]
        scalars = whole[:, self.channels + self.values :][:, : 2 * net.heads].float()
        beta = scalars[:, : net.heads].sigmoid()
        decay = F.softplus(scalars[:, net.heads :] + self.bias).mul_(self.rates)
        if work.prompts is None:
            mixed = self._decode(work.plan, qkv, decay, beta)
        elif work.decodes is None:
            mixed = self._prompts(work, work.prompts, qkv, decay, beta)
        else:
            mixed = torch.empty(len(x), self.values)
            one, many = work.one, work.many
            mixed[one] = self._decode(work.decodes, qkv[one], decay[one], beta[one])
            mixed[many] = self._prompts(work, work.prompts, qkv, decay, beta)
        if rows is not None:
            mixed, z = mixed.index_select(0, rows), z.index_select(0, rows)
        return self.output(self._gated(mixed, z).to(x.dtype))

    def _decode(self, plan: StatePlan, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """One token of each sequence: ``[sequences, channels]`` to float32 ``[sequences, values]``."""
        net, count = self.net, len(qkv)
        columns = plan.read_conv(self.slot, qkv.dtype).view(count, net.kernel - 1, self.channels)
        columns = torch.cat((columns, qkv.unsqueeze(1)), 1)
        plan.write_conv(self.slot, columns[:, 1:].reshape(count, -1))
        heads = F.silu((columns * self.kernel).sum(1), inplace=True)
        qk = self._normed(heads[:, : 2 * self.keys].view(count, 2, net.key_heads, net.key_dim))
        values = heads[:, 2 * self.keys :].view(count, net.heads, net.value_dim)
        shape = net.heads, net.key_dim, net.value_dim
        states = plan.in_place(self.slot, torch.float32)
        if states is not None:
            out = step(qk, values, decay, beta, [state.view(shape) for state in states])
        else:
            read = plan.read_state(self.slot, torch.float32)
            out = step(qk, values, decay, beta, read.view(count, *shape).unbind())
            plan.write_state(self.slot, read)
        return out.view(count, -1)

    def _prompts(self, work: "_Work", plan: StatePlan, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Several tokens of each sequence: ``[tokens, channels]`` to float32 ``[tokens of prompts, values]``."""
        net, columns = self.net, self.net.kernel - 1
        chunks = work.chunks
        saved = plan.read_conv(self.slot, qkv.dtype).view(-1, columns, self.channels)
        pieces = [piece for number, part in enumerate(work.parts) for piece in (saved[number], qkv[part])]
        inputs = torch.cat(pieces)
        plan.write_conv(self.slot, inputs.index_select(0, work.tails).view(len(saved), -1))
        wide = inputs.float()
        count = len(wide) - columns
        heads = wide[:count] * self.kernel[0]
        for column in range(1, net.kernel):
            heads.addcmul_(wide[column : column + count], self.kernel[column])
        F.silu(heads, inplace=True)
        if work.convolved is not None:
            heads = heads.index_select(0, work.convolved)
        heads = heads.view(chunks.size, CHUNK, self.channels)
        qk = self._normed(heads[:, :, : 2 * self.keys].view(chunks.size, CHUNK, 2, net.key_heads, net.key_dim))
        values = heads[:, :, 2 * self.keys :].view(chunks.size, CHUNK, net.heads, net.value_dim)
        state = plan.read_state(self.slot, torch.float32).view(-1, net.heads, net.key_dim, net.value_dim)
        decay, beta = work.by_chunks(decay), work.by_chunks(beta)
        out = chunked(qk[:, :, 0], qk[:, :, 1], values, decay, beta, state, chunks)
        plan.write_state(self.slot, state.view(len(state), -1))
        out = out.transpose(1, 2).reshape(-1, self.values)
        return out if work.places is None else out.index_select(0, work.places)

    def _gated(self, mixed: Tensor, z: Tensor) -> Tensor:
        """An RMS norm of each head, then a gate: ``[rows, values]`` in float32, the first in place."""
        heads = mixed.view(-1, self.net.value_dim)
        squares = torch.linalg.vector_norm(heads, dim=-1, keepdim=True).square_().mul_(1 / self.net.value_dim)
        heads.mul_(squares.add_(self.net.eps).rsqrt_()).mul_(self.multiplier)
        return mixed.mul_(F.silu(z.float()))

    def _normed(self, qk: Tensor) -> Tensor:
        """Queries and keys of unit length, the queries scaled: ``[…, 2, key_heads, key_dim]``, in place."""
        lengths = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
        return qk.mul_(lengths.square_().add_(_EPS).rsqrt_().mul_(self.scales))


class _Work:
    """What of a step depends on its sequences alone: which decode, and how the others' tokens are cut in chunks."""

    def __init__(self, plan: StatePlan, net: GatedDelta) -> None:
        self.plan = plan
        counts = np.array(plan.counts)
        one, many = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        self.decodes: StatePlan | None = None
        self.prompts: StatePlan | None = None
        if not many.size:
            return
        # Those with more chunks first.
        many = many[np.argsort(-((counts[many] - 1) // CHUNK), kind="stable")]
        self.prompts = plan.part(many)
        begins, lengths = plan.starts[many], counts[many]
        self.parts = [slice(begin, begin + count) for begin, count in zip(begins, lengths, strict=True)]
        self.chunks = Chunks(lengths.tolist(), net.heads)
        # Before each sequence's tokens lie the columns that its convolution has kept.
        columns = net.kernel - 1
        ends = np.cumsum(lengths + columns)
        self.tails = torch.from_numpy((ends[:, None] - np.arange(columns, 0, -1)).ravel())
        self.convolved = self.chunks.rows(ends - lengths - columns, int(ends[-1]) - columns)
        self.taken = self.chunks.rows(begins, int(counts.sum()))
        if not one.size:
            self.places = self.chunks.places(begins, int(counts.sum()))
            return
        self.decodes = plan.part(one)
        self.one = torch.from_numpy(plan.starts[one])
        self.many = torch.from_numpy(np.concatenate([np.arange(part.start, part.stop) for part in self.parts]))
        self.places = self.chunks.places(np.cumsum(lengths) - lengths, int(lengths.sum()))

    def by_chunks(self, scalars: Tensor) -> Tensor:
        """A number for each token and head, ``[tokens, heads]``, as ``[chunks, heads, CHUNK]``; 0 without a token."""
        if self.taken is not None:
            scalars = scalars.index_select(0, self.taken)
        scalars = scalars.view(self.chunks.size, CHUNK, -1).transpose(1, 2)
        return scalars * self.chunks.valid if self.chunks.padded else scalars.contiguous()


def _projections(checkpoint: Checkpoint, net: GatedDelta) -> Tensor:
    """All projections as one: queries, keys, values and gates, then rates and decays, then zeros to whole panels."""
    keys, values, hidden = net.key_heads * net.key_dim, net.heads * net.value_dim, net.hidden
    height = 2 * keys + 2 * values
    stacked = torch.zeros(height + -(-2 * net.heads // 32) * 32, hidden, dtype=checkpoint.dtype)
    scalars = stacked[height : height + 2 * net.heads]
    if not net.joined:
        names = [f"{net.prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        heights = [2 * keys + values, values, net.heads, net.heads]
        used = torch.split(stacked[: sum(heights)], heights)
        for name, count, into in zip(names, heights, used, strict=True):
            checkpoint.read(name, (count, hidden), into)
        return stacked
    repeats = net.heads // net.key_heads
    widths = [net.key_dim, net.key_dim, repeats * net.value_dim, repeats * net.value_dim]
    wide = checkpoint.tensor(f"{net.prefix}.in_proj_qkvz.weight", (height, hidden))
    parts = torch.split(wide.view(net.key_heads, -1, hidden), widths, dim=1)
    torch.cat([part.reshape(-1, hidden) for part in parts], out=stacked[:height])
    narrow = checkpoint.tensor(f"{net.prefix}.in_proj_ba.weight", (2 * net.heads, hidden))
    halves = torch.split(narrow.view(net.key_heads, -1, hidden), repeats, dim=1)
    torch.cat([half.reshape(-1, hidden) for half in halves], out=scalars)
    return stacked
