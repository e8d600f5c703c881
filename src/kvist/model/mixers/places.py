"""What a mixer is given: where its layer's memory is, and what a pass through the network has for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvist.cache.groups import Group
from kvist.kernels.attention import AttentionPlan
from kvist.kernels.latent import LatentPlan
from kvist.kernels.leading import LedPlan
from kvist.kernels.paged import PagedPlan
from kvist.kernels.sealing import SealedPlan
from kvist.kernels.segment import ItemsPlan, LatentItemsPlan
from kvist.model.rotary import FusedRotation, Rotation
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Layer
from kvist.store.states import StatePlan

AttendingPlan = AttentionPlan | PagedPlan | SealedPlan | LedPlan | ItemsPlan
"""Of a group whose layers attend to keys and values."""

Plan = AttendingPlan | LatentPlan | LatentItemsPlan | StatePlan | None
"""Of a group; None of tails and leads, which the plan of their layers' own keys and values takes along."""


class Observer(Protocol):
    """Looks at the queries of a step: those of sequences that are to be pruned."""

    @property
    def looks(self) -> bool:
        """Whether it wants to see any behind attention."""

    def drawn(self, group: int, place: int) -> Tensor | None:
        """To what attention adds what a chunk's queries weigh: ``drawn`` of its :class:`kvist.kernels.spans.Span`.

        Args:
            group: its number; one whose memory ``draws``.
            place: of the chunk among the step's.
        """

    def see(self, group: int, slots: slice, queries: Tensor, sinks: Tensor | None) -> None:
        """Layers have stored their keys and attended.

        Args:
            group: its number.
            slots: the layers' places in it, one after the other.
            queries: ``[layers, tokens, repeats, kv_heads, dim]``, as attention saw them; not valid after the call.
            sinks: of the layer, which is alone then, float32 ``[repeats, kv_heads]``, where it has any.
        """


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the pieces that one layer stores are: each is a group, its number, and the layer's slot in it."""

    pieces: tuple[tuple[Group, int, int], ...]

    @classmethod
    def by_layer(cls, groups: Sequence[Group], layers: int) -> "list[Places]":
        """The places of every layer of a model."""
        found: list[list[tuple[Group, int, int]]] = [[] for _ in range(layers)]
        for number, group in enumerate(groups):
            for slot, layer in enumerate(group.layers):
                found[layer].append((group, number, slot))
        return [cls(pieces=tuple(pieces)) for pieces in found]

    def of(self, kind: type[Layer]) -> tuple[int, int]:
        """Group and slot of the piece of this kind."""
        return next((number, slot) for group, number, slot in self.pieces if isinstance(group.layer, kind))

    def format_of(self, kind: type[Layer]) -> CacheFormat:
        """How the piece of this kind is stored."""
        return next(group.format for group, _, _ in self.pieces if isinstance(group.layer, kind))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one pass through the network has for its mixers.

    Attributes:
        positions: int64 ``[tokens]``.
        rotations: of the network's rotary positions, in their order.
        plans: of every group.
        observer: of the step, if there is one.
    """

    positions: Tensor
    rotations: Sequence[Rotation | FusedRotation]
    plans: Sequence[Plan]
    observer: Observer | None = None

    def attention(self, group: int) -> AttendingPlan:
        """The plan of a group whose layers attend."""
        plan = self.plans[group]
        assert isinstance(plan, AttendingPlan)
        return plan

    def latents(self, group: int) -> LatentPlan | LatentItemsPlan:
        """The plan of a group of latents."""
        plan = self.plans[group]
        assert isinstance(plan, LatentPlan | LatentItemsPlan)
        return plan

    def states(self, group: int) -> StatePlan:
        """The plan of a group of states."""
        plan = self.plans[group]
        assert isinstance(plan, StatePlan)
        return plan
