"""Models on a hub that the test starts: what is asked of it, and what is said when it does not answer."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import write_gguf
from local_hub import COMMIT, LocalHub, local_hub
from safetensors.numpy import save_file
from test_spec_gguf import write_parts

from kvist.errors import BadFile, InputError, UnknownModel
from kvist.spec.model import ModelSpec

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
# So large beside a header that a fetched weight would show.
EMBEDDING = np.zeros((2048, 64), np.float32)


def layer(index: int) -> dict[str, Any]:
    rows = {"q": 64, "k": 32, "v": 32}
    return {
        f"model.layers.{index}.self_attn.{side}_proj.weight": np.zeros((rows[side], 64), np.float16) for side in rows
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    with local_hub(tmp_path / "hub") as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
        yield running


@pytest.fixture
def tiny(hub: LocalHub) -> Path:
    directory = hub.root / "acme" / "tiny-7b"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_configuration_and_a_header_are_all_that_is_fetched(hub: LocalHub, tiny: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING} | layer(0) | layer(1), tiny / "model.safetensors")
    (tiny / "pytorch_model.bin").write_bytes(bytes(2**16))
    spec = ModelSpec.read("acme/tiny-7b")
    assert (spec.name, spec.source) == ("tiny-7b", f"hub: acme/tiny-7b@{COMMIT[:12]}/config.json")
    assert spec.layers == ModelSpec.read(tiny).layers
    assert spec.weights_by_type == {"F32": EMBEDDING.nbytes, "F16": 2 * 128 * 64 * 2}
    assert dict(hub.sent) == {
        "acme/tiny-7b/config.json": (tiny / "config.json").stat().st_size,
        "acme/tiny-7b/model.safetensors": header_bytes(tiny / "model.safetensors"),
    }


def test_shards_are_read_by_their_headers(hub: LocalHub, tiny: Path) -> None:
    shards = {"a.safetensors": {"model.embed_tokens.weight": EMBEDDING} | layer(0), "b.safetensors": layer(1)}
    for name, tensors in shards.items():
        save_file(tensors, tiny / name)
    placed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    hub.sizes = False
    assert ModelSpec.read("acme/tiny-7b").weights_bytes == EMBEDDING.nbytes + 2 * 128 * 64 * 2
    for name in shards:
        assert hub.sent[f"acme/tiny-7b/{name}"] == header_bytes(tiny / name)
    index.write_text(json.dumps({"weight_map": placed | {"x": "c.safetensors"}}))
    with pytest.raises(BadFile, match=r"names c\.safetensors, which the hub does not have"):
        ModelSpec.read("acme/tiny-7b")


def test_a_description_that_contradicts_its_tensors_is_refused(hub: LocalHub, tiny: Path) -> None:
    save_file(layer(0), tiny / "model.safetensors")
    with pytest.raises(
        BadFile, match=r"acme/tiny-7b@.*: num_hidden_layers is 2, but the tensors hold weights of 1 layer"
    ):
        ModelSpec.read("acme/tiny-7b")


def large_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 60000,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list([f"token {index}" for index in range(60000)])
    for side, rows in {"q": 64, "k": 32, "v": 32}.items():
        writer.add_tensor(f"blk.0.attn_{side}.weight", np.zeros((rows, 64), np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((60000, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_by_its_beginning(hub: LocalHub) -> None:
    directory = hub.root / "acme" / "tiny-GGUF"
    directory.mkdir(parents=True)
    path = large_gguf(directory / "tiny-Q4_K_M.gguf")
    write_gguf(directory / "tiny-Q8_0.gguf")
    (directory / "mmproj-tiny.gguf").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"several GGUF files \(tiny-Q4_K_M.gguf, tiny-Q8_0.gguf\); name one by a part"
    ):
        ModelSpec.read("acme/tiny-GGUF")
    spec = ModelSpec.read("acme/tiny-GGUF:q4_k_m")
    assert spec.layers == ModelSpec.read(path).layers
    # The vocabulary takes a megabyte, and pieces double: not more than twice the header.
    assert 2**20 < hub.sent["acme/tiny-GGUF/tiny-Q4_K_M.gguf"] <= 2**21 < path.stat().st_size // 4
    with pytest.raises(BadFile, match="no GGUF file with 'Q2_K' in its name"):
        ModelSpec.read("acme/tiny-GGUF:Q2_K")


def test_a_gguf_model_in_several_files(hub: LocalHub, tmp_path: Path) -> None:
    directory = hub.root / "acme" / "split-GGUF"
    (directory / "Q8_0").mkdir(parents=True)
    parts = write_parts(directory / "Q8_0")
    (directory / "whole.gguf").rename(directory / "whole-mmproj.gguf")
    assert ModelSpec.read("acme/split-GGUF").weights_by_type == ModelSpec.read(parts[0]).weights_by_type
    parts[1].unlink()
    with pytest.raises(BadFile, match=r"Q8_0/model-00002-of-00003\.gguf: the hub does not have this part"):
        ModelSpec.read("acme/split-GGUF:q8_0")


def test_revisions(hub: LocalHub, tiny: Path) -> None:
    assert ModelSpec.read(f"acme/tiny-7b@{COMMIT}").layers == ModelSpec.read("acme/tiny-7b").layers
    with pytest.raises(UnknownModel, match="has no revision 'v9'"):
        ModelSpec.read("acme/tiny-7b@v9")


def test_a_hub_without_ranges_is_hung_up_on(hub: LocalHub, tiny: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING} | layer(0) | layer(1), tiny / "model.safetensors")
    hub.ranges = False
    with pytest.raises(BadFile, match="the hub sends whole files only"):
        ModelSpec.read("acme/tiny-7b")


@pytest.mark.parametrize(
    ("refuse", "error", "says"),
    [
        ((401, "RepoNotFound"), UnknownModel, "no model 'acme/tiny-7b', neither here nor on http://127"),
        ((401, "GatedRepo"), InputError, "acme/tiny-7b: is gated on http://127.*log in with `hf auth login`"),
        ((403, "GatedRepo"), InputError, "is gated"),
        ((403, ""), InputError, "is gated"),
        ((404, ""), UnknownModel, "is not on http://127"),
        ((429, ""), UnknownModel, "answers 429 .too many requests"),
        ((500, ""), UnknownModel, "answers 500"),
        ((503, ""), UnknownModel, "answers 503"),
    ],
)
def test_what_the_hub_refuses(
    hub: LocalHub, tiny: Path, refuse: tuple[int, str], error: type[Exception], says: str
) -> None:
    hub.refuse = refuse
    with pytest.raises(error, match=says) as caught:
        ModelSpec.read("acme/tiny-7b")
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_in_time(hub: LocalHub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.wait = 0.5
    with pytest.raises(UnknownModel, match=r"does not answer within 0\.05 s"):
        ModelSpec.read("acme/tiny-7b")


def test_no_hub_at_all(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnknownModel, match=r"no model 'acme/none'.*; http://127\.0\.0\.1:9 is not reached: "):
        ModelSpec.read("acme/none")


def test_offline_the_cache_is_read_as_far_as_it_goes(
    hub: LocalHub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownModel, match="HF_HUB_OFFLINE is set"):
        ModelSpec.read("acme/tiny-7b")
    stored = tmp_path / "cache" / "models--acme--tiny-7b"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    snapshot = stored / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    spec = ModelSpec.read("acme/tiny-7b")
    assert (spec.name, spec.weights_bytes) == ("tiny-7b", None)
    assert not hub.requests


def test_without_the_package_the_message_says_what_to_install(
    hub: LocalHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownModel, match=r"no model 'acme/tiny-7b'.*pip install 'kvist\[hub\]'"):
        ModelSpec.read("acme/tiny-7b")


def test_the_command_asks_the_hub_that_the_environment_names(hub: LocalHub, tiny: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "kvist", "plan", "acme/tiny-7b", "--json"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["append_bytes_per_token"] == 2 * 2 * 16 * 2 * 2
    assert answer.stderr == ""
    assert not list((tmp_path / "home").rglob("*.json"))
