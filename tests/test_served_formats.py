"""Layers of different formats, and states in another type, on real tensors: chunks, prefixes, windows, preemption."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import served_delta
import served_dense
import served_states
import torch
from served import Case, Served, Session, build, open_saved, oracle_logits, prompts_of

from kvist.scheduler import Request
from kvist.spec.formats import CacheFormat

pytest.importorskip("transformers")

ROUNDED = CacheFormat(key="bf16", value="f16")
# In float32, how far logits may lie from those of a network that rounds nothing, relative to the largest.
WAYS: dict[str, tuple[Case, CacheFormat, int, float]] = {
    "ends kept": (served_dense.CASES["llama"], CacheFormat(key="bf16", value="f16", keep_layers=1), 2, 0.02),
    "windows, a layer of its own": (
        served_dense.CASES["gemma2"], CacheFormat(key="f32", value="f32", layers={1: ROUNDED, 2: ROUNDED}), 4, 0.02,
    ),
    "states in bf16": (served_states.CASES["falcon-h1"], CacheFormat(key="f32", value="f32", state="bf16"), 2, 0.05),
    "states in f16, an end kept": (
        served_delta.CASES["qwen3.5"], CacheFormat(key="f32", value="bf16", state="f16", keep_layers=1), 2, 0.05,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(WAYS))
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, int, float]:
    case, fmt, groups, bound = WAYS[request.param]
    directory = tmp_path_factory.mktemp("formats")
    return open_saved(directory, build(case, directory).oracle, fmt=fmt), groups, bound


def worst_error(session: Session, requests: Sequence[Request]) -> float:
    worst = 0.0
    for request in requests:
        expected = oracle_logits(session.served.oracle, request.sequence.known()[:-1])[request.prompt_tokens - 1 :]
        ours = torch.stack(session.logits[request.id])
        worst = max(worst, float((expected - ours).abs().max() / expected.abs().max()))
    return worst


def test_they_stay_close_and_warm_equals_cold(way: tuple[Served, int, float]) -> None:
    served, groups, bound = way
    assert len(served.groups) == groups
    assert len({group.name for group in served.groups}) == groups
    with torch.inference_mode():
        # What reads as no number in any type.
        served.runner.arena.fill_(0xFF)
    cold = Session(served, budget=61)
    first = cold.run(prompts_of(40, 9, 130, shared=96), steps=8)
    assert 0 < worst_error(cold, first) < bound
    longer = [[*request.sequence.known().tolist(), 5, 6, 7] for request in first]
    warm = cold.run(longer)
    assert all((request.first_hit_tokens or 0) >= 96 for request in warm)
    assert worst_error(cold, warm) < bound
    if any(group.lifetime == "state" for group in served.groups):
        # Rounded at the ends of other chunks.
        return
    with torch.inference_mode():
        served.runner.arena.fill_(0xFF)
    again = Session(served, budget=61, prefix_cache=False).run(longer)
    for one, other in zip(warm, again, strict=True):
        assert one.sequence.known().tolist() == other.sequence.known().tolist()


def test_a_preempted_request_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """In a memory that holds two of the three at their ends."""
    case, fmt, _, bound = WAYS["ends kept"]
    served = open_saved(tmp_path, build(case, tmp_path).oracle, fmt=fmt)
    prompts = prompts_of(60, 75, 90)
    blocks = [2 * group.peak_blocks(130, 1) for group in served.groups]
    memory = served.layout.slabs_for(blocks) * served.layout.slab_bytes
    session = Session(open_saved(tmp_path, served.oracle, fmt=fmt, memory=memory), prefix_cache=False)
    requests = session.run(prompts, steps=40)
    assert sum(request.preemptions for request in requests) > 0
    assert worst_error(session, requests) < bound
    roomy = Session(served, prefix_cache=False).run(prompts, steps=40)
    assert [one.sequence.known().tolist() for one in requests] == [one.sequence.known().tolist() for one in roomy]
