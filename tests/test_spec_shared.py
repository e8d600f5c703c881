"""The published configurations in ../shared/data: exact, or refused with the key that stopped it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import UnsupportedModel
from kvist.spec.families import FAMILIES
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

DATA = Path(__file__).parents[2] / "shared" / "data"
BF16 = CacheFormat()

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")

# KiB a token in bf16, append convention: the table that ../shared/data/README.md reprints.
GOLDEN = {
    "meta-llama--Meta-Llama-3-8B": ("llama", 128),
    "meta-llama--Llama-3.2-1B": ("llama", 32),
    "google--gemma-3-27b-it": ("gemma3_text", 496),
    "Qwen--Qwen3-4B": ("qwen3", 144),
    "Qwen--Qwen3-8B": ("qwen3", 144),
    "Qwen--Qwen3-32B": ("qwen3", 256),
    "HuggingFaceTB--SmolLM2-135M": ("llama", 22.5),
    "mistralai--Mistral-Small-3.1-24B-Instruct-2503": ("mistral", 160),
}


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize("model", GOLDEN)
def test_golden_numbers(model: str) -> None:
    # Extracts may leave out the type, and the null of a window that is not there.
    family, kib = GOLDEN[model]
    config = {"sliding_window": None} if family == "mistral" else {}
    config |= load(DATA / "configs" / "facts" / f"{model}.json") | {"model_type": family}
    spec = read_description(config, name=model)
    assert spec.append_bytes_per_token(BF16) == kib * 1024


def expected() -> list[dict[str, Any]]:
    path = DATA / "expected" / "models.json"
    return json.loads(path.read_text())["cases"] if path.is_file() else []


@pytest.mark.parametrize("case", expected(), ids=lambda case: case["id"])
def test_verified_answers(case: dict[str, Any]) -> None:
    path = DATA / "configs" / "full" / case["file"]
    family = load(path).get("model_type")
    if family not in FAMILIES:
        with pytest.raises(UnsupportedModel, match="model_type"):
            ModelSpec.read(path)
        return
    spec = ModelSpec.read(path)
    assert spec.append_bytes_per_token(BF16) == case["append_bytes_per_token"]
    assert spec.retained_bytes_per_token(BF16) == case["retained_bytes_per_token"]
    for tokens, size in case["total_bytes"].items():
        assert spec.sequence_bytes(int(tokens), BF16) == size


def test_every_configuration_is_read_or_refused_by_the_key_that_stopped_it() -> None:
    answered, stopped_by = 0, []
    for path in sorted((DATA / "configs").glob("*/*.json")):
        try:
            spec = ModelSpec.read(path)
        except UnsupportedModel as error:
            stopped_by.append(error.key)
        else:
            assert load(path).get("model_type", "by class") in (*FAMILIES, "by class")
            assert spec.append_bytes_per_token(BF16) > 0
            answered += 1
    assert answered >= 50
    assert set(stopped_by) == {"model_type", "sliding_window"}
