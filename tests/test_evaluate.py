"""Fidelity against transformers' own distributions."""

from math import exp

import pytest
import torch
import torch.nn.functional as F
from test_weights import tiny_llama

from kvist.errors import InputError
from kvist.evaluate import drift
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

PLAIN = CacheFormat(key="f32", value="f32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    oracle = tiny_llama()
    oracle.save_pretrained(folder)
    return ModelSpec.read(folder), oracle


def texts_of(oracle):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, oracle.config.vocab_size, (length,), generator=generator).tolist() for length in (300, 2)]


def test_the_cache_in_the_type_of_computation_moves_nothing(model):
    spec, oracle = model
    texts = texts_of(oracle)
    (found,) = drift(spec, texts, [PLAIN], dtype="f32")
    assert (found.kl, found.top1_agreement, found.perplexity_ratio) == (0, 1, 1)
    assert found.tokens == 300
    surprise = 0.0
    for text in texts:
        ids = torch.tensor([text])
        with torch.no_grad():
            logs = F.log_softmax(oracle(ids).logits[0, :-1], 1)
        surprise -= float(logs.gather(1, ids[0, 1:, None]).sum())
    assert found.perplexity == pytest.approx(exp(surprise / 300), rel=1e-4)


def test_fewer_bits_move_more(model):
    spec, oracle = model
    formats = [CacheFormat(key=codec, value=codec) for codec in ("f16", "bf16")]
    half, coarse = drift(spec, texts_of(oracle), [*formats], dtype="f32")
    assert 0 < half.kl < coarse.kl
    assert [half.format, coarse.format] == formats


@pytest.mark.parametrize("texts", [[], [[5]], [[5, 6], [7]]])
def test_a_text_must_have_something_to_predict(model, texts):
    spec, _ = model
    with pytest.raises(InputError, match="text: nothing to predict"):
        drift(spec, texts, [PLAIN], dtype="f32")
