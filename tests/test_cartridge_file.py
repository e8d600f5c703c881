"""Files of cartridges and the command that makes them: what is wrong is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, Signals, getsignal, raise_signal
from typing import Any

import pytest
import torch
from cartridge_models import TEXT, reading_model
from safetensors.torch import load_file, save_file

from kvist.cartridges.student import Student
from kvist.cartridges.training import Training
from kvist.cli import main
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import BadFile, InputError
from kvist.model.fingerprints import model_digest, rotary_positions
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge, Manifest, load, read_manifest

pytest.importorskip("transformers")

SHORT = ["--tokens", "16", "--steps", "2", "--items", "20", "--batch", "256", "--written", "0", "--dtype", "f32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a document, and a cartridge of it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "model").mkdir()
    reading_model(folder / "model")
    (folder / "varde.txt").write_text(TEXT)
    assert (
        main(
            [
                "cartridge",
                "train",
                *inputs(folder),
                *SHORT,
                "--tokens",
                "10",
                "--out",
                str(folder / "varde.cart"),
                "--json",
            ]
        )
        == 0
    )
    return folder


def inputs(folder: Path) -> list[str]:
    return [str(folder / "model"), str(folder / "varde.txt")]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(["cartridge", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return str(err)


def test_the_manifest_tells_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "varde.cart")
    assert main(["cartridge", "info", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    spec = ModelSpec.read(folder / "model")
    assert told["tokens"] == 16, "whole blocks"
    assert told["model_digest"] == model_digest(spec)
    assert told["tokenizer_digest"] == Tokenizer.read(spec).digest
    assert told["rope"] == rotary_positions(spec)
    assert told["document"] == "varde.txt"
    assert told["document_tokens"] == len(Tokenizer.read(spec).encode(TEXT))
    assert (told["steps"], told["frozen"], told["position"], told["codec"]) == (2, 1, 0, "f32")
    assert told["losses"].keys() == {"before", "after"}
    # Of 16 tokens, 2 layers, keys and values of 2 heads of 16 elements, in float32.
    assert told["bytes"] == 16 * 2 * 2 * 2 * 16 * 4
    assert main(["cartridge", "info", path]) == 0
    assert "16 tokens at position 0, of which 1 frozen" in capsys.readouterr().out
    assert not (folder / "varde.cart.checkpoint").exists()


def test_directories_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cartridge", "list", str(folder), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cartridges"]
    assert row["file"] == str(folder / "varde.cart")
    assert main(["cartridge", "list", str(folder)]) == 0
    assert "varde.cart" in capsys.readouterr().out
    assert "no directory" in said(capsys, "list", str(folder / "varde.txt"))


def test_what_is_saved_is_loaded(folder: Path, tmp_path: Path) -> None:
    cartridge = load(folder / "varde.cart")
    student = Student(ModelSpec.read(folder / "model"), "f32")
    cartridge.save(tmp_path / "again", student.groups)
    again = load(tmp_path / "again")
    assert again.manifest == cartridge.manifest == read_manifest(tmp_path / "again")
    assert again.digest == cartridge.digest
    assert all(torch.equal(again.layers[layer], part) for layer, part in cartridge.layers.items())
    other = Cartridge.of(cartridge.manifest, {layer: part + 1 for layer, part in cartridge.layers.items()})
    assert other.digest != cartridge.digest
    cartridge.check_shapes(student.groups)


def tampered(folder: Path, path: Path, tensors: Any = None, **told: Any) -> Path:
    """The file with something else in its manifest, or other tensors."""
    manifest = {"kind": "kvist.cartridge", "version": 1, **read_manifest(folder / "varde.cart").to_dict(), **told}
    manifest = {key: value for key, value in manifest.items() if value is not None}
    save_file(tensors or load_file(folder / "varde.cart"), path, {"kvist": json.dumps(manifest)})
    return path


def test_bad_files_are_refused_by_name(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad"
    content = (folder / "varde.cart").read_bytes()
    for torn in (content[:100], content[:-100], b"", b"no tensors at all"):
        path.write_bytes(torn)
        with pytest.raises(BadFile, match="bad: torn, or no cartridge"):
            load(path)
        assert "torn" in said(capsys, "info", str(path))
    tensors = load_file(folder / "varde.cart")
    save_file(tensors, path)
    with pytest.raises(BadFile, match="there is no manifest in it"):
        load(path)
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "absent")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, "version 2; this kvist reads version 1"),
        ({"tokens": 17}, "not float32 of 17 tokens"),
        ({"tokens": "16"}, "tokens is '16'"),
        ({"position": 3}, "begins at position 3"),
        ({"colour": "red"}, "says colour, which"),
        ({"frozen": None}, "not whole: .*frozen"),
        ({"tensors": {**tensors, "layers.x.keys": torch.zeros(1)}}, "layers.x.keys: no tensor of a cartridge"),
        ({"tensors": {**tensors, "layers.1.keys": torch.zeros(16, 1, 16)}}, r"layers.1.keys is \[16, 1, 16\]"),
        ({"tensors": {**tensors, "layers.1.keys": torch.full((16, 2, 16), torch.nan)}}, "what is no number"),
        ({"losses": "none"}, "losses are 'none', no numbers by name"),
        ({"losses": {"before": "1", "after": 2.0}}, "no numbers by name"),
        ({"losses": {"before": float("inf")}}, "no numbers by name"),
        ({"document": "\x1b[2Jvarde"}, "document is .*, no line of text"),
        ({"document": 3}, "document is 3, no line of text"),
        ({"model": ["m"]}, "model is .*, no line of text"),
        ({"seed": "0"}, "seed is '0', no whole number"),
        ({"rope": {}}, "rope is {}, no list of rotary positions"),
        ({"tensors": tensors | {"layers.1.keys": tensors["layers.1.keys"].half()}}, "layers.1.keys is torch.float16"),
        (
            {"tensors": tensors | {"layers.1.values": tensors["layers.1.values"].half()}},
            "is torch.float16, not float32",
        ),
        ({"tensors": tensors | {"layers.1.latents": torch.zeros(16, 1, 64)}}, "layers.1.latents: no tensor of a"),
        ({"tensors": tensors | {"layers.01.latents": torch.zeros(16, 1, 64)}}, "layers.01.latents: no tensor of a"),
        ({"tensors": tensors | {f"layers.{'9' * 5000}.latents": torch.zeros(16, 1, 64)}}, "no tensor of a cartridge"),
    ]
    save_file(tensors, path, {"kvist": '{"kind": ' + "[" * 10**5})
    with pytest.raises(BadFile, match="no JSON"):
        load(path)
    for told, message in cases:
        with pytest.raises(BadFile, match=message):
            load(tampered(folder, path, **told))


def test_other_models_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec.read(folder / "model")
    cartridge = load(folder / "varde.cart")
    same: dict[str, Any] = {
        "model": spec.name, "model_digest": model_digest(spec), "tokenizer_digest": Tokenizer.read(spec).digest,
        "rope": rotary_positions(spec),
    }  # fmt: skip
    cartridge.check(**same)
    for other, message in (
        ({"model": "b", "model_digest": "0"}, "made for model, not for b"),
        ({"model_digest": "0"}, "of the same name, with other weights"),
        ({"tokenizer_digest": "0"}, "another tokenizer"),
        ({"rope": []}, "other rotary positions"),
    ):
        with pytest.raises(InputError, match=message):
            cartridge.check(**{**same, **other})
    # A copy is the same model, a model with one weight changed is not.
    copy = tmp_path / "model"
    copy.mkdir()
    for file in (folder / "model").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert model_digest(ModelSpec.read(copy)) == same["model_digest"]
    changed = next(copy.glob("*.safetensors"))
    tensors = load_file(changed)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, changed)
    assert model_digest(ModelSpec.read(copy)) != same["model_digest"]
    groups = Student(spec, "f32").groups
    for layers, message in (
        ({0: cartridge.layers[0]}, "lacks layer 1"),
        ({**cartridge.layers, 1: torch.zeros(16, 6, 16)}, r"layer 1 is \[16, 6, 16\], .* \[16, 4, 16\]"),
        ({**cartridge.layers, 2: cartridge.layers[0]}, "has layer 2"),
    ):
        with pytest.raises(BadFile, match=message):
            replace(cartridge, layers=layers).check_shapes(groups)


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, document = inputs(folder)
    out = ["--out", str(tmp_path / "out")]
    assert "no fewer than" in said(capsys, "train", model, document, "--tokens", "1k", *out)
    assert "No such file" in said(capsys, "train", model, str(tmp_path / "absent"), *SHORT, *out)
    assert "--resume: there is no" in said(capsys, "train", model, document, *SHORT, *out, "--resume")
    (tmp_path / "out.checkpoint").write_bytes(b"torn")
    assert "--resume: " in said(capsys, "train", model, document, *SHORT, *out)
    assert "torn" in said(capsys, "train", model, document, *SHORT, *out, "--resume")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "no UTF-8" in said(capsys, "train", model, str(tmp_path / "latin"), *SHORT, "--out", str(tmp_path / "o"))
    assert "--steps" in said(capsys, "train", model, document, *SHORT, *out, "--steps", "0")
    assert "cannot be written" in said(capsys, "train", model, document, *SHORT, "--out", str(tmp_path / "no" / "x"))
    for name in ("x" * 300, "x" * 250, "x" * 5000):
        assert "name too long" in said(capsys, "train", model, document, *SHORT, "--out", str(tmp_path / name))
    for command in ("info", "list"):
        assert "name too long" in said(capsys, command, "x" * 300)
    assert "names this file twice" in said(capsys, "train", model, document, *SHORT, "--out", document)
    assert "--frozen: 16 of 16" in said(
        capsys, "train", model, document, *SHORT, "--frozen", "16", "--out", out[1] + "2"
    )
    (tmp_path / "long.txt").write_text(TEXT * 20)
    long = ["train", model, str(tmp_path / "long.txt"), *SHORT, "--out", str(tmp_path / "long")]
    assert "--tokens: 2,048 and 256 behind them are more than the 2,048" in said(capsys, *long, "--tokens", "2k")


@pytest.mark.parametrize("end", [KeyboardInterrupt, SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_what_was_learnt_is_kept(end: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = Training.measured
    out = tmp_path / "out"
    call = ["cartridge", "train", *inputs(folder), *SHORT, "--out", str(out)]
    before = getsignal(SIGTERM)
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(training: Training, *given: Any) -> float:
            if training.step:
                if isinstance(end, Signals):
                    raise_signal(end)
                raise KeyboardInterrupt
            return measured(training, *given)

        patch.setattr(Training, "measured", interrupted)
        assert main(call) == (128 + SIGTERM if end is SIGTERM else 130)
    assert getsignal(SIGTERM) is before
    assert [path.name for path in tmp_path.iterdir()] == ["out.checkpoint"]
    assert "out.checkpoint has what was learnt: go on with --resume" in capsys.readouterr().err
    for changed in (["--chunk", "100"], ["--written", "0.5"], ["--items", "21"], ["--rate", "1"]):
        assert f"was begun with {changed[0][2:]}" in said(capsys, *call[1:], *changed, "--resume")
    assert main([*call, "--resume"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    capsys.readouterr()


def test_documents_that_are_no_prose(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines without an end, a last piece that says nothing, a script without spaces, a name with a line's end."""
    model, _ = inputs(folder)
    line = "The Varde Light was built in 1911 by Ida Holm. It stands on Hesja island.\n"
    for text, chunk in (
        (5 * line + "End.\n", "78"),
        ("\n".join(f"12:{number:04} INFO worker took {number} ms" for number in range(60)), "2k"),
        (
            9 * "灯台は千九百十一年に建てられました。島の上に立っています。最初の守り人は十九年間そこにいました。\n",
            "512",
        ),
    ):
        document = tmp_path / "a\nb.txt"
        document.write_text(text)
        out = tmp_path / "out"
        assert main(["cartridge", "train", model, str(document), *SHORT, "--chunk", chunk, "--out", str(out)]) == 0
        assert load(out).manifest.document == "a?b.txt"
    capsys.readouterr()
    command = ["cartridge", "train", model, str(document), *SHORT, "--memory", "64KiB", "--out", str(tmp_path / "two")]
    assert main(command) == 3
    assert "the teacher's cache and model allow" in capsys.readouterr().err


def test_models_with_states_have_none(tmp_path: Path) -> None:
    from served import Case, build
    from served_states import CASES

    name, case = next((name, case) for name, case in CASES.items() if "Mamba" in case.model)
    assert isinstance(case, Case), name
    build(case, tmp_path)
    with pytest.raises(InputError, match="what these layers remember is not one vector a token"):
        Student(ModelSpec.read(tmp_path), "f32")


def test_manifests_of_other_documents_differ() -> None:
    told: dict[str, Any] = {
        "model": "m", "model_digest": "1", "tokenizer_digest": "2", "tokens": 16, "frozen": 1, "document": "d",
        "document_digest": "3", "document_tokens": 99, "seed": 0, "steps": 1,
    }  # fmt: skip
    layers = {0: torch.zeros(16, 2, 4)}
    one, other = (Cartridge.of(Manifest(**{**told, "document_digest": text}), layers) for text in "45")
    assert one.digest != other.digest
