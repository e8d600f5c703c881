"""Sizes and token counts: parse and print, nothing else.

Sizes are ``512MiB``, ``40GiB`` (binary), ``80GB`` (decimal) or plain bytes; token counts are ``8k`` (8192),
``128k``, ``1M`` (1048576) or plain numbers.
"""

import re

from kvist.errors import InputError

_SIZE_UNITS = {
    "": 1, "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_NUMBER_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str | int, *, key: str = "size") -> int:
    """Read a size in bytes from ``512MiB``, ``80GB`` or a plain number.

    Raises:
        InputError: not a size, negative, or not a whole number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise InputError(f"{key}: {text} is negative; a size is 0 or more bytes", key=key)
        return text
    match = _NUMBER_UNIT.fullmatch(str(text).strip())
    if not match or match[2].upper() not in _SIZE_UNITS:
        raise InputError(f"{key}: {text!r} is not a size; write 512MiB, 40GiB, 80GB or plain bytes", key=key)
    exact = _scaled(match[1], _SIZE_UNITS[match[2].upper()])
    if exact is None:
        raise InputError(f"{key}: {text!r} is not a whole number of bytes", key=key)
    return exact


def parse_tokens(text: str | int, *, key: str = "tokens") -> int:
    """Read a token count from ``8k`` (8192), ``1M`` (1048576) or a plain number.

    Raises:
        InputError: not a count, or not a whole number.
    """
    units = {"": 1, "K": 2**10, "M": 2**20}
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise InputError(f"{key}: {text} is negative; a token count is 0 or more", key=key)
        return text
    match = _NUMBER_UNIT.fullmatch(str(text).strip())
    if not match or match[2].upper() not in units:
        raise InputError(f"{key}: {text!r} is not a token count; write 8k, 128k, 1M or a plain number", key=key)
    exact = _scaled(match[1], units[match[2].upper()])
    if exact is None:
        raise InputError(f"{key}: {text!r} is not a whole number of tokens", key=key)
    return exact


def _scaled(number: str, unit: int) -> int | None:
    """``number x unit`` in integers, so that 0.1 GiB never meets a float; None when it is not whole."""
    whole, _, fraction = number.partition(".")
    numerator = int(whole + fraction) * unit
    quotient, remainder = divmod(numerator, 10 ** len(fraction))
    return quotient if remainder == 0 else None


def format_size(count: int) -> str:
    """Print bytes with the binary unit that leaves one to four digits before the point: ``22.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
