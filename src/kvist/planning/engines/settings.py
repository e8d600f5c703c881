"""``--set KEY=VALUE``: an engine's own settings, by the engine's own names; an unknown one is refused with the list."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvist.errors import InputError
from kvist.units import parse_size, parse_tokens

Reader = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of an engine: how its value is read, and what it does, in a line."""

    read: Reader
    help: str


def read_settings(engine: str, known: Mapping[str, Setting], given: Mapping[str, Any]) -> dict[str, Any]:
    """Read what was given for an engine.

    Args:
        engine: its name, for errors.
        known: its settings by name.
        given: values as texts of a command line, or of the right type already. Names may have hyphens.

    Raises:
        InputError: a name is unknown, or a value is not what the setting takes.
    """
    answer: dict[str, Any] = {}
    for name, value in given.items():
        key = name.removeprefix("--").replace("-", "_")
        if key not in known:
            raise InputError(
                f"set: {name}={value} is no setting of {engine} that is accounted for; known are {', '.join(known)}",
                key="set",
            )
        try:
            answer[key] = known[key].read(_text(value))
        except InputError as error:
            raise InputError(f"set: {name}={value}: {str(error).removeprefix('value: ')}", key="set") from error
    return answer


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def whole(least: int = 0, most: int = 2**40) -> Reader:
    """Read a whole number; ``8k`` and ``1M`` are token counts."""

    def read(text: str) -> int:
        count = parse_tokens(text, key="value")
        if not least <= count <= most:
            raise InputError(f"value: {text} is out of range; {least} to {most}")
        return count

    return read


def multiple(step: int, most: int) -> Reader:
    """Read a whole number of steps, at least one."""

    def read(text: str) -> int:
        count: int = whole(step, most)(text)
        if count % step:
            raise InputError(f"value: {text} is no multiple of {step}; {count + -count % step} is")
        return count

    return read


def fraction(least: float, most: float) -> Reader:
    """Read a number above ``least`` and up to ``most``."""

    def read(text: str) -> float:
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", text):
            raise InputError(f"value: {text} is not a number; above {least:g}, at most {most:g}")
        value = float(text)
        if not least < value <= most:
            raise InputError(f"value: {text} is out of range; above {least:g}, at most {most:g}")
        return value

    return read


def size(text: str) -> int:
    """Read a size in bytes."""
    return parse_size(text, key="value")


def switch(text: str) -> bool:
    """Read a yes or a no."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise InputError(f"value: {text} is neither true nor false")
    return words[text.lower()]


def one_of(*choices: str) -> Reader:
    """Read one of these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise InputError(f"value: {text} is not one of {', '.join(choices)}")
        return text

    return read
