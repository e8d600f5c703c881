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

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.files import open_regular

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
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VERSIONS = (2, 3)

# Far above what any published file has; a header that claims more is not worth minutes of walking.
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**16
_MAX_STRINGS = 2**22
_MAX_DIMENSIONS = 4
_MAX_NAME = 2**16
_MAX_TEXT = 2**26

_U32 = struct.Struct("<I")
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
            raise BadFile(f"{self.name}: {key} is {found!r}; an array was expected", key=key)
        if isinstance(self.source, bytes):
            data = self.source[found.start : found.end]
        else:
            with open_regular(self.source) as file:
                file.seek(found.start)
                data = file.read(found.end - found.start)
        if len(data) != found.end - found.start:
            raise BadFile(f"{self.name}: cut inside {key}; fetch it again", key=key)
        if found.element_type != _STRING:
            return list(struct.unpack(f"<{found.count}{_SCALARS[found.element_type]}", data))
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


def read_gguf(source: Path | bytes, *, name: str | None = None) -> GGUFHeader:
    """Read the header of a GGUF file, or of the first bytes of one.

    Args:
        source: the file, or bytes that begin with a whole header. A file must also hold all of its tensors.
        name: what messages call it; a file's path by default.

    Raises:
        BadFile: it cannot be opened, is of another kind, or is torn; says at which byte.
    """
    if isinstance(source, bytes):
        return _Walk(source, name or "GGUF header").header(source, size=None)
    name = name or str(source)
    try:
        with open_regular(source) as file:
            # Looked at before mapping: an empty file cannot be mapped, and most foreign files end here.
            magic = file.read(4)
            if len(magic) < 4 and b"GGUF".startswith(magic):
                raise BadFile(f"{name}: cut: {len(magic)} bytes are no GGUF header; fetch it again")
            if magic != b"GGUF":
                raise BadFile(f"{name}: does not begin with 'GGUF'; a .gguf file was expected")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Walk(mapped, name).header(source, size=len(mapped))
    except OSError as error:
        raise BadFile(f"{name}: cannot be read: {error.strerror or error}") from error


class _Walk:
    """A position in the header; each step says what it was reading when the bytes run out."""

    def __init__(self, buffer: bytes | mmap.mmap, name: str) -> None:
        self.buffer = buffer
        self.name = name
        self.end = len(buffer)
        self.at = 0
        self.text_left = _MAX_TEXT

    def header(self, source: Path | bytes, *, size: int | None) -> GGUFHeader:
        if self.take(4, "the magic") != b"GGUF":
            raise BadFile(f"{self.name}: does not begin with 'GGUF'; a .gguf file was expected")
        version = self.u32("the version")
        if version not in _VERSIONS:
            raise BadFile(f"{self.name}: GGUF version {version}; little-endian versions 2 and 3 are read")
        tensor_count = self.count(_MAX_TENSORS, 24, "the number of tensors")
        metadata_count = self.count(_MAX_KEYS, 13, "the number of metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.label("a metadata key")
            if key in metadata:
                raise BadFile(f"{self.name}: metadata key {key!r} occurs twice")
            metadata[key] = self.value(key)
        tensors = self.tensor_list(tensor_count, metadata, size)
        return GGUFHeader(
            name=self.name,
            version=version,
            metadata=metadata,
            tensors=tensors.items,
            data_start=tensors.data_start,
            source=source,
        )

    def tensor_list(self, count: int, metadata: dict[str, Any], size: int | None) -> "_Tensors":
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
            raise BadFile(f"{self.name}: general.alignment is {alignment!r}; a power of two was expected")
        raw = [self.tensor() for _ in range(count)]
        data_start = -(-self.at // alignment) * alignment
        names: set[str] = set()
        for tensor in raw:
            if tensor.name in names:
                raise BadFile(f"{self.name}: tensor {tensor.name!r} occurs twice")
            names.add(tensor.name)
            if tensor.offset % alignment:
                raise BadFile(
                    f"{self.name}: tensor {tensor.name!r} begins at {tensor.offset}, no multiple of {alignment}"
                )
            end = data_start + tensor.offset + tensor.bytes
            if size is not None and end > size:
                raise BadFile(
                    f"{self.name}: cut: tensor {tensor.name!r} ends at byte {end}, the file at {size}; fetch it again"
                )
        return _Tensors(
            items=tuple(
                GGUFTensor(name=t.name, shape=t.shape, type=t.type, offset=data_start + t.offset, bytes=t.bytes)
                for t in raw
            ),
            data_start=data_start,
        )

    def tensor(self) -> GGUFTensor:
        """Read one entry; its offset is still from the start of the tensors' bytes."""
        name = self.label("a tensor's name")
        dimensions = self.u32(name)
        if dimensions > _MAX_DIMENSIONS:
            raise BadFile(f"{self.name}: tensor {name!r} has {dimensions} dimensions; ggml has at most 4")
        sizes = [self.u64(name) for _ in range(dimensions)]
        kind, offset = self.u32(name), self.u64(name)
        if kind not in GGML_TYPES:
            raise BadFile(f"{self.name}: tensor {name!r} is of ggml type {kind}, which is not known")
        type_name, block, block_bytes = GGML_TYPES[kind]
        elements = prod(sizes)
        if elements >= 2**60 or offset >= 2**60:
            raise BadFile(f"{self.name}: tensor {name!r} has {elements} elements at {offset}: not possible")
        if (sizes[0] if sizes else 1) % block:
            raise BadFile(
                f"{self.name}: tensor {name!r} has rows of {sizes[0] if sizes else 1}, no multiple of the "
                f"{block} elements of a {type_name} block"
            )
        return GGUFTensor(
            name=name,
            shape=tuple(reversed(sizes)),
            type=type_name,
            offset=offset,
            bytes=elements // block * block_bytes,
        )

    def value(self, key: str) -> Any:
        kind = self.u32(key)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            return self.scalar(kind, key)
        element, start_count = self.u32(key), self.u64(key)
        start = self.at
        if element == _STRING:
            self.skip_strings(start_count, key)
        elif element in _SCALARS:
            self.skip(start_count * struct.calcsize(f"<{_SCALARS[element]}"), key)
        else:
            raise BadFile(f"{self.name}: {key}: arrays of type {element} are not read")
        return GGUFArray(element_type=element, count=start_count, start=start, end=self.at)

    def scalar(self, kind: int, key: str) -> Any:
        if kind not in _SCALARS:
            raise BadFile(f"{self.name}: {key} is of value type {kind}, which is not known")
        form = f"<{_SCALARS[kind]}"
        return struct.unpack(form, self.take(struct.calcsize(form), key))[0]

    def skip_strings(self, count: int, key: str) -> None:
        if count > _MAX_STRINGS or count * 8 > self.end - self.at:
            raise BadFile(
                f"{self.name}: {key}: {count} strings do not fit in the {self.end - self.at} bytes left: cut, or "
                f"broken; fetch it again"
            )
        at, last, length_at, buffer = self.at, self.end - 8, _U64.unpack_from, self.buffer
        for _ in range(count):
            if at > last:
                raise self.cut(key)
            at += 8 + length_at(buffer, at)[0]
        if at > self.end:
            raise self.cut(key)
        self.at = at

    def label(self, what: str) -> str:
        text = self.text(what, limit=_MAX_NAME)
        if not text:
            raise BadFile(f"{self.name}: {what} at byte {self.at} is empty")
        return text

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise BadFile(f"{self.name}: {what} at byte {self.at} claims {length} bytes; at most {limit}")
        self.text_left -= length
        if self.text_left < 0 and length <= self.end - self.at:
            raise BadFile(f"{self.name}: {what} at byte {self.at}: more than {_MAX_TEXT} bytes of text in the metadata")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise BadFile(f"{self.name}: {what} is not UTF-8 (before byte {self.at})") from error

    def count(self, limit: int, least_bytes: int, what: str) -> int:
        value = self.u64(what)
        if value > limit or value * least_bytes > self.end - self.at:
            raise BadFile(
                f"{self.name}: {what} is {value}, more than {self.end} bytes can hold: cut, or broken; fetch it again"
            )
        return value

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def take(self, count: int, what: str) -> bytes:
        start = self.at
        self.skip(count, what)
        return self.buffer[start : self.at]

    def skip(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            raise self.cut(what)
        self.at += count

    def cut(self, what: str) -> BadFile:
        return BadFile(f"{self.name}: cut: its {self.end} bytes end inside {what}; fetch it again")


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    items: tuple[GGUFTensor, ...]
    data_start: int
