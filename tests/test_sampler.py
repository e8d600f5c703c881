"""Sampling: the order of vLLM's sampler, seeds, log-probabilities."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.sampler import Sampler, SamplingParams
from kvist.errors import InputError


def draws(logits, count=4000, **params):
    sampler = Sampler(SamplingParams(seed=3, **params))
    return torch.bincount(torch.tensor([sampler.choose(logits) for _ in range(count)]), minlength=len(logits)) / count


def expected(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution, written the long way."""
    weights = (logits.double() / temperature).softmax(-1)
    order = weights.argsort(descending=True).tolist()
    kept = [token for token in order if weights[token] >= min_p * weights[order[0]]]
    kept = kept[:top_k] if top_k else kept
    total = sum(float(weights[token]) for token in kept)
    chosen, mass = [], 0.0
    for token in kept:
        if mass >= top_p:
            break
        chosen.append(token)
        mass += float(weights[token]) / total
    out = torch.zeros_like(weights)
    out[chosen] = weights[chosen] / weights[chosen].sum()
    return out


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
def test_draws_follow_the_distribution(params):
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, 1.0, 0.5, -3.0, 1.2])
    want = expected(logits, **params)
    got = draws(logits, **params)
    assert (got[want == 0] == 0).all()
    assert (got - want).abs().max() < 0.03


@given(seed=st.integers(-(2**63), 2**63 - 1), top_k=st.integers(0, 60), top_p=st.floats(0.05, 1))
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(seed, top_k, top_p):
    generator = torch.Generator().manual_seed(1)
    steps = torch.randn(5, 3, 50, generator=generator)
    params = SamplingParams(seed=seed, top_k=top_k, top_p=top_p)
    alone, together = Sampler(params), Sampler(params)
    others = [Sampler(SamplingParams(temperature=0)), Sampler(SamplingParams(seed=None))]
    for step in steps:
        single = Sampler.sample(step[1:2], [alone])[0]
        assert Sampler.sample(step, [others[0], together, others[1]])[1].token_id == single.token_id
        assert alone.generator.get_state().equal(together.generator.get_state())


def test_greedy_takes_the_likeliest_and_reports_what_was_asked():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    plain, scored = Sampler.sample(
        logits, [Sampler(SamplingParams(temperature=0)), Sampler(SamplingParams(temperature=0, logprobs=2))]
    )
    assert (plain.token_id, plain.top) == (1, ())
    assert math.isnan(plain.logprob)
    reference = logits[1].log_softmax(-1).tolist()
    assert scored.token_id == 0
    assert scored.logprob == pytest.approx(reference[0])
    assert [token for token, _ in scored.top] == [0, 1]
    assert [value for _, value in scored.top] == pytest.approx(reference[:2])


def test_no_seed_differs_from_run_to_run():
    logits = torch.zeros(100_000)
    assert len({Sampler(SamplingParams()).choose(logits) for _ in range(5)}) > 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0),
        ("max_tokens", 0), ("logprobs", 21), ("stop", ("",)), ("seed", 2**63),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(key, value):
    with pytest.raises(InputError, match=key) as caught:
        SamplingParams(**{key: value})
    assert caught.value.key == key


def test_single_fields_are_checked():
    assert SamplingParams.of({"stop": "end", "stop_token_ids": [4]}).stop == ("end",)
    with pytest.raises(InputError, match="beam"):
        SamplingParams.of({"beam": 3})
    with pytest.raises(InputError, match="temperature: 'hot'"):
        SamplingParams.of({"temperature": "hot"})
