"""``kvist compare``: divergences by transformers, memory from the arena, and what keeps a comparison going."""

import json
from dataclasses import replace

import numpy as np
import pytest
import served_latent
import served_states
import torch
import torch.nn.functional as F
from cartridge_models import LLAMA, reading_model

from kvist.cli import main
from kvist.comparison.compare import Comparison, compare
from kvist.comparison.journal import Journal
from kvist.comparison.measure import BLOCK, Row
from kvist.comparison.questions import DEPTHS, pieces_of
from kvist.comparison.reader import Reader
from kvist.comparison.settings import Setting, every_format, together, usual
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import BadFile, DoesNotFit, InputError
from kvist.report.comparison_page import page
from kvist.report.comparison_plot import offsets
from kvist.report.comparison_tables import remarks
from kvist.spec.formats import CODECS, CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import Pruning

pytest.importorskip("transformers")

INT8 = Setting(format=CacheFormat(key="int8", value="int8"))
HALF = Setting(pruning=Pruning(method="streaming", share=0.5))
BOTH = Setting(format=INT8.format, pruning=HALF.pruning)
SIZES = {"context": 400, "following": 64, "pieces": 2, "dtype": "f32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory, oracle = reading_model(
        tmp_path_factory.mktemp("model"), replace(LLAMA, config={**LLAMA.config, "head_dim": 32})
    )
    return ModelSpec.read(directory), oracle


@pytest.fixture(scope="module")
def text():
    words = ["sea", "lamp", "keeper", "island", "stone", "north", "wind", "glass", "tower", "boat"]
    return " ".join(np.random.default_rng(3).choice(words, 800))


@pytest.fixture(scope="module")
def found(model, text):
    return compare(model[0], text, [INT8, HALF, BOTH], **SIZES)


def row_of(kl, *, size=100.0, label="h2o", width=4 * BLOCK):
    return Row(
        setting=Setting(pruning=Pruning(method=label, share=0.5)), dtype="bf16", bytes_per_token=size,
        full_bytes_per_token=100.0, divergences=tuple(kl) * (width // len(kl)), top1_agreement=1.0, perplexity=2.0,
        needle=1.0, needle_known=1.0, choice=1.0, choice_known=1.0, decode_tokens_per_second=1.0,
    )  # fmt: skip


def test_the_full_cache_is_transformers(model, text, found):
    spec, oracle = model
    pieces = pieces_of(Tokenizer.read(spec), text, context=400, following=64, pieces=2, seed=0)
    losses = []
    for piece in pieces:
        ids = torch.tensor([[*piece.context, *piece.following]])
        with torch.no_grad():
            logs = F.log_softmax(oracle(ids).logits[0, -64:-1].double(), 1)
        losses.append(-logs.gather(1, ids[0, -63:, None]).mean())
    full = found.rows[0]
    assert full.setting.full
    assert (full.kl, full.top1_agreement, full.memory_ratio) == (0, 1, 1)
    assert np.log(full.perplexity) == pytest.approx(float(sum(losses) / 2), rel=1e-4)


def test_bytes_are_those_of_the_blocks_that_are_held(found):
    full, int8, half, both = found.rows
    # Two layers of two KV heads of 32 dims, in float32.
    assert full.bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert half.memory_ratio == pytest.approx(400 / 208, rel=1e-6)
    assert both.memory_ratio == pytest.approx(int8.memory_ratio * 400 / 208, rel=1e-6)
    assert int8.memory_ratio > 3


def test_what_is_smaller_is_further(found):
    _, int8, half, both = found.rows
    assert 0 < int8.kl < half.kl
    assert half.kl == pytest.approx(both.kl, rel=0.2)
    assert all(row.decode_tokens_per_second > 0 for row in found.rows)
    assert all(0 <= row.needle <= 1 for row in found.rows)


def test_pieces_hide_facts_where_they_are_looked_for(model, text):
    tokenizer = Tokenizer.read(model[0])
    pieces = pieces_of(tokenizer, text, context=400, following=64, pieces=9, seed=1)
    assert len(pieces) == len(text) // 464
    for piece in pieces:
        assert len(piece.context) == len(piece.hidden) == 400
        assert len(piece.following) == 64
        hidden = tokenizer.decode(list(piece.hidden))
        assert hidden.count("Note: the colour of the ") == len(DEPTHS) == len(piece.facts)
        places = [hidden.find(f"colour of the {thing} is") for thing in things_of(tokenizer, piece)]
        assert -1 not in places
        assert places == sorted(places)
        for fact in piece.facts:
            assert fact.told in fact.choices


def things_of(tokenizer, piece):
    return [tokenizer.decode(list(fact.answer)).split(" is")[0].rsplit(" ", 1)[1] for fact in piece.facts]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"context": 20_000}, r"text: \d,\d\d\d tokens; a piece takes 20,06\d"),
        ({"context": 120}, r"context: 1\d\d tokens hold no"),
    ],
)
def test_texts_too_short_are_refused(model, text, sizes, told):
    with pytest.raises(InputError, match=told):
        pieces_of(Tokenizer.read(model[0]), text, **{"context": 400, "following": 64, "pieces": 2, "seed": 0} | sizes)


def test_a_context_longer_than_the_model_reads_is_refused(model, text):
    spec = replace(model[0], max_context=512)
    with pytest.raises(InputError, match="reads 512 at most"):
        compare(spec, text, [], **SIZES)


def test_differences_within_noise_are_told():
    rng = np.random.default_rng(0)
    near = row_of(rng.exponential(1, 40 * BLOCK), label="h2o", width=40 * BLOCK)
    nearer = replace(
        near,
        divergences=tuple(x + 0.01 * y for x, y in zip(near.divergences, rng.normal(size=40 * BLOCK), strict=True)),
    )
    far = replace(near, divergences=tuple(x + 0.2 for x in near.divergences))
    assert near.indistinct_from(nearer)
    assert not near.indistinct_from(far)
    # As wide apart as they are noisy, yet token by token one is further.
    assert far.kl - near.kl < 4 * near.kl_error * 2


def test_the_front_is_what_no_other_beats():
    full = replace(row_of([0.0]), setting=Setting())
    rows = (
        full, row_of([0.1], size=50.0, label="h2o"), row_of([0.2], size=50.0, label="snapkv"),
        row_of([0.3], size=25.0, label="streaming"),
    )  # fmt: skip
    comparison = Comparison(model="m", dtype="bf16", rows=rows, context=1, following=1, pieces=1)
    assert comparison.front == {"bf16/bf16", "h2o:0.5", "streaming:0.5"}


def test_broken_keys_are_told():
    def of(key, kl):
        return replace(row_of([kl]), setting=Setting(format=CacheFormat(key=key, value="int8")))

    def notes(*rows):
        return Comparison(model="m", dtype="bf16", rows=rows, context=1, following=1, pieces=1).notes

    assert "keys in 4 bits break" in notes(of("int8", 0.001), of("int4", 2.5))[0]
    assert notes(of("int8", 0.001), of("int4", 0.1)) == []
    assert notes(of("int8", 2.0), of("int4", 2.5)) == []


def test_settings():
    assert len(usual()) == len(set(usual())) == 14
    assert [setting.label("bf16") for setting in usual()[1:3]] == ["int8/int8 rotated", "int8/int4"]
    assert usual()[-1].label("bf16") == "streaming:0.25"
    assert len({setting.format for setting in every_format()}) > len(CODECS) ** 2
    (both,) = together([INT8.format], [HALF.pruning])
    assert both == BOTH
    assert both.label("bf16") == "int8/int8 + streaming:0.5"


def test_what_a_model_does_not_store_is_left_out_or_refused(text, tmp_path):
    directory, _ = reading_model(tmp_path, replace(LLAMA, config={**LLAMA.config, "head_dim": 16}))
    spec = ModelSpec.read(directory)
    with pytest.raises(InputError, match="groups of 32"):
        compare(spec, text, [INT8], **SIZES)
    found = compare(spec, text, [INT8, Setting(format=CacheFormat(key="fp8", value="fp8"))], lenient=True, **SIZES)
    assert [row.label for row in found.rows] == ["f32/f32", "fp8/fp8"]
    assert "groups of 32" in found.left_out["int8/int8"]


def test_models_that_store_latents_or_states(text, tmp_path):
    for name, case, expected in (
        ("latents", served_latent.CASES["deepseek-v2"], ["f32/f32", "fp8/fp8"]),
        ("states", served_states.CASES["mamba-2"], ["f32/f32"]),
    ):
        (tmp_path / name).mkdir()
        directory, _ = reading_model(tmp_path / name, case)
        found = compare(ModelSpec.read(directory), text, usual(), lenient=True, **SIZES | {"pieces": 1})
        assert [row.label for row in found.rows] == expected
        assert len(found.left_out) == len(usual())


def test_a_journal_goes_on_where_it_stood(model, text, found, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    first = compare(model[0], text, [INT8, HALF], journal=path, **SIZES)
    assert len(path.read_text().splitlines()) == 3
    with path.open("a") as file:
        file.write('{"question": "torn')
    told = []
    again = compare(model[0], text, [INT8, HALF, BOTH], journal=path, told=lambda label, _: told.append(label), **SIZES)
    assert again.rows[:3] == first.rows
    assert set(told) == {"f32/f32", BOTH.label("f32")}
    monkeypatch.setattr("kvist.comparison.compare.Reader", None)
    last = compare(model[0], text, [INT8, HALF, BOTH], journal=path, **SIZES)
    assert last.rows == again.rows
    with pytest.raises(TypeError):
        compare(model[0], text, [INT8], journal=path, seed=1, **SIZES)


def test_rows_that_are_no_rows_are_measured_again(model, text, found, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    compare(model[0], text, [INT8], journal=path, **SIZES)
    good = path.read_text().splitlines()
    row = json.loads(good[1])
    asked = row["question"]
    assert Journal(path, asked).find(INT8, "f32") is not None
    for wrong in (
        {"divergences": "abc"}, {"divergences": 3}, {"divergences": []}, {"divergences": [None]}, {"needle": "x"},
        {"divergences": [float("nan")]}, {"bytes_per_token": 0}, {"perplexity": None}, {"label": 7},
    ):  # fmt: skip
        path.write_text("\n".join([good[0], json.dumps(row | wrong), '{"question": ' + "[" * 10**5]))
        assert list(Journal(path, asked).rows) == ["f32/f32"]
    for other in ("Sing, goddess, the anger of Achilles.\n", "[]\n", "\x00" * 99):
        path.write_text(other)
        with pytest.raises(BadFile, match="is no journal of comparisons; name another file"):
            Journal(path, asked)
    path.write_text('{"quest')
    book = Journal(path, asked)
    book.add(found.rows[1])
    assert Journal(path, asked).rows.keys() == {"int8/int8"}
    # Other weights of the same name are another question.
    monkeypatch.setattr("kvist.comparison.compare.model_digest", lambda spec: "others")
    monkeypatch.setattr("kvist.comparison.compare.Reader", None)
    path.write_text("\n".join(good))
    with pytest.raises(TypeError):
        compare(model[0], text, [INT8], journal=path, **SIZES)


def test_the_type_of_computation_is_the_full_cache(model, text, found):
    plain = CacheFormat(key="f32", value="f32")
    again = compare(model[0], text, [Setting(format=plain), HALF, replace(HALF, format=plain)], **SIZES)
    assert [row.label for row in again.rows] == ["f32/f32", "streaming:0.5"]


def test_answers_that_are_no_numbers(model, text, monkeypatch):
    behind = Reader.behind

    def broken(reader, *asked):
        logs = behind(reader, *asked)
        return logs * torch.nan if reader.manager.groups[0].format.key == "int8" else logs

    monkeypatch.setattr(Reader, "behind", broken)
    sizes = SIZES | {"pieces": 1}
    found = compare(model[0], text, [INT8, HALF], **sizes)
    assert [row.label for row in found.rows] == ["f32/f32", "streaming:0.5"]
    assert "hold what is no number" in found.left_out["int8/int8"]
    monkeypatch.setattr(Reader, "behind", lambda *asked: behind(*asked) * torch.nan)
    with pytest.raises(InputError, match="hold what is no number") as caught:
        compare(model[0], text, [INT8], **sizes)
    assert caught.value.key == "dtype"


def test_answers_larger_than_the_machine(model, text, monkeypatch):
    monkeypatch.setattr("kvist.comparison.compare.machine_memory", lambda: 10**5)
    with pytest.raises(DoesNotFit, match=r"answers at 126 tokens behind 2 of them take 157.5 KiB, .* has 97.66 KiB"):
        compare(model[0], text, [INT8], **SIZES)


def test_a_question_longer_than_what_follows(model, text, tmp_path):
    path = tmp_path / "questions.json"
    sizes = SIZES | {"pieces": 1, "questions": path}
    path.write_text(json.dumps([["Who?", "boat " * 60]]))
    assert [row.kl > 0 for row in compare(model[0], text[:600], [HALF], **sizes).rows] == [False, True]
    path.write_text(json.dumps([["Who?", "boat " * 600]]))
    with pytest.raises(InputError, match="questions: the longest and the text are"):
        compare(model[0], text[:600], [HALF], **sizes)


def test_names_stand_in_the_order_of_their_points():
    rows = [{"setting": name} for name in ("a:0.25", "b:0.25", "far", "c", "wide name")]
    points = [(100, 80), (100, 76), (300, 76), (120, 74), (60, 70)]
    places = [below + offset for (_, below), offset in zip(points, offsets(rows, points), strict=True)]
    assert places == [84, 75, 80, 66, 66]


def test_a_journal_that_cannot_be_written(tmp_path):
    book = Journal(None, "q")
    book.path = tmp_path / "nowhere" / "rows.jsonl"
    with pytest.raises(BadFile, match="cannot be written"):
        book.add(row_of([0.1]))


def test_the_page_holds_every_row(found):
    made = page(found.to_dict())
    data = json.loads(made.split("const data = ", 1)[1].split(";\n", 1)[0].replace("\\u003c", "<"))
    assert [row["setting"] for row in data["rows"]] == [row.label for row in found.rows]
    assert data["remarks"] == remarks(found.to_dict())


def test_the_command(model, text, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(text)
    call = [
        "compare",
        str(model[0].path),
        "--text",
        str(tmp_path / "text.txt"),
        "--context",
        "400",
        "--following",
        "64",
    ]
    call += ["--pieces", "1", "--dtype", "f32", "--journal", str(tmp_path / "rows.jsonl")]
    call += ["--format", "int8/int8+rotate", "--evict", "snapkv:0.25", "--cross"]
    assert main([*call, "--json", "--html", str(tmp_path / "page.html"), "--plot", str(tmp_path / "front.svg")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["setting"] for row in rows] == [
        "f32/f32", "int8/int8 rotated", "snapkv:0.25", "int8/int8 rotated + snapkv:0.25",
    ]  # fmt: skip
    assert rows[3]["format"] == "int8/int8"
    assert rows[3]["rotate"]
    assert rows[3]["evict"] == "snapkv:0.25"
    assert "snapkv:0.25" in (tmp_path / "page.html").read_text()
    assert "<svg" in (tmp_path / "front.svg").read_text()
    assert main(call) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "int8/int8 rotated + snapkv:0.25" in " ".join(out.split())


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--text", "bytes"], "is no text in UTF-8"),
        (["--text", "t", "--format", "int3/int4"], "--format: 'int3'"),
        (["--text", "t", "--format", "int8/int4+turn"], "--format: 'turn' is not known"),
        (["--text", "t", "--evict", "h2o"], "--evict: '' is no budget of h2o"),
        (["--text", "t", "--cross"], "--cross: give the formats and the methods"),
        (["--text", "t", "--plot", "x.gif"], "--plot: 'x.gif' names no kind of picture"),
        ([], "--text"),
        (["--text", "t", "--html", "x" * 5000], "x…: cannot be written: File name too long"),
        (["--text", "t", "--journal", "./t"], "the call names this file twice"),
        (["--text", "t", "--journal", "rows", "--html", "rows"], "the call names this file twice"),
    ],
)
def test_bad_calls_are_refused_in_one_line(argv, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text("text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert main(["compare", *argv]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
