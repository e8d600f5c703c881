"""Bounds on speed: operations and bytes worked out by hand, and what binds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvist
from kvist.hardware import gpus_named
from kvist.planning.roofline import Speed, rate_of
from kvist.planning.weights import weights_of
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "sliding_window": None,
}  # fmt: skip
TABLE = 128256 * 4096
ACTIVE = 8_030_261_248 - TABLE


def read(config: dict[str, Any], **keys: Any) -> ModelSpec:
    return read_description(config | keys, name="model")


def speed(spec: ModelSpec, **keys: Any) -> Speed:
    found = kvist.plan(spec, **keys).speed
    assert found is not None
    return found


def test_one_sequence_is_bound_by_the_weights_it_reads() -> None:
    found = speed(read(LLAMA), gpu="H100", users=1, context=1024)
    step = found.decode
    # Norms are read, not multiplied.
    assert step.weights_bytes == 2 * ACTIVE
    # 1,024 tokens of cache, and one more to write.
    assert step.cache_bytes == 1025 * 131072
    assert step.memory_seconds == (step.weights_bytes + step.cache_bytes) / 3350e9
    assert found.decode.binds == "bandwidth"
    assert found.user_rate == found.decode_rate == pytest.approx(220, rel=0.02)


def test_operations_are_two_a_parameter_and_those_of_attention() -> None:
    step = speed(read(LLAMA), gpu="H100", users=4, context=1000).decode
    attention = 32 * 2 * 32 * 1000 * (128 + 128)
    assert step.operations == pytest.approx(4 * (2 * ACTIVE + attention), rel=1e-5)
    assert step.compute_seconds == step.operations / 989e12


def test_a_prompt_attends_to_what_is_before_each_of_its_tokens() -> None:
    prompt = 4096
    step = speed(read(LLAMA), gpu="H100", users=1, context=prompt).prefill
    assert step is not None
    attention = 32 * 2 * 32 * (prompt * (prompt + 1) / 2) * (128 + 128)
    assert step.operations == pytest.approx(2 * prompt * (ACTIVE - TABLE) + 2 * TABLE + attention, rel=1e-5)
    assert step.binds == "compute"


def test_a_window_bounds_what_a_prompt_and_a_step_attend_to() -> None:
    wide, narrow = (
        speed(read(LLAMA, model_type="mistral", sliding_window=window), gpu="H100", users=1, context=32768)
        for window in (None, 1024)
    )
    assert narrow.decode.cache_bytes < wide.decode.cache_bytes / 30
    assert narrow.prefill is not None
    assert wide.prefill is not None
    assert narrow.prefill.operations < wide.prefill.operations


def test_experts_are_read_more_the_more_tokens_choose_them() -> None:
    spec = read(MIXTRAL)
    one, many = (speed(spec, gpu="H200", users=users, context=512).decode for users in (1, 64))
    weights = weights_of(spec)
    assert weights.inventory is not None
    assert one.weights_bytes == pytest.approx(2 * weights.inventory.active_parameters, rel=1e-3)
    assert many.weights_bytes == pytest.approx(weights.total - 2 * 32000 * 4096, rel=1e-3)
    # Every token still is multiplied with two of eight.
    assert many.operations == pytest.approx(64 * one.operations, rel=1e-9)


@settings(max_examples=20)
@given(st.integers(1, 30), st.sampled_from([256, 4096, 32768]))
def test_more_users_make_no_step_shorter_and_no_user_faster(users: int, context: int) -> None:
    fewer, more = (speed(read(LLAMA), gpu="MI300X", users=count, context=context) for count in (users, users + 1))
    assert fewer.decode.seconds <= more.decode.seconds
    assert fewer.user_rate >= more.user_rate
    assert fewer.decode_rate <= more.decode_rate * (1 + 1e-9)


def test_ranks_share_the_work_and_pay_for_their_links() -> None:
    spec = read(LLAMA)
    one, eight = (speed(spec, gpu="H100", tp=tp, users=32, context=2048) for tp in (1, 8))
    assert one.decode.link_seconds == 0 < eight.decode.link_seconds
    assert eight.decode.operations == pytest.approx(one.decode.operations / 8, rel=1e-3)
    assert eight.decode.memory_seconds == pytest.approx(one.decode.memory_seconds / 8, rel=1e-3)
    # Two all-reduces a layer of 32 x 4,096 bf16, 7/8 of it twice over the link.
    assert eight.decode.link_seconds == pytest.approx(2 * 32 * 32 * 4096 * 2 * 2 * 7 / 8 / 450e9)
    assert eight.decode.seconds < one.decode.seconds


def test_stages_lengthen_a_token_and_work_on_others_meanwhile() -> None:
    spec = read(LLAMA)
    one, four = (speed(spec, gpu="H100", pp=pp, users=64, context=2048) for pp in (1, 4))
    assert four.decode.stages == 4
    assert four.decode.tokens == 16
    assert four.decode_rate > one.decode_rate
    assert four.decode.seconds == 4 * four.decode.stage_seconds


def test_replicas_add_up() -> None:
    spec = read(LLAMA)
    one = speed(spec, gpu="H100", users=16, context=2048)
    two = speed(spec, gpu="H100x2", tp=1, users=32, context=2048)
    assert two.decode.seconds == one.decode.seconds
    assert two.decode_rate == pytest.approx(2 * one.decode_rate)


@pytest.mark.parametrize(
    ("gpu", "context", "users", "binds"),
    [
        # Weights are most of what a step reads, and no more users fit.
        ("L4", 8192, None, "memory"),
        # 60 caches of 1 GiB against 15 GiB of weights.
        ("H100", 8192, None, "bandwidth"),
        # Room is left: a step is bound by what it reads.
        ("H100", 8192, 4, "bandwidth"),
        # Short sequences in a large memory compute longer than they read.
        ("H200", 64, None, "compute"),
    ],
)
def test_what_binds(gpu: str, context: int, users: int | None, binds: str) -> None:
    plan = kvist.plan(read(LLAMA), gpu=gpu, context=context, users=users)
    assert plan.capacity is not None
    assert plan.capacity.binds == binds
    assert plan.to_dict()["speed"]["binds"] == binds


def test_types_are_multiplied_at_their_own_rate_where_the_device_can() -> None:
    h100, b200 = gpus_named("H100").accelerator, gpus_named("B200").accelerator
    rates = {
        (device.name, codec): fact.value / 1e12
        for device in (h100, b200)
        for codec in ("bf16", "fp8", "nvfp4", "int4")
        if (fact := rate_of(device, weights_of(read(LLAMA), codec))) is not None
    }
    assert [rates[h100.name, codec] for codec in ("bf16", "fp8", "nvfp4", "int4")] == [989, 1978, 989, 989]
    assert [rates[b200.name, codec] for codec in ("bf16", "fp8", "nvfp4", "int4")] == [2250, 4500, 9000, 2250]


def test_numbers_that_are_not_known_are_named_and_not_guessed() -> None:
    spec = read(LLAMA)
    no_bandwidth = kvist.plan(spec, gpu="H20", context="4k")
    assert no_bandwidth.speed is None
    assert any("no speed: the memory bandwidth of H20 96GB is not known" in note for note in no_bandwidth.notes)
    assert no_bandwidth.capacity is not None
    assert no_bandwidth.capacity.users_paged > 0
    no_rate = kvist.plan(spec, gpu="L20", context="4k")
    assert no_rate.speed is not None
    assert no_rate.speed.prefill is None
    assert no_rate.to_dict()["speed"]["prefill"] is None
    assert any("the rate of L20 is not known: no prefill" in note for note in no_rate.notes)


def test_a_memory_without_a_device_has_no_speed() -> None:
    plan = kvist.plan(read(LLAMA), memory="80GiB")
    assert plan.speed is None
    assert plan.to_dict()["capacity"]["binds"] == "cache"
