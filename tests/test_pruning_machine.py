"""Pruning in the arena, against a model of what every slot holds: shared prefixes, forks, aborts, little memory.

What the model writes into a slot names the token, all tokens before it, and, once its sequence has been pruned, that
sequence. Then each slot of every running sequence must hold what its own list says, and every block of the prefix tree
the tokens of its run: so no block of another's is ever written to, and nothing that was pruned is ever found.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_cache_machine import SHAPES

from kvist.cache.arena import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import BlockCopy, Compaction, Sequence
from kvist.planning.capacity import allocated_bytes
from kvist.spec.pruning import Pruning

NAMES = ("full", "both", "both, window first", "chunk", "states and full")
WAYS = (None, "snapkv:9", "streaming:2+5", "h2o:8", "h2o:0.7")


class PruningMachine(RuleBasedStateMachine):
    """Random requests over few tokens, some of them pruned, in so little memory that it runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.manager: CacheManager | None = None
        self.running: list[Sequence] = []
        self.slots: dict[Sequence, list[list[Any]]] = {}
        self.begun = 0

    @precondition(lambda self: self.manager is None)
    @rule(shape=st.sampled_from(NAMES), slabs=st.integers(2, 14), prefix_cache=st.booleans())
    def start(self, shape: str, slabs: int, prefix_cache: bool) -> None:
        groups = SHAPES[shape]
        layout = ArenaLayout.of(groups, max(slabs, len(groups)) * ArenaLayout.of(groups, 1 << 20).slab_bytes)
        self.manager = CacheManager(groups, layout, prefix_cache=prefix_cache)
        self.memory: list[dict[tuple[int, int], Any]] = [{} for _ in groups]

    @precondition(lambda self: self.manager is not None)
    @rule(
        prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=3),
        like=st.integers(0, 24),
        ways=st.lists(st.sampled_from(WAYS), min_size=3, max_size=3),
        budget=st.integers(1, 40),
        data=st.data(),
    )
    def step(
        self, prompts: list[list[int]], like: int, ways: list[str | None], budget: int, data: st.DataObject
    ) -> None:
        """All that run, and new ones that may begin like one of them: reserved, then computed, then pruned."""
        batch: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.length == sequence.size:
                sequence.append(1)
            self.reserve(sequence, budget, batch)
        first = self.running[0].known()[:like].tolist() if self.running else []
        for prompt, way in zip(prompts, ways, strict=False):
            sequence = self.manager.begin([*first, *prompt], PrefixKey())
            pruning = Pruning.read(way) if way else None
            sequence.pruning = pruning.of_prompt(sequence.size) if pruning else None
            if self.manager.reserve(sequence, budget, admit_chunk=budget).granted:
                self.running.append(sequence)
                batch.append(sequence)
        self.compute(batch, data)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 40), budget=st.integers(1, 9))
    def decode(self, data: st.DataObject, count: int, budget: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        for _ in range(count):
            if sequence.length == sequence.size:
                sequence.append(0)
            batch: list[Sequence] = []
            if self.manager.extend([sequence], 0, 1):
                batch.append(sequence)
            else:
                self.reserve(sequence, budget, batch)
            if not batch:
                break
            self.compute(batch, data)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        self.drop(data.draw(st.sampled_from(self.running)), keep=keep)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), budget=st.integers(1, 40))
    def preempt(self, data: st.DataObject, budget: int) -> None:
        """Its blocks go back, and it is computed again from its tokens."""
        sequence = data.draw(st.sampled_from(self.running))
        self.drop(sequence)
        if self.manager.reserve(sequence, budget, admit_chunk=budget).granted:
            self.running.append(sequence)
            self.compute([sequence], data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        fork = self.manager.fork(sequence)
        if fork is not None:
            self.copy(fork.copies)
            self.running.append(fork.sequence)
            self.slots[fork.sequence] = [list(slots) for slots in self.slots[sequence]]

    @precondition(lambda self: self.running)
    @rule()
    def failed_step(self) -> None:
        """A step that fails ends all that took part."""
        batch = [sequence for sequence in self.running if sequence.size > sequence.length]
        for sequence in batch:
            self.manager.reserve(sequence, 7)
        self.manager.abandon(batch)
        self.running = [sequence for sequence in self.running if sequence not in batch]

    # -- what an engine does ----------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, budget: int, batch: list[Sequence]) -> None:
        if self.manager.reserve(sequence, budget).granted:
            batch.append(sequence)
        else:
            self.drop(sequence)

    def drop(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.manager.release(sequence, keep=keep)
        self.running.remove(sequence)

    def compute(self, batch: list[Sequence], data: st.DataObject) -> None:
        for sequence in batch:
            known = tuple(sequence.known().tolist())
            slots = self.slots.get(sequence)
            if slots is None or len(slots[0]) > sequence.length or not sequence.pruned:
                # It has begun, or begun again, maybe behind a prefix that others have computed.
                slots = self.slots[sequence] = [
                    [known[: position + 1] for position in range(sequence.length)] for _ in self.manager.groups
                ]
            self.begun += 1
            for position in range(sequence.length, sequence.length + sequence.in_flight):
                own = known[: position + 1] if not sequence.pruned else (self.begun, position)
                for group, spec in enumerate(self.manager.groups):
                    if spec.fixed_blocks is None:
                        place, rest = divmod(len(slots[group]), spec.block_tokens)
                        block = int(sequence.tables[group][place])
                        assert block >= 0
                        self.memory[group][block, rest] = own
                    slots[group].append(own)
        for sequence in batch:
            self.copy(self.manager.commit(sequence, sequence.length + sequence.in_flight))
            self.prune(sequence, data)

    def prune(self, sequence: Sequence, data: st.DataObject) -> None:
        plan = sequence.pruning
        slots = sequence.length - sequence.pruned
        if (
            plan is None
            or sequence.length < plan.due(sequence.length, sequence.pruned)
            or sequence.length < plan.prompt
        ):
            return
        if slots <= plan.target(sequence.length):
            return
        before = self.picture(), sequence.pruned
        made = self.manager.compact(sequence)
        if made is None:
            assert (self.picture(), sequence.pruned) == before, "a compaction that failed has changed something"
            return
        keep, sinks = plan.target(sequence.length), plan.pruning.sinks
        rest = data.draw(st.permutations(range(sinks, slots)))[: keep - sinks]
        kept = [*range(sinks), *sorted(rest)]
        assert sequence.length - sequence.pruned == keep
        for moved in made:
            self.move(sequence, moved, kept)
            assert moved.target.size <= moved.source.size
        assert sequence.node is None

    def move(self, sequence: Sequence, moved: Compaction, kept: list[int]) -> None:
        group, memory = moved.group, self.memory[moved.group]
        size = self.manager.groups[group].block_tokens
        arena = self.manager.arena
        assert (arena.refs[group][moved.target] == 1).all()
        assert not arena.kept[group][moved.target].any()
        assert sequence.tables[group].tolist() == moved.target.tolist()
        contents = [memory[int(moved.source[slot // size]), slot % size] for slot in kept]
        assert contents == [self.slots[sequence][group][slot] for slot in kept]
        for slot, content in enumerate(contents):
            memory[int(moved.target[slot // size]), slot % size] = content
        self.slots[sequence][group] = contents

    def copy(self, copies: Any) -> None:
        copied: BlockCopy
        for copied in copies:
            memory, spec = self.memory[copied.group], self.manager.groups[copied.group]
            for slot in range(spec.block_tokens if spec.fixed_blocks is None else 0):
                memory[copied.target, slot] = memory.get((copied.source, slot))

    def picture(self) -> Any:
        arena = self.manager.arena
        tree = sorted((n.id, n.end, n.users, [b.tolist() for b in n.blocks]) for n in self.manager.tree.nodes())
        tables = [[t.tolist() for t in sequence.tables] for sequence in self.running]
        return [refs.tolist() for refs in arena.refs], [kept.tolist() for kept in arena.kept], tree, tables

    # -- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def every_block_has_one_state(self) -> None:
        if self.manager is None:
            return
        arena = self.manager.arena
        for group in range(len(self.manager.groups)):
            refs = np.zeros_like(arena.refs[group])
            for sequence in self.running:
                np.add.at(refs, sequence.tables[group][sequence.given_back[group] :], 1)
            assert refs.tolist() == arena.refs[group].tolist()
            assert arena.held(group) == np.count_nonzero(refs)
            assert arena.cached(group) == np.count_nonzero(arena.kept[group] & (refs == 0))
            assert arena.free(group) + arena.cached(group) + arena.held(group) == arena.lent(group)

    @invariant()
    def slots_hold_what_sequences_say(self) -> None:
        for sequence in self.running:
            groups = self.manager.groups
            planned = allocated_bytes(groups, sequence.length, pruned=sequence.pruned)
            assert self.manager.held_bytes(sequence) == planned
            for group, spec in enumerate(groups):
                slots = self.slots[sequence][group]
                assert len(slots) == sequence.length - sequence.dropped[group]
                if spec.fixed_blocks is None:
                    first = spec.first_live_block(sequence.length) * spec.block_tokens
                    for slot in range(first, len(slots)):
                        block = int(sequence.tables[group][slot // spec.block_tokens])
                        assert self.memory[group][block, slot % spec.block_tokens] == slots[slot]

    @invariant()
    def the_tree_holds_its_own_tokens(self) -> None:
        for node in self.manager.tree.nodes() if self.manager else ():
            path: list[int] = []
            above = node
            while above is not None:
                path = [*above.tokens.tolist(), *path]
                above = above.parent
            begin = node.end - node.tokens.size
            for group, spec in enumerate(self.manager.groups):
                for place, block in enumerate(node.blocks[group].tolist() if spec.fixed_blocks is None else ()):
                    for slot in range(spec.block_tokens if block >= 0 else 0):
                        position = begin + place * spec.block_tokens + slot
                        assert self.memory[group][block, slot] == tuple(path[: position + 1])

    def teardown(self) -> None:
        for sequence in self.running:
            self.manager.release(sequence)
        if self.manager is not None:
            self.manager.clear()
            assert all(self.manager.arena.held(group) == 0 for group in range(len(self.manager.groups)))
            assert self.manager.arena.free_slabs == self.manager.layout.num_slabs


PruningMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestPruningMachine = PruningMachine.TestCase
