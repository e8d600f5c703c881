"""The clock against steps that were measured and published, and the page that says how far it is from them."""

import doctest
from functools import cache
from pathlib import Path

import pytest

from kvist.hardware import gpus_named
from kvist.planning.deployment import Cutting, Deployment, Machine, stages_of
from kvist.planning.weights import weights_of
from kvist.simulation.calibration import Point, fit
from kvist.simulation.clock import Clock
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

PAGE = Path(__file__).parents[1] / "docs" / "clock.md"
BF16 = CacheFormat()


@cache
def clock_of(model: str, gpu: str, tp: int) -> Clock:
    spec = ModelSpec.read(model)
    weights = weights_of(spec)
    machine = Machine(
        accelerator=gpus_named(gpu).accelerator, devices=tp, tp=tp, pp=1, memory=2**50, memory_source="the test"
    )
    stages = stages_of(spec, weights, machine, cutting=Cutting(fmt=BF16, block_tokens=16, chunk=8192))
    return Clock.of(spec, BF16, Deployment(machine=machine, stages=stages, sampled=1, notes=()), weights)


def decode(sequences: int, length: int, milliseconds: float) -> Point:
    return Point(seconds=milliseconds / 1000, decodes=sequences, decode_tokens=sequences * length)


def prompts(count: int, tokens: int, milliseconds: float) -> Point:
    return Point(seconds=milliseconds / 1000, prefills=count, prefill_tokens=tokens)


A100, H100 = "A100 SXM4 80GB", "H100 SXM5 80GB"
# README of pytorch-labs/gpt-fast at 0f925b5d: tokens a second of one sequence in bf16, 5 tokens of prompt and 200 more.
GPT_FAST = {
    ("llama-2-7b", 1): (104.9, 0.68),
    ("llama-2-7b", 2): (168.84, 0.55),
    ("llama-2-7b", 4): (254.02, 0.41),
    ("llama-2-7b", 8): (328.43, 0.27),
    ("llama-2-70b", 2): (21.32, 0.72),
    ("llama-2-70b", 4): (38.01, 0.64),
    ("llama-2-70b", 8): (62.50, 0.53),
    # At a later commit.
    ("mixtral-8x7b-v0.1", 2): (96.67, 0.60),
    ("mixtral-8x7b-v0.1", 8): (227.82, 0.36),
}
# vLLM, one request at a time, prompts and 128 more tokens: tenstorrent/tt-inference-server#143 and #125.
QWEN_72B = [
    decode(1, 192, 30.9), decode(1, 1088, 31.0), decode(1, 4160, 31.1), decode(1, 8256, 31.3),
    prompts(1, 1024, 129.2), prompts(1, 4096, 505.1), prompts(1, 8192, 1063.8),
]  # fmt: skip
QWEN_7B = [decode(1, 192, 17.1), decode(1, 1088, 17.2), prompts(1, 1024, 99.6)]
# text-generation-inference, prompts of 40 tokens at once: huggingface/text-generation-inference#1243.
LLAMA_13B = [prompts(100, 40, 370.77), prompts(200, 40, 765.51), prompts(400, 40, 1753.42)]
# vLLM, 1,024 tokens and 1,024 more, 4 to 64 at once: SemiAnalysisAI/InferenceX#828.
GPT_OSS = [decode(count, 1536, took) for count, took in ((4, 3.72), (8, 4.05), (16, 4.83), (32, 5.82), (64, 7.36))]


def share(clock: Clock, point: Point) -> float:
    return clock.step(point.pieces, point.decodes, point.decode_tokens).seconds / point.seconds


@pytest.mark.parametrize(("model", "tp"), GPT_FAST)
def test_one_sequence_takes_longer_than_the_bound_the_more_the_shorter_its_steps(model: str, tp: int) -> None:
    rate, expected = GPT_FAST[model, tp]
    assert share(clock_of(model, A100, tp), decode(1, 105, 1000 / rate)) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "points", "least", "most"),
    [
        ("qwen2.5-72b-instruct", H100, 2, QWEN_72B, 0.61, 0.70),
        ("qwen2.5-7b-instruct", "RTX 4090", 1, QWEN_7B, 0.81, 0.83),
        ("llama-2-13b", A100, 1, LLAMA_13B, 0.74, 0.88),
        ("gpt-oss-120b", H100, 8, GPT_OSS, 0.11, 0.33),
    ],
)
def test_the_clock_is_a_bound(model: str, gpu: str, tp: int, points: list[Point], least: float, most: float) -> None:
    found = [share(clock_of(model, gpu, tp), point) for point in points]
    assert least <= min(found) <= max(found) <= most


def test_calibrated_it_tells_prompts_and_decodes_of_a_server() -> None:
    found = fit(clock_of("qwen2.5-72b-instruct", H100, 2), QWEN_72B, source="points")
    assert found.before.median == pytest.approx(0.31, abs=0.01)
    assert found.after.p90 < 0.05
    assert 0.55 < found.factors.compute < 0.75
    assert 0.6 < found.factors.bandwidth < 1


def test_the_page_is_true() -> None:
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False)
    assert attempted
    assert not failed
