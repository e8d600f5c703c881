"""The behaviours of a block manager worth holding, one by one; block 16 unless said."""

import numpy as np
import pytest

from kvist.cache.arena import ArenaLayout
from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.errors import DoesNotFit
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec


def group(block: int = 16, window: int | None = None, layers: int = 2) -> Group:
    return Group(
        name="full" if window is None else f"window-{window}",
        layer=Attention(kv_heads=2, key_dim=32, value_dim=32, window=window),
        layers=tuple(range(layers)),
        block_tokens=block,
        format=CacheFormat(),
    )


def manager(blocks: int, block: int = 16) -> CacheManager:
    only = group(block)
    return CacheManager((only,), ArenaLayout.of((only,), blocks * only.block_bytes))


def run(cache: CacheManager, tokens: list[int], salt: str = "") -> Sequence:
    sequence = cache.begin(tokens, PrefixKey(salt=salt))
    reservation = cache.reserve(sequence, len(tokens))
    assert reservation.granted
    cache.commit(sequence, reservation.limit)
    return sequence


def test_a_fully_cached_prompt_computes_at_least_its_last_token() -> None:
    cache = manager(32)
    cache.release(run(cache, list(range(64))))
    assert run(cache, list(range(64))).hit_tokens == 48
    assert run(cache, list(range(65))).hit_tokens == 64


def test_a_failed_reservation_changes_nothing() -> None:
    """Five free, six hit of which three are reclaimable, three new needed: it fails and nothing moves."""
    cache = manager(11)
    first = run(cache, list(range(48)))  # blocks 0 to 2, held
    second = run(cache, list(range(96)))  # three more
    cache.release(second)  # cached now
    assert (cache.arena.free(0) + cache.arena.free_slabs, cache.arena.cached(0)) == (5, 3)
    third = cache.begin(list(range(96 + 16 * 6)))
    before = [refs.tolist() for refs in cache.arena.refs]
    assert not cache.reserve(third, 1000).granted
    assert [refs.tolist() for refs in cache.arena.refs] == before
    assert cache.arena.cached(0) == 3
    assert third.tables[0].size == 0
    # One block fewer fits exactly: the hit blocks count as needed although they are not newly allocated.
    assert cache.reserve(cache.begin(list(range(96 + 16 * 5))), 1000).granted
    assert cache.arena.shortage([1]) == 1
    assert cache.arena.cached(0) == 0
    assert first.hit_tokens == 0


def test_another_salt_never_hits() -> None:
    cache = manager(32)
    cache.release(run(cache, list(range(64)), salt="a"))
    assert run(cache, list(range(65)), salt="b").hit_tokens == 0
    assert run(cache, list(range(65)), salt="").hit_tokens == 0
    assert run(cache, list(range(65)), salt="a").hit_tokens == 64


@pytest.mark.parametrize("field", ["model", "format", "cartridge", "adapter", "salt"])
def test_every_part_of_the_prefix_key_keeps_caches_apart(field: str) -> None:
    cache = manager(32)
    sequence = cache.begin(list(range(64)), PrefixKey(**{field: "one"}))
    cache.commit(sequence, cache.reserve(sequence, 64).limit)
    other = cache.begin(list(range(64)), PrefixKey(**{field: "two"}))
    assert cache.reserve(other, 64).hit_tokens == 0
    same = cache.begin(list(range(64)), PrefixKey(**{field: "one"}))
    assert cache.reserve(same, 64).hit_tokens == 48


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [("TTFTFFTTFTTT", 12), ("TTFTFFTTFFFF", 8), ("TF", 1), ("FF", 0), ("", 0), ("FTT", 3)],
)
def test_the_longest_prefix_that_a_window_can_reuse(flags: str, blocks: int) -> None:
    """Block 2, window 4."""
    present = np.array([flag == "T" for flag in flags], bool)
    assert group(2, window=4).reusable_blocks(present) == blocks


def test_the_tree_stores_a_shared_run_once_and_matching_changes_nothing() -> None:
    cache = manager(16, block=2)
    cache.release(run(cache, [1, 2, 3, 4, 5, 6, 7, 8]))
    cache.release(run(cache, [1, 2, 9, 10]))
    assert cache.tree.tokens == 10
    before = [(node.id, node.end, node.users) for node in cache.tree.nodes()]
    tokens = np.array([1, 2, 3, 4, 999], np.int32)
    assert cache.tree.match(PrefixKey(), tokens, tokens.size).tokens == 4
    assert [(node.id, node.end, node.users) for node in cache.tree.nodes()] == before


def test_requests_of_one_step_share_what_the_first_of_them_will_store() -> None:
    cache = manager(64)
    shared = list(range(320))
    first, second = cache.begin([*shared, 1000]), cache.begin([*shared, 2000])
    assert cache.reserve(first, 2048).hit_tokens == 0
    assert cache.reserve(second, 2048).hit_tokens == 320
    assert first.tables[0][:20].tolist() == second.tables[0][:20].tolist()


def test_a_failed_step_takes_its_blocks_out_of_the_tree() -> None:
    cache = manager(64)
    first, second = cache.begin(list(range(100))), cache.begin([*range(64), 7])
    cache.reserve(first, 2048)
    cache.reserve(second, 2048)
    cache.abandon([first, second])
    assert list(cache.tree.nodes()) == []
    assert cache.arena.held(0) == cache.arena.cached(0) == 0
    assert run(cache, list(range(100))).hit_tokens == 0


def test_least_recently_used_leaves_go_first_and_from_their_tails() -> None:
    cache = manager(12)
    old, new = list(range(96)), list(range(1000, 1096))
    cache.release(run(cache, old))
    cache.release(run(cache, new))
    cache.release(run(cache, list(range(2000, 2048))))  # takes three blocks from the old one's tail
    tokens = np.array(old, np.int32)
    assert cache.tree.match(PrefixKey(), tokens, 96).tokens == 48
    tokens = np.array(new, np.int32)
    assert cache.tree.match(PrefixKey(), tokens, 96).tokens == 96


def test_a_window_layer_holds_its_window_and_the_chunk_in_flight() -> None:
    only = group(16, window=64)
    cache = CacheManager((only,), ArenaLayout.of((only,), 64 * only.block_bytes), prefix_cache=False)
    sequence = cache.begin(list(range(1000)))
    most = 0
    while sequence.length < 1000:
        reservation = cache.reserve(sequence, 128)
        most = max(most, sequence.blocks(0))
        assert sequence.blocks(0) <= only.peak_blocks(reservation.limit, 128)
        cache.commit(sequence, reservation.limit)
        assert sequence.blocks(0) == only.live_blocks(sequence.length) <= 64 // 16 + 1
    assert most == (63 + 128 + 15) // 16 == only.peak_blocks(1000, 128) - 1, "chunks begin at block boundaries here"


def test_both_groups_agree_on_the_longest_prefix() -> None:
    groups = (group(16), group(16, window=32, layers=5))
    layout = ArenaLayout.of(groups, 400 * groups[1].block_bytes)
    cache = CacheManager(groups, layout)
    cache.release(run(cache, list(range(320))))
    sequence = run(cache, [*range(160), 5000])
    assert sequence.hit_tokens == 160
    assert (sequence.tables[1][:8] == -1).all(), "a window does not hold what it does not see"
    cache.release(sequence)
    # Without the window's blocks before the branch, the full group's 160 tokens are of no use.
    while cache.reclaimer._reclaim_stale():
        pass
    cache.reclaimer._reclaim_idle_windows()
    assert run(cache, [*range(160), 6000]).hit_tokens == 0


def test_slabs_move_between_groups() -> None:
    groups = (group(16), group(16, window=32, layers=10))
    layout = ArenaLayout.of(groups, 52 * groups[1].block_bytes)
    cache = CacheManager(groups, layout)
    cache.release(run(cache, list(range(640))))
    lent = [cache.arena.lent(index) for index in range(2)]
    longest = cache.promises.longest(16, 8192)
    sequence = cache.begin(list(range(5000, 5000 + longest)))
    while sequence.length < longest:
        reservation = cache.reserve(sequence, 16)
        assert reservation.granted
        cache.commit(sequence, reservation.limit)
    assert cache.arena.lent(0) > lent[0]


@pytest.mark.parametrize("memory", [0, 1000])
def test_an_arena_too_small_for_its_groups_says_what_would_do(memory: int) -> None:
    only = group()
    with pytest.raises(DoesNotFit, match=r"memory: .* at least 8 KiB"):
        ArenaLayout.of((only,), memory)


def test_slab_tails_waste_little() -> None:
    """Shapes whose blocks have awkward ratios still waste at most 1 % in tails."""
    for layers, windows in [(3, 15), (4, 22), (18, 18), (10, 52)]:
        groups = (group(16, layers=layers), group(16, window=512, layers=windows))
        layout = ArenaLayout.of(groups, 1 << 30)
        for per_slab, size in zip(layout.blocks_per_slab, layout.block_bytes, strict=True):
            assert (layout.slab_bytes - per_slab * size) / layout.slab_bytes <= 0.01


def test_equal_layers_share_a_group() -> None:
    full = Attention(kv_heads=1, key_dim=256, value_dim=256)
    window = Attention(kv_heads=1, key_dim=256, value_dim=256, window=512)
    spec = ModelSpec(name="gemma", source="test", layers=(window, window, full) * 2, max_context=8192)
    names = {made.name: made.layers for made in groups_of(spec, CacheFormat())}
    assert names == {"window-512": (0, 1, 3, 4), "full": (2, 5)}


def test_a_fork_shares_whole_blocks_and_copies_the_open_one() -> None:
    cache = manager(8)
    sequence = run(cache, list(range(40)))
    fork = cache.fork(sequence)
    assert fork is not None
    assert fork.sequence.tables[0][:2].tolist() == sequence.tables[0][:2].tolist()
    assert [(copy.source, copy.target) for copy in fork.copies] == [(sequence.tables[0][2], fork.sequence.tables[0][2])]
    assert cache.arena.held(0) == 4
    cache.release(sequence)
    cache.release(fork.sequence)
    assert cache.arena.held(0) == 0


def test_a_decode_goes_past_a_leaf_whose_block_a_fork_still_has() -> None:
    """Reclaiming that leaf frees nothing: the next one goes as well."""
    cache = manager(5, block=4)
    answered = run(cache, [0] * 4)
    for _ in range(4):
        answered.append(0)
        assert cache.extend([answered], 0, 1) or cache.reserve(answered, 1).granted
        cache.commit(answered, answered.size)
    fork = cache.fork(answered)
    assert fork is not None
    cache.release(answered)
    cache.release(run(cache, [1] * 4))
    other = run(cache, [2] * 8)
    assert (cache.arena.shortage((1,)), cache.arena.cached(0)) == (1, 1)
    twin = fork.sequence
    twin.append(0)
    assert cache.extend([twin], 0, 1) == 1
    assert twin.tables[0].size == 3
    for sequence in (twin, other):
        cache.release(sequence, keep=False)
    assert cache.arena.held(0) == 0
