"""The planner: costs, what fits, and the JSON that others rely on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvist
from kvist.cache.arena import ArenaLayout
from kvist.cache.grouping import groups_of
from kvist.errors import DoesNotFit, InputError
from kvist.planning.capacity import allocated_bytes, capacity_of
from kvist.planning.explain import explain
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

VLLM = Path(__file__).parents[2] / "shared" / "data" / "expected" / "vllm.json"


def model(*windows: int | None, kv_heads: int = 1, width: int = 32, max_context: int = 4096) -> ModelSpec:
    return ModelSpec(
        name="toy",
        source="test",
        layers=tuple(Attention(kv_heads=kv_heads, key_dim=width, value_dim=width, window=w) for w in windows),
        max_context=max_context,
    )


def test_the_json_has_the_shape_that_others_rely_on() -> None:
    answer = kvist.plan("gemma-3-270m", cache_memory="1GiB", engine="kvist").to_dict()
    assert json.loads(json.dumps(answer)) == answer
    assert answer["model"] == "gemma-3-270m"
    assert answer["exact"] is True
    assert {entry["key"] for entry in answer["assumed"]} == {
        "sliding_window_pattern",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
    }
    assert answer["format"] == {"key": "bf16", "value": "bf16"}
    shape = {"kind": "attention", "kv_heads": 1, "key_dim": 256, "value_dim": 256}
    assert answer["layers"] == [shape | {"count": 15, "window": 512}, shape | {"count": 3, "window": None}]
    assert (answer["append_bytes_per_token"], answer["retained_bytes_per_token"]) == (18432, 3072)
    assert answer["state_bytes"] == 0
    assert answer["sequence_bytes"] == {"1024": 11010048, "8192": 33030144, "32768": 108527616}
    assert (answer["weights_bytes"], answer["parameters"]) == (246587904, 268098176)
    capacity, engine = answer["capacity"], answer["engine"]
    assert {"memory_bytes", "overhead_bytes", "cache_bytes", "cache_tokens", "users", "binds"} <= set(capacity)
    assert set(capacity["users"]) == {"slab", "paged", "paged_prefix"}
    assert {"name", "num_blocks", "cache_tokens", "max_concurrency", "flags"} <= set(engine)


def test_one_gib_of_smollm2_is_what_vllm_prints() -> None:
    answer = kvist.plan("smollm2-135m", cache_memory="1GiB", block_tokens=128, context=4096, engine="kvist").to_dict()
    assert answer["engine"]["num_blocks"] == 364
    assert answer["capacity"]["cache_tokens"] == 46592
    assert f"{answer['engine']['max_concurrency']:.2f}" == "11.38"
    assert answer["capacity"]["users"] == {"slab": 5, "paged": 11, "paged_prefix": None}


@pytest.mark.skipif(not VLLM.is_file(), reason=f"{VLLM} is not there")
def test_blocks_of_models_without_windows_are_those_of_vllm() -> None:
    compared = 0
    for run in json.loads(VLLM.read_text()):
        config = run["config"]
        if config["model_type"] != "llama" or len(run["groups"]) != 1 or not set(run["args"]) <= {"max_model_len"}:
            continue
        spec = read_description(config, name=run["model"])
        answer = kvist.plan(
            spec, cache_memory=run["env"]["VLLM_CPU_KVCACHE_SPACE"] * 2**30, block_tokens=128, engine="kvist"
        )
        assert answer.engine is not None
        assert answer.engine.num_blocks == run["num_blocks"], run["id"]
        compared += 1
    assert compared


def test_windows_let_more_users_in() -> None:
    # The shape of Gemma-3-1B: 22 layers with a window of 512 and 4 without, one KV head of 256.
    spec = model(*([512] * 5 + [None]) * 4, 512, 512, width=256, max_context=32768)
    capacity = kvist.plan(spec, cache_memory="1GiB", context="8k").capacity
    assert capacity is not None
    assert (capacity.users_slab, capacity.users_paged) == (7, 23)
    assert 0 < capacity.prefill_chunk < 2048


def test_memory_pays_for_the_weights_first() -> None:
    capacity = kvist.plan("smollm2-135m", memory="1GiB").to_dict()["capacity"]
    assert capacity["weights_bytes"] == 96_576_768
    assert 0 < capacity["overhead_bytes"] < 2**26
    assert capacity["cache_bytes"] == 2**30 - 96_576_768 - capacity["overhead_bytes"]
    with pytest.raises(DoesNotFit, match=r"the weights of smollm2-135m take 92\.1 MiB and overhead 14\.25 MiB; 90 MiB"):
        kvist.plan("smollm2-135m", memory="90MiB")
    with pytest.raises(InputError, match="the weights of toy are not known from test"):
        kvist.plan(model(None), memory="1GiB")


def test_users_that_do_not_fit_are_refused_with_the_sum() -> None:
    kvist.plan("gemma-3-270m", cache_memory="1GiB", users=32)
    says = r"33 users x 8,192 tokens need 1\.023 GiB of blocks \(31\.73 MiB each\); the cache of 1 GiB holds 32"
    with pytest.raises(DoesNotFit, match=says):
        kvist.plan("gemma-3-270m", cache_memory="1GiB", users=33)


def test_formats_count_their_scales() -> None:
    answer = kvist.plan("smollm2-135m", format=CacheFormat(key="int8", value="int4"))
    assert answer.append_bytes_per_token == 30 * 3 * (64 + 4 + 32 + 4)


def test_default_lengths_are_those_that_the_model_allows() -> None:
    assert list(kvist.plan(model(None, max_context=8192)).sequence_bytes) == [1024, 8192]
    assert list(kvist.plan(model(None, max_context=100)).sequence_bytes) == [100]
    assert list(kvist.plan(model(None), tokens=["4k", 7, 7]).sequence_bytes) == [7, 4096]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"memory": 1, "cache_memory": 1}, "both given"),
        ({"memory": "1XB"}, "memory: '1XB' is not a size"),
        ({"tokens": ["x"]}, "tokens: 'x'"),
        ({"engine": "kvist"}, "engine: kvist needs a memory"),
        ({"engine": "tgi", "cache_memory": 1}, "engine: 'tgi' is not accounted for; choose one of kvist, vllm"),
        ({"users": 0, "cache_memory": "1GiB"}, "users: 0; a whole number from 1 to"),
        ({"context": 8193, "cache_memory": "1GiB"}, "context: 8,193 tokens; smollm2-135m allows 1 to 8,192"),
        ({"context": 0, "cache_memory": "1GiB"}, "context: 0"),
        ({"block_tokens": 0, "cache_memory": "1GiB"}, "block_tokens: 0"),
        ({"block_tokens": "16", "cache_memory": "1GiB"}, "block_tokens: '16'; a whole number from 1 to"),
        ({"users": 2.5, "cache_memory": "1GiB"}, r"users: 2\.5; a whole number from 1 to"),
        ({"users": 10**30, "cache_memory": "1GiB"}, "users: 1000000000000000000000000000000; a whole number"),
        ({"cache_memory": 2**60 + 1}, "cache_memory: 1152921504606846977 is too large"),
        ({"context": 99}, "context: 99 needs a memory to count in; add `gpu`, `memory` or `cache_memory`, or `users`"),
        ({"block_tokens": 16}, "block_tokens: 16 needs a memory"),
        ({"chunk": 16}, "chunk: 16 needs a memory"),
        ({"tokens": [0]}, "tokens: 0; a sequence has at least 1"),
        ({"tokens": [-1]}, "tokens: -1 is negative"),
        ({"tokens": [2**41]}, "tokens: 2199023255552 is too large"),
        ({"format": "bf16"}, r"format: 'bf16' is not a CacheFormat; write kvist\.CacheFormat\(key='bf16'"),
        ({"format": "int3"}, r"format: 'int3' is not a CacheFormat; write kvist\.CacheFormat\(key='bf16'"),
        ({"format": ""}, "format: '' is not a CacheFormat"),
        ({"chunk": 0, "cache_memory": "1GiB"}, "chunk: 0"),
    ],
)
def test_wrong_calls_name_key_value_and_remedy(call: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        kvist.plan("smollm2-135m", **call)


def test_a_cache_without_one_slab_a_group_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="at least"):
        kvist.plan("smollm2-135m", cache_memory=1)


def test_lengths_beyond_the_model_are_priced_with_a_note() -> None:
    answer = kvist.plan("smollm2-135m", tokens=["8k", "16k", "128k"])
    assert answer.sequence_bytes[131072] == 131072 * 23040
    assert answer.to_dict()["notes"] == [
        "smollm2-135m was made for 8,192 tokens; what 16,384, 131,072 would cost is arithmetic"
    ]
    within = kvist.plan("smollm2-135m", tokens="8k")
    assert (within.to_dict()["notes"], list(within.sequence_bytes)) == ([], [8192])


def test_every_number_of_a_plan_is_explained() -> None:
    answer = kvist.plan("gemma-3-270m", memory="1GiB", format=CacheFormat(key="int8"))
    rows = {row.what: row for row in explain(answer)}
    assert rows["append, bytes a token"].value == answer.append_bytes_per_token
    assert rows["one key vector"].formula == "256 x 8 bit + 8 x 2 B scale"
    assert rows["sequence of 8,192 tokens"].value == answer.sequence_bytes[8192]
    assert answer.capacity is not None
    assert rows["users, paged"].value == answer.capacity.users_paged
    assert rows["cache"].value == answer.capacity.cache
    # The products are written so that they can be worked out again.
    for row in rows.values():
        if "layers" in row.formula:
            again = re.sub(r"(?<=\d),(?=\d{3})| (layers?|heads?|B)\b", "", row.formula).replace("x", "*")
            assert eval(again) == row.value, row.formula


windows_of_layers = st.lists(st.sampled_from([None, 1, 16, 100, 512]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(windows_of_layers, st.integers(1, 5000), st.sampled_from([1, 16, 128]))
def test_allocated_bytes_are_whole_blocks_that_cover_the_logical_ones(
    windows: list[int | None], length: int, block: int
) -> None:
    spec, fmt = model(*windows), CacheFormat()
    groups = groups_of(spec, fmt, block)
    allocated = allocated_bytes(groups, length)
    # A window's next query no longer sees its oldest token, which the logical count still holds.
    at_least = sum(layer.bytes(length, fmt) - (layer.token_bytes(fmt) if layer.window else 0) for layer in spec.layers)
    at_most = sum((layer.bytes(length, fmt) + 2 * block * layer.token_bytes(fmt)) for layer in spec.layers)
    assert at_least <= allocated <= at_most


@settings(max_examples=60, deadline=None)
@given(
    windows_of_layers,
    st.integers(1, 4096),
    st.sampled_from([1, 16, 128]),
    st.integers(1, 2**26),
    st.integers(1, 4096),
)
def test_capacity_is_the_most_that_fits(
    windows: list[int | None], context: int, block: int, memory: int, chunk: int
) -> None:
    spec, fmt = model(*windows), CacheFormat()
    groups = groups_of(spec, fmt, block)
    try:
        layout = ArenaLayout.of(groups, memory)
    except DoesNotFit:
        return
    found = capacity_of(spec, fmt, groups, cache_bytes=memory, context=context, chunk=chunk)

    def fits(users: int) -> bool:
        least = min(block, context, chunk)
        counts = [(users - 1) * group.peak_blocks(context, 1) + group.peak_blocks(context, least) for group in groups]
        return layout.slabs_for(counts) <= layout.num_slabs

    assert not fits(found.users_paged + 1)
    assert found.users_paged == 0 or fits(found.users_paged)
    assert 0 <= found.prefill_chunk <= min(chunk, context)
    assert (found.prefill_chunk > 0) == (found.users_paged > 0)
    assert found.cache_tokens >= found.users_paged * context or None in windows
    assert found.waste_paged >= 0
    assert found.users_paged * found.sequence_allocated <= layout.total_bytes


@pytest.mark.parametrize(
    ("engine", "settings", "words"),
    [
        ("vllm", {"kv_cache_dtype": "fp8"}, "by kv_cache_dtype=fp8; .* in bf16/bf16"),
        ("vllm", {"kv-cache-dtype": "fp8", "dtype": "float16"}, "by kv_cache_dtype=fp8;"),
        ("llama.cpp", {"type_k": "q8_0", "type_v": "q4_0"}, "by type_k=q8_0 and type_v=q4_0;"),
        ("vllm", {"kv_cache_dtype": "auto"}, None),
        ("vllm", {"kv_cache_dtype": "bfloat16"}, None),
        ("sglang", {"mem_fraction_static": "0.8"}, None),
    ],
)
def test_an_engine_that_stores_otherwise_than_planned_says_so(
    engine: str, settings: dict[str, str], words: str | None
) -> None:
    plan = kvist.plan("smollm2-135m", gpu="H100", engine=engine, settings=settings)
    assert plan.engine is not None
    said = " ".join(plan.engine.notes)
    assert ("stores keys and values" in said) == (words is not None)
    if words:
        assert re.search(words, said)
