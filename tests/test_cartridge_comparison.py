"""Cartridges among the ways to shrink the cache."""

import json
import math
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from cartridge_models import LLAMA, TEXT, reading_model
from test_cartridge_serving import cartridge_of, engine_of

from kvist.cartridges.evaluation import Question
from kvist.cartridges.student import Student, to_cache
from kvist.cli import main
from kvist.comparison.compare import compare
from kvist.comparison.questions import asked_of
from kvist.comparison.settings import Setting, together
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import InputError
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
