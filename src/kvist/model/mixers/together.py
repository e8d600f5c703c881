"""Several mixers on one input, side by side, whose results are added: attention beside a state in Falcon-H1."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from kvist.model.mixers.places import Pass
from kvist.model.network import Together


class _Part(Protocol):
    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor: ...


class TogetherMixer:
    """The sum of several mixers.

    Args:
        net: what is computed.
        build: makes a part's mixer.
    """

    def __init__(self, net: Together, build: Callable[[Any], _Part]) -> None:
        self.parts = [(build(part), factor) for part, factor in zip(net.parts, net.factors, strict=True)]

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """Mix ``[tokens, hidden]``; every part stores its own memory of the tokens."""
        (first, factor), *others = self.parts
        out = first(x, step, rows) * factor
        for part, factor in others:
            out.add_(part(x, step, rows), alpha=factor)
        return out
