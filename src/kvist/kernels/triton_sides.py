"""How the GPU kernels step through one head's run of a block: the numbers of a :class:`kvist.store.codecs.Coding`."""

from dataclasses import dataclass

import torch

from kvist.store.codecs import GROUP, Coding


@dataclass(frozen=True, kw_only=True)
class Side:
    """How keys or values of one head lie in a block; steps are in elements as they are read.

    Attributes:
        codec: name.
        dtype: as which the arena is read for codes.
        columns: stored codes of a vector: its width, or half of it where a byte holds two.
        high: how much further a byte's second element is; 0 where there is none.
        slot_step: codes from one token to the next.
        column_step: codes from one column to the next.
        run_bytes: of the whole run.
        scale_bytes: bytes of the run before its scales.
        scale_slot_step: scales from one token to the next; 0 where there are none, as the next two.
        scale_group_step: scales from one group to the next.
        minimum_step: scales from a scale to its minimum; 0 where there is none.
        groups: scales of a vector; 1 where there are none.
    """

    codec: str
    dtype: torch.dtype
    columns: int
    slot_step: int
    high: int = 0
    column_step: int = 1
    run_bytes: int = 0
    scale_bytes: int = 0
    scale_slot_step: int = 0
    scale_group_step: int = 0
    minimum_step: int = 0
    groups: int = 1


def side_of(coding: Coding) -> Side:
    """Describe a coding as kernels want it."""
    codes = coding.pieces[0]
    item = codes.dtype.itemsize
    plain = Side(
        codec=coding.codec,
        dtype=codes.dtype,
        columns=codes.elements,
        slot_step=codes.token_step // item,
        column_step=codes.element_step // item,
        run_bytes=coding.run_bytes,
    )
    if len(coding.pieces) == 1:
        return plain
    scales = coding.pieces[1]
    groups = coding.dim // GROUP
    step = scales.element_step // scales.dtype.itemsize
    affine = scales.elements == 2 * groups
    # Pairs of a scale and a minimum among keys; all scales, then all minima among values.
    paired = affine and coding.side == "key"
    return Side(
        codec=plain.codec,
        dtype=plain.dtype,
        columns=plain.columns,
        slot_step=plain.slot_step,
        high=0 if codes.elements == coding.dim else 16 if coding.side == "key" else 2,
        column_step=plain.column_step,
        run_bytes=plain.run_bytes,
        scale_bytes=scales.offset,
        scale_slot_step=scales.token_step // scales.dtype.itemsize,
        scale_group_step=2 * step if paired else step,
        minimum_step=(step if paired else groups * step) if affine else 0,
        groups=groups,
    )
