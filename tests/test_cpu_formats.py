"""The C++ kernels on stored formats: the bytes of store/codecs.py, and attention in float64 over what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import kinds

from kvist.kernels import cpu as cpu_module
from kvist.kernels.cpu import CODECS
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


class Memory:
    """One group of one layer in an arena whose every unwritten byte reads as no number."""

    def __init__(self, key, value, *, kv_heads, repeats, dim, tokens, parts, seed):
        sides = (("key", key), ("value", value))
        self.coding = [Coding(codec, side=side, dim=dim, tokens=tokens) for side, codec in sides]
        self.kv_heads, self.repeats, self.dim, self.tokens, self.parts = kv_heads, repeats, dim, tokens, parts
        self.layer_bytes = kv_heads * sum(coding.run_bytes for coding in self.coding)
        self.generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        needed = [-(-(start + count) // tokens) for start, count in parts]
        self.slab_bytes = 3 * self.layer_bytes + 192
        slabs = -(-(sum(needed) + 4) // 3)
        self.arena = torch.full((slabs * self.slab_bytes,), 0xFF, dtype=torch.uint8)
        ids = rng.permutation(slabs * 3)
        ends = np.cumsum(needed)
        self.tables = [ids[end - count : end].astype(np.int64) for end, count in zip(ends, needed, strict=True)]
        self.past = [self._fill(table, start) for table, (start, _) in zip(self.tables, parts, strict=True)]

    def runs(self, block, side):
        """The heads' runs of one side of a block, ``[kv_heads, run bytes]``."""
        begin = block // 3 * self.slab_bytes + block % 3 * self.layer_bytes
        key, value = (self.kv_heads * coding.run_bytes for coding in self.coding)
        begin, size = (begin, key) if side == 0 else (begin + key, value)
        return self.arena[begin : begin + size].view(self.kv_heads, -1)

    def _fill(self, table, start):
        """Pack random vectors, and leave the rest of the last block as it was."""
        x = [torch.randn(self.kv_heads, start, self.dim, generator=self.generator).to(BF16) for _ in range(2)]
        for number in range(-(-start // self.tokens)):
            count = min(self.tokens, start - number * self.tokens)
            for side, coding in enumerate(self.coding):
                own = torch.zeros(self.kv_heads, self.tokens, self.dim, dtype=BF16)
                own[:, :count] = x[side][:, number * self.tokens : number * self.tokens + count]
                packed = coding.pack(own)
                for piece in coding.pieces:
                    empty = piece.rows(packed, self.tokens)[:, count:]
                    empty.fill_(float("nan") if empty.is_floating_point() else -1 if empty.dtype == torch.int8 else 255)
                self.runs(int(table[number]), side).copy_(packed)
        return x

    def read(self, table, length, side):
        """What is stored of a sequence, as numbers: float64 ``[kv_heads, length, dim]``."""
        coding = self.coding[side]
        parts = [
            coding.unpack(self.runs(int(block), side), torch.empty(self.kv_heads, self.tokens, self.dim))
            for block in table
        ]
        return torch.cat(parts, 1)[:, :length].double()

    def check(self, kernels, *, window=None, softcap=None):
        module = kernels.module
        geometry = module.Geometry(
            slab_bytes=self.slab_bytes, blocks_per_slab=3, block_bytes=self.layer_bytes, layer_bytes=self.layer_bytes,
            key_run_bytes=self.coding[0].run_bytes, value_run_bytes=self.coding[1].run_bytes,
            key=CODECS[self.coding[0].codec], value=CODECS[self.coding[1].codec], block_tokens=self.tokens,
            kv_heads=self.kv_heads, dim=self.dim, repeats=self.repeats,
        )  # fmt: skip
        kernels.follow_threads()
        scale = self.dim**-0.5
        none = np.array([], np.int64)
        segment = module.Segment(
            geometry=geometry, arena=self.arena.data_ptr(), layers=[0], blocks=np.concatenate(self.tables),
            begin=np.cumsum([0, *[len(table) for table in self.tables[:-1]]]),
            count=np.array([count for _, count in self.parts]),
            seen=np.concatenate([np.arange(start, start + count) for start, count in self.parts]),
        )  # fmt: skip
        plan = module.Plan(
            segments=[segment], open=0, scale=scale, softcap=softcap or 0.0, window=window or 0, runs=none, sealed=none
        )
        rows = sum(count for _, count in self.parts)
        heads = self.repeats * self.kv_heads
        x = torch.randn(rows, heads + 2 * self.kv_heads, self.dim, generator=self.generator).to(BF16)
        q, kv = x[:, :heads], x[:, heads:]
        out = torch.full((rows, heads, self.dim), float("nan"), dtype=BF16)
        plan.attend(kernels.amx, 0, q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0), out.data_ptr())
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
            expected = attend(heads_of, *sides, start=start, scale=scale, window=window, softcap=softcap)
            expected = expected.unflatten(1, (self.kv_heads, -1)).transpose(1, 2).flatten(1, 2)
            found = out[row : row + count].double()
            # Keys, values and weights are rounded to bf16, 8 bits, once each.
            assert (found - expected).abs().max() < 0.016 * max(1, expected.abs().max())
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
    module = kernels.module
    geometry = module.Geometry(
        slab_bytes=memory.slab_bytes, blocks_per_slab=3, block_bytes=memory.layer_bytes, layer_bytes=memory.layer_bytes,
        key_run_bytes=memory.coding[0].run_bytes, value_run_bytes=memory.coding[1].run_bytes,
        key=CODECS[memory.coding[0].codec], value=CODECS[memory.coding[1].codec], block_tokens=16,
        kv_heads=1, dim=64, repeats=1,
    )  # fmt: skip
    none = np.array([], np.int64)
    segment = module.Segment(
        geometry=geometry, arena=memory.arena.data_ptr(), layers=[0], blocks=memory.tables[0], begin=np.array([0]),
        count=np.array([16]), seen=np.arange(16),
    )  # fmt: skip
    plan = module.Plan(segments=[segment], open=0, scale=1.0, softcap=0.0, window=0, runs=none, sealed=none)
    kv = torch.stack((rows, rows), 1).contiguous()
    q, out = torch.zeros(16, 1, 64, dtype=BF16), torch.empty(16, 1, 64, dtype=BF16)
    plan.attend(kernels.amx, 0, q.data_ptr(), 64, kv.data_ptr(), 128, out.data_ptr())
    number = 0 if side == "key" else 1
    packed = memory.coding[number].pack(rows[None])
    assert torch.equal(memory.runs(int(memory.tables[0][0]), number), packed)
