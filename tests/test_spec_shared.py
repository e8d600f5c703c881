"""The published configurations in ../shared/data: exact, or refused with the key that stopped it."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import InputError
from kvist.spec.families import FAMILIES
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

DATA = Path(__file__).parents[2] / "shared" / "data"
BF16 = CacheFormat()

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")

# KiB a token in bf16, append convention without indexers: the table that ../shared/data/README.md reprints, rounded
# as it rounds.
GOLDEN = {
    "openai-community--gpt2-xl": 300,
    "meta-llama--Meta-Llama-3-8B": 128,
    "meta-llama--Llama-3.2-1B": 32,
    "deepseek-ai--DeepSeek-V3.2": 68.6,
    "moonshotai--Kimi-K2-Instruct": 68.6,
    "zai-org--GLM-5": 87.8,
    "google--gemma-3-27b-it": 496,
    "openai--gpt-oss-120b": 72,
    "Qwen--Qwen3-4B": 144,
    "Qwen--Qwen3-8B": 144,
    "Qwen--Qwen3-32B": 256,
    "allenai--Olmo-3-1125-32B": 256,
    "Qwen--Qwen3-235B-A22B": 188,
    "Qwen--Qwen3-30B-A3B": 96,
    "microsoft--phi-4": 200,
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": 192,
    "MiniMaxAI--MiniMax-M2": 248,
    "zai-org--GLM-4.5": 368,
    "allenai--OLMo-2-1124-7B": 512,
    "moonshotai--Kimi-Linear-48B-A3B-Instruct": 7.9,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 6,
    # The table prints 144; the file's 39 windows of 8 heads and 9 full layers of 4 make this.
    "XiaomiMiMo--MiMo-V2-Flash": 217.5,
}
# KiB a token once every window is full, indexers included.
RETAINED = {
    "deepseek-ai--DeepSeek-V3.2": 83.875,
    "zai-org--GLM-5": 107.25,
    "Qwen--Qwen3.5-27B": 64,
    "XiaomiMiMo--MiMo-V2.5": 22.5,
    "CohereLabs--c4ai-command-r-v01": 1280,
}
# What the README's golden numbers need that a file leaves out.
COMPLETED = {"mistralai--Mistral-Small-3.1-24B-Instruct-2503": ({"sliding_window": None}, 160)}

_PATTERN = "a window without a list of layers, or a type that implies one"
_NULL = "a copy that drops its nulls; Mistral's class would fill in a window of 4,096"
# Every file that is not answered: the key that stops it, and why that is right.
REFUSED: dict[str, tuple[str, str]] = {
    "THUDM--glm-4-9b-chat": ("multi_query_attention", "2 groups count only where multi_query_attention is on"),
    "deepseek-ai--DeepSeek-V4-Flash-0731": ("model_type", "which ratios have an indexer is the family's"),
    "deepseek-ai--DeepSeek-V4-Pro-0813": ("model_type", "which ratios have an indexer is the family's"),
    "deepseek-ai--DeepSeek-V4.1-Flash": ("model_type", "no class for its shared sources and ratios is published"),
    "dots-studio--dots3-note-prev": ("model_type", "how many layers have an indexer is the family's"),
    "meituan-longcat--LongCat-Flash-Chat": ("num_hidden_layers", "28 layers, or 28 of the two blocks of each"),
    "microsoft--Phi-3-mini-128k-instruct": ("model_type", _PATTERN),
    "microsoft--Phi-3-mini-4k-instruct": ("model_type", _PATTERN),
    "microsoft--Phi-4-mini-reasoning": ("model_type", _PATTERN),
    "mistralai--Mistral-7B-Instruct-v0.1": ("model_type", _PATTERN),
    "mistralai--mathstral-7B-v0.1": ("model_type", _PATTERN),
    "mistralai--Mistral-7B-v0.3": ("sliding_window", _NULL),
    "mistralai--Mistral-Nemo-Instruct-2407": ("sliding_window", _NULL),
    "mistralai--Mistral-Small-3.1-24B-Instruct-2503": ("sliding_window", _NULL),
    "zai-org--GLM-4.5-Air": ("hidden_size", "4,096 / 96 heads is no width; the published file says head_dim 128"),
}
# How a refused file is answered: what the message asks for, and the append cost in KiB that follows.
REMEDIES: dict[str, tuple[dict[str, Any], float]] = {
    "THUDM--glm-4-9b-chat": ({"multi_query_attention": True}, 40),
    "zai-org--GLM-4.5-Air": ({"head_dim": 128}, 184),
    "meituan-longcat--LongCat-Flash-Chat": ({"num_layers": 28}, 63),
    "mistralai--Mistral-7B-v0.3": ({"sliding_window": None}, 128),
    "mistralai--Mistral-7B-Instruct-v0.1": ({"model_type": "mistral"}, 128),
    "microsoft--Phi-3-mini-4k-instruct": ({"model_type": "phi3"}, 384),
    "deepseek-ai--DeepSeek-V4-Flash-0731": ({"model_type": "deepseek_v4"}, 48.40625),
}


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def fact(model: str) -> dict[str, Any]:
    return load(DATA / "configs" / "facts" / f"{model}.json")


def published(spec: ModelSpec) -> Fraction:
    """KiB a token as the tables count it."""
    return Fraction(spec.append_bytes_per_token(BF16) - spec.indexer_bytes_per_token(BF16)) / 1024


@pytest.mark.parametrize("model", GOLDEN)
def test_golden_numbers(model: str) -> None:
    assert abs(float(published(read_description(fact(model), name=model))) - GOLDEN[model]) <= 0.05


@pytest.mark.parametrize("model", RETAINED)
def test_golden_slopes_past_every_window(model: str) -> None:
    spec = read_description(fact(model), name=model)
    assert spec.retained_bytes_per_token(BF16) == RETAINED[model] * 1024


@pytest.mark.parametrize("model", COMPLETED)
def test_golden_numbers_of_completed_files(model: str) -> None:
    missing, kib = COMPLETED[model]
    assert published(read_description(fact(model) | missing, name=model)) == kib


def expected() -> list[dict[str, Any]]:
    path = DATA / "expected" / "models.json"
    return json.loads(path.read_text())["cases"] if path.is_file() else []


@pytest.mark.parametrize("case", expected(), ids=lambda case: case["id"])
def test_verified_answers(case: dict[str, Any]) -> None:
    spec = ModelSpec.read(DATA / "configs" / "full" / case["file"])
    assert spec.exact
    assert spec.append_bytes_per_token(BF16) == case["append_bytes_per_token"]
    assert spec.retained_bytes_per_token(BF16) == case["retained_bytes_per_token"]
    assert spec.state_bytes(BF16) == case["state_bytes"]
    for tokens, size in case["total_bytes"].items():
        if tokens.isdigit():
            assert spec.sequence_bytes(int(tokens), BF16) == size
            continue
        encoder, decoder = (int(word) for word in tokens.split() if word.isdigit())
        cross = spec.cross_bytes(BF16, encoder_tokens=encoder)
        assert cross is not None
        assert spec.sequence_bytes(decoder, BF16) + cross == size
    drafts = case.get("alternates", {}).get("mtp_draft_layers_not_counted")
    if drafts:
        assert len(spec.draft_layers) == drafts["layers"]
        assert spec.draft_append_bytes_per_token(BF16) == drafts["append_bytes_per_token"]


def test_the_page_lists_what_is_refused() -> None:
    page = (Path(__file__).parents[1] / "docs" / "bytes.md").read_text()
    rows = [f"| {model.replace('--', '/')} | `{key}` | {why} |" for model, (key, why) in REFUSED.items()]
    assert "\n".join(rows) in page


def test_every_configuration_is_answered_or_refused_for_a_reason_that_is_written_down() -> None:
    refused: dict[str, str | None] = {}
    for path in sorted((DATA / "configs").glob("*/*.json")):
        try:
            spec = ModelSpec.read(path)
        except InputError as error:
            assert path.parent.name == "facts"
            refused[path.stem] = error.key
        else:
            assert spec.exact
            assert spec.append_bytes_per_token(BF16) or spec.state_bytes(BF16)
    assert refused == {model: key for model, (key, _) in REFUSED.items()}


@pytest.mark.parametrize("model", REMEDIES)
def test_what_a_refusal_asks_for_is_enough(model: str, tmp_path: Path) -> None:
    path = tmp_path / f"{model}.json"
    path.write_text(json.dumps(fact(model)))
    remedy, kib = REMEDIES[model]
    spec = ModelSpec.read(path, assume=remedy)
    assert not spec.exact
    assert published(spec) == kib


def test_types_of_all_files_are_known() -> None:
    types = {load(path).get("model_type") for path in (DATA / "configs").glob("*/*.json")}
    # deepseek_ref is SGLang's name for DeepSeek-V4, whose class the files name.
    assert types - set(FAMILIES) == {None, "deepseek_ref"}
