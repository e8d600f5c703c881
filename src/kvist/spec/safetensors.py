"""The headers of safetensors files: which tensors, of which type, how many bytes; the tensors stay on disk.

A file is ``header length u64 | header JSON | bytes``; the header maps a name to its type, shape and place. A
directory holds one file, or shards that an index names.

Source: the format section of the safetensors README.
"""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.files import open_regular
from kvist.spec.json_file import MAX_INDEX, parse_object, read_object, shown

# bits of one element
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

MAX_HEADER = 2**24
_MOST_DIMENSIONS = 32
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PART = re.compile(r"(?P<stem>.+)-[0-9]{5}-of-(?P<parts>[0-9]{5})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class SafeTensor:
    """One tensor: its type's name, its shape, and its stored bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """Number of stored elements; packed codes count as what they are stored in."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class SafetensorsWeights:
    """The tensors of a file or of all shards of a model, by name."""

    tensors: Mapping[str, SafeTensor]

    @property
    def weights_by_type(self) -> dict[str, int]:
        """Stored bytes by type, largest first."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def read_weights(directory: Path, *, whole: bool = True) -> SafetensorsWeights | None:
    """Read the headers of a model directory; None where it holds no safetensors.

    Args:
        directory: of the model.
        whole: every file that an index names must be there; without, None where one is not.

    Raises:
        BadFile: a file is torn or foreign, a shard is not there, or two files hold the same tensor.
    """
    names = {path.name for path in directory.glob("*.safetensors*") if path.is_file()}
    if INDEX in names:
        index = directory / INDEX
        placed = placement(read_object(index, most=MAX_INDEX), name=str(index))
        absent = next((shard for shard in sorted(set(placed.values())) if shard not in names), None)
        if absent is not None and not whole:
            return None
        if absent is not None:
            raise BadFile(f"{index}: names {absent}, which is not in {directory}; fetch it", key="weight_map")
        shards = {shard: read_file(directory / shard) for shard in sorted(set(placed.values()))}
        return SafetensorsWeights(tensors=joined(placed, shards, name=str(index)))
    files = weight_files(names, name=str(directory))
    tensors: dict[str, SafeTensor] = {}
    for file in files:
        found = read_file(directory / file)
        twice = next((tensor for tensor in found if tensor in tensors), None)
        if twice is not None:
            raise BadFile(
                f"{directory}: {file} and another .safetensors file both hold {shown(twice, 80)}; keep one of them"
            )
        tensors |= found
    return SafetensorsWeights(tensors=tensors) if files else None


def weight_files(names: set[str], *, name: str) -> list[str]:
    """Of the files of a directory without an index, those that hold the model.

    Raises:
        BadFile: a part of several is not there.
    """
    if SINGLE in names:
        return [SINGLE]
    # Mistral ships its own layout of the same weights beside the common one; adapters are no part of the model.
    files = sorted(
        file for file in names if file.endswith(".safetensors") and not file.startswith(("consolidated", "adapter_"))
    )
    for match in filter(None, map(_PART.fullmatch, files)):
        found = sum(file.startswith(f"{match['stem']}-") and f"-of-{match['parts']}." in file for file in files)
        if found != int(match["parts"]):
            raise BadFile(f"{name}: holds {found} of the {int(match['parts'])} parts of {match[0]}; fetch the others")
    return files


def placement(index: Mapping[str, Any], *, name: str) -> dict[str, str]:
    """Return an index's ``weight_map``: the file of each tensor.

    Raises:
        BadFile: there is none, or it names something else than plain files.
    """
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise BadFile(f"{name}: weight_map is missing; it must map each tensor to its file", key="weight_map")
    for shard in sorted(set(placed.values())):
        if not shard or "\0" in shard or shard in (".", "..") or "\\" in shard or Path(shard).name != shard:
            raise BadFile(f"{name}: {shown(shard, 80)} is not a plain file name", key="weight_map")
    return placed


def joined(placed: Mapping[str, str], shards: Mapping[str, Mapping[str, SafeTensor]], *, name: str) -> dict[str, Any]:
    """Return the tensors of all shards, each of which must hold what the index places in it.

    Raises:
        BadFile: a tensor is not where the index says.
    """
    absent = next((tensor for tensor, shard in placed.items() if tensor not in shards[shard]), None)
    if absent is not None:
        raise BadFile(f"{name}: tensor {shown(absent, 80)} is not in {placed[absent]}", key="weight_map")
    return {name: tensor for shard in shards.values() for name, tensor in shard.items()}


def read_file(path: Path) -> dict[str, SafeTensor]:
    """Read one file's header.

    Raises:
        BadFile: it cannot be opened, is of another kind, or is torn.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = header_length(prefix, size, name=str(path))
            return read_header(prefix + file.read(length), name=str(path), size=size)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}") from error


def read_header(data: bytes, *, name: str, size: int | None = None) -> dict[str, SafeTensor]:
    """Read a header from the first bytes of a file.

    Args:
        data: bytes that begin with a whole header.
        name: what messages call it.
        size: of the whole file, which must end where the last tensor does; None where it is not known.

    Raises:
        BadFile: torn, or not a safetensors header.
    """
    length = header_length(data, len(data), name=name)
    header = parse_object(data[8 : 8 + length], name=f"{name}: its header", most=MAX_HEADER)
    tensors: dict[str, SafeTensor] = {}
    last = 0
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        tensors[key], end = _tensor(name, key, entry)
        last = max(last, end)
    stored = sum(tensor.bytes for tensor in tensors.values())
    if stored != last:
        raise BadFile(f"{name}: its tensors take {stored} bytes but end at {last}: they overlap, or leave holes")
    if size is not None and 8 + length + last != size:
        raise BadFile(f"{name}: its tensors end at byte {8 + length + last}, the file at {size}; fetch it again")
    return tensors


def header_length(prefix: bytes, available: int, *, name: str) -> int:
    """Return the length that the first 8 bytes of a file give, held against the ``available`` bytes of the file.

    Raises:
        BadFile: it cannot be.
    """
    length: int = struct.unpack("<Q", prefix[:8])[0] if len(prefix) >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER, available - 8):
        raise BadFile(
            f"{name}: {available} bytes cannot hold a header of {length} (2 to {MAX_HEADER}); "
            f"torn, or not a .safetensors file: fetch it again"
        )
    return length


def _tensor(name: str, key: str, entry: Any) -> tuple[SafeTensor, int]:
    """Read one entry. A model may have 200,000 of them, so that the usual case takes few steps."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        dtype = shape = start = end = None
    if type(dtype) is not str or type(shape) is not list or type(start) is not int or type(end) is not int:
        raise BadFile(f"{name}: tensor {shown(key, 80)} lacks dtype, shape or data_offsets")
    if dtype not in DTYPE_BITS:
        raise BadFile(f"{name}: tensor {shown(key, 80)} is of type {shown(dtype)}; known are {', '.join(DTYPE_BITS)}")
    if len(shape) > _MOST_DIMENSIONS or not all(type(side) is int and 0 <= side < 2**60 for side in shape):
        raise BadFile(f"{name}: tensor {shown(key, 80)} has shape {shown(shape, 60)}; whole numbers were expected")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or not 0 <= start <= end or (end - start) * 8 != bits:
        raise BadFile(
            f"{name}: tensor {shown(key, 80)} of {shown(shape, 60)} {dtype} takes "
            f"{bits / 8 if bits < 2**63 else 'too many'} bytes, its data_offsets say {str(end - start)[:24]}"
        )
    return SafeTensor(dtype=dtype, shape=tuple(shape), bytes=bits // 8), end
