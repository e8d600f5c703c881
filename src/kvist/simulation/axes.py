"""What a sweep varies: the axes by the names of the command's options, their values read as the options are."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvist import cli_values as values
from kvist.cache.tier import Tier
from kvist.errors import InputError
from kvist.hardware import gpus_named
from kvist.simulation.policies import policy_named
from kvist.simulation.question import CHOICES
from kvist.spec.format_words import pair
from kvist.spec.model import ModelSpec

# From a value as it is written to fields of a `Question`.
Read = Callable[[str], dict[str, Any]]

# A tier's own comma is no end of a value.
_COMMA = re.compile(r",(?!write-)")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One of the things that a sweep varies.

    Attributes:
        name: of the command's option, such as ``max-len``; ``format`` is key and value together.
        values: as they were written.
        fields: of a :class:`Question`, for each of the values.
    """

    name: str
    values: tuple[str, ...]
    fields: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, name: str, given: str | Sequence[Any]) -> "Axis":
        """Read the values of an axis.

        Args:
            name: of an option; underscores are hyphens.
            given: values with commas between them, or a list of them.

        Raises:
            InputError: there is no such axis, or one of its values is wrong or there twice.
        """
        name = name.strip().replace("_", "-")
        read = AXES.get(name)
        if read is None:
            raise InputError(f"sweep: {name!r} cannot be swept; choose of {', '.join(AXES)}", key="sweep")
        words = [word.strip() for word in (_COMMA.split(given) if isinstance(given, str) else map(str, given))]
        if not words or not all(words):
            raise InputError(
                f"sweep: {name}={','.join(words)}: a value is empty; write {name}=VALUE,VALUE", key="sweep"
            )
        for word in words:
            if words.count(word) > 1:
                raise InputError(f"sweep: {name}: {word} is there twice; give each value once", key="sweep")
        return cls(name=name, values=tuple(words), fields=tuple(_read(name, word, read) for word in words))


def _read(name: str, word: str, read: Read) -> dict[str, Any]:
    try:
        return read(word)
    except argparse.ArgumentTypeError as error:
        reason = str(error)
    except InputError as error:
        # What is at fault is named already.
        reason = str(error).removeprefix(f"{error.key}: ")
    raise InputError(f"sweep: {name}={word}: {reason}", key="sweep")


def _field(field: str, read: Callable[[str], Any]) -> Read:
    return lambda word: {field: read(word)}


def _chosen(key: str) -> Read:
    def read(word: str) -> dict[str, Any]:
        if word not in CHOICES[key]:
            raise InputError(f"{word!r} is none; choose of {', '.join(CHOICES[key])}")
        return {key: word}

    return read


def _format(word: str) -> dict[str, Any]:
    """``int8/int4``, or one codec for keys and values."""
    key, value = pair(word)
    return {"key": key, "value": value}


def _kept(word: str) -> dict[str, Any]:
    count, codec = values.kept_layers(word)
    return {"keep_layers": count, "keep": codec}


def _tiers(word: str) -> dict[str, Any]:
    """Several with plus signs between them, the nearest first; or ``none``."""
    tiers = () if word == "none" else tuple(word.split("+"))
    for tier in tiers:
        Tier.parse(tier)
    return {"tiers": tiers}


def _policy(word: str) -> dict[str, Any]:
    return {"policies": (policy_named(word).name,)}


def _model(word: str) -> dict[str, Any]:
    ModelSpec.read(word)
    return {"model": word}


def _gpu(word: str) -> dict[str, Any]:
    gpus_named(word)
    return {"gpu": word}


# By the options of `kvist simulate`; a test holds their names and ranges equal.
AXES: dict[str, Read] = {
    "model": _model,
    "format": _format,
    "gpu": _gpu,
    "keep-layers": _kept,
    "state": _field("state", values.state_codec),
    "tail": _field("tail", values.whole(0, 1024)),
    "memory": _field("memory", values.size),
    "cache-memory": _field("cache_memory", values.size),
    "weights": _field("weights", values.weight_codec),
    "tp": _field("tp", values.whole(1, 1024)),
    "pp": _field("pp", values.whole(1, 1024)),
    "overhead": _field("overhead", values.size),
    "policy": _policy,
    "block": _field("block_tokens", values.tokens(most=2**20)),
    "max-len": _field("max_len", values.tokens()),
    "max-running": _field("max_running", values.whole(1, 10**6)),
    "chunk": _field("chunk", values.tokens()),
    "reclaim": _chosen("reclaim"),
    "tier": _tiers,
    "preempt": _chosen("preempt"),
    "replicas": _field("replicas", values.whole(1, 4096)),
    "route": _chosen("route"),
    "speed": _field("speed", values.number(0, 1e9, above=True)),
    "requests": _field("requests", values.whole(1)),
}
