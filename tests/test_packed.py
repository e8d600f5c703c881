"""Weights of 4 bits that stay packed, against products with the unpacked weights in float64."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from test_model import prompts_of, run_greedy, runner_of, worst_error
from test_weights import tiny_llama, write_llama

from kvist.kernels.cpu import cpu
from kvist.model import packed
from kvist.model.linear import Gated, Linear, Logits
from kvist.model.packed import FEW_ROWS, Codes, FewRows

pytestmark = pytest.mark.skipif(not packed._works(), reason="this machine does not multiply packed weights")

KINDS = ["Q4_0", "Q4_1"]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """PyTorch's operators serve where the C++ kernels do not run."""
    monkeypatch.setenv("KVIST_KERNELS", "torch")


def matrix_of(kind: str, rows: int, columns: int) -> tuple[Codes, torch.Tensor]:
    """A random matrix as the file's codes, and what the `gguf` package makes of them, float64."""
    number = GGMLQuantizationType[kind]
    values = np.random.default_rng(rows + columns).normal(0.01, 0.1, (rows, columns)).astype(np.float32)
    stored = quantize(values, number)
    return Codes.of_blocks(torch.from_numpy(stored), kind), torch.from_numpy(dequantize(stored, number)).double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square, relative."""
    return float((found.double() - expected).norm() / expected.norm())


def unpacked(codes: Codes) -> torch.Tensor:
    scales, minima = (t.double().repeat_interleave(32, dim=1) for t in (codes.scales, codes.minima))
    return codes.codes.double() * scales + minima


@pytest.mark.parametrize("kind", [*KINDS, "Q5_0", "Q8_0"])
def test_codes_are_what_the_gguf_package_unpacks(kind):
    codes, expected = matrix_of(kind, 7, 160)
    torch.testing.assert_close(unpacked(codes), expected, rtol=0, atol=1e-7)


def test_blocks_of_256_are_what_the_gguf_package_unpacks():
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (9, 2, 144), np.uint8)
    factors = rng.uniform(-0.01, 0.01, (9, 2, 2)).astype(np.float16)
    blocks[..., :4] = factors.view(np.uint8)
    stored = blocks.reshape(9, -1)
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType.Q4_K)).double()
    found = unpacked(Codes.of_blocks(torch.from_numpy(stored), "Q4_K"))
    # Two products are rounded to float16.
    assert (found - expected).abs().max() < 2**-10 * expected.abs().max()


def test_codes_of_two_widths_are_stacked_as_bytes():
    parts = [matrix_of("Q4_1", 8, 64), matrix_of("Q5_0", 4, 64)]
    stacked = Codes.stack([codes for codes, _ in parts])
    assert stacked.bits == 8
    torch.testing.assert_close(unpacked(stacked), torch.cat([weight for _, weight in parts]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (80, 96), (2 * packed._PACK_ROWS + 48, 64)])
def test_products_are_as_good_as_in_bf16(kind, outputs, inputs):
    codes, weight = matrix_of(kind, outputs, inputs)
    torch.manual_seed(1)
    bias = torch.randn(outputs).bfloat16()
    for rows in range(1, FEW_ROWS + 1):
        # As norms hand it on: rows with gaps.
        x = torch.randn(rows, 2 * inputs).bfloat16()[:, :inputs]
        expected = x.double() @ weight.t() + bias.double()
        plain = torch.nn.functional.linear(x, weight.bfloat16(), bias)
        assert error(FewRows(codes, bias)(x), expected) < 1.5 * error(plain, expected) < 0.01


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", None])
@pytest.mark.parametrize("vocab", [1003, 1024])
@pytest.mark.parametrize("choice", ["torch", "auto"])
def test_logits_of_any_vocabulary(rows, kind, vocab, choice, monkeypatch):
    """GPT-2's 50,257 tokens fill no whole panels."""
    monkeypatch.setenv("KVIST_KERNELS", choice)
    weight = torch.randn(vocab, 64).bfloat16()
    codes = None
    if kind is not None:
        raw = torch.from_numpy(quantize(weight.float().numpy(), GGMLQuantizationType[kind]))
        codes = Codes.of_blocks(raw, kind)
        weight = torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[kind])).bfloat16()
    x = torch.randn(rows, 64).bfloat16()
    for tied in (False, True):
        head = Logits(weight, codes, tied=tied)
        if not tied:
            assert (head.matrix is None) == (cpu() is None)
        found = head(x)
        exact = x.double() @ weight.double().T
        assert found.shape == (rows, vocab)
        assert found.dtype == torch.float32
        assert float((found - exact).abs().max() / exact.abs().max()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_without_kernels_is_not_copied(monkeypatch, dtype):
    """A vocabulary that fills no whole panels would be, with zeros below."""
    monkeypatch.setattr(torch.nn.functional, "pad", None)
    weight = torch.randn(97, 64).to(dtype)
    assert Logits(weight).weight is weight


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_products_are_nearly_as_good_as_in_bf16(activation):
    codes, weight = matrix_of("Q4_1", 192, 64)
    torch.manual_seed(2)
    bias, x = torch.randn(192).bfloat16(), torch.randn(FEW_ROWS, 64).bfloat16()
    gate, up = (x.double() @ weight.t() + bias.double()).chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    few, plain = (Gated(weight.bfloat16(), bias, activation, which)(x) for which in (codes, None))
    # Two results of bf16 more are rounded on the way than in the fused product.
    assert error(few, act * up) < 2 * error(plain, act * up) + 2**-9 < 0.01


def products_of(runner) -> dict[str, Linear | Gated]:
    return {
        f"{index}.{name}": product
        for index, layer in enumerate(runner.decoder.layers)
        for name, product in (
            ("qkv", layer.mixer.qkv), ("output", layer.mixer.output),
            ("gate_up", layer.mlp.gate_up), ("down", layer.mlp.down),
        )
    }  # fmt: skip


@pytest.mark.parametrize("types", [["Q4_0"], ["Q4_1"], KINDS], ids="+".join)
def test_stacked_and_reordered_weights_stay_packed(tmp_path, types):
    # Three queries a KV head: orders of heads that are not their own inverse.
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=192)
    runner, *_ = runner_of(write_llama(tmp_path / "tiny.gguf", model, types=types), dtype="bf16")
    torch.manual_seed(3)
    for name, product in products_of(runner).items():
        assert product.few_rows is not None, name
        inputs = product.few_rows.codes.shape[1] * 2
        x = torch.randn(FEW_ROWS, inputs).bfloat16()
        # The same rows among more go the other way.
        expected = product(torch.cat((x, x)))[:FEW_ROWS].double()
        assert 0 < error(product(x), expected) < 0.01, name


def test_decodes_on_packed_weights_equal_transformers(tmp_path, monkeypatch):
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=192)
    built = runner_of(write_llama(tmp_path / "tiny.gguf", model, types=KINDS), dtype="bf16")
    rows: list[int] = []
    product = FewRows.__call__
    monkeypatch.setattr(FewRows, "__call__", lambda self, x: rows.append(len(x)) or product(self, x))
    assert worst_error(model, run_greedy(built, prompts_of(60, 5, 33), steps=8)) < 0.05
    # Of steps, products, layers; of the prompts' step what lies behind the last layer's attention.
    assert rows == [3] * (7 * 4 * 3 + 3)
    rows.clear()
    assert worst_error(model, run_greedy(built, prompts_of(*range(5, 5 + FEW_ROWS + 1)), steps=4)) < 0.05
    assert rows == []


def test_weights_of_other_types_are_unpacked(tmp_path):
    # Matrices come in the order embeddings, then a layer's q, k, v, o, gate, up, down.
    types = ["Q8_0"] + ["Q4_1", "Q4_1", "Q5_1", "Q4_0", "F16", "Q4_0", "Q4_1"] * 3
    model = tiny_llama()
    built = runner_of(write_llama(tmp_path / "tiny.gguf", model, types=types), dtype="bf16")
    found = {name: product.few_rows is not None for name, product in products_of(built[0]).items()}
    assert found == {name: name[2:] in ("output", "down") for name in found}
    assert worst_error(model, run_greedy(built, prompts_of(20, 3))) < 0.05


def test_heads_that_are_no_whole_groups_keep_their_output_unpacked(tmp_path):
    model = tiny_llama(head_dim=16, num_attention_heads=8)
    built = runner_of(write_llama(tmp_path / "tiny.gguf", model, types=["Q4_1"]), dtype="bf16")
    found = {name: product.few_rows is not None for name, product in products_of(built[0]).items()}
    assert found == {name: name[2:] != "output" for name in found}
    assert worst_error(model, run_greedy(built, prompts_of(20, 3))) < 0.05


def test_only_bf16_is_packed_and_only_where_it_is_computed(tmp_path, monkeypatch):
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama(), types=["Q4_1"])
    assert not packed.can_multiply(matrix_of("Q4_0", 24, 32)[0])
    assert not packed.can_multiply(matrix_of("Q8_0", 32, 32)[0])
    for dtype in ("f32", "f16"):
        assert all(product.few_rows is None for product in products_of(runner_of(path, dtype=dtype)[0]).values())
    monkeypatch.setattr(packed, "_works", lambda: False)
    assert all(product.few_rows is None for product in products_of(runner_of(path, dtype="bf16")[0]).values())


def test_a_missing_operator_is_no_error(monkeypatch):
    def refuse(self, weight, bias):
        raise AttributeError("_convert_weight_to_int4pack_for_cpu")

    monkeypatch.setattr(FewRows, "__init__", refuse)
    assert packed._works.__wrapped__() is False
