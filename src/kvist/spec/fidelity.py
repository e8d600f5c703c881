"""What storing keys and values in a format does to a model's answers, as it was measured.

Measured against the same model with its cache in the type of computation, over a text that it continues token by
token: the divergence of its next-token distributions, and what follows from it. ``fidelity.json`` beside this file has
the numbers.
"""

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from kvist.errors import BadFile, InputError
from kvist.spec.formats import CacheFormat

_FILE = Path(__file__).with_name("fidelity.json")
# What JSON may have for each type: whole numbers are numbers too.
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """One format of one model.

    Attributes:
        model: its name.
        key, value, rotate, tail: the format, as in :class:`~kvist.spec.formats.CacheFormat`.
        kl: Kullback-Leibler divergence of the distributions from those with an unquantised cache, mean over the
            tokens, in nats.
        top1_agreement: share of the tokens at which both find the same likeliest.
        perplexity_ratio: perplexity on the text, by that with an unquantised cache.
        tokens: that were scored.
    """

    model: str
    key: str
    value: str
    rotate: bool
    kl: float
    top1_agreement: float
    perplexity_ratio: float
    tokens: int
    tail: int = 0

    @property
    def format(self) -> CacheFormat:
        """The format."""
        return CacheFormat(key=self.key, value=self.value, rotate=self.rotate, tail=self.tail)


@cache
def measured() -> tuple[Fidelity, ...]:
    """All that was measured, in the order of the file."""
    return read_measured(_FILE)


def read_measured(path: Path) -> tuple[Fidelity, ...]:
    """Read a file of measured fidelity: a list of objects with the fields of :class:`Fidelity`.

    Raises:
        BadFile: it is something else; names what.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from error
    if not isinstance(content, list):
        raise BadFile(f"{path}: a list is expected")
    return tuple(_entry(path, number, each) for number, each in enumerate(content))


def _entry(path: Path, number: int, content: Any) -> Fidelity:
    if not isinstance(content, dict):
        raise BadFile(f"{path}: entry {number}: an object is expected")
    types = {field.name: field.type for field in fields(Fidelity)}
    for name in content.keys() ^ types.keys():
        if name == "tail":
            continue
        what = "is no field" if name in content else "is missing"
        raise BadFile(f"{path}: entry {number}: {name} {what}; the fields are {', '.join(types)}")
    for name, kind in types.items():
        if name not in content:
            continue
        expected = _TYPES[kind if isinstance(kind, str) else kind.__name__]
        if not isinstance(content[name], expected) or (isinstance(content[name], bool) and bool not in expected):
            raise BadFile(f"{path}: entry {number}: {name}: {content[name]!r} is of another type")
    found = Fidelity(**content)
    try:
        _ = found.format
    except InputError as error:
        raise BadFile(f"{path}: entry {number}: {error}") from error
    return found
