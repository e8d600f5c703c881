"""The gallery: what it says is what was published, and names lead to it."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import KvistError, UnknownModel
from kvist.planning.planner import plan
from kvist.spec.families import read_config
from kvist.spec.formats import CacheFormat
from kvist.spec.gallery import GALLERY_FILE, GalleryModel, every_model, gallery_model, names
from kvist.spec.known import KNOWN
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_gallery

BF16 = CacheFormat()
CONFIGS = Path(__file__).parents[2] / "shared" / "data" / "configs"
MODELS = list(every_model())

# KiB a token in bf16, append convention without indexers: the published table that ../shared/data/README.md reprints.
PUBLISHED = {
    "gpt2-xl": 300, "llama-3-8b": 128, "llama-3.2-1b": 32, "deepseek-v3": 68.6, "deepseek-r1": 68.6,
    "deepseek-v3.2": 68.6, "kimi-k2": 68.6, "glm-5": 87.8, "gemma-3-27b": 496, "gemma-3-270m": 18, "gpt-oss-20b": 48,
    "gpt-oss-120b": 72, "qwen3-4b": 144, "qwen3-8b": 144, "qwen3-32b": 256, "olmo-3-32b": 256, "grok-2.5": 256,
    "qwen3-235b-a22b": 188, "qwen3-coder-30b-a3b": 96, "mistral-small-3.1": 160, "phi-4": 200,
    "llama-4-maverick": 192, "minimax-m2": 248, "glm-4.5": 368, "olmo-2-7b": 512, "qwen3.5-397b-a17b": 30,
    "kimi-linear": 7.9, "nemotron-3-nano-30b-a3b": 6,
    # The table prints 144; the file's 39 windows of 8 heads and 9 full layers of 4 make this.
    "mimo-v2-flash": 217.5,
}  # fmt: skip
# KiB a token once every window is full, indexers included: the same page.
RETAINED = {
    "deepseek-v3.2": 83.875, "glm-5": 107.25, "kimi-k3": 27, "qwen3.5-27b": 64, "gemma-4-31b": 80,
    "mimo-v2.5": 22.5, "command-r": 1280,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_costs_of_a_token(name: str) -> None:
    spec = ModelSpec.read(name)
    counted = Fraction(spec.append_bytes_per_token(BF16) - spec.indexer_bytes_per_token(BF16)) / 1024
    assert abs(float(counted) - PUBLISHED[name]) <= 0.05
    assert spec.exact


@pytest.mark.parametrize("name", RETAINED)
def test_published_slopes_past_every_window(name: str) -> None:
    assert ModelSpec.read(name).retained_bytes_per_token(BF16) == RETAINED[name] * 1024


def test_a_sequence_of_llama_3_70b_takes_two_and_a_half_gib() -> None:
    # Often printed as 40 GB: ../shared/data/README.md, common errors.
    assert ModelSpec.read("llama-3-70b").sequence_bytes(8192, BF16) == 5 * 2**29
    assert ModelSpec.read("llama-2-70b").append_bytes_per_token(BF16) == 320 * 1024


def test_there_are_more_than_250_models_each_with_a_name_and_a_source_of_its_own() -> None:
    assert len(MODELS) >= 250
    called = [name for model in MODELS for name in (model.name, *model.aliases)]
    called += [name for model in KNOWN.values() for name in (model.name, *model.aliases)]
    assert len(called) == len(set(called))
    assert [model.name for model in MODELS] == list(names()) == sorted(names())
    for model in MODELS:
        assert model.name == model.name.lower()
        assert model.hub.count("/") == 1
        assert len(model.source) > 10


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_is_planned(model: GalleryModel) -> None:
    answer = plan(read_gallery(model))
    assert answer.spec.exact
    assert answer.spec.source.startswith("gallery: ")
    assert all(size > 0 for size in answer.sequence_bytes.values())
    # What the file says of weights is what the planner counts.
    assert model.parameters in (None, answer.spec.parameters)
    assert model.weights_bytes in (None, answer.spec.weights_bytes)


# A size that is written in a name is met within a fifth; these are called after something else.
_CALLED_OTHERWISE = {"falcon3-1b", "gemma-2b", "gemma-2-2b", "minicpm-2b", "codegemma-2b"}


def test_counted_parameters_are_those_in_names() -> None:
    import re

    held = 0
    for model in MODELS:
        size = re.search(r"(?<=-)([0-9.]+)([bm])(?=-|$)", model.name)
        if model.parameters is None or size is None or any(model.name.startswith(odd) for odd in _CALLED_OTHERWISE):
            continue
        said = float(size[1]) * {"b": 1e9, "m": 1e6}[size[2]]
        assert 0.8 * said < model.parameters < 1.25 * said, model.name
        held += 1
    assert held > 150


def test_copies_remember_what_their_model_does() -> None:
    for model in MODELS:
        if model.like is not None:
            other = gallery_model(model.like)
            assert other is not None
            assert read_gallery(model).layers == read_gallery(other).layers


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b",
        "Llama-3-8B",
        "meta-llama/Meta-Llama-3-8B",
        "META-LLAMA/LLAMA-3-8B",
        "meta-llama-3-8b",
        " llama-3-8b ",
    ],
)
def test_case_and_organisation_are_optional(name: str) -> None:
    spec = ModelSpec.read(name)
    assert (spec.name, spec.parameters, spec.weights_bytes) == ("llama-3-8b", 8_030_261_248, 16_060_522_496)


def test_other_ids_and_short_names_mean_the_same() -> None:
    assert ModelSpec.read("gpt2").name == ModelSpec.read("openai/gpt2").name == "gpt2"
    assert ModelSpec.read("meta-llama/Llama-3.1-8B").layers == ModelSpec.read("meta-llama/Meta-Llama-3.1-8B").layers
    assert ModelSpec.read("gemma-3-27b").name == "gemma-3-27b-it"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("acme/llama-3-8b", "llama-3-8b is known of meta-llama, not of acme"),
        ("acme/smollm2-135m", "smollm2-135m is known of HuggingFaceTB, not of acme"),
    ],
)
def test_the_name_of_another_organisation_is_another_model(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnknownModel, match=says):
        ModelSpec.read(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-3", "it may be any of llama-3-70b, .* and [0-9]+ more"),
        ("llamma-3-8b", "nearest: llama-3-8b"),
        ("zzzzzz", "[0-9]{3} are known: kvist models lists them"),
    ],
)
def test_what_no_model_is_called_lists_the_nearest(name: str, says: str) -> None:
    with pytest.raises(UnknownModel, match=says):
        ModelSpec.read(name)


def test_an_override_is_not_exact_and_says_nothing_of_weights() -> None:
    spec = ModelSpec.read("llama-3-70b", assume={"num_key_value_heads": 64})
    assert not spec.exact
    assert spec.append_bytes_per_token(BF16) == 8 * ModelSpec.read("llama-3-70b").append_bytes_per_token(BF16)
    assert (spec.parameters, spec.weights_bytes) == (None, None)


def _facts() -> list[Path]:
    return sorted(CONFIGS.glob("*/*--*.json"))


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"{CONFIGS} is not there")
def test_entries_have_the_layers_of_the_configurations_that_they_restate() -> None:
    held = 0
    for path in _facts():
        content: dict[str, Any] = json.loads(path.read_text())
        hub = content.get("_model") or path.stem.replace("--", "/")
        entry = gallery_model(hub)
        if entry is None or entry.hub.lower() != hub.lower():
            continue
        config = {key: value for key, value in content.items() if not key.startswith("_")}
        try:
            layers = read_config(config, name=path.name).layers
        except KvistError:
            # An extract without the key that tells: the gallery names what completes it.
            assert "as published" in entry.source or path.parent.name == "facts"
            continue
        if hub == "bigcode/starcoder2-3b":
            # The extract that is filed under this id has the numbers of the larger sibling.
            assert layers == read_gallery(gallery_model("starcoder2-7b") or entry).layers
            continue
        assert read_gallery(entry).layers == layers, hub
        held += 1
    assert held > 250


def test_the_file_has_one_model_a_line() -> None:
    lines = GALLERY_FILE.read_text(encoding="utf-8").splitlines()
    for line in lines:
        entry = json.loads(line)
        assert list(entry)[:2] == ["name", "hub"]
        assert entry["config"]
        assert not any(key.startswith("_") for key in entry["config"])
