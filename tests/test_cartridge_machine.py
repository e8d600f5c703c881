"""Pinned runs among random requests: the machine of the cache, with cartridges that come and go."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_cache_machine import CacheMachine

from kvist.cache.pinning import placeholders
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.errors import DoesNotFit


class PinnedMachine(CacheMachine):
    """What is pinned is held like a running sequence, stays whatever happens, and is found by all who begin with it."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, Sequence] = {}

    @contextmanager
    def _with_pins(self) -> Iterator[None]:
        running = self.running
        self.running = [*running, *self.pinned.values()]
        try:
            yield
        finally:
            self.running = running

    def picture(self, sequence: Sequence) -> Any:
        with self._with_pins():
            return super().picture(sequence)

    @precondition(lambda self: self.manager and all(group.fixed_blocks is None for group in self.manager.groups))
    @rule(number=st.integers(0, 2), units=st.integers(1, 3))
    def pin(self, number: int, units: int) -> None:
        if number in self.pinned:
            return
        count = units * self.manager.unit_tokens
        key = PrefixKey(cartridge=f"{number} of {count}")
        before = self.picture(Sequence(placeholders(count), key, len(self.manager.groups)))
        try:
            sequence = self.manager.pins.pin(count, key)
        except DoesNotFit:
            assert self.picture(Sequence(placeholders(count), key, len(self.manager.groups))) == before
            return
        self.memory.store(sequence, 0, count)
        self.manager.pins.filled(sequence)
        self.pinned[number] = sequence

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), number=st.integers(3, 5), units=st.integers(1, 3))
    def pin_behind(self, data: st.DataObject, number: int, units: int) -> None:
        """One more, behind one that is pinned: it shares that one's blocks, and stays when that one is let go."""
        if number in self.pinned:
            return
        first = data.draw(st.sampled_from(sorted(self.pinned.items())))[1]
        count = units * self.manager.unit_tokens
        run = placeholders(count, 1000 * number)
        before = self.picture(Sequence(run, first.key, len(self.manager.groups)))
        shared = [first.blocks(group) for group in range(len(self.manager.groups))]
        try:
            sequence = self.manager.pins.pin(count, first.key, behind=first, tokens=run)
        except DoesNotFit:
            assert self.picture(Sequence(run, first.key, len(self.manager.groups))) == before
            return
        assert sequence.pinned == first.pinned + count
        self.memory.store(sequence, first.pinned, sequence.pinned)
        self.manager.pins.filled(sequence)
        assert [first.blocks(group) for group in range(len(self.manager.groups))] == shared
        self.pinned[number] = sequence

    @precondition(lambda self: self.pinned)
    @rule(
        data=st.data(),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        budget=st.integers(1, 30),
        apart=st.booleans(),
    )
    def begin_behind(self, data: st.DataObject, prompt: list[int], budget: int, apart: bool) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pinned.items())))[1]
        sequence = self.manager.begin([*pin.tokens.tolist(), *prompt], pin.key)
        sequence.pinned, sequence.apart = pin.pinned, apart
        for _ in range(2):
            # And again, as after a preemption.
            if not self.reserve(sequence, budget):
                return
            assert sequence.length >= pin.pinned, "nobody computes what a cartridge stands for"
            self.store([sequence])
            self.manager.release(sequence)
        if self.reserve(sequence, budget):
            self.store([sequence])
            self.running.append(sequence)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pinned)))
        self.manager.pins.unpin(self.pinned.pop(number))

    @precondition(lambda self: self.manager is not None)
    @rule()
    def clear(self) -> None:
        self.manager.clear()
        for group in range(len(self.manager.groups)):
            if not self.running and not self.pinned:
                assert self.manager.arena.cached(group) == 0

    @invariant()
    def every_block_has_one_state(self) -> None:
        with self._with_pins():
            super().every_block_has_one_state()

    @invariant()
    def memory_holds_what_tables_say(self) -> None:
        with self._with_pins():
            super().memory_holds_what_tables_say()

    @invariant()
    def sequences_hold_what_is_planned(self) -> None:
        with self._with_pins():
            super().sequences_hold_what_is_planned()

    @invariant()
    def the_tree_counts_itself(self) -> None:
        with self._with_pins():
            super().the_tree_counts_itself()

    @invariant()
    def pins_count_themselves(self) -> None:
        if self.manager is None:
            return
        sizes = self.manager.layout.block_bytes
        # Those that follow others share their blocks.
        tables = [[pin.tables[group] for pin in self.pinned.values()] for group in range(len(sizes))]
        held = sum(
            len({block for table in pins for block in table.tolist() if block >= 0}) * size
            for pins, size in zip(tables, sizes, strict=True)
        )
        assert self.manager.pins.bytes == held
        lent = [np.count_nonzero(self.manager.arena.owner_of_slabs() == group) for group in range(len(sizes))]
        needed = self.manager.pins.slabs_with([0] * len(sizes))
        assert needed <= sum(lent)


PinnedMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPinnedMachine = PinnedMachine.TestCase
