"""Every family against transformers, in float32, through the scheduler, the cache manager and the runner.

In one pass, in chunks, in a batch of mixed lengths, warm from a prefix, past every window, over 64 greedy tokens; and
what each sequence holds is what the plan says, in every step.
"""

import pytest
import served_delta
import served_dense
import served_experts
import served_latent
import served_states
from served import Case, Served, Session, build, prompts_of

pytest.importorskip("transformers")

CASES: dict[str, Case] = {
    **served_delta.CASES,
    **served_dense.CASES,
    **served_experts.CASES,
    **served_latent.CASES,
    **served_states.CASES,
}
RELATIVE = 1e-4


@pytest.fixture(scope="module", params=list(CASES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return build(CASES[request.param], tmp_path_factory.mktemp("served"))


def test_a_batch_of_mixed_lengths(served: Served) -> None:
    session = Session(served, prefix_cache=False)
    assert session.worst_error(session.run(prompts_of(5, 40, 71, 1, 33))) < RELATIVE


def test_chunks(served: Served) -> None:
    """Prompts in pieces of odd sizes, with decodes between them."""
    session = Session(served, budget=37, prefix_cache=False)
    assert session.worst_error(session.run(prompts_of(90, 7, 130))) < RELATIVE


def test_warm_from_a_prefix(served: Served) -> None:
    """The second turn begins where the first ended, as far as all groups can reuse it."""
    session = Session(served)
    first = session.run(prompts_of(40, 9, shared=96))
    assert session.worst_error(first) < RELATIVE
    again = session.run([[*request.sequence.known().tolist(), 5, 6, 7] for request in first])
    assert session.worst_error(again) < RELATIVE
    for request in again:
        assert request.first_hit_tokens is not None
        assert request.first_hit_tokens >= 96


def test_past_every_window(served: Served) -> None:
    """A prompt several windows long, and 64 greedy tokens after it."""
    session = Session(served, budget=96)
    assert session.worst_error(session.run(prompts_of(300, 211), steps=64)) < RELATIVE
