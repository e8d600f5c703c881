"""Products on the portable kernels: what a row depends on, inputs of any size, and what is kept of them."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvist.kernels import cpu as cpu_module
from kvist.kernels.cpu import Cpu
from kvist.kernels.matrix import Matrix

BF16 = torch.bfloat16
BUILDS = {"baseline": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(params=BUILDS)
def kernels(request):
    module = cpu_module._module()
    if module is None or BUILDS[request.param] not in module.portable_builds():
        pytest.skip("these kernels are not to be had on this machine")
    kernels = Cpu(name="portable", module=module, build=BUILDS[request.param])
    kernels.follow_threads()
    return kernels


def weight_of(kernels, bits, outputs, inputs, generator, *, result="f32", scale=0.02):
    """A matrix of random codes, or in bf16, and what it is in float64."""
    matrix = Matrix(kernels, torch.Size((outputs, inputs)), result, None, bits=bits)
    if bits == 16:
        weight = (torch.randn(outputs, inputs, generator=generator) * scale).to(BF16)
        matrix.fill(weight)
        return matrix, weight.double()
    least, most, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(least, most, (outputs, inputs), dtype=dtype, generator=generator)
    scales, minima = (
        (torch.randn(outputs, inputs // 32, generator=generator) * size).half() for size in (scale, 8 * scale)
    )
    matrix.fill_codes(codes, scales, minima)
    factors, offsets = (each.double().repeat_interleave(32, dim=1) for each in (scales, minima))
    return matrix, codes.double() * factors + offsets


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_row_depends_neither_on_its_neighbours_nor_on_threads(kernels, bits):
    generator = torch.Generator().manual_seed(bits)
    matrix, _ = weight_of(kernels, bits, 96, 160, generator)
    x = torch.randn(300, 160, generator=generator).to(BF16)
    alone = torch.cat([matrix(row[None]) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            kernels.follow_threads()
            for rows in (2, 3, 4, 5, 7, 63, 65, 257, 300):
                assert torch.equal(matrix(x[:rows]), alone[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)
        kernels.follow_threads()


@pytest.mark.parametrize("scale", [0.02, 1e-6, 0.0])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_inputs_of_any_size(kernels, bits, scale):
    """Within a bound that holds for every input; scales and minima of both signs, in float16's subnormal ones too."""
    generator = torch.Generator().manual_seed(bits)
    matrix, weight = weight_of(kernels, bits, 96, 192, generator, scale=scale)
    ordinary = torch.randn(6, 192, generator=generator)
    place = torch.arange(192)
    cases = [ordinary * size for size in (1.0, 1e-20, 1e-29, 1e-31, 1e-38, 1e-40, 0.0, 1e20, 1e34)]
    cases.append(torch.where(place == 70, 1e30, ordinary * 1e-6))
    cases.append(ordinary * torch.where(place < 64, 1e30, 1e-30))
    for rows in (1, 6):
        for number, case in enumerate(cases):
            x = case[:rows].to(BF16)
            left, right = x.double(), weight.t()
            # Of 32 inputs each is rounded by the largest, or is 0 where all are below 1e-30; float32 has 2^-149.
            steps = left.view(rows, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(rows, 192)
            lost = (steps * 2.0**-15).where(steps > 1e-30, steps) if bits != 16 else torch.zeros_like(left)
            bound = lost @ right.abs() + 1e-6 * (left.abs() @ right.abs()) + 192 * 2.0**-149
            assert ((matrix(x).double() - left @ right).abs() <= bound).all(), (number, rows)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("result", ["bf16", "f32", "silu", "gelu"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_what_is_no_number_stays_in_its_row(kernels, bits, result, value):
    generator = torch.Generator().manual_seed(bits)
    matrix, _ = weight_of(kernels, bits, 64, 96, generator, result=result)
    for rows in (1, 3, 4, 5, 65, 257):
        for row in {0, rows // 2, rows - 1}:
            for place in (0, 63):
                x = torch.randn(rows, 96, generator=generator).to(BF16)
                x[row, place] = value
                finite = matrix(x).isfinite()
                assert not finite[row].any(), (rows, row, place)
                assert finite.sum() == (rows - 1) * finite.shape[1], (rows, row, place)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the process holds from /proc")
@pytest.mark.parametrize("bits", [4, 16])
def test_long_steps_keep_no_more_than_short_ones(kernels, bits):
    if kernels.module.sanitized:
        pytest.skip("sanitizers hold what is given back")
    generator = torch.Generator().manual_seed(bits)
    matrix, _ = weight_of(kernels, bits, 32, 4096, generator)
    x = torch.zeros(8192, 4096, dtype=BF16).fill_(0.5)

    def grown(rows):
        before = resident()
        matrix(x[:rows])
        return resident() - before

    # On a thread that has worked in nothing yet. In float32 all inputs would take 128 MiB.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(grown, 1).result()
        assert pool.submit(grown, len(x)).result() < 2**24


def resident():
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
