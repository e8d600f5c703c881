"""Cartridges among the ways to shrink the cache."""

import json
import math
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from cartridge_models import LLAMA, TEXT, reading_model
from served_cartridges import cartridge_of, engine_of

from kvist.cartridges.evaluation import Question, read_questions
from kvist.cartridges.self_study import Writer
from kvist.cartridges.student import Student, to_cache
from kvist.cartridges.teacher import Teacher
from kvist.cli import main
from kvist.comparison.compare import compare
from kvist.comparison.questions import asked_of
from kvist.comparison.settings import Setting, together
from kvist.engine.engine import Engine
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import BadFile, InputError
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge

pytest.importorskip("transformers")

WORDS = (
    f"{TEXT} The boathouse burned down in 1953. The key hangs at the grocer's in Nordvik, whose owner is Berit Moen."
)
FP8 = CacheFormat(key="fp8", value="fp8")
SIZES = {"following": 128, "pieces": 2, "dtype": "f32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    reading_model(directory, LLAMA)
    return directory


@pytest.fixture(scope="module")
def text(model: Path) -> str:
    """Of whole blocks, so that a cartridge can be all of it."""
    encode = Tokenizer.read(ModelSpec.read(model)).encode
    text = WORDS
    while len(encode(text)) % 16:
        text += "."
    return text


def read(model: Path, text: str, tokens: int | None = None) -> Cartridge:
    """What the model itself stores of a text, or of its first tokens."""
    spec = ModelSpec.read(model)
    ids = Tokenizer.read(spec).encode(text)[:tokens]
    digest = sha256(text.encode()).hexdigest()
    manifest = replace(cartridge_of(model).manifest, tokens=len(ids), document_digest=digest)
    return Cartridge.of(manifest, to_cache(Student(spec, "f32").read(ids)))


def test_one_that_is_the_whole_text_answers_as_the_whole_text(model: Path, text: str) -> None:
    cartridges = {"whole": read(model, text), "half": read(model, text, 160)}
    settings = [Setting(cartridge="whole"), Setting(cartridge="half"), *together([FP8], [], ["half"])]
    found = compare(ModelSpec.read(model), text, settings, cartridges=cartridges, **SIZES)
    full, whole, half, stored = found.rows
    assert found.asked
    assert found.context == cartridges["whole"].tokens
    assert whole.kl < 1e-6
    assert whole.top1_agreement == 1
    assert whole.memory_ratio == 1
    assert whole.perplexity == pytest.approx(full.perplexity, rel=1e-4)
    assert half.kl > 100 * whole.kl
    assert half.bytes_per_token == full.bytes_per_token * 160 / found.context
    assert half.memory_ratio == pytest.approx(found.context / 160)
    assert stored.memory_ratio == pytest.approx(4 * found.context / 160)
    assert stored.kl == pytest.approx(half.kl, rel=0.2)
    assert half.decode_tokens_per_second > 0
    rows = found.to_dict()["rows"]
    assert [row["cartridge"] for row in rows] == [None, "whole", "half", "half"]
    assert [row["setting"] for row in rows] == [
        "f32/f32",
        "cartridge whole",
        "cartridge half",
        "fp8/fp8 + cartridge half",
    ]
    assert rows[0]["needle"] is not None
    assert rows[1]["needle"] is rows[1]["choice_known"] is None


def test_formats_of_cartridges_are_compared(model: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    """Each in a format of its own under the full cache: the bytes of that format, and its answers."""
    file, cartridge = tmp_path / "text.txt", read(model, text, 160)
    file.write_text(text)
    settings = [
        Setting(cartridge="half", cartridge_format=fmt) for fmt in (None, CacheFormat(key="f32", value="f32"), FP8)
    ]
    _, tree, same, stored = compare(ModelSpec.read(model), text, settings, cartridges={"half": cartridge}, **SIZES).rows
    assert same.bytes_per_token == tree.bytes_per_token == 4 * stored.bytes_per_token
    assert same.kl == pytest.approx(tree.kl, rel=1e-3)
    assert stored.kl != tree.kl
    assert stored.to_dict()["setting"] == "cartridge half in fp8/fp8"
    cartridge.save(tmp_path / "half.cartridge", engine_of(model).groups)
    call = [
        "compare",
        str(model),
        "--text",
        str(file),
        "--following",
        "128",
        "--pieces",
        "2",
        "--dtype",
        "f32",
        "--json",
    ]
    call += ["--cartridge-format", "fp8", "--evict", "none"]
    assert main([*call, "--cartridge", f"half={tmp_path / 'half.cartridge'}"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cartridge_format"] for row in rows] == [None, None, "fp8/fp8"]
    assert rows[2]["kl"] == pytest.approx(stored.kl, rel=1e-3)
    assert main(call) == 2
    assert "--cartridge-format: there is no cartridge to store so" in capsys.readouterr().err


def test_answers_alone_are_weighed(model: Path, text: str) -> None:
    tokenizer = Tokenizer.read(ModelSpec.read(model))
    questions = [Question(tokens=tuple(range(10 * n + 3, 10 * n + 13)), answer=7) for n in range(5)]
    pieces = asked_of(tokenizer, text, questions, following=20, pieces=9, seed=0)
    assert [len(piece.following) for piece in pieces] == [20, 20, 10]
    assert pieces[0].weighed == pieces[0].compared == (7, 8, 9, 17, 18, 19)
    assert [piece.following[index] for piece in pieces[:1] for index in piece.weighed] == [10, 11, 12, 20, 21, 22]
    assert all(list(piece.context) == tokenizer.encode(text) for piece in pieces)
    assert len(asked_of(tokenizer, text, None, following=128, pieces=3, seed=0)) == 3


def test_rows_are_kept_by_the_cartridge_itself(model: Path, text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    spec, setting = ModelSpec.read(model), [Setting(cartridge="it")]
    first = compare(spec, text, setting, cartridges={"it": read(model, text, 160)}, journal=path, **SIZES)
    again = compare(spec, text, setting, cartridges={"it": read(model, text, 160)}, journal=path, **SIZES)
    assert again.rows[1].divergences == first.rows[1].divergences
    assert again.rows[1].decode_tokens_per_second == first.rows[1].decode_tokens_per_second
    assert math.isnan(again.rows[1].needle)
    other = compare(spec, text, setting, cartridges={"it": read(model, text, 32)}, journal=path, **SIZES)
    assert other.rows[1].memory_ratio == 5 * first.rows[1].memory_ratio
    with pytest.raises(InputError, match=r"it stands for varde.txt, which is not this text"):
        compare(spec, f"{text}.", setting, cartridges={"it": read(model, text, 32)}, **SIZES)


def test_the_command(model: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = tmp_path / "text.txt", tmp_path / "half.cartridge"
    path.write_text(text)
    read(model, text, 160).save(file, engine_of(model).groups)
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps([["Who built it?", "Ida Holm."], ["What burned down?", "The boathouse."]]))
    call = ["compare", str(model), "--text", str(path), "--dtype", "f32", "--cartridge", f"half={file}"]
    call += ["--questions", str(questions), "--evict", "streaming:0.5"]
    page, drawn = tmp_path / "page.html", tmp_path / "front.svg"
    assert main([*call, "--json", "--html", str(page), "--plot", str(drawn)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["pieces"] == 1
    assert [row["setting"] for row in content["rows"]] == ["f32/f32", "streaming:0.5", "cartridge half"]
    assert "cartridge half" in page.read_text()
    assert "cartridges" in drawn.read_text()
    assert main(call) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "questions behind it" in out
    assert main([*call, "--cartridge", f"half={file}"]) == 2
    assert "two are called 'half'" in capsys.readouterr().err


CHOICES = [
    {"question": "When did the boathouse burn down?", "choices": ["In 1953.", "In 1911.", "In 1899."], "answer": 0},
    {"question": "Who owns the grocer's?", "choices": ["Ida Holm.", "Berit Moen."], "answer": 1},
]


def test_questions_with_choices(model: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scored by the likelihood of each whole answer, as one pass over it says."""
    (tmp_path / "text.txt").write_text(text)
    questions = tmp_path / "questions.jsonl"
    call = ["compare", str(model), "--text", str(tmp_path / "text.txt"), "--dtype", "f32", "--following", "64"]
    call += ["--questions", str(questions), "--evict", "streaming:0.5"]
    spec = ModelSpec.read(model)
    writer = Writer(Tokenizer.read(spec))
    teacher, found = Teacher(Engine(spec, memory="8MiB", dtype="f32")), []
    for entry in CHOICES:
        likelihoods = []
        for choice in entry["choices"]:
            item = writer.item("question", 0, entry["question"], choice)
            logs = teacher.logits(writer.tokenizer.encode(text), item.tokens, item.answer).log_softmax(1)
            likelihoods.append(float(logs.gather(1, torch.tensor(item.tokens[item.answer :])[:, None]).sum()))
        found.append(likelihoods.index(max(likelihoods)))
    # A model that knows nothing is right by chance; as the right ones count what it chose, and then another.
    for chosen, right in (found, 1.0), ([1 - found[0] % 2, found[1]], 0.5):
        entries = [{**entry, "answer": answer} for entry, answer in zip(CHOICES, chosen, strict=True)]
        questions.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
        assert main([*call, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert rows[0]["answered"] == right
        assert 0 <= rows[1]["answered"] <= 1
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "right" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            '{"question": "Who?", "choices": ["A", "B"], "answer": 2}',
            "answer: 2; write the right choice's index, from 0",
        ),
        ('{"question": "Who?", "choices": ["A", "B"], "answer": true}', "answer: True; write"),
        ('{"question": "Who?", "choices": ["A"], "answer": 0}', r"choices: \['A'\]; write a list of two or more texts"),
        ('{"question": "Who?", "choices": ["A", "A"], "answer": 0}', "choices: .*no two the same"),
        ('{"question": "Who?", "choices": "AB", "answer": 0}', "choices: AB; write a list"),
        ('{"question": " ", "choices": ["A", "B"], "answer": 0}', "question: ' '; write a text"),
        ('{"question": "Who?", "choices": ["A", "B"]}', "question, choices; write question, choices and answer, all"),
        ('["Who?", "A"]', r"\['Who\?', 'A'\]; write question, choices and answer"),
        ('{"question": ', "no JSON: Expecting value"),
    ],
)
def test_lines_that_are_no_question_with_choices(model: Path, tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{json.dumps(CHOICES[0])}\n\n{line}\n")
    with pytest.raises(BadFile, match=rf"questions.jsonl: line 3: {told}"):
        read_questions(path, Writer(Tokenizer.read(ModelSpec.read(model))))
