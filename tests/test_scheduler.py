"""Continuous batching, chunked prefill, admission by memory, preemption: no tensors, exact decisions."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.batch import Batch
from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager
from kvist.errors import DoesNotFit, InputError
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention

FULL = Group(
    name="full",
    layer=Attention(kv_heads=1, key_dim=32, value_dim=32),
    layers=(0,),
    block_tokens=16,
    format=CacheFormat(),
)
WINDOW = Group(
    name="window-40",
    layer=Attention(kv_heads=1, key_dim=32, value_dim=32, window=40),
    layers=(1, 2),
    block_tokens=16,
    format=CacheFormat(),
)


# A window's block that is smaller than a slab can leave slabs scattered that the full group needs.
FULL_LARGE = replace(FULL, layers=(0, 1, 2, 3, 4))
WINDOW_SMALL = replace(WINDOW, layers=(5,))


def scheduler(slabs: int, groups: tuple[Group, ...] = (FULL,), **limits: int) -> Scheduler:
    layout = ArenaLayout.of(groups, 1 << 24)
    layout = ArenaLayout.of(groups, slabs * layout.slab_bytes)
    return Scheduler(manager=CacheManager(groups, layout), limits=Limits(**limits))


def shape(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.id, chunk.start, chunk.count, chunk.samples) for chunk in batch.chunks]


def go(made: Scheduler, token: int = 0) -> Batch:
    """One step of a model that always says ``token``; requests end at their ``max_tokens``."""
    batch = made.step()
    made.commit(batch)
    for chunk in batch.chunks:
        if chunk.samples:
            made.append(chunk.request, token)
            if chunk.request.generated >= chunk.request.max_tokens:
                made.finish(chunk.request)
    return batch


def test_prompts_are_cut_in_chunks_and_decodes_go_first() -> None:
    made = scheduler(100, max_batch_tokens=64)
    made.add("a", range(10), 8)
    assert shape(go(made)) == [("a", 0, 10, True)]
    made.add("b", range(100, 250), 8)
    assert shape(go(made)) == [("a", 10, 1, True), ("b", 0, 63, False)]
    assert shape(go(made)) == [("a", 11, 1, True), ("b", 63, 63, False)]
    assert shape(go(made)) == [("a", 12, 1, True), ("b", 126, 24, True)]
    assert shape(go(made)) == [("a", 13, 1, True), ("b", 150, 1, True)]


def test_requests_that_arrive_together_share_their_prefix_within_the_step() -> None:
    made = scheduler(200, max_batch_tokens=2048)
    for index in range(16):
        made.add(f"r{index}", [*range(1024), 5000 + index], 4)
    batch = go(made)
    assert shape(batch)[:2] == [("r0", 0, 1025, True), ("r1", 1024, 1, True)]
    assert batch.tokens == 1025 + 15
    assert made.counters.hit_tokens == 15 * 1024


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    made = scheduler(10)
    made.add("a", range(96), 20)
    made.add("b", range(1000, 1080), 20)
    assert shape(go(made)) == [("a", 0, 96, True)]
    assert [request.id for request in made.waiting] == ["b"]


def test_the_newest_is_preempted_and_comes_back_with_its_tokens() -> None:
    made = scheduler(8, max_batch_tokens=256)
    made.add("old", range(63), 40)
    made.add("new", range(1000, 1063), 40)
    preempted = None
    for _ in range(200):
        if not made.has_work():
            break
        batch = go(made, token=7)
        if batch.preempted:
            preempted = preempted or batch.preempted[0]
    assert preempted is not None
    assert preempted.id == "new"
    assert preempted.generated == 40
    assert made.counters.finished == 2
    assert made.counters.preempted >= 1
    assert made.manager.arena.held(0) == 0


def test_what_could_never_fit_is_refused_with_the_sum() -> None:
    made = scheduler(8)
    with pytest.raises(
        DoesNotFit, match=r"100 prompt tokens and 100 to generate store 199 tokens at most: 13 blocks x"
    ):
        made.add("a", range(100), 100)
    assert made.counters.refused == 1
    assert not made.has_work()
    made.add("a", range(100), 29)
    with pytest.raises(InputError, match="the context is 8192 tokens"):
        made.add("b", range(8190), 10)
    with pytest.raises(InputError, match="prompt: it has no tokens"):
        made.add("c", [], 10)
    with pytest.raises(InputError, match="max_tokens: 0"):
        made.add("c", [1], 0)


def test_without_max_tokens_a_request_may_fill_the_cache_but_no_more() -> None:
    made = scheduler(8)
    request = made.add("a", range(100))
    while made.has_work():
        go(made)
    assert request.generated == 29
    assert made.counters.preempted == 0


def test_a_prompts_chunk_shrinks_to_what_windows_leave_room_for() -> None:
    """The whole prompt in one chunk would need ten window blocks; the arena has seven."""
    made = scheduler(7, (WINDOW,), max_batch_tokens=2048)
    made.add("a", range(160), 4)
    assert [chunk.count for chunk in go(made).chunks] == [40]
    while made.has_work():
        assert go(made).chunks
    assert made.counters.preempted == 0


@pytest.mark.parametrize("key", ["max_running", "max_batch_tokens", "max_context"])
def test_limits_are_checked(key: str) -> None:
    with pytest.raises(InputError, match=f"{key}: 0; a whole number, at least 1"):
        Limits(**{key: 0})


@settings(max_examples=150, deadline=None)
@given(
    groups=st.sampled_from([(FULL,), (WINDOW,), (FULL, WINDOW), (FULL_LARGE, WINDOW_SMALL)]),
    slabs=st.integers(6, 40),
    batch_tokens=st.sampled_from([1, 7, 64, 300]),
    seed=st.integers(0, 1 << 30),
)
def test_everything_that_is_accepted_finishes_and_nothing_leaks(
    groups: tuple[Group, ...], slabs: int, batch_tokens: int, seed: int
) -> None:
    """Random arrivals, lengths and aborts in little memory: every request gets all its tokens, or was aborted."""
    made = scheduler(slabs, groups, max_batch_tokens=batch_tokens, max_running=6)
    chance = random.Random(seed)
    requests, aborted = [], set()
    for step in range(4000):
        if step < 60 and chance.random() < 0.5:
            prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 120))]
            try:
                requests.append(made.add(f"r{step}", prompt, chance.randrange(1, 60)))
            except DoesNotFit:
                continue
        if requests and chance.random() < 0.03:
            victim = chance.choice(requests)
            if victim in made.running or victim in made.waiting:
                aborted.add(victim.id)
                made.finish(victim)
        if not made.has_work():
            if step >= 60:
                break
            continue
        batch = go(made, token=chance.randrange(2))
        assert batch.tokens <= batch_tokens
        assert batch.chunks or batch.preempted, "a step with work did nothing"
    assert not made.has_work()
    for request in requests:
        assert request.id in aborted or request.generated == request.max_tokens
    for group in range(len(groups)):
        assert made.manager.arena.held(group) == 0
    made.manager.clear()
    assert made.manager.arena.free_slabs == made.manager.layout.num_slabs


@pytest.mark.parametrize("prompt", [33, 60, 90, 110])
@pytest.mark.parametrize("batch_tokens", [4, 16, 64])
def test_a_request_as_long_as_the_arena_allows_ends(prompt: int, batch_tokens: int) -> None:
    """Accepted is promised, however the window's few live blocks come to lie."""
    for slabs in range(4, 14):
        made = scheduler(slabs, (FULL_LARGE, WINDOW_SMALL), max_batch_tokens=batch_tokens)
        if made.admission.longest() <= prompt:
            continue
        for _ in range(2):
            request = made.add("longest", range(prompt))
            for _ in range(2000):
                if not made.has_work():
                    break
                go(made)
            assert request.generated == request.max_tokens == made.admission.longest() + 1 - prompt
