"""Cartridges in a format of their own: kernels against float64, engines against themselves, bytes against the plan."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cartridge_models import LLAMA, TEXT, reading_model
from hypothesis import given, settings
from hypothesis import strategies as st
from served_cartridges import PROMPTS, asked, cartridge_of, engine_of, finished, started, watched
from test_sealing import KINDS, here, kernels_of, tolerance

from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.lead_groups import lead_groups
from kvist.errors import InputError, UnsupportedModel
from kvist.kernels.attention import PagedMemory
from kvist.kernels.dense import Scores
from kvist.kernels.leading import Before, LedAttention, LedMemory
from kvist.kernels.paged import PagedAttention
from kvist.kernels.portable import PortableAttention
from kvist.kernels.sealing import SealedAttention, SealedMemory
from kvist.kernels.spans import Span
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec
from kvist.store.codecs import PLAIN, Coding
from kvist.store.layouts import PagedKV, Scratch

pytest.importorskip("transformers")

INT8_INT4 = CacheFormat(key="int8", value="int4")
F32 = CacheFormat(key="f32", value="f32")


class Scene:
    """One layer of a group; sequences behind leads and without, whose every query is computed again in float64."""

    def __init__(self, kind, dtype, *, lead, run, block_tokens, kv_heads, repeats, dim, softcap, seed):
        codec = next(name for name, kind_of in PLAIN.items() if kind_of == dtype)
        spec = ModelSpec(
            name="made-up", source="test", layers=(Attention(kv_heads=kv_heads, key_dim=dim, value_dim=dim),) * 3,
            max_context=1 << 20,
        )  # fmt: skip
        other = {0: CacheFormat(key="int8", value="f32")}
        fmt = CacheFormat(
            key="int8" if run else codec, value="int4" if run else codec, tail=run, keep=codec, layers=other
        )
        # The first layer is stored otherwise, so that those of leads are more than those beside them.
        self.groups = (*groups_of(spec, fmt, block_tokens), *lead_groups(spec, lead, block_tokens))
        layout = ArenaLayout.of(self.groups, 1 << 24)
        arena = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)
        self.layout, self.arena = layout, arena
        stores = [
            PagedKV(arena, group, layout, n, scratch) for scratch in [Scratch()] for n, group in enumerate(self.groups)
        ]
        self.body = next(n for n, group in enumerate(self.groups) if group.layers == (1, 2))
        self.own = [self.body, *(n for n, group in enumerate(self.groups) if group.lifetime == "tail")]
        self.lead = len(self.groups) - 1
        self.store, self.run, self.dtype, self.slot, self.dim = stores[self.lead], run, dtype, 1, dim
        self.kv_heads, self.repeats, self.scores = kv_heads, repeats, Scores(scale=dim**-0.5, softcap=softcap)
        layers = [[stores[n].group.layers.index(layer) for layer in (1, 2)] for n in (self.own[-1], self.lead)]
        sides = [stores[n] for n in (*self.own, self.lead)]
        if kind == "torch":
            own = (
                SealedMemory(*sides[:2], layers[0], self.scores, dtype)
                if run
                else PagedMemory(sides[0], self.scores, dtype)
            )
            self.memory = LedMemory(own, sides[-1], layers[1])
        else:
            made = PortableAttention if kind == "portable" else PagedAttention
            assert all(made.suits(side, dtype, repeats) for side in sides)
            paged = [made(kernels_of(kind), side, self.scores, repeats) for side in sides]
            own = SealedAttention(*paged[:2], layers[0]) if run else paged[0]
            self.memory = LedAttention(own, paged[-1], layers[1])
        stored, size = self.groups[self.body].format, self.groups[self.body].block_tokens
        self.codings = [
            Coding(name, side=side, dim=dim, tokens=size)
            for side, name in (("key", stored.key), ("value", stored.value))
        ]
        self.generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        slabs = rng.permutation(layout.num_slabs)
        self.free = [
            [
                int(slab) * per + place
                for slab in slabs[n :: len(self.groups)]
                for place in rng.permutation(per).tolist()
            ]
            for n, per in enumerate(layout.blocks_per_slab)
        ]
        self.tables, self.past, self.before, self.leads = {}, {}, {}, [(np.empty(0, np.int64), None)]

    def pin(self, blocks):
        """A lead; what is read of it are the numbers that its codes mean."""
        group = self.groups[self.lead]
        size = group.block_tokens
        table = np.array([self.free[self.lead].pop() for _ in range(blocks)])
        vectors = torch.randn(blocks * size, 2 * self.kv_heads, self.dim, generator=self.generator).to(self.dtype)
        where = self.store.vectors(np.repeat(table, size), np.tile(np.arange(size), blocks))
        self.store.append(group.layers.index(2), vectors, where)
        read = []
        for index, side in enumerate(("key", "value")):
            coding = Coding(getattr(group.format, side), side=side, dim=self.dim, tokens=size)
            given = vectors[:, index * self.kv_heads : (index + 1) * self.kv_heads].transpose(0, 1).contiguous()
            plain = None if coding.quantised else PLAIN[coding.codec]
            read.append((coding.rounded(given.float()) if plain is None else given.to(plain)).double())
        self.leads.append((table, read))

    def take(self, name, number, start, end):
        group, table = self.groups[number], self.tables.setdefault((name, number), [])
        while len(table) < group.all_blocks(end):
            table.append(self.free[number].pop())
            slab, place = divmod(table[-1], self.layout.blocks_per_slab[number])
            begin = slab * self.layout.slab_bytes + place * group.block_bytes
            self.arena[begin : begin + group.block_bytes] = 0
        dead = group.first_live_block(start)
        return np.array([-1] * dead + table[dead:], np.int64)

    def step(self, parts):
        """Store and attend; ``parts`` are names, leads and counts. Returns the worst error."""
        starts = [self.past[name].shape[1] if name in self.past else 0 for name, _, _ in parts]
        spans = [
            [
                Span(table=self.take(name, number, start, start + count), start=start, count=count)
                for (name, _, count), start in zip(parts, starts, strict=True)
            ]
            for number in self.own
        ]
        before = [
            Before(
                table=self.leads[lead][0],
                tokens=len(self.leads[lead][0]) * self.groups[self.lead].block_tokens,
                count=n,
            )
            for _, lead, n in parts
        ]
        rows, heads = sum(count for _, _, count in parts), self.repeats * self.kv_heads
        x = torch.randn(rows, heads + 2 * self.kv_heads, self.dim, generator=self.generator).to(self.dtype)
        q, kv = x[:, :heads].view(rows, self.repeats, self.kv_heads, self.dim), x[:, heads:]
        out = self.memory.plan(before, *spans).attend(self.slot, q, kv).view(rows, heads, self.dim)
        row, worst = 0, 0.0
        for (name, lead, count), start in zip(parts, starts, strict=True):
            new = kv[row : row + count].transpose(0, 1)
            self.past[name] = torch.cat((self.past[name], new), 1) if name in self.past else new.clone()
            for index in range(count):
                expected = self.expected(name, lead, start + index, q[row + index])
                error = (out[row + index].view_as(expected) - expected).abs().max() / expected.abs().max().clamp(min=1)
                worst = max(worst, float(error))
            row += count
        return worst

    def expected(self, name, lead, position, q):
        whole = self.past[name][:, : position + 1]
        behind = position // self.run * self.run if self.run else 0
        sides = []
        for index, coding in enumerate(self.codings):
            side = whole[index * self.kv_heads : (index + 1) * self.kv_heads]
            sealed = coding.rounded(side[:, :behind].float().contiguous()) if behind else side[:, :0]
            first = [self.leads[lead][1][index]] if lead else []
            sides.append(torch.cat((*first, sealed.double(), side[:, behind:].double()), 1))
        scores = torch.einsum("rhd,hnd->rhn", q.double(), sides[0]) * self.scores.scale
        if self.scores.softcap:
            scores = torch.tanh(scores / self.scores.softcap) * self.scores.softcap
        return torch.einsum("rhn,hnd->rhd", scores.softmax(-1), sides[1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_kernels(kind, data):
    """Prompts in pieces and decodes, behind either of two leads or none, beside each other."""
    if not here(kind):
        pytest.skip(f"no {kind} kernels on this machine")
    dtype = torch.bfloat16 if kind in ("avx512", "amx") else data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    codecs = st.sampled_from(["int4", "int8", "int4a", "fp8", "f16", "bf16"])
    scene = Scene(
        kind, dtype, lead=CacheFormat(key=data.draw(codecs | st.just("int4c")), value=data.draw(codecs)),
        run=data.draw(st.sampled_from([0, 0, 32])), block_tokens=data.draw(st.sampled_from([16, 32])),
        kv_heads=data.draw(st.sampled_from([1, 2])), repeats=data.draw(st.sampled_from([1, 3])),
        dim=data.draw(st.sampled_from([32, 64])), softcap=data.draw(st.sampled_from([None, None, 20.0])),
        seed=data.draw(st.integers(0, 1 << 16)),
    )  # fmt: skip
    for blocks in (data.draw(st.sampled_from([1, 3, 40])), 2):
        scene.pin(blocks)
    behind = [data.draw(st.integers(0, 2)) for _ in range(3)]
    counts = st.sampled_from([1, 1, 1, 2, 17, 70])
    for _ in range(data.draw(st.integers(1, 3))):
        parts = [(n, behind[n], data.draw(counts)) for n in range(3) if data.draw(st.booleans()) or n == 0]
        assert scene.step(parts) < tolerance(kind, dtype)


@pytest.mark.parametrize("kind", ["avx512", "amx"])
def test_what_keys_draw_is_told_beside_leads(kind):
    """A sequence that is to be pruned, in one step with one behind a lead."""
    if not here(kind):
        pytest.skip(f"no {kind} kernels on this machine")
    scene = Scene(
        kind, torch.bfloat16, lead=INT8_INT4, run=0, block_tokens=16, kv_heads=2, repeats=3, dim=64, softcap=None,
        seed=3,
    )  # fmt: skip
    scene.pin(5)
    sums = [torch.zeros(2, 2, 64) for _ in range(2)]
    spans = [
        Span(table=scene.take(name, scene.body, 0, 40), start=0, count=40, drawn=drawn)
        for name, drawn in (("pruned", sums[0]), ("behind", None))
    ]
    x = torch.randn(80, 6 + 4, 64, generator=scene.generator).to(torch.bfloat16)
    q, kv = x[:, :6].view(80, 3, 2, 64), x[:, 6:]
    before = [Before(table=scene.leads[lead][0], tokens=80 * lead, count=40) for lead in (0, 1)]
    out = scene.memory.plan(before, spans).attend(scene.slot, q, kv)
    alone = replace(spans[0], drawn=sums[1])
    expected = scene.memory.own.plan([alone]).attend(scene.slot, q[:40], kv[:40])
    assert (out[:40] - expected).abs().max() < 0.02
    assert (sums[0] - sums[1]).abs().max() < 1e-3
    # Every query's weights add up to one, of each of three heads.
    assert (sums[0][1].sum(-1) - 3 * 40).abs().max() < 0.5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    reading_model(directory, replace(LLAMA, config={**LLAMA.config, "head_dim": 32}))
    return directory


@pytest.fixture(scope="module")
def parts(llama):
    return {"a": cartridge_of(llama), "b": cartridge_of(llama, tokens=32, seed=1)}


@pytest.mark.parametrize("kernels", ["torch", "portable"])
@pytest.mark.parametrize(
    ("format", "own"),
    [(F32, F32), (replace(INT8_INT4, rotate=True), INT8_INT4), (replace(F32, layers={1: INT8_INT4}), F32)],
    ids=["f32", "rotated", "layers"],
)
def test_the_same_format_gives_the_same(llama, parts, kernels, format, own, monkeypatch):
    """Stored before sequences a cartridge is what it was in the tree, alone and behind another."""
    if not here(kernels):
        pytest.skip(f"no {kernels} kernels on this machine")
    monkeypatch.setenv("KVIST_KERNELS", kernels)
    if not format.uniform:
        parts = {name: part for name, part in parts.items() if name == "a"}
    tree = engine_of(llama, cartridges=parts, format=format)
    lead = engine_of(llama, cartridges=parts, format=format, cartridge_format=own, max_batch_tokens=7)
    logits = [watched(engine) for engine in (tree, lead)]
    for names in ("a", ["a", "b"], ["b", "a"])[: 1 if len(parts) == 1 else 3]:
        for prompt in PROMPTS[:2]:
            for seen in logits:
                seen.clear()
            assert asked(tree, [prompt], names) == asked(lead, [prompt], names)
            one, other = (torch.cat(seen) for seen in logits)
            if format.uniform:
                assert (one - other[-len(one) :]).abs().max() < 1e-5 * max(1.0, float(one.abs().max()))
    assert [row["bytes"] for row in lead.snapshot()["cartridges"]][:2] == [
        part.tokens * sum(g.token_bytes for g in lead.groups if g.lifetime == "lead") for part in parts.values()
    ]


def test_many_share_it_beside_others(llama, parts):
    """In the same steps, found again and stopped: the tokens of others stay as they are, and every block comes back."""
    plain = asked(engine_of(llama), PROMPTS, None)
    engine = engine_of(llama, cartridges=parts, cartridge_format=INT8_INT4)
    behind = {names: asked(engine, PROMPTS, list(names)) for names in (("a",), ("a", "b"), ("b", "a"))}
    assert len({json.dumps(answer) for answer in (plain, *behind.values())}) == 4
    for _ in range(2):
        running = {names: started(engine, PROMPTS, list(names)) for names in behind}
        ordinary = started(engine, PROMPTS, None)
        for names, answers in running.items():
            assert finished(engine, answers) == behind[names]
            tokens = sum(parts[name].tokens for name in names)
            assert {answer.account["cartridge_tokens"] for answer in answers} == {tokens}
            own = answers[1].account["planned_bytes"] - tokens * sum(group.token_bytes for group in engine.groups[1:])
            assert own == -(-(len(PROMPTS[1]) + 7) // 16) * engine.groups[0].block_bytes
        assert finished(engine, ordinary) == plain
        stopped = [*started(engine, PROMPTS, "a"), *started(engine, PROMPTS, None)]
        engine.step()
        engine.abort_all("abort")
        assert all(answer.account["planned_bytes"] == answer.account["allocated_bytes"] for answer in stopped)
    # What is said behind one list is found behind it alone, and by one tenant alone.
    for names, salt, hit in ((["a"], "", True), (["b"], "", False), (["a"], "s", False), (["a"], "s", True)):
        (answer,) = started(engine, PROMPTS[1:2], names, cache_salt=salt)
        finished(engine, [answer])
        assert (answer.account["prefix_hit_tokens"] >= 16) == hit
    for name in parts:
        engine.unload_cartridge(name)
    engine.cache.clear()
    assert engine.cache.arena.free_slabs == engine.cache.layout.num_slabs


def test_one_copy_under_two_names(llama, parts):
    """Also beside one that was unloaded, on which a request lives still."""
    engine = engine_of(llama, cartridges=parts, cartridge_format=INT8_INT4)
    held = engine.cache.pins.bytes
    behind = asked(engine, PROMPTS, "a")
    engine.load_cartridge("again", parts["a"])
    running = [*started(engine, PROMPTS, "a"), *started(engine, PROMPTS, ["again", "b"])]
    engine.step()
    for name in ("a", "again"):
        engine.unload_cartridge(name)
    engine.load_cartridge("a", parts["a"])
    together = engine.cache.held_bytes(engine.shelf.loaded["b"].pin)
    assert engine.cache.pins.bytes == held + together
    assert finished(engine, running)[:3] == behind == asked(engine, PROMPTS, "a")
    assert engine.cache.pins.bytes == held
    for name in parts:
        engine.unload_cartridge(name)
    engine.cache.clear()
    assert engine.cache.pins.bytes == 0
    assert engine.cache.arena.free_slabs == engine.cache.layout.num_slabs


def test_little_memory(llama, parts):
    """Requests behind a lead are preempted and computed again like others, and those promised room keep it."""
    prompts = [f"{number}: {PROMPTS[1]}" for number in range(12)]
    options = {"cartridges": parts, "cartridge_format": INT8_INT4}
    before = asked(engine_of(llama, **options), prompts, "a")
    alone = asked(engine_of(llama), prompts, None)
    small = engine_of(llama, memory=26 * engine_of(llama).groups[0].block_bytes, **options)
    answers, ordinary = started(small, prompts, "a"), started(small, prompts, None)
    assert finished(small, answers) == before
    assert finished(small, ordinary) == alone
    assert small.scheduler.counters.preempted > 0


def test_tiers_bring_back_what_stands_behind_it(llama, parts):
    """What requests have said behind a lead goes to a tier and comes back; the lead itself stays."""
    large = engine_of(llama)
    options = {"cartridges": {"b": parts["b"]}, "cartridge_format": CacheFormat(key="int4c", value="int4")}
    small = engine_of(llama, memory=14 * large.groups[0].block_bytes, tiers="host=1MiB", **options)
    for names in ("b", None):
        (before,) = asked(small, PROMPTS[1:2], names)
        for number in range(4):
            asked(small, [f"{number}: {PROMPTS[1]}"], None)
        (answer,) = started(small, PROMPTS[1:2], names)
        assert finished(small, [answer]) == [before]
        assert answer.account["tier_hit_tokens"] >= 16


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_mix(llama, parts, seed):
    """With and without cartridges, stopped and preempted at random: who finishes says what it says alone."""
    rng = random.Random(seed)
    texts = [TEXT[start : start + 1 + length] for start, length in ((0, 3), (20, 60), (20, 75), (50, 33), (0, 100))]
    lists = (None, ["a"], ["a", "b"], ["b", "a"])
    options = {"cartridges": parts, "cartridge_format": INT8_INT4, "max_batch_tokens": rng.choice([9, 40])}
    large = engine_of(llama, **options)
    alone = {(text, str(names)): asked(large, [text], names)[0] for text in texts for names in lists}
    small = engine_of(llama, memory=22 * large.groups[0].block_bytes, **options)
    running = []
    for _ in range(60):
        if rng.random() < 0.5:
            text, names = rng.choice(texts), rng.choice(lists)
            (answer,) = started(small, [text], names, cache_salt=rng.choice(["", "", "tenant"]))
            running.append((answer, text, names))
        if rng.random() < 0.1:
            small.abort(rng.choice([f"request-{number}" for number in range(1, 40)]))
        small.step()
    while small.has_work():
        small.step()
    ends = {answer.finish_reason for answer, _, _ in running}
    assert ends == {"length", "abort"}
    for answer, text, names in running:
        assert answer.account["planned_bytes"] == answer.account["allocated_bytes"]
        if answer.finish_reason == "length":
            assert answer.tokens == alone[text, str(names)]
    assert small.scheduler.counters.preempted > 0
    assert small.snapshot()["joined"] == []
    assert [small.cache.arena.held(number) for number in range(2)] == [0, (48 + 32) // 16]
    for name in parts:
        small.unload_cartridge(name)
    small.cache.clear()
    assert small.cache.arena.free_slabs == small.cache.layout.num_slabs


def test_what_is_refused(llama, parts, tmp_path):
    spec = ModelSpec.read("gemma-3-1b")
    with pytest.raises(UnsupportedModel, match=r"cartridge_format: gemma-3-1b.* has window-512 layers"):
        lead_groups(spec, INT8_INT4, 16)
    with pytest.raises(UnsupportedModel, match=r"has latent layers"):
        lead_groups(ModelSpec.read("deepseek-v3"), INT8_INT4, 16)
    with pytest.raises(InputError, match=r"cartridge_format: .*rotated says more than"):
        engine_of(llama, cartridge_format=replace(INT8_INT4, rotate=True))
    with pytest.raises(InputError, match=r"^cartridge_format: 'int8' is not a CacheFormat") as raised:
        engine_of(llama, cartridge_format="int8")
    assert raised.value.key == "cartridge_format"
    reading_model(tmp_path, LLAMA)
    with pytest.raises(InputError, match=r"cartridge_format: codec int8 stores groups"):
        engine_of(tmp_path, cartridge_format=INT8_INT4)
    with pytest.raises(InputError, match=r"evict: h2o:64 .* cartridges in a format of their own stay whole"):
        engine_of(llama, cartridge_format=INT8_INT4, evict="h2o:64")
    engine = engine_of(llama, cartridges=parts, cartridge_format=INT8_INT4)
    with pytest.raises(InputError, match=r"evict: h2o:64 .* stay whole"):
        started(engine, PROMPTS, "a", evict="h2o:64")
    pruned = started(engine, [PROMPTS[1] * 3], None, evict="h2o:64")
    behind = started(engine, PROMPTS, "a")
    assert finished(engine, behind) == asked(engine, PROMPTS, "a")
    assert finished(engine, pruned) == asked(engine_of(llama), [PROMPTS[1] * 3], None, evict="h2o:64")
    odd = engine_of(llama, cartridge_format=INT8_INT4, block_tokens=64)
    with pytest.raises(InputError, match=r"cartridge: 48 tokens are no whole blocks of 64"):
        odd.load_cartridge("a", parts["a"])
