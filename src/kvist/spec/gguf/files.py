"""From a path to a GGUF header: one file, the parts of a model in several, or the first bytes of one."""

import mmap
import re
from dataclasses import replace
from pathlib import Path

from kvist.errors import BadFile
from kvist.spec.files import open_regular
from kvist.spec.gguf.header import GGUFHeader, GGUFTensor
from kvist.spec.gguf.walk import walk
from kvist.spec.json_file import shown

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<parts>[0-9]{5})\.gguf", re.DOTALL)
_MAX_PARTS = 2**10


def read_gguf(source: Path | bytes, *, name: str | None = None, size: int | None = None) -> GGUFHeader:
    """Read the header of one GGUF file, or of the first bytes of one.

    Args:
        source: the file, or bytes that begin with a whole header. A file must also hold all of its tensors.
        name: what messages call it; a file's path by default.
        size: of the whole file that the bytes are the beginning of, where it is known.

    Raises:
        Cut: the bytes end before the header does.
        BadFile: it cannot be opened, is of another kind, or is torn; says at which byte.
    """
    if isinstance(source, bytes):
        return walk(source, name=name or "GGUF header", source=source, size=size)
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
                return walk(mapped, name=name, source=source, size=len(mapped))
    except OSError as error:
        raise BadFile(f"{name}: cannot be read: {error.strerror or error}") from error


def read_all_parts(path: Path) -> GGUFHeader:
    """Read the header of a model, of which ``path`` is the file or any of its several.

    Returns:
        The metadata of the first part and the tensors of all; their offsets are into their own parts.

    Raises:
        BadFile: as :func:`read_gguf`; or a part is missing, or is none of this model.
    """
    header = read_gguf(path)
    count = part_count(header)
    if count == 1:
        return header
    names = part_names(path.name, count, of=str(path))
    absent = next((name for name in names if not (path.parent / name).is_file()), None)
    if absent is not None:
        raise BadFile(f"{path}: is one of {count} parts, and {absent} is not beside it; fetch it", key="split.count")
    return joined_parts([read_gguf(path.parent / name) for name in names])


def part_count(header: GGUFHeader) -> int:
    """Return of how many files this one is a part; 1 where it is whole.

    Raises:
        BadFile: the number cannot be.
    """
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MAX_PARTS:
        raise BadFile(
            f"{header.name}: split.count is {shown(count)}; a number of parts was expected", key="split.count"
        )
    return max(count, 1)


def part_names(name: str, count: int, *, of: str) -> list[str]:
    """Return the names of all parts, given that of one.

    Raises:
        BadFile: the name is not that of a part.
    """
    match = _PART.fullmatch(name)
    if not match or int(match["parts"]) != count:
        raise BadFile(
            f"{of}: split.count is {count}, but the name does not say which part; it must end in "
            f"-00001-of-{count:05}.gguf",
            key="split.count",
        )
    return [f"{match['stem']}-{number:05}-of-{match['parts']}.gguf" for number in range(1, count + 1)]


def joined_parts(parts: list[GGUFHeader]) -> GGUFHeader:
    """Return one header for all parts, given first to last.

    Raises:
        BadFile: they are not the parts of one model.
    """
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if found != (number, len(parts)):
            raise BadFile(
                f"{part.name}: split.no and split.count are {shown(found[0])} and {shown(found[1])}; "
                f"{number} and {len(parts)} were expected",
                key="split.no",
            )
        twice = next((tensor.name for tensor in part.tensors if tensor.name in tensors), None)
        if twice is not None:
            raise BadFile(f"{part.name}: tensor {shown(twice, 80)} is in an earlier part already")
        tensors |= part.tensor_by_name
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise BadFile(
            f"{parts[0].name}: split.tensors.count is {shown(expected)}, but the parts hold {len(tensors)} tensors",
            key="split.tensors.count",
        )
    return replace(parts[0], tensors=tuple(tensors.values()))


def whole_models(names: set[str]) -> list[str]:
    """Of the GGUF files of a directory, one name a model: the first part of several; no projectors of images."""
    first: dict[str, str] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and "mmproj" not in name.rpartition("/")[2].lower():
            match = _PART.fullmatch(name)
            first.setdefault(f"{match['stem']}-of-{match['parts']}" if match else name, name)
    return sorted(first.values())
