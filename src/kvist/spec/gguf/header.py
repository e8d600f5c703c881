"""The header of a GGUF file: metadata and tensor list, without the tensors.

::

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string | type u32 | value          (an array: element type u32 | count u64 | elements)
    tensors:   name string | dimensions u32 | each u64, innermost first | type u32 | offset u64
    padding to `general.alignment` (32 where absent), then the tensors' bytes

Strings are a u64 length and UTF-8. Every length is held against the bytes that are there before anything is
allocated. Arrays are stepped over and decoded on request: a vocabulary of 262,144 tokens costs a walk over its
lengths, not a list of strings.

Source: docs/gguf.md of the ggml repository; type sizes: ggml-common.h there.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.files import open_regular
from kvist.spec.json_file import shown

# type number: (name, elements a block, bytes a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
    # The same codes in an order of rows that files no longer have.
    31: ("Q4_0_4_4", 32, 18), 32: ("Q4_0_4_8", 32, 18), 33: ("Q4_0_8_8", 32, 18),
    36: ("IQ4_NL_4_4", 32, 18), 37: ("IQ4_NL_4_8", 32, 18), 38: ("IQ4_NL_8_8", 32, 18),
}  # fmt: skip

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Far above what any published file has.
_MAX_DECODED = 2**22

_U64 = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class GGUFArray:
    """Where an array of the metadata lies; ``GGUFHeader.array`` decodes it."""

    element_type: int
    count: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
        name: as in the file, such as ``blk.0.attn_k.weight``.
        shape: outermost dimension first, as PyTorch counts; the file has it the other way round.
        type: ggml's name of the storage, such as ``Q4_1``.
        offset: of the first byte, from the start of the file.
        bytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """What the file says before its tensors.

    Attributes:
        name: of the file, for messages.
        metadata: scalars and strings by key; an array is a :class:`GGUFArray`.
        tensors: in file order.
        data_start: offset of the first tensor's bytes.
    """

    name: str
    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_start: int
    source: Path | bytes = field(repr=False)

    @cached_property
    def tensor_by_name(self) -> Mapping[str, GGUFTensor]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def weights_by_type(self) -> dict[str, int]:
        """Stored bytes by type, largest first."""
        totals: dict[str, int] = {}
        for tensor in self.tensors:
            totals[tensor.type] = totals.get(tensor.type, 0) + tensor.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def array(self, key: str) -> list[Any]:
        """Decode the array under ``key`` to a list of numbers, booleans or strings.

        Raises:
            BadFile: there is no such array, or a string in it is not UTF-8.
        """
        found = self.metadata.get(key)
        if not isinstance(found, GGUFArray):
            raise BadFile(f"{self.name}: {key} is {shown(found)}; an array was expected", key=key)
        if found.count > _MAX_DECODED:
            raise BadFile(f"{self.name}: {key} has {found.count} entries; at most {_MAX_DECODED} are read", key=key)
        if isinstance(self.source, bytes):
            data = self.source[found.start : found.end]
        else:
            with open_regular(self.source) as file:
                file.seek(found.start)
                data = file.read(found.end - found.start)
        if len(data) != found.end - found.start:
            raise BadFile(f"{self.name}: cut inside {key}; fetch it again", key=key)
        if found.element_type != STRING:
            return list(struct.unpack(f"<{found.count}{SCALARS[found.element_type]}", data))
        strings: list[str] = []
        position = 0
        try:
            for _ in range(found.count):
                start = position + 8
                position = start + _U64.unpack_from(data, position)[0]
                strings.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise BadFile(f"{self.name}: {key}: entry {len(strings)} is not UTF-8", key=key) from error
        return strings
