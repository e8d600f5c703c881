"""Where a sequence goes on with what lies in tiers: behind what the device has of it."""

from dataclasses import dataclass

from kvist.cache.arena import Ids
from kvist.cache.traffic import Moved


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a sequence that was swapped out has in the first tier.

    Attributes:
        tokens: that are stored.
        bytes: of its blocks, those that it shared included.
    """

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a sequence goes on once more has been loaded than the device has.

    Attributes:
        tokens: length of what it has then.
        tables: per group, int64 ``[blocks]``: of those of the match the ones that it still needs, and -1 for those
            that no window sees, behind the match too. What follows up to ``tokens`` is to be loaded.
        loads: what that moves.
        digests: of the blocks of the prefix that are loaded; none where a sequence is swapped in.
        levels: the tier of each.
    """

    tokens: int
    tables: list[Ids]
    loads: tuple[Moved, ...]
    digests: list[bytes]
    levels: list[int]
