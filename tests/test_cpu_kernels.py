"""The C++ kernels against the references: attention read byte by byte from the arena, norms and rotation in float64."""

import gc
import platform
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fixtures_attention
import numpy as np
import pytest
import torch
from fixtures_attention import group_of, make_scene
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from test_equivalence import QUESTIONS, relative_error, watch
from test_model import prompts_of, run_greedy, runner_of, worst_error
from test_weights import tiny_llama, write_llama

from kvist.engine.engine import Engine
from kvist.errors import InputError
from kvist.kernels import cpu as cpu_module
from kvist.kernels.cpu import Cpu, cpu
from kvist.kernels.dense import Scores
from kvist.kernels.hadamard import hadamard
from kvist.kernels.matrix import Matrix
from kvist.kernels.paged import PagedAttention
from kvist.kernels.sharing import sharing_order
from kvist.model.norms import FusedResidual, RMSNorm
from kvist.model.packed import Codes

BF16 = torch.bfloat16
IN_INTEGERS = platform.machine() == "x86_64"


PORTABLE = ["portable-0", "portable-1", "portable-2"]


def kinds():
    module = cpu_module._module()
    if module is None or not module.has_avx512():
        return []
    return ["avx512", "amx"] if module.ask_for_amx() else ["avx512"]


def made(kind):
    """The kernels of a kind, or of a build of the portable ones."""
    name, _, build = kind.partition("-")
    module = cpu_module._module()
    here = [] if module is None else module.portable_builds()
    if int(build) not in here if build else kind not in kinds():
        pytest.skip(f"no {kind} kernels on this machine")
    return replace(cpu_module._chosen(name), build=int(build)) if build else cpu_module._chosen(name)


@pytest.fixture(params=["avx512", "amx", *PORTABLE])
def kernels(request, monkeypatch):
    found = made(request.param)
    monkeypatch.setenv("KVIST_KERNELS", found.name)
    monkeypatch.setattr(cpu_module, "_chosen", lambda choice: found)
    return found


def check(kernels, scene, *, repeats=3, softcap=None, seed=0):
    """Run every layer and hold it against the oracle."""
    group = scene.group
    order = sharing_order([span.table for span in scene.spans])
    scene.spans = [scene.spans[index] for index in order]
    tokens = sum(span.count for span in scene.spans)
    scores = Scores(scale=group.layer.key_dim**-0.5, softcap=softcap)
    assert PagedAttention.suits(scene.store, BF16, repeats)
    plan = PagedAttention(kernels, scene.store, scores, repeats).plan(scene.spans)
    generator = torch.Generator().manual_seed(seed)
    heads, dim = group.layer.kv_heads, group.layer.key_dim
    for slot in range(len(group.layers)):
        projected = torch.randn(tokens, (repeats + 2) * heads, dim, generator=generator).to(BF16)
        q = projected[:, : repeats * heads].view(tokens, repeats, heads, dim)
        out = plan.attend(slot, q, projected[:, repeats * heads :])
        assert out.shape == (tokens, repeats * heads * dim)
        expected = scene.expected(slot, q, scores.scale, softcap)
        # Weights and results are rounded to bf16, 8 bits, once each.
        assert (out.double() - expected).abs().max() < 0.012 * max(1, expected.abs().max())


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 40, 130, 300]), st.sampled_from([1, 1, 1, 2, 5, 13, 40, 70])),
        min_size=1,
        max_size=5,
    ),
    leaders=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=5, max_size=5),
    limit=st.sampled_from(
        [{}, {}, {"window": 3}, {"window": 16}, {"window": 33}, {"window": 150}, {"chunk": 32}, {"chunk": 96}]
    ),
    heads=st.sampled_from([(1, 4), (2, 3), (3, 1), (2, 5), (17, 1)]),
    dim=st.sampled_from([32, 64, 96, 256]),
    block_tokens=st.sampled_from([16, 32]),
    softcap=st.sampled_from([None, None, 2.0]),
    kind=st.sampled_from(["avx512", "amx"]),
    seed=st.integers(0, 100),
)
def test_any_step_equals_the_reference(parts, leaders, limit, heads, dim, block_tokens, softcap, kind, seed):
    chosen = made(kind)
    group = group_of(kv_heads=heads[0], **limit, block_tokens=block_tokens, key="bf16", value="bf16", dim=dim, layers=2)
    scene = make_scene(group, parts, seed=seed, shared=leaders[: len(parts)])
    check(chosen, scene, repeats=heads[1], softcap=softcap, seed=seed)


def test_long_contexts_are_cut_among_threads(kernels):
    group = group_of(kv_heads=1, key="bf16", value="bf16", dim=64, block_tokens=16, layers=1)
    check(kernels, make_scene(group, [(3000, 1)]))
    check(kernels, make_scene(group, [(2990, 7), (40, 1)]), repeats=2)


@pytest.mark.parametrize("repeats", [17, 71, 256])
def test_one_head_of_many_queries(kernels, repeats):
    group = group_of(kv_heads=1, key="bf16", value="bf16", dim=32, block_tokens=48, layers=1)
    check(kernels, make_scene(group, [(20, 5), (0, 1), (130, 1)]), repeats=repeats)


def test_more_queries_of_a_head_than_a_thread_holds_are_left_to_pytorch():
    group = group_of(kv_heads=1, key="bf16", value="bf16", dim=32, block_tokens=16, layers=1)
    store = make_scene(group, [(0, 1)]).store
    assert PagedAttention.suits(store, BF16, 256)
    assert not PagedAttention.suits(store, BF16, 257)


def test_memory_that_was_never_written_is_never_read(kernels, monkeypatch):
    """Not a number in every place that holds no token: none may reach a result."""
    monkeypatch.setattr(
        fixtures_attention,
        "poisoned_arena",
        lambda layout, group: torch.full((layout.total_bytes,), 255, dtype=torch.uint8),
    )
    for window, softcap in ((None, None), (20, None), (None, 5.0)):
        group = group_of(window=window, key="bf16", value="bf16", dim=64, block_tokens=64, layers=1)
        check(kernels, make_scene(group, [(0, 1), (70, 9), (33, 40)]), softcap=softcap)


def test_windows_of_long_contexts(kernels):
    group = group_of(kv_heads=1, window=150, key="bf16", value="bf16", dim=64, block_tokens=16, layers=1)
    check(kernels, make_scene(group, [(600, 300), (650, 1), (39, 2)]), repeats=2)


@pytest.mark.parametrize(("heads", "dim", "normed"), [(5, 64, False), (3, 256, True), (2, 80, True), (1, 20, False)])
def test_rotation(kernels, heads, dim, normed):
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(7, heads + 2, dim, generator=generator).to(BF16)
    x = wide[:, :heads]
    angles = torch.rand(7, dim // 2, generator=generator) * 6
    multiplier = torch.rand(heads, dim, generator=generator) + 0.5 if normed else None
    expected = x.double()
    if normed:
        expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * multiplier.double()
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    one, two = expected.chunk(2, dim=-1)
    expected = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    before = wide[:, heads:].clone()
    kernels.rotate(x, angles.cos(), angles.sin(), multiplier, 1e-6)
    assert (x.double() - expected).abs().max() < 0.005 * expected.abs().max()
    assert torch.equal(wide[:, heads:], before)


@pytest.mark.parametrize(("dim", "heads"), [(32, 5), (64, 3), (96, 2), (128, 1), (256, 2)])
def test_spreading(kernels, dim, heads):
    """Against the product with the matrix in float64; one rounding to bf16."""
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(21, heads + 2, dim, generator=generator).to(BF16)
    matrix = hadamard(dim, BF16)
    before, x = wide.clone(), wide[:, 1:-1]
    expected = x.double() @ matrix.double()
    assert kernels.spreads(dim)
    kernels.spread(x, float(matrix[0, 0]))
    assert ((x.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * before.double().abs().amax()).all()
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, -1], before[:, -1])


def test_weights_outlive_each_other(kernels):
    """Small weights share memory: one that goes leaves the others as they are."""
    torch.manual_seed(0)
    made = []
    for turn in range(40):
        weight = torch.randn(1024, 1024).to(BF16)
        matrix = Matrix(kernels, weight.shape, "f32", None, bits=16)
        matrix.fill(weight)
        made.append((matrix, weight))
        if turn % 3:
            made.pop(turn % len(made))
    x = torch.randn(1, 1024).to(BF16)
    for matrix, weight in made:
        expected = x.double() @ weight.double().t()
        assert (matrix(x).double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("width", [16, 576, 640, 100])
@pytest.mark.parametrize("after", [False, True])
def test_the_stream_of_residuals(kernels, width, after):
    generator = torch.Generator().manual_seed(width)
    x, change = (torch.randn(9, width, generator=generator).to(BF16) for _ in range(2))
    norms = [RMSNorm(torch.rand(width, generator=generator) + 0.5, 1e-6) for _ in range(3)]
    stream = FusedResidual(x.clone(), kernels)
    first = stream.normed(norms[0])

    def normed(v, norm):
        return v / (v.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.multiplier.double()

    assert (first.double() - normed(x.double(), norms[0])).abs().max() < 0.02
    stream.add(change, norms[1] if after else None)
    some = stream.rows(torch.tensor([8, 2]))
    second = stream.normed(norms[2])
    added = x.double() + (normed(change.double(), norms[1]) if after else change.double())
    assert (stream.x.double() - added).abs().max() < 0.03
    chosen = some.normed(norms[2])
    assert (some.x.double() - added[[8, 2]]).abs().max() < 0.05
    assert (chosen.double() - normed(some.x.double(), norms[2])).abs().max() < 0.02
    assert (second.double() - normed(stream.x.double(), norms[2])).abs().max() < 0.02


def codes_of(kind, outputs, inputs):
    """A random matrix as a file stores it, and what the `gguf` package makes of it."""
    number = GGMLQuantizationType[kind]
    values = np.random.default_rng(outputs + inputs).normal(0.01, 0.1, (outputs, inputs)).astype(np.float32)
    stored = quantize(values, number)
    return Codes.of_blocks(torch.from_numpy(stored), kind), torch.from_numpy(dequantize(stored, number))


@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (160, 576), (96, 1536), (608, 64)])
@pytest.mark.parametrize("result", ["bf16", "f32", "silu", "gelu"])
def test_products(kernels, kind, outputs, inputs, result):
    torch.manual_seed(outputs)
    bias = torch.randn(outputs)
    if kind == "BF16":
        weight = (torch.randn(outputs, inputs) * 0.1).to(BF16)
        matrix = Matrix(kernels, weight.shape, result, bias, bits=16)
        matrix.fill(weight)
    else:
        codes, weight = codes_of(kind, outputs, inputs)
        matrix = Matrix(kernels, weight.shape, result, bias, bits=codes.bits)
        matrix.fill_codes(codes.codes, codes.scales, codes.minima)
    for rows in (1, 5, 8, 9, 16, 17, 33, 64, 70):
        x = torch.randn(rows, 2 * inputs).to(BF16)[:, :inputs]
        # Few rows are multiplied with codes as they are, on the portable kernels all; else weights are rounded to bf16.
        in_bytes = kernels.name == "amx" and kind != "BF16" and rows <= 8
        exact = in_bytes or (kernels.name == "amx" and kind in ("Q4_0", "Q4_1") and rows <= 16)
        exact = exact or kernels.name == "portable"
        expected = x.double() @ (weight if exact else weight.to(BF16)).double().t() + bias.double()
        if result in ("silu", "gelu"):
            gate, other = expected.chunk(2, dim=1)
            act = (
                torch.nn.functional.silu(gate)
                if result == "silu"
                else torch.nn.functional.gelu(gate, approximate="tanh")
            )
            expected = act * other
        found = matrix(x)
        assert found.dtype == (torch.float32 if result == "f32" else BF16)
        # One rounding to bf16 at the end; in float32 only the order of the sum differs.
        bound = 1e-5 if result == "f32" else 2**-8
        assert (found.double() - expected).abs().max() <= bound * expected.abs().max(), rows


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("result", ["bf16", "f32"])
def test_what_bytes_leave_of_inputs(kernels, kind, result):
    """Of 32 inputs those far below the largest lose bits, by a bound that holds for every input; in float64."""
    torch.manual_seed(3)
    outputs, inputs = 64, 192
    codes, weight = codes_of(kind, outputs, inputs)
    matrix = Matrix(kernels, weight.shape, result, None, bits=codes.bits)
    matrix.fill_codes(codes.codes, codes.scales, codes.minima)
    one_each = torch.arange(inputs) % 32 == 5
    loses = kernels.name != "avx512" and (kernels.name == "amx" or IN_INTEGERS)
    # Powers of two, of the largest: from where on inputs are exact, and how much others may lose.
    least, most = (2.0**-7, 2.0**-16) if kernels.name == "portable" else (2.0**-6, 2.0**-14)
    if kernels.name == "amx" and result == "f32":
        least, most = 2.0**-13, 2.0**-21
    for rows in range(1, 9):
        spread = torch.randn(rows, inputs) * 2.0 ** torch.randint(-30, 1, (rows, inputs))
        # A large input in every step, whose weight then hides nothing of the others: they have outputs of their own.
        x = torch.where(one_each, torch.randn(rows, inputs).abs() + 1, spread).to(BF16)
        groups = x.double().view(rows, -1, 32)
        power = 2.0 ** groups.abs().amax(-1, keepdim=True).log2().floor()
        exact = groups.abs() >= power * least
        lost = torch.where(exact, 0, power * most).view(rows, inputs)
        left, right = x.double(), (weight.to(BF16) if kernels.name == "avx512" else weight).double().t()
        bound = lost @ right.abs() if loses else 0
        bound = bound + 1e-6 * (left.abs() @ right.abs())
        if result == "bf16":
            bound = bound + 2**-8 * (left @ right).abs()
        assert ((matrix(x).double() - left @ right).abs() <= bound).all(), rows


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_inputs_that_are_no_numbers_make_results_that_are_none(kernels, value):
    for kind in ("Q4_0", "Q8_0"):
        codes, weight = codes_of(kind, 32, 96)
        matrix = Matrix(kernels, weight.shape, "f32", None, bits=codes.bits)
        matrix.fill_codes(codes.codes, codes.scales, codes.minima)
        for rows in (1, 2, 3, 8, 9, 17):
            x = torch.randn(rows, 96).to(BF16)
            x[-1, 40] = value
            found = matrix(x).isfinite()
            assert not found[-1].any(), rows
            assert found[:-1].all(), rows


def test_large_and_negative_gates_stay_finite(kernels):
    weight = torch.cat((torch.eye(32), torch.eye(32))).to(BF16)
    x = torch.tensor([0.0, 1e4, -1e4, 3e38, -3e38, 88.0, -88.0, 1e-30]).repeat(4)[None].to(BF16)
    for result in ("silu", "gelu"):
        matrix = Matrix(kernels, weight.shape, result, None, bits=16)
        matrix.fill(weight)
        assert not matrix(x).isnan().any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_no_rows_are_no_work(kernels, kind):
    """A step of a prompt's chunk samples nothing, and asks the head for no rows."""
    codes, weight = codes_of(kind, 64, 96)
    matrix = Matrix(kernels, weight.shape, "f32", None, bits=codes.bits)
    matrix.fill_codes(codes.codes, codes.scales, codes.minima)
    assert matrix(torch.empty(0, 96, dtype=BF16)).shape == (0, 64)


def test_many_rows_share_a_decoded_panel(kernels):
    codes, weight = codes_of("Q4_1", 64, 96)
    matrix = Matrix(kernels, weight.shape, "bf16", None, bits=4)
    matrix.fill_codes(codes.codes, codes.scales, codes.minima)
    x = torch.randn(2 * 1024 + 7, 96).to(BF16)
    expected = x.double() @ weight.to(BF16).double().t()
    assert (matrix(x).double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_a_model_decodes_on_its_stored_weights(kernels, tmp_path):
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=192)
    path = write_llama(tmp_path / "tiny.gguf", model, types=["Q4_0", "Q4_1", "Q8_0"])
    built = runner_of(path, dtype="bf16")
    for layer in built[0].decoder.layers:
        for product in (layer.mixer.qkv, layer.mixer.output, layer.mlp.gate_up, layer.mlp.down):
            assert product.matrix is not None
    assert worst_error(model, run_greedy(built, prompts_of(60, 5, 33), steps=8)) < 0.05


def test_the_variable_chooses(monkeypatch):
    monkeypatch.setenv("KVIST_KERNELS", "torch")
    assert cpu() is None
    monkeypatch.setenv("KVIST_KERNELS", "neon")
    with pytest.raises(InputError, match="KVIST_KERNELS: 'neon'"):
        cpu()


def test_an_empty_variable_is_none_and_a_bad_one_is_refused_in_every_type(monkeypatch):
    monkeypatch.setenv("KVIST_KERNELS", "")
    assert cpu() is cpu_module._chosen("auto")
    monkeypatch.setenv("KVIST_KERNELS", "neon")
    with pytest.raises(InputError, match="KVIST_KERNELS: 'neon'"):
        cpu_module.kernels_of(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("choice", ["amx", "avx512"])
def test_kernels_that_are_not_to_be_had_are_refused_in_every_type(monkeypatch, choice, dtype):
    module = SimpleNamespace(has_avx512=lambda: False, portable_builds=lambda: [0, 1])
    monkeypatch.setattr(cpu_module, "_module", lambda: module)
    monkeypatch.setattr(cpu_module, "_chosen", cpu_module._chosen.__wrapped__)
    monkeypatch.setenv("KVIST_KERNELS", choice)
    for find in (cpu_module.kernels_of, cpu_module.attention_kernels):
        with pytest.raises(InputError, match=f"KVIST_KERNELS: '{choice}' is not to be had here; .* portable, torch$"):
            find(dtype)


def test_kernels_follow_the_threads_of_pytorch(kernels):
    asked = []

    class Module:
        Plan = staticmethod(lambda **_: None)
        Segment = staticmethod(lambda **_: None)
        Geometry = staticmethod(lambda **_: None)

        @staticmethod
        def borrow_threads(start, threads):
            asked.append((start, threads))

    group = group_of(key="bf16", value="bf16", dim=32, block_tokens=16, layers=1)
    scene = make_scene(group, [(0, 1)])
    before = torch.get_num_threads()
    memory = PagedAttention(Cpu(name="avx512", module=Module), scene.store, Scores(scale=1.0, softcap=None), 1)
    try:
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            memory.plan(scene.spans)
    finally:
        torch.set_num_threads(before)
    assert [threads for _, threads in asked] == [1, 3, 1]


def test_a_plan_holds_what_it_reads(kernels):
    """The kernels have addresses, which keep nothing: the plan must."""
    scene = make_scene(group_of(key="bf16", value="bf16", dim=32, block_tokens=16, layers=1), [(20, 1)])
    plan = PagedAttention(kernels, scene.store, Scores(scale=1.0, softcap=None), 1).plan(scene.spans)
    store = weakref.ref(scene.store)
    del scene
    gc.collect()
    assert store() is not None
    del plan
    gc.collect()
    assert store() is None


def test_engines_on_threads_of_their_own(kernels):
    """Two threads multiply at once, each with a team, and what they worked in goes with them."""
    codes, weight = codes_of("Q4_0", 160, 576)
    matrix = Matrix(kernels, weight.shape, "f32", None, bits=4)
    matrix.fill_codes(codes.codes, codes.scales, codes.minima)
    inputs = [torch.randn(rows, 576).to(BF16) for rows in (3, 70)]
    expected = [matrix(x) for x in inputs]
    for _ in range(4):
        with ThreadPoolExecutor(2) as pool:
            for place, found in enumerate(pool.map(lambda x: [matrix(x) for _ in range(20)], inputs)):
                assert all(torch.equal(one, expected[place]) for one in found)


def test_files_for_some_processors_emit_nothing_that_others_share():
    """A template of the standard library that they emit could be linked into code for every processor."""
    allowed = {
        "min", "max", "clamp", "sqrt", "exp2", "memcpy", "memset", "atomic", "memory_order_relaxed", "logic_error",
        "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "size_t",
    }  # fmt: skip
    folder = Path(cpu_module.__file__).parent
    files = [path for path in folder.glob("cpu*") if path.suffix in (".cpp", ".h")]
    files = [path for path in files if "__m512" in path.read_text() or path.name.startswith("cpu_portable")]
    assert len(files) == 30
    for path in files:
        assert set(re.findall(r"std::(\w+)", path.read_text())) <= allowed, path


def test_the_sanitizer_is_told_of_what_it_does_not_see():
    """Masked accesses, and tiles, whose shapes it must know: cpu_avx512.h has them all but a few masked ones."""
    for path in Path(cpu_module.__file__).parent.glob("cpu*"):
        if path.suffix not in (".cpp", ".h") or path.name == "cpu_avx512.h":
            continue
        text = path.read_text()
        assert not re.search(r"ldtilecfg|tileloadd|tilestored|_tile_\w+\(", text), path
        for found in re.finditer(r"_mm\d+_maskz?_(load|store)u?_|_mm\d+_mask\w*(gather|scatter|compress|expand)", text):
            assert "is_read" in text[: found.start()][-400:] or "is_written" in text[: found.start()][-400:], path


def test_without_the_extension_pytorch_computes_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu_module, "_module", lambda: None)
    cpu_module._chosen.cache_clear()
    monkeypatch.setenv("KVIST_KERNELS", "auto")
    assert cpu() is None
    assert cpu() is None
    assert [record.message.startswith("the C++ kernels were not built") for record in caplog.records] == [True]
    monkeypatch.setenv("KVIST_KERNELS", "avx512")
    with pytest.raises(InputError, match="choose one of torch"):
        cpu()
    cpu_module._chosen.cache_clear()


# Mean and largest difference of logits from float32's, by the largest logit, over the prompts below.
REAL = {"smollm2_path": (0.025, 0.06), "gemma_path": (0.025, 0.06)}


@pytest.mark.parametrize("model", list(REAL))
def test_real_models_keep_to_float32(model, request, monkeypatch):
    """Prompts past Gemma's window, in chunks, beside short ones, then a few decoded tokens, on each kind of kernel."""
    path = request.getfixturevalue(model)
    exact = Engine(path, dtype="f32", memory="384MiB")
    words = " ".join(f"{index} {question}" for index, question in enumerate(QUESTIONS * 3))
    prompts = [exact.tokenizer.encode(text) for text in (*QUESTIONS[:3], words)]
    assert len(prompts[-1]) > 550
    expected = logits_of(exact, prompts, steps=1)[0]
    for kind in ["torch", *kinds()]:
        monkeypatch.setenv("KVIST_KERNELS", kind)
        engine = Engine(path, dtype="bf16", memory="192MiB", max_batch_tokens=300)
        found, answers = logits_of(engine, prompts, steps=5)
        longer = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
        last = logits_of(exact, longer, steps=1)[0]
        errors = [
            relative_error(ours[place], theirs[0])
            for place, right in ((0, expected), (-1, last))
            for ours, theirs in zip(found, right, strict=True)
        ]
        mean, most = REAL[model]
        assert (sum(errors) / len(errors) < mean, max(errors) < most) == (True, True), (kind, errors)


def logits_of(engine, prompts, *, steps):
    """Logits of each step and the tokens, by prompt."""
    rows = watch(engine)
    answers = engine.generate(prompts, max_tokens=steps, temperature=0, ignore_eos=True)
    seen = [rows[key] for key in sorted(rows, key=lambda key: int(key.split("-")[1]))][-len(prompts) :]
    return seen, [answer.tokens for answer in answers]
