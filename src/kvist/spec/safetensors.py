"""The headers of safetensors files: which tensors, of which type, how many bytes; the tensors stay on disk.

A file is ``header length u64 | header JSON | bytes``; the header maps a name to its type, shape and place. A
directory holds one file, or shards that an index names.

Source: the format section of the safetensors README.
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvist.errors import BadFile
from kvist.spec.files import open_regular

# bits of one element
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_MAX_HEADER = 2**24
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


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
    def parameters(self) -> int:
        """Number of stored elements."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def weights_by_type(self) -> dict[str, int]:
        """Stored bytes by type, largest first."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def read_weights(directory: Path) -> SafetensorsWeights | None:
    """Read the headers of a model directory; None where it holds no safetensors.

    Raises:
        BadFile: a file is torn or foreign, or a shard that the index names is not there.
    """
    index = directory / _INDEX
    if index.is_file():
        return SafetensorsWeights(tensors=_shards(directory, index))
    if (directory / _SINGLE).is_file():
        return SafetensorsWeights(tensors=read_file(directory / _SINGLE))
    # Mistral ships its own layout of the same weights beside the common one.
    files = [path for path in sorted(directory.glob("*.safetensors")) if _is_shard(path)]
    tensors: dict[str, SafeTensor] = {}
    for path in files:
        tensors |= read_file(path)
    return SafetensorsWeights(tensors=tensors) if files else None


def _is_shard(path: Path) -> bool:
    return path.is_file() and not path.name.startswith("consolidated")


def read_file(path: Path) -> dict[str, SafeTensor]:
    """Read one file's header.

    Raises:
        BadFile: it cannot be opened, is of another kind, or is torn.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            _check_length(length, size, str(path))
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
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    _check_length(length, len(data), name)
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{name}: its header is not JSON; a .safetensors file was expected") from error
    if not isinstance(header, dict):
        raise BadFile(f"{name}: its header is not a JSON object; a .safetensors file was expected")
    tensors: dict[str, SafeTensor] = {}
    last = 0
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        tensors[key], end = _tensor(name, key, entry)
        last = max(last, end)
    if size is not None and 8 + length + last != size:
        raise BadFile(f"{name}: its tensors end at byte {8 + length + last}, the file at {size}; fetch it again")
    return tensors


def _check_length(length: int, available: int, name: str) -> None:
    if not 2 <= length <= min(_MAX_HEADER, available - 8):
        raise BadFile(
            f"{name}: {available} bytes cannot hold a header of {length} (2 to {_MAX_HEADER}); "
            f"torn, or not a .safetensors file: fetch it again"
        )


def _tensor(name: str, key: str, entry: Any) -> tuple[SafeTensor, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise BadFile(f"{name}: tensor {key!r} lacks dtype, shape or data_offsets")
    if dtype not in DTYPE_BITS:
        raise BadFile(f"{name}: tensor {key!r} is of type {dtype!r}; known are {', '.join(DTYPE_BITS)}")
    if not all(type(side) is int and 0 <= side < 2**60 for side in shape) or len(shape) > 32:
        raise BadFile(f"{name}: tensor {key!r} has shape {str(shape)[:60]}; whole numbers were expected")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or not 0 <= start <= end or (end - start) * 8 != bits:
        raise BadFile(
            f"{name}: tensor {key!r} of {str(shape)[:60]} {dtype} takes {bits / 8 if bits < 2**63 else 'too many'} "
            f"bytes, its data_offsets say {str(end - start)[:24]}"
        )
    return SafeTensor(dtype=dtype, shape=tuple(shape), bytes=bits // 8), end


def _shards(directory: Path, index: Path) -> dict[str, SafeTensor]:
    from kvist.spec.json_file import read_object

    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise BadFile(f"{index}: weight_map is missing; it must map each tensor to its file", key="weight_map")
    tensors: dict[str, SafeTensor] = {}
    for shard in sorted(set(placed.values())):
        if Path(shard).name != shard:
            raise BadFile(f"{index}: {shard!r} is not a plain file name", key="weight_map")
        if not (directory / shard).is_file():
            raise BadFile(f"{index}: names {shard}, which is not in {directory}; fetch it", key="weight_map")
        tensors |= read_file(directory / shard)
    absent = next((tensor for tensor in placed if tensor not in tensors), None)
    if absent is not None:
        raise BadFile(f"{index}: tensor {absent!r} is not in {placed[absent]}", key="weight_map")
    return tensors
