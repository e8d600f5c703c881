"""A trained cache in a plan: stored once, and every sequence begins behind it (arXiv:2506.06266)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cache.groups import Group, unit_of
from kvist.cache.lead_groups import lead_blocks, lead_unit
from kvist.errors import InputError
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Latent
from kvist.spec.model import ModelSpec
from kvist.units import counted, parse_tokens

if TYPE_CHECKING:
    from kvist.planning.deployment import Cutting


def pinned_blocks(groups: Sequence[Group], tokens: int) -> tuple[int, ...]:
    """Blocks in each group of a cartridge of ``tokens``, whole blocks of them; windows keep what is read behind it.

    Raises:
        InputError: a group keeps what no trained cache stands for.
    """
    for group in groups if tokens else ():
        layer = group.layer
        if not (isinstance(layer, Latent) or (isinstance(layer, Attention) and layer.key_dim == layer.value_dim)):
            raise InputError(
                f"cartridge: {group.name}: what these layers remember is not one vector a token, so that no trained "
                f"cache can stand for it; leave it out",
                key="cartridge",
            )
    if lead_unit(groups):
        return lead_blocks(groups, tokens)
    return tuple(group.live_blocks(tokens) for group in groups)


def behind(
    spec: ModelSpec, cutting: "Cutting", cartridge: int | str, fmt: CacheFormat | None, *, most: int
) -> "Cutting":
    """Caches that hold a cartridge, rounded up to whole blocks.

    Args:
        spec: the model.
        cutting: how its caches are cut.
        cartridge: tokens of it.
        fmt: in which it is stored; None: as the caches are.
        most: of the longest sequence.

    Raises:
        InputError: no token is left behind it, or the model keeps what no trained cache stands for.
        UnsupportedModel: it has a format of its own, and not all layers attend to every token.
    """
    count = parse_tokens(cartridge, key="cartridge")
    cutting = replace(cutting, cartridge_format=fmt)
    groups = cutting.groups(spec, cutting.fmt)
    if not groups:
        raise InputError(
            f"cartridge: {spec.name} keeps nothing that one could stand for; leave it out", key="cartridge"
        )
    unit = lead_unit(groups) or unit_of(groups)
    whole = -(-count // unit) * unit
    pinned_blocks(groups, whole)
    if not 0 < whole < most:
        raise InputError(
            f"cartridge: {counted(count, 'token')}; {spec.name} reads {most:,}, of which one at least stands behind it",
            key="cartridge",
        )
    return replace(cutting, cartridge=whole)


def refuse_beside(cartridge: int | str, *, lengths: str | Path | None, engine: str | None) -> None:
    """Raise :class:`InputError` where a cartridge is not counted."""
    if lengths is not None:
        raise InputError(
            f"cartridge: {cartridge} beside the lengths of {lengths}; behind one, sequences of one length are counted: "
            f"give `context`",
            key="cartridge",
        )
    if engine not in (None, "kvist"):
        raise InputError(f"cartridge: {engine} has none; leave it out, or choose kvist", key="cartridge")
