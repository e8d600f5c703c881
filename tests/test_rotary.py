"""Rotary positions that depend on how long sequences may become."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import VOCAB, Case, Served, Session, build, oracle_logits
from served_dense import CASES, LONGROPE

from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.engine.runner import Runner
from kvist.errors import UnsupportedModel
from kvist.model.rotary import Rotary
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

pytest.importorskip("transformers")

ORIGINAL = 64


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    case = CASES["phi3-longrope"]
    config = {**case.config, "original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE}
    return build(Case(model=case.model, config=config), tmp_path_factory.mktemp("phi3"))


def logits(directory: Path, prompt: np.ndarray[Any, Any], max_context: int) -> torch.Tensor:
    spec = replace(ModelSpec.read(directory), max_context=max_context)
    groups = groups_of(spec, CacheFormat(key="f32", value="f32"))
    layout = ArenaLayout.of(groups, 2**24)
    session = Session(Served(directory, None, Runner(spec, groups, layout, dtype="f32"), groups, layout), budget=50)
    session.run([prompt.tolist()], steps=1)
    return session.logits["0"][0]


@pytest.mark.parametrize(("length", "max_context"), [(200, 2048), (40, ORIGINAL)])
def test_the_longest_sequence_chooses_among_the_factors_of_longrope(phi3: Any, length: int, max_context: int) -> None:
    """transformers chooses by the sequence at hand: beyond the original context as kvist for long ones, else short."""
    prompt = np.random.default_rng(length).integers(3, VOCAB, length).astype(np.int32)
    expected = oracle_logits(phi3.oracle, prompt)[-1]
    found = logits(phi3.directory, prompt, max_context)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    other = logits(phi3.directory, prompt, ORIGINAL if max_context > ORIGINAL else 2048)
    assert float((other - expected).abs().max() / expected.abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"short_factor": [1.0] * 35}, "rope_scaling.short_factor: 35 divisors for 36 frequencies"),
        ({"original_max_position_embeddings": None}, "needs original_max_position_embeddings above 1, not None"),
    ],
)
def test_a_longrope_that_says_too_little_is_refused(change: dict[str, Any], says: str) -> None:
    scaling = LONGROPE | {"original_max_position_embeddings": 64} | change
    with pytest.raises(UnsupportedModel, match=says):
        Rotary(72, 10000.0, scaling, trained=64, longest=64)


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "truncate": False},
        {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25, "beta_slow": 2},
    ],
)
def test_yarn_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}
    config = LlamaConfig(head_dim=64, hidden_size=128, num_attention_heads=2, rope_parameters=dict(scaling))
    expected, length = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rotary = Rotary(64, 10000.0, scaling, trained=2048)
    assert torch.allclose(rotary.frequencies, expected, rtol=1e-6)
    assert rotary.length == pytest.approx(length)
