"""Where blocks lie in the memory of a tier, and which bytes move when they come and go; still without tensors.

A tier's memory is one run of bytes. What it keeps of a block of the prefix is a *piece* a group: of blocks of tokens
those of one unit, of a state all its layers. A piece lies in as many extents as it takes::

    tier   | a/full      | b/full      | a/window | free | b/wi… | …ndow | free        extents: offset and size

so that whatever fits by its bytes has a place: those who decide count bytes alone, here and in a simulation, and sizes
that do not divide each other waste none. Where all pieces are of one size each has one extent.

Moves are written down in the order in which they were decided, and are right in that order alone: a later one may write
where an earlier one has read.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.arena import Ids
from kvist.cache.layout import ArenaLayout
from kvist.errors import EngineFailure

if TYPE_CHECKING:
    from kvist.cache.sequence import Move

DEVICE = -1
"""The level of the arena; that of a tier is its place in the stack."""

Extent = tuple[int, int]
"""Where bytes begin, and how many there are."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes in one memory, one extent after the other.

    Attributes:
        level: whose memory: a tier's, or :data:`DEVICE`.
        extents: disjoint.
    """

    level: int
    extents: tuple[Extent, ...]

    def part(self, start: int, size: int) -> "Place":
        """``size`` of its bytes, from the one at ``start`` on."""
        extents = []
        for offset, length in self.extents:
            first, last = max(start, 0), min(start + size, length)
            if first < last:
                extents.append((offset + first, last - first))
            start -= length
        return Place(self.level, tuple(extents))


Pieces = dict[int, Place]
"""Where what each group stores of one block of the prefix lies."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes to be copied from one place to another of the same size."""

    source: Place
    target: Place

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Offsets in both memories and size of each run that is contiguous in both."""
        targets = iter(self.target.extents)
        end, left = 0, 0
        for offset, size in self.source.extents:
            done = 0
            while done < size:
                if not left:
                    start, left = next(targets)
                    end = start + left
                count = min(size - done, left)
                yield offset + done, end - left, count
                done += count
                left -= count


class Room:
    """Which bytes of a memory are free."""

    def __init__(self, size: int) -> None:
        self.free = size
        # By offset; no two of them touch.
        self._offsets = [0]
        self._sizes = [size]

    def take(self, size: int) -> tuple[Extent, ...]:
        """Take ``size`` free bytes: of the first extent that has as many, else of as many as it takes."""
        if size > self.free:
            raise EngineFailure(f"a tier with {self.free} free bytes was to take {size}")
        self.free -= size
        for index, there in enumerate(self._sizes):
            if there >= size:
                return (self._cut(index, size),)
        extents: list[Extent] = []
        while size:
            extents.append(self._cut(0, min(size, self._sizes[0])))
            size -= extents[-1][1]
        return tuple(extents)

    def _cut(self, index: int, size: int) -> Extent:
        offset = self._offsets[index]
        if size == self._sizes[index]:
            del self._offsets[index], self._sizes[index]
        else:
            self._offsets[index] += size
            self._sizes[index] -= size
        return offset, size

    def give(self, extents: Iterable[Extent]) -> None:
        """Give bytes back; what touches becomes one extent."""
        for offset, size in extents:
            self.free += size
            index = bisect_left(self._offsets, offset)
            if index < len(self._offsets) and offset + size == self._offsets[index]:
                size += self._sizes[index]
                del self._offsets[index], self._sizes[index]
            if index and self._offsets[index - 1] + self._sizes[index - 1] == offset:
                self._sizes[index - 1] += size
            else:
                self._offsets.insert(index, offset)
                self._sizes.insert(index, size)


class Places:
    """Where all tiers keep what they keep.

    Args:
        layout: of the arena on the other side.
        capacities: bytes of each tier.
        moves: what is to be moved is appended to these.
    """

    def __init__(self, layout: ArenaLayout, capacities: Iterable[int], moves: "list[Move]") -> None:
        self._layout = layout
        self._moves = moves
        self._capacities = tuple(capacities)
        self._rooms: list[Room] = []
        self._pieces: list[dict[bytes, Pieces]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything, and all that was still to be moved to a tier or from one."""
        self._rooms = [Room(capacity) for capacity in self._capacities]
        self._pieces = [{} for _ in self._capacities]
        self._moves[:] = [move for move in self._moves if not isinstance(move, Transfer)]

    def used(self, level: int) -> int:
        """Bytes of a tier that hold something."""
        return self._capacities[level] - self._rooms[level].free

    def on_device(self, group: int, ids: Ids) -> Place:
        """Where blocks of the arena lie."""
        size = self._layout.block_bytes[group]
        return Place(DEVICE, tuple((self._layout.offset(group, block), size) for block in ids.tolist()))

    def put(self, level: int, digest: bytes, pieces: Pieces) -> None:
        """Copy pieces of a block to a tier, which has room for them and lacks them."""
        there = self._pieces[level].setdefault(digest, {})
        for group, source in pieces.items():
            size = sum(size for _, size in source.extents)
            there[group] = Place(level, self._rooms[level].take(size))
            self._moves.append(Transfer(source, there[group]))

    def leave(self, level: int, digest: bytes) -> Pieces:
        """A tier lets a block go: where it lies until something else is put there."""
        pieces = self._pieces[level].pop(digest, {})
        for place in pieces.values():
            self._rooms[level].give(place.extents)
        return pieces

    def fetch(self, level: int, digest: bytes, group: int, first: int, ids: Ids) -> None:
        """Copy a piece, or the part that begins with its block ``first``, to blocks of the arena."""
        size = self._layout.block_bytes[group]
        source = self._pieces[level][digest][group].part(first * size, ids.size * size)
        self._moves.append(Transfer(source, self.on_device(group, ids)))
