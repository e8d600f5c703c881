"""Mixtures of experts: each token goes through a few of many products (arXiv:1701.06538), and through shared ones."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.model.linear import Gated, Linear
from kvist.model.network import Mlp, Part, whole
from kvist.model.routing import Router, Routing
from kvist.model.weights import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Clamp:
    """gpt-oss's product of a gate and another factor: ``(up + 1) * gate * sigmoid(alpha * gate)``, both clamped.

    Attributes:
        alpha: factor in the sigmoid.
        limit: most that the gate may be, and that the other factor may be in size.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """``count`` gated products, of which :class:`Routing` chooses some for each token, and one that all go through.

    Attributes:
        prefix: of the experts' tensors, which are called ``prefix.3.gate_proj.weight``.
        hidden: width of the stream.
        inner: width between an expert's products.
        count: of experts.
        routing: how they are chosen.
        activation: its name in :mod:`kvist.model.linear`.
        gate: name of the gate's product; likewise ``up`` and ``down``.
        bias: whether the products have one.
        clamp: in place of the activation.
        shared: the product that all tokens go through, or None.
        shared_gate: name of a vector ``[1, hidden]``: the sigmoid of its product with a token multiplies what that
            token gets from the shared product.
    """

    prefix: str
    hidden: int
    inner: int
    count: int
    routing: Routing
    activation: str = "silu"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: bool = False
    clamp: Clamp | None = None
    shared: Mlp | None = None
    shared_gate: str | None = None


_SMALL = 2**17


class _Product(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class Mixture:
    """The experts of one layer.

    Rows are sorted by expert, so that each weight is read once a step, and only those that a row goes through.

    Args:
        checkpoint: to read from.
        net: what is computed.
        shared: built from ``net.shared``.
    """

    def __init__(self, checkpoint: Checkpoint, net: Experts, shared: Callable[[Tensor], Tensor] | None) -> None:
        self.router = Router(checkpoint, net.routing, net.hidden, net.count)
        self.on_input = net.routing.on_input
        self.chosen = net.routing.chosen
        self.experts = [_expert(checkpoint, net, f"{net.prefix}.{index}") for index in range(net.count)]
        self.shared = shared
        self.shared_gate: Tensor | None = None
        if net.shared_gate is not None:
            self.shared_gate = checkpoint.tensor(net.shared_gate, (1, net.hidden))

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""
        chosen, weights = self.router(x)
        if self.on_input:
            weights = weights.to(x.dtype)
        out = self._one(x, chosen, weights) if len(x) == 1 else self._many(x, chosen, weights)
        if self.shared is not None:
            all_get = self.shared(x)
            if self.shared_gate is not None:
                all_get = all_get * torch.sigmoid(F.linear(x, self.shared_gate))
            out = out + all_get
        return out

    def _one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        experts = self.experts
        parts = torch.split(weights.t() * x, 1) if self.on_input else [x] * self.chosen
        found = [experts[index](part) for index, part in zip(chosen[0].tolist(), parts, strict=True)]
        return self._sum(torch.cat(found), weights)

    def _many(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens = len(x)
        ordered, order = chosen.flatten().sort(stable=True)
        rows = order if self.chosen == 1 else order // self.chosen
        counts = torch.bincount(ordered)
        used = counts.nonzero()[:, 0]
        sizes = counts[used].tolist()
        every = x.new_empty(tokens * self.chosen, x.shape[1])
        factors = weights.view(-1, 1)
        for index, places, own in zip(used.tolist(), torch.split(order, sizes), torch.split(rows, sizes), strict=True):
            part = x.index_select(0, own)
            if self.on_input:
                part = part * factors.index_select(0, places)
            every.index_copy_(0, places, self.experts[index](part))
        return self._sum(every, weights)

    def _sum(self, every: Tensor, weights: Tensor) -> Tensor:
        """``[tokens x chosen, hidden]`` summed over what each token chose, weighted unless that is done."""
        grouped = every.view(*weights.shape, every.shape[1])
        if self.on_input:
            return every if self.chosen == 1 else torch.sum(grouped, 1)
        # Products this small are several times as fast in float32, conversions included.
        wide = grouped.float() if every.numel() <= _SMALL else grouped
        return torch.bmm(weights.to(wide.dtype)[:, None], wide)[:, 0].to(every.dtype)


def stacked(*, turned: bool, interleaved: bool = False) -> Callable[[str], Part]:
    """Where an expert's tensors lie in files that hold all experts of a layer as one tensor.

    That is ``….experts.gate_up_proj [experts, 2 x inner, hidden]`` and ``….experts.down_proj [experts, hidden, inner]``
    for ``….experts.3.gate_proj.weight`` and the like; biases are called ``gate_up_proj_bias`` and ``down_proj_bias``.

    Args:
        turned: their last two dimensions the other way round.
        interleaved: rows of gate and other factor by turns, instead of one after the other.
    """

    def part(name: str) -> Part:
        found = re.fullmatch(r"(.+\.experts)\.([0-9]+)\.(gate|up|down)_proj\.(weight|bias)", name)
        if found is None:
            return whole(name)
        experts, index, product, kind = found.groups()
        turn = turned and kind == "weight"
        half = ("gate", "up").index(product) if product != "down" else None

        def take(tensor: Tensor) -> Tensor:
            rows = tensor.t() if turn else tensor
            if half is None:
                return rows
            return rows[half::2] if interleaved else rows.tensor_split(2)[half]

        stored = f"{experts}.{'down' if half is None else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"
        return Part(name=stored, index=int(index), take=take)

    return part


class _Expert:
    def __init__(self, first: _Product, down: Linear) -> None:
        self.first = first
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.first(x))


class _Clamped:
    def __init__(self, both: Linear, clamp: Clamp) -> None:
        self.both = both
        self.clamp = clamp

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        gate = gate.clamp(max=self.clamp.limit)
        up = up.clamp(min=-self.clamp.limit, max=self.clamp.limit)
        return up.add_(1).mul_(gate * torch.sigmoid(gate * self.clamp.alpha))


def _expert(checkpoint: Checkpoint, net: Experts, prefix: str) -> _Expert:
    names = [f"{prefix}.{part}" for part in (net.gate, net.up)]
    weights = [f"{name}.weight" for name in names]
    both = checkpoint.rows(weights, [(net.inner, net.hidden)] * 2)
    bias = checkpoint.rows([f"{name}.bias" for name in names], [(net.inner,)] * 2) if net.bias else None
    name = f"{prefix}.{net.down}"
    down = Linear(
        checkpoint.tensor(f"{name}.weight", (net.hidden, net.inner)),
        checkpoint.tensor(f"{name}.bias", (net.hidden,)) if net.bias else None,
    )
    if net.clamp is not None:
        return _Expert(_Clamped(Linear(both, bias), net.clamp), down)
    return _Expert(Gated(both, bias, net.activation), down)
