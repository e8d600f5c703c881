"""The arena, the tree and the manager against a model of what each block holds.

The model is the memory itself: it writes into every block, at commit, which tokens it stores, and then insists that
each live block of every running sequence still holds exactly the tokens that its table says, whoever wrote them. A
state must hold all tokens up to where its sequence goes on, and a checkpoint those up to the end of its node.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import BlockCopy, Sequence
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Layer, State

BLOCK = 4


def group(name: str, layer: Layer, layers: int, block: int = BLOCK) -> Group:
    return Group(name=name, layer=layer, layers=tuple(range(layers)), block_tokens=block, format=CacheFormat())


FULL = group("full", Attention(kv_heads=1, key_dim=32, value_dim=32), 1)
WINDOW = group("window-6", Attention(kv_heads=1, key_dim=32, value_dim=32, window=6), 3)
CHUNK = group("chunk-8", Attention(kv_heads=1, key_dim=32, value_dim=32, chunk=8), 2)
# Entries of four tokens, in blocks of three: the unit is 12.
COMPRESSED = group("compressed-4", Compressed(rank=48, rope_dim=16, ratio=4), 2, 12)
STATE = group("state-mamba", State(name="mamba", state_elements=100), 2)
# Runs of eight tokens, of which two fill a block, and a tail in blocks of four.
SEALED = group("sealed-8", Attention(kv_heads=1, key_dim=8, value_dim=8, sealed=8), 2, 16)
TAIL = group("tail-8", Attention(kv_heads=1, key_dim=32, value_dim=32, tail=8), 2)
OTHER_STATE = group("state-short-conv", State(name="short-conv", conv_elements=70), 1)
CROSS = group("cross", Cross(kv_heads=1, key_dim=16, value_dim=16, encoder_tokens=9), 1)
SHAPES = {
    "full": (FULL,),
    "window": (WINDOW,),
    "both": (FULL, WINDOW),
    "both, window first": (WINDOW, FULL),
    "chunk": (CHUNK, FULL),
    "compressed": (WINDOW, COMPRESSED),
    "state": (STATE,),
    "states and full": (STATE, FULL, OTHER_STATE),
    "state and window": (WINDOW, STATE),
    "state, window and compressed": (COMPRESSED, WINDOW, STATE),
    "encoder": (FULL, CROSS),
    "sealed": (SEALED, TAIL),
    "sealed, window and state": (WINDOW, TAIL, SEALED, STATE),
}


class Memory:
    """What each block stores: the prefix key and all tokens up to the block's end, or up to now for a state."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.blocks: list[dict[int, Any]] = [{} for _ in groups]

    def slots(self, sequence: Sequence, group: int, start: int, end: int) -> list[tuple[int, Any]]:
        """Block and content of each live block that holds some of the tokens ``start … end - 1``."""
        known, table, spec = sequence.known().tolist(), sequence.tables[group], self.groups[group]
        if spec.lifetime == "cross":
            return [(int(block), (index, ())) for index, block in enumerate(table)]
        if spec.lifetime == "state":
            return [(int(block), (layer, sequence.key, tuple(known[:end]))) for layer, block in enumerate(table)]
        size = spec.block_tokens
        end = spec.whole_tokens(end)
        return [
            (int(table[index]), (sequence.key, tuple(known[: min(end, (index + 1) * size)])))
            for index in range(start // size, -(-end // size))
        ]

    def store(self, sequence: Sequence, start: int, end: int) -> None:
        for group, spec in enumerate(self.groups):
            if spec.lifetime == "state" and start:
                self.check(sequence, start, group)
            seen = spec.first_live_block(end) * spec.block_tokens if start < sequence.pinned and spec.gives_back else 0
            for block, content in self.slots(sequence, group, min(max(start, seen), end), end):
                assert block >= 0, "a token is to be stored in a block that was given back"
                self.blocks[group][block] = content

    def copy(self, copies: Seq[BlockCopy]) -> None:
        for copy in copies:
            self.blocks[copy.group][copy.target] = self.blocks[copy.group][copy.source]

    def check(self, sequence: Sequence, length: int, group: int) -> None:
        spec = self.groups[group]
        first = spec.first_live_block(length) * spec.block_tokens
        for block, content in self.slots(sequence, group, min(first, length), length):
            assert self.blocks[group].get(block) == content


class CacheMachine(RuleBasedStateMachine):
    """Random requests over few tokens, so that prefixes meet, in so little memory that it runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Sequence] = []
        self.manager: CacheManager | None = None

    @precondition(lambda self: self.manager is None)
    @rule(
        shape=st.sampled_from(sorted(SHAPES)),
        slabs=st.integers(2, 24),
        every=st.sampled_from([None, None, 1, 8]),
        most=st.sampled_from([None, None, 1, 2, 0]),
    )
    def start(self, shape: str, slabs: int, every: int | None, most: int | None) -> None:
        groups = SHAPES[shape]
        least = ArenaLayout.of(groups, 1 << 20)
        layout = ArenaLayout.of(groups, max(slabs, len(groups)) * least.slab_bytes)
        self.manager = CacheManager(groups, layout, checkpoint_every=every, max_checkpoints=most)
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
            self.store([sequence])

    @precondition(lambda self: self.running)
    @rule(prompts=st.lists(st.integers(1, 39), max_size=3), data=st.data(), budget=st.integers(1, 50))
    def step(self, prompts: list[int], data: st.DataObject, budget: int) -> None:
        """All that run, and some new ones, in one step: reserved first, then computed, then committed."""
        batch: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.length == sequence.size:
                sequence.append(0)
            if self.reserve(sequence, budget):
                batch.append(sequence)
            else:
                self.manager.release(sequence)
                self.running.remove(sequence)
        like = self.running[0].known().tolist() if self.running else []
        for size in prompts:
            sequence = self.manager.begin([*like[:size], *data.draw(st.lists(st.integers(0, 1), max_size=9)), 1])
            if self.reserve(sequence, budget, budget):
                batch.append(sequence)
                self.running.append(sequence)
        self.store(batch)

    def reserve(self, sequence: Sequence, budget: int, admit_chunk: int | None = None) -> bool:
        before = self.picture(sequence)
        length = sequence.length
        reservation = self.manager.reserve(sequence, budget, admit_chunk=admit_chunk)
        if not reservation.granted:
            assert self.picture(sequence) == before, "a reservation that failed has changed something"
            return False
        most = min(sequence.size, length + reservation.hit_tokens + budget)
        if self.manager.tree.checkpoints.groups:
            assert length + reservation.hit_tokens < reservation.limit <= most
            assert reservation.limit == most or reservation.limit % self.manager.unit_tokens == 0
        else:
            assert reservation.limit == most
            assert not reservation.copies
        assert reservation.hit_tokens < sequence.size
        assert reservation.loads or reservation.hit_tokens % self.manager.unit_tokens == 0
        assert sequence.length == length + reservation.hit_tokens
        self.memory.copy(reservation.copies)
        return True

    def store(self, batch: list[Sequence]) -> None:
        # The step's runner writes before it reads: what is stored now counts before the step is over.
        for sequence in batch:
            self.memory.store(sequence, sequence.length, sequence.length + sequence.in_flight)
        for sequence in batch:
            self.memory.copy(self.manager.commit(sequence, sequence.length + sequence.in_flight))

    def picture(self, sequence: Sequence) -> Any:
        arena = self.manager.arena
        counts = [(arena.free(g), arena.cached(g), arena.held(g)) for g in range(len(self.manager.groups))]
        tree = sorted((n.id, n.end, n.users, [b.tolist() for b in n.blocks]) for n in self.manager.tree.nodes())
        tree.append([(c.node.id, c.moves) for c in self.manager.tree.checkpoints._order])
        return counts, tree, [t.tolist() for t in sequence.tables], sequence.length, arena.free_slabs

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 9))
    def decode(self, data: st.DataObject, token: int, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        for _ in range(count):
            if sequence.length == sequence.size:
                sequence.append(token)
            if self.manager.extend([sequence], 0, 1):
                assert sequence.length + sequence.in_flight == sequence.size
                own = [
                    g.all_blocks(sequence.size) + self.before(sequence, n) for n, g in enumerate(self.manager.groups)
                ]
                assert [t.size for t in sequence.tables] == own
            elif not self.reserve(sequence, 16):
                self.manager.release(sequence)
                self.running.remove(sequence)
                break
            self.store([sequence])

    def before(self, sequence: Sequence, group: int) -> int:
        """Blocks of what stands before a sequence."""
        return 0

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
        self.memory.copy(fork.copies)
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
                if node.checkpoint and group in self.manager.tree.checkpoints.groups:
                    assert not ids.size, "tokens have blocks in a state group"
                    ids = node.checkpoint.blocks[self.manager.tree.checkpoints.groups.index(group)]
                    assert not refs[ids].any(), "a sequence refers to the blocks of a checkpoint"
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
            for group in range(len(self.manager.groups)):
                self.memory.check(sequence, sequence.length, group)
        if self.manager is None:
            return
        for node in self.manager.tree.nodes():
            if node.checkpoint:
                path = tuple(token for above in _path(node) for token in above.tokens.tolist())
                key = self.manager.tree.key_of(node)
                for group, ids in zip(self.manager.tree.checkpoints.groups, node.checkpoint.blocks, strict=True):
                    found = [self.memory.blocks[group].get(int(block)) for block in ids]
                    assert found == [(layer, key, path) for layer in range(ids.size)]

    @invariant()
    def sequences_hold_what_is_planned(self) -> None:
        for sequence in self.running:
            for group, spec in enumerate(self.manager.groups):
                assert sequence.blocks(group) == spec.live_blocks(sequence.length) + self.before(sequence, group)
        if self.manager and not self.running:
            assert all(self.manager.arena.held(group) == 0 for group in range(len(self.manager.groups)))

    @invariant()
    def the_tree_counts_itself(self) -> None:
        if self.manager is None:
            return
        tree = self.manager.tree
        nodes = list(tree.nodes())
        assert tree.tokens == sum(node.tokens.size for node in nodes)
        checkpoints = tree.checkpoints
        assert {node.checkpoint for node in nodes if node.checkpoint} == set(checkpoints._order)
        assert all(node.checkpoint.node is node for node in nodes if node.checkpoint)
        assert checkpoints.most is None or len(checkpoints) <= checkpoints.most
        ends = [sequence.node for sequence in self.running]
        for node in nodes:
            below = [end for end in ends if end is not None and _is_ancestor(node, end)]
            assert node.users == len(below)
            assert node.end == node.tokens.size + (node.parent.end if node.parent else 0)


def _path(node: Any) -> list[Any]:
    return [] if node is None else [*_path(node.parent), node]


def _is_ancestor(node: Any, end: Any) -> bool:
    while end is not None and end is not node:
        end = end.parent
    return end is node


CacheMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
