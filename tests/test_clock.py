"""The clock: the roofline of equal sequences and of whole prompts, and what must hold of any mixture of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import InputError
from kvist.hardware import gpus_named
from kvist.planning.attending import attending_of, seen_by_chunk
from kvist.planning.deployment import Cutting, Deployment, Machine, stages_of
from kvist.planning.roofline import StageCosts, costs_of
from kvist.planning.weights import Weights, weights_of
from kvist.simulation.clock import Clock, Factors, FixedClock, Piece, StepClock
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Nothing, Parallel, Shared, State
from kvist.spec.model import ModelSpec

BF16 = CacheFormat()

# A model for each kind of layer.
KINDS = {
    "llama-3-8b": "full",
    "gemma-2-9b": "windows beside full layers",
    "mistral-7b-v0.1": "windows alone",
    "llama-4-maverick": "chunks, experts",
    "deepseek-v3": "latents, experts",
    "deepseek-v3.2": "latents that an indexer picks",
    "deepseek-v4-flash": "compressed",
    "qwen3.5-27b": "gated delta states",
    "nemotron-nano-9b-v2": "layers that hold nothing",
    "gemma-3n-e4b": "layers that read another's cache",
    "mamba-1.4b": "states alone",
}


def deployed(spec: ModelSpec, weights: Weights | None, *, gpu: str | None = "B200", tp: int = 1, pp: int = 1) -> Any:
    """Where the model fits whatever it weighs."""
    accelerator = None if gpu is None else gpus_named(gpu).accelerator
    machine = Machine(accelerator=accelerator, devices=tp * pp, tp=tp, pp=pp, memory=2**50, memory_source="the test")
    cutting = Cutting(fmt=BF16, block_tokens=16, chunk=8192)
    return Deployment(machine=machine, stages=stages_of(spec, weights, machine, cutting=cutting), sampled=256, notes=())


@cache
def costs(name: str, tp: int = 1, pp: int = 1) -> tuple[StageCosts, ...]:
    spec = ModelSpec.read(name)
    weights = weights_of(spec)
    return costs_of(spec, BF16, deployed(spec, weights, tp=tp, pp=pp), weights)


def clock_of(name: str, tp: int = 1, pp: int = 1) -> Clock:
    return Clock(costs(name, tp, pp))


def reached(clock: StepClock, lengths: list[int]) -> list[int]:
    return [sum(min(length, reach) for length in lengths) for reach in clock.reaches]


def test_every_kind_of_layer_is_among_the_models() -> None:
    kinds = {type(layer) for name in KINDS for layer in ModelSpec.read(name).layers}
    assert {Attention, Latent, Compressed, State, Shared, Nothing} <= kinds


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("sequences", "context"), [(1, 1), (7, 100), (64, 4096), (256, 131072)])
def test_equal_sequences_take_what_the_roofline_says(name: str, sequences: int, context: int) -> None:
    (stage,) = costs(name)
    clock, step = clock_of(name), stage.decode(sequences, context)
    found = clock.step((), sequences, sequences * context)
    assert found.seconds == pytest.approx(step.seconds, rel=1e-12)
    assert found.bound == step.binds
    at_peak = clock.ceilings((), sequences, sequences * context)
    assert at_peak.compute == pytest.approx(step.compute_seconds, rel=1e-12)
    assert at_peak.bandwidth == pytest.approx(step.memory_seconds, rel=1e-12)
    assert clock.step((), sequences, sequences * context, reached(clock, [context] * sequences)) == found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("prompt", [1, 1000, 32768])
def test_a_whole_prompt_takes_what_the_roofline_says(name: str, prompt: int) -> None:
    (stage,) = costs(name)
    found = clock_of(name).step([Piece(0, prompt)], 0, 0)
    assert found.seconds == pytest.approx(stage.prefill(prompt).seconds, rel=1e-12)
    assert found.bound == stage.prefill(prompt).binds


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (1, 4), (2, 3)])
def test_ranks_and_stages_are_those_of_the_roofline(tp: int, pp: int) -> None:
    clock, stages = clock_of("llama-3-8b", tp, pp), costs("llama-3-8b", tp, pp)
    # As many parts as stages: what `kvist plan` says of so many users.
    slowest = max(stage.decode(8, 2000).stage_seconds for stage in stages)
    assert clock.step((), pp * 8, pp * 8 * 2000).seconds == pytest.approx(pp * slowest, rel=1e-12)
    assert (clock.ceilings((), pp * 8, pp * 16000).link > 0) == (tp > 1)
    # Nothing else is there while a lone prompt passes all stages.
    prompt = max(stage.prefill(5000).seconds for stage in stages)
    assert clock.step([Piece(0, 5000)], 0, 0).seconds == pytest.approx(prompt, rel=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 9000), st.integers(0, 12), st.integers(1, 9000))
def test_what_fills_a_pipeline_makes_no_step_shorter(prompt: int, decodes: int, length: int) -> None:
    clock = clock_of("llama-3-8b", 1, 4)
    before = clock.step([Piece(0, prompt)], decodes, decodes * length).seconds
    assert clock.step([Piece(0, prompt)], decodes + 1, (decodes + 1) * length).seconds >= before * (1 - 1e-12)
    if decodes >= 3:
        assert clock.step([Piece(0, prompt), Piece(0, 1)], decodes, decodes * length).seconds >= before * (1 - 1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_those_of_the_layers_within_one_entry_of_each(name: str) -> None:
    spec = ModelSpec.read(name)
    own = [layer for layer in spec.layers if not isinstance(layer, Shared)]
    found = attending_of(spec, BF16, own, tp=1)
    states = spec.state_bytes(BF16)
    for context in (0, 1, 127, 128, 1000, 8192):
        # Sparse attention reads fewer than it holds.
        if any(isinstance(layer, Latent) and layer.indexer for layer in own) and context > 2048:
            continue
        held = sum(layer.bytes(context, BF16) for layer in own) - states
        entry = sum(layer.bytes(128, BF16) for layer in own if isinstance(layer, Compressed))
        assert held - 1e-6 <= found.held(context) <= held + entry + 1e-6
        assert found.chunk_held(context) == pytest.approx(found.held(context))
    assert found.bytes == 2 * states


def test_a_chunk_reads_all_that_its_tokens_may_pick() -> None:
    spec = ModelSpec.read("deepseek-v3.2")
    found = attending_of(spec, BF16, spec.layers, tp=1)
    assert found.chunk_held(8192) == spec.sequence_bytes(8192, BF16)
    assert found.held(8192) < found.chunk_held(8192) / 2


def test_a_layer_that_reads_anothers_cache_reads_it_again_and_adds_nothing() -> None:
    spec = ModelSpec.read("gemma-3n-e4b")
    own = attending_of(spec, BF16, [layer for layer in spec.layers if not isinstance(layer, Shared)], tp=1)
    everything = attending_of(spec, BF16, spec.layers, tp=1)
    assert everything.appended == own.appended == spec.append_bytes_per_token(BF16)
    # 20 of 35 layers store; all attend.
    assert everything.operations_at(100) == pytest.approx(own.operations_at(100) * 35 / 20)
    assert everything.held(100) == pytest.approx(own.held(100) * 35 / 20)


def test_an_encoders_tokens_are_attended_to_by_every_token_of_a_prompt() -> None:
    cross = Cross(kv_heads=6, key_dim=64, value_dim=64, encoder_tokens=1500)
    spec = ModelSpec(name="m", source="here", layers=(), max_context=448, config={"num_attention_heads": 6})
    found = attending_of(spec, BF16, [cross], tp=1)
    assert found.operations_of(0, 100) == 100 * 2 * 6 * 1500 * 128
    assert found.bytes == 1500 * 6 * 128 * 2
    assert found.appended == 0


def test_a_layer_of_several_parts_costs_what_they_do() -> None:
    spec = ModelSpec(name="m", source="here", layers=(), max_context=4096, config={"num_attention_heads": 8})
    own = (Attention(kv_heads=2, key_dim=64, value_dim=64), State(name="mamba2", state_elements=4096))
    apart, together = (attending_of(spec, BF16, layers, tp=2) for layers in (own, (Parallel(parts=own),)))
    assert together == apart
    # Four of eight heads; a state is decayed, updated and read.
    assert together.operations_at(100) == 2 * 4 * 100 * 128 + 6 * 4096
    assert together.bytes == 2 * 4 * 4096
    assert together.appended == 2 * 128 * 2


@given(st.integers(0, 300), st.integers(0, 300), st.none() | st.integers(1, 200))
def test_what_a_chunk_sees_is_the_sum_over_its_tokens(start: int, count: int, until: int | None) -> None:
    each = (start + index for index in range(1, count + 1))
    assert seen_by_chunk(start, count, until) == sum(seen if until is None else min(seen, until) for seen in each)


@settings(max_examples=60)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 3000), min_size=1, max_size=8))
def test_chunks_of_a_prompt_compute_what_the_whole_does(name: str, counts: list[int]) -> None:
    clock = clock_of(name)
    whole = clock.ceilings([Piece(0, sum(counts))], 0, 0)
    chunks, start = [], 0
    for count in counts:
        start += count
        chunks.append(clock.ceilings([Piece(start - count, count, start == sum(counts))], 0, 0))
    assert sum(chunk.compute for chunk in chunks) == pytest.approx(whole.compute, rel=1e-9)
    # Each pass reads weights, and what is before it, again.
    assert sum(chunk.bandwidth for chunk in chunks) >= whole.bandwidth * (1 - 1e-9)


BATCHES = st.tuples(
    st.lists(st.builds(Piece, st.integers(0, 10_000), st.integers(1, 5000), st.booleans()), max_size=4),
    st.lists(st.integers(1, 10_000), max_size=20),
)


@settings(max_examples=150)
@given(st.sampled_from(sorted(KINDS)), BATCHES, st.integers(0, 3), st.integers(1, 2000))
def test_more_never_takes_less(name: str, batch: tuple[list[Piece], list[int]], which: int, more: int) -> None:
    clock = clock_of(name)
    pieces, lengths = batch
    before = clock.step(pieces, len(lengths), sum(lengths), reached(clock, lengths))
    pieces, lengths = list(pieces), list(lengths)
    if which == 0 and pieces:
        pieces[0] = replace(pieces[0], count=pieces[0].count + more)
    elif which == 1 and pieces:
        pieces[0] = replace(pieces[0], start=pieces[0].start + more)
    elif which == 2 and lengths:
        lengths[0] += more
    elif which == 3:
        pieces.append(Piece(more, more, False))
    else:
        lengths.append(more)
    after = clock.step(pieces, len(lengths), sum(lengths), reached(clock, lengths))
    assert after.seconds >= before.seconds * (1 - 1e-12)


@settings(max_examples=60)
@given(st.sampled_from(["gemma-2-9b", "llama-4-maverick", "deepseek-v3.2"]), st.lists(st.integers(1, 20_000)))
def test_without_sums_for_windows_a_step_is_never_too_short(name: str, lengths: list[int]) -> None:
    clock = clock_of(name)
    exact = clock.step((), len(lengths), sum(lengths), reached(clock, lengths))
    assert exact.seconds <= clock.step((), len(lengths), sum(lengths)).seconds * (1 + 1e-12)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=20))
def test_full_attention_needs_nothing_but_the_sum_of_lengths(lengths: list[int]) -> None:
    (stage,) = costs("llama-3-8b")
    clock = clock_of("llama-3-8b")
    assert clock.reaches == ()
    alone = [stage.decode(1, length) for length in lengths]
    found = clock.ceilings((), len(lengths), sum(lengths))
    assert found.compute == pytest.approx(sum(step.compute_seconds for step in alone), rel=1e-9)
    caches = sum(step.cache_bytes for step in alone)
    assert found.bandwidth == pytest.approx((alone[0].weights_bytes + caches) / stage.bandwidth, rel=1e-9)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [1, 100, 5000])
def test_a_decode_is_a_chunk_of_one_token(name: str, length: int) -> None:
    clock = clock_of(name)
    decode, chunk = clock.ceilings((), 1, length), clock.ceilings([Piece(length - 1, 1)], 0, 0)
    assert decode.compute == pytest.approx(chunk.compute, rel=1e-12)
    # A chunk reads a full window and its own token; tokens that an indexer picks, for all of a chunk, are all.
    if name != "deepseek-v3.2":
        assert decode.bandwidth == pytest.approx(chunk.bandwidth, rel=1e-4)


def test_prompts_and_decodes_of_one_step_read_the_weights_once() -> None:
    (stage,) = costs("llama-3-8b")
    clock = clock_of("llama-3-8b")
    weights = stage.reading.always / stage.bandwidth
    mixed = clock.ceilings([Piece(0, 500)], 10, 10_000)
    apart = clock.ceilings([Piece(0, 500)], 0, 0).bandwidth + clock.ceilings((), 10, 10_000).bandwidth
    assert mixed.bandwidth == pytest.approx(apart - weights, rel=1e-9)


def test_a_chunk_that_does_not_end_its_prompt_computes_no_logits() -> None:
    (stage,) = costs("llama-3-8b")
    clock = clock_of("llama-3-8b")
    ends, goes_on = (clock.ceilings([Piece(0, 100, samples)], 0, 0).compute for samples in (True, False))
    assert (ends - goes_on) * (stage.rate or 0) == pytest.approx(2 * 128256 * 4096, rel=1e-6)


def test_factors_stretch_each_ceiling_and_every_step_pays_the_constant() -> None:
    clock = clock_of("llama-3-8b")
    slower = clock.with_factors(Factors(compute=0.5, bandwidth=0.25, seconds=0.002))
    prompt, decode = [Piece(0, 8192)], ((), 1, 1000)
    assert slower.step(prompt, 0, 0).seconds == pytest.approx(2 * clock.step(prompt, 0, 0).seconds + 0.002)
    assert slower.step(*decode).seconds == pytest.approx(4 * clock.step(*decode).seconds + 0.002)
    assert slower.ceilings(*decode) == clock.ceilings(*decode)


@pytest.mark.parametrize("key", ["compute", "bandwidth"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_factors_are_parts_of_a_peak(key: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{key}: .*; a part of the peak, above 0"):
        Factors(**{key: value})


def test_a_constant_is_not_negative() -> None:
    with pytest.raises(InputError, match=r"seconds: -1\.0 a step; 0 or more"):
        Factors(seconds=-1.0)


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("H20", "gpu: the memory bandwidth of H20 96GB is not known .* a clock needs it; .*--cache-only"),
        ("L20", "gpu: the bf16 rate of L20 is not known .* a clock needs it; .*--cache-only"),
        (None, "gpu: a memory without a device has no speed; .*--cache-only"),
    ],
)
def test_a_device_without_numbers_is_refused_by_the_one_that_lacks(gpu: str | None, message: str) -> None:
    spec = ModelSpec.read("llama-3-8b")
    weights = weights_of(spec)
    with pytest.raises(InputError, match=message) as caught:
        Clock.of(spec, BF16, deployed(spec, weights, gpu=gpu), weights)
    assert caught.value.key == "gpu"


def test_a_clock_needs_weights() -> None:
    spec = ModelSpec.read("llama-3-8b")
    with pytest.raises(InputError, match="weights: none are planned for, and a clock needs their shapes"):
        Clock.of(spec, BF16, deployed(spec, None), None)


def test_a_link_that_is_not_known_takes_no_time_and_is_told() -> None:
    spec = ModelSpec.read("llama-3-8b")
    weights = weights_of(spec)
    clock = Clock.of(spec, BF16, deployed(spec, weights, gpu="RTX 4090", tp=2), weights)
    assert clock.ceilings((), 1, 1).link == 0 or not clock.notes
    assert bool(clock.notes) == (gpus_named("RTX 4090").accelerator.link is None)


def test_a_fixed_clock_adds_prompts_decodes_and_its_overhead() -> None:
    clock = FixedClock(prefill_rate=1000, decode_seconds=0.01, sequence_seconds=0.001, overhead=0.002)
    assert clock.reaches == ()
    assert clock.step([Piece(0, 500), Piece(7, 500)], 0, 0) == (pytest.approx(1.002), "compute")
    assert clock.step((), 5, 5000) == (pytest.approx(0.017), "bandwidth")
    assert clock.step([Piece(0, 1)], 5, 5000) == (pytest.approx(0.018), "bandwidth")
    assert clock.step((), 0, 0).seconds == 0.002


@pytest.mark.parametrize("keys", [{"prefill_rate": 0.0}, {"decode_seconds": -1.0}, {"overhead": float("nan")}])
def test_a_fixed_clock_runs_forwards(keys: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(keys))}: "):
        FixedClock(**({"prefill_rate": 1.0, "decode_seconds": 0.0} | keys))
