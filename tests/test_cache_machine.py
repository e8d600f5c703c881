"""The arena, the tree and the manager against a model of what each block holds.

The model is the memory itself: it writes into every block, at commit, which tokens it stores, and then insists that
each live block of every running sequence still holds exactly the tokens that its table says, whoever wrote them.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager, Sequence
from kvist.cache.prefix import PrefixKey
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention

BLOCK = 4
FULL = Group(
    name="full",
    layer=Attention(kv_heads=1, key_dim=32, value_dim=32),
    layers=(0,),
    block_tokens=BLOCK,
    format=CacheFormat(),
)
WINDOW = Group(
    name="window-6",
    layer=Attention(kv_heads=1, key_dim=32, value_dim=32, window=6),
    layers=(1, 2, 3),
    block_tokens=BLOCK,
    format=CacheFormat(),
)
SHAPES = {"full": (FULL,), "window": (WINDOW,), "both": (FULL, WINDOW), "both, window first": (WINDOW, FULL)}


class Memory:
    """What each block stores, as (salt, all tokens up to the block's end)."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.blocks: list[dict[int, Any]] = [{} for _ in groups]

    def slots(self, sequence: Sequence, group: int, start: int, end: int) -> list[tuple[int, Any]]:
        """Block and content of each live block that holds some of the tokens ``start … end - 1``."""
        known = sequence.known().tolist()
        return [
            (int(sequence.tables[group][index]), (sequence.key, tuple(known[: min(end, (index + 1) * BLOCK)])))
            for index in range(start // BLOCK, -(-end // BLOCK))
        ]

    def store(self, sequence: Sequence, start: int, end: int) -> None:
        for group in range(len(self.groups)):
            for block, content in self.slots(sequence, group, start, end):
                assert block >= 0, "a token is to be stored in a block that was given back"
                self.blocks[group][block] = content

    def check(self, sequence: Sequence) -> None:
        for group, spec in enumerate(self.groups):
            first = spec.first_live_block(sequence.length) * BLOCK
            for block, content in self.slots(sequence, group, min(first, sequence.length), sequence.length):
                assert self.blocks[group].get(block) == content


class CacheMachine(RuleBasedStateMachine):
    """Random requests over few tokens, so that prefixes meet, in so little memory that it runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Sequence] = []
        self.manager: CacheManager | None = None

    @precondition(lambda self: self.manager is None)
    @rule(shape=st.sampled_from(sorted(SHAPES)), slabs=st.integers(2, 24))
    def start(self, shape: str, slabs: int) -> None:
        groups = SHAPES[shape]
        layout = ArenaLayout.of(groups, slabs * ArenaLayout.of(groups, 1 << 20).slab_bytes)
        self.manager = CacheManager(groups, layout)
        self.memory = Memory(groups)

    @precondition(lambda self: self.manager is not None)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        salt=st.sampled_from(["", "", "tenant"]),
        budget=st.integers(1, 50),
        admit_chunk=st.none() | st.integers(1, 50),
    )
    def begin(self, prompt: list[int], salt: str, budget: int, admit_chunk: int | None) -> None:
        sequence = self.manager.begin(prompt, PrefixKey(salt=salt))
        if self.reserve(sequence, budget, admit_chunk):
            self.running.append(sequence)

    def reserve(self, sequence: Sequence, budget: int, admit_chunk: int | None = None) -> bool:
        before = self.picture(sequence)
        length = sequence.length
        reservation = self.manager.reserve(sequence, budget, admit_chunk=admit_chunk)
        if not reservation.granted:
            assert self.picture(sequence) == before, "a reservation that failed has changed something"
            return False
        assert reservation.limit == min(sequence.size, length + reservation.hit_tokens + budget)
        assert reservation.hit_tokens < sequence.size
        assert sequence.length == length + reservation.hit_tokens
        # The step's runner writes before it reads: what is stored now counts before the step is over.
        self.memory.store(sequence, sequence.length, reservation.limit)
        self.manager.commit(sequence, reservation.limit)
        return True

    def picture(self, sequence: Sequence) -> Any:
        arena = self.manager.arena
        counts = [(arena.free(g), arena.cached(g), arena.held(g)) for g in range(len(self.manager.groups))]
        tree = sorted((n.id, n.end, n.users, [b.tolist() for b in n.blocks]) for n in self.manager.tree.nodes())
        return counts, tree, [t.tolist() for t in sequence.tables], sequence.length, arena.free_slabs

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 9))
    def decode(self, data: st.DataObject, token: int, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        for _ in range(count):
            if sequence.length == sequence.size:
                sequence.append(token)
            if not self.reserve(sequence, 16):
                self.manager.release(sequence)
                self.running.remove(sequence)
                break

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.manager.release(sequence, keep=keep)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        fork = self.manager.fork(sequence)
        if fork is None:
            return
        for copy in fork.copies:
            self.memory.blocks[copy.group][copy.target] = self.memory.blocks[copy.group][copy.source]
        self.running.append(fork.sequence)

    @precondition(lambda self: self.running)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30), more=st.integers(0, 9))
    def failed_step(self, prompt: list[int], more: int) -> None:
        """Two new requests of one step, which fails before anything is stored."""
        before = {node.id for node in self.manager.tree.nodes()}
        batch = [self.manager.begin(prompt), self.manager.begin(prompt + [1] * more)]
        granted = [sequence for sequence in batch if self.manager.reserve(sequence, 64).granted]
        self.manager.abandon(granted)
        for node in self.manager.tree.nodes():
            assert node.sealed
            assert node.id in before or node.users or node.children or node.tokens.size

    @precondition(lambda self: self.manager is not None)
    @rule()
    def clear(self) -> None:
        self.manager.clear()
        for group in range(len(self.manager.groups)):
            if not self.running:
                assert self.manager.arena.cached(group) == 0

    @invariant()
    def every_block_has_one_state(self) -> None:
        if self.manager is None:
            return
        arena, layout = self.manager.arena, self.manager.layout
        for group, per_slab in enumerate(layout.blocks_per_slab):
            refs = np.zeros(layout.total_blocks(group), np.int32)
            for sequence in self.running:
                table = sequence.tables[group]
                np.add.at(refs, table[sequence.given_back[group] :], 1)
                assert (table[: sequence.given_back[group]] == -1).all()
            assert refs.tolist() == arena.refs[group].tolist()
            kept = np.zeros(layout.total_blocks(group), bool)
            for node in self.manager.tree.nodes():
                ids = node.blocks[group]
                assert not kept[ids[ids >= 0]].any(), "two nodes keep one block"
                kept[ids[ids >= 0]] = True
            assert kept.tolist() == arena.kept[group].tolist()
            assert arena.held(group) == np.count_nonzero(refs)
            assert arena.cached(group) == np.count_nonzero(kept & (refs == 0))
            assert arena.free(group) + arena.cached(group) + arena.held(group) == arena.lent(group)
            owned = np.repeat(arena.owner_of_slabs() == group, per_slab)
            assert not (refs.astype(bool) | kept)[~owned].any(), "a block of a slab that another group has"
        owners = arena.owner_of_slabs()
        assert np.count_nonzero(owners == -1) == arena.free_slabs
        for group, per_slab in enumerate(layout.blocks_per_slab):
            assert np.count_nonzero(owners == group) * per_slab == arena.lent(group)

    @invariant()
    def memory_holds_what_tables_say(self) -> None:
        for sequence in self.running:
            self.memory.check(sequence)

    @invariant()
    def sequences_hold_what_is_planned(self) -> None:
        for sequence in self.running:
            for group, spec in enumerate(self.manager.groups):
                assert sequence.blocks(group) == spec.live_blocks(sequence.length)

    @invariant()
    def the_tree_counts_itself(self) -> None:
        if self.manager is None:
            return
        tree = self.manager.tree
        nodes = list(tree.nodes())
        assert tree.tokens == sum(node.tokens.size for node in nodes)
        ends = [sequence.node for sequence in self.running]
        for node in nodes:
            below = [end for end in ends if end is not None and _is_ancestor(node, end)]
            assert node.users == len(below)
            assert node.end == node.tokens.size + (node.parent.end if node.parent else 0)


def _is_ancestor(node: Any, end: Any) -> bool:
    while end is not None and end is not node:
        end = end.parent
    return end is node


CacheMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
