"""Tiers with real bytes: what comes back is what was stored, and answers are those that the arena would have given.

Freed blocks are filled with other bytes throughout, so that whatever was not copied, or too late, shows.
"""

import math
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import VOCAB, Case, Served, build, prompts_of
from served_dense import CASES as DENSE
from served_latent import CASES as LATENT
from test_served_hybrid import CASES as HYBRID
from test_tiers import conserved

from kvist.batch import Request
from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.places import DEVICE, Place, Room, Transfer
from kvist.cache.tier import Tier
from kvist.engine.runner import Runner
from kvist.engine.tiers import TierBytes
from kvist.errors import EngineFailure
from kvist.planning.capacity import allocated_bytes
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

pytest.importorskip("transformers")

POISON = 0x4E
MHA = Case(model="LlamaForCausalLM", config={"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32})
CODES = CacheFormat(key="int8", value="int4")
KINDS = {
    "GQA bf16": (DENSE["llama"], "bf16", None),
    "GQA int8/int4": (DENSE["llama"], "bf16", CODES),
    "GQA int4, turned, last layers kept": (
        DENSE["llama"], "f32", CacheFormat(key="int4", value="int4a", rotate=True, keep_layers=1),
    ),
    "GQA fp8": (DENSE["llama"], "f32", CacheFormat(key="fp8", value="fp8")),
    "MHA bf16": (MHA, "bf16", None),
    "MHA int8/int4": (MHA, "bf16", CODES),
    "GQA int8/int4, tail": (DENSE["llama"], "bf16", CacheFormat(key="int8", value="int4", tail=32)),
    "GQA int8, tail": (DENSE["llama"], "f32", CacheFormat(key="int8", value="int8", tail=32)),
    "windows": (DENSE["gemma2"], "f32", None),
    "windows int8/int4": (DENSE["gemma2"], "bf16", CODES),
    "MLA bf16": (LATENT["deepseek-v3"], "bf16", None),
    "MLA": (LATENT["deepseek-v3"], "f32", None),
    "MLA fp8": (LATENT["deepseek-v3"], "bf16", CacheFormat(key="fp8", value="fp8")),
    "states between attention": (HYBRID["states between attention"], "f32", None),
    "gated delta bf16": (HYBRID["gated delta"], "bf16", None),
}  # fmt: skip


@cache
def opened(name: str) -> Served:
    case, dtype, fmt = KINDS[name]
    with tempfile.TemporaryDirectory() as directory:
        built = build(case, Path(directory))
        spec = ModelSpec.read(directory)
        fmt = CacheFormat(key=dtype, value=dtype) if fmt is None else fmt.computed_in(dtype)
        groups = groups_of(spec.computed_in(dtype), fmt)
        layout = cut(groups, 96)
        return Served(Path(directory), built.oracle, Runner(spec, groups, layout, dtype=dtype), groups, layout)


def cut(groups: Sequence[Group], slabs: int) -> ArenaLayout:
    """In slabs of a block, so that memory moves between groups all the time."""
    sizes = tuple(group.block_bytes for group in groups)
    return ArenaLayout(
        total_bytes=slabs * max(sizes),
        slab_bytes=max(sizes),
        num_slabs=slabs,
        block_bytes=sizes,
        blocks_per_slab=tuple(max(sizes) // size for size in sizes),
    )


class Serving:
    """A scheduler over a runner's arena, or a part of it, with tiers behind."""

    def __init__(
        self, served: Served, tiers: Sequence[Tier], directory: Path, *, sequences: float = 2.0, **limits: int
    ) -> None:
        self.served, self.runner = served, served.runner
        slabs = CacheManager(served.groups, served.layout).promises.slabs_needed(200, 16)
        self.layout = cut(served.groups, math.ceil(slabs * sequences))
        assert self.layout.num_slabs <= served.layout.num_slabs
        self.manager = CacheManager(served.groups, self.layout, tiers=tiers, moving=True)
        self.runner.tiers = TierBytes(tiers, self.layout.total_bytes, directory) if tiers else None
        self.scheduler = Scheduler(manager=self.manager, limits=Limits(**{"max_context": 2048, **limits}))
        self.logits: dict[Request, list[torch.Tensor]] = {}
        self.steps: dict[Request, int] = {}
        with torch.inference_mode():
            self.runner.arena[: self.layout.total_bytes] = POISON

    def add(self, prompt: Sequence[int], steps: int = 4) -> Request:
        request = self.scheduler.add(str(len(self.steps)), np.array(prompt, np.int32), steps)
        self.logits[request], self.steps[request] = [], steps
        return request

    def step(self) -> None:
        batch = self.scheduler.step()
        self.runner.copy(batch.copies)
        if batch.chunks:
            out = self.runner.run(batch)
            self.runner.copy(self.scheduler.commit(batch))
            for row, request in zip(out, batch.sampling, strict=True):
                self.logits[request].append(row.clone())
                self.scheduler.append(request, int(row.argmax()))
                if request.generated == self.steps[request]:
                    held = self.manager.held_bytes(request.sequence)
                    assert held == allocated_bytes(self.served.groups, request.sequence.length)
                    self.scheduler.finish(request)
        self.poison()

    def poison(self) -> None:
        """Whatever no block holds may be written to by anyone; nothing is to be moved from there any more."""
        if self.runner.tiers is None:
            return
        self.runner.copy(self.manager.take_moves())
        assert self.runner.tiers.torn is None
        arena, owners = self.manager.arena, self.manager.arena.owner_of_slabs()
        with torch.inference_mode():
            for slab in np.flatnonzero(owners < 0).tolist():
                self.runner.arena[slab * self.layout.slab_bytes : (slab + 1) * self.layout.slab_bytes] = POISON
            for group, size in enumerate(self.layout.block_bytes):
                lent = np.repeat(owners == group, self.layout.blocks_per_slab[group])
                for block in np.flatnonzero(lent & (arena.refs[group] == 0) & ~arena.kept[group]).tolist():
                    begin = self.layout.offset(group, block)
                    self.runner.arena[begin : begin + size] = POISON

    def run(self, *prompts: Sequence[int], steps: int = 4) -> list[Request]:
        requests = [self.add(prompt, steps) for prompt in prompts]
        while self.scheduler.has_work():
            self.step()
        return requests

    def clear(self) -> None:
        """Nothing is left in the arena."""
        self.manager.clear()
        assert self.manager.arena.free_slabs == self.layout.num_slabs
        self.poison()

    def check_tiers(self) -> None:
        """What is counted is what lies there, and no more than there is room for."""
        conserved(self.manager, [])
        tiers = self.manager.tiers
        assert tiers is not None
        for level, held in enumerate(tiers.occupied()):
            assert tiers._places is not None
            assert tiers._places.used(level) == held.cached_bytes
            assert tiers._places._pieces[level].keys() == tiers._shelves[level].blocks.keys()


def tier(name: str, size: int, **keys: Any) -> Tier:
    return Tier(name=name, capacity_bytes=size, **keys)


BEHIND = {
    "host": (tier("host", 1 << 24),),
    "disk": (tier("disk", 1 << 24),),
    "disk behind a small host": (tier("host", 1 << 16), tier("disk", 1 << 24)),
    "both, at once": (tier("host", 1 << 24, write="write-through"), tier("disk", 1 << 24, write="write-through")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_after_a_tier_are_those_after_the_arena(kind: str, tmp_path: Path) -> None:
    """Logits bit for bit, and no token more or less is found."""
    served = opened(kind)
    (prompt,) = prompts_of(150)
    for behind in BEHIND.values():
        serving = Serving(served, behind, tmp_path)
        serving.run(prompt)
        (near,) = serving.run(prompt)
        assert near.first_hit_tokens
        assert not near.first_loads
        serving.clear()
        (far,) = serving.run(prompt)
        assert far.first_hit_tokens == near.first_hit_tokens
        assert sum(load.tokens for load in far.first_loads) == near.first_hit_tokens
        assert far.sequence.known().tolist() == near.sequence.known().tolist()
        assert all(map(torch.equal, serving.logits[far], serving.logits[near]))
        serving.check_tiers()
    assert not list(tmp_path.iterdir()), "a file has a name"


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_is_what_was_stored(kind: str, tmp_path: Path) -> None:
    """Every byte of every block of a prefix that goes and returns."""
    serving = Serving(opened(kind), BEHIND["disk behind a small host"], tmp_path)
    runner, layout = serving.runner, serving.layout
    (prompt,) = prompts_of(150)

    def stored() -> tuple[int, list[torch.Tensor]]:
        request = serving.add(prompt)
        batch = serving.scheduler.step()
        runner.copy(batch.copies)
        hit = request.first_hit_tokens
        assert hit
        found = []
        for number, group in enumerate(serving.served.groups):
            end = group.fixed_blocks or group.all_blocks(hit)
            ids = request.sequence.tables[number][:end]
            for block in ids[ids >= 0].tolist():
                begin = layout.offset(number, block)
                found.append(runner.arena[begin : begin + layout.block_bytes[number]].clone())
        runner.run(batch)
        runner.copy(serving.scheduler.commit(batch))
        serving.scheduler.finish(request)
        return hit, found

    serving.run(prompt)
    hit, before = stored()
    serving.clear()
    again, after = stored()
    assert (hit, len(before)) == (again, len(after))
    assert all(map(torch.equal, before, after))
    assert sum(runner.tiers.read) > 0


MIXED = ["windows", "states between attention", "GQA int8, tail", "MLA", "GQA int4, turned, last layers kept"]


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_requests_in_little_memory(kind: str, tmp_path: Path) -> None:
    """Shared prefixes, aborts and preemption, an arena for a sequence or two and tiers for a few blocks.

    Each answer is held against the same request's alone, with nothing behind the arena; but for tails, where what is
    found is read from sealed runs.
    """
    served = opened(kind)
    hits = preempted = 0
    for seed in range(2):
        chance = random.Random(f"{kind} {seed}")
        unit = CacheManager(served.groups, served.layout).unit_tokens
        least = sum((g.fixed_blocks or unit // g.block_tokens) * g.block_bytes for g in served.groups)
        write = chance.choice(["write-back", "write-back", "write-through"])
        behind = tuple(tier(name, int(least * chance.uniform(2, 9)), write=write) for name in ("host", "disk"))
        sequences, budget = chance.choice([1.0, 1.3, 1.6]), chance.choice([16, 37, 128])
        serving = Serving(served, behind, tmp_path, sequences=sequences, max_batch_tokens=budget)
        stems = prompts_of(90, 120)
        said: list[Request] = []
        for turn in range(70):
            if turn < 45 and chance.random() < 0.5:
                stem = chance.choice([*stems, *(r.sequence.known().tolist() for r in said[-3:])])
                own = [chance.randrange(3, VOCAB) for _ in range(chance.randrange(1, 20))]
                said.append(
                    serving.add([*stem[: chance.randrange(len(stem) + 1)], *own][:170], chance.randrange(1, 30))
                )
            if said and chance.random() < 0.07:
                serving.scheduler.finish(chance.choice(said))
            if serving.scheduler.has_work():
                serving.step()
            serving.check_tiers()
        serving.run()
        assert [serving.manager.arena.held(group) for group in range(len(served.groups))] == [0] * len(served.groups)
        serving.clear()
        serving.check_tiers()
        hits += sum(serving.scheduler.tier_hit_tokens.values())
        preempted += serving.scheduler.counters.preempted
        for request in said if "tail" not in kind else ():
            made = request.sequence.known()[request.prompt_tokens :].tolist()
            alone = Serving(served, (), tmp_path, sequences=1.0)
            (other,) = alone.run(request.sequence.known()[: request.prompt_tokens], steps=max(1, len(made)))
            assert other.sequence.known()[other.prompt_tokens :].tolist()[: len(made)] == made
    assert hits
    assert preempted


def test_a_move_that_fails_is_told(tmp_path: Path) -> None:
    serving = Serving(opened("GQA bf16"), BEHIND["disk"], tmp_path)
    (prompt,) = prompts_of(60)
    serving.run(prompt)
    serving.runner.tiers.close()
    serving.manager.clear()
    serving.runner.copy(serving.manager.take_moves())
    assert isinstance(serving.runner.tiers.torn, OSError)


def test_there_is_a_place_for_whatever_fits() -> None:
    """Sizes that do not divide each other, taken and given back at random: bytes are conserved, no two overlap."""
    chance = random.Random(3)
    size = 997
    room = Room(size)
    taken: list[Any] = []
    for _ in range(2000):
        wanted = chance.choice([1, 7, 12, 40, 100])
        if wanted <= room.free:
            taken.append(room.take(wanted))
            assert sum(length for _, length in taken[-1]) == wanted
        else:
            with pytest.raises(EngineFailure, match=f"{room.free} free bytes was to take {wanted}"):
                room.take(wanted)
            for _ in range(chance.randrange(1, 5)):
                room.give(taken.pop(chance.randrange(len(taken))))
        used = sorted(extent for extents in taken for extent in extents)
        assert sum(length for _, length in used) + room.free == size
        assert all(start + length <= after for (start, length), (after, _) in pairwise(used))
    for extents in taken:
        room.give(extents)
    assert room.take(size) == ((0, size),)


def test_runs_of_a_transfer() -> None:
    source = Place(DEVICE, ((100, 10), (200, 10), (300, 4)))
    target = Place(0, ((0, 3), (50, 19), (90, 2)))
    assert list(Transfer(source, target).runs()) == [
        (100, 0, 3),
        (103, 50, 7),
        (200, 57, 10),
        (300, 67, 2),
        (302, 90, 2),
    ]
    assert source.part(8, 13) == Place(DEVICE, ((108, 2), (200, 10), (300, 1)))
