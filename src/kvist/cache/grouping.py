"""What a model's layers store, gathered into groups.

What a layer stores is taken apart until each piece has one lifetime (:attr:`Layer.stored`), and each piece joins the
group of its equals: a layer with attention beside a state has a place in two groups, one that shares in none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd, lcm

from kvist.cache.groups import Group
from kvist.errors import InputError
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Layer, State
from kvist.spec.model import ModelSpec
from kvist.units import require_tokens

DEFAULT_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 1 << 20


def groups_of(
    spec: ModelSpec,
    fmt: CacheFormat,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    *,
    encoder_tokens: int | None = None,
) -> tuple[Group, ...]:
    """Gather what a model's layers store into groups, in the order in which it first appears.

    Args:
        spec: the model.
        fmt: how keys and values are stored; layers that it stores differently are in different groups.
        block_tokens: tokens of a block; groups of compressed layers take the next multiple that is whole entries.
        encoder_tokens: length of the encoder's output, where the model attends to one and does not fix it.

    Raises:
        InputError: ``block_tokens`` is not a whole number of tokens, no vector can be stored so, the encoder's length
            is needed, or the model stores nothing.
    """
    if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise InputError(
            f"block_tokens: {block_tokens!r}; a whole number of tokens, 1 to {MAX_BLOCK_TOKENS}", key="block_tokens"
        )
    members: dict[tuple[Layer, CacheFormat], list[int]] = {}
    fmt.require_layers(len(spec.layers), name=spec.name)
    count, usual = len(spec.layers), replace(fmt.plain.of_sealed, state=None)
    for piece, index in _pieces(spec, encoder_tokens):
        for layer, plain in piece.pieces(fmt.of_layer(index, count)):
            own = usual if isinstance(layer, State) else replace(plain, state=None)
            members.setdefault((layer, own), []).append(index)
    if not members:
        raise InputError(f"model: {spec.name} stores nothing of a sequence; there is no cache to cut", key="model")
    names = _names(members, usual)
    return tuple(
        Group(
            name=name,
            layer=layer,
            layers=tuple(indices),
            block_tokens=_block_of(layer, block_tokens),
            format=plain,
        )
        for name, ((layer, plain), indices) in zip(names, members.items(), strict=True)
    )


def _pieces(spec: ModelSpec, encoder_tokens: int | None) -> Iterator[tuple[Layer, int]]:
    """What each layer stores, and its index; encoders have their length."""
    for index, layer in enumerate(spec.layers):
        for piece in layer.stored:
            if isinstance(piece, Cross) and piece.encoder_tokens is None:
                if encoder_tokens is None:
                    raise InputError(
                        f"encoder_tokens: {spec.name} keeps keys and values of an encoder's output, whose length it "
                        f"does not fix; give it",
                        key="encoder_tokens",
                    )
                yield replace(piece, encoder_tokens=require_tokens(encoder_tokens, key="encoder_tokens")), index
            else:
                yield piece, index


def _block_of(layer: Layer, block_tokens: int) -> int:
    """Tokens of a group's blocks: those asked for, whole entries and runs; a tail's are parts of a run."""
    if isinstance(layer, Attention) and layer.tail is not None:
        return gcd(block_tokens, layer.tail)
    return lcm(block_tokens, _indivisible_tokens(layer))


def _indivisible_tokens(layer: Layer) -> int:
    """Tokens that share bytes, of which a block must hold a multiple."""
    match layer:
        case Compressed(ratio=ratio, indexer=indexer):
            return ratio * (indexer.pool if indexer else 1)
        case Attention(indexer=indexer) | Latent(indexer=indexer) if indexer:
            return indexer.pool
        case Attention(sealed=int(run)):
            return run
        case _:
            return 1


def _names(members: Iterable[tuple[Layer, CacheFormat]], usual: CacheFormat) -> list[str]:
    names: list[str] = []
    for layer, fmt in members:
        name = f"{name_of(layer)}{_told(fmt, usual)}"
        twins = sum(1 for other in names if other == name or other.startswith(f"{name}."))
        names.append(f"{name}.{twins}" if twins else name)
    return names


def _told(fmt: CacheFormat, usual: CacheFormat) -> str:
    """What a name says of a format: nothing of the cache's own."""
    if fmt == usual:
        return ""
    words = [fmt.key] if fmt.key == fmt.value else [fmt.key, fmt.value]
    if fmt.rotate and not usual.rotate:
        words.append("rotated")
    return "".join(f"-{word}" for word in words)


def name_of(layer: Layer) -> str:
    """What groups of such layers are called, before their format."""
    match layer:
        case Attention(sealed=int(run)):
            return f"sealed-{run}"
        case Attention(lead=True):
            return "lead"
        case Attention(tail=int(run)):
            return f"tail-{run}"
        case Attention(chunk=int(chunk)):
            return f"chunk-{chunk}"
        case Attention(window=int(window)):
            return f"window-{window}"
        case Latent(window=int(window)):
            return f"latent-window-{window}"
        case Attention(indexer=None):
            return "full"
        case Attention():
            return "full-indexed"
        case Latent(indexer=None):
            return "latent"
        case Latent():
            return "latent-indexed"
        case Compressed(ratio=ratio):
            return f"compressed-{ratio}"
        case State(name=name):
            return f"state-{name}"
        case _:
            return layer.kind
