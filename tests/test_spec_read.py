"""Names and paths to models."""

import json
import os
from pathlib import Path

import pytest
from gguf_files import write_gguf

import kvist
from kvist.errors import BadFile, UnknownModel
from kvist.spec.formats import CacheFormat
from kvist.spec.gguf import read_gguf
from kvist.spec.json_file import read_object
from kvist.spec.known import KNOWN, known_model
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description
from kvist.spec.safetensors import read_file

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize(
    "name",
    ["smollm2-135m", "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"],
)
def test_case_and_organisation_of_a_name_are_optional(name: str) -> None:
    spec = kvist.ModelSpec.read(name)
    assert (spec.name, spec.path) == ("smollm2-135m", None)
    assert spec.sequence_bytes(8192, CacheFormat()) == 8192 * 23040


def test_gemma_costs_18_kib_until_its_window_and_3_after() -> None:
    spec = ModelSpec.read("google/gemma-3-270m")
    fmt = CacheFormat()
    assert spec.sequence_bytes(512, fmt) == 512 * 18 * 1024
    assert spec.sequence_bytes(2000, fmt) == 512 * 18 * 1024 + (2000 - 512) * 3 * 1024
    assert spec.exact


def test_unknown_names_list_the_nearest() -> None:
    with pytest.raises(UnknownModel, match="nearest: gemma-3-270m"):
        known_model("gemma3-27m")
    with pytest.raises(UnknownModel, match=r"[0-9]{3} are known: kvist models"):
        known_model("qqqqqqqq")


@pytest.mark.parametrize("name", ["./nothing", "a/b/c", "nothing.gguf", "nothing.json", "~/nothing/at/all", "/nothing"])
def test_paths_that_are_not_there_say_so(name: str) -> None:
    with pytest.raises(UnknownModel, match="no such file or directory"):
        ModelSpec.read(name)


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "~nobody-of-that-name/x"])
def test_what_cannot_be_a_path_is_an_unknown_model(name: str) -> None:
    with pytest.raises(UnknownModel):
        ModelSpec.read(name)


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero"])
@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs devices")
def test_a_device_is_not_a_regular_file(name: str) -> None:
    with pytest.raises(BadFile, match=f"^{name}: is not a regular file but a character device"):
        ModelSpec.read(name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    for read in (ModelSpec.read, read_gguf, read_file, read_object):
        with pytest.raises(BadFile, match="is not a regular file but a pipe"):
            read(pipe)
    with pytest.raises(BadFile, match=r"neither config\.json nor a \.gguf file"):
        ModelSpec.read(tmp_path)


def test_links_that_lead_nowhere_say_so(tmp_path: Path) -> None:
    circle, broken = tmp_path / "circle", tmp_path / "broken"
    circle.symlink_to(circle)
    broken.symlink_to(tmp_path / "nothing")
    with pytest.raises(UnknownModel, match="its symbolic links lead in a circle"):
        ModelSpec.read(circle)
    with pytest.raises(UnknownModel, match="is a symbolic link to nothing"):
        ModelSpec.read(broken)


def test_a_name_too_long_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="5,000 characters are too long for a path") as caught:
        ModelSpec.read("x" * 5000)
    assert len(str(caught.value)) < 200


def test_a_config_file_and_its_directory_are_one_model(config: Path) -> None:
    from_file, from_directory = ModelSpec.read(config), ModelSpec.read(config.parent)
    assert from_file.layers == from_directory.layers
    assert from_file.name == from_directory.name == "tiny"
    assert from_file.source == str(config)


def test_a_file_of_another_name_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "llama-tiny.json"
    path.write_text(json.dumps(CONFIG))
    assert ModelSpec.read(path).name == "llama-tiny"


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"neither config\.json nor a \.gguf file"):
        ModelSpec.read(tmp_path)
    path = write_gguf(tmp_path / "one.gguf")
    assert ModelSpec.read(tmp_path).path == path
    write_gguf(tmp_path / "two.gguf")
    with pytest.raises(BadFile, match=r"several \.gguf files \(one\.gguf, two\.gguf\): name one"):
        ModelSpec.read(tmp_path)


def test_a_file_with_the_metadata_of_a_known_model_but_other_layers_keeps_its_own_name(tmp_path: Path) -> None:
    known = KNOWN["smollm2-135m"]
    path = write_gguf(tmp_path / "pruned.gguf", extra={"general.name": known.gguf_name})
    assert ModelSpec.read(path).name == "pruned"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", r"is not JSON \(line 1\)"),
        (b"[]", "holds list, not a JSON object"),
        (b"\xff\xfe\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (2**22 + 1), "larger than 4 MiB"),
        (b'{"a": [' + b"[]," * 2**19 + b"[]]}", "holds about 1,048,5.. values"),
        (b'{"a": "\\ud800", "a": 1}', "'a' is given twice"),
        (b'{"num_hidden_layers": 2}', "model_type is missing"),
        (b'{"model_type": "llama", "num_hidden_layers": NaN}', "num_hidden_layers is nan"),
    ],
)
def test_broken_configurations_name_what_is_wrong(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(kvist.InputError, match=says):
        ModelSpec.read(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_configuration_may_be_in_any_unicode(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(json.dumps(CONFIG, ensure_ascii=False).encode(encoding))
    assert ModelSpec.read(path).layers == read_description(CONFIG, name="tiny").layers


def test_keys_that_are_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(CONFIG)[:-1]
    path.write_text(f'{text}, "num_key_value_heads": 2}}')
    assert ModelSpec.read(path).layers[0] == read_description(CONFIG, name="tiny").layers[0]
    path.write_text(f'{text}, "num_key_value_heads": 4}}')
    with pytest.raises(BadFile, match="'num_key_value_heads' is given twice, as 2 and as 4; keep one"):
        ModelSpec.read(path)
    # Not a number: it does not equal itself, and yet says the same.
    path.write_text(f'{text}, "x": NaN, "x": NaN, "time_step_limit": [0.0, Infinity]}}')
    assert ModelSpec.read(path).layers


def test_what_may_not_be_read_says_so(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        for read in (ModelSpec.read, read_object, read_gguf, read_file):
            with pytest.raises(BadFile, match=r"config\.json: cannot be read: Permission denied"):
                read(config)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refuse)
        with pytest.raises(BadFile, match="tiny: cannot be read: Permission denied"):
            ModelSpec.read(config.parent)


def test_a_directory_of_the_hubs_cache_is_called_after_its_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--Tiny-7B" / "snapshots" / "0123abcd"
    blob = tmp_path / "models--acme--Tiny-7B" / "blobs" / "ffff"
    for directory in (snapshot, blob.parent):
        directory.mkdir(parents=True)
    blob.write_text(json.dumps(CONFIG))
    (snapshot / "config.json").symlink_to(blob)
    assert ModelSpec.read(snapshot).name == "Tiny-7B"
    assert ModelSpec.read(snapshot / "config.json").name == "Tiny-7B"


def test_an_override_is_listed_and_makes_the_answer_inexact(config: Path) -> None:
    spec = ModelSpec.read(config, assume={"num_key_value_heads": 4})
    assert not spec.exact
    assert [(entry.key, entry.value, entry.source) for entry in spec.assumed] == [
        ("num_key_value_heads", 4, "--assume")
    ]
    assert spec.layers[0].kv_heads == 4


def test_a_configuration_in_memory(config: Path) -> None:
    assert read_description(CONFIG, name="tiny").layers == ModelSpec.read(config).layers


@pytest.mark.parametrize("tokens", [-1, 2**41, 1.5, True, "8k", None])
def test_a_sequence_has_a_whole_number_of_tokens(tokens: object) -> None:
    spec = ModelSpec.read("smollm2-135m")
    with pytest.raises(kvist.InputError, match="tokens: "):
        spec.sequence_bytes(tokens, CacheFormat())  # type: ignore[arg-type]
    assert spec.sequence_bytes(0, CacheFormat()) == 0


@pytest.mark.parametrize("fmt", ["int8", None, "bf16/bf16", ["bf16"]])
def test_a_format_is_a_pair_of_codecs(fmt: object) -> None:
    spec = ModelSpec.read("smollm2-135m")
    says = r"is not a CacheFormat; write kvist\.CacheFormat\(key='(int8|bf16)', value="
    for call in (
        lambda: spec.sequence_bytes(1, fmt),  # type: ignore[arg-type]
        lambda: spec.append_bytes_per_token(fmt),  # type: ignore[arg-type]
        lambda: spec.retained_bytes_per_token(fmt),  # type: ignore[arg-type]
    ):
        with pytest.raises(kvist.InputError, match=says):
            call()
    with pytest.raises(kvist.InputError, match="is not a codec"):
        CacheFormat(key=fmt if isinstance(fmt, list) else "int3")  # type: ignore[arg-type]
