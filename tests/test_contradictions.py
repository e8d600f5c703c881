"""Files that hold something else than their configuration says are refused: no network is made of a part of them."""

import json
from pathlib import Path

import pytest
import torch
from served import Case, build, open_saved
from test_served import CASES

from kvist.errors import KvistError, UnsupportedModel

pytest.importorskip("transformers")
_GPT_OSS, _PHI = "model.layers.0.mlp.experts", "model.layers.0"


def saved_with_more(case: Case, directory: Path, name: str) -> None:
    """Save a network, and of one tensor a row too many."""
    from safetensors.torch import load_file, save_file

    build(case, directory)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
            save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gpt_oss", f"{_GPT_OSS}.gate_up_proj"),
        ("gpt_oss", f"{_GPT_OSS}.down_proj_bias"),
        ("phi3", f"{_PHI}.self_attn.qkv_proj.weight"),
        ("phi3", f"{_PHI}.mlp.gate_up_proj.weight"),
    ],
)
def test_more_rows_than_the_network_has(case: str, name: str, tmp_path: Path) -> None:
    saved_with_more(CASES[case], tmp_path, name)
    with pytest.raises(KvistError) as caught:
        open_saved(tmp_path, None)
    assert str(caught.value.key).startswith(("model.layers.0.self_attn", "model.layers.0.mlp"))


def test_a_head_that_is_tied_and_stored(tmp_path: Path) -> None:
    case = Case(model="LlamaForCausalLM", config={"num_attention_heads": 2, "num_hidden_layers": 1})
    build(case, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(UnsupportedModel) as caught:
        open_saved(tmp_path, None)
    assert caught.value.key == "tie_word_embeddings"
