"""What is printed of one thing says one: ``1 user``, never ``1 users``."""

import json
import re
from pathlib import Path

import pytest

from kvist.cli import main

ONE_LAYER = {
    "model_type": "gemma3_text", "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "hidden_size": 64, "head_dim": 64, "sliding_window": 1, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 1, "layer_types": ["sliding_attention"],
}  # fmt: skip
PLURAL = re.compile(r"(?<![0-9.,])1 (?:KV |draft |query |layer )?(?!this|is|as|has|its|holds)[a-z]+s\b")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--memory", "1GiB", "--users", "1", "--block", "1"),
        ("--gpu", "L4", "--users", "1"),
        ("--gpu", "L4x2", "--pp", "2"),
        ("--gpu", "L4", "--tp", "2"),
        ("--users", "1"),
        ("--gpu", "L4", "--lengths", "LENGTHS"),
        ("--cache-memory", "1GiB", "--lengths", "LENGTHS"),
        ("--cache-memory", "8KiB"),
        ("--cache-memory", "8KiB", "--users", "1000000000"),
        ("--cache-memory", "1GiB", "--shared-prefix", "1"),
        *(("--cache-memory", "1GiB", "--engine", engine) for engine in ("kvist", "vllm", "llama.cpp", "transformers")),
        ("--cache-memory", "1GiB", "--engine", "sglang", "--assume", "sliding_window=null"),
        ("--cache-memory", "1", "--engine", "transformers", "--set", "batch_size=1"),
        ("--tokens", "2"),
    ],
    ids=" ".join,
)
def test_one_of_a_thing(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, lengths = tmp_path / "one.json", tmp_path / "lengths.txt"
    model.write_text(json.dumps(ONE_LAYER))
    lengths.write_text("1\n")
    given = [str(lengths) if word == "LENGTHS" else word for word in words]
    assert main(["plan", str(model), "--explain", *given]) in (0, 2, 3)
    out, err = capsys.readouterr()
    assert "internal error" not in err
    assert [line for line in (out + err).splitlines() if PLURAL.search(line)] == []
