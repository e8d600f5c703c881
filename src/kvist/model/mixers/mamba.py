"""Mamba-1 and Mamba-2: a short convolution, then a state that each token changes as much as it chooses.

Sources: arXiv:2312.00752 and 2405.21060, in the form of their classes in transformers 5.24.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.kernels.state_scans import channels_scan, channels_step, heads_scan, heads_step
from kvist.model.linear import Linear
from kvist.model.mixers.convolution import Convolution
from kvist.model.mixers.places import Pass, Places
from kvist.model.norms import RMSNorm
from kvist.model.weights import Checkpoint
from kvist.spec.layers import Layer, State
from kvist.store.states import StatePlan


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Mamba-1.

    Attributes:
        prefix: of its tensors, such as ``backbone.layers.0.mixer``.
        hidden: width of the stream.
        channels: of the state.
        size: of the state of one channel.
        rank: width from which the steps of the channels are made.
        kernel: inputs of the convolution.
        conv_bias: whether it has one.
        bias: whether the products on the way in and out have one.
        norms: of what makes steps, inputs and outputs, by name and eps (Jamba); None where there are none.
    """

    prefix: str
    hidden: int
    channels: int
    size: int
    rank: int
    kernel: int
    conv_bias: bool
    bias: bool
    norms: tuple[tuple[str, str, str], float] | None = None

    stores: ClassVar[tuple[type[Layer], ...]] = (State,)


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2.

    Attributes:
        prefix: of its tensors, such as ``backbone.layers.0.mixer``.
        hidden: width of the stream.
        heads: of the state.
        dim: of a head.
        groups: of inputs and outputs: neighbouring heads share them.
        size: of the state of one element of a head.
        kernel: inputs of the convolution.
        conv_bias: whether it has one.
        bias: whether the product on the way in has one; likewise ``out_bias``.
        norm: of what the heads give: ``gated``: after the gate, ``before``: before it, None: there is the gate alone.
        norm_groups: parts of the width that are normed apart.
        eps: of that norm.
        least: shortest step, and ``most`` the longest.
    """

    prefix: str
    hidden: int
    heads: int
    dim: int
    groups: int
    size: int
    kernel: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    norm: Literal["gated", "before"] | None
    norm_groups: int
    eps: float
    least: float
    most: float

    stores: ClassVar[tuple[type[Layer], ...]] = (State,)


class MambaMixer:
    """Mamba-1: projections, convolution, scan, gate, output.

    Args:
        checkpoint: to read from.
        net: what is computed.
        places: where the layer's state is stored.
    """

    def __init__(self, checkpoint: Checkpoint, net: Mamba, places: Places) -> None:
        self.group, self.slot = places.of(State)
        self.net = net
        self.projection = _linear(checkpoint, f"{net.prefix}.in_proj", 2 * net.channels, net.hidden, net.bias)
        self.convolution = Convolution(
            checkpoint, f"{net.prefix}.conv1d", channels=net.channels, kernel=net.kernel, bias=net.conv_bias
        )
        self.scalars = _linear(checkpoint, f"{net.prefix}.x_proj", net.rank + 2 * net.size, net.channels, False)
        self.steps = checkpoint.vector(f"{net.prefix}.dt_proj.weight", net.channels, net.rank)
        self.steps_bias = checkpoint.vector(f"{net.prefix}.dt_proj.bias", net.channels)
        self.rates = -checkpoint.vector(f"{net.prefix}.A_log", net.channels, net.size).exp()
        self.direct = checkpoint.vector(f"{net.prefix}.D", net.channels)
        self.norms: list[RMSNorm] | None = None
        if net.norms is not None:
            names, eps = net.norms
            widths = (net.rank, net.size, net.size)
            self.norms = [
                RMSNorm(checkpoint.norm(f"{net.prefix}.{name}.weight", width), eps)
                for name, width in zip(names, widths, strict=True)
            ]
        self.output = _linear(checkpoint, f"{net.prefix}.out_proj", net.hidden, net.channels, net.bias)

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the sequences' states. With ``rows`` only those are returned."""
        net, plan = self.net, step.states(self.group)
        whole = self.projection(x)
        inputs = self.convolution(plan, self.slot, whole[:, : net.channels])
        scalars = self.scalars(inputs.to(x.dtype)).float()
        times, b, c = torch.split(scalars, [net.rank, net.size, net.size], dim=1)
        if self.norms is not None:
            times, b, c = (norm(part) for norm, part in zip(self.norms, (times, b, c), strict=True))
        dt = F.softplus(F.linear(times, self.steps, self.steps_bias))

        def one(taken: Tensor | slice, state: Tensor) -> Tensor:
            return channels_step(
                inputs[taken], dt[taken], self.rates, b[taken], c[taken], state.view(-1, net.channels, net.size)
            )

        def many(taken: slice, state: Tensor) -> Tensor:
            return channels_scan(
                inputs[taken], dt[taken], self.rates, b[taken], c[taken], state.view(net.channels, net.size)
            )

        mixed = scanned(plan, self.slot, one, many, net.channels)
        mixed.addcmul_(inputs, self.direct)
        gate = whole[:, net.channels :]
        if rows is not None:
            mixed, gate = mixed.index_select(0, rows), gate.index_select(0, rows)
        return self.output((mixed * F.silu(gate.float())).to(x.dtype))


class Mamba2Mixer:
    """Mamba-2: projections, convolution, scan, gate and norm, output.

    Args:
        checkpoint: to read from.
        net: what is computed.
        places: where the layer's state is stored.
    """

    def __init__(self, checkpoint: Checkpoint, net: Mamba2, places: Places) -> None:
        self.group, self.slot = places.of(State)
        self.net = net
        self.width = net.heads * net.dim
        self.channels = self.width + 2 * net.groups * net.size
        outputs = self.width + self.channels + net.heads
        self.projection = _linear(checkpoint, f"{net.prefix}.in_proj", outputs, net.hidden, net.bias)
        self.convolution = Convolution(
            checkpoint, f"{net.prefix}.conv1d", channels=self.channels, kernel=net.kernel, bias=net.conv_bias
        )
        self.rates = -checkpoint.vector(f"{net.prefix}.A_log", net.heads).exp()
        self.steps_bias = checkpoint.vector(f"{net.prefix}.dt_bias", net.heads)
        self.direct = checkpoint.vector(f"{net.prefix}.D", net.heads).view(net.heads, 1)
        self.multiplier: Tensor | None = None
        if net.norm is not None:
            self.multiplier = checkpoint.vector(f"{net.prefix}.norm.weight", self.width)
        self.output = _linear(checkpoint, f"{net.prefix}.out_proj", net.hidden, self.width, net.out_bias)

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the sequences' states. With ``rows`` only those are returned."""
        net, plan = self.net, step.states(self.group)
        whole = self.projection(x)
        gate = whole[:, : self.width]
        convolved = self.convolution(plan, self.slot, whole[:, self.width : self.width + self.channels])
        dt = F.softplus(whole[:, self.width + self.channels :].float() + self.steps_bias).clamp_(net.least, net.most)
        inputs = convolved[:, : self.width].reshape(-1, net.heads, net.dim)
        shared = convolved[:, self.width :].reshape(len(x), 2, net.groups, net.size)
        b, c = shared[:, 0], shared[:, 1]

        def one(taken: Tensor | slice, state: Tensor) -> Tensor:
            states = state.view(-1, net.heads, net.dim, net.size)
            return heads_step(inputs[taken], dt[taken], self.rates, b[taken], c[taken], states).flatten(1)

        def many(taken: slice, state: Tensor) -> Tensor:
            states = state.view(net.heads, net.dim, net.size)
            return heads_scan(inputs[taken], dt[taken], self.rates, b[taken], c[taken], states).flatten(1)

        mixed = scanned(plan, self.slot, one, many, self.width)
        mixed.view(inputs.shape).addcmul_(inputs, self.direct)
        if rows is not None:
            mixed, gate = mixed.index_select(0, rows), gate.index_select(0, rows)
        return self.output(self._gated(mixed, F.silu(gate.float())).to(x.dtype))

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        if self.multiplier is None:
            return mixed * gate
        if self.net.norm == "gated":
            return self._normed(mixed * gate)
        return self._normed(mixed) * gate

    def _normed(self, mixed: Tensor) -> Tensor:
        assert self.multiplier is not None
        parts = mixed.view(len(mixed), self.net.norm_groups, self.width // self.net.norm_groups)
        squares = parts.square().mean(-1, keepdim=True)
        return (parts * squares.add_(self.net.eps).rsqrt_()).view(mixed.shape) * self.multiplier


class _Turns:
    """Which rows of a step are one token of a sequence, and which several."""

    def __init__(self, plan: StatePlan) -> None:
        counts = np.array(plan.counts)
        one = np.flatnonzero(counts == 1)
        self.many = np.flatnonzero(counts > 1).tolist()
        self.one = torch.from_numpy(one)
        self.rows = torch.from_numpy(plan.starts[one])
        self.parts = [slice(start, start + count) for start, count in zip(plan.starts, plan.counts, strict=True)]


def scanned(
    plan: StatePlan,
    slot: int,
    one: Callable[[Tensor | slice, Tensor], Tensor],
    many: Callable[[slice, Tensor], Tensor],
    width: int,
) -> Tensor:
    """Run a recurrence over a step's rows, and store the states.

    Args:
        plan: of the states.
        slot: the layer's place in the group.
        one: computes rows, each a sequence's one token, with their states ``[sequences, elements]``, in place.
        many: computes the rows of one sequence with its state ``[elements]``, in place.
        width: of what they return.

    Returns:
        float32 ``[tokens, width]``.
    """
    state = plan.read_state(slot, torch.float32)
    turns = plan.once(_Turns, _Turns)
    if not turns.many:
        out = one(slice(None), state)
    else:
        out = torch.empty(sum(plan.counts), width)
        if turns.one.numel():
            some = state.index_select(0, turns.one)
            out[turns.rows] = one(turns.rows, some)
            state.index_copy_(0, turns.one, some)
        for number in turns.many:
            out[turns.parts[number]] = many(turns.parts[number], state[number])
    plan.write_state(slot, state)
    return out


def _linear(checkpoint: Checkpoint, name: str, outputs: int, inputs: int, bias: bool) -> Linear:
    weight = checkpoint.tensor(f"{name}.weight", (outputs, inputs))
    return Linear(weight, checkpoint.tensor(f"{name}.bias", (outputs,)) if bias else None)
