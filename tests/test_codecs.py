"""Codecs against a model that codes one element after another and counts every byte from the drawing."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch

from kvist.errors import InputError
from kvist.spec.formats import CODECS
from kvist.store.codecs import PLAIN, STORED, Coding

GROUPED = ["int8", "int4", "int4a"]
QUANTISED = ["fp8", *GROUPED]


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))


def f16(number: np.float32) -> np.float32:
    return np.float32(np.float16(np.clip(number, -65504, 65504)))


def coded(codec: str, group: list[np.float32]) -> tuple[list[int], list[np.float32]]:
    """Codes and f16 numbers of one group, by the formula; codes as they are stored."""

    def divided(x: np.float32, low: int, high: int) -> int:
        # Python rounds to even from the middle too.
        return min(high, max(low, round(float(x / d)))) if d else 0

    if codec == "int8":
        d = f16(max(abs(x) for x in group) / np.float32(127))
        return [divided(x, -127, 127) & 0xFF for x in group], [d]
    if codec == "int4":
        m = np.float32(0)
        for x in group:
            m = x if abs(x) > abs(m) else m
        d = f16(m / np.float32(-8))
        return [divided(x, -8, 7) + 8 for x in group], [d]
    d, low = f16((max(group) - min(group)) / np.float32(15)), f16(min(group))
    return [divided(x - low, 0, 15) for x in group], [d, low]


def e4m3(x: float) -> int:
    """The byte of the nearest e4m3fn number, that of an even byte from the middle."""

    def number(byte: int) -> float:
        exponent, mantissa = byte >> 3 & 15, byte & 7
        return math.ldexp(mantissa / 8 + (exponent > 0), max(exponent, 1) - 7)

    best = min(range(0x7F), key=lambda byte: (abs(number(byte) - min(abs(x), 448.0)), byte & 1))
    return best | (0x80 if math.copysign(1, x) < 0 else 0)


def model_run(codec: str, side: str, vectors: np.ndarray) -> bytes:
    """One head's run of ``[T, D]`` float32."""
    tokens, dim = vectors.shape
    groups = dim // 32
    if codec == "fp8":
        return bytes(e4m3(float(x)) for x in vectors.ravel())
    codes = [[0] * dim for _ in range(tokens)]
    floats: list[list[list[np.float32]]] = [[[] for _ in range(groups)] for _ in range(tokens)]
    for t in range(tokens):
        for g in range(groups):
            codes[t][32 * g : 32 * g + 32], floats[t][g] = coded(codec, list(vectors[t, 32 * g : 32 * g + 32]))
    out = bytearray()
    if side == "key":
        for t in range(tokens):
            for g in range(groups):
                group = codes[t][32 * g : 32 * g + 32]
                out += bytes(group if codec == "int8" else [group[i] | group[i + 16] << 4 for i in range(16)])
        for t in range(tokens):
            for g in range(groups):
                out += b"".join(struct.pack("<e", number) for number in floats[t][g])
        return bytes(out)
    if codec == "int8":
        out += bytes(codes[t][i] for i in range(dim) for t in range(tokens))
    else:
        for a in range(dim // 4):
            for j in range(2):
                out += bytes(codes[t][4 * a + j] | codes[t][4 * a + 2 + j] << 4 for t in range(tokens))
    for kind in range(2 if codec == "int4a" else 1):
        for g in range(groups):
            out += b"".join(struct.pack("<e", floats[t][g][kind]) for t in range(tokens))
    return bytes(out)


def vectors_of(generator: torch.Generator, tokens: int, dim: int) -> torch.Tensor:
    """Vectors of many magnitudes, some groups of them hard: nothing, one huge element, hardly anything, ties."""
    x = torch.randn(tokens, dim // 32, 32, generator=generator)
    x *= torch.logspace(-8, 3, tokens)[torch.randperm(tokens, generator=generator)][:, None, None]
    flat = x.view(-1, 32)
    flat[0] = 0
    flat[1, 5] = 3e5
    flat[2] *= 1e-7
    flat[3] = torch.arange(32) * 0.5 - 7
    flat[4] = 1000 + flat[4]
    flat[5] = torch.tensor([-3.0, 3.0]).repeat(16)
    flat[6] = 5e-8
    return x.flatten(1)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize(("tokens", "dim"), [(16, 64), (4, 96), (3, 128)])
def test_every_byte_is_where_the_drawing_says(
    codec: str, side: str, tokens: int, dim: int, generator: torch.Generator
) -> None:
    coding = Coding(codec, side=side, dim=dim, tokens=tokens)
    x = torch.stack([vectors_of(generator, tokens, dim) for _ in range(2)])
    runs = coding.pack(x)
    assert runs.shape == (2, coding.run_bytes)
    for found, vectors in zip(runs, x, strict=True):
        expected = model_run(codec, side, vectors.numpy())
        codes = tokens * dim * CODECS[codec].bits // 8 if codec in CODECS else tokens * dim // 2
        assert found[:codes].numpy().tobytes() == expected[:codes]
        # As numbers: a scale of nothing may have either sign.
        scales = found[codes:].numpy().view(np.float16)
        assert np.array_equal(scales, np.frombuffer(expected[codes:], np.float16))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("codec", STORED)
def test_sizes_are_those_that_are_planned(codec: str, side: str) -> None:
    for tokens, dim in ((16, 64), (1, 32), (5, 256)):
        coding = Coding(codec, side=side, dim=dim, tokens=tokens)
        assert coding.run_bytes == coding.pack(torch.zeros(tokens, dim)).numel()
        if codec in CODECS:
            assert coding.run_bytes == tokens * CODECS[codec].vector_bytes(dim)
        ends = [piece.offset + tokens * piece.elements * piece.dtype.itemsize for piece in coding.pieces]
        assert [piece.offset for piece in coding.pieces] == [0, *ends[:-1]]
        assert ends[-1] == coding.run_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("codec", STORED)
def test_unpacked_is_rounded(codec: str, side: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """What is read of a run, and what a step says that will be read, are the same, in every type."""
    coding = Coding(codec, side=side, dim=64, tokens=8)
    x = torch.randn(3, 8, 64, generator=generator).to(dtype)
    found = coding.unpack(coding.pack(x), torch.empty(3, 8, 64, dtype=dtype))
    assert torch.equal(found, coding.rounded(x))
    strided = torch.randn(5, 3, 64, generator=generator).to(dtype)[:, 1:]
    assert torch.equal(coding.rounded(strided), coding.rounded(strided.contiguous()))


@pytest.mark.parametrize("codec", QUANTISED)
def test_errors_are_within_half_a_step(codec: str, generator: torch.Generator) -> None:
    coding = Coding(codec, side="key", dim=64, tokens=8)
    x = torch.randn(50, 8, 64, generator=generator) * torch.logspace(-3, 3, 50)[:, None, None]
    error = (coding.rounded(x).double() - x.double()).abs().unflatten(-1, (2, 32))
    groups = x.double().unflatten(-1, (2, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    # The scale's own rounding moves the last step by up to 2^-11 of the whole.
    if codec == "int8":
        assert (error <= largest * (0.5 / 127 + 2**-11 + 1e-4)).all()
    elif codec == "int4":
        # The sign that has no eighth step may lose a whole one.
        assert (error <= largest * (1 / 8 + 2**-10)).all()
        assert error.mean() < (largest / 8 * 0.3).mean()
    elif codec == "int4a":
        span = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
        assert (error <= span * (0.5 / 15 + 2**-11) + largest * 2**-10).all()
    else:
        inside = groups.abs() <= 448
        assert (error[inside] <= groups.abs()[inside] * 2**-4 + 2.0**-10).all()


@pytest.mark.parametrize("codec", QUANTISED)
def test_what_was_read_is_stored_again_alike(codec: str, generator: torch.Generator) -> None:
    """In float32, where scales are not so small that f16 has few digits for them."""
    coding = Coding(codec, side="value", dim=64, tokens=8)
    x = torch.randn(50, 8, 64, generator=generator) * torch.logspace(-1, 2, 50)[:, None, None]
    runs = coding.pack(x)
    assert torch.equal(coding.pack(coding.unpack(runs, torch.empty_like(x))), runs)
    assert not coding.rounded(torch.zeros_like(x)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", STORED)
def test_extreme_numbers(codec: str, dtype: torch.dtype) -> None:
    coding = Coding(codec, side="value", dim=32, tokens=1)

    def kept(*numbers: float) -> list[float]:
        row = torch.zeros(1, 32)
        row[0, : len(numbers)] = torch.tensor(numbers)
        return coding.rounded(row.to(dtype))[0].float().tolist()

    assert kept() == [0.0] * 32
    # One huge element silences the others, and comes through itself.
    huge = kept(2048.0, 1.0, -1.0)
    assert huge[0] == pytest.approx(448 if codec == "fp8" else 2048, rel=2**-8)
    if codec in GROUPED:
        assert huge[1:] == [0.0] * 31 or (codec == "int4a" and huge[1:3] == pytest.approx([-1, -1], abs=0.1))
    for tiny in (1e-4, 1e-6, 6e-8, 1e-30):
        found = kept(tiny, -tiny / 2)
        assert all(math.isfinite(number) for number in found)
        # At worst it is lost whole, and a minimum is rounded to what f16 has next to nothing.
        assert abs(found[0] - tiny) <= tiny + 2.0**-24
    for large in (1e6, 3e38):
        if codec != "f16":
            found = kept(large, -1.0)
            assert all(math.isfinite(number) for number in found)
            assert found[0] > 0


def test_fp8_saturates() -> None:
    coding = Coding("fp8", side="key", dim=8, tokens=1)
    x = torch.tensor([[448.0, 449.0, -1e9, 464.0, 0.0, -448.0, 2.0**-9, 2.0**-10]])
    assert coding.rounded(x).tolist() == [[448.0, 448.0, -448.0, 448.0, 0.0, -448.0, 2.0**-9, 0.0]]


def test_keys_by_channel(generator: torch.Generator) -> None:
    """Byte by byte: codes as of int4a, then scales and minima of each channel of 32 tokens."""
    tokens, dim = 64, 64
    x = torch.randn(tokens, dim, generator=generator)
    x[:, 7] = x[:, 7] * 0.1 + 25
    x[:, 40], x[32:, 41] = 0, -3.5
    packed = Coding("int4c", side="key", dim=dim, tokens=tokens).pack(x[None])[0].numpy()
    assert packed.size == tokens * CODECS["int4a"].vector_bytes(dim)
    expected = np.zeros(packed.size, np.uint8)
    for run in range(tokens // 32):
        for channel in range(dim):
            group = [np.float32(v) for v in x[run * 32 : run * 32 + 32, channel]]
            codes, numbers = coded("int4a", group)
            for token, code in enumerate(codes):
                at = (run * 32 + token) * dim // 2 + channel // 32 * 16 + channel % 16
                expected[at] |= code << (4 if channel % 32 >= 16 else 0)
            for place, number in enumerate(numbers):
                at = tokens * dim // 2 + 2 * ((2 * run + place) * dim + channel)
                expected[at : at + 2] = np.frombuffer(struct.pack("<e", float(number)), np.uint8)
    assert np.array_equal(packed, expected)
    with pytest.raises(InputError, match="int4c stores runs of 32 tokens; blocks of 16 are not a multiple"):
        Coding("int4c", side="key", dim=dim, tokens=16)
    with pytest.raises(InputError, match="value: 'int4c' is not stored"):
        Coding("int4c", side="value", dim=dim, tokens=32)


def test_a_width_must_be_whole_groups() -> None:
    for codec in GROUPED:
        with pytest.raises(InputError, match="multiple: choose a codec without groups") as caught:
            Coding(codec, side="key", dim=48, tokens=4)
        assert caught.value.key == "format"
    with pytest.raises(InputError, match="'int3' is not stored; choose one of f32") as caught:
        Coding("int3", side="value", dim=64, tokens=4)
    assert caught.value.key == "value"
    assert set(CODECS) <= set(STORED)
    assert set(PLAIN) <= set(STORED)
