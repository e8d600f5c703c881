"""A description from whatever source becomes a :class:`ModelSpec`: read, held against its tensors, and counted."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.spec.families import Reading, read_config
from kvist.spec.model import Assumption, ModelSpec

if TYPE_CHECKING:
    from kvist.spec.gguf import GGUFHeader
    from kvist.spec.safetensors import SafetensorsWeights

# The source of a value that the user gave.
OVERRIDE = "--assume"


def describe_config(
    config: Mapping[str, Any],
    *,
    name: str,
    file: str,
    source: str,
    assume: Mapping[str, Any],
    weights: "SafetensorsWeights | None" = None,
    path: Path | None = None,
) -> ModelSpec:
    """Describe a model by its ``config.json``.

    Args:
        config: its content.
        name: how the model is called.
        file: what messages call the configuration.
        source: where it was read from.
        assume: values in place of published keys.
        weights: the tensors beside it, where there are any.
        path: the directory on disk.

    Raises:
        UnsupportedModel, BadFile, InputError: as :func:`kvist.spec.read.read_model`.
    """
    reading = checked(config, assume, file=file)
    if weights is None:
        return described(reading, name=name, source=source, path=path, exact=not assume)
    from kvist.spec.agreement import hold_safetensors
    from kvist.spec.packed import count_parameters

    if not assume:
        hold_safetensors(reading.layers, reading.config, weights.tensors, file=file)
    return described(
        reading,
        name=name,
        source=source,
        parameters=count_parameters(weights.tensors, quantization_of(config)),
        weights_by_type=weights.weights_by_type,
        path=path,
        exact=not assume,
    )


def describe_gguf(
    header: "GGUFHeader", *, name: str, source: str, assume: Mapping[str, Any], path: Path | None = None
) -> ModelSpec:
    """Describe a model by its GGUF header; arguments and errors as :func:`describe_config`."""
    from kvist.spec.gguf.config import read_header_config

    reading = read_header_config(header, assume)
    return described(
        reading,
        name=_known_as(header.metadata.get("general.name"), reading) or name,
        source=source,
        parameters=header.parameters,
        weights_by_type=header.weights_by_type,
        path=path,
        exact=not assume,
    )


def checked(
    config: Mapping[str, Any], assume: Mapping[str, Any], *, file: str, assumed: tuple[Assumption, ...] = ()
) -> Reading:
    """Read a configuration; what ``assume`` gives, and what was ``assumed`` before, is listed first."""
    given = tuple(Assumption(key=key, value=value, source=OVERRIDE) for key, value in assume.items())
    reading = read_config(config, name=file, overrides=assume)
    filled_before = tuple(entry for entry in assumed if entry.key not in assume)
    return Reading(
        layers=reading.layers,
        max_context=reading.max_context,
        config=reading.config,
        assumed=given + filled_before + reading.assumed,
        draft_layers=reading.draft_layers,
    )


def described(
    reading: Reading,
    *,
    name: str,
    source: str,
    parameters: int | None = None,
    weights_by_type: Mapping[str, int] | None = None,
    path: Path | None = None,
    exact: bool = True,
) -> ModelSpec:
    """Return what was read, with the weights that were counted."""
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
        exact=exact,
        draft_layers=reading.draft_layers,
    )


def quantization_of(config: Mapping[str, Any]) -> object:
    """Return the ``quantization_config`` of a model, or of the text model inside a multimodal one."""
    found = config.get("quantization_config")
    inner = config.get("text_config")
    return inner.get("quantization_config") if found is None and isinstance(inner, Mapping) else found


def _known_as(gguf_name: object, reading: Reading) -> str | None:
    """The known name of a file, whatever it is called on disk: same ``general.name`` and same layers."""
    from kvist.spec.known import KNOWN

    for known in KNOWN.values():
        if known.gguf_name == gguf_name and read_config(known.config, name=known.name).layers == reading.layers:
            return known.name
    return None
