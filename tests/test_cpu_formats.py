"""The C++ kernels on stored formats: the bytes of store/codecs.py, and attention in float64 over what they say."""

import contextlib
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import kinds

from kvist.kernels import cpu as cpu_module
from kvist.kernels.paged import CODECS
from kvist.kernels.reference import attend
from kvist.store.codecs import Coding

BF16 = torch.bfloat16
PAIRS = [
    ("int8", "int4"), ("int8", "int8"), ("int4", "int4"), ("int4a", "int4a"), ("bf16", "int4a"), ("int4", "bf16"),
    ("fp8", "fp8"), ("f16", "int8"), ("f32", "f16"), ("int8", "f32"), ("fp8", "int4"),
]  # fmt: skip


@pytest.fixture(params=["avx512", "amx"])
def kernels(request):
    if request.param not in kinds():
        pytest.skip(f"no {request.param} kernels on this machine")
    return cpu_module._chosen(request.param)


def ordinary(what, count, heads, dim, generator):
    """Queries (``q``), keys (``k``) or values (``v``): float32 ``[count, heads, dim]``."""
    return torch.randn(count, heads, dim, generator=generator)


@contextlib.contextmanager
def forbidden(module, tensors):
    """Parts of an arena that sanitized kernels must not touch."""
    for tensor in tensors:
        module.forbid(tensor.data_ptr(), tensor.nbytes)
    yield
    for tensor in tensors:
        module.permit(tensor.data_ptr(), tensor.nbytes)


class Memory:
    """One group of one layer in an arena whose every unwritten byte reads as no number.

    Args:
        parts: ``(start, count)`` a sequence: tokens it has and tokens it gets.
        draw: makes vectors, as :func:`ordinary` does.
        apart: bytes from three blocks to the next three in an arena of zeros; None for as many as they have.
    """

    def __init__(self, key, value, *, kv_heads, repeats, dim, tokens, parts, seed, draw=ordinary, apart=None):
        sides = (("key", key), ("value", value))
        self.coding = [Coding(codec, side=side, dim=dim, tokens=tokens) for side, codec in sides]
        self.kv_heads, self.repeats, self.dim, self.tokens, self.parts = kv_heads, repeats, dim, tokens, parts
        self.draw = draw
        self.layer_bytes = kv_heads * sum(coding.run_bytes for coding in self.coding)
        self.generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        needed = [-(-(start + count) // tokens) for start, count in parts]
        self.slab_bytes = apart or 3 * self.layer_bytes + 192
        slabs = -(-(sum(needed) + 4) // 3)
        if apart is None:
            self.arena = torch.full((slabs * self.slab_bytes,), 0xFF, dtype=torch.uint8)
        else:
            # What is not touched takes no memory.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.arena = torch.frombuffer(mmap.mmap(-1, slabs * apart, flags=flags), dtype=torch.uint8)
        ids = rng.permutation(slabs * 3)
        ends = np.cumsum(needed)
        # Of no sequence.
        self.others = ids[ends[-1] :]
        self.tables = [ids[end - count : end].astype(np.int64) for end, count in zip(ends, needed, strict=True)]
        self.past = [self._fill(table, start) for table, (start, _) in zip(self.tables, parts, strict=True)]

    def block(self, block):
        """Its bytes."""
        begin = block // 3 * self.slab_bytes + block % 3 * self.layer_bytes
        return self.arena[begin : begin + self.layer_bytes]

    def runs(self, block, side):
        """The heads' runs of one side of a block, ``[kv_heads, run bytes]``."""
        keys = self.kv_heads * self.coding[0].run_bytes
        whole = self.block(block)
        return (whole[:keys] if side == 0 else whole[keys:]).view(self.kv_heads, -1)

    def _fill(self, table, start):
        """Pack random vectors, and leave the rest of the last block as it was."""
        drawn = [self.draw(what, start, self.kv_heads, self.dim, self.generator) for what in "kv"]
        x = [vectors.transpose(0, 1).to(BF16) for vectors in drawn]
        blocks = -(-start // self.tokens)
        rest = start - (blocks - 1) * self.tokens
        for side, coding in enumerate(self.coding):
            own = torch.zeros(self.kv_heads, blocks * self.tokens, self.dim, dtype=BF16)
            own[:, :start] = x[side]
            # All blocks at once, their heads one behind the other.
            own = own.unflatten(1, (blocks, self.tokens)).transpose(0, 1).flatten(0, 1)
            packed = coding.pack(own.contiguous()).view(blocks, self.kv_heads, coding.run_bytes)
            for piece in coding.pieces if blocks else ():
                empty = piece.rows(packed[-1], self.tokens)[:, rest:]
                empty.fill_(float("nan") if empty.is_floating_point() else -1 if empty.dtype == torch.int8 else 255)
            for block, runs in zip(table[:blocks], packed, strict=True):
                self.runs(int(block), side).copy_(runs)
        return x

    def read(self, table, length, side):
        """What is stored of a sequence, as numbers: float64 ``[kv_heads, length, dim]``."""
        coding = self.coding[side]
        runs = torch.cat([self.runs(int(block), side) for block in table])
        found = coding.unpack(runs, torch.empty(len(runs), self.tokens, self.dim))
        found = found.unflatten(0, (len(table), self.kv_heads)).transpose(0, 1).flatten(1, 2)
        return found[:, :length].double()

    def projected(self):
        """A step's queries ``[tokens, repeats x kv_heads, dim]``, and keys and values, out of one wide row a token."""
        rows, heads = sum(count for _, count in self.parts), self.repeats * self.kv_heads
        shapes = {"q": heads, "k": self.kv_heads, "v": self.kv_heads}
        x = [self.draw(what, rows, count, self.dim, self.generator) for what, count in shapes.items()]
        wide = torch.cat(x, 1).to(BF16)
        return wide[:, :heads], wide[:, heads:]

    def attend(self, kernels, q, kv, *, window=None, softcap=None):
        """What the kernels make of a step: bf16 ``[tokens, repeats x kv_heads, dim]``."""
        module = kernels.module
        geometry = module.Geometry(
            slab_bytes=self.slab_bytes, blocks_per_slab=3, block_bytes=self.layer_bytes, layer_bytes=self.layer_bytes,
            key_run_bytes=self.coding[0].run_bytes, value_run_bytes=self.coding[1].run_bytes,
            key=CODECS[self.coding[0].codec], value=CODECS[self.coding[1].codec], block_tokens=self.tokens,
            kv_heads=self.kv_heads, dim=self.dim, repeats=self.repeats,
        )  # fmt: skip
        kernels.follow_threads()
        none = np.array([], np.int64)
        gone = [max(0, start - window + 1) // self.tokens if window else 0 for start, _ in self.parts]
        tables = [np.r_[np.full(count, -1), table[count:]] for count, table in zip(gone, self.tables, strict=True)]
        segment = module.Segment(
            geometry=geometry, arena=self.arena.data_ptr(), layers=[0], blocks=np.concatenate(tables),
            begin=np.cumsum([0, *[len(table) for table in self.tables[:-1]]]),
            count=np.array([count for _, count in self.parts]),
            seen=np.concatenate([np.arange(start, start + count) for start, count in self.parts]),
        )  # fmt: skip
        plan = module.Plan(
            segments=[segment], open=0, scale=self.dim**-0.5, softcap=softcap or 0.0, window=window or 0, runs=none,
            sealed=none,
        )  # fmt: skip
        out = torch.full((len(q), q.shape[1], self.dim), float("nan"), dtype=BF16)
        untouched = [self.others, *(table[:count] for count, table in zip(gone, self.tables, strict=True))]
        with forbidden(module, [self.block(block) for block in np.concatenate(untouched)] if module.sanitized else []):
            plan.attend(kernels.kind, 0, q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0), out.data_ptr())
        return out

    def check(self, kernels, *, window=None, softcap=None):
        q, kv = self.projected()
        out = self.attend(kernels, q, kv, window=window, softcap=softcap)
        row = 0
        for table, past, (start, count) in zip(self.tables, self.past, self.parts, strict=True):
            sides = []
            for side, coding in enumerate(self.coding):
                new = kv[row : row + count, side * self.kv_heads : (side + 1) * self.kv_heads].transpose(0, 1)
                expected = coding.rounded(torch.cat((past[side], new), 1).float().contiguous())
                stored = self.read(table, start + count, side)
                assert torch.equal(stored, expected.double()), "the bytes are those that the oracle packs"
                sides.append(stored)
            heads_of = q[row : row + count].view(count, self.repeats, self.kv_heads, self.dim)
            heads_of = heads_of.double().transpose(1, 2).flatten(1, 2)
            expected = attend(heads_of, *sides, start=start, scale=self.dim**-0.5, window=window, softcap=softcap)
            expected = expected.unflatten(1, (self.kv_heads, -1)).transpose(1, 2).flatten(1, 2)
            found = out[row : row + count].double()
            # Keys, values and weights are rounded to bf16, 8 bits, once each.
            size = max(min(1, sides[1].abs().max()), expected.abs().max())
            assert (found - expected).abs().max() <= 0.016 * size
            row += count
        return out


@settings(max_examples=40, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    parts=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 40, 130, 300]), st.sampled_from([1, 1, 1, 2, 5, 13, 40, 70])),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(1, 4), (2, 3), (3, 3), (3, 1), (2, 7), (1, 8), (1, 17)]),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    tokens=st.sampled_from([16, 16, 32, 48]),
    window=st.sampled_from([None, None, 3, 16, 150]),
    softcap=st.sampled_from([None, None, 2.0]),
    kind=st.sampled_from(["avx512", "amx"]),
    seed=st.integers(0, 2**20),
)
def test_any_step_on_any_format(pair, parts, heads, dim, tokens, window, softcap, kind, seed):
    if kind not in kinds():
        pytest.skip(f"no {kind} kernels on this machine")
    memory = Memory(*pair, kv_heads=heads[0], repeats=heads[1], dim=dim, tokens=tokens, parts=parts, seed=seed)
    memory.check(cpu_module._chosen(kind), window=window, softcap=softcap)


@pytest.mark.parametrize("codec", CODECS)
def test_one_token_of_every_codec(kernels, codec):
    for dim, repeats, heads in ((96, 3, 2), (64, 8, 1), (256, 1, 3)):
        shape = {"kv_heads": heads, "repeats": repeats, "dim": dim, "tokens": 16}
        Memory(codec, codec, **shape, parts=[(70, 1), (0, 1), (300, 1)], seed=dim).check(kernels)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_long_contexts(kernels, pair):
    shape = {"kv_heads": 3, "repeats": 3, "dim": 64, "tokens": 16}
    Memory(*pair, **shape, parts=[(8191, 1)], seed=1).check(kernels)
    Memory(*pair, **shape, parts=[(990, 20), (513, 1)], seed=2).check(kernels, window=700)


def biased(what, count, heads, dim, generator):
    """Keys and values far from zero on one side."""
    return ordinary(what, count, heads, dim, generator) + 30 * (what != "q")


def with_outliers(what, count, heads, dim, generator):
    """Dims of queries and keys ten times as large as the others, and as small, and some groups of zeros."""
    x = ordinary(what, count, heads, dim, generator)
    x[:, :, 3] *= {"q": 10, "k": 0.1, "v": 1}[what]
    x[:, :, 7] *= {"q": 0.1, "k": 10, "v": 30}[what]
    x[: count // 2, :, -32:] = 0
    return x


def of_every_size(what, count, heads, dim, generator):
    """Keys and values from subnormal scales to large ones, token by token."""
    x = ordinary(what, count, heads, dim, generator)
    sizes = torch.logspace(-6, {"k": 1, "v": 4}.get(what, 0), count)[torch.randperm(count, generator=generator)]
    return x if what == "q" else x * sizes[:, None, None]


def tiny(what, count, heads, dim, generator):
    """Values so small that their scales are subnormal."""
    return ordinary(what, count, heads, dim, generator) * (1e-5 if what == "v" else 1)


def all_alike(what, count, heads, dim, generator):
    """One key for all, so that all weights are equal."""
    x = ordinary(what, count, heads, dim, generator)
    return torch.ones_like(x) if what == "k" else x


@pytest.mark.parametrize("draw", [biased, with_outliers, of_every_size, tiny, all_alike])
@pytest.mark.parametrize("codec", CODECS)
def test_numbers_of_all_sizes(kernels, codec, draw):
    for repeats, window in ((5, None), (8, 77)):
        shape = {"kv_heads": 3, "repeats": repeats, "dim": 96, "tokens": 32}
        parts = [(300, 1), (16, 1), (1, 1), (139, 1)]
        Memory(codec, codec, **shape, parts=parts, seed=5, draw=draw).check(kernels, window=window)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_no_number_leaves_none(kernels, codec, where):
    """The engine says so of logits that are none, and would not of others that were made up."""
    for softcap, repeats in ((None, 2), (5.0, 2), (None, 9)):
        parts = [(20, 1), (3, 1), (40, 3), (2, 3), (1500, 1)]
        memory = Memory(codec, codec, kv_heads=2, repeats=repeats, dim=64, tokens=16, parts=parts, seed=6)
        q, kv = memory.projected()
        for row in (0, 3, 8):
            if where == "q":
                q[row].view(repeats, 2, 64)[:, 1, 3] = torch.nan
            else:
                kv[row, 1 if where == "k" else 3, 3] = torch.nan
        out = memory.attend(kernels, q, kv, softcap=softcap).view(-1, repeats, 2, 64)
        # The fifth row sees the fourth.
        for row in (0, 3, 8, *[4] * (where != "q")):
            assert out[row, :, 1, 3].isnan().all()
        assert out[[1, 5, 6, 7]].isfinite().all()
    # And nothing of it stays in what threads work in.
    Memory(codec, codec, kv_heads=2, repeats=8, dim=64, tokens=16, parts=[(20, 1), (17, 1)], seed=7).check(kernels)


@pytest.mark.parametrize("pair", [("int4a", "int8"), ("fp8", "bf16")], ids="-".join)
def test_memory_beyond_four_gigabytes(kernels, pair):
    shape = {"kv_heads": 2, "repeats": 4, "dim": 64, "tokens": 32}
    memory = Memory(*pair, **shape, parts=[(70, 1), (150, 4)], seed=7, apart=3 * 2**29)
    assert len(memory.arena) > 2**32
    memory.check(kernels)


@pytest.mark.parametrize("pair", [("int8", "int4"), ("int4a", "int8"), ("bf16", "bf16")], ids="-".join)
def test_threads_change_nothing(kernels, pair):
    """Long contexts are cut into as many parts for one thread as for many."""
    parts = [(100, 9), (5000, 1), (0, 5), (2100, 30)]
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            memory = Memory(*pair, kv_heads=2, repeats=2, dim=64, tokens=16, parts=parts, seed=3)
            found.append(memory.check(kernels))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("side", ["key", "value"])
def test_numbers_at_the_edges_are_packed_as_the_oracle_does(kernels, codec, side):
    """Zeros, one large number, subnormal scales, and what no f16 or e4m3 holds."""
    other = {"key": "bf16", "value": "bf16"}
    memory = Memory(**other | {side: codec}, kv_heads=1, repeats=1, dim=64, tokens=16, parts=[(0, 16)], seed=4)
    rows = torch.randn(16, 64, generator=memory.generator)
    rows[0] = 0
    rows[1] *= 1e-7
    rows[2] *= 1e-5
    rows[3] *= 1e-3
    rows[4, 7] = 3000
    rows[5] = 448
    rows[6] = -500
    rows[7] *= 1e9
    rows[8, ::2] = -rows[8, 1::2]
    rows[9] = torch.linspace(-0.02, 0.02, 64)
    rows[10, :32] = 0
    rows = rows.to(BF16)
    memory.attend(kernels, torch.zeros(16, 1, 64, dtype=BF16), torch.stack((rows, rows), 1).contiguous())
    number = 0 if side == "key" else 1
    packed = memory.coding[number].pack(rows[None])
    assert torch.equal(memory.runs(int(memory.tables[0][0]), number), packed)
