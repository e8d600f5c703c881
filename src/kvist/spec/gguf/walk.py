"""The walk over a GGUF header's bytes, each step of it held against the bytes that are there."""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.gguf.header import ARRAY, GGML_TYPES, SCALARS, STRING, GGUFArray, GGUFHeader, GGUFTensor
from kvist.spec.json_file import shown

_VERSIONS = (2, 3)

# Far above what any published file has; a header that claims more is not worth seconds of walking.
_MAX_KEYS = 2**14
_MAX_TENSORS = 2**15
_MAX_STRINGS = 2**21
_MAX_DIMENSIONS = 4
_MAX_NAME = 2**10
_MAX_TEXT = 2**24
# A longer string (a whole tokenizer as JSON) is stepped over like an array.
_MAX_STRING = 2**20
_BYTES = 0

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cut(BadFile):
    """The bytes end before the header does; with more of the file it may be whole."""


def walk(buffer: bytes | mmap.mmap, *, name: str, source: Path | bytes, size: int | None) -> GGUFHeader:
    """Read a header from the beginning of ``buffer``.

    Args:
        buffer: bytes that begin with a whole header.
        name: what messages call the file.
        source: where arrays can be read again.
        size: of the whole file, which must hold the tensors, where it is known.

    Raises:
        Cut: the bytes end inside the header.
        BadFile: it is broken or of another kind.
    """
    return _Walk(buffer, name).header(source, size=size)


class _Walk:
    """A position in the header; each step says what it was reading when the bytes run out."""

    def __init__(self, buffer: bytes | mmap.mmap, name: str) -> None:
        self.buffer = buffer
        self.name = name
        self.end = len(buffer)
        self.at = 0
        self.text_left = _MAX_TEXT
        self.strings_left = _MAX_STRINGS

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
                raise BadFile(f"{self.name}: metadata key {shown(key, 80)} occurs twice")
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
                raise BadFile(f"{self.name}: tensor {shown(tensor.name, 80)} occurs twice")
            names.add(tensor.name)
            if tensor.offset % alignment:
                raise BadFile(
                    f"{self.name}: tensor {shown(tensor.name, 80)} begins at {tensor.offset}, "
                    f"no multiple of {alignment}"
                )
            end = data_start + tensor.offset + tensor.bytes
            if size is not None and end > size:
                raise BadFile(
                    f"{self.name}: cut: tensor {shown(tensor.name, 80)} ends at byte {end}, the file at {size}; "
                    f"fetch it again"
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
            raise BadFile(f"{self.name}: tensor {shown(name, 80)} has {dimensions} dimensions; ggml has at most 4")
        sizes = [self.u64(name) for _ in range(dimensions)]
        kind, offset = self.u32(name), self.u64(name)
        if kind not in GGML_TYPES:
            raise BadFile(f"{self.name}: tensor {shown(name, 80)} is of ggml type {kind}, which is not known")
        type_name, block, block_bytes = GGML_TYPES[kind]
        elements = prod(sizes)
        if elements >= 2**60 or offset >= 2**60:
            raise BadFile(f"{self.name}: tensor {shown(name, 80)} has {elements} elements at {offset}: not possible")
        if (sizes[0] if sizes else 1) % block:
            raise BadFile(
                f"{self.name}: tensor {shown(name, 80)} has rows of {sizes[0] if sizes else 1}, no multiple of the "
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
        if kind == STRING:
            return self.string(key)
        if kind != ARRAY:
            return self.scalar(kind, key)
        element, start_count = self.u32(key), self.u64(key)
        start = self.at
        if element == STRING:
            self.skip_strings(start_count, key)
        elif element in SCALARS:
            self.skip(start_count * struct.calcsize(f"<{SCALARS[element]}"), key)
        else:
            raise BadFile(f"{self.name}: {key}: arrays of type {element} are not read")
        return GGUFArray(element_type=element, count=start_count, start=start, end=self.at)

    def scalar(self, kind: int, key: str) -> Any:
        if kind not in SCALARS:
            raise BadFile(f"{self.name}: {key} is of value type {kind}, which is not known")
        form = f"<{SCALARS[kind]}"
        return struct.unpack(form, self.take(struct.calcsize(form), key))[0]

    def skip_strings(self, count: int, key: str) -> None:
        self.strings_left -= count
        if self.strings_left < 0 or count * 8 > self.end - self.at:
            raise (BadFile if self.strings_left < 0 else Cut)(
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
        text = self.text(what)
        if not text:
            raise BadFile(f"{self.name}: {what} at byte {self.at} is empty")
        if not text.isprintable():
            raise BadFile(f"{self.name}: {what} before byte {self.at} is {shown(text)}, which is no name")
        return text

    def string(self, key: str) -> str | GGUFArray:
        length = self.u64(key)
        if length <= _MAX_STRING:
            return self.decoded(length, key)
        start = self.at
        self.skip(length, key)
        return GGUFArray(element_type=_BYTES, count=length, start=start, end=self.at)

    def text(self, what: str) -> str:
        length = self.u64(what)
        if length > _MAX_NAME:
            raise BadFile(f"{self.name}: {what} at byte {self.at} claims {length} bytes; at most {_MAX_NAME}")
        return self.decoded(length, what)

    def decoded(self, length: int, what: str) -> str:
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
            raise (BadFile if value > limit else Cut)(
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

    def cut(self, what: str) -> Cut:
        return Cut(f"{self.name}: cut: its {self.end} bytes end inside {what[:80]}; fetch it again")


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    items: tuple[GGUFTensor, ...]
    data_start: int
