"""The simulator against the engine, against its own bookkeeping, and against figures that are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, write_directory

import kvist
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.tier import Tier
from kvist.cli import main
from kvist.engine.engine import Engine
from kvist.engine.sampler import SamplingParams
from kvist.errors import DoesNotFit, InputError
from kvist.scheduler import Limits, Scheduler
from kvist.simulation.clock import FixedClock
from kvist.simulation.meter import CACHED, HELD, TAILS, UNUSED
from kvist.simulation.policies import POLICIES
from kvist.simulation.prompts import Prompts
from kvist.simulation.question import Question, simulate
from kvist.simulation.replica import Log, Replica, Shape
from kvist.simulation.results import BOUNDS
from kvist.simulation.simulator import Server, run_policies
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.traces.trace import Trace

SHARED = Path(__file__).parents[2] / "shared" / "data" / "traces"
CLOCK = FixedClock(prefill_rate=4000.0, decode_seconds=0.01, sequence_seconds=0.001, overhead=0.002)
BLOCK = 16


def trace_of(rows: list[tuple[float, int, int, list[int]]], block: int = BLOCK) -> Trace:
    """(arrival, prompt, output, blocks) of each request."""
    blocks = [ids for *_, ids in rows]
    return Trace(
        source="made up",
        arrivals=np.array([row[0] for row in rows], np.float64),
        timed=True,
        prompts=np.array([row[1] for row in rows], np.int64),
        outputs=np.array([row[2] for row in rows], np.int64),
        block_tokens=block,
        blocks=np.array([one for ids in blocks for one in ids], np.int64),
        offsets=np.cumsum([0, *map(len, blocks)]),
    )


def chats(count: int, seed: int, *, longest: int = 160, gap: float = 0.05) -> Trace:
    """Conversations that share system prompts, and go on with what was said."""
    rng = np.random.default_rng(seed)
    histories: list[list[int]] = []
    rows, now, fresh = [], 0.0, 100
    for _ in range(count):
        now += float(rng.exponential(gap))
        if histories and rng.random() < 0.5:
            history = histories[int(rng.integers(len(histories)))]
        else:
            history = [int(rng.integers(3))] * 0 + [int(rng.integers(3))]
            histories.append(history)
        added = int(rng.integers(0, 3))
        history += range(fresh, fresh + added)
        fresh += added
        if len(history) * BLOCK > longest:
            histories.remove(history)
        # Of whole blocks, and some tokens that nobody else has.
        rows.append((now, len(history) * BLOCK + int(rng.integers(1, 20)), int(rng.integers(1, 40)), list(history)))
    return trace_of(rows)


# -- the engine ---------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, sliding_window=40, layer_types=["sliding_attention", "full_attention"])
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_directory(tmp_path_factory.mktemp(request.param), byte_level())
    torch.manual_seed(3)
    MODELS[request.param]().eval().save_pretrained(folder)
    return folder


def watched(scheduler: Scheduler, names: dict[str, int]) -> list[Any]:
    """Every decision of a scheduler from now on: who computes what, who must go, and which blocks each holds."""
    events: list[Any] = []
    step = scheduler.step

    def recorded() -> Any:
        batch = step()
        events.append(
            (
                [(names[chunk.request.id], chunk.start, chunk.count, chunk.samples) for chunk in batch.chunks],
                [names[request.id] for request in batch.preempted],
                {
                    names[request.id]: [table.tolist() for table in request.sequence.tables]
                    for request in scheduler.running
                },
            )
        )
        return batch

    scheduler.step = recorded  # type: ignore[method-assign]
    return events


def spelled(tokens: np.ndarray) -> list[int]:
    """Tokens of a vocabulary of 320 in the place of a trace's: sixteen of them differ where those do."""
    values = tokens.astype(np.int64) + 2**31
    digits = values // 300 ** (np.arange(values.size) % 4) % 300
    return (digits + 5).tolist()


@pytest.mark.parametrize("seed", [1, 2])
def test_engine_and_simulator_make_the_same_decisions(directory: Path, seed: int) -> None:
    """Event by event, block id by block id, on one clock; with hits, chunks, preemptions and windows."""
    trace = chats(40, seed)
    made = Engine(directory, memory="192KiB", dtype="f32", max_batch_tokens=96, max_running=6)
    limits = made.scheduler.limits

    names: dict[str, int] = {}
    events = watched(made.scheduler, names)
    prompts, now, given = Prompts.of(trace), 0.0, 0
    while given < len(trace) or made.has_work():
        while given < len(trace) and trace.arrivals[given] <= now:
            params = SamplingParams(temperature=0, max_tokens=int(trace.outputs[given]), ignore_eos=True)
            name = made.submit(spelled(prompts.tokens(given)), params, on_event=lambda event: None)
            names[name] = given
            given += 1
        if not made.has_work():
            now = float(trace.arrivals[given])
            continue
        batch = made.step()
        prefills = [chunk for chunk in batch.chunks if chunk.start < chunk.request.prompt_tokens]
        decodes = [chunk for chunk in batch.chunks if chunk.start >= chunk.request.prompt_tokens]
        ones = [chunk for chunk in decodes if chunk.count == 1]
        prefills += [chunk for chunk in decodes if chunk.count > 1]
        now += CLOCK.step(prefills, len(ones), sum(chunk.start + 1 for chunk in ones)).seconds

    shape = Shape(groups=made.groups, layout=made.cache.layout, limits=limits, prefix_cache=True)
    replica = Replica(shape=shape, clock=CLOCK, prompts=prompts, log=Log.of(len(trace)))
    simulated = watched(replica.scheduler, {str(index): index for index in range(len(trace))})
    for index, arrival in enumerate(trace.arrivals.tolist()):
        replica.advance(arrival)
        replica.give(index)
    replica.advance(float("inf"))

    assert simulated == events
    assert replica.scheduler.counters.hit_tokens == made.scheduler.counters.hit_tokens > 0
    assert made.scheduler.counters.preempted > 0
    assert abs(replica.now - now) < 1e-9


# -- bookkeeping --------------------------------------------------------------------------------------------------

# A name of each way to remember.
KINDS = (
    "llama-3.2-1b", "gemma-3-1b-it", "deepseek-v3", "jamba-v0.1", "qwen3-next-80b-a3b-instruct", "gpt-oss-20b",
)  # fmt: skip


def server(spec: ModelSpec, sequences: int, longest: int, **options: Any) -> Server:
    """Memory for some sequences of a length, and what a sequence owns besides."""
    fmt = CacheFormat()
    groups = groups_of(spec, fmt, BLOCK)
    cache = sequences * sum(group.peak_blocks(longest, 64) * group.block_bytes for group in groups)
    least = max(group.block_bytes for group in groups_of(spec, fmt, longest)) * 2 * len(groups)
    return Server(
        **{
            "groups": lambda block: groups_of(spec, fmt, block),
            "cache_bytes": max(cache, least),
            "clock": CLOCK,
            "max_running": 8,
            "max_batch_tokens": 128,
            "max_context": longest,
            "block_tokens": BLOCK,
            **options,
        }
    )


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_conserved_in_every_step(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free, cached, running and waste add up to the memory, for every kind of layer and policy."""
    spec = ModelSpec.read(name)
    seen = []
    state = Replica._state

    def checked(self: Replica) -> tuple[int, ...]:
        found = state(self)
        arena, layout = self.manager.arena, self.shape.layout
        free = sum(arena.free(group) * size for group, size in enumerate(layout.block_bytes))
        free += arena.free_slabs * layout.slab_bytes
        tails = [
            arena.lent(group) // per_slab * (layout.slab_bytes - per_slab * size)
            for group, (per_slab, size) in enumerate(zip(layout.blocks_per_slab, layout.block_bytes, strict=True))
        ]
        assert found[HELD] + found[CACHED] + free + sum(tails) == layout.total_bytes
        assert found[TAILS] == sum(
            tail * arena.held(group) // arena.lent(group) for group, tail in enumerate(tails) if tail
        )
        assert 0 <= found[UNUSED] <= found[HELD]
        # Not one block is held whose tokens are not counted, in groups of any kind.
        assert found[UNUSED] == sum(
            group.unfilled_bytes(table.size, request.sequence.length + request.sequence.in_flight)
            for request in self.scheduler.running
            for group, table in zip(self.shape.groups, request.sequence.tables, strict=True)
        )
        for group in range(len(layout.block_bytes)):
            assert arena.free(group) + arena.cached(group) + arena.held(group) == arena.lent(group)
        seen.append(found)
        return found

    monkeypatch.setattr(Replica, "_state", checked)
    runs = run_policies(chats(30, 5), server(spec, 3, 256), [policy])
    result = runs.policies[policy]
    assert result.finished == 30
    assert result.refused == 0
    assert len(seen) > 50
    line = result.timeline
    assert line is not None
    total = line.running_bytes + line.cached_bytes + line.waste_bytes + line.free_bytes
    assert np.allclose(total, result.cache_bytes)
    assert (line.free_bytes > -1e-6 * result.cache_bytes).all()
    assert abs(sum(result.bound.values()) - 1) < 1e-9
    if policy == "prefix":
        assert result.hit_tokens > 0
    else:
        assert result.hit_tokens == 0


def test_the_same_seed_gives_the_same_result() -> None:
    spec = ModelSpec.read("llama-3.2-1b")
    first, second = (run_policies(chats(40, 9), server(spec, 2, 256), ["paged", "prefix"]) for _ in range(2))
    for name in ("paged", "prefix"):
        assert first.policies[name].to_dict() == second.policies[name].to_dict()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from(["lru", "lfu", "fifo", "optimal"]))
def test_every_request_ends_whatever_the_memory(seed: int, sequences: int, reclaim: str) -> None:
    """All finish, in order of time, and prompts that share nothing more than `paged` does are never slower."""
    spec = ModelSpec.read("smollm2-135m")
    trace = chats(25, seed)
    result = run_policies(trace, server(spec, sequences, 256, reclaim=reclaim), ["prefix"]).policies["prefix"]
    assert result.finished == len(trace)
    assert result.ttft is not None
    assert result.latency is not None
    assert 0 < result.ttft.p50 <= result.latency.p50 <= result.makespan
    assert result.mean_running <= result.peak_running <= 8


def test_tiers_are_hit_and_cost_time() -> None:
    spec = ModelSpec.read("smollm2-135m")
    trace = chats(60, 4)
    tier = Tier(name="host", capacity_bytes=2**30, bandwidth=50e6)
    alone, behind, slow = (
        run_policies(trace, server(spec, 2, 256, tiers=tiers), ["prefix"]).policies["prefix"]
        for tiers in ((), (tier,), (replace(tier, bandwidth=1e6),))
    )
    assert behind.tier_hit_tokens["host"] > 0
    assert behind.hit_tokens > alone.hit_tokens
    assert slow.makespan > behind.makespan
    assert slow.bound["tiers"] > 0


def test_swapped_requests_recompute_nothing() -> None:
    spec = ModelSpec.read("smollm2-135m")
    trace = chats(40, 2, gap=0.001)
    tier = (Tier(name="host", capacity_bytes=2**30, bandwidth=1e9),)
    again, swapped = (
        run_policies(trace, server(spec, 2, 256, tiers=tier, preempt=preempt), ["paged"]).policies["paged"]
        for preempt in ("recompute", "swap")
    )
    assert again.preempted > 0
    assert again.recomputed_tokens > 0
    assert swapped.preempted > 0
    assert swapped.recomputed_tokens == 0


def test_replicas_share_the_requests() -> None:
    spec = ModelSpec.read("smollm2-135m")
    trace = chats(80, 6, gap=0.001)
    one = run_policies(trace, server(spec, 2, 256), ["prefix"]).policies["prefix"]
    for route in ("round-robin", "least", "prefix"):
        four = run_policies(trace, server(spec, 2, 256, replicas=4, route=route), ["prefix"]).policies["prefix"]
        assert four.finished == len(trace)
        assert four.makespan < one.makespan
        assert four.cache_bytes == 4 * one.cache_bytes


def test_a_prefix_route_hits_more_than_taking_turns() -> None:
    spec = ModelSpec.read("smollm2-135m")
    trace = chats(120, 8, gap=0.2)
    hits = {
        route: run_policies(trace, server(spec, 3, 256, replicas=4, route=route), ["prefix"])
        .policies["prefix"]
        .hit_tokens
        for route in ("round-robin", "prefix")
    }
    assert hits["prefix"] > hits["round-robin"]


def test_a_slab_is_one_block_of_the_longest_sequence() -> None:
    spec = ModelSpec.read("llama-3.2-1b")
    trace = trace_of([(0.0, 100, 28, [])] * 6)
    made = server(spec, 4, 1024, max_context=1024, cache_bytes=4 * 1024 * spec.append_bytes_per_token(CacheFormat()))
    result = run_policies(trace, made, ["slab", "paged"])
    slab, paged = result.policies["slab"], result.policies["paged"]
    assert slab.peak_running == 4
    assert paged.peak_running == 6
    assert slab.reserved_bytes_peak == slab.cache_bytes
    # Between 100 and 127 tokens of 1,024 are in use.
    assert 1 - 127 / 1024 < slab.waste_ratio < 1 - 90 / 1024
    assert paged.waste_ratio < 0.1


# -- the door -----------------------------------------------------------------------------------------------------


def test_the_textbook_question() -> None:
    """A batch of 32 with a limit of 8,192 and a mean length of 800: 90 % of slabs lie idle, under 4 % of blocks."""
    from kvist.cli import parse
    from kvist.commands.simulate import trace_of as made_of

    args = parse(
        [
            "simulate",
            "--mean-length",
            "800",
            "--model",
            "llama-3-8b",
            "--gpu",
            "H100",
            "--max-len",
            "8k",
            "--max-running",
            "32",
            "--requests",
            "200",
        ]
    )
    result = simulate(made_of(args), model="llama-3-8b", gpu="H100", max_len=8192, max_running=32,
                      policies=("slab", "paged"))  # fmt: skip
    slab, paged = result.policies["slab"], result.policies["paged"]
    assert slab.peak_running == 32
    assert 0.87 < slab.waste_ratio < 0.95
    assert paged.waste_ratio < 0.04


def test_prefixes_in_order_of_arrival() -> None:
    """Without a clock, an endless cache hits 37.36 % of the conversation trace: README of the traces."""
    path = SHARED / "mooncake_fast25_conversation.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    result = simulate(path, cache_only=True)
    assert round(result.policies["prefix"].hit_ratio, 4) == 0.3736
    assert result.requests == 12031


@pytest.mark.parametrize("reclaim", ["lru", "optimal"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-1b-it", "jamba-v0.1"])
def test_without_a_clock_memory_bounds_what_is_hit(name: str, reclaim: str) -> None:
    trace = chats(60, 3)
    spec = ModelSpec.read(name)
    fmt = CacheFormat()
    fraction = sum(group.peak_blocks(256, 256) * group.block_bytes for group in groups_of(spec, fmt, BLOCK))
    hits = [
        simulate(trace, model=name, cache_only=True, cache_memory=memory, reclaim=reclaim).policies["prefix"].hit_tokens
        for memory in (2 * fraction, 200 * fraction)
    ]
    assert 0 < hits[0] <= hits[1]
    assert reclaim == "optimal" or hits[0] < hits[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "smollm2-135m"}, "memory: there is none"),
        ({"gpu": "H100"}, "model: none is named"),
        ({"model": "smollm2-135m", "cache_memory": "1GiB"}, "gpu: a memory without a device has no speed"),
        ({"model": "smollm2-135m", "gpu": "H100", "policies": ["best"]}, "policy: 'best' is none"),
        ({"model": "smollm2-135m", "gpu": "H100", "policies": []}, "policy: none"),
        ({"model": "smollm2-135m", "gpu": "H100", "route": "any"}, "route: 'any'"),
        ({"model": "smollm2-135m", "gpu": "H100", "reclaim": "mru"}, "reclaim: 'mru'"),
        ({"model": "smollm2-135m", "gpu": "H100", "preempt": "swap"}, "preempt: swap needs a tier"),
        ({"model": "smollm2-135m", "gpu": "H100", "tiers": "host"}, "tier: 'host'; write NAME=SIZE@RATE"),
        ({"model": "smollm2-135m", "gpu": "H100", "speed": 0}, "speed: 0"),
        ({"model": "smollm2-135m", "gpu": "H100", "memroy": "1GiB"}, "memroy: nothing to ask"),
        ({"cache_only": True, "policies": "slab"}, "policy: slab; without a clock"),
        ({"cache_only": True, "cache_memory": "1GiB"}, "model: a memory holds"),
        ({"cache_only": True, "tiers": "host=1GiB@1GB/s"}, "tier: needs a clock"),
        ({"cache_only": True, "tp": 2}, "tp: an endless cache has no devices"),
        ({"cache_only": True, "route": "least"}, "route: needs a clock"),
        ({"cache_only": True, "chunk": 64}, "chunk: needs a clock"),
        ({"cache_only": True, "model": "smollm2-135m", "cache_memory": "1GiB", "encoder_tokens": 9}, "encoder_tokens"),
        ({"cache_only": True, "model": "bart-large-cnn", "cache_memory": "1GiB"}, "encoder_tokens: bart"),
        ({"model": "llama-4-scout", "gpu": "H200x8", "policies": "slab"}, "max_len: a slab of 10,485,760 tokens"),
    ],
)
def test_what_cannot_be_simulated_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        simulate(chats(3, 1), **fields)


def test_a_memory_without_room_shows_the_sum() -> None:
    with pytest.raises(DoesNotFit, match=r"weights of .* and overhead of .* leave no cache"):
        kvist.simulate(chats(3, 1), model="llama-3-70b", gpu="L4")


def test_a_request_that_never_fits_is_counted() -> None:
    trace = trace_of([(0.0, 32, 4, []), (0.0, 9000, 4, []), (0.1, 32, 4, [])])
    result = simulate(trace, Question(model="smollm2-135m", gpu="L4"))
    assert result.policies["prefix"].refused == 1
    assert result.policies["prefix"].finished == 2
    assert any(note.startswith("1 request") for note in result.notes)


def test_a_slab_of_compressed_layers_is_as_long_as_needed() -> None:
    """Whole entries of 4 and 128 tokens make 8,191 tokens 8,192, not a hundred times as many."""
    trace = trace_of([(0.0, 64, 4, [])])
    made = {
        longest: simulate(trace, model="deepseek-v4-flash", gpu="H200x8", policies="slab", max_len=longest)
        for longest in (8191, 8192)
    }
    assert len({result.policies["slab"].reserved_bytes_peak for result in made.values()}) == 1


def test_a_slab_that_does_not_fit_says_which_option() -> None:
    with pytest.raises(DoesNotFit, match=r"policy slab: sequences of up to 1,048,576 tokens .* lower `max_len`"):
        simulate(trace_of([(0.0, 8, 1, [])]), model="smollm2-135m", gpu="L4", policies="slab", max_len=2**20)


def test_encoders_are_held_beside_what_is_read() -> None:
    result = simulate(chats(5, 1), model="bart-large-cnn", cache_only=True, cache_memory="1GiB", encoder_tokens=64)
    assert result.policies["prefix"].refused == 0


def test_every_measure_of_a_request_by_hand() -> None:
    """One prompt of 100 tokens and 3 answers, one of 50 and 1 after a long pause, one that can never fit."""
    trace = trace_of([(0.0, 100, 3, []), (100.0, 50, 1, []), (100.0, 400, 2, [])])
    clock = FixedClock(prefill_rate=1000.0, decode_seconds=0.5)
    spec = ModelSpec.read("smollm2-135m")
    result = run_policies(trace, server(spec, 4, 256, clock=clock), ["paged"]).policies["paged"]
    assert result.ttft is not None
    assert result.tpot is not None
    assert result.latency is not None
    assert (result.finished, result.refused, result.steps) == (2, 1, 4)
    assert result.ttft.p50 == pytest.approx((0.1 + 0.05) / 2)
    # A single token has no next one.
    assert result.tpot.mean == result.tpot.p99 == pytest.approx(0.5)
    assert result.latency.mean == pytest.approx((1.1 + 0.05) / 2)
    assert result.makespan == pytest.approx(100.05)
    assert result.tokens_per_second == pytest.approx(4 / 100.05)
    assert result.mean_running == pytest.approx(1.0)
    assert result.bound["idle"] == pytest.approx(98.9 / 100.05)
    # 7 blocks hold 100, 101 and 102 tokens, 4 hold 50.
    held = 7 * 16 * 1.1 + 4 * 16 * 0.05
    assert result.waste_ratio == pytest.approx((12 * 0.1 + 11 * 0.5 + 10 * 0.5 + 14 * 0.05) / held)


def test_without_a_second_token_there_is_no_time_between_tokens() -> None:
    spec = ModelSpec.read("smollm2-135m")
    result = run_policies(trace_of([(0.0, 9, 1, [])]), server(spec, 4, 256), ["paged"]).policies["paged"]
    assert result.tpot is None
    assert result.ttft is not None


def test_a_replica_that_is_done_keeps_its_cache() -> None:
    trace = trace_of([(0.0, 64, 1, [1, 2, 3, 4]), (0.0, 64, 200, [1, 2, 3, 4])])
    spec = ModelSpec.read("smollm2-135m")
    clock = FixedClock(prefill_rate=1000.0, decode_seconds=0.5)
    result = run_policies(trace, server(spec, 4, 512, replicas=2, clock=clock), ["prefix"]).policies["prefix"]
    line = result.timeline
    assert line is not None
    assert (line.cached_bytes[2:-1] == line.cached_bytes[2]).all()
    assert line.cached_bytes[2] > 0
    assert result.bound["idle"] == pytest.approx(0.5, abs=0.01)


def test_hits_are_of_prompts_that_were_let_in() -> None:
    """Of three prompts one is longer than the cache: half of the other two's tokens are found, but for the last."""
    spec = ModelSpec.read("smollm2-135m")
    (group,) = groups_of(spec, CacheFormat(), BLOCK)
    trace = trace_of([(0.0, 64, 1, [1, 2, 3, 4]), (1.0, 640, 1, []), (2.0, 64, 1, [1, 2, 3, 4])])
    for block in (BLOCK, 2 * BLOCK):
        result = simulate(
            trace, model=spec.name, cache_only=True, cache_memory=8 * group.block_bytes, block_tokens=block
        )
        assert result.policies["prefix"].refused == 1
        assert result.policies["prefix"].hit_ratio == result.policies["prefix"].hit_tokens / 128 > 0.2
        assert any("1 prompt could never fit" in note for note in result.notes)


@pytest.mark.parametrize("route", ["round-robin", "prefix"])
def test_a_prompt_beyond_all_memory_is_refused_like_others(route: str) -> None:
    """Its tokens, 400 GB of them, are not even made."""
    trace = trace_of([(0.0, 10**11, 1, [1]), (0.0, 32, 1, [1, 2])])
    model = "gemma-3-1b-it"
    result = run_policies(trace, server(ModelSpec.read(model), 4, 256, replicas=2, route=route), ["prefix"])
    assert (result.policies["prefix"].finished, result.policies["prefix"].refused) == (1, 1)
    with pytest.raises(InputError, match="trace: made up has a prompt of 100,000,000,000 tokens"):
        simulate(trace, cache_only=True)
    trace = replace(trace, prompts=np.array([10**8, 32]))
    assert simulate(trace, model=model, cache_only=True, cache_memory="64MiB").policies["prefix"].refused == 1


def test_what_a_tier_moves_takes_its_time() -> None:
    """A prompt whose first 4 blocks come back from a host: their bytes over its rate, then the rest is computed."""
    spec = ModelSpec.read("smollm2-135m")
    (group,) = groups_of(spec, CacheFormat(), BLOCK)
    rate = 10.0 * group.block_bytes
    trace = trace_of([(0.0, 65, 1, [1, 2, 3, 4]), (50.0, 97, 1, [9]), (100.0, 65, 1, [1, 2, 3, 4])])
    made = server(
        spec, 1, 98, cache_bytes=7 * group.block_bytes, clock=FixedClock(prefill_rate=100.0, decode_seconds=0.0),
        tiers=(Tier(name="host", capacity_bytes=100 * group.block_bytes, bandwidth=rate),),
    )  # fmt: skip
    result = run_policies(trace, made, ["prefix"]).policies["prefix"]
    assert result.tier_hit_tokens == {"host": 64}
    assert result.latency is not None
    # The second writes 4 blocks back beside its 0.97 s; the third loads 4, then computes a token beside writing 4 back.
    assert result.latency.mean == pytest.approx((0.65 + 0.97 + 0.4 + 0.4) / 3)
    assert result.makespan == pytest.approx(100.8)


def test_all_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 9, "output_tokens": 2}\n' + "torn\n" * 150)
    from kvist.traces.read import read_trace

    result = simulate(read_trace(path, skip_bad=True), cache_only=True)
    assert any(note.startswith("150 rows are no requests") for note in result.notes)


@pytest.mark.parametrize(("place", "why"), [("missing/day.html", "no directory"), (".", "is a directory")])
def test_no_place_for_a_picture_is_said_before_anything(
    place: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # There is no such trace either.
    assert main(["simulate", "none", "--cache-only", "--html", str(tmp_path / place)]) == 2
    assert why in capsys.readouterr().err


def test_bounds_are_named() -> None:
    assert set(BOUNDS) == {"idle", "compute", "bandwidth", "memory", "slots", "tiers"}
    layout = ArenaLayout.of(groups_of(ModelSpec.read("smollm2-135m"), CacheFormat(), BLOCK), 2**26)
    assert layout.total_bytes <= 2**26
    assert Limits(max_running=3).max_running == 3
