"""Sizes and token counts: parse and print, nothing else.

Sizes are ``512MiB``, ``40GiB`` (binary), ``80GB`` (decimal) or plain bytes; token counts are ``8k`` (8192),
``128k``, ``1M`` (1048576) or plain numbers.
"""

import re

from kvist.errors import InputError

# Far beyond any machine and any model: what is larger is a slip of the keyboard.
MAX_BYTES = 2**60
MAX_TOKENS = 2**40

_SIZE_UNITS = {
    "": 1, "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
}  # fmt: skip
_TOKEN_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_NUMBER_UNIT = re.compile(r"(-?)([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
# Longer numbers are above every limit; Python's own integers would refuse them in words of their own.
_MAX_DIGITS = 60


def parse_size(text: str | int, *, key: str = "size") -> int:
    """Read a size in bytes from ``512MiB``, ``80GB`` or a plain number.

    Raises:
        InputError: not a size, negative, above 1024 PiB, or not a whole number of bytes.
    """
    return _parse(
        text, _SIZE_UNITS, key=key, most=MAX_BYTES, shown_most="1024 PiB", a="a size", many="bytes",
        write="512MiB, 40GiB, 80GB or plain bytes",
    )  # fmt: skip


def parse_tokens(text: str | int, *, key: str = "tokens") -> int:
    """Read a token count from ``8k`` (8192), ``1M`` (1048576) or a plain number.

    Raises:
        InputError: not a count, negative, above 2**40, or not a whole number.
    """
    return _parse(
        text, _TOKEN_UNITS, key=key, most=MAX_TOKENS, shown_most=f"{MAX_TOKENS:,}", a="a token count", many="tokens",
        write="8k, 128k, 1M or a plain number",
    )  # fmt: skip


def require_tokens(tokens: object, *, key: str = "tokens") -> int:
    """Return ``tokens``, a number of 0 or more.

    Raises:
        InputError: it is no whole number, negative, or above 2**40.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise InputError(f"{key}: {_short(tokens)} is not a token count; give a whole number", key=key)
    return parse_tokens(tokens, key=key)


def _parse(
    text: str | int, units: dict[str, int], *, key: str, most: int, shown_most: str, a: str, many: str, write: str
) -> int:
    exact: int | None
    if isinstance(text, int) and not isinstance(text, bool):
        negative, exact = text < 0, text
    else:
        match = _NUMBER_UNIT.fullmatch(str(text).strip())
        if not match or match[3].upper() not in units:
            raise InputError(f"{key}: {_short(text)} is not {a}; write {write}", key=key)
        negative = bool(match[1])
        exact = _scaled(match[2], units[match[3].upper()], most)
    if negative:
        raise InputError(f"{key}: {_short(text)} is negative; {a} is 0 or more {many}", key=key)
    if exact is None:
        raise InputError(f"{key}: {_short(text)} is not a whole number of {many}", key=key)
    if exact > most:
        raise InputError(f"{key}: {_short(text)} is too large; {a} is at most {shown_most}", key=key)
    return exact


def _scaled(number: str, unit: int, most: int) -> int | None:
    """``number x unit`` in integers, so that 0.1 GiB never meets a float; None when it is not whole."""
    whole, _, fraction = number.partition(".")
    fraction = fraction.rstrip("0")
    if len(whole.lstrip("0")) > _MAX_DIGITS:
        return most + 1
    if len(fraction) > _MAX_DIGITS:
        return None
    numerator = int(whole.lstrip("0") + fraction or "0") * unit
    quotient, remainder = divmod(numerator, 10 ** len(fraction))
    return quotient if remainder == 0 else None


def _short(value: object) -> str:
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return "a number of more than 40 digits"
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:36]}…"


def counted(count: int, noun: str) -> str:
    """Print how many of something there are: ``1 user``, ``2,000 users``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_size(count: float) -> str:
    """Print bytes with the binary unit that leaves one to four digits before the point: ``22.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} PiB"
