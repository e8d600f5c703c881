"""What stands before sequences among random requests: the machine of the cache, with leads that come and go."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_cache_machine import BLOCK, FULL, SEALED, TAIL, CacheMachine, Memory, group

from kvist.cache.arena import ArenaLayout
from kvist.cache.lead_groups import lead_blocks
from kvist.cache.leads import Lead
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.errors import DoesNotFit
from kvist.planning.capacity import allocated_bytes
from kvist.spec.layers import Attention

LEAD = group("lead", Attention(kv_heads=1, key_dim=8, value_dim=8, lead=True), 1)
# Blocks of a lead may be larger, where its keys are stored in runs.
LARGE = group("lead-int4c", Attention(kv_heads=1, key_dim=8, value_dim=8, lead=True), 2, 2 * BLOCK)
SHAPES = {"full": (FULL, LEAD), "large": (FULL, LARGE), "two": (FULL, LEAD, LARGE), "sealed": (SEALED, TAIL, LEAD)}


class LeadMemory(Memory):
    """Nobody writes to blocks of leads but who pins them."""

    def slots(self, sequence: Sequence, group: int, start: int, end: int) -> list[tuple[int, Any]]:
        return [] if self.groups[group].lifetime == "lead" else super().slots(sequence, group, start, end)

    def check_lead(self, holder: Any, name: str) -> None:
        for spec, blocks, table in zip(self.groups, self.blocks, holder.tables, strict=True):
            if spec.lifetime == "lead":
                found = [blocks.get(int(block)) for block in table]
                assert [place for _, place in found] == [*range(len(found))]
                assert all(name.startswith(one) for one, _ in found), (
                    "a lead lies where another, or tokens, are written"
                )


class LeadMachine(CacheMachine):
    """Leads stay whatever happens, are shared by all that begin behind them, and go with the last of these."""

    def __init__(self) -> None:
        super().__init__()
        self.leads: dict[str, Lead] = {}

    @precondition(lambda self: self.manager is None)
    @rule(shape=st.sampled_from(sorted(SHAPES)), slabs=st.integers(4, 24))
    def start(self, shape: str, slabs: int) -> None:
        groups = SHAPES[shape]
        least = ArenaLayout.of(groups, 1 << 20)
        self.manager = CacheManager(groups, ArenaLayout.of(groups, max(slabs, len(groups)) * least.slab_bytes))
        self.memory = LeadMemory(groups)

    @precondition(lambda self: self.manager is not None)
    @rule(data=st.data(), number=st.integers(0, 5), units=st.integers(1, 4))
    def pin(self, data: st.DataObject, number: int, units: int) -> None:
        """One more, alone or behind one that is pinned, whose blocks it shares."""
        behind = data.draw(st.sampled_from(["", *sorted(self.leads)]))
        name = f"{behind}{number} of {units}, "
        if name in self.leads or len(self.leads) > 4:
            return
        before = self.picture(Sequence(np.empty(0, np.int32), PrefixKey(), len(self.manager.groups)))
        count = 2 * BLOCK * units
        try:
            lead = self.manager.pins.pin(count, PrefixKey(), behind=self.leads.get(behind))
        except DoesNotFit:
            assert self.picture(Sequence(np.empty(0, np.int32), PrefixKey(), len(self.manager.groups))) == before
            return
        shared = self.leads[behind] if behind else Lead(0, [np.empty(0, np.int64)] * len(self.manager.groups))
        assert lead.tokens == shared.tokens + count
        assert [table.size for table in lead.tables] == [*lead_blocks(self.manager.groups, lead.tokens)]
        for blocks, table, first in zip(self.memory.blocks, lead.tables, shared.tables, strict=True):
            assert table[: first.size].tolist() == first.tolist()
            blocks.update({int(block): (name, place) for place, block in enumerate(table) if place >= first.size})
        self.manager.pins.filled(lead)
        self.leads[name] = lead

    @precondition(lambda self: self.leads)
    @rule(
        data=st.data(),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        salt=st.sampled_from(["", "tenant"]),
        budget=st.integers(1, 30),
        admit_chunk=st.none() | st.integers(1, 50),
    )
    def begin_behind(
        self, data: st.DataObject, prompt: list[int], salt: str, budget: int, admit_chunk: int | None
    ) -> None:
        name = data.draw(st.sampled_from(sorted(self.leads)))
        sequence = self.manager.begin(prompt, PrefixKey(salt=salt, cartridge=name))
        sequence.lead = self.leads[name]
        for _ in range(2):
            # And again, as after a preemption.
            if not self.reserve(sequence, budget, admit_chunk):
                return
            self.store([sequence])
            self.manager.release(sequence)
        if self.reserve(sequence, budget):
            self.store([sequence])
            self.running.append(sequence)

    @precondition(lambda self: self.leads)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Those that have begun behind it keep its blocks."""
        self.manager.pins.unpin(self.leads.pop(data.draw(st.sampled_from(sorted(self.leads)))))

    def before(self, sequence: Sequence, group: int) -> int:
        return 0 if sequence.lead is None else sequence.lead.tables[group].size

    @invariant()
    def every_block_has_one_state(self) -> None:
        running = self.running
        self.running = [
            *running,
            *(SimpleNamespace(tables=lead.tables, given_back=[0] * 9) for lead in self.leads.values()),
        ]
        try:
            super().every_block_has_one_state()
        finally:
            self.running = running

    @invariant()
    def sequences_hold_what_is_planned(self) -> None:
        pinned = self.manager is not None and bool(self.leads)
        for sequence in self.running:
            planned = allocated_bytes(self.manager.groups, sequence.length, before=sequence.held_before)
            assert self.manager.held_bytes(sequence) == planned
        if not pinned:
            super().sequences_hold_what_is_planned()

    @invariant()
    def leads_stay(self) -> None:
        for name, lead in self.leads.items():
            self.memory.check_lead(lead, name)
        for sequence in self.running:
            if sequence.lead is not None:
                assert sequence.first_position == sequence.lead.tokens
                for table, own in zip(sequence.lead.tables, sequence.tables, strict=True):
                    assert not table.size or table.tolist() == own.tolist()
                self.memory.check_lead(sequence.lead, sequence.key.cartridge)

    @invariant()
    def pins_count_themselves(self) -> None:
        if self.manager is None:
            return
        sizes = self.manager.layout.block_bytes
        held = sum(
            len({int(block) for lead in self.leads.values() for block in lead.tables[group]}) * size
            for group, size in enumerate(sizes)
        )
        assert self.manager.pins.bytes == held


LeadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLeadMachine = LeadMachine.TestCase
