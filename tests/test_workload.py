"""Users of many lengths: files and traces, lengths at random moments, the mean and 99 %, shared prefixes."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvist
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cli import main
from kvist.errors import BadFile, DoesNotFit, InputError
from kvist.planning.lengths import Lengths, Request, read_lengths
from kvist.planning.mix import Mix, Moments
from kvist.planning.workload import mix_least, mix_users, prices
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not there")


def model(*windows: int | None, max_context: int = 8192) -> ModelSpec:
    layers = tuple(Attention(kv_heads=1, key_dim=32, value_dim=32, window=window) for window in windows or (None,))
    return ModelSpec(name="toy", source="test", layers=layers, max_context=max_context)


def lengths(*requests: Request, block_tokens: int | None = None) -> Lengths:
    return Lengths(source="test", requests=requests, block_tokens=block_tokens)


def written(folder: Path, text: str | bytes, name: str = "lengths") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


PAIRS = [(100, 20), (7, 3)]


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("100\n7\n", [(100, None), (7, None)]),
        ("# two lengths\n\n100.0\n 7 \n", [(100, None), (7, None)]),
        ("100 20\n7 3\n", PAIRS),
        ("100,20\n7,3\n", PAIRS),
        ("length\n100\n7\n", [(100, None), (7, None)]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,100,20\n2023-11-16 18:17:04.0,7,3\n", PAIRS),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,GPT-4,100,20,120\n5,x,7,3,10", PAIRS),
        ("conv,turn,prompt_tokens,history_tokens,completion_tokens\n0,0,60,40,20\n0,1,7,0,3\n", PAIRS),
        ('prompt_tokens,output_tokens,text\n100,20,"a, b"\n7,3,c\n', PAIRS),
        ('{"timestamp": 0, "input_length": 100, "output_length": 20}\n{"input_length": 7, "output_length": 3}', PAIRS),
        ('{"prompt_tokens": 100, "completion_tokens": 20}\n{"prompt_tokens": 7, "completion_tokens": 3}\n', PAIRS),
        ('{"tokens": 100}\n{"length": 7}\n', [(100, None), (7, None)]),
        ("[100, 20]\n[7, 3]\n", PAIRS),
        ("[\n  100,\n  7\n]\n", [(100, None), (7, None)]),
        ('[{"prompt_tokens": 100, "output_tokens": 20}, {"prompt_tokens": 7, "output_tokens": 3}]', PAIRS),
        ("[[100, 20], [7, 3]]", PAIRS),
        ("\ufeff100\n7\n", [(100, None), (7, None)]),
        ("0\n100\n7\n", [(100, None), (7, None)]),
    ],
)  # fmt: skip
def test_lengths_are_read_from_what_people_have(text: str, requests: list[Any], tmp_path: Path) -> None:
    for name, content in (("plain", text.encode()), ("zipped", gzip.compress(text.encode()))):
        found = read_lengths(written(tmp_path, content, name)).requests
        assert [(request.prompt, request.output) for request in found] == requests


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no lengths; write one a line, CSV with a head, or JSON lines"),
        ("0\n", "holds no lengths"),
        ("12\nmany\n", "line 2 has a length of 'many'; write a whole number, at most 1,099,511,627,776"),
        ("12\n-3\n", "line 2 has a length of '-3'"),
        ("12\n1.5\n", "line 2 has a length of '1.5'"),
        ("12\n9999999999999999\n", "line 2 has a length"),
        ("12\nnan\n", "line 2 has a length of 'nan'"),
        ("a,b\n1,2\n", r"line 1 names no lengths \(a, b\); write a column length, or prompt_tokens and output_tokens"),
        ("1,2,3\n", "line 1 has 3 numbers and no head says which are lengths"),
        ("prompt_tokens,output_tokens\n5\n", "line 2 has 1 column; one is missing"),
        ('{"a": 1}\n', "line 1 names no length"),
        ('{"length": true}\n', "line 1 has a length of 'True'"),
        ('{"length": 5}\n{"length"\n', "line 2 is not JSON"),
        ('{"input_length": 5, "output_length": 5, "hash_ids": "x"}\n', "line 1 has hash_ids that are no list"),
        ('{"input_length": 50, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
         '{"input_length": 999, "output_length": 5, "hash_ids": [1]}\n',
         "hash_ids fit the prompts' lengths with no block size"),
        (b"\xff\xfe\x00", "line 1 is not text"),
        (b"\x1f\x8b broken", r"[Cc]ompress|gzip"),
        ("[1, 2, 3]\n", r"line 1 has 3 numbers; write one a line, or \[prompt, output\]"),
        ("[" * 100_000, "not JSON: maximum recursion"),
        ("[\n1,\n", "not JSON"),
    ],
)  # fmt: skip
def test_files_that_say_no_lengths_name_the_line(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=says) as raised:
        read_lengths(written(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="none: no such file"):
        read_lengths(tmp_path / "none")
    for path, says in ((tmp_path, "is not a regular file but a directory"), ("", "'' is no file")):
        with pytest.raises(BadFile, match=says) as raised:
            read_lengths(path)
        assert raised.value.key == "lengths"


@needs_traces
@pytest.mark.parametrize(
    ("name", "requests", "mean_prompt", "block"),
    [
        # Counts and means as the traces' own manifest has them.
        ("mooncake_fast25_conversation.jsonl.gz", 12031, 12035.1, 512),
        ("mooncake_arxiv_first1000.jsonl.gz", 1000, 9792.0, 512),
        ("azure_llm_2023_code.csv.gz", 8819, 2047.8, None),
        ("lmcache_agent_miniswe_blk64.jsonl.gz", 402, None, 64),
        ("llmservingsim_sharegpt-llama-3.1-8b-300-sps10_blk16.jsonl.gz", 300, None, 16),
        ("burstgpt_1_first400.csv", 383, None, None),
        ("sharegpt_v3_turn_lengths.csv.gz", None, None, None),
    ],
)
def test_real_traces_are_read(name: str, requests: int | None, mean_prompt: float | None, block: int | None) -> None:
    found = read_lengths(TRACES / name)
    assert requests is None or len(found.requests) == requests
    assert found.block_tokens == block
    assert found.is_trace
    if mean_prompt is not None:
        assert np.mean([request.prompt for request in found.requests]) == pytest.approx(mean_prompt, abs=0.1)


# -- a sequence at a random moment ------------------------------------------------------------------------------


def test_a_request_is_found_as_often_as_it_stays() -> None:
    found = Moments.of([Request(prompt=10, output=2), Request(prompt=100, output=6)])
    # Two steps at 11 and 12 tokens, six at 101 to 106.
    assert found.weight[[11, 12, 101, 106]].tolist() == [1 / 8] * 4
    assert found.weight.sum() == pytest.approx(1)
    assert found.mean_tokens == pytest.approx((11 + 12 + sum(range(101, 107))) / 8)
    assert (found.quantile(0.25), found.quantile(0.26)) == (12, 101)


def test_whole_lengths_are_held_in_full() -> None:
    found = Moments.of([Request(prompt=10), Request(prompt=30)])
    assert found.weight[[10, 30]].tolist() == [0.5, 0.5]


@settings(max_examples=40)
@given(st.lists(st.sampled_from([None, 16, 100, 512]), min_size=1, max_size=3), st.sampled_from([1, 16, 128]))
def test_prices_are_those_of_the_blocks(windows: list[int | None], block: int) -> None:
    groups = groups_of(model(*windows), CacheFormat(), block)
    found = prices(groups, 700)
    for length in (1, 2, 15, 16, 17, 100, 129, 512, 513, 699, 700):
        assert found[length] == sum(group.peak_blocks(length, 1) * group.block_bytes for group in groups)
    assert found[0] == 0


# -- how many at once -------------------------------------------------------------------------------------------


def counted(spec: ModelSpec, memory: int, found: Lengths, *, shared: int = 0, limit: int = 8192) -> Any:
    groups = groups_of(spec, CacheFormat())
    mix = Mix.of(found, limit=limit, shared=shared)
    return mix_users(mix, groups, ArenaLayout.of(groups, memory), chunk=2048)


def test_the_textbook_case_leaves_nine_tenths_of_the_slabs_idle(tmp_path: Path) -> None:
    # 32 sequences, a limit of 8,192 tokens, 800 on average: 90 % of what slabs reserve is never used.
    path = written(tmp_path, "\n".join(str(count) for count in (400, 800, 1200) * 50))
    spec = model()
    reserved = 32 * spec.sequence_bytes(8192, CacheFormat())
    plan = kvist.plan(spec, cache_memory=reserved, lengths=path)
    assert plan.capacity is not None
    assert plan.capacity.users_slab == 32
    assert plan.capacity.slab_idle == pytest.approx(0.90, abs=0.005)
    assert plan.capacity.waste_slab / reserved == pytest.approx(0.90, abs=0.005)
    assert plan.capacity.users_paged > 8 * 32


def test_equal_lengths_are_counted_as_one_length_is(tmp_path: Path) -> None:
    path = written(tmp_path, "800\n" * 20)
    many = kvist.plan(model(), cache_memory="100MiB", lengths=path).capacity
    one = kvist.plan(model(), cache_memory="100MiB", context=800).capacity
    assert many is not None
    assert one is not None
    assert many.users_mean is not None
    assert many.users_paged == many.users_mean.paged == one.users_paged


requests_of_many_lengths = st.lists(
    st.builds(Request, prompt=st.integers(1, 4000), output=st.integers(1, 2000)), min_size=1, max_size=30
)


# Of sequences that hardly ever have the prefix, few at once.
@example([Request(prompt=1, output=862)], 2**21, 0)
@settings(max_examples=12)
@given(requests_of_many_lengths, st.integers(2**21, 2**25), st.integers(0, 2**24))
def test_more_memory_never_holds_fewer_and_the_safe_number_is_never_above_the_mean(
    requests: list[Request], memory: int, more: int
) -> None:
    fewer, many = (counted(model(), size, lengths(*requests)) for size in (memory, memory + more))
    assert fewer.paged.safe <= fewer.paged.mean
    assert fewer.paged.mean <= many.paged.mean
    assert fewer.paged.safe <= many.paged.safe
    shared = counted(model(), memory, lengths(*requests, Request(prompt=4000, output=9)), shared=1000)
    bare = counted(model(), memory, lengths(*requests, Request(prompt=4000, output=9)))
    assert shared.prefix.mean >= bare.paged.mean
    assert shared.prefix.safe >= bare.paged.safe
    assert shared.paged == bare.paged


@settings(max_examples=8)
@given(requests_of_many_lengths, st.integers(2**22, 2**24), st.integers(0, 2**32))
def test_one_more_than_the_safe_number_exceeds_memory_in_more_than_one_of_a_hundred_moments(
    requests: list[Request], memory: int, seed: int
) -> None:
    groups = groups_of(model(), CacheFormat())
    layout = ArenaLayout.of(groups, memory)
    mix = Mix.of(lengths(*requests), limit=8192)
    users = mix_users(mix, groups, layout, chunk=2048).paged.safe
    price = prices(groups, len(mix.moments.weight) - 1)
    draw = np.random.default_rng(seed)
    trials = 4000
    drawn = draw.choice(price, size=(trials, users + 4), p=mix.moments.weight)

    def exceeds(count: int) -> float:
        return float((drawn[:, :count].sum(axis=1) > layout.total_bytes).mean())

    # Three standard deviations of 4,000 draws at 1 %, and what the grid rounds.
    assert users == 0 or exceeds(users) < 0.01 + 0.006
    assert exceeds(users + 2 + users // 100) > 0.01 - 0.005 or np.ptp(price[mix.moments.weight > 0]) == 0


@settings(max_examples=15)
@given(requests_of_many_lengths, st.integers(1, 60))
def test_the_least_memory_for_so_many_is_near_what_holds_them(requests: list[Request], users: int) -> None:
    groups = groups_of(model(), CacheFormat())
    mix = Mix.of(lengths(*requests), limit=8192)
    least = mix_least(mix, groups, users)
    room = ArenaLayout.of(groups, int(least * 1.05) + 2**18)
    assert mix_users(mix, groups, room, chunk=2048).paged.safe >= users - 1


# -- shared prefixes --------------------------------------------------------------------------------------------


def test_a_shared_prefix_of_equal_sequences_is_stored_once() -> None:
    spec = model()
    fmt = CacheFormat()
    one, prefix = spec.sequence_bytes(2048, fmt), spec.sequence_bytes(1024, fmt)
    found = kvist.plan(spec, cache_memory=10 * one, context=2048, shared_prefix=1024).capacity
    assert found is not None
    assert found.users_paged == 10
    # 1,024 tokens once, then 1,024 each.
    assert found.users_prefix == (10 * one - prefix) // (one - prefix) == 19


def test_windows_share_nothing() -> None:
    found = kvist.plan(model(512), cache_memory="10MiB", context=2048, shared_prefix=1024).capacity
    assert found is not None
    assert found.users_prefix == found.users_paged


def test_blocks_that_a_trace_names_are_stored_once() -> None:
    def trace(common: int) -> Lengths:
        return lengths(
            *(
                Request(prompt=64 * 8, output=16, blocks=(*range(common), *range(1000 * i + common, 1000 * i + 8)))
                for i in range(1, 200)
            ),
            block_tokens=64,
        )

    apart, half, same = (counted(model(), 2**22, trace(common)) for common in (0, 4, 8))
    assert apart.prefix.mean in (apart.paged.mean, apart.paged.mean + 1)
    assert apart.prefix.mean < half.prefix.mean < same.prefix.mean
    assert half.prefix.mean == pytest.approx(2 * apart.prefix.mean, rel=0.2)


@needs_traces
@pytest.mark.parametrize(
    "name",
    [
        "mooncake_arxiv_first1000.jsonl.gz",
        "azure_llm_2023_code.csv.gz",
        "lmcache_agent_miniswe_blk64.jsonl.gz",
    ],
)
def test_real_traces_order_slab_paged_and_shared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "smollm2-135m", "--gpu", "L4", "--lengths", str(TRACES / name), "--json"]
    assert main(words) == 0
    capacity = json.loads(capsys.readouterr().out)["capacity"]
    users, mean = capacity["users"], capacity["users_mean"]
    assert users["slab"] < users["paged"] <= mean["paged"]
    assert (users["paged_prefix"] is None) == ("azure" in name)
    if users["paged_prefix"] is not None:
        assert users["paged"] <= users["paged_prefix"] <= mean["paged_prefix"]
    workload = capacity["workload"]
    assert workload["requests"] + workload["too_long"] > 100
    assert workload["limit"] == 8192
    assert 0.4 < capacity["slab_idle_ratio"] < 1
    assert main(words[:-1]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ({"context": 50}, InputError, r"lengths: no sequence of .* is within 50 tokens \(the shortest has 60\)"),
        ({"shared_prefix": 90}, InputError, r"shared_prefix: 90 tokens; no prompt of .* longer \(the longest has 80\)"),
        ({"shared_prefix": -1}, InputError, "shared_prefix: -1 is negative"),
        ({"users": 10**6}, DoesNotFit, r"1,000,000 users x 70 tokens need .*; a cache of 1 MiB holds \d+ 99 % of"),
    ],
)  # fmt: skip
def test_wrong_calls_name_key_value_and_remedy(
    call: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "80\n60\n")
    with pytest.raises(error, match=says):
        kvist.plan(model(), cache_memory="1MiB", lengths=path, **call)


def test_what_is_too_long_is_left_out_and_said(tmp_path: Path) -> None:
    path = written(tmp_path, "prompt_tokens,output_tokens\n80,9\n600,9\n0,0\n")
    plan = kvist.plan(model(), cache_memory="1MiB", lengths=path, context=100)
    assert [note.partition(" of ")[0] for note in plan.notes] == [
        "left out as longer than 100 tokens: 1",
        "left out as empty: 1 request",
    ]
    with pytest.raises(InputError, match=r"lengths: .* needs a memory to count in; add `gpu`, `memory`"):
        kvist.plan(model(), lengths=path)
