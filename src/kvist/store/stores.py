"""Which store holds what a group of layers remembers."""

from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.spec.layers import Latent, State
from kvist.store.layouts import PagedKV, PagedLatents, Scratch
from kvist.store.states import StateStore

Store = PagedKV | PagedLatents | StateStore


def store_of(arena: Tensor, group: Group, layout: ArenaLayout, ordinal: int, scratch: Scratch) -> Store:
    """Lay a group's store over the arena; nothing is allocated or written, so that any device will do.

    Args:
        arena: uint8 ``[layout.total_bytes]``.
        group: of layers.
        layout: how the arena is cut.
        ordinal: of the group in the layout.
        scratch: shared by the groups of a runner.

    Raises:
        InputError: the group's format is not stored.
        UnsupportedModel: its layers are not computed.
    """
    if isinstance(group.layer, State):
        return StateStore(arena, group, layout, ordinal)
    paged = PagedLatents if isinstance(group.layer, Latent) else PagedKV
    return paged(arena, group, layout, ordinal, scratch)
