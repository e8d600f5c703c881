"""The portable C++ kernels against float64 over what a cache holds, and byte for byte against the codecs."""

import mmap
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures_attention import group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.cache.arena import ArenaLayout
from kvist.errors import InputError
from kvist.kernels import cpu as cpu_module
from kvist.kernels.cpu import Cpu, attention_kernels, cpu
from kvist.kernels.cpu import kernels_of as kernels_in
from kvist.kernels.dense import Scores
from kvist.kernels.paged import CODECS
from kvist.kernels.portable import PortableAttention
from kvist.kernels.sharing import sharing_order
from kvist.kernels.spans import Span
from kvist.store.codecs import Coding

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Repeats, KV heads, width.
SHAPES = [(3, 2, 64), (4, 2, 128), (1, 2, 256), (5, 1, 96)]
# By how much a result may miss float64's: of itself, for the rounding of its type, and of the largest.
ROUNDING = {F32: 0.0, BF16: 2**-8, F16: 2**-11}
SLACK = 1e-5


def builds():
    module = cpu_module._module()
    return [] if module is None else module.portable_builds()


def kernels_of(build):
    if build not in builds():
        pytest.skip("these kernels are not to be had on this machine")
    kernels = Cpu(name="portable", module=cpu_module._module(), build=build)
    kernels.follow_threads()
    return kernels


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def kernels(request):
    return kernels_of(["baseline", "avx2", "avx512"].index(request.param))


class Cache:
    """Sequences in an arena of which every byte that no token wrote reads as no number.

    Args:
        parts: ``(start, count)`` a sequence: tokens it has and tokens it gets.
        leaders: ``(sequence, blocks)`` a sequence: its first blocks are that earlier one's; own ones if it is itself.
        apart: bytes from one block to the next in an arena of zeros; None for as many as a block has, as it should be.
    """

    def __init__(
        self, parts, *, key, value, shape, generator, leaders=None, layers=1, block_tokens=16, apart=None, **limit
    ):
        self.repeats, self.heads, self.dim = shape
        self.group = group = group_of(
            kv_heads=self.heads, dim=self.dim, layers=layers, block_tokens=block_tokens, key=key, value=value, **limit
        )
        self.codings = [
            Coding(codec, side=side, dim=self.dim, tokens=block_tokens)
            for codec, side in ((key, "key"), (value, "value"))
        ]
        needed = [-(-(start + count) // block_tokens) for start, count in parts]
        self.layout = layout = ArenaLayout.of([group], (sum(needed) + 3) * group.block_bytes * 2)
        slab_bytes, per_slab, blocks = layout.slab_bytes, layout.blocks_per_slab[0], layout.total_blocks(0)
        if apart is None:
            self.arena = torch.full((layout.total_bytes,), 255, dtype=torch.uint8)
        else:
            slab_bytes, per_slab, blocks = apart, 1, sum(needed)
            # What is not touched takes no memory.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.arena = torch.frombuffer(mmap.mmap(-1, apart * blocks, flags=flags), dtype=torch.uint8)
        self.store = SimpleNamespace(
            group=group,
            kv_heads=self.heads,
            dim=self.dim,
            block_tokens=block_tokens,
            slab_bytes=slab_bytes,
            blocks_per_slab=per_slab,
            address=self.arena.data_ptr(),
        )
        free = torch.randperm(blocks, generator=generator).tolist()
        self.spans = []
        for index, (start, count) in enumerate(parts):
            table = np.array([free.pop() for _ in range(needed[index])], np.int64)
            leader, blocks = leaders[index] if leaders else (index, 0)
            blocks = min(blocks, start // block_tokens)
            if leader < index:
                blocks = min(blocks, self.spans[leader].start // block_tokens)
                table[:blocks] = self.spans[leader].table[:blocks]
            self.spans.append(Span(table=table, start=start, count=count))
        self.spans = [self.spans[index] for index in sharing_order([span.table for span in self.spans])]
        self.tokens = sum(span.count for span in self.spans)
        for slot in range(layers):
            for span in self.spans:
                for place, block in enumerate(span.table):
                    filled = min(block_tokens, span.start - place * block_tokens)
                    if filled > 0:
                        self.fill(slot, int(block), filled, generator)
        for span in self.spans if group.gives_back else ():
            span.table[: group.first_live_block(span.start)] = -1

    def runs(self, slot, block, side):
        """The heads' keys, or values, in one layer of a block, where they lie: ``[heads, run bytes]``."""
        per_slab, group = self.store.blocks_per_slab, self.group
        sizes = group.head_run_bytes
        at = block // per_slab * self.store.slab_bytes + block % per_slab * group.block_bytes
        at += slot * self.heads * sum(sizes) + side * self.heads * sizes[0]
        return self.arena[at : at + self.heads * sizes[side]].view(self.heads, sizes[side])

    def fill(self, slot, block, filled, generator):
        for side, coding in enumerate(self.codings):
            vectors = torch.randn(self.heads, filled, self.dim, generator=generator)
            for piece, rows in zip(coding.pieces, coding.quantise(vectors), strict=True):
                piece.rows(self.runs(slot, block, side), self.group.block_tokens)[:, :filled] = rows

    def read(self, slot, span, side):
        """All of a sequence's keys, or values, in float64: ``[heads, length, dim]``; 0 where they were given back."""
        blocks = [self.runs(slot, int(block), side) for block in span.table.clip(0)]
        coding, length = self.codings[side], span.start + span.count
        out = torch.empty(len(blocks) * self.heads, self.group.block_tokens, self.dim)
        coding.unpack(torch.cat(blocks), out)
        whole = out.view(len(blocks), self.heads, -1, self.dim).double()
        whole[torch.from_numpy(span.table < 0)] = 0
        return whole.transpose(0, 1).flatten(1, 2)[:, :length]

    def expected(self, slot, q, scores, sinks=None):
        """float64 ``[tokens, repeats x heads x dim]``."""
        results, row = [], 0
        for span in self.spans:
            keys, values = self.read(slot, span, 0), self.read(slot, span, 1)
            part = q[row : row + span.count].double()
            found = torch.einsum("trhd,hkd->trhk", part, keys) * scores.scale
            if scores.softcap is not None:
                found = scores.softcap * torch.tanh(found / scores.softcap)
            position = span.start + torch.arange(span.count)[:, None]
            place = torch.arange(keys.shape[1])
            hidden = place > position
            if self.group.window is not None:
                hidden |= place <= position - self.group.window
            if self.group.chunk is not None:
                hidden |= place < position // self.group.chunk * self.group.chunk
            found = found.masked_fill(hidden[:, None, None], -torch.inf)
            if sinks is not None:
                found = torch.cat((found, sinks.double().expand(span.count, -1, -1)[..., None]), dim=-1)
            weights = torch.softmax(found, dim=-1)[..., : keys.shape[1]]
            results.append(torch.einsum("trhk,hkd->trhd", weights, values).flatten(1))
            row += span.count
        return torch.cat(results)


def projected(cache, dtype, generator):
    """Queries, and keys and values, out of one wide row a token."""
    wide = torch.randn(cache.tokens, (cache.repeats + 2) * cache.heads, cache.dim, generator=generator).to(dtype)
    queries = cache.repeats * cache.heads
    return wide[:, :queries].view(cache.tokens, cache.repeats, cache.heads, cache.dim), wide[:, queries:]


def check(kernels, cache, *, dtype=F32, softcap=None, sinks=None, generator):
    """Run every layer and hold it against float64."""
    scores = Scores(scale=cache.dim**-0.5, softcap=softcap)
    assert PortableAttention.suits(cache.store, dtype, cache.repeats)
    plan = PortableAttention(kernels, cache.store, scores, cache.repeats).plan(cache.spans)
    for slot in range(len(cache.group.layers)):
        q, kv = projected(cache, dtype, generator)
        out = plan.attend(slot, q, kv, sinks)
        expected = cache.expected(slot, q, scores, sinks)
        bound = ROUNDING[dtype] * expected.abs() + SLACK * expected.abs().max()
        worst = ((out.double() - expected).abs() - bound).max()
        assert worst <= 0, (cache.group.format, cache.dim, dtype, float(worst))


@pytest.fixture
def generator(request):
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.mark.parametrize("value", CODECS)
@pytest.mark.parametrize("key", CODECS)
def test_every_pair_of_codecs(key, value, generator):
    kernels = kernels_of(max(builds(), default=-1))
    parts = [(0, 1), (37, 1), (70, 9), (0, 20), (15, 2)]
    for number, shape in enumerate(SHAPES):
        for window in (None, 33):
            for softcap in (None, 3.0):
                cache = Cache(parts, key=key, value=value, shape=shape, window=window, generator=generator)
                check(kernels, cache, dtype=(F32, BF16)[number % 2], softcap=softcap, generator=generator)


@pytest.mark.parametrize(("dtype", "size"), [(F32, 16), (BF16, 16), (F16, 16), (F32, 32)])
@pytest.mark.parametrize("codec", CODECS)
def test_stored_bytes_are_the_codecs(kernels, codec, dtype, size, generator):
    """Of ordinary vectors, zeros, one element alone, equal ones, ties, tiny, large and huge ones."""
    shape = (1, 2, 64)
    cache = Cache([(13, 9), (0, 40)], key=codec, value=codec, shape=shape, block_tokens=size, generator=generator)
    q, kv = projected(cache, dtype, generator)
    kv[1:6] = 0
    kv[2, :, 40] = -3.7
    kv[3] = 0.3
    kv[4, :, ::2], kv[4, :, 1::2] = -2.5, 2.5
    kv[6:9] *= torch.tensor([1e-7, 1e-5, 1e3], dtype=dtype)[:, None, None]
    kv[9:20] *= torch.logspace(-4, 2, 64).to(dtype)
    kv[20:22] *= torch.tensor([1e5, 1e9])[:, None, None]  # infinite in float16
    before = cache.arena.clone()
    scores = Scores(scale=0.125, softcap=None)
    PortableAttention(kernels, cache.store, scores, 1).plan(cache.spans).attend(0, q, kv)
    found, cache.arena = cache.arena, before
    row = 0
    for span in cache.spans:
        for position in range(span.start, span.start + span.count):
            block, place = int(span.table[position // size]), position % size
            for side, coding in enumerate(cache.codings):
                rows = coding.quantise(kv[row, side * 2 : side * 2 + 2])
                for piece, new in zip(coding.pieces, rows, strict=True):
                    piece.rows(cache.runs(0, block, side), size)[:, place] = new
            row += 1
    assert torch.equal(found, cache.arena)


@settings(max_examples=80, deadline=None)
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
    shape=st.sampled_from([(4, 1, 32), (3, 2, 64), (1, 3, 80), (2, 2, 96), (1, 1, 512)]),
    codecs=st.tuples(st.sampled_from(list(CODECS)), st.sampled_from(list(CODECS))),
    block_tokens=st.sampled_from([16, 32]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from([F32, BF16, F16]),
    build=st.sampled_from(builds() or [0]),
    seed=st.integers(0, 2**32),
)
def test_any_step_equals_float64(
    parts, leaders, limit, shape, codecs, block_tokens, softcap, sinks, dtype, build, seed
):
    if shape[2] % 32:
        codecs = ["bf16" if codec.startswith("int") else codec for codec in codecs]
    generator = torch.Generator().manual_seed(seed)
    cache = Cache(
        parts, key=codecs[0], value=codecs[1], shape=shape, generator=generator, leaders=leaders[: len(parts)],
        layers=2, block_tokens=block_tokens, **limit,
    )  # fmt: skip
    scores = torch.randn(shape[:2], generator=generator) * 4 if sinks else None
    check(kernels_of(build), cache, dtype=dtype, softcap=softcap, sinks=scores, generator=generator)


@pytest.mark.parametrize(("key", "value"), [("int8", "int4"), ("f32", "f32"), ("fp8", "int8")])
def test_long_contexts_and_one_token(kernels, key, value, generator):
    parts = [(8191, 1), (0, 1), (4000, 70)]
    check(kernels, Cache(parts, key=key, value=value, shape=(3, 1, 64), generator=generator), generator=generator)


@pytest.mark.parametrize(("dtype", "window"), [(F32, None), (BF16, None), (F32, 700)])
def test_answers_do_not_depend_on_the_threads(kernels, dtype, window, generator):
    parts = [(3000, 1), (900, 40), (0, 300), (2000, 1)]
    cache = Cache(
        parts, key="int8", value="int4", shape=(3, 2, 64), window=window, leaders=[(0, 0), (0, 40), (2, 0), (0, 60)],
        generator=generator,
    )  # fmt: skip
    q, kv = projected(cache, dtype, generator)
    memory = PortableAttention(kernels, cache.store, Scores(scale=0.125, softcap=None), 3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(memory.plan(cache.spans).attend(0, q, kv))
    finally:
        torch.set_num_threads(before)
        kernels.follow_threads()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_of_several_vectors(kernels, codec, generator):
    parts = [(37, 1), (70, 9), (0, 40)]
    cache = Cache(parts, key=codec, value=codec, shape=(2, 2, 64), block_tokens=32, generator=generator)
    check(kernels, cache, generator=generator)


def test_many_queries_of_one_head(kernels, generator):
    cache = Cache([(20, 5), (0, 1), (130, 1)], key="int8", value="int4a", shape=(300, 1, 32), generator=generator)
    check(kernels, cache, generator=generator)


@pytest.mark.parametrize("repeats", [1, 2, 4, 6, 7, 8, 9, 10, 11, 13])
def test_any_number_of_queries_meets_a_key(kernels, repeats, generator):
    """Few at a time meet it as it is stored, more of them unpacked, in rows of six and what is left."""
    for key, value in [("bf16", "f16"), ("f32", "fp8"), ("int8", "int4"), ("int4", "int8"), ("int4a", "int4a")]:
        cache = Cache(
            [(39, 1), (200, 1)], key=key, value=value, shape=(repeats, 2, 96), block_tokens=32, generator=generator
        )
        check(kernels, cache, generator=generator)


def test_sinks_far_above_and_below_all_scores(kernels, generator):
    cache = Cache([(20, 5), (700, 1)], key="bf16", value="f16", shape=(2, 2, 64), generator=generator)
    check(kernels, cache, sinks=torch.tensor([[90.0, -90.0], [-300.0, 300.0]]), generator=generator)


def test_a_sink_counts_once_where_keys_are_cut(kernels, generator):
    """It weighs about as much as all keys together: 2,000 scores of variance 1 add up to e^8."""
    parts, leaders = [(2000, 1), (2000, 3), (90, 2)], [(0, 0), (0, 60), (0, 5)]
    cache = Cache(parts, key="f32", value="bf16", shape=(2, 2, 64), leaders=leaders, generator=generator)
    check(kernels, cache, sinks=torch.tensor([[8.0, 7.0], [9.0, 6.0]]), generator=generator)


@pytest.mark.parametrize("codec", ["f32", "bf16", "f16", "fp8"])
def test_any_float_is_stored_as_pytorch_rounds_it(kernels, codec, generator):
    cache = Cache([(0, 400)], key=codec, value=codec, shape=(1, 1, 512), generator=generator)
    kv = torch.randint(-(2**31), 2**31, (400, 2, 512), generator=generator).to(torch.int32).view(F32)
    # Near what each type holds at most and at least, too.
    kv[:100] = torch.randn(100, 2, 512, generator=generator) * torch.logspace(-9, 5, 512)
    kv[100, :, :10] = torch.tensor([0.0, 65504, 65519.99, 65520, 448, 447.9, 2**-25, 2**-10, 2**-14, torch.inf])
    kv[101] = -kv[100]
    kv[102, 0, :2] = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).view(F32)
    PortableAttention(kernels, cache.store, Scores(scale=1.0, softcap=None), 1).plan(cache.spans).attend(
        0, torch.zeros(400, 1, 1, 512), kv
    )
    for side, coding in enumerate(cache.codings):
        found = cache.read(0, cache.spans[0], side)[0]
        expected = coding.rounded(kv[:, side].contiguous()).double()
        assert torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)


def test_every_number_of_float16_comes_back(kernels, generator):
    """A token that sees itself alone gets its own value."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(F16).view(128, 1, 512)
    cache = Cache([(0, 1)] * 128, key="f16", value="f16", shape=(1, 1, 512), generator=generator)
    memory = PortableAttention(kernels, cache.store, Scores(scale=1.0, softcap=None), 1)
    out = memory.plan(cache.spans).attend(
        0, torch.zeros(128, 1, 1, 512, dtype=F16), torch.cat((torch.zeros_like(every), every), dim=1)
    )
    assert torch.allclose(out, every[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_no_number_leaves_none(kernels, codec, where, generator):
    """The engine says so of logits that are none, and would not of others that were made up."""
    # With bits besides those that say so, too.
    bits = torch.tensor([2**31 - 1]).int().view(F32)
    for softcap, none, place in ((None, torch.nan, 32), (5.0, torch.nan, 3), (None, bits, 63)):
        cache = Cache([(20, 3), (3, 1)], key=codec, value=codec, shape=(2, 2, 64), generator=generator)
        q, kv = projected(cache, F32, generator)
        row = next(row for row, span in zip((0, 1), cache.spans, strict=True) if span.count == 3)
        row += 1
        if where == "query":
            q[row, :, 1, place] = none
        else:
            kv[row, 1 if where == "key" else 3, place] = none
        memory = PortableAttention(kernels, cache.store, Scores(scale=0.125, softcap=softcap), 2)
        out = memory.plan(cache.spans).attend(0, q, kv).view(-1, 2, 2, 64)
        assert out[row, :, 1, place].isnan().all()
        assert where == "query" or out[row + 1, :, 1, place].isnan().all()
        assert out[:, :, 0].isfinite().all()
        alone = row + 2 if row == 1 else 0
        assert out[alone].isfinite().all()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an arena that large may take memory")
@pytest.mark.parametrize("codec", ["f32", "int4a"])
def test_memory_beyond_two_gigabytes(kernels, codec, generator):
    cache = Cache(
        [(30, 2), (5, 20)], key=codec, value=codec, shape=(2, 2, 64), layers=2, apart=3 * 2**28, generator=generator
    )
    assert len(cache.arena) > 2**31
    check(kernels, cache, generator=generator)


def test_the_variable_chooses_them(monkeypatch):
    if not builds():
        pytest.skip("the C++ kernels were not built")
    monkeypatch.setenv("KVIST_KERNELS", "portable")
    assert cpu() is attention_kernels(BF16)
    assert kernels_in(F32) is kernels_in(F16) is None
    assert {attention_kernels(dtype).name for dtype in (F32, BF16, F16)} == {"portable"}
    monkeypatch.setenv("KVIST_KERNELS", "auto")
    assert attention_kernels(BF16) is (cpu() or attention_kernels(F32))
    assert (attention_kernels(F32) is not None) == (max(builds()) > 0)
    monkeypatch.setenv("KVIST_KERNELS", "torch")
    assert attention_kernels(F32) is attention_kernels(BF16) is None
    monkeypatch.setenv("KVIST_KERNELS", "neon")
    with pytest.raises(InputError, match="KVIST_KERNELS: 'neon'"):
        attention_kernels(F32)


@pytest.mark.parametrize(
    ("dim", "block_tokens", "dtype"), [(24, 16, F32), (528, 16, F32), (64, 8, F32), (64, 16, torch.float64)]
)
def test_other_shapes_are_left_to_pytorch(dim, block_tokens, dtype):
    group = group_of(dim=dim, block_tokens=block_tokens, key="f32", value="f32")
    store = SimpleNamespace(group=group, dim=dim, block_tokens=block_tokens)
    assert not PortableAttention.suits(store, dtype, 1)
