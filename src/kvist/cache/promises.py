"""What may be promised to a sequence before it begins: most blocks on its way, and the longest that would fit alone.

Arithmetic over lengths, whatever lies in the arena now but for what is pinned.
"""

from collections.abc import Sequence

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.pinning import Pins
from kvist.spec.pruning import PruningPlan


class Promises:
    """What a cache can promise.

    Args:
        groups: the model's.
        layout: how the memory is cut.
        pins: what is pinned, and takes slabs beside any sequence.
    """

    def __init__(self, groups: Sequence[Group], layout: ArenaLayout, pins: Pins) -> None:
        self._groups = groups
        self._layout = layout
        self._pins = pins

    def peak_blocks(self, length: int, chunk: int, pruning: PruningPlan | None = None) -> list[int]:
        """Most blocks of each group on the way to ``length`` tokens, ``chunk`` of them in flight, pruned or not."""
        slots = pruning.slots(length) if pruning else length
        return [group.peak_blocks(slots if group.prunable else length, chunk) for group in self._groups]

    def slabs_needed(self, length: int, chunk: int, slots: int | None = None) -> int:
        """Slabs that a lone sequence needs beside what is pinned, ``chunk`` of ``length`` own tokens in flight.

        With ``slots`` no more of these are filled at once where tokens are pruned.
        """
        lengths = (length if slots is None or not group.prunable else slots for group in self._groups)
        blocks = [group.peak_blocks(tokens, chunk) for group, tokens in zip(self._groups, lengths, strict=True)]
        return self._pins.slabs_with(blocks)

    def longest(self, chunk: int, limit: int) -> int:
        """Longest sequence, in tokens and up to ``limit``, that would fit alone with ``chunk`` tokens in flight."""
        low, high = 0, limit + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.slabs_needed(middle, chunk) <= self._layout.num_slabs:
                low = middle
            else:
                high = middle
        return low
