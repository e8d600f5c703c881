"""Layers that run as one call: bit for bit what they compute one operator at a time."""

import pytest
import served_dense
import torch
from cartridge_models import reading_model
from served import Case

from kvist.engine.engine import Engine
from kvist.kernels.cpu import cpu
from kvist.model.chain import MOST_ROWS, Chain

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(cpu() is None, reason="no C++ kernels in bf16 on this machine")

WIDE = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4}
CASES = {
    "llama": Case(model="LlamaForCausalLM", config=WIDE),
    "qwen2, biases": Case(model="Qwen2ForCausalLM", config=WIDE | {"head_dim": None, "hidden_size": 192}),
    "qwen3, norms of heads": Case(model="Qwen3ForCausalLM", config=WIDE),
    "gemma3, norms behind, windows, two rotations": Case(
        model="Gemma3ForCausalLM",
        config=WIDE | {"num_hidden_layers": 8, "sliding_window": 16, "query_pre_attn_scalar": 32},
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def engine(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    reading_model(directory, CASES[request.param])
    return Engine(directory, dtype="bf16", memory="8MiB", prefix_cache=False)


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
    assert chain.count == len(engine.runner.decoder.layers) - 1
    generator = torch.Generator().manual_seed(1)
    sizes = (MOST_ROWS + 9, 5, 1, 17)
    prompts = [torch.randint(3, 90, (size,), generator=generator).tolist() for size in sizes]
    ran = []

    class Watched:
        count = chain.count

        @staticmethod
        def suits(stream, step):
            return chain.suits(stream, step)

        def __call__(self, stream, step):
            ran.append(len(stream.x))
            chain(stream, step)

    one, other = (logits_of(engine, prompts, each) for each in (Watched(), None))
    assert len(one) == len(other) == 12
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # All steps that decode, and not the one that reads the prompts.
    assert len(ran) == len(one) - 1
    assert max(ran) == len(prompts)


def test_pruned_requests_are_seen_alike(engine):
    """H2O looks at the queries of every step."""
    chain = engine.runner.decoder.chain
    prompt = [[5 + index % 80 for index in range(60)]]

    def answer(used):
        kept, engine.runner.decoder.chain = engine.runner.decoder.chain, used
        try:
            (found,) = engine.generate(prompt, max_tokens=70, temperature=0, ignore_eos=True, evict="h2o:24")
        finally:
            engine.runner.decoder.chain = kept
        return found.tokens

    if any(group.prunable for group in engine.groups):
        assert answer(chain) == answer(None)


def test_layers_of_other_kinds_are_left_to_operators(tmp_path):
    reading_model(tmp_path, served_dense.CASES["gpt2"])
    engine = Engine(tmp_path, dtype="bf16", memory="4MiB")
    assert Chain.of(cpu(), engine.runner.decoder.layers) is engine.runner.decoder.chain is None
