"""Requests of recurrent and hybrid models on real tensors, mixed at random: preemption, prefixes, turns, aborts.

What each token of an answer was chosen from is held against one pass of transformers' code over the whole sequence, so
that a state shows that was read from the wrong block, copied too late, or gone on from at the wrong token. At the end
nobody holds a block, and once the cache is cleared no group has one.
"""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from served import VOCAB, Case, Served, Session, build, open_saved, oracle_logits, prompts_of

from kvist.batch import Request
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.errors import DoesNotFit
from kvist.planning.capacity import allocated_bytes
from kvist.scheduler import Limits, Scheduler

pytest.importorskip("transformers")

RELATIVE = 1e-4
_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_FALCON = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

CASES = {
    "states alone": Case(
        model="Mamba2ForCausalLM",
        config=_TINY | {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "intermediate_size": None},
    ),
    "states between attention": Case(
        model="JambaForCausalLM",
        config=_TINY | _HEADS | {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1}
        | {"num_experts": 1, "num_experts_per_tok": 1},
    ),
    "states beside attention": Case(model="FalconH1ForCausalLM", config=_TINY | _HEADS | _FALCON),
    "gated delta": Case(
        model="Qwen3_5ForCausalLM",
        config=_TINY | _HEADS | _DELTA | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip


@cache
def opened(name: str) -> Served:
    with tempfile.TemporaryDirectory() as directory:
        return build(CASES[name], Path(directory))


def memory_for(served: Served, tokens: int, sequences: float) -> ArenaLayout:
    """As much of the runner's arena as so many sequences of this length fill at least."""
    manager = CacheManager(served.groups, served.layout)
    slabs = manager.promises.slabs_needed(tokens, manager.block_tokens)
    return ArenaLayout.of(served.groups, int(slabs * sequences + 0.999) * served.layout.slab_bytes)


class Serving:
    """A scheduler over a small part of a runner's arena, and every logit of every answer."""

    def __init__(self, served: Served, layout: ArenaLayout, *, budget: int, **points: int | None) -> None:
        assert layout.slab_bytes == served.layout.slab_bytes
        self.served = served
        self.manager = CacheManager(served.groups, layout, **points)
        self.scheduler = Scheduler(manager=self.manager, limits=Limits(max_batch_tokens=budget, max_context=256))
        self.logits: dict[Request, list[torch.Tensor]] = {}
        self.steps: dict[Request, int] = {}
        self.preempted = self.hits = 0

    def add(self, prompt: list[int], steps: int) -> Request:
        request = self.scheduler.add(str(len(self.steps)), np.array(prompt, np.int32), steps)
        self.logits[request], self.steps[request] = [], steps
        return request

    def step(self) -> list[Request]:
        """One step; returns what has ended with it, checked."""
        batch = self.scheduler.step()
        self.preempted += len(batch.preempted)
        runner = self.served.runner
        runner.copy(batch.copies)
        if not batch.chunks:
            return []
        out = runner.run(batch)
        runner.copy(self.scheduler.commit(batch))
        ended = []
        for row, request in zip(out, batch.sampling, strict=True):
            self.logits[request].append(row.clone())
            self.scheduler.append(request, int(row.argmax()))
            if request.generated == self.steps[request]:
                self.check(request)
                self.scheduler.finish(request)
                ended.append(request)
        return ended

    def check(self, request: Request) -> None:
        self.hits += request.first_hit_tokens or 0
        tokens = request.sequence.known()
        expected = oracle_logits(self.served.oracle, tokens[:-1])[request.prompt_tokens - 1 :]
        ours = torch.stack(self.logits[request])
        assert float((expected - ours).abs().max()) < RELATIVE * float(expected.abs().max())

    def finish(self) -> None:
        """Answer all that are left; then nothing may be held, and nothing be left once the cache is cleared."""
        while self.scheduler.has_work():
            self.step()
        arena, groups = self.manager.arena, range(len(self.served.groups))
        assert [arena.held(group) for group in groups] == [0] * len(groups)
        self.manager.clear()
        assert [arena.lent(group) for group in groups] == [0] * len(groups)
        assert arena.free_slabs == self.manager.layout.num_slabs
        assert len(self.manager.tree.checkpoints) == 0


class HybridMachine(RuleBasedStateMachine):
    """Prompts of two families, so that prefixes meet, in memory for one or two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.serving: Serving | None = None
        self.alive: list[Request] = []
        self.said: list[list[int]] = []

    @precondition(lambda self: self.serving is None)
    @rule(
        case=st.sampled_from(list(CASES)),
        sequences=st.sampled_from([1.0, 1.5, 2.5, 6.0]),
        budget=st.sampled_from([16, 37, 128]),
        every=st.sampled_from([None, None, 16]),
        most=st.sampled_from([None, None, 1, 0]),
    )
    def start(self, case: str, sequences: float, budget: int, every: int | None, most: int | None) -> None:
        served = opened(case)
        with torch.inference_mode():
            # What nobody has written is far from all that is; attention multiplies slots behind a sequence's end by 0.
            served.runner.arena.fill_(0x4E)
        layout = memory_for(served, 72, sequences)
        self.serving = Serving(served, layout, budget=budget, checkpoint_every=every, max_checkpoints=most)

    @precondition(lambda self: self.serving is not None and len(self.alive) < 6)
    @rule(family=st.integers(0, 1), shared=st.integers(0, 50), own=st.integers(1, 20), steps=st.integers(1, 9))
    def ask(self, family: int, shared: int, own: int, steps: int) -> None:
        common = np.random.default_rng(family).integers(3, VOCAB, shared).tolist()
        tail = np.random.default_rng(100 * shared + own).integers(3, VOCAB, own).tolist()
        self.add(common + tail, steps)

    @precondition(lambda self: self.said and len(self.alive) < 6)
    @rule(data=st.data(), more=st.integers(1, 9), steps=st.integers(1, 9))
    def go_on(self, data: st.DataObject, more: int, steps: int) -> None:
        """The next turn of a conversation."""
        said = data.draw(st.sampled_from(self.said))
        self.add(said + list(range(5, 5 + more)), steps)

    def add(self, prompt: list[int], steps: int) -> None:
        if len(prompt) + steps > 256:
            return
        try:
            self.alive.append(self.serving.add(prompt, steps))
        except DoesNotFit:
            assert len(prompt) + steps > 72

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 5))
    def advance(self, count: int) -> None:
        for _ in range(count):
            for request in self.serving.step():
                self.alive.remove(request)
                self.said.append(request.sequence.known().tolist())

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.serving.scheduler.finish(request)

    @invariant()
    def sequences_hold_what_is_planned(self) -> None:
        for request in self.alive:
            held = self.serving.manager.held_bytes(request.sequence)
            assert held == allocated_bytes(self.serving.served.groups, request.sequence.length)

    def teardown(self) -> None:
        if self.serving is not None:
            self.serving.finish()


HybridMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHybridMachine = HybridMachine.TestCase


@pytest.mark.parametrize("case", list(CASES))
def test_preempted_and_gone_on_from_checkpoints(case: str) -> None:
    """Three conversations of two turns in too little memory: all of it happens, and every logit is right."""
    served = opened(case)
    # States alone take all their memory at once: who is admitted never has to make room, but checkpoints need some.
    serving = Serving(served, memory_for(served, 112, 4.0 if case == "states alone" else 1.0), budget=48)
    first = [serving.add(prompt, 90) for prompt in prompts_of(3, 14, 9, shared=20)]
    while serving.scheduler.has_work():
        serving.step()
    assert (serving.preempted > 0) == (case != "states alone")
    for request in first:
        serving.add([*request.sequence.known().tolist(), 5, 6, 7], 6)
        while serving.scheduler.has_work():
            serving.step()
    assert serving.hits
    serving.finish()


@pytest.mark.parametrize("case", list(CASES))
def test_in_bf16(case: str, tmp_path: Path) -> None:
    """What bf16 rounds away of logits; the states' recurrent part stays in float32.

    In the mean: the largest difference of all is 5 % of the largest logit, a little more or less with every processor's
    order of sums.
    """
    oracle = build(CASES[case], tmp_path).oracle
    served = open_saved(tmp_path, oracle, dtype="bf16")
    session = Session(served, budget=48)
    requests = session.run(prompts_of(60, 7, 33, shared=20), steps=4)
    for request in requests:
        expected = oracle_logits(oracle, request.sequence.known()[:-1])[request.prompt_tokens - 1 :]
        ours = torch.stack(session.logits[request.id])
        assert float((expected - ours).square().mean()) < 0.04**2 * float(expected.square().mean())
