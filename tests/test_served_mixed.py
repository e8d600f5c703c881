"""Memory that has held numbers of another type: bf16 keys and values where states in f32 were."""

import pytest
import torch
from served import Session, build, open_saved, prompts_of
from served_states import CASES

pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ["jamba", "falcon-h1"])
def test_what_others_left_behind_is_not_read(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An arena full of what reads as no number, for keys and values in bf16 beside states in f32."""
    directory = tmp_path_factory.mktemp("mixed")
    oracle = build(CASES[case], directory).oracle
    served = open_saved(directory, oracle, dtype="bf16")
    clean = Session(served, budget=48)
    requests = clean.run(prompts_of(40, 7, 130), steps=20)
    with torch.inference_mode():
        served.runner.arena.fill_(0xFF)
    dirty = Session(served, budget=48)
    again = dirty.run(prompts_of(40, 7, 130), steps=20)
    for one, other in zip(requests, again, strict=True):
        assert one.sequence.known().tolist() == other.sequence.known().tolist()
        assert torch.equal(torch.stack(clean.logits[one.id]), torch.stack(dirty.logits[other.id]))
    assert all(torch.isfinite(torch.stack(rows)).all() for rows in dirty.logits.values())
