"""From what a user names to a :class:`ModelSpec`: a file, a directory, a name of the gallery or a hub id.

In this order: a path to a ``config.json``, a model directory, a ``.gguf`` file, a name, ``organisation/name`` on a hub.
"""

import errno
import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.errors import BadFile, UnknownModel
from kvist.spec.described import checked, describe_config, described
from kvist.spec.families import read_config
from kvist.spec.files import not_regular
from kvist.spec.known import KnownModel, find_known
from kvist.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvist.spec.gallery import GalleryModel

_CONFIG = "config.json"


def read_model(model: str | Path, *, assume: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a model.

    Args:
        model: a path, a known name or a hub id.
        assume: values that replace or complete the published keys, by Hugging Face's names; the answer is then
            no longer exact, and lists them.

    Raises:
        UnknownModel: nothing of that name; lists the nearest known ones.
        UnsupportedModel: it cannot be read exactly; names the key that stopped it.
        BadFile: a file is torn or of another kind, or a value in it is out of range.
    """
    text = str(model)
    if not text or "\0" in text:
        raise UnknownModel(
            f"{text!r} is not a model; name a config.json, a model directory, a .gguf file or a known model"
        )
    assume = assume or {}
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UnknownModel(f"{_short(text)}: no such home directory", key="model") from error
    mode = _mode(path, text)
    if mode is None:
        if _looks_like_path(text):
            raise UnknownModel(f"{text}: no such file or directory", key="model")
        return _named(text, assume)
    if stat.S_ISDIR(mode):
        return read_directory(path, assume)
    if not stat.S_ISREG(mode):
        raise not_regular(text, mode)
    return _gguf(path, assume) if path.suffix == ".gguf" else _config_file(path, assume)


def _mode(path: Path, text: str) -> int | None:
    """What is at ``path``; None where nothing is.

    Raises:
        UnknownModel: it cannot be looked at, or is a link that leads nowhere.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise UnknownModel(f"{text}: is a symbolic link to nothing", key="model") from error
        return None
    except (OSError, ValueError) as error:
        reasons = {
            errno.ELOOP: "its symbolic links lead in a circle",
            errno.ENAMETOOLONG: f"{len(text):,} characters are too long for a path, and no known model is called so",
        }
        number = error.errno if isinstance(error, OSError) else None
        reason = reasons.get(number or 0) or (error.strerror if isinstance(error, OSError) else str(error))
        raise UnknownModel(f"{_short(text)}: {reason}", key="model") from error


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}…"


def read_description(config: Mapping[str, Any], *, name: str, source: str = "config") -> ModelSpec:
    """Read a configuration that is already in memory, under Hugging Face's names.

    Raises:
        UnsupportedModel, BadFile: as :func:`read_model`.
    """
    return described(read_config(config, name=name), name=name, source=source)


def read_directory(path: Path, assume: Mapping[str, Any], *, whole: bool = True) -> ModelSpec:
    """Read a directory with a ``config.json`` or a GGUF file; ``whole``: an index may name no file that is absent."""
    from kvist.spec.gguf.files import whole_models
    from kvist.spec.json_file import read_object
    from kvist.spec.safetensors import read_weights

    try:
        names = {entry.name for entry in path.iterdir() if entry.is_file()}
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}", key="model") from error
    if _CONFIG not in names:
        ggufs = whole_models(names)
        if len(ggufs) == 1:
            return _gguf(path / ggufs[0], assume)
        several = f"several .gguf files ({', '.join(ggufs[:4])}): name one" if ggufs else ""
        raise BadFile(f"{path}: {several or 'holds neither config.json nor a .gguf file'}", key="model")
    return describe_config(
        read_object(path / _CONFIG),
        name=_directory_name(path),
        file=str(path / _CONFIG),
        source=str(path / _CONFIG),
        assume=assume,
        weights=read_weights(path, whole=whole),
        path=path,
    )


def _directory_name(path: Path) -> str:
    """The name of a directory; of one in the hub's cache, that of the model instead of a commit."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2] or "model"
    return path.name or "model"


def _config_file(path: Path, assume: Mapping[str, Any]) -> ModelSpec:
    from kvist.spec.json_file import read_object

    name = _directory_name(path.parent) if path.name == _CONFIG else path.stem
    return describe_config(read_object(path), name=name or "model", file=str(path), source=str(path), assume=assume)


def _gguf(path: Path, assume: Mapping[str, Any]) -> ModelSpec:
    from kvist.spec.described import describe_gguf
    from kvist.spec.gguf.files import read_all_parts

    return describe_gguf(read_all_parts(path), name=path.stem, source=str(path), assume=assume, path=path)


def _named(text: str, assume: Mapping[str, Any]) -> ModelSpec:
    known = find_known(text)
    if known is not None:
        return _known(known, assume)
    from kvist.spec.gallery import gallery_model

    listed = gallery_model(text)
    if listed is not None:
        return read_gallery(listed, assume)
    from kvist.spec.gallery.nearest import unknown_model
    from kvist.spec.hub import hub_name, read_hub

    unknown = unknown_model(text)
    name = hub_name(text)
    if name is None:
        raise unknown
    return read_hub(name, assume, unknown=unknown)


def _known(known: KnownModel, assume: Mapping[str, Any]) -> ModelSpec:
    return described(
        checked(known.config, assume, file=known.name, assumed=known.assumed),
        name=known.name,
        source=known.source,
        parameters=known.parameters,
        weights_by_type=known.weights_by_type,
        exact=not assume,
    )


def read_gallery(model: "GalleryModel", assume: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a model of the gallery; ``assume`` and errors as :func:`read_model`.

    What it weighs is left out where keys are overridden, as they may change it.
    """
    from kvist.spec.gallery import IMMATERIAL

    reading = checked(model.config, assume or {}, file=model.name)
    material = tuple(entry for entry in reading.assumed if entry.key not in IMMATERIAL)
    spec = described(
        replace(reading, assumed=material),
        name=model.name,
        source=f"gallery: {model.source}",
        parameters=None if assume else model.parameters,
        exact=not assume,
    )
    return spec if assume else replace(spec, weights_bytes=model.weights_bytes)


def _looks_like_path(text: str) -> bool:
    """Whether the user meant a file: ``org/name`` may be a model, ``./name`` and ``a/b/c`` cannot."""
    return bool(re.match(r"[./~]|.*[\\/].*[\\/]", text)) or text.endswith((".gguf", ".json"))
