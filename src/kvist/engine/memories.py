"""How layers see the memory of their group: which kernels read it, and which groups are read together."""

from collections.abc import Sequence

from kvist.cache.groups import Group, Lifetime
from kvist.kernels.attention import PagedMemory
from kvist.kernels.cpu import attention_kernels
from kvist.kernels.dense import Scores
from kvist.kernels.latent import LatentMemory
from kvist.kernels.leading import LedAttention, LedMemory
from kvist.kernels.paged import PagedAttention
from kvist.kernels.portable import PortableAttention
from kvist.kernels.sealing import SealedAttention, SealedMemory
from kvist.model.decoder import Decoder
from kvist.model.mixers.latent import LatentAttention
from kvist.store.codecs import PLAIN
from kvist.store.layouts import PagedKV, PagedLatents
from kvist.store.states import StateStore
from kvist.store.stores import Store

OwnMemory = PagedMemory | PagedAttention | SealedMemory | SealedAttention
Memory = OwnMemory | LedMemory | LedAttention | LatentMemory | StateStore


def memory_of(number: int, groups: Sequence[Group], stores: Sequence[Store], decoder: Decoder) -> Memory | None:
    """A group's memory as its layers see it: compiled kernels' where there are any and they can.

    None of a tail, which is seen with the sealed runs of its layers, and of leads, seen with their layers' own memory.

    Args:
        number: of the group.
        groups: of the model.
        stores: what holds each of them.
        decoder: whose layers they are.
    """
    group, store = groups[number], stores[number]
    if isinstance(store, StateStore):
        return store
    if group.lifetime in ("tail", "lead"):
        return None
    if isinstance(store, PagedLatents):
        mixers = [decoder.network.blocks[layer].mixer for layer in group.layers]
        (scale,) = {net.scale for net in mixers if isinstance(net, LatentAttention)}
        return LatentMemory(store, Scores(scale=scale), decoder.dtype)
    nets = [net for layer in group.layers for net in decoder.network.blocks[layer].attention]
    (scores,) = {Scores(scale=net.scale, softcap=net.softcap) for net in nets}
    (repeats,) = {net.heads // net.kv_heads for net in nets}
    kernels = attention_kernels(decoder.dtype)
    kind = PortableAttention if kernels is not None and kernels.name == "portable" else PagedAttention
    tails, leads = tails_of(groups), leads_of(groups)
    seen = [stores[other[number]] for other in (tails, leads) if number in other]
    sides = [side for side in (store, *seen) if isinstance(side, PagedKV)]
    suits = all(kind.suits(side, decoder.dtype, repeats) for side in sides)
    # Kernels seal what lies in tails in the type that they compute in.
    as_computed = number not in tails or decoder.dtype == PLAIN[groups[tails[number]].format.key]
    if kernels is None or not suits or not as_computed or (not kind.sinks and any(net.sinks for net in nets)):
        memory: PagedMemory | SealedMemory = PagedMemory(store, scores, decoder.dtype)
        if number in tails:
            tail, layers = _beside(store, tails[number], stores)
            memory = SealedMemory(store, tail, layers, scores, decoder.dtype)
        return LedMemory(memory, *_beside(store, leads[number], stores)) if number in leads else memory
    paged: PagedAttention | SealedAttention = kind(kernels, store, scores, repeats)
    if number in tails:
        tail, layers = _beside(store, tails[number], stores)
        paged = SealedAttention(kind(kernels, store, scores, repeats), kind(kernels, tail, scores, repeats), layers)
    if number in leads:
        lead, layers = _beside(store, leads[number], stores)
        return LedAttention(paged, kind(kernels, lead, scores, repeats), layers)
    return paged


def _beside(store: PagedKV, number: int, stores: Sequence[Store]) -> tuple[PagedKV, list[int]]:
    """What a group's layers see beside their own store, and the place of each there."""
    beside = stores[number]
    assert isinstance(beside, PagedKV)
    return beside, [beside.group.layers.index(layer) for layer in store.group.layers]


def tails_of(groups: Sequence[Group]) -> dict[int, int]:
    """The group that holds the tails of each group of sealed runs."""
    return {n: _with_layers_of(group, groups, "tail") for n, group in enumerate(groups) if group.lifetime == "sealed"}


def leads_of(groups: Sequence[Group]) -> dict[int, int]:
    """The group that holds what stands before sequences, of each whose layers see it; empty where there are none."""
    if all(group.lifetime != "lead" for group in groups):
        return {}
    return {n: _with_layers_of(group, groups, "lead") for n, group in enumerate(groups) if group.keeps_all}


def _with_layers_of(group: Group, groups: Sequence[Group], lifetime: Lifetime) -> int:
    return next(
        n for n, other in enumerate(groups) if other.lifetime == lifetime and set(group.layers) <= set(other.layers)
    )
