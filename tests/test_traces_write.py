"""Writing traces and making them: round trips, the same everywhere, shapes as asked, and the command."""

import hashlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvist.cli import main
from kvist.errors import InputError
from kvist.traces.blocks import chained, offsets_of
from kvist.traces.laws import Arrivals, Draws, Empirical, Lognormal
from kvist.traces.read import read_trace
from kvist.traces.summary import Summary
from kvist.traces.synthesise import Tree, synthesise
from kvist.traces.trace import Trace
from kvist.traces.write import write_trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not there")


@st.composite
def traces(draw: st.DrawFn, *, block_tokens: int | None = None) -> Trace:
    count = draw(st.integers(1, 12))
    block = draw(st.sampled_from([None, 1, 16, 512])) if block_tokens is None else block_tokens
    lengths = arrays.arrays(np.int64, count, elements=st.integers(1, 3000))
    timed = block_tokens is not None or draw(st.booleans())
    gaps = arrays.arrays(np.float64, count, elements=st.floats(0, 1e6))
    prompts = draw(lengths)
    rows: list[list[int]] = []
    for prompt in prompts:
        most = 0 if block is None else -(-int(prompt) // block)
        rows.append(draw(st.lists(st.integers(0, 4), max_size=min(8, most))))
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    times = np.cumsum(draw(gaps)) if timed else np.zeros(count)
    return Trace(
        source="drawn",
        arrivals=times - times[0],
        timed=timed,
        prompts=prompts,
        outputs=draw(lengths),
        block_tokens=block if offsets[-1] else None,
        blocks=chained(np.array([each for row in rows for each in row], np.int64), offsets),
        offsets=offsets,
    )


def same(one: Trace, other: Trace) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrivals", "timed", "prompts", "outputs", "block_tokens", "blocks", "offsets")
    )


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, trace: Trace, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / name
    write_trace(trace, path)
    found = read_trace(path)
    assert same(found, trace)
    assert found.format == "kvist"
    written = path.read_bytes()
    write_trace(found, path)
    assert path.read_bytes() == written
    assert (written[:2] == b"\x1f\x8b") == name.endswith(".gz")


@settings(max_examples=60, deadline=None)
@given(traces(block_tokens=512))
def test_mooncake_keeps_lengths_milliseconds_and_what_prompts_share(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace
) -> None:
    path = tmp_path_factory.getbasetemp() / "mooncake.jsonl"
    write_trace(trace, path, format="mooncake")
    found = read_trace(path)
    assert np.array_equal(found.prompts, trace.prompts)
    assert np.array_equal(found.outputs, trace.outputs)
    assert found.arrivals == pytest.approx(trace.arrivals, abs=0.002)
    assert found.block_tokens == 512
    assert np.array_equal(np.diff(found.offsets), -(-trace.prompts // 512))
    for one in range(len(trace)):
        for other in range(one):
            mine, its = trace.blocks_of(one), trace.blocks_of(other)
            common = sum(1 for a, b in zip(mine, its, strict=False) if a == b)
            assert common == sum(
                1 for a, b in zip(found.blocks_of(one), found.blocks_of(other), strict=False) if a == b
            )


@needs_traces
def test_the_real_trace_goes_round(tmp_path: Path) -> None:
    trace = read_trace(TRACES / "mooncake_fast25_conversation.jsonl.gz")
    for form, name in (("kvist", "a.jsonl.gz"), ("mooncake", "b.jsonl")):
        write_trace(trace, tmp_path / name, format=form)
        assert same(read_trace(tmp_path / name), trace)
    sharing = Summary.of(trace).sharing
    assert sharing is not None
    # The golden numbers of the shared data.
    assert (sharing.references, sharing.unique) == (288_500, 182_790)
    assert sharing.hit_ratio == pytest.approx(0.3736, abs=5e-5)


def test_what_mooncake_cannot_say_is_refused(tmp_path: Path) -> None:
    untimed = read_trace(written(tmp_path, "9 3\n8 2\n"))
    with pytest.raises(InputError, match="format: mooncake names times, which this trace does not"):
        write_trace(untimed, tmp_path / "x", format="mooncake")
    odd = synthesise(50, arrivals=Arrivals(rate=1), prompt=Lognormal(mean=500), output=Lognormal(mean=5),
                     tree=Tree(systems=1, system_tokens=480), block_tokens=48)  # fmt: skip
    with pytest.raises(InputError, match="format: mooncake does not say that blocks have 48 tokens"):
        write_trace(odd, tmp_path / "x", format="mooncake")
    with pytest.raises(InputError, match="format: 'csv' is not written; choose one of kvist, mooncake"):
        write_trace(odd, tmp_path / "x", format="csv")
    with pytest.raises(InputError, match=r"out: .*: cannot be written: No such file"):
        write_trace(odd, tmp_path / "none" / "x")


def written(folder: Path, text: str) -> Path:
    path = folder / "given"
    path.write_text(text)
    return path


# -- made traces ------------------------------------------------------------------------------------------------


def chat(requests: int, **changes: Any) -> Trace:
    given: dict[str, Any] = {
        "seed": 7,
        "arrivals": Arrivals(rate=10, cv=2),
        "prompt": Lognormal(mean=300, cv=1.5),
        "output": Lognormal(mean=100),
        "tree": Tree(systems=5, system_tokens=200, turns=3, turn=Lognormal(mean=50), think=20),
    }
    return synthesise(requests, **{**given, **changes})


def test_a_seed_means_one_trace_on_any_machine() -> None:
    trace = chat(2000)
    digest = hashlib.sha256()
    for column in (trace.arrivals, trace.prompts, trace.outputs, trace.blocks, trace.offsets):
        digest.update(column.tobytes())
    # Drawn once; NumPy promises the bits, whole tokens and microseconds forgive the last digit of a logarithm.
    assert digest.hexdigest()[:16] == "3020b60e802cb47d"
    assert same(trace, chat(2000))
    assert not same(trace, chat(2000, seed=8))
    # One law does not move what another draws.
    other = chat(2000, output=Lognormal(mean=1))
    assert np.array_equal(np.sort(other.arrivals), trace.arrivals)


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0, 2.5])
def test_arrivals_and_lengths_are_as_asked(cv: float) -> None:
    trace = chat(40_000, arrivals=Arrivals(rate=4, cv=cv), prompt=Lognormal(mean=700, cv=cv / 2), tree=None)
    found = Summary.of(trace)
    assert found.rate == pytest.approx(4, rel=0.05)
    assert found.gap_cv == pytest.approx(cv, rel=0.05, abs=1e-3)
    assert found.prompts.mean == pytest.approx(700, rel=0.05)
    assert trace.prompts.std() / trace.prompts.mean() == pytest.approx(cv / 2, rel=0.1, abs=1e-3)
    assert found.sharing is None
    assert trace.block_tokens is None


@pytest.mark.parametrize("shape", [0.05, 0.7, 1.0, 3.0, 50.0])
def test_gamma_has_its_mean_and_variance(shape: float) -> None:
    drawn = Draws(1, 0).gamma(100_000, shape)
    assert drawn.mean() == pytest.approx(shape, rel=0.05)
    assert drawn.var() == pytest.approx(shape, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 3),
    st.integers(1, 100),
    st.floats(1, 6),
    st.sampled_from([1, 4, 16, 64]),
    st.integers(0, 99),
)
def test_turns_go_on_with_what_was_said(
    requests: int, systems: int, system_tokens: int, turns: float, block: int, seed: int
) -> None:
    tree = Tree(systems=systems, system_tokens=system_tokens if systems else 0, turns=turns)
    trace = chat(
        requests, seed=seed, tree=tree, block_tokens=block, prompt=Lognormal(mean=30), output=Lognormal(mean=9)
    )
    assert len(trace) == requests
    assert trace.arrivals[0] == 0
    assert np.all(np.diff(trace.arrivals) >= 0)
    assert trace.prompts.min() > tree.system_tokens
    if not trace.blocks.size:
        return
    assert np.all(np.diff(trace.offsets) * block <= trace.prompts)
    assert np.array_equal(chained(trace.blocks, trace.offsets), trace.blocks)
    # Whole blocks of a system prompt are the same for all who have it.
    whole = tree.system_tokens // block
    if whole:
        first = trace.blocks[trace.offsets[:-1]]
        assert np.unique(first).size <= systems
        depth = np.arange(trace.blocks.size) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
        assert np.unique(trace.blocks[depth < whole]).size <= systems * whole


def test_longer_sessions_and_fewer_systems_share_more() -> None:
    def ratio(**tree: Any) -> float:
        sharing = Summary.of(chat(5000, tree=Tree(**tree))).sharing
        return 0.0 if sharing is None else sharing.hit_ratio

    assert ratio() == 0
    assert ratio(turns=2) < ratio(turns=4) < ratio(turns=8)
    alone = ratio(systems=1, system_tokens=512)
    # 512 of 512 + 300 tokens, but for the first request.
    assert alone == pytest.approx(512 / 812, rel=0.05)
    assert ratio(systems=2000, system_tokens=512, zipf=0) < ratio(systems=2000, system_tokens=512, zipf=2) < alone


def test_lengths_of_a_trace_are_taken_row_by_row() -> None:
    prompts = np.arange(1, 101)
    trace = chat(500, prompt=Empirical(tokens=prompts), output=Empirical(tokens=prompts * 3), tree=None)
    assert np.array_equal(trace.outputs, trace.prompts * 3)
    assert np.unique(trace.prompts).size > 90
    given = Lognormal(mean=400, cv=0.8)
    fitted = Lognormal.fitted(given.draw(Draws(3, 0), 50_000))
    assert (fitted.mean, fitted.cv) == pytest.approx((400, 0.8), rel=0.05)
    again = Arrivals.fitted(chat(20_000, tree=None))
    assert (again.rate, again.cv) == pytest.approx((10, 2), rel=0.06)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"block_tokens": 0}, "block_tokens: 0 is out of range"),
        ({"arrivals": Arrivals(rate=1e-4), "requests": 10**6}, "rate: 0.0001 requests a second; .* more than 30 years"),
        ({"requests": 10**5, "tree": Tree(systems=1, system_tokens=2**24), "block_tokens": 1},
         "block_tokens: prompts have 1,677,[0-9,]* blocks of 1 tokens in common with others; at most 40,000,000"),
    ],
)  # fmt: skip
def test_wrong_wishes_say_what_is_right(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        chat(changes.pop("requests", 10), **changes)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Tree(turns=0.5), "turns: 0.5 is out of range; 1 to 10,000"),
        (lambda: Tree(systems=3), "system_tokens: 0, but system prompts need"),
        (lambda: Lognormal(mean=0.5), "mean: a mean length of 0.5 tokens"),
        (lambda: Lognormal(mean=5, cv=-1), "length_cv: a coefficient of variation of -1; 0 to 100"),
        (lambda: Arrivals(rate=0), "rate: 0 requests a second"),
        (lambda: Arrivals(rate=float("nan")), "rate: nan requests a second"),
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        wrong()


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_makes_converts_and_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, converted = str(tmp_path / "made.jsonl.gz"), str(tmp_path / "converted.jsonl")
    shape = ["--systems", "3", "--system-tokens", "1k", "--turns", "2", "--block", "64"]
    assert main(["trace", "synth", "--requests", "300", *shape, "--out", made]) == 0
    assert main(["trace", "convert", made, "--format", "mooncake", "-o", converted]) == 0
    assert capsys.readouterr().out == f"{made}: 300 requests\n{converted}: 300 requests\n"
    assert main(["trace", "info", made, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["trace", "info", converted, "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (first["requests"], first["format"], second["format"]) == (300, "kvist", "Mooncake")
    assert first["sharing"]["hit_tokens"] == second["sharing"]["hit_tokens"] > 0
    assert first["prompts"] == second["prompts"]
    words = ["trace", "synth", "--like", converted, "--requests", "50", "--json", "--out", made]
    assert main([*words, "--fit", "lognormal"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 50


def test_bad_rows_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, "prompt_tokens,output_tokens\n9,3\nmany,3\n9\n5,0\n8,2\n"))
    assert main(["trace", "info", path]) == 2
    assert capsys.readouterr().err.startswith(f"kvist: trace: {path}: line 3 has a length of 'many'; write a whole")
    assert main(["trace", "info", path, "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "2, left out" in out
    assert "line 4 has 1 column; one is missing" in out
    assert "1 requests without a prompt or without an answer" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["trace", "info", path, "--skip-bad", "--json"]) == 0
    assert [row["line"] for row in json.loads(capsys.readouterr().out)["skipped"]] == [3, 4]


def test_a_trace_is_piped_from_one_to_the_other(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["trace", "synth", "--requests", "20", "--out", "-"]) == 0
    out, err = capsysbinary.readouterr()
    assert err == b"standard output: 20 requests\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(out), isatty=lambda: False))
    assert main(["trace", "info", "-", "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["requests"] == 20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "COMMAND; see kvist trace --help"),
        ("fly", "COMMAND: invalid choice: 'fly'"),
        ("info none.jsonl", "trace: none.jsonl: no such file"),
        ("info none.jsonl --fast", "trace info: unknown argument '--fast'; see kvist trace info --help"),
        ("info none.jsonl --limit 0", "--limit: '0' is out of range; 1 or more; see kvist trace info --help"),
        ("convert none.jsonl", "required: -o/--out; see kvist trace convert --help"),
        ("convert none.jsonl --out - --json", "--out: - is standard output, where --json prints; name a file"),
        ("synth --out x --rate -1", "--rate: '-1' is out of range"),
        ("synth --out x --requests 99999999", "--requests: '99999999' is out of range; 1 to 10000000"),
        ("synth --out x --systems 2", "--system-tokens: 0, but system prompts need their number and their length"),
        ("synth --out x --requests 9999999 --rate 0.001", "--rate: 0.001 requests a second; 9,999,999 requests would"),
        ("synth --out /none/x", "--out: /none/x: cannot be written: No such file or directory"),
        ("synth --out x --like none.csv", "--like: none.csv: no such file"),
        ("synth --out x --format csv", "--format: invalid choice: 'csv'"),
    ],
)
def test_every_wrong_word_is_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
