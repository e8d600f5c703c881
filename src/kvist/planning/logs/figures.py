"""What a log says and what is made of it, in the same shape for all engines."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

GIB = 2**30
MIB = 2**20
# Groups of regular expressions: a whole number, one with thousands separators, one with decimals. No log has longer.
WHOLE = "([0-9]{1,15})"
COUNT = "([0-9][0-9,]{0,20})"
NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A size of which a log prints two decimals: what it can have been, in bytes.

    Attributes:
        value: as printed.
        low: the least that is printed so.
        high: the most.
    """

    value: int
    low: int
    high: int

    @classmethod
    def of(cls, text: str, unit: int) -> "Rounded":
        """A printed number of ``unit`` bytes."""
        number, half = Fraction(text) * unit, Fraction(unit, 200)
        return cls(value=round(number), low=max(0, int(number - half)), high=int(number + half) + 1)

    @classmethod
    def exactly(cls, size: int) -> "Rounded":
        """A size that is known to the byte."""
        return cls(value=size, low=size, high=size)

    def difference(self, planned: int) -> int:
        """Bytes above what was planned; 0 where rounding allows it."""
        return 0 if self.low <= planned <= self.high else self.value - planned


@dataclass(frozen=True, kw_only=True)
class LogCheck:
    """A log held against the plan.

    Attributes:
        engine: whose log it is.
        found: what the log says.
        planned: the same figures as the account of that engine has them, under the settings in the log.
        agrees: whether each figure is what the account says, where rounding allows it.
        difference_bytes: of the cache, above what was planned; 0 where they agree.
        explained_by: of the known effects those that make the account say what the log says; where none does, those
            that the log hints at, each with ``may``.
    """

    engine: str
    found: Mapping[str, Any]
    planned: Mapping[str, Any]
    agrees: bool
    difference_bytes: int = 0
    explained_by: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As ``kvist check --json`` prints it."""
        return {
            "engine": self.engine,
            "found": dict(self.found),
            "planned": dict(self.planned),
            "agrees": self.agrees,
            "difference_bytes": self.difference_bytes,
            "explained_by": list(self.explained_by),
        }


def named_model(path: str) -> str:
    """The name in a path, a hub id or a file: its last part, of a directory in the hub's cache the model's."""
    if found := re.search(r"models--[^/\\]{1,96}--([^/\\]{1,96})", path):
        return found[1]
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].removesuffix(".gguf")


def other_model(said: str | None, name: str) -> Iterator[str]:
    """The hint that a log is of another model than the plan, where their names do not go together."""
    if said is None:
        return
    one, other = (re.sub(r"[^a-z0-9]", "", each.lower()) for each in (said, named_model(name)))
    if one and other and one not in other and other not in one:
        yield f"another model: the log is of {said}, the plan of {name}, which may be the difference"


def value_of(line: str, key: str) -> str | None:
    """The value of ``key=value``, ``key: value`` or ``'key': value`` in a line; None where it is left to the engine."""
    found = re.search(rf"(?<![A-Za-z0-9_]){key}['\"]?\s{{0,20}}[=:]\s{{0,4}}['\"]?([A-Za-z0-9_.+\-]{{1,80}})", line)
    value = found[1].rstrip(".") if found else ""
    # -1 is "as much as there is", or "not at all".
    return None if value in ("", "None", "auto", "-1") else value


def count_of(text: str) -> int:
    """A count with or without thousands separators."""
    return int(text.replace(",", ""))
