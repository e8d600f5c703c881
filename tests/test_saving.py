"""`kvist generate --no-cache`: the same answer twice, what the cache saved, and its picture."""

import json
from pathlib import Path

import pytest

from kvist.cli import main
from kvist.engine import commands
from kvist.report.saving import Saving, print_saving
from kvist.report.saving_plot import plot_saving

# Four tokens a second, and steps that take as many seconds as the answer has tokens.
SAVING = Saving(
    prompt_tokens=100,
    cached=[1 + 0.25 * token for token in range(17)],
    uncached=[1 + token * (token + 1) / 2 for token in range(17)],
    equal_tokens=17,
    stopped=False,
)


def cut(tokens: int, *, equal: int, stopped: bool) -> Saving:
    return Saving(
        prompt_tokens=100, cached=SAVING.cached, uncached=SAVING.uncached[:tokens], equal_tokens=equal, stopped=stopped
    )


def test_stretches_cover_what_both_runs_made() -> None:
    stretches = SAVING.stretches()
    assert [each.length for each in stretches] == [103, 105, 107, 109, 111, 113, 115, 117]
    assert all(each.cached == pytest.approx(4) for each in stretches)
    # Steps 15 and 16 take 31 seconds.
    assert stretches[-1].uncached == pytest.approx(2 / 31)
    assert (stretches[-1].cached_seconds, stretches[-1].uncached_seconds) == (5, 137)


@pytest.mark.parametrize(("tokens", "lengths"), [(0, []), (1, []), (2, [102]), (4, [102, 103, 104])])
def test_few_tokens_make_few_stretches(tokens: int, lengths: list[int]) -> None:
    saving = cut(tokens, equal=tokens, stopped=True)
    assert [each.length for each in saving.stretches()] == lengths
    print_saving(saving)


def test_only_a_run_that_was_stopped_may_be_shorter() -> None:
    assert SAVING.equal
    assert cut(5, equal=5, stopped=True).equal
    assert not cut(5, equal=4, stopped=True).equal
    assert not cut(5, equal=5, stopped=False).equal


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("name", ["saving.png", "saving.svg"])
def test_pictures_are_written(name: str, tokens: int, tmp_path: Path) -> None:
    path = tmp_path / name
    plot_saving(cut(tokens, equal=tokens, stopped=True), "a model", str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


@pytest.mark.usefixtures("smollm2_path")
def test_both_answers_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", "smollm2-135m", "Count to ten:", "--raw", "--dtype", "f32", "--max-tokens", "6", "--ignore-eos"]
    assert main([*call, "--no-cache", "--json", "--plot", str(tmp_path / "saving.svg")]) == 0
    answer = json.loads(capsys.readouterr().out)
    saving = answer["saving"]
    assert saving["equal"]
    assert not saving["stopped"]
    assert saving["compared_tokens"] == len(answer["tokens"]) == 6
    assert [row["length"] for row in saving["lengths"]] == [answer["prompt_tokens"] + 2 + step for step in range(5)]
    assert answer["account"]["allocated_bytes"] == answer["account"]["planned_bytes"]
    assert (tmp_path / "saving.svg").exists()


@pytest.mark.usefixtures("smollm2_path")
def test_the_run_without_a_cache_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_LONGEST_WITHOUT", 0.0)
    call = ["generate", "smollm2-135m", "Count to ten:", "--raw", "--dtype", "f32", "--max-tokens", "6", "--ignore-eos"]
    assert main([*call, "--temperature", "0", "--no-cache"]) == 0
    said = capsys.readouterr()
    assert "without the cache: stopped after 2 tokens, the same" in said.err
    assert "What the cache saves" in said.err
    assert "What the cache saves" not in said.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plot", "saving.png"], "--plot: draws what the cache saves; add --no-cache"),
        (["--no-cache", "--plot", "saving.txt"], "names no kind of picture"),
        (["--no-cache", "--plot", "nowhere/saving.png"], "there is no directory nowhere"),
    ],
)
def test_a_picture_without_a_place_is_refused_first(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "no-such-model", "a prompt", *options]) == 2
    assert says in capsys.readouterr().err
