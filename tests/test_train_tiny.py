"""The script that trains small networks: what it writes is served, what it is told wrongly it says in a line."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from kvist.engine.engine import Engine

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[1] / "examples" / "train_tiny.py"
TEXT = "A leaf on a twig, a twig on a branch, and the branch on an old tree.\n" * 24
SHORT = ("--steps", "4", "--length", "32", "--batch", "2", "--threads", "1")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize("family", ["deepseek", "mamba2"])
def test_what_is_trained_is_served(
    script: ModuleType, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """Ids are bytes, the logits are transformers', and the memory is what the plan says."""
    import transformers

    out = tmp_path / "model"
    assert script.main([text, "--family", family, "--out", str(out), *SHORT]) == 0
    assert "nats a byte" in capsys.readouterr().out
    engine = Engine(out, memory="16MiB", dtype="f32")
    prompt = "A leaf on é"
    assert engine.tokenizer.encode(prompt) == list(prompt.encode())
    (answer,) = engine.generate([prompt], max_tokens=8, temperature=0, ignore_eos=True)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.tensor([[*prompt.encode(), *answer.tokens]])
    with torch.no_grad():
        expected = oracle(ids, use_cache=False).logits[0].argmax(-1)
    assert answer.tokens == expected[len(prompt.encode()) - 1 : -1].tolist()
    assert answer.account is not None
    assert answer.account["planned_bytes"] == answer.account["allocated_bytes"]


def test_resumed_training_ends_where_an_uninterrupted_one_does(
    script: ModuleType, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(out: str, *more: str) -> int:
        status: int = script.main([text, "--family", "deepseek", "--out", str(tmp_path / out), *SHORT, *more])
        return status

    assert train("whole") == 0
    advance = script.Training.advance

    def interrupted(training: object) -> float:
        if training.step == 2:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        loss: float = advance(training)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(script.Training, "advance", interrupted)
        assert train("parts") == 1
    assert "--resume" in capsys.readouterr().err
    assert train("parts") == 1
    assert "not empty" in capsys.readouterr().err
    assert train("parts", "--resume", "--seed", "9") == 1
    assert "seed 0, not 9" in capsys.readouterr().err
    assert train("parts", "--resume") == 0
    whole, parts = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_what_is_wrong_is_said_in_a_line(
    script: ModuleType, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> str:
        assert script.main([*argv, *SHORT]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return str(err)

    out = ("--family", "deepseek", "--out", str(tmp_path / "out"))
    assert "no such file" in said(str(tmp_path / "absent"), *out)
    (tmp_path / "folder").mkdir()
    assert "holds no .txt" in said(str(tmp_path / "folder"), *out)
    (tmp_path / "short.txt").write_text("too short")
    assert "9 bytes" in said(str(tmp_path / "short.txt"), *out)
    (tmp_path / "torn.txt.gz").write_bytes(b"\x1f\x8b\x08 torn")
    assert "torn.txt.gz: cannot be read" in said(str(tmp_path / "torn.txt.gz"), *out)
    assert "nothing to resume" in said(text, *out, "--resume")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"PK\x03\x04 torn")
    assert "checkpoint.pt: torn" in said(text, *out, "--resume")
    with pytest.raises(SystemExit):
        script.main([text, "--family", "rnn", "--out", str(tmp_path / "x")])
    assert "invalid choice: 'rnn'" in capsys.readouterr().err
