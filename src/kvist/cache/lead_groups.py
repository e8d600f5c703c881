"""Groups of what stands before sequences in a format of its own: arithmetic, for planner and engine.

::

    position   0 …                  P - 1 | P …
    stored     lead, int8/int4, once      | each sequence's own, in the format of the cache
    slot                                  | 0 …

A *lead* has a group for each shape of a model's attention, with all layers of that shape, and takes nothing of any
sequence: :mod:`kvist.cache.leads`.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from kvist.cache.grouping import name_of
from kvist.cache.groups import Group
from kvist.errors import InputError, UnsupportedModel
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec


def lead_groups(spec: ModelSpec, fmt: CacheFormat, block_tokens: int) -> tuple[Group, ...]:
    """The groups of leads, which go behind those of :func:`kvist.cache.grouping.groups_of`.

    Args:
        spec: the model; its layers store keys and values of every token, and nothing else.
        fmt: of keys and values, the same in all layers. Whether they are turned is up to the sequences' format, as
            the same queries meet both.
        block_tokens: tokens of a block, or of the next multiple that is whole runs of the codec.

    Raises:
        InputError: the format says more than how keys and values are stored.
        UnsupportedModel: a layer keeps something else.
    """
    if fmt != CacheFormat(key=fmt.key, value=fmt.value):
        raise InputError(
            f"cartridge_format: {fmt} says more than how keys and values are stored; write it as int8/int4",
            key="cartridge_format",
        )
    members: dict[Attention, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        for piece in layer.stored:
            if not isinstance(piece, Attention) or not piece.endless:
                raise UnsupportedModel(
                    f"cartridge_format: {spec.name} has {name_of(piece)} layers, and cartridges have a format of their "
                    f"own where all layers attend to every token; leave it out",
                    key="cartridge_format",
                )
            lead = replace(piece, lead=True)
            if lead not in members:
                _require_whole_groups(lead, fmt)
            members.setdefault(lead, []).append(index)
    codecs = fmt.key if fmt.key == fmt.value else f"{fmt.key}-{fmt.value}"
    return tuple(
        Group(
            name=f"lead-{codecs}.{number}" if number else f"lead-{codecs}",
            layer=layer,
            layers=tuple(indices),
            block_tokens=lcm(block_tokens, fmt.key_codec.run),
            format=fmt,
        )
        for number, (layer, indices) in enumerate(members.items())
    )


def _require_whole_groups(layer: Attention, fmt: CacheFormat) -> None:
    try:
        layer.append_bytes(fmt)
    except InputError as error:
        raise InputError(f"cartridge_format: {str(error).partition(': ')[2]}", key="cartridge_format") from error


def lead_unit(groups: Sequence[Group]) -> int:
    """Tokens of which a lead is a multiple: whole blocks of each of its groups; 0 where there are none."""
    sizes = [group.block_tokens for group in groups if group.lifetime == "lead"]
    return lcm(*sizes) if sizes else 0


def lead_blocks(groups: Sequence[Group], tokens: int) -> tuple[int, ...]:
    """Blocks in each group of a lead of so many tokens, whole blocks of them; none of other groups."""
    return tuple(tokens // group.block_tokens if group.lifetime == "lead" else 0 for group in groups)
