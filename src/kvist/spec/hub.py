"""Models on a hub: the configuration and the headers of the weights, never the weights.

A name is ``organisation/name``, with ``@revision`` behind it for another than the main one and ``:part`` to choose a
GGUF file by a part of its name, such as ``organisation/name-GGUF:Q4_K_M``. The hub is the one that ``HF_ENDPOINT``
names; tokens, proxies and time limits are those of ``huggingface_hub``. Nothing is written to disk. Where the hub
cannot be asked, a configuration in ``huggingface_hub``'s cache is read instead.
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.errors import BadFile, InputError, UnknownModel
from kvist.spec.hub_files import HubFiles, Unreachable
from kvist.spec.json_file import MAX_CONFIG, MAX_INDEX, parse_object

if TYPE_CHECKING:
    from kvist.spec.gguf import GGUFHeader
    from kvist.spec.model import ModelSpec
    from kvist.spec.safetensors import SafeTensor, SafetensorsWeights

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[\w./-]{1,96}))?(?::(?P<part>[\w.-]{1,96}))?",
    re.ASCII,
)
_CONFIG = "config.json"
_WORKERS = 8
# A vocabulary of 262,144 tokens lies in the first 16 MiB; the rest is a list of tensors.
_FIRST_PIECE = 2**19
_MAX_GGUF_HEADER = 2**26


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A model on a hub.

    Attributes:
        repo: ``organisation/name``.
        revision: branch, tag or commit; None for the main one.
        part: what the name of the GGUF file must contain; None where that does not matter.
    """

    repo: str
    revision: str | None
    part: str | None


def hub_name(text: str) -> HubName | None:
    """Return what a name means on a hub; None where it cannot be one."""
    match = _NAME.fullmatch(text)
    return HubName(repo=match["repo"], revision=match["revision"], part=match["part"]) if match else None


def read_hub(name: HubName, assume: Mapping[str, Any], *, unknown: UnknownModel) -> "ModelSpec":
    """Read a model from the hub.

    Args:
        name: what to read.
        assume: as in :func:`kvist.spec.read.read_model`.
        unknown: why the name means nothing here, for the message where the hub cannot be asked.

    Raises:
        UnknownModel: there is no such model, or the hub cannot be asked.
        InputError: the model is gated, and this user has no access.
        UnsupportedModel, BadFile: as :func:`kvist.spec.read.read_model`.
    """
    try:
        files = HubFiles.open(name.repo, name.revision)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "huggingface_hub":
            raise
        raise UnknownModel(
            f"{unknown}; huggingface_hub is not installed to ask a hub: pip install 'kvist[hub]'", key="model"
        ) from error
    except Unreachable as error:
        cached = _cached(name, assume)
        if cached is not None:
            return cached
        raise UnknownModel(f"{unknown}; {error}", key="model") from error
    try:
        return _read(name, files, assume)
    except Unreachable as error:
        raise UnknownModel(f"{name.repo}: {error}", key="model") from error


def _cached(name: HubName, assume: Mapping[str, Any]) -> "ModelSpec | None":
    """The model from the cache that other programs have filled, as far as it is there."""
    from huggingface_hub import try_to_load_from_cache

    from kvist.spec.read import read_directory

    path = try_to_load_from_cache(name.repo, _CONFIG, revision=name.revision)
    return read_directory(Path(path).parent, assume, whole=False) if isinstance(path, str) else None


def _read(name: HubName, files: HubFiles, assume: Mapping[str, Any]) -> "ModelSpec":
    from kvist.spec.described import describe_config, describe_gguf

    model = name.repo.rpartition("/")[2]
    if _CONFIG not in files.sizes or name.part is not None:
        ggufs = _gguf_parts(name, files)
        header = _gguf_header(ggufs, files)
        source = f"hub: {files.at(ggufs[0])}"
        return describe_gguf(header, name=model, source=source, assume=assume)
    file = files.at(_CONFIG)
    config = parse_object(files.whole(_CONFIG, most=MAX_CONFIG), name=file, most=MAX_CONFIG)
    return describe_config(
        config, name=model, file=file, source=f"hub: {file}", assume=assume, weights=_safetensors(files)
    )


def _safetensors(files: HubFiles) -> "SafetensorsWeights | None":
    from kvist.spec.safetensors import INDEX, SafetensorsWeights, joined, placement, weight_files

    if INDEX not in files.sizes:
        names = {name for name in files.sizes if "/" not in name and name.endswith(".safetensors")}
        headers = _headers(weight_files(names, name=files.at("")), files)
        tensors = {name: tensor for found in headers.values() for name, tensor in found.items()}
        return SafetensorsWeights(tensors=tensors) if headers else None
    index = files.at(INDEX)
    placed = placement(parse_object(files.whole(INDEX, most=MAX_INDEX), name=index, most=MAX_INDEX), name=index)
    shards = sorted(set(placed.values()))
    absent = next((shard for shard in shards if shard not in files.sizes), None)
    if absent is not None:
        raise BadFile(f"{index}: names {absent}, which the hub does not have", key="weight_map")
    return SafetensorsWeights(tensors=joined(placed, _headers(shards, files), name=index))


def _headers(names: list[str], files: HubFiles) -> "dict[str, dict[str, SafeTensor]]":
    """Read each file's length and then exactly its header, several files at a time."""
    from kvist.spec.safetensors import header_length, read_header

    def read(name: str) -> "dict[str, SafeTensor]":
        prefix = files.range(name, 0, 8)
        size = files.size(name)
        length = header_length(prefix, size, name=files.at(name))
        return read_header(prefix + files.range(name, 8, 8 + length), name=files.at(name), size=size)

    with ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="kvist-hub") as workers:
        try:
            return dict(zip(names, workers.map(read, names), strict=True))
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def _gguf_parts(name: HubName, files: HubFiles) -> list[str]:
    """The files of the one GGUF model that is meant, first to last."""
    from kvist.spec.gguf.files import part_names, whole_models

    wanted = (name.part or "").lower()
    found = [path for path in whole_models(set(files.sizes)) if wanted in path.lower()]
    if not found:
        what = f"no GGUF file with {name.part!r} in its name" if name.part else "neither config.json nor a GGUF file"
        raise BadFile(f"{files.at('')}: holds {what}", key="model")
    if len(found) > 1:
        raise InputError(
            f"{files.at('')}: holds several GGUF files ({', '.join(found[:6])}{', …' if len(found) > 6 else ''}); "
            f"name one by a part of its name, such as {name.repo}:Q4_K_M",
            key="model",
        )
    match = re.search(r"-of-([0-9]{5})\.gguf", found[0])
    return part_names(found[0], int(match[1]), of=files.at(found[0])) if match else found


def _gguf_header(names: list[str], files: HubFiles) -> "GGUFHeader":
    from kvist.spec.gguf.files import joined_parts, part_count

    headers = [_one_gguf_header(name, files) for name in names]
    if len(headers) == 1 and part_count(headers[0]) > 1:
        raise BadFile(f"{headers[0].name}: is a part of several, of which the hub has one", key="split.count")
    return headers[0] if len(headers) == 1 else joined_parts(headers)


def _one_gguf_header(name: str, files: HubFiles) -> "GGUFHeader":
    """Fetch a file's beginning in growing pieces until the header is whole: its length is not written anywhere."""
    from kvist.spec.gguf.files import read_gguf
    from kvist.spec.gguf.walk import Cut

    if name not in files.sizes:
        raise BadFile(f"{files.at(name)}: the hub does not have this part", key="model")
    data = b""
    while True:
        piece = files.range(name, len(data), max(_FIRST_PIECE, 2 * len(data)))
        data += piece
        try:
            return read_gguf(data, name=files.at(name), size=files.size(name))
        except Cut:
            if not piece or len(data) >= _MAX_GGUF_HEADER:
                raise
