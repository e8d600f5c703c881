"""``kvist models``: the list, models side by side, what if, and the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvist.cli import main
from kvist.planning.catalogue import LENGTHS, listed, listings
from kvist.planning.kinds import KINDS, kind_of
from kvist.report.model_tables import format_tokens
from kvist.spec.layers import Attention, Cross, Latent, Layer, Nothing, Parallel, State
from kvist.spec.model import ModelSpec


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_lists_are_readable_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--sort", "released"]) == 0
    assert main(["models", "--compare", "llama-2-7b", "llama-3-8b", "gemma-3-27b", "deepseek-v3", "mamba-1.4b"]) == 0
    assert main(["plan", "llama-3-70b", "--assume", "num_key_value_heads=64"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["llama", "70b"], "llama-3-70b"),
        (["meta-llama/"], "llama-2-7b"),
        (["latent"], "deepseek-v3"),
        (["mqa"], "falcon-7b"),
        (["--kind", "HYBRID", "qwen"], "qwen3-next-80b-a3b-instruct"),
    ],
)
def test_words_and_kinds_filter(words: list[str], some: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "models", *words)["rows"]
    assert some in {row["name"] for row in rows}
    assert len(rows) < len(listings()) / 2


@pytest.mark.parametrize(
    ("order", "key"),
    [("append", "append_bytes_per_token"), ("retained", "retained_bytes_per_token"), ("context", "max_context")],
)
def test_lists_are_sorted(order: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = [row[key] for row in answer(capsys, "models", "gqa", "--sort", order)["rows"]]
    assert values == sorted(values)


def test_what_is_not_known_comes_last() -> None:
    known = [each.spec.parameters is not None for each in listings(sort="parameters")]
    assert known == sorted(known, reverse=True)


def test_rows_say_what_plans_say(capsys: pytest.CaptureFixture[str]) -> None:
    row = answer(capsys, "models", "deepseek-v3.2-exp")["rows"][0]
    planned = answer(capsys, "plan", "deepseek-v3.2-exp")
    for key in ("append_bytes_per_token", "retained_bytes_per_token", "indexer_bytes_per_token", "state_bytes"):
        assert row[key] == planned[key]
    assert row["sequence_bytes"] == {str(n): planned["sequence_bytes"][str(n)] for n in LENGTHS}


def test_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "models", "--compare", "llama-2-70b", "Llama-2-7B", "mamba-1.4b")["rows"]
    assert [row["name"] for row in rows] == ["llama-2-70b", "llama-2-7b", "mamba-1.4b"]
    assert [row["ratio_to_first"]["append"] for row in rows] == [1, 1.6, 0]
    assert main(["models", "--compare", "mamba-1.4b", "llama-2-7b", "--tokens", "1M"]) == 0
    out = capsys.readouterr().out
    assert "at 1M" in out
    assert "*       longer than the model was made for" in out


def test_what_full_heads_would_have_cost(capsys: pytest.CaptureFixture[str]) -> None:
    planned = answer(capsys, "plan", "llama-3-70b", "--assume", "num_key_value_heads=64")
    assert planned["exact"] is False
    assert planned["append_bytes_per_token"] == 8 * planned["published"]["append_bytes_per_token"] == 2560 * 1024
    assert main(["plan", "llama-3-70b", "--assume", "num_key_value_heads=64"]) == 0
    out = capsys.readouterr().out
    assert "not exact" in re.sub(r"\s+", " ", out)
    assert re.search(r"append +320 KiB +2\.5 MiB +8\n", out)
    rows = answer(capsys, "models", "--compare", "llama-3-70b", "--assume", "num_key_value_heads=64")["rows"]
    assert [(row["exact"], row["ratio_to_first"]["append"]) for row in rows] == [(True, 1), (False, 8)]


def test_long_names_are_folded_and_tables_are_as_wide_as_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("a-model-of-a-very-long-name" * 3)
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    many = ["llama-3-8b", "deepseek-v3", "kimi-linear", "mamba-1.4b", "jamba-v0.1", "gpt2", "llama-3.1-405b"]
    assert main(["models", "--compare", *many, str(folder)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("released") >= 2
    assert "kimi-linear-48b-\n" in re.sub(r" +\n", "\n", out.replace("mamba-1.4b", "").replace("jamba-v0.1", ""))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nosuchmodel"], "none of [0-9]{3} models is called nosuchmodel"),
        (["--kind", "linear"], "--kind: 'linear' is no kind; choose one of state, hybrid"),
        (["--sort", "size"], "--sort: 'size' is no order; choose one of name, released"),
        (["llama", "--compare", "gpt2"], "--compare: takes models by name"),
        (["--assume", "head_dim=1"], "--assume: overrides keys of the models that --compare names"),
        (["--compare", "mamba-1.4b", "--assume", "num_key_value_heads=8"], "num_key_value_heads"),
        (["--html", "/nowhere/at/all.html"], "/nowhere/at/all.html: cannot be written"),
        (["--html", ""], "'': cannot be written: Is a directory"),
        (["--html", "a\0b"], "cannot be written: embedded null byte"),
        (["--html", "a.html", "llama"], "--html: the page has all models; leave out WORD"),
        (["--tokens", "8k"], "--tokens: the list has no lengths; add --compare or --json"),
    ],
)
def test_wrong_calls_say_what_would_be_right(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(says, err)


def spec_of(*layers: Layer, **config: Any) -> ModelSpec:
    return ModelSpec(name="made up", source="this test", layers=layers, max_context=1024, config=config)


FULL = Attention(kv_heads=8, key_dim=64, value_dim=64)
NEAR = Attention(kv_heads=8, key_dim=64, value_dim=64, window=16)
ONE = Attention(kv_heads=1, key_dim=64, value_dim=64)
STATE = State(name="mamba", conv_elements=8, conv_codec="bf16", state_elements=8, state_codec="f32")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("MHA", spec_of(FULL, num_attention_heads=8)),
        ("MHA", spec_of(FULL, text_config={"num_attention_heads": 8})),
        ("MHA", spec_of(Parallel(parts=(FULL, Cross(kv_heads=8, key_dim=64, value_dim=64))), num_attention_heads=8)),
        ("GQA", spec_of(FULL, num_attention_heads=32)),
        ("GQA", spec_of(FULL)),
        ("MQA", spec_of(ONE, Nothing(), num_attention_heads=8)),
        ("window", spec_of(FULL, NEAR)),
        ("latent", spec_of(Latent(rank=512, rope_dim=64))),
        ("hybrid", spec_of(Parallel(parts=(FULL, STATE)))),
        ("hybrid", spec_of(NEAR, STATE)),
        ("state", spec_of(STATE, Nothing())),
    ],
)
def test_kinds(kind: str, spec: ModelSpec) -> None:
    assert kind_of(spec) == kind


def test_every_kind_has_a_model() -> None:
    assert {each.kind for each in listings()} == set(KINDS)


def test_files_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "model_type": "llama",
            }
        )
    )
    assert (listed(str(path)).hub, listed(str(path)).spec.name) == (None, tmp_path.name)


@pytest.mark.parametrize(
    ("count", "text"), [(8192, "8k"), (2**20, "1M"), (131_072, "128k"), (100, "100"), (5000, "5,000")]
)
def test_tokens_are_printed_as_they_are_read(count: int, text: str) -> None:
    assert format_tokens(count) == text


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["models", "--html", str(path), "--compare", "llama-3-8b", "deepseek-v3"]) == 0
    assert capsys.readouterr().out == f"{path}: open it in a browser\n"
    text = path.read_text(encoding="utf-8")
    # Names of XML namespaces are no addresses.
    text_without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|src=|<link (?!rel=\"icon\" href=\"data:)", text_without_names)
    found = re.search(r"const DATA = (.*);\n", text)
    assert found
    data = json.loads(found[1])
    assert data["chosen"] == ["llama-3-8b", "deepseek-v3"]
    assert len(data["models"]) == len(listings())
    names = {model["name"] for model in data["models"]}
    assert set(data["named"]) <= names
    one = next(model for model in data["models"] if model["name"] == "llama-3-8b")
    assert dict(zip(data["lengths"], one["bytes"], strict=True))[8192] == 2**30
    assert {model["kind"] for model in data["models"]} == set(data["kinds"])


def test_a_name_cannot_end_the_script_of_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<script>"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "model_type": "llama",
            }
        )
    )
    path = tmp_path / "page.html"
    assert main(["models", "--html", str(path), "--compare", str(folder)]) == 0
    assert path.read_text(encoding="utf-8").count("<script>") == 1
