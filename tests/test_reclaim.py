"""The orders of reclaim: in the tree one by one, and in the replay without a clock, which must not differ."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_cache_machine import SHAPES, CacheMachine, Memory

from kvist.cache.arena import ArenaLayout
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.reclaim import ORDERS, Node, Order, optimal
from kvist.errors import InputError
from kvist.simulation.cache_only import CacheHits, cache_hits
from kvist.simulation.future import Future
from kvist.simulation.prompts import Prompts
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.traces.trace import Trace

MOONCAKE = Path(__file__).parents[2] / "shared/data/traces/mooncake_fast25_conversation.jsonl.gz"
shared_data = pytest.mark.skipif(not MOONCAKE.exists(), reason=f"{MOONCAKE} is not there")
NAMES = ("lru", "lfu", "fifo", "optimal")


def cache_of(blocks: int, block_tokens: int, reclaim: str | Order) -> CacheManager:
    only = Group(
        name="full",
        layer=Attention(kv_heads=1, key_dim=32, value_dim=32),
        layers=(0,),
        block_tokens=block_tokens,
        format=CacheFormat(),
    )
    return CacheManager((only,), ArenaLayout.of((only,), blocks * only.block_bytes), reclaim=reclaim)


def trace_of(requests: list[list[int]], block_tokens: int = 1, own: list[int] | None = None) -> Trace:
    """Requests by the ids of their blocks, each with ``own`` tokens behind them."""
    counts = [len(ids) for ids in requests]
    zeros = np.zeros(len(requests))
    return Trace(
        source="test",
        arrivals=zeros,
        timed=False,
        prompts=np.array(counts, np.int64) * block_tokens + np.array(own or zeros, np.int64),
        outputs=np.ones(len(requests), np.int64),
        block_tokens=block_tokens,
        blocks=np.array([block for ids in requests for block in ids], np.int64),
        offsets=np.cumsum([0, *counts]),
    )


def hits_of_the_manager(trace: Trace, blocks: int, reclaim: str) -> list[int]:
    """The same replay by the cache manager, tokens made from the ids."""
    size = trace.block_tokens or 1
    own = -1
    prompts = []
    for index, tokens in enumerate(trace.prompts.tolist()):
        named = trace.blocks_of(index)[:, None] * size + np.arange(size)
        rest = np.arange(own, own - (tokens - named.size), -1)
        own -= rest.size
        prompts.append(np.concatenate((named.ravel(), rest)).astype(np.int32))
    fits = [index for index, prompt in enumerate(prompts) if -(-prompt.size // size) <= blocks]
    uses: dict[int, list[int]] = {}
    for index in reversed(fits):
        for block in trace.blocks_of(index).tolist():
            uses.setdefault(block, []).append(index)

    def next_use(node: Node) -> float:
        later = uses.get(int(node.tokens[-1]) // size)
        return later[-1] if later else float("inf")

    cache = cache_of(blocks, size, optimal(next_use) if reclaim == "optimal" else reclaim)
    hits = []
    for index, prompt in enumerate(prompts):
        sequence = cache.begin(prompt)
        reservation = cache.reserve(sequence, prompt.size)
        assert reservation.granted == (index in fits)
        hits.append(reservation.hit_tokens)
        if reservation.granted:
            for block in trace.blocks_of(index).tolist():
                uses[block].pop()
            cache.commit(sequence, prompt.size)
            cache.release(sequence)
        assert cache.arena.free(0) + cache.arena.cached(0) + cache.arena.free_slabs == blocks
    return hits


@st.composite
def traces(draw: st.DrawFn, own: st.SearchStrategy[int] | None = None) -> Trace:
    """Paths of a small tree: an id names a path, so that equal ids are equal prefixes."""
    names: dict[tuple[int, ...], int] = {}
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=40))
    requests = [[names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))] for path in paths]
    size = draw(st.sampled_from([1, 2]))
    tails = st.integers(0, 5) if own is None else own
    return trace_of(requests, size, draw(st.lists(tails, min_size=len(paths), max_size=len(paths))))


@pytest.mark.parametrize("reclaim", NAMES)
@settings(max_examples=80, deadline=None)
@given(trace=traces(), blocks=st.integers(1, 24))
def test_the_replay_without_a_clock_hits_what_the_manager_hits(reclaim: str, trace: Trace, blocks: int) -> None:
    found = cache_hits(trace, blocks, reclaim=reclaim)
    # The manager matches whole blocks alone; of one found whole, the replay still computes the last token.
    whole = np.minimum(found.request_hits, (trace.prompts - 1) // trace.block_tokens * trace.block_tokens)
    assert whole.tolist() == hits_of_the_manager(trace, blocks, reclaim)
    assert found.refused == np.count_nonzero(-(-trace.prompts // trace.block_tokens) > blocks)
    assert found.hit_tokens == found.request_hits.sum()


@settings(max_examples=80, deadline=None)
@given(trace=traces(own=st.sampled_from([1, 3])), blocks=st.integers(8, 24))
def test_no_order_hits_more_than_the_one_that_knows_the_future(trace: Trace, blocks: int) -> None:
    """With a token behind the named blocks: a block that must be computed again could otherwise be spared."""
    best = cache_hits(trace, blocks, reclaim="optimal").hit_tokens
    assert cache_hits(trace).hit_tokens >= best
    for order in NAMES:
        assert best >= cache_hits(trace, blocks, reclaim=order).hit_tokens >= 0


@settings(max_examples=80, deadline=None)
@given(trace=traces(), blocks=st.integers(12, 24), more=st.integers(1, 12))
def test_more_memory_never_hurts_under_lru(trace: Trace, blocks: int, more: int) -> None:
    few, many = cache_hits(trace, blocks), cache_hits(trace, blocks + more)
    assert (few.request_hits <= many.request_hits).all()
    assert (many.request_hits <= cache_hits(trace).request_hits).all()


def mooncake(requests: int | None = None) -> Trace:
    columns: list[list[int]] = []
    prompts = []
    with gzip.open(MOONCAKE, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            columns.append(row["hash_ids"])
            prompts.append(row["input_length"])
    columns, prompts = columns[:requests], prompts[:requests]
    made = trace_of(columns, 512)
    return Trace(**{**vars(made), "prompts": np.array(prompts, np.int64)})


@shared_data
def test_golden_hits_of_the_conversation_trace() -> None:
    """Mooncake (FAST'25), conversation; the numbers are those of ../shared/data/README.md."""
    trace = mooncake()
    half = len(trace) // 2
    assert (trace.blocks.size, np.unique(trace.blocks).size) == (288_500, 182_790)
    everything = cache_hits(trace)
    assert round(100 * everything.hit_ratio, 2) == 37.36

    def last_half(found: CacheHits) -> float:
        return float(100 * found.request_hits[half:].sum() / trace.prompts[half:].sum())

    assert round(last_half(everything), 1) == 39.8
    for blocks, percent in {819: 4.65, 6553: 15.30, 26214: 33.00}.items():
        lru = last_half(cache_hits(trace, blocks))
        assert lru == pytest.approx(percent, abs=0.05)
        assert blocks != 6553 or lru < last_half(cache_hits(trace, blocks, reclaim="optimal")) < 39.8


@shared_data
@pytest.mark.parametrize("reclaim", NAMES)
def test_the_conversation_trace_through_the_manager(reclaim: str) -> None:
    trace = mooncake(600)
    ones = Trace(**{**vars(trace), "block_tokens": 1, "prompts": np.diff(trace.offsets)})
    for blocks in (819, 3276):
        assert cache_hits(ones, blocks, reclaim=reclaim).request_hits.tolist() == hits_of_the_manager(
            ones, blocks, reclaim
        )


@settings(max_examples=40, deadline=None)
@given(trace=traces(own=st.just(0)), blocks=st.integers(7, 20))
def test_the_future_of_a_trace_makes_the_optimal_order(trace: Trace, blocks: int) -> None:
    ones = Trace(**{**vars(trace), "block_tokens": 1, "prompts": np.diff(trace.offsets)})
    prompts = Prompts.of(ones)
    future = Future.of(prompts)
    cache = cache_of(blocks, 1, future.order())
    hits = []
    for index in range(len(ones)):
        tokens = prompts.tokens(index)
        sequence = cache.begin(tokens)
        hits.append(cache.reserve(sequence, tokens.size).hit_tokens)
        future.admit(index)
        cache.commit(sequence, tokens.size)
        cache.release(sequence)
    assert hits == cache_hits(ones, blocks, reclaim="optimal").request_hits.tolist()


def run(cache: CacheManager, *tokens: int) -> int:
    sequence = cache.begin(list(tokens))
    hit = cache.reserve(sequence, len(tokens)).hit_tokens
    cache.commit(sequence, len(tokens))
    cache.release(sequence)
    return hit


def held(cache: CacheManager, *tokens: int) -> int:
    return cache.tree.match(PrefixKey(), np.array(tokens, np.int32), len(tokens)).tokens


def test_lfu_keeps_what_many_have_used() -> None:
    cache = cache_of(6, 1, "lfu")
    run(cache, 1, 2)
    run(cache, 1, 2, 3)
    run(cache, 10, 11)
    run(cache, 20, 21, 22)
    assert (held(cache, 1, 2), held(cache, 10, 11), held(cache, 20, 21, 22)) == (2, 1, 3), "two uses outlive one"


def test_fifo_does_not_look_at_later_uses() -> None:
    cache = cache_of(6, 1, "fifo")
    run(cache, 1, 2)
    run(cache, 10, 11)
    run(cache, 1, 2)
    run(cache, 20, 21, 22)
    assert (held(cache, 1, 2), held(cache, 10, 11)) == (1, 2)
    run(cache, 1, 3)
    assert (held(cache, 1, 3), held(cache, 10, 11)) == (2, 1), "a prefix outlives what follows it, whatever its age"


def test_optimal_gives_up_what_is_used_last_block_by_block() -> None:
    future = {1: 10.0, 2: 10.0, 3: 20.0, 10: 15.0, 11: 15.0}
    cache = cache_of(5, 1, optimal(lambda node: future.get(int(node.tokens[-1]), float("inf"))))
    run(cache, 1, 2, 3)
    run(cache, 10, 11)
    run(cache, 20)
    assert (held(cache, 1, 2, 3), held(cache, 10, 11)) == (2, 2)
    run(cache, 30, 31)
    assert (held(cache, 1, 2, 3), held(cache, 10, 11)) == (2, 1)


def test_what_is_no_order_is_refused() -> None:
    with pytest.raises(InputError, match="reclaim: 'mru'; one of lru, lfu, fifo"):
        cache_of(4, 1, "mru")
    with pytest.raises(InputError, match="optimal needs to know the future"):
        cache_of(4, 1, "optimal")
    with pytest.raises(InputError, match="reclaim: 'mru'; one of lru, lfu, fifo, optimal"):
        cache_hits(trace_of([[1]]), reclaim="mru")
    with pytest.raises(InputError, match="blocks: 0; a cache holds at least 1"):
        cache_hits(trace_of([[1]]), 0)


def test_traces_that_name_nothing_share_nothing() -> None:
    named = trace_of([[1, 2], [1, 2]], 512)
    nameless = Trace(**{**vars(named), "block_tokens": None, "blocks": named.blocks[:0], "offsets": np.zeros(3, int)})
    found = cache_hits(nameless, 8)
    assert (found.hit_tokens, found.hit_ratio, found.prompt_tokens) == (0, 0.0, 2048)
    empty = trace_of([])
    assert cache_hits(empty, 8).hit_ratio == 0.0


def test_ids_may_be_hashes() -> None:
    small = trace_of([[1, 2, 3], [1, 2, 4], [1, 2, 4]], 4)
    large = Trace(**{**vars(small), "blocks": small.blocks * (1 << 60) - (1 << 62)})
    assert cache_hits(large, 3).request_hits.tolist() == cache_hits(small, 3).request_hits.tolist() == [0, 8, 11]


class OrderedMachine(CacheMachine):
    """The cache's state machine in another order of reclaim."""

    @precondition(lambda self: self.manager is None)
    @rule(shape=st.sampled_from(sorted(SHAPES)), slabs=st.integers(2, 24), reclaim=st.sampled_from(["lfu", "fifo", ""]))
    def start(self, shape: str, slabs: int, reclaim: str) -> None:
        groups = SHAPES[shape]
        layout = ArenaLayout.of(groups, slabs * ArenaLayout.of(groups, 1 << 20).slab_bytes)
        order = ORDERS.get(reclaim) or optimal(lambda node: int(node.tokens.sum()) % 7)
        self.manager = CacheManager(groups, layout, reclaim=order)
        self.memory = Memory(groups)


OrderedMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestOrderedMachine = OrderedMachine.TestCase
