"""What moves between the device and its tiers, and what these hold: to be charged for, and shown."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moved:
    """What moved between the device and a tier.

    Attributes:
        tier: its name.
        tokens: whose keys and values it was.
        bytes: of all groups.
    """

    tier: str
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moved in some time, by tier; those without any are left out.

    Attributes:
        read: to the device.
        written: to the tier, from the device or the tier before it.
    """

    read: tuple[Moved, ...] = ()
    written: tuple[Moved, ...] = ()


NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True)
class Occupied:
    """What a tier holds.

    Attributes:
        tier: its name.
        cached_bytes: blocks of prefixes.
        swapped_bytes: what sequences own that were swapped out.
        blocks: of prefixes; what all groups store of a unit of tokens, as far as it was there, is one.
    """

    tier: str
    cached_bytes: int
    swapped_bytes: int
    blocks: int = 0
