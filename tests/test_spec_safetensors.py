"""Safetensors headers: one file, shards, and broken ones."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvist.errors import BadFile
from kvist.spec.model import ModelSpec
from kvist.spec.packed import count_parameters
from kvist.spec.safetensors import read_file, read_header, read_weights

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def torn(header: Any, size: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def test_one_file(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((4, 8), np.float16), "b": np.zeros(3, np.float32)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    found = read_weights(tmp_path)
    assert found is not None
    assert count_parameters(found.tensors, None) == 35
    assert found.weights_by_type == {"F16": 64, "F32": 12}
    assert found.tensors["a"].shape == (4, 8)
    prefix = (tmp_path / "model.safetensors").read_bytes()[:-76]
    assert read_header(prefix, name="prefix") == read_file(tmp_path / "model.safetensors")


def test_a_directory_of_shards(tmp_path: Path) -> None:
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(2, np.int8)}, tmp_path / "model-2.safetensors")
    placed = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = ModelSpec.read(tmp_path)
    assert (spec.weights_bytes, spec.parameters, spec.name) == (18, 6, tmp_path.name)
    assert spec.path == tmp_path

    for weight_map, says in (
        ({**placed, "c": "model-1.safetensors"}, "tensor 'c' is not in model-1"),
        ({**placed, "c": "model-3.safetensors"}, "names model-3.safetensors, which is not in"),
        ({**placed, "c": "../model-1.safetensors"}, "is not a plain file name"),
        ({"a": 1}, "weight_map is missing"),
        (None, "weight_map is missing"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BadFile, match=says):
            ModelSpec.read(tmp_path)


def projections(layers: range, *, prefix: str = "model.", kv: int = 4, query: int = 8) -> dict[str, Any]:
    tensors = {f"{prefix}embed_tokens.weight": np.zeros((3, 8), np.float16)}
    for index in layers:
        at = f"{prefix}layers.{index}"
        for side, rows in (("q", query), ("k", kv), ("v", kv)):
            tensors[f"{at}.self_attn.{side}_proj.weight"] = np.zeros((rows, 8), np.float16)
        tensors[f"{at}.mlp.up_proj.weight"] = np.zeros((4, 8), np.float16)
    return tensors


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_a_configuration_is_held_against_its_tensors(tmp_path: Path, prefix: str) -> None:
    def given(tensors: dict[str, Any]) -> ModelSpec:
        save_file(tensors, tmp_path / "model.safetensors")
        return ModelSpec.read(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    vision = {"vision_tower.encoder.layers.7.self_attn.k_proj.weight": np.zeros((5, 5), np.float16)}
    whole = projections(range(2), prefix=prefix)
    assert given(whole | vision).weights_bytes
    for tensors, says in (
        (projections(range(3), prefix=prefix), "num_hidden_layers is 2, but the tensors hold weights of 3 layers"),
        (projections(range(1, 3), prefix=prefix), "of 2 layers, the last 2, without 0"),
        (projections(range(2), prefix=prefix, kv=8), "k_proj.weight gives 8 values a token, the metadata 4"),
        (projections(range(2), prefix=prefix, query=16), "q_proj.weight gives 16 values a token, the metadata 8"),
        ({k: v for k, v in whole.items() if "1.self_attn.v" not in k}, "the tensors hold values of 1 layer"),
    ):
        with pytest.raises(BadFile, match=says):
            given(tensors)
    assert not ModelSpec.read(tmp_path, assume={"num_hidden_layers": 2}).exact


def test_packed_projections_have_shapes_of_their_own(tmp_path: Path) -> None:
    tensors = {name: np.zeros((2, 2), np.uint8) for name in projections(range(1))}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ModelSpec.read(tmp_path).weights_by_type == {"U8": 4 * 5}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 9}))
    with pytest.raises(BadFile, match="num_hidden_layers is 9"):
        ModelSpec.read(tmp_path)


def test_packed_weights_have_bytes_but_no_parameter_count(tmp_path: Path) -> None:
    save_file({"a": np.zeros(4, np.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"bits": 4}}))
    spec = ModelSpec.read(tmp_path)
    assert (spec.weights_bytes, spec.parameters) == (4, None)


def test_a_directory_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ModelSpec.read(tmp_path).weights_bytes is None
    (tmp_path / "consolidated.safetensors").write_bytes(b"ignored")
    assert ModelSpec.read(tmp_path).weights_bytes is None


def test_files_without_an_index(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"t{number}": np.zeros(4, np.float32)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    save_file({"adapter": np.zeros(4, np.float32)}, tmp_path / "adapter_model.safetensors")
    found = read_weights(tmp_path)
    assert found is not None
    assert sorted(found.tensors) == ["t1", "t2"]
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(BadFile, match=r"holds 1 of the 2 parts of model-00002-of-00002.safetensors; fetch the others"):
        read_weights(tmp_path)
    save_file({"t2": np.zeros(4, np.float32)}, tmp_path / "other.safetensors")
    save_file({"t1": np.zeros(4, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(BadFile, match=r"other\.safetensors and another \.safetensors file both hold 't2'"):
        read_weights(tmp_path)


def test_an_index_may_be_large_and_must_not_repeat_itself(tmp_path: Path) -> None:
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"note": " " * 2**23}, "weight_map": {"a": "model-1.safetensors"}}))
    assert read_weights(tmp_path)
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}')
    with pytest.raises(BadFile, match=r"'a' is given twice, as 'model-1.safetensors' and as 'model-2.safetensors'"):
        read_weights(tmp_path)


_GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot hold a header"),
        (struct.pack("<Q", 2**63) + b"{}", "cannot hold a header of 9223372036854775808"),
        (torn(b"[1,2,3]"), "not a JSON object"),
        (torn(b"not json"), "is not JSON"),
        (torn(b"[" * 5000), "is not JSON"),
        (torn({"a": 1}), "lacks dtype"),
        (torn({"a": _GOOD | {"dtype": "F7"}}, 8), "of type 'F7'"),
        (torn({"a": _GOOD | {"shape": [-2]}}, 8), "whole numbers"),
        (torn({"a": _GOOD | {"shape": [2**61]}}, 8), "whole numbers"),
        (torn({"a": _GOOD | {"shape": [2**40, 2**40]}}, 8), "too many bytes"),
        (torn({"a": _GOOD | {"shape": [True, 2]}}, 8), "whole numbers"),
        (torn({"a": _GOOD | {"data_offsets": [0, 7]}}, 8), "its data_offsets say 7"),
        (torn({"a": _GOOD | {"data_offsets": [8, 0]}}, 8), "its data_offsets say -8"),
        (torn({"a": _GOOD | {"data_offsets": [0]}}, 8), "lacks dtype"),
        (torn({"a": _GOOD}, 7), "its tensors end at byte"),
        (torn({"a": _GOOD}, 9), "its tensors end at byte"),
        (torn({"a": _GOOD, "b": _GOOD | {"data_offsets": [9, 17]}}, 17), "take 16 bytes but end at 17"),
        (torn({"a": _GOOD, "b": _GOOD}, 8), "they overlap, or leave holes"),
        (torn(b'{"a": 1, "a": 2}'), "'a' is given twice, as 1 and as 2"),
        (torn(b"[" * 2**22), "holds about"),
    ],
)
def test_broken_files_name_what_is_wrong(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadFile, match=says):
        read_file(path)
