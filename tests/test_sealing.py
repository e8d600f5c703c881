"""Sealed runs and open tails: kernels against float64, engines against themselves, bytes against the plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist import CacheFormat, Engine, ModelSpec, plan
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.comparison.settings import Setting
from kvist.errors import InputError, UnsupportedModel
from kvist.kernels import cpu as cpu_module
from kvist.kernels.dense import Scores
from kvist.kernels.paged import PagedAttention
from kvist.kernels.portable import PortableAttention
from kvist.kernels.sealing import SealedAttention, SealedMemory
from kvist.kernels.spans import Span
from kvist.planning.capacity import allocated_bytes
from kvist.spec.format_words import options_of
from kvist.spec.layers import Attention
from kvist.store.codecs import PLAIN, Coding
from kvist.store.layouts import PagedKV, Scratch, check_format

KINDS = ["torch", "portable", "avx512", "amx"]


def tolerance(kind, dtype):
    """Compiled kernels merge in float32 and round once; PyTorch's operators round each segment, and each merge."""
    if dtype == torch.float32:
        return 2e-5
    return 0.03 if kind == "torch" else 0.012


def here(kind):
    module = cpu_module._module()
    if kind == "torch":
        return True
    if module is None:
        return False
    name, _, build = kind.partition("-")
    if name == "portable":
        return not build or int(build) in module.portable_builds()
    return module.has_avx512() and (kind != "amx" or module.ask_for_amx())


def kernels_of(kind):
    name, _, build = kind.partition("-")
    found = cpu_module._chosen(name)
    return replace(found, build=int(build)) if build else found


class Scene:
    """One layer beside others, whose sequences are stored step by step; what they see is computed from positions."""

    def __init__(self, kind, dtype, *, key, value, run, block_tokens, kv_heads, repeats, dim, softcap, seed):
        codec = next(name for name, kind_of in PLAIN.items() if kind_of == dtype)
        layer = Attention(kv_heads=kv_heads, key_dim=dim, value_dim=dim)
        spec = ModelSpec(name="made-up", source="test", layers=(layer,) * 3, max_context=1 << 20)
        # The first layer is stored otherwise: those of the tail's group are more than those that are sealed here.
        fmt = CacheFormat(key=key, value=value, tail=run, keep=codec, layers={0: CacheFormat(key="int8", value="f32")})
        groups = groups_of(spec, fmt, block_tokens)
        self.body = next(n for n, group in enumerate(groups) if group.layers == (1, 2))
        self.tail = next(n for n, group in enumerate(groups) if group.lifetime == "tail")
        self.groups, self.run, self.dtype, self.slot = groups, run, dtype, 1
        self.layout = ArenaLayout.of(groups, 1 << 24)
        self.arena = torch.full((self.layout.total_bytes,), 0xFF, dtype=torch.uint8)
        self.kv_heads, self.repeats, self.dim = kv_heads, repeats, dim
        scratch = Scratch()
        stores = [PagedKV(self.arena, group, self.layout, n, scratch) for n, group in enumerate(groups)]
        scores = Scores(scale=dim**-0.5, softcap=softcap)
        self.scores = scores
        layers = [groups[self.tail].layers.index(layer) for layer in groups[self.body].layers]
        sides = stores[self.body], stores[self.tail]
        if kind == "torch":
            self.memory = SealedMemory(*sides, layers, scores, dtype)
        else:
            made = PortableAttention if kind.startswith("portable") else PagedAttention
            assert all(made.suits(side, dtype, repeats) for side in sides)
            self.memory = SealedAttention(*(made(kernels_of(kind), side, scores, repeats) for side in sides), layers)
        self.codings = [
            Coding(codec, side=side, dim=dim, tokens=groups[self.body].block_tokens)
            for side, codec in (("key", key), ("value", value))
        ]
        self.generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        # Slabs are lent to one group each.
        slabs = rng.permutation(self.layout.num_slabs)
        self.free = [
            [
                int(slab) * per + place
                for slab in slabs[number :: len(groups)]
                for place in rng.permutation(per).tolist()
            ]
            for number, per in enumerate(self.layout.blocks_per_slab)
        ]
        self.tables = {}
        self.past = {}
        self.sealed = {}
        self.channel = torch.ones(dim, dtype=dtype)

    def _take(self, name, number, start, end):
        """Tables as the manager has them; what a block holds beside its tokens is zeroed, as the runner does."""
        group = self.groups[number]
        table = self.tables.setdefault((name, number), [])
        while len(table) < group.all_blocks(end):
            table.append(self.free[number].pop())
            if group.whole_tokens(end) < len(table) * group.block_tokens:
                slab, place = divmod(table[-1], self.layout.blocks_per_slab[number])
                begin = slab * self.layout.slab_bytes + place * group.block_bytes
                self.arena[begin : begin + group.block_bytes] = 0
        dead = group.first_live_block(start)
        return np.array([-1] * dead + table[dead:], np.int64)

    def share(self, name, leader, tokens):
        """A sequence that begins with another's sealed blocks."""
        size = self.groups[self.body].block_tokens
        self.tables[name, self.body] = self.tables[leader, self.body][: tokens // size]
        self.tables[name, self.tail] = [-1] * (tokens // self.groups[self.tail].block_tokens)
        self.past[name] = self.past[leader][:, :tokens]

    def step(self, parts):
        """Store and attend; ``parts`` are names and counts. Returns the worst error, in parts of the largest result."""
        starts = [self.past[name].shape[1] if name in self.past else 0 for name, _ in parts]
        spans = [
            [
                Span(table=self._take(name, number, start, start + count), start=start, count=count)
                for (name, count), start in zip(parts, starts, strict=True)
            ]
            for number in (self.body, self.tail)
        ]
        rows = sum(count for _, count in parts)
        heads = self.repeats * self.kv_heads
        x = torch.randn(rows, heads + 2 * self.kv_heads, self.dim, generator=self.generator).to(self.dtype)
        x[:, heads : heads + self.kv_heads] *= self.channel
        q, kv = x[:, :heads].view(rows, self.repeats, self.kv_heads, self.dim), x[:, heads:]
        out = self.memory.plan(*spans).attend(self.slot, q, kv).view(rows, heads, self.dim)
        row, worst = 0, 0.0
        for (name, count), start in zip(parts, starts, strict=True):
            new = kv[row : row + count].transpose(0, 1)
            self.past[name] = torch.cat((self.past[name], new), 1) if name in self.past else new.clone()
            for index in range(count):
                expected = self.expected(name, start + index, q[row + index])
                error = (out[row + index].view_as(expected) - expected).abs().max() / expected.abs().max().clamp(min=1)
                worst = max(worst, float(error))
            row += count
        return worst

    def expected(self, name, position, q):
        whole = self.past[name][:, : position + 1]
        behind = position // self.run * self.run
        sides = []
        for index, coding in enumerate(self.codings):
            side = whole[index * self.kv_heads : (index + 1) * self.kv_heads]
            # The same for all positions of a run.
            sealed = self.sealed.get((name, index, behind))
            if sealed is None:
                sealed = coding.rounded(side[:, :behind].float().contiguous()) if behind else side[:, :0]
                self.sealed[name, index, behind] = sealed = sealed.double()
            sides.append(torch.cat((sealed, side[:, behind:].double()), 1))
        scores = torch.einsum("rhd,hnd->rhn", q.double(), sides[0]) * self.scores.scale
        if self.scores.softcap:
            scores = torch.tanh(scores / self.scores.softcap) * self.scores.softcap
        return torch.einsum("rhn,hnd->rhd", scores.softmax(-1), sides[1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_kernels(kind, data):
    """Prompts in pieces and decodes beside each other, whatever the run, block, heads and codecs."""
    if not here(kind):
        pytest.skip(f"no {kind} kernels on this machine")
    dtype = torch.bfloat16 if kind in ("avx512", "amx") else data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    codecs = st.sampled_from(["int4", "int8", "int4a", "fp8", "f16"])
    key = data.draw(codecs | st.just("int4c"))
    runs = [32, 64, 96, 128] if key == "int4c" else [16, 32, 48, 128]
    scene = Scene(
        kind, dtype, key=key, value=data.draw(codecs), run=data.draw(st.sampled_from(runs)),
        block_tokens=data.draw(st.sampled_from([16, 16, 32] if kind != "torch" else [4, 16, 32])),
        kv_heads=data.draw(st.sampled_from([1, 2])), repeats=data.draw(st.sampled_from([1, 3])),
        dim=data.draw(st.sampled_from([32, 64])), softcap=data.draw(st.sampled_from([None, None, 20.0])),
        seed=data.draw(st.integers(0, 1 << 16)),
    )  # fmt: skip
    counts = st.sampled_from([1, 1, 1, 2, 15, 16, 17, 33, 70])
    names = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        parts = [(name, data.draw(counts)) for name in range(names) if data.draw(st.booleans()) or name == 0]
        assert scene.step(parts) < tolerance(kind, dtype)


@pytest.mark.parametrize("kind", ["torch", "portable-0", "portable-1", "portable-2", "avx512", "amx"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_keys_by_channel(kind, dtype):
    """Bytes as the oracle packs them, of channels that are large, flat, all alike or no number; and what is read."""
    if not here(kind) or (kind in ("avx512", "amx") and dtype != torch.bfloat16):
        pytest.skip(f"no {kind} kernels of this type on this machine")
    scene = Scene(
        kind, dtype, key="int4c", value="int8", run=64, block_tokens=16, kv_heads=2, repeats=3, dim=64, softcap=None,
        seed=5,
    )  # fmt: skip
    channel = torch.ones(64)
    channel[3], channel[40], channel[41], channel[63] = 60, 1e-7, 0, 1e-3
    scene.channel = channel.to(dtype)
    for counts in ((1, 70), (62, 1), (2, 140), (1, 1)):
        assert scene.step(list(zip(("first", "second"), counts, strict=True))) < tolerance(kind, dtype)
    (coding, _), group = scene.codings, scene.groups[scene.body]
    size, keys = group.block_tokens, scene.past["second"][:2]
    assert size == 64
    for number in range(3):
        block = scene.tables["second", scene.body][number]
        slab, place = divmod(block, scene.layout.blocks_per_slab[scene.body])
        begin = slab * scene.layout.slab_bytes + place * group.block_bytes + scene.slot * group.block_bytes // 2
        stored = scene.arena[begin : begin + 2 * coding.run_bytes].view(2, -1)
        assert torch.equal(stored, coding.pack(keys[:, number * size : (number + 1) * size].float()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_sealed(kind):
    """Neighbours that begin with one prefix see its sealed runs, a whole unit of them, and tails of their own."""
    if not here(kind):
        pytest.skip(f"no {kind} kernels on this machine")
    scene = Scene(
        kind, torch.bfloat16, key="int8", value="int4", run=32, block_tokens=16, kv_heads=2, repeats=3, dim=64,
        softcap=None, seed=7,
    )  # fmt: skip
    scene.step([("first", 650)])
    for name in ("second", "third"):
        scene.share(name, "first", 640)
    for counts in ((1, 5, 70), (1, 1, 1), (1, 60, 1)):
        assert scene.step(list(zip(("first", "second", "third"), counts, strict=True))) < tolerance(
            kind, torch.bfloat16
        )


@pytest.fixture(scope="module")
def prompt():
    return [int(token) for token in np.random.default_rng(3).integers(100, 40_000, 75)]


def test_cold_chunked_and_warm_agree_in_real_models(prompt):
    """Whatever the chunks, and behind a prefix from the tree, the same tokens: what is seen follows from positions."""
    fmt = CacheFormat(key="int8", value="int4", tail=32)
    options = {"memory": "64MiB", "format": fmt, "dtype": "f32"}
    (cold,) = Engine("smollm2-135m", **options).generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)
    engine = Engine("smollm2-135m", max_batch_tokens=23, **options)
    (chunked,) = engine.generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)
    (warm,) = engine.generate([prompt], max_tokens=12, temperature=0, ignore_eos=True)
    assert chunked.tokens == cold.tokens
    assert warm.tokens == cold.tokens
    assert warm.account["prefix_hit_tokens"] == 64
    for answer in (cold, chunked, warm):
        assert answer.account["allocated_bytes"] == answer.account["planned_bytes"]
        # 2 runs of 32 tokens of 68 + 36 bytes, and 22 tokens in two blocks of 16 as computed; the last is never stored.
        assert answer.account["planned_bytes"] == 30 * 3 * (2 * 32 * (68 + 36) + 2 * 16 * 64 * 2 * 4)


def test_bytes_are_those_of_both_segments():
    spec = ModelSpec.read("smollm2-135m")
    fmt = CacheFormat(key="int4", value="int4", tail=32)
    exact, coded = 30 * 3 * 2 * 64 * 2, 30 * 3 * 2 * 36
    for tokens in (0, 1, 31, 32, 33, 4100):
        rest = tokens % 32
        assert spec.sequence_bytes(tokens, fmt) == (tokens - rest) * coded + rest * exact
        groups = groups_of(spec, fmt)
        assert allocated_bytes(groups, tokens) == (tokens - rest) * coded + -(-rest // 16) * 16 * exact
    assert spec.append_bytes_per_token(fmt) == spec.retained_bytes_per_token(fmt) == coded


def test_what_a_tail_does_not_change():
    """Windows, and layers that are stored as they are computed, have none."""
    spec = ModelSpec.read("gemma-3-1b")
    groups = groups_of(spec, CacheFormat(key="int8", value="int8", tail=64, keep_layers=1))
    kinds = {group.name for group in groups}
    assert kinds == {"window-512", "window-512-bf16", "sealed-64", "tail-64-bf16"}
    plain = CacheFormat(tail=64)
    assert [group.name for group in groups_of(spec, plain)] == [group.name for group in groups_of(spec, CacheFormat())]


def test_keys_by_channel_have_a_tail():
    """Of a run where none is said; and what no run holds is stored token by token in as many bytes."""
    groups = groups_of(ModelSpec.read("gemma-3-1b"), CacheFormat(key="int4c", value="int4"))
    assert {group.name: group.format.key for group in groups} == {
        "window-512-int4a-int4": "int4a", "sealed-32": "int4c", "tail-32-bf16": "bf16",
    }  # fmt: skip
    with pytest.raises(InputError, match=r"tail: 48; keys in int4c are sealed in runs of 32"):
        CacheFormat(key="int4c", value="int4", tail=48)
    with pytest.raises(InputError, match=r"value: 'int4c' is not a codec"):
        CacheFormat(key="int8", value="int4c")
    with pytest.raises(InputError, match=r"key: the engine does not store latents in int4a"):
        check_format(groups_of(ModelSpec.read("deepseek-v3"), CacheFormat(key="int4c"))[0])


def test_tails_of_single_layers_are_as_computed():
    """Keys by channel have one in whatever layer they are, and it is kept in the type that the engine computes in."""
    single = CacheFormat(layers={1: CacheFormat(key="int4c", value="int4")})
    assert single.computed_in("f32").of_layer(1, 4).of_tail.key == "f32"
    assert CacheFormat(layers={1: CacheFormat(key="int4", value="int4")}).computed_in("f32").keep is None
    # Said again in options, the type of the tail is not lost.
    fmt = CacheFormat(key="int8", value="int4", tail=32, keep="f32")
    words = options_of(fmt)
    assert words[words.index("--keep-layers") + 1] == "0=f32"


@pytest.mark.parametrize("fmt", [CacheFormat(key="int8", value="int4", tail=128, keep_layers=1, keep="f32"),
                                 CacheFormat(key="int4c", value="int4")], ids=str)  # fmt: skip
def test_plans_share_prefixes_as_the_cache_does(fmt):
    """Sealed runs are stored once, as far as the blocks of all groups are whole."""
    spec, context, prefix, memory = ModelSpec.read("smollm2-135m"), 639, 600, 48 << 20
    counted = plan(spec, format=fmt, cache_memory=memory, context=context, shared_prefix=prefix)
    groups = groups_of(spec, fmt)
    manager, users = CacheManager(groups, ArenaLayout.of(groups, memory)), 0
    while True:
        sequence = manager.begin(np.r_[np.arange(prefix), np.full(context - prefix, 1000 + users)])
        while manager.reserve(sequence, 16, admit_chunk=None if sequence.begun else 16).granted:
            manager.commit(sequence, sequence.length + sequence.in_flight)
            if sequence.length == context:
                break
        else:
            break
        users += 1
    assert counted.to_dict()["capacity"]["users"]["paged_prefix"] == users > counted.capacity.users_paged


def test_cartridges_need_the_room_that_is_planned_for_them():
    """They are whole runs, or end behind a window: nothing is taken for tokens that no query will see."""
    fmt = CacheFormat(key="int4", value="int4", tail=32)
    for model, memory in (("smollm2-135m", "24MiB"), ("gemma-3-1b", "40MiB")):
        spec = ModelSpec.read(model)
        counted = plan(spec, format=fmt, cache_memory=memory, context=32, cartridge=2048)
        groups = groups_of(spec, fmt)
        manager = CacheManager(groups, ArenaLayout.of(groups, int(memory[:2]) << 20))
        key = PrefixKey(cartridge="made-up")
        first = manager.pins.pin(1024, key)
        manager.pins.filled(first)
        manager.pins.filled(whole := manager.pins.pin(1024, key, behind=first))
        manager.pins.unpin(first)
        assert counted.capacity.users_paged > 0
        assert manager.held_bytes(whole) == allocated_bytes(groups, 2048) == counted.capacity.cartridge_bytes
        manager.pins.unpin(whole)
        manager.clear()
        assert manager.arena.free_slabs == manager.layout.num_slabs


def test_a_tail_of_what_is_stored_as_computed_compares_nothing():
    fmt = CacheFormat(tail=32)
    assert Setting(format=fmt).computed_in("bf16").full
    assert Setting(format=fmt).computed_in("f32").format == fmt
    assert Setting(format=replace(fmt, state="f16")).computed_in("bf16").format is not None


def test_other_engines_store_no_tail():
    spec = ModelSpec.read("llama-3-8b")
    for fmt, told in ((CacheFormat(key="fp8", value="fp8", tail=32), True), (CacheFormat(tail=32), False)):
        notes = plan(spec, format=fmt, memory="24GiB", context=1000, engine="vllm").to_dict()["engine"]["notes"]
        assert any("vllm stores all layers as fp8/fp8" in note for note in notes) == told


@pytest.mark.parametrize("tail", [-16, 8, 2048, True, 1.5, "32"])
def test_bad_tails_are_refused(tail):
    with pytest.raises(InputError, match=r"tail: .* a multiple of 16 up to 1024"):
        CacheFormat(key="int4", value="int4", tail=tail)


def test_sealed_runs_of_real_models_are_not_pruned():
    """Codes of a run belong together; kept layers, which could be pruned, are not pruned alone."""
    engine = Engine(
        "smollm2-135m", memory="64MiB", format=CacheFormat(key="int8", value="int4", tail=32, keep_layers=1)
    )
    # 28 layers of sealed runs and 2 as computed: all of them grow.
    assert 0.9 < engine.cache_tokens * 3 * (28 * (68 + 36) + 2 * 256) / (64 << 20) < 1
    with pytest.raises(
        UnsupportedModel, match=r"h2o:0.5 could prune: runs that are sealed stay whole; leave out the tail"
    ):
        list(engine.generate(["The"], max_tokens=2, evict="h2o:0.5"))
