"""How layers see the memory of their group: which kernels read it, and which groups are read together."""

from collections.abc import Sequence

from kvist.cache.groups import Group
from kvist.kernels.attention import PagedMemory
from kvist.kernels.cpu import PagedAttention, attention_kernels
from kvist.kernels.dense import Scores
from kvist.kernels.latent import LatentMemory
from kvist.kernels.portable import PortableAttention
from kvist.kernels.sealing import SealedAttention, SealedMemory
from kvist.model.decoder import Decoder
from kvist.model.mixers.latent import LatentAttention
from kvist.store.codecs import PLAIN
from kvist.store.layouts import PagedKV, PagedLatents
from kvist.store.states import StateStore
from kvist.store.stores import Store

Memory = PagedMemory | PagedAttention | SealedMemory | SealedAttention | LatentMemory | StateStore


def memory_of(number: int, groups: Sequence[Group], stores: Sequence[Store], decoder: Decoder) -> Memory | None:
    """A group's memory as its layers see it: compiled kernels' where there are any and they can.

    None of a tail, which is seen with the sealed runs of its layers.

    Args:
        number: of the group.
        groups: of the model.
        stores: what holds each of them.
        decoder: whose layers they are.
    """
    group, store = groups[number], stores[number]
    if isinstance(store, StateStore):
        return store
    if group.lifetime == "tail":
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
    suits = kind.suits(store, decoder.dtype, repeats) and (kind.sinks or not any(net.sinks for net in nets))
    tails = tails_of(groups)
    if number not in tails:
        if kernels is not None and suits:
            return kind(kernels, store, scores, repeats)
        return PagedMemory(store, scores, decoder.dtype)
    ordinal = tails[number]
    tail = stores[ordinal]
    assert isinstance(tail, PagedKV)
    layers = [tail.group.layers.index(layer) for layer in group.layers]
    # Kernels seal what lies there in the type that they compute in.
    as_computed = decoder.dtype == PLAIN[tail.group.format.key] and kind.suits(tail, decoder.dtype, repeats)
    if kernels is not None and suits and as_computed:
        body, open_tail = (kind(kernels, each, scores, repeats) for each in (store, tail))
        return SealedAttention(body, open_tail, layers)
    return SealedMemory(store, tail, layers, scores, decoder.dtype)


def tails_of(groups: Sequence[Group]) -> dict[int, int]:
    """The group that holds the tails of each group of sealed runs."""
    return {
        number: next(
            n for n, other in enumerate(groups) if other.lifetime == "tail" and set(group.layers) <= set(other.layers)
        )
        for number, group in enumerate(groups)
        if group.lifetime == "sealed"
    }
