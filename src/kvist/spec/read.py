"""From what a user names to a :class:`ModelSpec`: a file, a directory or a known name.

In this order: a path to a ``config.json``, a model directory, a ``.gguf`` file, a known name.
"""

import errno
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvist.errors import BadFile, UnknownModel
from kvist.spec.families import Reading, read_config
from kvist.spec.files import not_regular
from kvist.spec.known import KNOWN, KnownModel, known_model
from kvist.spec.model import Assumption, ModelSpec


def read_model(model: str | Path, *, assume: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a model.

    Args:
        model: a path or a known name.
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
        return _known(known_model(text), assume)
    if stat.S_ISDIR(mode):
        return _directory(path, assume)
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
    return _spec(read_config(config, name=name), name=name, source=source)


def _config_file(path: Path, assume: Mapping[str, Any]) -> ModelSpec:
    from kvist.spec.json_file import read_object

    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    found = read_object(path)
    reading = _read(found, assume, name=str(path))
    return _spec(reading, name=name or "model", source=str(path), overridden=bool(assume))


def _directory(path: Path, assume: Mapping[str, Any]) -> ModelSpec:
    from kvist.spec.agreement import hold_safetensors
    from kvist.spec.json_file import read_object
    from kvist.spec.safetensors import read_weights

    config_path = path / "config.json"
    if not config_path.is_file():
        ggufs = sorted(gguf for gguf in path.glob("*.gguf") if gguf.is_file())
        if len(ggufs) == 1:
            return _gguf(ggufs[0], assume)
        several = f"several .gguf files ({', '.join(gguf.name for gguf in ggufs[:4])}): name one" if ggufs else ""
        raise BadFile(f"{path}: {several or 'holds neither config.json nor a .gguf file'}", key="model")
    config = read_object(config_path)
    reading = _read(config, assume, name=str(config_path))
    weights = read_weights(path)
    if weights is not None and not assume:
        hold_safetensors(reading.config, weights, file=str(config_path))
    # Packed codes are stored in wider integers, so that stored elements are not parameters.
    packed = config.get("quantization_config") is not None
    return _spec(
        reading,
        name=path.resolve().name or "model",
        source=str(config_path),
        parameters=None if weights is None or packed else weights.parameters,
        weights_by_type={} if weights is None else weights.weights_by_type,
        path=path,
        overridden=bool(assume),
    )


def _gguf(path: Path, assume: Mapping[str, Any]) -> ModelSpec:
    from kvist.spec.gguf import read_gguf
    from kvist.spec.gguf_config import config_of

    header = read_gguf(path)
    named = config_of(header)
    reading = _read(named.config, assume, name=str(path), assumed=named.assumed)
    return _spec(
        reading,
        name=_known_as(header.metadata.get("general.name"), reading) or path.stem,
        source=str(path),
        parameters=header.parameters,
        weights_by_type=header.weights_by_type,
        path=path,
        overridden=bool(assume),
    )


def _known(known: KnownModel, assume: Mapping[str, Any]) -> ModelSpec:
    return _spec(
        _read(known.config, assume, name=known.name, assumed=known.assumed),
        name=known.name,
        source=known.source,
        parameters=known.parameters,
        weights_by_type=known.weights_by_type,
        overridden=bool(assume),
    )


def _read(
    config: Mapping[str, Any], assume: Mapping[str, Any], *, name: str, assumed: tuple[Assumption, ...] = ()
) -> Reading:
    given = tuple(Assumption(key=key, value=value, source="--assume") for key, value in assume.items())
    reading = read_config(config, name=name, overrides=assume)
    filled_before = tuple(entry for entry in assumed if entry.key not in assume)
    return Reading(
        layers=reading.layers,
        max_context=reading.max_context,
        config=reading.config,
        assumed=given + filled_before + reading.assumed,
    )


def _spec(
    reading: Reading,
    *,
    name: str,
    source: str,
    parameters: int | None = None,
    weights_by_type: Mapping[str, int] | None = None,
    path: Path | None = None,
    overridden: bool = False,
) -> ModelSpec:
    by_type = weights_by_type or {}
    return ModelSpec(
        name=name,
        source=source,
        layers=reading.layers,
        max_context=reading.max_context,
        parameters=parameters,
        weights_bytes=sum(by_type.values()) if by_type else None,
        weights_by_type=by_type,
        config=reading.config,
        assumed=reading.assumed,
        path=path,
        exact=not overridden,
    )


def _known_as(gguf_name: object, reading: Reading) -> str | None:
    """The known name of a file, whatever it is called on disk: same ``general.name`` and same layers."""
    for known in KNOWN.values():
        if known.gguf_name == gguf_name and read_config(known.config, name=known.name).layers == reading.layers:
            return known.name
    return None


def _looks_like_path(text: str) -> bool:
    """Whether the user meant a file: ``org/name`` may be a model, ``./name`` and ``a/b/c`` cannot."""
    return bool(re.match(r"[./~]|.*[\\/].*[\\/]", text)) or text.endswith((".gguf", ".json"))
