"""Pruning: every method, over formats and families, against a dense pass with the same tokens masked; memory freed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pruned import PrunedSession
from served import Case, Served, build, open_saved, prompts_of
from test_cache_machine import FULL
from test_served_formats import GEMMA

from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.errors import InputError
from kvist.kernels.dense import Scores
from kvist.kernels.pruning import Observed, column_sums, select
from kvist.spec.formats import CacheFormat
from kvist.spec.pruning import LEAST, SLACK, Pruning
from kvist.store.layouts import Scratch

pytest.importorskip("transformers")

RELATIVE = 1e-4
FAMILIES = {
    "gqa": Case(model="LlamaForCausalLM", config={"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}),
    "mha": Case(model="LlamaForCausalLM", config={"num_attention_heads": 3, "num_key_value_heads": 3}),
    "windows": GEMMA,
}
METHODS = ["h2o:40", "h2o-sum:40", "snapkv:0.4", "streaming:4+36"]
FORMATS = [
    CacheFormat(key="bf16", value="bf16"),
    CacheFormat(key="int8", value="int4", rotate=True),
    CacheFormat(key="int4a", value="fp8"),
    CacheFormat(key="fp8", value="int4a", keep_layers=1),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    return {name: build(case, tmp_path_factory.mktemp(name)) for name, case in FAMILIES.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, directories: dict[str, Served]) -> Served:
    return directories[request.param]


@pytest.fixture(scope="module", params=FORMATS, ids=str)
def served(request: pytest.FixtureRequest, family: Served) -> Served:
    return open_saved(family.directory, family.oracle, fmt=request.param, memory=2**24)


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_a_masked_pass(served: Served, method: str) -> None:
    """Prompts of mixed lengths in pieces of odd sizes, decodes between them, one prompt shorter than any budget."""
    session = PrunedSession(served, budget=61, prefix_cache=False)
    name = method.partition(":")[0]
    requests = session.run(prompts_of(110, 12), steps=34, evict=[method])
    assert session.worst_error(requests, sums=name if name != "streaming" else None) < RELATIVE
    dropped = session.stories[requests[0].id].droppings
    plan = Pruning.read(method).of_prompt(110)
    assert all(kept.shape[-1] == plan.keep for drop in dropped for kept in drop.kept.values())
    assert all((kept[:, :4] == torch.arange(4)).all() for drop in dropped for kept in drop.kept.values())
    # 33 tokens of the answer are stored: bounded methods have pruned once more.
    assert [drop.length for drop in dropped] == ([110] if name == "snapkv" else [110, 110 + SLACK])


def test_heads_and_layers_choose_for_themselves(directories: dict[str, Served]) -> None:
    session = PrunedSession(directories["gqa"], prefix_cache=False)
    (request,) = session.run(prompts_of(150), steps=2, evict=["snapkv:40"])
    (dropping,) = session.stories[request.id].droppings
    assert len({tuple(head.tolist()) for kept in dropping.kept.values() for head in kept}) == 4 * 3


@pytest.mark.parametrize("method", ["h2o:90", "h2o:1.0", "snapkv:1k", "streaming:4+1020"])
def test_a_budget_of_all_is_no_pruning(family: Served, method: str) -> None:
    prompts = prompts_of(77, 30)
    plain = PrunedSession(family)
    expected = plain.run(prompts, steps=10)
    session = PrunedSession(family)
    found = session.run(prompts, steps=10, evict=[method])
    for one, other in zip(expected, found, strict=True):
        assert one.sequence.known().tolist() == other.sequence.known().tolist()
        assert all(map(torch.equal, plain.logits[one.id], session.logits[other.id]))
    assert session.scheduler.counters.prunings == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_blocks_are_given_back(directories: dict[str, Served], prefix_cache: bool) -> None:
    """Read from the arena: what is not kept is free at once, or the prefix tree's to lose."""
    session = PrunedSession(directories["gqa"], prefix_cache=prefix_cache)
    arena = session.manager.arena
    session.scheduler.add("0", prompts_of(160)[0], 8, pruning=Pruning.read("snapkv:48"))
    session.logits["0"] = []
    begun: list[tuple[int, int]] = []
    prune = session.pruner.prune

    def counted(chunks: list[object]) -> None:
        begun.append((arena.held(0), arena.lent(0) - arena.held(0)))
        prune(chunks)  # type: ignore[arg-type]

    session.pruner.prune = counted  # type: ignore[method-assign,assignment]
    free_before = arena.free(0)
    session.step(8)
    assert begun[0][0] == 10
    assert arena.held(0) == 3
    assert arena.cached(0) == (10 if prefix_cache else 0)
    assert arena.free(0) - free_before == arena.lent(0) - 3 - arena.cached(0) - free_before
    assert session.scheduler.counters.pruned_blocks == 7
    assert session.scheduler.counters.pruned_tokens == 112


def test_shared_prefixes_stay_as_they_are(family: Served) -> None:
    """Requests that are pruned and such that are not, with one prefix, in one batch and one after the other."""
    prompts = prompts_of(20, 31, 5, 44, shared=96)
    alone = PrunedSession(family, prefix_cache=False)
    expected = alone.run(prompts, steps=12)
    session = PrunedSession(family, budget=500)
    ways = ["none", "snapkv:40", "none", "h2o:40"]
    together = session.run(prompts, steps=12, evict=ways)
    again = session.run(prompts, steps=12, evict=["streaming:4+36", "none", "snapkv:40", "none"])
    assert session.worst_error([*together, *again]) < RELATIVE
    for number in (0, 2):
        assert together[number].sequence.known().tolist() == expected[number].sequence.known().tolist()
    for number in (1, 3):
        assert again[number].sequence.known().tolist() == expected[number].sequence.known().tolist()
        assert again[number].first_hit_tokens
    assert all(session.manager.arena.held(group) == 0 for group in range(len(family.groups)))


@pytest.mark.parametrize("method", ["snapkv:40", "streaming:4+36", "h2o:40", "h2o-sum:40"])
def test_warm_equals_cold(family: Served, method: str) -> None:
    session = PrunedSession(family)
    prompts = prompts_of(60, shared=80)
    (cold,) = session.run(prompts, steps=8, evict=[method])
    (warm,) = session.run(prompts, steps=8, evict=[method])
    assert warm.sequence.known().tolist() == cold.sequence.known().tolist()
    assert bool(warm.first_hit_tokens) == (not method.startswith("h2o"))


_ALONE: dict[tuple[Path, tuple[int, ...], str], list[int]] = {}


def answered_alone(family: Served, prompt: list[int], way: str) -> list[int]:
    """A prompt and 60 tokens, with all of memory and nothing shared; computed once."""
    key = family.directory, tuple(prompt), way
    if key not in _ALONE:
        (request,) = PrunedSession(family, prefix_cache=False).run([prompt], steps=60, evict=[way])
        _ALONE[key] = request.sequence.known().tolist()
    return _ALONE[key]


@pytest.mark.parametrize("method", ["h2o:30", "snapkv:30", "streaming:4+26"])
def test_preempted_requests_are_pruned_again_at_the_same_tokens(family: Served, method: str) -> None:
    # Room for the first two once they are long, and hardly more.
    blocks = [(2 * group.peak_blocks(100, 1) + 2) * group.block_bytes for group in family.groups]
    small = open_saved(family.directory, family.oracle, memory=sum(blocks))
    session = PrunedSession(small, budget=64, max_context=400)
    requests = session.run(prompts_of(40, 40, 50), steps=60, evict=["none", "none", method])
    assert session.scheduler.counters.preempted > 0
    assert session.worst_error(requests) < RELATIVE
    for request, way in zip(requests, ("none", "none", method), strict=True):
        prompt = request.sequence.known()[: request.prompt_tokens].tolist()
        assert request.sequence.known().tolist() == answered_alone(family, prompt, way)
    assert all(session.manager.arena.held(group) == 0 for group in range(len(family.groups)))


def test_a_bounded_sequence_outgrows_its_memory(directories: dict[str, Served]) -> None:
    """Its slots are what counts: 260 tokens pass through memory for 128."""
    served = directories["gqa"]
    small = open_saved(served.directory, served.oracle, memory=8 * served.groups[0].block_bytes)
    session = PrunedSession(small)
    (request,) = session.run(prompts_of(100), steps=160, evict=["h2o:64"])
    assert session.worst_error([request]) < RELATIVE
    assert request.preemptions == 0
    with pytest.raises(Exception, match="the cache has"):
        session.run(prompts_of(100), steps=300, evict=["snapkv:64"])


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_pruned_now_is_pruned_later(
    directories: dict[str, Served], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = PrunedSession(directories["gqa"], prefix_cache=False)
    compact, refused = session.scheduler.compact, iter([True, True, True])
    monkeypatch.setattr(session.scheduler, "compact", lambda made: None if next(refused, False) else compact(made))
    (request,) = session.run(prompts_of(100), steps=12, evict=[method])
    assert session.worst_error([request]) < RELATIVE
    assert [dropping.length for dropping in session.stories[request.id].droppings] == [103]


def test_memory_that_is_full_of_what_others_read() -> None:
    """Nothing changes until one of them ends; then what is kept has room."""
    layout = ArenaLayout.of((FULL,), 6 * FULL.block_bytes)
    manager = CacheManager((FULL,), layout)
    one, other = manager.begin([1] * 20), manager.begin([1] * 18)
    other.pruning = Pruning(method="streaming", tokens=10, sinks=1).of_prompt(18)
    for sequence in (one, other):
        assert manager.reserve(sequence, 50).granted
        manager.commit(sequence, sequence.length + sequence.in_flight)
    assert other.hit_tokens == 16
    before = manager.snapshot({"one": one, "other": other})
    assert manager.compact(other) is None
    assert manager.snapshot({"one": one, "other": other}) == before
    manager.release(one)
    (moved,) = manager.compact(other) or ()
    assert (moved.source.size, moved.target.size) == (5, 3)
    assert set(moved.target) <= set(moved.source)
    assert (manager.arena.held(0), other.pruned, other.room) == (3, 8, 20)
    manager.release(other)
    assert manager.arena.held(0) == 0
    assert not [*manager.tree.nodes()]


def test_a_lone_prompt_that_fills_memory_is_pruned_where_it_lies() -> None:
    """Its own runs leave the prefix tree, and their blocks are filled again."""
    manager = CacheManager((FULL,), ArenaLayout.of((FULL,), 5 * FULL.block_bytes))
    sequence = manager.begin(list(range(20)))
    sequence.pruning = Pruning(method="snapkv", tokens=9).of_prompt(20)
    assert manager.reserve(sequence, 50).granted
    manager.commit(sequence, 20)
    assert (manager.arena.held(0), manager.tree.tokens) == (5, 20)
    (moved,) = manager.compact(sequence) or ()
    assert set(moved.target) <= set(moved.source)
    assert (manager.arena.held(0), manager.arena.free(0), manager.tree.tokens) == (3, 2, 0)


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        # By the mean, by the sum, by the neighbours', by the order; the first and the newest stay.
        ("h2o", [0, 9, 10, 11]),
        ("h2o-sum", [0, 2, 10, 11]),
        ("snapkv", [0, 8, 10, 11]),
        ("streaming", [0, 9, 10, 11]),
    ],
)
def test_what_methods_keep(method: str, kept: list[int]) -> None:
    sums = torch.tensor([0.0, 0.1, 5.0, 0.1, 0.2, 4.0, 4.0, 4.0, 0.2, 3.0, 0.0, 0.0])
    seen = Observed(sums=sums[None, None], ages=torch.arange(12, 0, -1.0), recent=2)
    assert select(method, seen, keep=4, sinks=1).tolist() == [[kept]]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_column_sums(softcap: float | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.kernels.pruning._TILE_BYTES", 4 * 2 * 3 * 90 * 7)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(40, 3, 2, 16, generator=generator)
    keys = torch.randn(2, 90, 16, generator=generator)
    sink = torch.randn(3, 2, generator=generator) if sinks else None
    scores = torch.einsum("qrhd,hkd->rhqk", q.double(), keys.double()) * 0.7
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores += torch.full((40, 90), -torch.inf, dtype=torch.float64).triu(51)
    if sink is not None:
        scores = torch.cat((scores, sink.double()[..., None, None].expand(-1, -1, 40, 1)), -1)
    expected = scores.softmax(-1)[..., :90].sum((0, 2))
    found = column_sums(q, keys, Scores(scale=0.7, softcap=softcap), sink, scratch=Scratch())
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "printed", "keep"),
    [
        ("h2o:0.5", "h2o:0.5", 500),
        ("h2o:.25", "h2o:0.25", 250),
        ("h2o-sum:0.5", "h2o-sum:0.5", 500),
        ("snapkv:512", "snapkv:512", 512),
        ("snapkv:1k", "snapkv:1024", 1024),
        ("streaming:4+1020", "streaming:4+1020", 1024),
        ("streaming:1024", "streaming:4+1020", 1024),
        ("streaming:0+300", "streaming:0+300", 300),
        ("streaming:0.25", "streaming:0.25", 250),
        ("h2o:0.001", "h2o:0.001", LEAST),
        ("h2o:0.0000001", "h2o:0.0000001", LEAST),
    ],
)
def test_budgets_as_they_are_written(text: str, printed: str, keep: int) -> None:
    pruning = Pruning.read(text)
    assert pruning is not None
    assert str(pruning) == printed
    assert Pruning.read(printed) == pruning
    assert pruning.of_prompt(1000).keep == keep


def test_none_is_no_pruning() -> None:
    assert Pruning.read("none") is None


@pytest.mark.parametrize("share", [float("nan"), -0.5, True, "0.5"])
def test_a_share_is_a_number(share: Any) -> None:
    with pytest.raises(InputError, match="a share is above 0 and at most 1"):
        Pruning(method="h2o", share=share)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "h20:0.5",
            "is no method with a budget; write h2o:BUDGET, h2o-sum:BUDGET, snapkv:BUDGET, streaming:BUDGET or none",
        ),
        ("", "is no method"),
        ("h2o", "'' is no budget of h2o; write h2o:0.5, a share of the prompt, or h2o:512, tokens"),
        ("h2o:4+100", "is no budget of h2o"),
        ("h2o:1.5", "1.5 of the prompt; a share is above 0 and at most 1"),
        ("h2o:0.0", "a share is above 0"),
        ("snapkv:4", "4 tokens; a whole number above 4, the first tokens, which are kept"),
        ("snapkv:-1", "is no budget"),
        ("streaming:4+0", "4 tokens; a whole number above 4"),
        ("streaming:4+x", "or streaming:4+1020, first and newest tokens"),
        ("streaming:9999999999+5", "is no budget of streaming"),
    ],
)
def test_what_is_written_otherwise_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        Pruning.read(text)
    assert caught.value.key == "evict"
    assert told in str(caught.value)
    assert str(caught.value).startswith("evict: ")
