"""Layers that run as one call: bit for bit what they compute one operator at a time."""

from types import SimpleNamespace

import pytest
import served_dense
import torch
from cartridge_models import reading_model
from served import Case

from kvist.engine.engine import Engine
from kvist.kernels.cpu import cpu
from kvist.model.chain import MOST_ROWS, Chain, plain
from kvist.model.norms import LayerNorm
from kvist.spec.formats import CacheFormat

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(cpu() is None, reason="no C++ kernels in bf16 on this machine")

WIDE = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4}
CASES = {
    "llama": Case(model="LlamaForCausalLM", config=WIDE),
    "qwen2, biases": Case(model="Qwen2ForCausalLM", config=WIDE | {"head_dim": None, "hidden_size": 192}),
    "llama, biases everywhere": Case(
        model="LlamaForCausalLM", config=WIDE | {"attention_bias": True, "mlp_bias": True}
    ),
    "qwen3, norms of heads": Case(model="Qwen3ForCausalLM", config=WIDE),
    "gemma3, norms behind, windows, two rotations": Case(
        model="Gemma3ForCausalLM",
        config=WIDE | {"num_hidden_layers": 8, "sliding_window": 16, "query_pre_attn_scalar": 32},
    ),
}

FORMATS = {
    "llama": CacheFormat(
        key="int8",
        value="int4",
        rotate=True,
        layers={1: CacheFormat(), 2: CacheFormat(key="bf16", value="int8", rotate=True)},
    ),
    "gemma3, norms behind, windows, two rotations": CacheFormat(key="int4", value="bf16", rotate=True),
}


@pytest.fixture(scope="module", params=[*CASES, *(f"{name}, rotated" for name in FORMATS)])
def engine(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    name = request.param.removesuffix(", rotated")
    reading_model(directory, CASES[name])
    fmt = None if name == request.param else FORMATS[name]
    return Engine(directory, dtype="bf16", memory="8MiB", prefix_cache=False, format=fmt)


def logits_of(engine, prompts, chain):
    """The logits of every step."""
    found, decoder = [], engine.runner.decoder
    logits = type(decoder).logits
    kept, decoder.chain = decoder.chain, chain
    decoder.logits = lambda step: found.append(logits(decoder, step)) or found[-1]
    try:
        list(engine.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True))
    finally:
        decoder.chain = kept
        del decoder.logits
    return found


def test_logits_are_the_same_to_the_bit(engine):
    chain = engine.runner.decoder.chain
    assert chain is not None
    assert chain.count == len(engine.runner.decoder.layers)
    generator = torch.Generator().manual_seed(1)
    sizes = (MOST_ROWS + 9, 5, 1, 17)
    prompts = [torch.randint(3, 90, (size,), generator=generator).tolist() for size in sizes]
    ran = []

    class Watched:
        count = chain.count

        @staticmethod
        def suits(stream, step):
            return chain.suits(stream, step)

        def __call__(self, stream, step, count):
            ran.append((len(stream.x), count))
            chain(stream, step, count)

    one, other = (logits_of(engine, prompts, each) for each in (Watched(), None))
    assert len(one) == len(other) == 12
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # All steps that decode, and not the one that reads the prompts.
    assert len(ran) == len(one) - 1
    assert max(ran) == (len(prompts), chain.count)


def test_pruned_requests_are_seen_alike(engine):
    """H2O looks at the queries of every step, of requests side by side."""
    chain = engine.runner.decoder.chain
    prompts = [[5 + (index * factor) % 80 for index in range(60)] for factor in (1, 7)]

    def answer(used):
        kept, engine.runner.decoder.chain = engine.runner.decoder.chain, used
        try:
            found = list(engine.generate(prompts, max_tokens=70, temperature=0, ignore_eos=True, evict="h2o:24"))
        finally:
            engine.runner.decoder.chain = kept
        return [answer.tokens for answer in found]

    if any(group.prunable for group in engine.groups):
        assert answer(chain) == answer(None)


def test_layers_of_other_kinds_are_left_to_operators(tmp_path):
    reading_model(tmp_path, served_dense.CASES["gpt2"])
    engine = Engine(tmp_path, dtype="bf16", memory="4MiB")
    assert Chain.of(cpu(), engine.runner.decoder.layers) is engine.runner.decoder.chain is None


def test_layers_that_do_more_are_left_to_operators(engine, monkeypatch):
    layer = engine.runner.decoder.layers[0]
    assert plain(layer)
    other = LayerNorm(torch.ones(192), None, 1e-5)
    more = {
        "scale": (layer, 0.5),
        "parallel": (layer, True),
        "before_mixer": (layer, other),
        "before_mlp": (layer, None),
        "after_mixer": (layer, other),
        "after_mlp": (layer, other),
        "whole_norms": (layer.mixer, (other, other)),
        "temperature": (layer.mixer, 1.0),
        "sinks": (layer.mixer, torch.zeros(3, 2)),
        "rope": (layer.mixer, None),
        "gates": (layer.mixer, 192),
        "output": (layer.mixer, SimpleNamespace(matrix=None)),
    }
    for name, (owner, value) in more.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not plain(layer), name
    # Heads that are turned by the kernels may be; those that PyTorch turns may not.
    with monkeypatch.context() as patch:
        patch.setattr(layer.mixer, "hadamard", torch.eye(32))
        patch.setattr(layer.mixer, "spreader", None)
        assert not plain(layer)


def test_heads_that_are_turned_in_part_are_left_to_operators(tmp_path):
    reading_model(tmp_path, served_dense.CASES["phi3-longrope"])
    engine = Engine(tmp_path, dtype="bf16", memory="8MiB")
    chain, asked = engine.runner.decoder.chain, []

    class Watched(Chain):
        def __init__(self):
            self.__dict__ = chain.__dict__

        def suits(self, stream, step):
            asked.append(super().suits(stream, step))
            return asked[-1]

    engine.runner.decoder.chain = Watched()
    list(engine.generate([[5, 6, 7]], max_tokens=4, temperature=0, ignore_eos=True))
    assert asked == [False] * 4
