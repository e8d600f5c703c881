"""A place for blocks beyond the device, as users describe it."""

import math
import re
from dataclasses import dataclass
from typing import Literal, cast

from kvist.errors import InputError
from kvist.units import parse_size

Write = Literal["write-back", "write-through"]
_WRITTEN = re.compile(r"([\w-]+)=([^@,]+)(?:@([^@,/]+)/s)?(?:,([\w-]+))?")
_WRITES: tuple[Write, ...] = ("write-back", "write-through")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place for blocks beyond the device.

    Attributes:
        name: ``host``, ``disk``, ``remote`` …
        capacity_bytes: that it holds.
        bandwidth: bytes per second between it and the device, each way, where time is simulated.
        write: ``write-back``: it is given what is evicted before it; ``write-through``: it is given every block of a
            prefix as soon as the device has computed it.

    Raises:
        InputError: a size or rate is no positive number, the size no whole one, or ``write`` is neither.
    """

    name: str
    capacity_bytes: int
    bandwidth: float = math.inf
    write: Write = "write-back"

    def __post_init__(self) -> None:
        for key in ("capacity_bytes", "bandwidth"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InputError(f"tier {self.name}: {key} is {value!r}; above 0", key="tier")
        if not isinstance(self.capacity_bytes, int):
            raise InputError(
                f"tier {self.name}: capacity_bytes is {self.capacity_bytes!r}; a whole number of bytes", key="tier"
            )
        if self.write not in _WRITES:
            raise InputError(f"tier {self.name}: write is {self.write!r}; {' or '.join(_WRITES)}", key="tier")

    @classmethod
    def parse(cls, text: str) -> "Tier":
        """Read ``host=64GiB@25GB/s``, as a simulation needs it; ``,write-through`` may follow.

        Raises:
            InputError: it is not written so, or a part of it is no size, rate or way to write.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None or match[3] is None:
            raise InputError(f"tier: {text!r}; write NAME=SIZE@RATE, such as host=64GiB@25GB/s", key="tier")
        return cls._of(match)

    @classmethod
    def parse_real(cls, text: str) -> "Tier":
        """Read ``host=64GiB``, of which the machine itself sets the rate; ``,write-through`` may follow.

        Raises:
            InputError: it is not written so, has a rate, or a part of it is no size or way to write.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise InputError(f"tier: {text!r}; write NAME=SIZE, such as host=4GiB", key="tier")
        if match[3] is not None:
            raise InputError(
                f"tier: {text!r} says a rate, which only a simulation takes; here it is the machine's own: leave "
                f"@{match[3]}/s out",
                key="tier",
            )
        return cls._of(match)

    @classmethod
    def _of(cls, written: re.Match[str]) -> "Tier":
        name, size, rate, write = written.groups()
        capacity = parse_size(size, key="tier")
        bandwidth = math.inf if rate is None else parse_size(rate, key="tier")
        if not capacity:
            raise InputError(f"tier: {written[0]!r} holds nothing; give it a size above 0", key="tier")
        if not bandwidth:
            raise InputError(f"tier: {written[0]!r} moves nothing; give it a rate above 0", key="tier")
        return cls(name=name, capacity_bytes=capacity, bandwidth=bandwidth, write=cast(Write, write or "write-back"))

    def seconds(self, size: int) -> float:
        """How long ``size`` bytes take, one way."""
        return size / self.bandwidth
