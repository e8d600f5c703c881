"""A place for blocks beyond the device, as users describe it."""

import re
from dataclasses import dataclass
from typing import Literal, cast

from kvist.errors import InputError
from kvist.units import parse_size

Write = Literal["write-back", "write-through"]
_WRITTEN = re.compile(r"([\w-]+)=([^@,]+)@([^@,/]+)/s(?:,([\w-]+))?")
_WRITES: tuple[Write, ...] = ("write-back", "write-through")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place for blocks beyond the device.

    Attributes:
        name: ``host``, ``disk``, ``remote`` …
        capacity_bytes: that it holds.
        bandwidth: bytes per second between it and the device, each way.
        write: ``write-back``: it is given what is evicted before it; ``write-through``: it is given every block of a
            prefix as soon as the device has computed it.

    Raises:
        InputError: a size or rate is not positive, or ``write`` is neither.
    """

    name: str
    capacity_bytes: int
    bandwidth: float
    write: Write = "write-back"

    def __post_init__(self) -> None:
        for key in ("capacity_bytes", "bandwidth"):
            if not getattr(self, key) > 0:
                raise InputError(f"tier {self.name}: {key} is {getattr(self, key)}; above 0", key="tier")
        if self.write not in _WRITES:
            raise InputError(f"tier {self.name}: write is {self.write!r}; {' or '.join(_WRITES)}", key="tier")

    @classmethod
    def parse(cls, text: str) -> "Tier":
        """Read ``host=64GiB@25GB/s``; ``,write-through`` may follow.

        Raises:
            InputError: it is not written so, or a part of it is no size, rate or way to write.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise InputError(f"tier: {text!r}; write NAME=SIZE@RATE, such as host=64GiB@25GB/s", key="tier")
        name, size, rate, write = match.groups()
        return cls(
            name=name,
            capacity_bytes=parse_size(size, key="tier"),
            bandwidth=parse_size(rate, key="tier"),
            write=cast(Write, write or "write-back"),
        )

    def seconds(self, size: int) -> float:
        """How long ``size`` bytes take, one way."""
        return size / self.bandwidth
