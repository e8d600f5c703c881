"""What the words of a command line may be: each reader turns one into a value or says what would be right.

Ranges are those of :class:`kvist.engine.sampler.SamplingParams` and of the engine, so that a slip is told before
anything is loaded; a test holds them equal.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvist.errors import InputError

if TYPE_CHECKING:
    from kvist.cache.tier import Tier
    from kvist.spec.formats import CacheFormat
    from kvist.spec.pruning import Pruning

Reader = Callable[[str], Any]

# Parameters in Python whose options are called otherwise.
_OPTION_OF = {
    "block_tokens": "block", "settings": "set", "keep": "keep_layers", "layers": "layer_format",
    "layer_formats": "layer_format", "tier_directory": "tier_dir",
}  # fmt: skip
_NEGATIVE = re.compile(r"-\.?[0-9].*", re.DOTALL)


def _typed(read: Reader) -> Reader:
    """Turn the errors of a reader into argparse's, which names the option and goes on to be one line."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from error

    return convert


@_typed
def size(text: str) -> int:
    """A size in bytes."""
    from kvist.units import parse_size

    return parse_size(text)


@_typed
def codec(text: str) -> str:
    """The name of a codec."""
    from kvist.spec.formats import codec_named

    return codec_named(text).name


@_typed
def key_codec(text: str) -> str:
    """The name of a codec of keys."""
    from kvist.spec.formats import key_codec_named

    return key_codec_named(text).name


@_typed
def state_codec(text: str) -> str:
    """The name of a codec for recurrent states."""
    from kvist.spec.formats import state_codec_named

    return state_codec_named(text).name


@_typed
def kept_layers(text: str) -> tuple[int, str | None]:
    """Layers at either end, and their codec where it is said."""
    from kvist.spec.format_words import kept_layers as read

    return read(text)


@_typed
def layer_format(text: str) -> tuple[int, str]:
    """The index of a layer, and its codecs."""
    from kvist.spec.format_words import layer_format as read

    return read(text)


def format_said(args: argparse.Namespace) -> bool:
    """Whether any option of a command says how keys, values or states are stored."""
    return any((args.key, args.value, args.rotate, args.keep_layers, args.layer_format, args.state, args.tail))


def cache_format(args: argparse.Namespace, usual: str = "bf16") -> "CacheFormat":
    """The format that the options of a command ask for; codecs that are left out are ``usual``."""
    from kvist.spec.format_words import format_of

    return format_of(
        key=args.key or usual,
        value=args.value or usual,
        rotate=getattr(args, "rotate", False),
        keep_layers=args.keep_layers,
        layer_formats=getattr(args, "layer_format", None) or (),
        state=args.state,
        tail=getattr(args, "tail", 0),
    )


@_typed
def tier(text: str) -> "Tier":
    """Memory behind the cache, and how much of it."""
    from kvist.cache.tier import Tier

    return Tier.parse_real(text)


@_typed
def evict(text: str) -> str:
    """A method of pruning and its budget, or ``none``."""
    from kvist.spec.pruning import Pruning

    return str(Pruning.read(text) or "none")


@_typed
def pruning(text: str) -> "Pruning | None":
    """The same, read."""
    from kvist.spec.pruning import Pruning

    return Pruning.read(text)


@_typed
def compared_format(text: str) -> "CacheFormat":
    """``int8/int4``, ``int8/int4+rotate`` or ``int8/int4+rotate+tail=32``."""
    from kvist.spec.format_words import pair
    from kvist.spec.formats import CacheFormat

    codecs, *words = text.split("+")
    rotate, tail = False, 0
    for word in words:
        name, sign, number = word.partition("=")
        if word == "rotate":
            rotate = True
        elif name == "tail" and sign and number.isascii() and number.isdigit() and len(number) < 5:
            tail = int(number)
        else:
            raise InputError(
                f"format: {_short(word)} is not known; write int8/int4, int8/int4+rotate or int8/int4+rotate+tail=32",
                key="format",
            )
    key, value = pair(codecs)
    return CacheFormat(key=key, value=value, rotate=rotate, tail=tail)


@_typed
def cartridge_format(text: str) -> "CacheFormat":
    """``int8/int4``, or one codec for keys and values."""
    from kvist.spec.format_words import pair
    from kvist.spec.formats import CacheFormat

    key, value = pair(text, key="cartridge_format")
    return CacheFormat(key=key, value=value)


@_typed
def named_file(text: str) -> tuple[str, str]:
    """``NAME=FILE``."""
    name, sign, file = text.partition("=")
    if not name or not sign or not file:
        raise InputError(f"value: {_short(text)} is not NAME=FILE")
    return name, file


def by_name(named: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Files by their names.

    Raises:
        InputError: two have the same name.
    """
    found: dict[str, str] = {}
    for name, file in named:
        if name in found:
            raise InputError(f"cartridge: two are called {name!r}; give each its own name", key="cartridge")
        found[name] = file
    return found


@_typed
def weight_codec(text: str) -> str:
    """The name of a codec for weights."""
    from kvist.spec.parameters.storage import weight_codec_named

    return weight_codec_named(text).name


@_typed
def engine(text: str) -> str:
    """The name of an engine that plans account for."""
    from kvist.planning.engines import ENGINES

    if text not in ("kvist", *ENGINES):
        raise InputError(f"value: {text!r} is not accounted for; choose one of {', '.join(('kvist', *ENGINES))}")
    return text


@_typed
def stop_text(text: str) -> str:
    """A text that ends an answer."""
    if not text:
        raise InputError("value: an empty text cannot be found")
    return text


@_typed
def assumption(text: str) -> tuple[str, Any]:
    """``KEY=VALUE``, the value as JSON where it is JSON."""
    import json

    key, sign, value = text.partition("=")
    if not key or not sign:
        raise InputError(f"value: {text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        return key, value


def tokens(least: int = 1, most: int | None = None) -> Reader:
    """A token count within a range."""

    def read(text: str) -> int:
        from kvist.units import parse_tokens

        return _within(parse_tokens(text), text, least, most)

    return _typed(read)


def whole(least: int, most: int | None = None) -> Reader:
    """A whole number within a range."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII):
            raise InputError(f"value: {_short(text)} is not a whole number; {_range(least, most)}")
        # Far longer than any range; Python's own integers would refuse more in words of their own.
        value = int(text) if len(text) <= 40 else int(text[:40])
        return _within(value, text, least, most)

    return _typed(read)


def number(least: float, most: float, *, above: bool = False) -> Reader:
    """A number within a range; ``above`` leaves out its lower end."""

    def read(text: str) -> float:
        try:
            value = float(text.replace("_", "x"))
        except ValueError as error:
            raise InputError(f"value: {_short(text)} is not a number") from error
        if not (least < value if above else least <= value) or value > most:
            right = f"above {least:g}, at most {most:g}" if above else f"{least:g} to {most:g}"
            raise InputError(f"value: {_short(text)} is out of range; {right}")
        return value

    return _typed(read)


def _within(value: int, text: str, least: int, most: int | None) -> int:
    if value < least or (most is not None and value > most):
        raise InputError(f"value: {_short(text)} is out of range; {_range(least, most)}")
    return value


def _range(least: int, most: int | None) -> str:
    return f"{least} or more" if most is None else f"{least} to {most}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 40 else f"{shown[:36]}…"


def join_negatives(words: Sequence[str], options: Mapping[str, argparse.Action]) -> list[str]:
    """Write ``--option -1GiB`` as ``--option=-1GiB``, which argparse would take for an option without a value."""
    joined: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            return [*joined, *words[index:]]
        following = words[index + 1] if index + 1 < len(words) else ""
        action = options.get(word)
        if action is not None and action.nargs is None and _NEGATIVE.fullmatch(following):
            joined.append(f"{word}={following}")
            index += 1
        else:
            joined.append(word)
        index += 1
    return joined


def in_options(message: str, key: str | None, names: Mapping[str, str]) -> str:
    """Write a message about Python parameters in the options of a command.

    Args:
        message: ``key: what is wrong``, with other parameters in `backticks`.
        key: the parameter that the error is about.
        names: a command's options by parameter.
    """

    def option(name: str) -> str | None:
        return names.get(_OPTION_OF.get(name, name))

    found = option(key) if key else None
    if found and message.startswith(f"{key}: "):
        message = f"{found}{message[len(key or '') :]}"
    return re.sub(r"`([a-z_]+)`", lambda match: option(match[1]) or match[0], message)
