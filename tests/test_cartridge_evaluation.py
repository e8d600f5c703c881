"""What an evaluation says: held against memories of which the answer is known."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from cartridge_models import LLAMA, TEXT, reading_model
from served_cartridges import TOKENS, cartridge_of

from kvist.cartridges.evaluation import evaluate, made_questions, read_questions
from kvist.cartridges.self_study import Writer
from kvist.cli import main
from kvist.engine.engine import Engine
from kvist.errors import BadFile, InputError
from kvist.spec.pruning import METHODS

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    reading_model(directory, LLAMA)
    return directory


def test_memories_that_are_known(llama: Path) -> None:
    """The first tokens as a cartridge are truncation; pruned to its own length a document is whole."""
    exact, moved = (cartridge_of(llama, noise=noise) for noise in (0.0, 0.5))
    engine = Engine(llama, memory="16MiB", dtype="f32", cartridges={"exact": exact, "moved": moved})
    document = engine.tokenizer.encode(TEXT)
    questions = made_questions(TEXT, Writer(engine.tokenizer), 5)
    cartridges = {name: (engine, engine.shelf.named(name)) for name in ("exact", "moved")}
    shares: list[float] = []
    rows = {
        row.memory: row for row in evaluate(engine, document, questions, cartridges, tokens=TOKENS, told=shares.append)
    }
    assert list(rows) == ["document", "exact", "moved", "truncated", *METHODS]
    assert (rows["document"].kl, rows["document"].top1_agreement, rows["document"].tokens) == (0, 1, len(document))
    assert rows["exact"].kl == pytest.approx(rows["truncated"].kl, rel=1e-3)
    assert rows["exact"].likelihood == pytest.approx(rows["truncated"].likelihood, rel=1e-3)
    assert rows["moved"].kl > 0
    assert rows["moved"].kl != pytest.approx(rows["exact"].kl, rel=1e-2)
    for method in METHODS:
        assert rows[method].kl > 1e-4
        assert rows[method].tokens == TOKENS
    assert len({row.answered for row in rows.values()}) == 1
    assert shares == [number / 5 for number in range(5)]

    whole = evaluate(engine, document, questions, {}, tokens=len(document), against=["h2o", "streaming"])
    assert all(abs(row.kl) < 1e-6 and row.top1_agreement == 1 for row in whole)
    # All that is left are the cartridges.
    held = sum(engine.shelf.loaded[name].pin.blocks(0) for name in cartridges)
    assert engine.cache.arena.held(0) == held == 2 * TOKENS // 16
    assert not torch.is_inference_mode_enabled()


def test_the_command_asks(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cartridge = cartridge_of(llama)
    engine = Engine(llama, memory="4MiB", dtype="f32")
    document, path, questions = tmp_path / "varde.txt", tmp_path / "varde.cart", tmp_path / "questions.json"
    document.write_text(TEXT)

    told = replace(cartridge.manifest, document_digest=sha256(TEXT.encode()).hexdigest())
    replace(cartridge, manifest=told).save(path, engine.groups)
    questions.write_text(json.dumps([["Who built it?", "Ida Holm."], ["When?", "In 1911."]]))
    options = ["--model", str(llama), "--dtype", "f32", "--memory", "16MiB"]
    command = ["cartridge", "eval", str(path), str(document), *options]
    assert main([*command, "--questions", str(questions), "--key", "bf16", "--value", "bf16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["questions"] == 2
    names = [row["memory"] for row in answer["rows"]]
    assert names == ["document", "cartridge", "cartridge in bf16/bf16", "truncated", *METHODS]
    kl = {row["memory"]: row["kl"] for row in answer["rows"]}
    assert kl["cartridge in bf16/bf16"] == pytest.approx(kl["cartridge"], rel=0.05)
    assert main([*command, "--count", "2"]) == 0
    assert "2 questions about varde.txt" in capsys.readouterr().out
    told = replace(told, document_digest=sha256((12 * TEXT).encode()).hexdigest())
    replace(cartridge, manifest=told).save(path, engine.groups)
    document.write_text(12 * TEXT)
    assert main(command) == 2
    assert "llama reads 2,048" in capsys.readouterr().err.replace(llama.name, "llama")
    document.write_text("another")
    assert main(command) == 2
    assert "is not the varde.txt of which" in capsys.readouterr().err
    writer = Writer(engine.tokenizer)
    for text, message in (("{", "no JSON"), ("[]", "a list of"), ('[["a", ""]]', "entry 0"), ('[["a"]]', "entry 0")):
        questions.write_text(text)
        with pytest.raises(BadFile, match=message):
            read_questions(questions, writer)
    with pytest.raises(InputError, match="No such file"):
        read_questions(tmp_path / "absent", writer)
