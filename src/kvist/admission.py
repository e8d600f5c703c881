"""Whom a scheduler takes on: what could never be computed is refused when it arrives, with the sum that shows why."""

from bisect import bisect_left
from typing import NoReturn

from kvist.cache.manager import CacheManager
from kvist.cache.sequence import Sequence
from kvist.errors import DoesNotFit, InputError
from kvist.units import format_size


class Admission:
    """The sums by which requests are accepted: each must fit into the cache alone.

    Args:
        manager: of the cache.
        max_context: longest sequence, prompt and generated tokens together.
        least_chunk: tokens to which a prompt's chunk may shrink where windows leave no room for more in flight.
    """

    def __init__(self, manager: CacheManager, *, max_context: int, least_chunk: int) -> None:
        self._manager = manager
        self.max_context = max_context
        self.least_chunk = least_chunk
        # With the number of changes to what is pinned after which it was found.
        self._longest: tuple[int, int] | None = None

    def longest(self) -> int:
        """Longest sequence that a request may reach: the context, or what the cache holds of one sequence.

        What is pinned is not counted, whether the request begins with it or not.
        """
        changes = self._manager.pins.changes
        if self._longest is None or self._longest[0] != changes:
            self._longest = changes, self._manager.promises.longest(self.least_chunk, self.max_context)
        return self._longest[1]

    def most_to_generate(self, sequence: Sequence, max_tokens: int | None) -> int:
        """Most tokens that a sequence which has its prompt may generate: those asked for, or as many as it can.

        Raises:
            InputError: the prompt is empty, or longer than the context allows with ``max_tokens``.
            DoesNotFit: the cache could not hold the sequence even alone; the message shows the sum.
        """
        before = sequence.before
        prompt, context = sequence.size - sequence.pinned, self.max_context - before
        if prompt == 0:
            raise InputError("prompt: it has no tokens; at least one is needed", key="prompt")
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"max_tokens: {max_tokens} is too small; at least 1", key="max_tokens")
        if prompt + (max_tokens or 1) > context:
            generated = f" and {max_tokens} to generate are {prompt + max_tokens}" if max_tokens else ""
            raise InputError(
                f"prompt: {prompt} tokens{generated}; the context is {context} tokens"
                f"{f' behind the cartridge of {before}' if before else ''}, prompt and answer together: "
                f"shorten the prompt{f' or lower max_tokens to {context - prompt}' if context > prompt else ''}",
                key="prompt",
            )
        # The last generated token is returned, and never stored; what is pinned is there already.
        stored = prompt + (max_tokens or 1) - 1
        if not self.fits(sequence, stored):
            self._refuse(sequence, prompt, stored)
        most = min(max_tokens or max(1, self.longest() + 1 - prompt), context - prompt)
        if max_tokens is None and sequence.pinned and sequence.pruning:
            # Pruning takes what is pinned into blocks of its own.
            more = range(prompt + 1, prompt + most)
            most = 1 + bisect_left(more, True, key=lambda stored: not self.fits(sequence, stored))
        return most

    def fits(self, sequence: Sequence, stored: int) -> bool:
        """Whether the cache holds a sequence alone, on its way to so many tokens of its own."""
        pruning, pinned, longest = sequence.pruning, sequence.pinned, self.longest()
        if pruning is None:
            return stored <= longest
        if not pinned:
            return stored <= longest or self._fits_pruned(sequence, stored)
        # Before it is pruned it reads what is pinned; then that, or what is left of it, lies in blocks of its own.
        before = min(stored, pruning.first - pinned)
        return before <= longest and self._fits_pruned(sequence, stored)

    def _fits_pruned(self, sequence: Sequence, stored: int) -> bool:
        return self._slabs_pruned(sequence, stored) <= self._manager.layout.num_slabs

    def _slabs_pruned(self, sequence: Sequence, stored: int) -> int:
        """Slabs that a lone sequence takes which is pruned on its way, beside what is pinned."""
        pruning, length = sequence.pruning, stored + sequence.pinned
        assert pruning is not None
        slots = pruning.slots_after(length) if sequence.pinned else pruning.slots(length)
        return self._manager.promises.slabs_needed(length, self.least_chunk, slots)

    def _refuse(self, sequence: Sequence, prompt: int, stored: int) -> NoReturn:
        layout, chunk = self._manager.layout, self.least_chunk
        if stored <= self.longest():
            needed = format_size(self._slabs_pruned(sequence, stored) * layout.slab_bytes)
            raise DoesNotFit(
                f"memory: {prompt} prompt tokens and {stored + 1 - prompt} to generate behind a cartridge of "
                f"{sequence.pinned} would be pruned together, into blocks of their own: {needed} with the cartridge, "
                f"and the cache has {format_size(layout.total_bytes)}; keep fewer tokens, or do not prune"
            )
        terms = " + ".join(
            f"{group.peak_blocks(stored, chunk)} blocks x {format_size(group.block_bytes)} ({group.name})"
            for group in self._manager.groups
        )
        slabs = self._manager.promises.slabs_needed(stored, chunk)
        raise DoesNotFit(
            f"memory: {prompt} prompt tokens and {stored + 1 - prompt} to generate store {stored} tokens at most: "
            f"{terms} = {format_size(slabs * layout.slab_bytes)}, and the cache has {format_size(layout.total_bytes)}; "
            f"it holds {self.longest()} tokens of one sequence"
        )
