"""States, their checkpoints, blocks of several sizes and encoders in the cache manager; block 16 unless said."""

from collections.abc import Sequence as Seq

import numpy as np
import pytest

from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.sequence import BlockCopy, Reservation, Sequence
from kvist.cache.tier import Tier, Write
from kvist.errors import InputError
from kvist.planning.capacity import allocated_bytes, capacity_of
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.gallery import every_model
from kvist.spec.layers import Attention, Compressed, Cross, Indexer, Latent, Layer, State
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_gallery

BF16 = CacheFormat()
FULL = Attention(kv_heads=1, key_dim=32, value_dim=32)
WINDOW = Attention(kv_heads=1, key_dim=32, value_dim=32, window=40)
MAMBA = State(name="mamba", state_elements=300)
CONV = State(name="short-conv", conv_elements=64)
INDEXER = Indexer(heads=1, dim=16)
V4 = (
    Latent(rank=48, rope_dim=16, window=128),
    Compressed(rank=48, rope_dim=16, window=128, ratio=4, indexer=INDEXER),
    Compressed(rank=48, rope_dim=16, window=128, ratio=128),
)


def groups(*layers: Layer) -> tuple[Group, ...]:
    return groups_of(ModelSpec(name="toy", source="test", layers=layers, max_context=8192), BF16)


def manager(*layers: Layer, slabs: int = 200, **options: int) -> CacheManager:
    made = groups(*layers)
    layout = ArenaLayout.of(made, slabs * ArenaLayout.of(made, 1 << 24).slab_bytes)
    return CacheManager(made, layout, **options)


class Run:
    """One sequence, in steps that are as long as they may be."""

    def __init__(self, cache: CacheManager, tokens: Seq[int]) -> None:
        self.cache = cache
        self.sequence: Sequence = cache.begin(np.array(tokens, np.int32))
        self.ends: list[int] = []
        self.saved: list[Seq[BlockCopy]] = []
        self.first: Reservation | None = None
        self.go()

    def go(self) -> "Run":
        while self.sequence.length < self.sequence.size:
            reservation = self.cache.reserve(self.sequence, self.sequence.size)
            assert reservation.granted
            self.first = self.first or reservation
            self.saved.append(self.cache.commit(self.sequence, reservation.limit))
            self.ends.append(reservation.limit)
        return self

    def say(self, tokens: Seq[int]) -> "Run":
        for token in tokens:
            self.sequence.append(token)
            self.go()
        return self

    def release(self) -> "Run":
        self.cache.release(self.sequence)
        return self

    @property
    def hit(self) -> int:
        assert self.first is not None
        return self.first.hit_tokens


def checkpoints(cache: CacheManager) -> list[int]:
    return sorted(node.end for node in cache.tree.nodes() if node.checkpoint)


def test_a_state_is_taken_at_once_and_held_whatever_the_length() -> None:
    cache = manager(FULL, MAMBA, MAMBA, CONV, prefix_cache=False)
    run = Run(cache, range(5))
    tables = [run.sequence.tables[group].tolist() for group in (1, 2)]
    assert [len(table) for table in tables] == [2, 1]
    run.say(range(40))
    assert [run.sequence.tables[group].tolist() for group in (1, 2)] == tables
    assert [cache.arena.held(group) for group in range(3)] == [3, 2, 1]
    assert cache.held_bytes(run.sequence) == allocated_bytes(cache.groups, 45)
    run.release()
    assert [cache.arena.held(group) for group in range(3)] == [0, 0, 0]


def test_a_prompt_is_cut_at_its_last_boundary_and_found_again_there() -> None:
    cache = manager(FULL, MAMBA, MAMBA)
    cold = Run(cache, range(70))
    assert cold.ends == [64, 70]
    assert [len(copies) for copies in cold.saved] == [2, 0]
    assert [copy.source for copy in cold.saved[0]] == cold.sequence.tables[1].tolist()
    kept = [copy.target for copy in cold.saved[0]]
    assert (cache.arena.held(1), cache.arena.cached(1)) == (2, 2)
    warm = Run(cache, [*range(64), 500, 501])
    assert warm.hit == 64
    assert warm.first is not None
    assert [(copy.source, copy.target) for copy in warm.first.copies] == list(
        zip(kept, warm.sequence.tables[1].tolist(), strict=True)
    )
    assert warm.sequence.tables[0][:4].tolist() == cold.sequence.tables[0][:4].tolist()


def test_a_repeat_of_whole_blocks_computes_the_last_of_them() -> None:
    cache = manager(FULL, MAMBA)
    assert Run(cache, range(64)).ends == [48, 64]
    assert Run(cache, range(64)).hit == 48


def test_where_prompts_part_the_third_goes_on() -> None:
    cache = manager(FULL, WINDOW, MAMBA)
    shared = list(range(100))
    Run(cache, [*shared, *range(1000, 1050)]).release()
    second = Run(cache, [*shared, *range(2000, 2050)]).release()
    assert (second.hit, second.ends) == (0, [96, 144, 150])
    third = Run(cache, [*shared, *range(3000, 3050)])
    assert (third.hit, third.ends) == (96, [144, 150])
    assert (third.sequence.tables[1][:3] == -1).all()


def test_an_answer_takes_its_checkpoint_along_and_the_next_turn_finds_it() -> None:
    cache = manager(FULL, WINDOW, MAMBA, CONV)
    run = Run(cache, range(70)).say(range(500, 530))
    assert checkpoints(cache) == [64, 96]
    assert sum(len(copies) for copies in run.saved) == 3 * 2
    assert len([node for node in cache.tree.nodes() if node.end > 64]) == 1, "its run grows, and is not cut in blocks"
    assert cache.arena.cached(2) == 2
    run.release()
    turn = Run(cache, [*run.sequence.known().tolist(), *range(900, 950)])
    assert turn.hit == 96
    # Somebody went on from it: it stays.
    turn.say(range(600, 620))
    assert checkpoints(cache) == [64, 96, 144, 160]


def test_two_answers_that_part_keep_their_own() -> None:
    cache = manager(FULL, MAMBA)
    first = Run(cache, range(70)).say(range(500, 515))
    second = Run(cache, range(70)).say([*range(500, 512), 7, 8, 9])
    assert (second.hit, checkpoints(cache)) == (64, [64, 80])
    # Both came by 80, so that neither takes it along.
    first.say(range(600, 615))
    assert checkpoints(cache) == [64, 80, 96]
    again = Run(cache, [*range(70), *range(500, 515), 1])
    assert again.hit == 80
    assert first.sequence.tables[0][:5].tolist() == again.sequence.tables[0][:5].tolist()


def test_checkpoints_at_regular_distances() -> None:
    cache = manager(FULL, MAMBA, checkpoint_every=30)
    run = Run(cache, range(100))
    assert run.ends == [32, 64, 96, 100]
    run.say(range(80))
    assert checkpoints(cache) == [32, 64, 96, 128, 160, 176]
    assert Run(cache, [*range(70), 7]).hit == 64


def test_their_number_is_bounded_and_the_least_recently_used_goes() -> None:
    cache = manager(FULL, MAMBA, max_checkpoints=2)
    for start in (0, 1000, 2000):
        Run(cache, range(start, start + 70)).release()
        if start == 1000:
            assert Run(cache, range(70)).release().hit == 64
    assert [Run(cache, range(start, start + 70)).release().hit for start in (0, 2000, 1000)] == [64, 64, 0]
    assert len(checkpoints(cache)) == 2


def test_without_checkpoints_nothing_is_cut_and_nothing_hit() -> None:
    cache = manager(FULL, MAMBA, max_checkpoints=0)
    assert Run(cache, range(70)).release().ends == [70]
    assert Run(cache, range(70)).hit == 0
    assert list(cache.tree.nodes()) == []
    cache = manager(FULL, MAMBA, prefix_cache=False)
    assert Run(cache, range(70)).ends == [70]


def exactly(layers: Seq[Layer], sequences: int, length: int, checkpoints: int) -> CacheManager:
    """A cache of so many sequences of a length, and checkpoints."""
    made = groups(*layers)
    layout = ArenaLayout.of(made, 1 << 24)
    blocks = [sequences * group.peak_blocks(length, length) + checkpoints * (group.fixed_blocks or 0) for group in made]
    return CacheManager(made, ArenaLayout.of(made, layout.slabs_for(blocks) * layout.slab_bytes))


# One block of either group to a slab, so that counts are exact.
LARGE = State(name="large", state_elements=512)


def test_without_memory_that_is_free_none_is_taken() -> None:
    cache = exactly((FULL, LARGE), 2, 70, 0)
    assert cache.layout.blocks_per_slab == (1, 1)
    first, second = (Run(cache, range(start, start + 70)) for start in (0, 1000))
    assert first.ends == second.ends == [64, 70]
    # The first had room for one until the second needed it.
    assert checkpoints(cache) == []
    assert cache.arena.free_slabs == 0
    assert [cache.arena.held(group) for group in range(2)] == [10, 2]


def test_a_sequence_takes_over_a_checkpoint_where_there_is_no_room_for_a_copy() -> None:
    cache = exactly((FULL, LARGE), 1, 70, 0)
    cache = CacheManager(cache.groups, ArenaLayout.of(cache.groups, 6 * cache.layout.slab_bytes))
    long = cache.begin(np.arange(80, dtype=np.int32))
    kept = cache.reserve(long, 64)
    copies = cache.commit(long, kept.limit)
    assert [copy.group for copy in copies] == [1]
    cache.release(long)
    assert cache.arena.cached(1) == 1
    again = cache.begin(np.arange(80, dtype=np.int32))
    reservation = cache.reserve(again, 80, admit_chunk=80)
    assert (reservation.granted, reservation.hit_tokens, list(reservation.copies)) == (True, 64, [])
    assert again.tables[1].tolist() == [copies[0].target]
    assert checkpoints(cache) == []
    assert (cache.arena.held(1), cache.arena.cached(1)) == (1, 0)


def test_what_nobody_would_go_on_from_is_reclaimed_before_what_somebody_would() -> None:
    cache = exactly((FULL, LARGE), 1, 200, 5)
    run = Run(cache, range(70)).release()
    turn = Run(cache, [*run.sequence.known().tolist(), *range(500, 530)]).release()
    assert (turn.hit, checkpoints(cache)) == (64, [64, 96])
    other = Run(cache, range(1000, 1030)).release()
    third = Run(cache, [*turn.sequence.known().tolist(), *range(600, 630)]).release()
    assert (third.hit, checkpoints(cache)) == (96, [16, 64, 96, 128])
    # 64 was passed by since; then goes the other prompt, then the last run of the conversation.
    order = []
    while cache.reclaimer.reclaim(1):
        order.append(checkpoints(cache))
    assert order[:3] == [[16, 96, 128], [96, 128], [128]]
    assert other.hit == 0


def test_a_model_of_states_alone_keeps_runs_that_end_in_checkpoints_and_no_others() -> None:
    cache = manager(MAMBA, MAMBA, slabs=12)
    for start in range(0, 100_000, 1000):
        Run(cache, range(start, start + 70)).release()
    per_checkpoint = cache.layout.total_blocks(0) // 2
    nodes = list(cache.tree.nodes())
    assert 0 < len(nodes) <= per_checkpoint
    assert all(node.checkpoint or node.children for node in nodes)
    assert cache.tree.tokens == 64 * len(nodes)
    assert Run(cache, range(99_000, 99_070)).hit == 64
    assert Run(cache, range(70)).hit == 0


def test_compressed_layers_keep_tables_in_their_own_blocks_and_share_what_all_can() -> None:
    cache = manager(*V4, slabs=4000)
    sizes = {group.name: group.block_tokens for group in cache.groups}
    assert sizes == {"latent-window-128": 16, "compressed-4": 16, "compressed-128": 128}
    assert (cache.block_tokens, cache.unit_tokens) == (16, 128)
    run = Run(cache, range(300))
    assert run.ends == [300]
    assert [table.size for table in run.sequence.tables] == [19, 19, 2]
    for token in range(300, 420):
        run.say([token])
        assert cache.held_bytes(run.sequence) == allocated_bytes(cache.groups, run.sequence.length)
    assert run.sequence.tables[2].size == 3
    run.release()
    assert Run(cache, range(390)).release().hit == 256, "the window before 384 was given back"
    warm = Run(cache, [*range(390), 7])
    assert warm.hit == 384
    assert [table.size for table in warm.sequence.tables] == [25, 25, 3]
    # Finer than 128 tokens no group of entries of 128 could go on.
    assert Run(cache, [*range(383), 7]).hit == 256


def test_an_encoder_has_its_blocks_and_no_prefix_is_reused() -> None:
    cross = Cross(kv_heads=1, key_dim=32, value_dim=32, encoder_tokens=50)
    cache = manager(FULL, cross)
    run = Run(cache, range(64))
    assert [table.size for table in run.sequence.tables] == [4, 4]
    run.release()
    assert Run(cache, range(64)).hit == 0
    fork = cache.fork(Run(cache, range(30)).sequence)
    assert fork is not None
    assert [copy.group for copy in fork.copies] == [0], "what an encoder said is shared"


def test_a_fork_copies_states_and_what_is_open_of_a_unit() -> None:
    cache = manager(*V4, MAMBA, MAMBA, slabs=4000)
    sequence = Run(cache, range(150)).sequence
    fork = cache.fork(sequence)
    assert fork is not None
    assert [copy.group for copy in fork.copies] == [0, 0, 1, 1, 3, 3]
    for twin in (sequence, fork.sequence):
        assert cache.held_bytes(twin) == allocated_bytes(cache.groups, 150)
        cache.release(twin)
    assert all(cache.arena.held(group) == 0 for group in range(4))


def test_the_picture_adds_up_with_every_kind_of_memory() -> None:
    cross = Cross(kv_heads=1, key_dim=32, value_dim=32, encoder_tokens=50)
    for layers, empty in (
        ((FULL, MAMBA, WINDOW), 10 * 128 * 2),
        ((*V4, MAMBA), 10 * 3 * 128 + 3 * (128 + 32)),
        ((FULL, cross), 10 * 128 + 14 * 128),
    ):
        cache = manager(*layers, slabs=4000)
        Run(cache, range(500)).release()
        run = Run(cache, range(1000, 1150))
        seen = cache.snapshot({"a": run.sequence})
        assert sum(seen["bytes"].values()) == seen["arena"]["bytes"] == cache.layout.total_bytes
        tails = sum(
            cache.arena.lent(index) // per * (cache.layout.slab_bytes - per * size)
            for index, (per, size) in enumerate(
                zip(cache.layout.blocks_per_slab, cache.layout.block_bytes, strict=True)
            )
        )
        assert seen["bytes"]["waste"] == tails + empty


def test_a_scheduler_passes_the_copies_on_and_splits_prompts_at_checkpoints() -> None:
    cache = manager(FULL, MAMBA)
    made = Scheduler(manager=cache, limits=Limits(max_batch_tokens=128, max_context=4096))
    steps = []
    for prompt in (range(100), [*range(100), 7]):
        made.add(f"r{len(steps)}", np.array(prompt, np.int32), 2)
        while made.has_work():
            batch = made.step()
            saved = made.commit(batch)
            steps.append(([(c.start, c.count, c.samples) for c in batch.chunks], len(batch.copies), len(saved)))
            for chunk in batch.chunks:
                if chunk.samples:
                    made.append(chunk.request, 0)
                    if chunk.request.generated >= chunk.request.max_tokens:
                        made.finish(chunk.request)
    assert steps == [
        ([(0, 96, False)], 0, 1), ([(96, 4, True)], 0, 0), ([(100, 1, True)], 0, 0),
        ([(96, 5, True)], 1, 0), ([(101, 1, True)], 0, 0),
    ]  # fmt: skip
    assert made.counters.hit_tokens == 96


def test_the_plans_users_of_a_hybrid_run_at_once() -> None:
    """Four layers with a cache and 24 with states of 1 MiB, as Qwen3-Next's ratio has them, in 2 GiB at 4k."""
    layers = (*[State(name="gated-delta", state_elements=2**18)] * 3, Attention(kv_heads=2, key_dim=256, value_dim=256))
    spec = ModelSpec(name="hybrid", source="test", layers=layers * 4, max_context=8192)
    made = groups_of(spec, BF16)
    planned = capacity_of(spec, BF16, made, cache_bytes=1 << 30, context=4096)
    cache = CacheManager(made, planned.layout)
    scheduler = Scheduler(manager=cache, limits=Limits(max_context=8192, max_batch_tokens=4096))
    for user in range(planned.users_paged):
        scheduler.add(f"user {user}", np.arange(user * 10_000, user * 10_000 + 4090, dtype=np.int32), 7)
    while any(request.sequence.size < 4096 for request in scheduler.running) or scheduler.waiting:
        batch = scheduler.step()
        assert not batch.preempted
        scheduler.commit(batch)
        for chunk in batch.chunks:
            if chunk.samples and chunk.request.sequence.size < 4096:
                scheduler.append(chunk.request, 0)
    assert len(scheduler.running) == planned.users_paged > 10


@pytest.mark.parametrize(
    ("key", "value"), [("checkpoint_every", 0), ("checkpoint_every", 1.5), ("max_checkpoints", -1)]
)
def test_bad_numbers_are_named(key: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{key}: {value}; a whole number"):
        manager(FULL, MAMBA, **{key: value})  # type: ignore[arg-type]


def gallery_shapes() -> list[tuple[Group, ...]]:
    """Groups of one model of the gallery for each combination of rules by which layers remember."""
    found: dict[tuple[object, ...], tuple[Group, ...]] = {}
    for model in every_model():
        if model.like is None:
            made = groups_of(read_gallery(model), BF16, encoder_tokens=1500)
            found.setdefault(tuple((group.name, group.block_tokens) for group in made), made)
    return list(found.values())


def test_every_kind_of_model_of_the_gallery_is_managed() -> None:
    """What is held is what is planned, at every step of two requests of which the second can go on from the first."""
    shapes = gallery_shapes()
    lifetimes = {group.lifetime for made in shapes for group in made}
    assert lifetimes == {"full", "window", "chunk", "compressed", "state", "cross"}
    for made in shapes:
        needed = sum(3 * group.peak_blocks(1200, 512) * group.block_bytes for group in made)
        cache = CacheManager(made, ArenaLayout.of(made, 2 * needed + 64 * max(group.block_bytes for group in made)))
        fixed = {group.lifetime for group in made if group.fixed_blocks is not None}
        hits = []
        for last in (5, 6):
            sequence = cache.begin(np.array([*range(1000), last], np.int32))
            while sequence.size < 1010:
                reservation = cache.reserve(sequence, 512)
                assert reservation.granted
                assert cache.held_bytes(sequence) == allocated_bytes(made, sequence.length, sequence.in_flight)
                cache.commit(sequence, reservation.limit)
                assert cache.held_bytes(sequence) == allocated_bytes(made, sequence.length)
                if sequence.length == sequence.size:
                    sequence.append(last)
            hits.append(sequence.hit_tokens)
            cache.release(sequence)
        names = [group.name for group in made]
        assert hits == [0, 0 if "cross" in fixed else 1000 // cache.unit_tokens * cache.unit_tokens], names
        assert all(cache.arena.held(group) == 0 for group in range(len(made)))


@pytest.mark.parametrize("write", ["write-back", "write-through"])
def test_a_tier_keeps_a_checkpoint_with_the_run_that_ends_there(write: Write) -> None:
    cache = exactly((FULL, LARGE), 1, 100, 1)
    tier = Tier(name="host", capacity_bytes=1 << 20, bandwidth=1e9, write=write)
    cache = CacheManager(cache.groups, cache.layout, tiers=[tier])
    Run(cache, range(70)).release()
    for start in range(1000, 10_000, 1000):
        Run(cache, range(start, start + 70)).release()
    warm = Run(cache, [*range(64), 7, 8])
    assert warm.first is not None
    assert warm.hit == 64
    assert warm.first.copies == ()
    # Four blocks of tokens, and the state.
    sizes = [group.block_bytes for group in cache.groups]
    assert [(load.tokens, load.bytes) for load in warm.first.loads] == [(64, 4 * sizes[0] + sizes[1])]
    assert Run(cache.__class__(cache.groups, cache.layout), [*range(64), 7]).hit == 0


def test_a_sequence_is_swapped_out_and_in_with_its_state() -> None:
    cache = manager(FULL, WINDOW, MAMBA)
    cache = CacheManager(cache.groups, cache.layout, tiers=[Tier(name="host", capacity_bytes=1 << 20, bandwidth=1e9)])
    run = Run(cache, range(70)).say(range(500, 505))
    held = cache.held_bytes(run.sequence)
    assert held == allocated_bytes(cache.groups, 75)
    assert cache.swap_out(run.sequence)
    assert all(cache.arena.held(group) == 0 for group in range(3))
    cache.clear()
    run.sequence.append(7)
    reservation = cache.reserve(run.sequence, 10)
    assert (reservation.hit_tokens, reservation.limit, [load.bytes for load in reservation.loads]) == (75, 76, [held])
    assert cache.held_bytes(run.sequence) == allocated_bytes(cache.groups, 75, 1)
