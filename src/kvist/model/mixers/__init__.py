"""What mixes tokens: one class a mechanism, each built from its description in :mod:`kvist.model.network`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from kvist.model.mixers.attention import AttentionMixer
from kvist.model.mixers.gated_delta import GatedDelta, GatedDeltaMixer
from kvist.model.mixers.latent import LatentAttention, LatentMixer
from kvist.model.mixers.mamba import Mamba, Mamba2, Mamba2Mixer, MambaMixer
from kvist.model.mixers.places import Pass, Places
from kvist.model.mixers.together import TogetherMixer
from kvist.model.network import SelfAttention, Together
from kvist.model.weights import Checkpoint

__all__ = ["Mixer", "Pass", "Places", "mixer_of"]


class Mixer(Protocol):
    """Mixes the tokens of a step, and stores what the layer remembers of them."""

    def __call__(self, x: Tensor, step: Pass, rows: Tensor | None) -> Tensor:
        """``[tokens, hidden]`` to the same shape, or to ``[rows, hidden]`` where only those are wanted."""


_MIXERS: Mapping[type, Callable[[Checkpoint, Any, Places], Mixer]] = {
    SelfAttention: AttentionMixer,
    GatedDelta: GatedDeltaMixer,
    LatentAttention: LatentMixer,
    Mamba: MambaMixer,
    Mamba2: Mamba2Mixer,
    Together: lambda checkpoint, net, places: TogetherMixer(net, lambda part: mixer_of(checkpoint, part, places)),
}


def mixer_of(checkpoint: Checkpoint, net: Any, places: Places) -> Mixer:
    """Build the mixer that ``net`` describes."""
    return _MIXERS[type(net)](checkpoint, net, places)
