"""The blocks beyond the device: what is written where, what is found again, what moves, and swapping out."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_cache_machine import SHAPES, CacheMachine, Memory

from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Reservation, Sequence
from kvist.cache.tier import Tier
from kvist.cache.traffic import NO_TRAFFIC, Moved
from kvist.errors import DoesNotFit, InputError
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention

FULL = Group(
    name="full",
    layer=Attention(kv_heads=1, key_dim=32, value_dim=32),
    layers=(0,),
    block_tokens=4,
    format=CacheFormat(),
)
WINDOW = replace(
    FULL, name="window-8", layer=Attention(kv_heads=1, key_dim=32, value_dim=32, window=8), layers=(1, 2, 3)
)
BYTES = FULL.block_bytes


def tier(name: str, blocks: int, **keys: Any) -> Tier:
    return Tier(name=name, capacity_bytes=blocks * BYTES, bandwidth=1e9, **keys)


def cache_of(blocks: int, *tiers: Tier, groups: tuple[Group, ...] = (FULL,), prefix_cache: bool = True) -> CacheManager:
    slab = ArenaLayout.of(groups, 1 << 24).slab_bytes
    return CacheManager(groups, ArenaLayout.of(groups, blocks * slab), tiers=tiers, prefix_cache=prefix_cache)


def run(cache: CacheManager, tokens: Seq[int], salt: str = "") -> Reservation:
    sequence = cache.begin(tokens, PrefixKey(salt=salt))
    reservation = cache.reserve(sequence, len(tokens))
    assert reservation.granted
    cache.commit(sequence, len(tokens))
    cache.release(sequence)
    return reservation


def written(cache: CacheManager) -> dict[str, tuple[int, int]]:
    return {moved.tier: (moved.tokens, moved.bytes) for moved in cache.tiers.take_traffic().written}


A, B, C = range(0, 32), range(100, 132), range(200, 232)


def test_what_the_device_reclaims_is_loaded_from_the_host() -> None:
    cache = cache_of(8, tier("host", 100))
    run(cache, A)
    assert written(cache) == {}
    run(cache, B)
    assert written(cache) == {"host": (32, 8 * BYTES)}
    again = run(cache, A)
    assert (again.hit_tokens, again.loads) == (28, (Moved("host", 28, 7 * BYTES),)), (
        "all but the block of the last token"
    )
    traffic = cache.tiers.take_traffic()
    assert traffic.read == again.loads
    assert traffic.written == (Moved("host", 32, 8 * BYTES),)
    run(cache, B)
    assert written(cache) == {}, "the host has it still"


def test_a_match_goes_on_behind_where_the_device_ends() -> None:
    cache = cache_of(11, tier("host", 100))
    run(cache, A)
    run(cache, range(100, 124))  # takes three blocks from the end of A
    again = run(cache, [*A, 1])
    assert (again.hit_tokens, again.loads) == (32, (Moved("host", 12, 3 * BYTES),))


def test_another_tenants_salt_finds_nothing_in_a_tier() -> None:
    cache = cache_of(8, tier("host", 100))
    run(cache, A, salt="one")
    run(cache, B)
    assert run(cache, A, salt="two").hit_tokens == 0
    assert run(cache, A, salt="one").hit_tokens == 28


def test_tiers_pass_on_what_they_evict_least_recently_used_first() -> None:
    cache = cache_of(8, tier("host", 10), tier("disk", 10))
    run(cache, A)
    run(cache, B)
    run(cache, C)
    host, disk = cache.tiers.occupied()
    assert (host.cached_bytes, disk.cached_bytes) == (10 * BYTES, 6 * BYTES)
    assert written(cache) == {"host": (64, 16 * BYTES), "disk": (24, 6 * BYTES)}
    # A's tail was the first to be evicted: its head is near, its tail far.
    again = run(cache, A)
    assert again.loads == (Moved("host", 8, 2 * BYTES), Moved("disk", 20, 5 * BYTES))


def test_write_through_writes_once_computed_and_not_again() -> None:
    cache = cache_of(
        8, tier("host", 10, write="write-through"), tier("disk", 100), tier("far", 99, write="write-through")
    )
    run(cache, A)
    assert written(cache) == {"host": (32, 8 * BYTES), "far": (32, 8 * BYTES)}
    run(cache, B)
    assert written(cache) == {"host": (32, 8 * BYTES), "disk": (24, 6 * BYTES), "far": (32, 8 * BYTES)}
    assert [load.tier for load in run(cache, A).loads] == ["host", "disk"]
    assert cache.tiers.occupied()[2].cached_bytes == 16 * BYTES


def test_a_window_is_loaded_where_it_is_needed_alone() -> None:
    """Ten blocks of all tokens, and of the window the two that the next query sees."""
    cache = cache_of(40, tier("host", 1000), groups=(FULL, WINDOW))
    run(cache, range(41))
    cache.clear()
    again = run(cache, [*range(36), 7])
    assert again.hit_tokens == 0, "the window before the 36th token was given back; that before the 40th was not"
    cache.clear()
    again = run(cache, [*range(40), 7])
    assert again.hit_tokens == 40
    assert again.loads == (Moved("host", 40, 10 * FULL.block_bytes + 2 * WINDOW.block_bytes),)


def test_without_tiers_nothing_moves() -> None:
    made = Scheduler(manager=cache_of(16), limits=Limits())
    made.add("a", A, 4)
    assert made.step().traffic is NO_TRAFFIC
    assert run(cache_of(8), A).loads == ()


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="tier host: capacity_bytes is 0; above 0"):
        tier("host", 0)
    with pytest.raises(InputError, match="tier host: write is 'never'; write-back or write-through"):
        tier("host", 1, write="never")
    with pytest.raises(InputError, match="tier: host, host; at least one, and each name once"):
        cache_of(8, tier("host", 1), tier("host", 2))
    with pytest.raises(InputError, match="preempt: swap needs a tier"):
        Scheduler(manager=cache_of(8), limits=Limits(), preempt="swap")
    with pytest.raises(InputError, match="preempt: 'drop'; recompute or swap"):
        Scheduler(manager=cache_of(8), limits=Limits(), preempt="drop")  # type: ignore[arg-type]
    assert tier("host", 1 << 20).seconds(2_000_000_000) == 2.0


def test_a_tier_is_read_from_the_command_lines_words() -> None:
    assert Tier.parse("host=64GiB@25GB/s") == Tier(name="host", capacity_bytes=64 << 30, bandwidth=25e9)
    disk = Tier.parse(" disk = 2TB @ 7GB/s,write-through".replace(" ", ""))
    assert disk == Tier(name="disk", capacity_bytes=2 * 10**12, bandwidth=7e9, write="write-through")
    for wrong in (
        {"capacity_bytes": 1e9},
        {"capacity_bytes": True},
        {"capacity_bytes": "1GiB"},
        {"bandwidth": "1GB/s"},
    ):
        with pytest.raises(InputError, match=r"tier host: (capacity_bytes|bandwidth) is "):
            Tier(**({"name": "host", "capacity_bytes": 1 << 30} | wrong))
    for text, message in {
        "host": "tier: 'host'; write NAME=SIZE@RATE, such as host=64GiB@25GB/s",
        "host=64GiB@25GB": "write NAME=SIZE@RATE",
        "host=much@25GB/s": "tier: 'much' is not a size",
        "host=0@25GB/s": "tier: 'host=0@25GB/s' holds nothing; give it a size above 0",
        "host=1GiB@0/s": "tier: 'host=1GiB@0/s' moves nothing; give it a rate above 0",
        "host=1GiB@1GB/s,never": "tier host: write is 'never'; write-back or write-through",
    }.items():
        with pytest.raises(InputError, match=message):
            Tier.parse(text)


def go(made: Scheduler) -> Any:
    """One step of a model that always says 7."""
    batch = made.step()
    made.commit(batch)
    for chunk in batch.chunks:
        if chunk.samples:
            made.append(chunk.request, 7)
            if chunk.request.generated >= chunk.request.max_tokens:
                made.finish(chunk.request)
    return batch


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_request_that_is_swapped_out_goes_on_where_it_was(preempt: Any, prefix_cache: bool) -> None:
    cache = cache_of(16, tier("host", 12), prefix_cache=prefix_cache)
    made = Scheduler(manager=cache, limits=Limits(), preempt=preempt)
    made.add("old", A, 30)
    new = made.add("new", range(100, 122), 30)
    while not (batch := go(made)).preempted:
        pass
    stored = 22 + new.generated - 1
    blocks = -(-stored // 4)
    if preempt == "swap":
        assert batch.traffic.written == (Moved("host", stored, blocks * BYTES),)
        assert cache.tiers.occupied()[0].swapped_bytes == blocks * BYTES
    while new.state == "waiting":
        batch = go(made)
    (chunk,) = (chunk for chunk in batch.chunks if chunk.request is new)
    if preempt == "swap":
        (read,) = batch.traffic.read
        assert (chunk.start, chunk.count) == (stored, 1), "nothing is computed again"
        assert cache.tiers.occupied()[0].swapped_bytes == 0
        assert read.bytes == -(-read.tokens // 4) * BYTES
        assert read.tokens == stored - (0 if not prefix_cache else (stored - read.tokens) // 4 * 4)
    elif not prefix_cache:
        assert (chunk.start, chunk.count) == (0, stored + 1)
    while made.has_work():
        go(made)
    assert new.generated == 30
    assert made.counters.swapped == (preempt == "swap")
    if preempt == "swap":
        assert made.counters.recomputed_tokens == 0


def test_a_full_tier_leaves_recomputation_and_an_abort_makes_room() -> None:
    cache = cache_of(24, tier("host", 9))
    made = Scheduler(manager=cache, limits=Limits(), preempt="swap")
    requests = [made.add(name, range(start, start + 30), 40) for name, start in (("a", 0), ("b", 100), ("c", 200))]
    while made.counters.preempted < 2:
        go(made)
    assert made.counters.swapped == 1
    assert [request.sequence.swapped is not None for request in requests] == [False, False, True]
    made.finish(requests[2])
    assert cache.tiers.occupied()[0].swapped_bytes == 0
    while made.has_work():
        go(made)
    assert [request.generated for request in requests[:2]] == [40, 40]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([(FULL,), (WINDOW,), (FULL, WINDOW)]),
    slabs=st.integers(12, 40),
    capacities=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    write=st.sampled_from(["write-back", "write-through"]),
    reclaim=st.sampled_from(["lru", "lfu", "fifo"]),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_everything_that_is_accepted_finishes_and_bytes_are_conserved(
    groups: tuple[Group, ...],
    slabs: int,
    capacities: list[int],
    write: Any,
    reclaim: str,
    prefix_cache: bool,
    seed: int,
) -> None:
    tiers = [tier(f"tier {level}", blocks, write=write) for level, blocks in enumerate(capacities)]
    layout = ArenaLayout.of(groups, slabs * ArenaLayout.of(groups, 1 << 24).slab_bytes)
    manager = CacheManager(groups, layout, prefix_cache=prefix_cache, reclaim=reclaim, tiers=tiers)
    made = Scheduler(manager=manager, limits=Limits(max_running=5, max_batch_tokens=23), preempt="swap")
    chance = random.Random(seed)
    requests = []
    for step in range(3000):
        if step < 40 and chance.random() < 0.6:
            prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 50))]
            try:
                requests.append(made.add(f"r{step}", prompt, chance.randrange(1, 40)))
            except DoesNotFit:
                continue
        if requests and chance.random() < 0.03:
            made.finish(chance.choice(requests))
        if not made.has_work():
            if step >= 40:
                break
            continue
        batch = go(made)
        assert batch.chunks or batch.preempted
        for request in made.running:
            for group, spec in enumerate(groups):
                assert request.sequence.blocks(group) == spec.live_blocks(request.sequence.length)
        conserved(manager, [request.sequence for request in made.waiting])
    assert not made.has_work()
    assert all(request.state == "ended" for request in requests)
    assert [manager.arena.held(group) for group in range(len(groups))] == [0] * len(groups)
    manager.clear()
    assert manager.arena.free_slabs == layout.num_slabs
    conserved(manager, [])


def conserved(manager: CacheManager, waiting: list[Sequence]) -> None:
    """Bytes of the device and of every tier add up."""
    arena, layout = manager.arena, manager.layout
    for group in range(len(manager.groups)):
        assert arena.free(group) + arena.cached(group) + arena.held(group) == arena.lent(group)
    lent = sum(arena.lent(group) // per for group, per in enumerate(layout.blocks_per_slab))
    assert lent + arena.free_slabs == layout.num_slabs
    swapped = sum(sequence.swapped.bytes for sequence in waiting if sequence.swapped)
    for level, (shelf, occupied) in enumerate(zip(manager.tiers._shelves, manager.tiers.occupied(), strict=True)):
        sizes = [
            sum(
                (group.fixed_blocks or manager.unit_tokens // group.block_tokens) * group.block_bytes
                for index, group in enumerate(manager.groups)
                if bits >> index & 1
            )
            for bits in shelf.blocks.values()
        ]
        assert occupied.cached_bytes == sum(sizes)
        assert occupied.swapped_bytes == (0 if level else swapped)
        assert occupied.cached_bytes + occupied.swapped_bytes <= shelf.tier.capacity_bytes


class Recording(Memory):
    """Remembers every whole block that was ever stored."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__(groups)
        self.written: set[Any] = set()

    def store(self, sequence: Sequence, start: int, end: int) -> None:
        super().store(sequence, start, end)
        for group in range(len(self.groups)):
            self.written.update((group, content) for _, content in self.slots(sequence, group, start, end))


class TieredMachine(CacheMachine):
    """The cache's state machine with tiers behind it: what is loaded was stored, and is what the sequence needs."""

    def __init__(self) -> None:
        super().__init__()
        self.away: list[Sequence] = []

    @precondition(lambda self: self.manager is None)
    @rule(
        shape=st.sampled_from(sorted(SHAPES)),
        slabs=st.integers(2, 16),
        capacities=st.lists(st.integers(1, 40), min_size=1, max_size=2),
        write=st.sampled_from(["write-back", "write-through"]),
    )
    def start(self, shape: str, slabs: int, capacities: list[int], write: Any) -> None:
        groups = SHAPES[shape]
        layout = ArenaLayout.of(groups, slabs * ArenaLayout.of(groups, 1 << 20).slab_bytes)
        tiers = [
            Tier(name=str(level), capacity_bytes=blocks * groups[0].block_bytes, bandwidth=1e9, write=write)
            for level, blocks in enumerate(capacities)
        ]
        self.manager = CacheManager(groups, layout, tiers=tiers)
        self.memory = Recording(groups)

    def picture(self, sequence: Sequence) -> Any:
        shelves = [(list(shelf.blocks.items()), shelf.swapped_bytes) for shelf in self.manager.tiers._shelves]
        return super().picture(sequence), shelves, sequence.swapped

    def reserve(self, sequence: Sequence, budget: int, admit_chunk: int | None = None) -> bool:
        reserve = self.manager.reserve

        def observed(*args: Any, **keys: Any) -> Reservation:
            reservation = reserve(*args, **keys)
            if reservation.loads:
                self.fill(sequence, reservation)
            return reservation

        self.manager.reserve = observed
        try:
            granted = super().reserve(sequence, budget, admit_chunk)
        finally:
            self.manager.reserve = reserve
        return granted

    def fill(self, sequence: Sequence, reservation: Reservation) -> None:
        """Do what the loads say: put into blocks what they are to hold, which must have been stored before."""
        moved = 0
        start = sequence.length - sum(load.tokens for load in reservation.loads)
        assert start % self.manager.unit_tokens == 0
        for group, spec in enumerate(self.manager.groups):
            for block, content in self.memory.slots(sequence, group, start, sequence.length):
                if block >= 0:
                    moved += spec.block_bytes
                    whole = spec.lifetime == "state" or len(content[-1]) % spec.block_tokens == 0
                    assert not whole or (group, content) in self.memory.written
                    self.memory.blocks[group][block] = content
        assert moved == sum(load.bytes for load in reservation.loads)
        for group in range(len(self.manager.groups)):
            self.memory.check(sequence, sequence.length, group)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        length = sequence.length
        held = self.manager.held_bytes(sequence)
        if self.manager.swap_out(sequence):
            assert (sequence.swapped.tokens, sequence.swapped.bytes) == (length, held)
            self.running.remove(sequence)
            self.away.append(sequence)
        else:
            assert sequence.length == length

    @precondition(lambda self: self.away)
    @rule(data=st.data(), budget=st.integers(1, 50))
    def come_back(self, data: st.DataObject, budget: int) -> None:
        sequence = data.draw(st.sampled_from(self.away))
        length = sequence.swapped.tokens
        if sequence.size == length:
            sequence.append(1)
        if self.reserve(sequence, budget):
            self.store([sequence])
            assert sequence.length > length
            assert sequence.swapped is None
            self.away.remove(sequence)
            self.running.append(sequence)

    @invariant()
    def tiers_hold_what_they_say(self) -> None:
        if self.manager is not None:
            conserved(self.manager, self.away)

    @invariant()
    def names_are_those_of_the_whole_prefix(self) -> None:
        if self.manager is None:
            return
        names = self.manager.tiers._digests
        for node in self.manager.tree.nodes():
            if node.digests is not None:
                path = [node]
                while path[-1].parent is not None:
                    path.append(path[-1].parent)
                tokens = [token for run in reversed(path) for token in run.tokens.tolist()]
                chain = names.chain(names.root(self.manager.tree.key_of(node)), self.manager.begin(tokens).tokens)
                assert node.digests == chain[-len(node.digests) :]
                assert len(node.digests) == node.tokens.size // self.manager.unit_tokens


TieredMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTieredMachine = TieredMachine.TestCase
