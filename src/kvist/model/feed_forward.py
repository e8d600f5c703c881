"""What is computed for each token alone, between mixers: products with an activation, with a gate or without."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from kvist.model.experts import Experts, Mixture
from kvist.model.linear import ACTIVATIONS, Gated, Linear
from kvist.model.network import Mlp
from kvist.model.weights import Checkpoint


class FeedForward(Protocol):
    """Computes each token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""


class GatedMlp:
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, checkpoint: Checkpoint, net: Mlp) -> None:
        hidden, inner = net.hidden, net.inner
        names = [f"{net.prefix}.{part}" for part in (net.gate, net.up)]
        weights = [f"{name}.weight" for name in names]
        self.gate_up = Gated(
            checkpoint.rows(weights, [(inner, hidden)] * 2),
            checkpoint.rows([f"{name}.bias" for name in names], [(inner,)] * 2) if net.bias else None,
            net.activation,
            checkpoint.codes(weights),
        )
        self.down = _down(checkpoint, net)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""
        return self.down(self.gate_up(x))


class PlainMlp:
    """``down(act(up(x)))``."""

    def __init__(self, checkpoint: Checkpoint, net: Mlp) -> None:
        name = f"{net.prefix}.{net.up}"
        self.up = Linear(
            checkpoint.tensor(f"{name}.weight", (net.inner, net.hidden)),
            checkpoint.tensor(f"{name}.bias", (net.inner,)) if net.bias else None,
            checkpoint.codes([f"{name}.weight"]),
        )
        self.activation = ACTIVATIONS[net.activation]
        self.down = _down(checkpoint, net)

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""
        return self.down(self.activation(self.up(x)))


def _down(checkpoint: Checkpoint, net: Mlp) -> Linear:
    name = f"{net.prefix}.{net.down}"
    return Linear(
        checkpoint.tensor(f"{name}.weight", (net.hidden, net.inner)),
        checkpoint.tensor(f"{name}.bias", (net.hidden,)) if net.bias else None,
        checkpoint.codes([f"{name}.weight"]),
    )


def _mlp(checkpoint: Checkpoint, net: Mlp) -> FeedForward:
    return PlainMlp(checkpoint, net) if net.gate is None else GatedMlp(checkpoint, net)


def _experts(checkpoint: Checkpoint, net: Experts) -> FeedForward:
    return Mixture(checkpoint, net, None if net.shared is None else _mlp(checkpoint, net.shared))


_KINDS: Mapping[type, Callable[[Checkpoint, Any], FeedForward]] = {Mlp: _mlp, Experts: _experts}


def feed_forward_of(checkpoint: Checkpoint, net: Any) -> FeedForward:
    """Build what ``net`` describes."""
    return _KINDS[type(net)](checkpoint, net)
