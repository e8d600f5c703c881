"""Mamba-1 and Mamba-2: a short convolution, then a state that each token changes as much as it chooses.

Sources: arXiv:2312.00752 and 2405.21060, in the form of their classes in transformers 5.24.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.kernels.state_scans import channels_scan, channels_step, heads_scan, heads_step
from kvist.model.linear import Linear
from kvist.model.mixers.convolution import ROWS, Convolution
from kvist.model.mixers.places import Pass, Places
from kvist.model.norms import RMSNorm
from kvist.model.weights import Checkpoint
from kvist.spec.layers import Layer, State
from kvist.store.states import StatePlan

# Outputs that the kernels multiply at once.
_PANEL = 32


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
        norms: of what makes steps, inputs and outputs, their names and eps (Jamba), or None for names where they have
            no multipliers (Falcon-Mamba); None where there are none.
    """

    prefix: str
    hidden: int
    channels: int
    size: int
    rank: int
    kernel: int
    conv_bias: bool
    bias: bool
    norms: tuple[tuple[str, str, str] | None, float] | None = None

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
            multipliers = [torch.ones(width) for width in widths]
            if names is not None:
                multipliers = [
                    checkpoint.norm(f"{net.prefix}.{name}.weight", width)
                    for name, width in zip(names, widths, strict=True)
                ]
            self.norms = [RMSNorm(multiplier, eps) for multiplier in multipliers]
        self.output = _linear(checkpoint, f"{net.prefix}.out_proj", net.hidden, net.channels, net.bias, panel=1)

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the sequences' states. With ``rows`` only those are returned."""
        net, plan = self.net, step.states(self.group)
        whole = self.projection(x)
        inputs = self.convolution(plan, self.slot, whole[:, : net.channels])
        scalars = self.scalars(inputs.to(x.dtype)).float()[:, : net.rank + 2 * net.size]
        times, b, c = torch.split(scalars, [net.rank, net.size, net.size], dim=1)
        if self.norms is not None:
            times, b, c = (norm(part) for norm, part in zip(self.norms, (times, b, c), strict=True))
        dt = F.softplus(F.linear(times, self.steps, self.steps_bias))

        def one(taken: Tensor | slice, states: Sequence[Tensor]) -> Tensor:
            states = [state.view(net.channels, net.size) for state in states]
            return channels_step(inputs[taken], dt[taken], self.rates, b[taken], c[taken], states)

        def many(taken: slice, state: Tensor) -> Tensor:
            state = state.view(net.channels, net.size)
            return channels_scan(inputs[taken], dt[taken], self.rates, b[taken], c[taken], state)

        mixed = scanned(plan, self.slot, one, many, net.channels)
        gate = whole[:, net.channels : 2 * net.channels]
        if rows is not None:
            mixed, inputs, gate = (part.index_select(0, rows) for part in (mixed, inputs, gate))
        return self.output(in_pieces(self._gated, x.dtype, mixed, inputs, gate))

    def _gated(self, mixed: Tensor, inputs: Tensor, gate: Tensor) -> Tensor:
        return mixed.addcmul_(inputs, self.direct).mul_(F.silu(gate.float(), inplace=True))


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
        self.output = _linear(checkpoint, f"{net.prefix}.out_proj", net.hidden, self.width, net.out_bias, panel=1)

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; stores the sequences' states. With ``rows`` only those are returned."""
        net, plan = self.net, step.states(self.group)
        whole = self.projection(x)
        gate = whole[:, : self.width]
        convolved = self.convolution(plan, self.slot, whole[:, self.width : self.width + self.channels])
        steps = whole[:, self.width + self.channels :][:, : net.heads].float()
        dt = F.softplus(steps.add_(self.steps_bias)).clamp_(net.least, net.most)
        inputs = convolved[:, : self.width].view(-1, net.heads, net.dim)
        shared = convolved[:, self.width :].view(len(x), 2, net.groups, net.size)
        b, c = shared[:, 0], shared[:, 1]

        def one(taken: Tensor | slice, states: Sequence[Tensor]) -> Tensor:
            states = [state.view(net.heads, net.dim, net.size) for state in states]
            return heads_step(inputs[taken], dt[taken], self.rates, b[taken], c[taken], states).flatten(1)

        def many(taken: slice, state: Tensor) -> Tensor:
            state = state.view(net.heads, net.dim, net.size)
            return heads_scan(inputs[taken], dt[taken], self.rates, b[taken], c[taken], state).flatten(1)

        mixed = scanned(plan, self.slot, one, many, self.width)
        if rows is not None:
            mixed, inputs, gate = (part.index_select(0, rows) for part in (mixed, inputs, gate))
        return self.output(in_pieces(self._gated, x.dtype, mixed, inputs, gate))

    def _gated(self, mixed: Tensor, inputs: Tensor, gate: Tensor) -> Tensor:
        mixed.view(inputs.shape).addcmul_(inputs, self.direct)
        gate = F.silu(gate.float(), inplace=True)
        match self.net.norm:
            case None:
                return mixed.mul_(gate)
            case "gated":
                return self._normed(mixed.mul_(gate))
            case "before":
                return self._normed(mixed).mul_(gate)

    def _normed(self, mixed: Tensor) -> Tensor:
        parts = mixed.view(len(mixed), self.net.norm_groups, self.width // self.net.norm_groups)
        squares = torch.linalg.vector_norm(parts, dim=-1, keepdim=True).square_().mul_(1 / parts.shape[-1])
        parts.mul_(squares.add_(self.net.eps).rsqrt_())
        assert self.multiplier is not None
        return mixed.mul_(self.multiplier)


class _Turns:
    """Which rows of a step are one token of a sequence, and which several."""

    def __init__(self, plan: StatePlan) -> None:
        counts = np.array(plan.counts)
        self.one = np.flatnonzero(counts == 1).tolist()
        self.many = np.flatnonzero(counts > 1).tolist()
        self.rows = torch.from_numpy(plan.starts[self.one])
        self.parts = [slice(start, start + count) for start, count in zip(plan.starts, plan.counts, strict=True)]


def scanned(
    plan: StatePlan,
    slot: int,
    one: Callable[[Tensor | slice, Sequence[Tensor]], Tensor],
    many: Callable[[slice, Tensor], Tensor],
    width: int,
) -> Tensor:
    """Run a recurrence over a step's rows, and store the states.

    Args:
        plan: of the states.
        slot: the layer's place in the group.
        one: computes rows, each a sequence's one token, with their states ``[elements]``, in place.
        many: computes the rows of one sequence with its state ``[elements]``, in place.
        width: of what they return.

    Returns:
        float32 ``[tokens, width]``.
    """
    turns = plan.once(_Turns, _Turns)
    states, read = plan.in_place(slot, torch.float32), None
    if states is None:
        read = plan.read_state(slot, torch.float32)
        states = list(read.unbind())
    if not turns.many:
        out = one(slice(None), states)
    else:
        out = torch.empty(sum(plan.counts), width)
        if turns.one:
            out[turns.rows] = one(turns.rows, [states[number] for number in turns.one])
        for number in turns.many:
            out[turns.parts[number]] = many(turns.parts[number], states[number])
    if read is not None:
        plan.write_state(slot, read)
    return out


def in_pieces(compute: Callable[..., Tensor], dtype: torch.dtype, *parts: Tensor) -> Tensor:
    """What ``compute`` makes of some rows at a time, so that they stay in a core's cache between its operators."""
    first, *_ = parts
    if len(first) <= ROWS:
        return compute(*parts).to(dtype)
    out = first.new_empty(first.shape, dtype=dtype)
    for into, *pieces in zip(*(torch.split(part, ROWS) for part in (out, *parts)), strict=True):
        into.copy_(compute(*pieces))
    return out


def _linear(checkpoint: Checkpoint, name: str, outputs: int, inputs: int, bias: bool, *, panel: int = _PANEL) -> Linear:
    """A product; behind its outputs there may be zeros, to whole panels of the kernels."""
    whole = -(-outputs // panel) * panel

    def padded(kind: str, *tail: int) -> Tensor:
        read = torch.zeros(whole, *tail, dtype=checkpoint.dtype)
        checkpoint.read(f"{name}.{kind}", (outputs, *tail), read[:outputs])
        return read

    return Linear(padded("weight", inputs), padded("bias") if bias else None)
