"""In which type an engine computes where none is asked for."""

import pytest
import torch

from kvist.engine import loading
from kvist.engine.loading import best_dtype
from kvist.kernels.cpu import cpu
from kvist.spec.model import ModelSpec


@pytest.fixture
def plain_processor(monkeypatch):
    """One that multiplies no bf16 in hardware."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def test_processors_for_bf16_compute_in_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(loading, "cpu", lambda: None)
    assert best_dtype(ModelSpec.read("deepseek-v3")) == "bf16"


def test_kernels_make_up_for_it_where_they_compute_all_that_is_much(plain_processor, monkeypatch):
    monkeypatch.setattr(loading, "cpu", object)
    kinds = {
        "llama-3-8b": "bf16",
        "gemma-3-27b": "bf16",
        "deepseek-v3": "f32",
        "mamba-1.4b": "f32",
        "jamba-v0.1": "f32",
    }
    assert {name: best_dtype(ModelSpec.read(name)) for name in kinds} == kinds


def test_pytorch_alone_is_faster_in_float32(plain_processor, monkeypatch):
    monkeypatch.setenv("KVIST_KERNELS", "torch")
    assert cpu() is None
    assert best_dtype(ModelSpec.read("llama-3-8b")) == "f32"
