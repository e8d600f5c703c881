"""Groups of every lifetime: blocks that live, the most of them, and what of a prefix can be reused."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory_layers import LAYERS, models

from kvist.cache.arena import Arena
from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.capacity import allocated_bytes, capacity_of
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import (
    Attention,
    Compressed,
    Cross,
    Indexer,
    Latent,
    Layer,
    Nothing,
    Parallel,
    Shared,
    State,
)  # fmt: skip
from kvist.spec.model import ModelSpec

BF16 = CacheFormat()
BLOCKS = st.sampled_from([1, 4, 16, 24])
FULL = Attention(kv_heads=1, key_dim=64, value_dim=64)


def model(*layers: Layer) -> ModelSpec:
    return ModelSpec(name="toy", source="test", layers=layers, max_context=4096)


def only(layer: Layer, block: int = 16) -> Group:
    (group,) = groups_of(model(layer), BF16, block)
    return group


def first_seen(group: Group, position: int) -> int:
    """First token that a query sees, from the definitions of window and chunk."""
    layer = group.layer
    if isinstance(layer, Attention) and layer.chunk is not None:
        return position - position % layer.chunk
    window = getattr(layer, "window", None)
    return 0 if window is None else max(0, position - window + 1)


def needed(group: Group, length: int, in_flight: int) -> int:
    """Blocks that hold a token which the query at ``length`` sees, or one in flight; found one by one."""
    if isinstance(group.layer, State):
        return len(group.layers) if length + in_flight else 0
    if isinstance(group.layer, Cross):
        assert group.layer.encoder_tokens is not None
        return -(-group.layer.encoder_tokens // group.block_tokens) if length + in_flight else 0
    end = length + in_flight
    if isinstance(group.layer, Compressed):
        end -= end % group.layer.ratio
    return len({token // group.block_tokens for token in range(first_seen(group, length), end)})


@settings(max_examples=150)
@given(LAYERS, BLOCKS, st.integers(0, 300), st.integers(0, 40))
def test_live_blocks_are_those_that_hold_what_is_seen(layer: Layer, block: int, length: int, flight: int) -> None:
    for group in groups_of(model(FULL, layer), BF16, block):
        live = group.live_blocks(length, flight)
        if flight:
            assert live == needed(group, length, flight)
        else:
            # The block in which the next token will lie is kept, even where that token will see none of its others.
            assert 0 <= live - needed(group, length, 0) <= 1


@settings(max_examples=100)
@given(LAYERS, BLOCKS, st.integers(1, 300), st.integers(1, 40))
def test_no_way_to_a_length_holds_more_than_the_peak(layer: Layer, block: int, length: int, chunk: int) -> None:
    for group in groups_of(model(FULL, layer), BF16, block):
        most = max(
            group.live_blocks(stored, flight)
            for stored in range(length)
            for flight in range(1, min(chunk, length - stored) + 1)
        )
        peak = group.peak_blocks(length, chunk)
        assert peak >= most
        if not group.gives_back:
            assert peak == most


@pytest.mark.parametrize("limit", [16, 24, 100, 130])
@pytest.mark.parametrize("block", [1, 16, 24])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_the_peak_is_reached_on_a_long_way(kind: str, limit: int, block: int) -> None:
    group = only(Attention(kv_heads=1, key_dim=64, value_dim=64, **{kind: limit}), block)
    most = max(group.live_blocks(stored, 5) for stored in range(4000))
    assert group.peak_blocks(4005, 5) == most


@given(st.integers(1, 50), st.sampled_from([1, 2, 4, 16]), st.lists(st.booleans(), max_size=24))
def test_a_chunk_reuses_up_to_a_point_whose_chunk_is_there(chunk: int, block: int, flags: list[bool]) -> None:
    group = only(Attention(kv_heads=1, key_dim=64, value_dim=64, chunk=chunk), block)
    possible = [
        end
        for end in range(len(flags) + 1)
        if all(flags[token // block] for token in range(first_seen(group, end * block), end * block))
    ]
    assert group.reusable_blocks(np.array(flags, bool)) == max(possible)


def test_states_are_found_where_they_were_kept_and_encoders_nowhere() -> None:
    present = np.ones(8, bool)
    (state,) = groups_of(model(*[State(name="mamba2", state_elements=8)] * 3), BF16)
    assert [state.reusable_blocks(np.array(kept, bool)) for kept in ([1] * 8, [1, 0, 1, 0], [0, 0], [])] == [8, 3, 0, 0]
    assert state.block_bytes == 32
    assert (state.live_blocks(0), state.live_blocks(9), state.peak_blocks(9, 4)) == (0, 3, 3)
    cross = only(Cross(kv_heads=1, key_dim=64, value_dim=64, encoder_tokens=33))
    assert (cross.reusable_blocks(present), cross.live_blocks(1), cross.live_blocks(0)) == (0, 3, 0)
    latent = only(Latent(rank=64, rope_dim=32))
    present[5] = False
    assert latent.reusable_blocks(present) == 5


def test_each_piece_of_a_layer_joins_its_own_group() -> None:
    indexer = Indexer(heads=1, dim=128)
    near = Latent(rank=448, rope_dim=64, window=128)
    spec = model(
        near,
        Compressed(rank=448, rope_dim=64, window=128, ratio=4, indexer=indexer),
        Compressed(rank=448, rope_dim=64, window=128, ratio=128),
        Parallel(parts=(FULL, State(name="mamba2", state_elements=10), Nothing())),
        Shared(source=0),
        Nothing(),
        Parallel(parts=(FULL, Cross(kv_heads=1, key_dim=64, value_dim=64))),
    )
    groups = {group.name: group for group in groups_of(spec, BF16, 16, encoder_tokens=100)}
    assert {name: group.layers for name, group in groups.items()} == {
        "latent-window-128": (0, 1, 2), "compressed-4": (1,), "compressed-128": (2,), "full": (3, 6),
        "state-mamba2": (3,), "cross": (6,),
    }  # fmt: skip
    sizes = {name: (group.block_tokens, group.block_bytes) for name, group in groups.items()}
    assert sizes == {
        "latent-window-128": (16, 16 * 3 * 1024),
        "compressed-4": (16, 4 * 1280),  # four entries with their indexer keys
        "compressed-128": (128, 1024),  # one entry
        "full": (16, 16 * 2 * 256),
        "state-mamba2": (16, 40),
        "cross": (16, 16 * 256),
    }
    assert groups["cross"].live_blocks(1) == 7
    assert allocated_bytes(tuple(groups.values()), 260, 0) == (
        (17 - 133 // 16) * 16 * 3072 + 17 * 5120 + 2 * 1024 + 17 * 16 * 512 + 40 + 7 * 4096
    )


def test_names_tell_kinds_apart() -> None:
    heads = Attention(kv_heads=2, key_dim=64, value_dim=64)
    indexed = Attention(kv_heads=1, key_dim=64, value_dim=64, indexer=Indexer(heads=1, dim=64))
    chunked = Attention(kv_heads=1, key_dim=64, value_dim=64, chunk=512)
    latent = Latent(rank=64, rope_dim=0, indexer=Indexer(heads=1, dim=64))
    names = [group.name for group in groups_of(model(FULL, heads, indexed, chunked, latent), BF16)]
    assert names == ["full", "full.1", "full-indexed", "chunk-512", "latent-indexed"]


def test_what_cannot_be_grouped_is_refused() -> None:
    with pytest.raises(InputError, match="encoder_tokens: toy keeps keys and values of an encoder"):
        groups_of(model(FULL, Cross(kv_heads=1, key_dim=64, value_dim=64)), BF16)
    with pytest.raises(InputError, match="encoder_tokens: -1 is negative"):
        groups_of(model(Cross(kv_heads=1, key_dim=64, value_dim=64)), BF16, encoder_tokens=-1)
    with pytest.raises(InputError, match="toy stores nothing"):
        groups_of(model(Nothing()), BF16)


@pytest.mark.parametrize(
    "layer",
    [
        Latent(rank=64, rope_dim=0),
        Attention(kv_heads=1, key_dim=64, value_dim=64, indexer=Indexer(heads=1, dim=64)),
    ],
)
def test_kernels_are_given_plain_attention_alone(layer: Layer) -> None:
    with pytest.raises(UnsupportedModel, match="the engine runs attention over all tokens, a window or chunks"):
        _ = only(layer).head_run_bytes


@settings(max_examples=60)
@given(models(), BLOCKS, st.integers(1, 4096), st.integers(1, 60), st.integers(1, 4096))
def test_planned_users_are_those_that_an_arena_takes(
    spec: ModelSpec, block: int, context: int, blocks: int, chunk: int
) -> None:
    groups = groups_of(spec, BF16, block)
    memory = blocks * max(group.block_bytes for group in groups)
    try:
        found = capacity_of(spec, BF16, groups, cache_bytes=memory, context=context, chunk=chunk)
    except DoesNotFit:
        assert blocks < 2 * len(groups)
        return
    arena = Arena(found.layout)
    flight = min(found.block_tokens, context, chunk)
    prompt = [group.peak_blocks(context, flight) for group in groups]
    settled = [group.peak_blocks(context, 1) for group in groups]
    assume(any(settled))
    users = 0
    # One user is in its prompt, the others are past it.
    while users <= found.users_paged and arena.shortage(settled if users else prompt) <= 0:
        for number, count in enumerate(settled if users else prompt):
            arena.take(number, count)
        users += 1
    assert users == found.users_paged
    assert found.users_paged * found.sequence_allocated <= found.layout.total_bytes
    assert found.waste_paged >= 0
    assert found.cache_tokens >= found.users_paged * context or all(g.lifetime == "full" for g in groups)
