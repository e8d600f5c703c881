"""Bytes of one more token, exact also where several tokens share a vector."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from fractions import Fraction

# Whole, or a fraction where one vector stands for several tokens.
Rate: TypeAlias = "int | Fraction"


def spread(size: int, over: int) -> Rate:
    """Bytes that so many tokens share, for one of them; exact."""
    if size % over == 0:
        return size // over
    # Loaded where it is needed: few models divide, and every start would pay for it.
    from fractions import Fraction

    return Fraction(size, over)


def total(rates: Iterable[Rate]) -> Rate:
    """The sum of rates, as an integer where it is one."""
    found = sum(rates)
    return found if isinstance(found, int) or found.denominator != 1 else found.numerator


def rate_in_json(rate: Rate) -> int | float:
    """A rate as JSON has it: an integer where it is whole."""
    return rate if isinstance(rate, int) else float(rate)
