"""The numbers of docs/families.md are what the planner says."""

import re
from pathlib import Path

import pytest

import kvist
from kvist.planning.catalogue import listed
from kvist.planning.explain import explain
from kvist.spec.formats import CacheFormat
from kvist.units import format_size

PAGE = (Path(__file__).parents[1] / "docs/families.md").read_text()
ROWS = re.findall(r"^\| (\S+) \((\d{4})\) \| (.*) \|$", PAGE, re.MULTILINE)
FORMULAS = re.findall(r"^\| (\S+) \| ([\d,]+) \| `(.*)` \|$", PAGE, re.MULTILINE)
BF16 = CacheFormat()


@pytest.mark.parametrize(("model", "year", "cells"), ROWS, ids=[row[0] for row in ROWS])
def test_each_row_is_planned_again(model: str, year: str, cells: str) -> None:
    listing = listed(model)
    spec = listing.spec
    sizes = [spec.append_bytes_per_token(BF16), spec.retained_bytes_per_token(BF16), spec.state_bytes(BF16)]
    sizes += [spec.sequence_bytes(tokens, BF16) for tokens in (8192, 131072)]
    assert cells == " | ".join([listing.kind, *map(format_size, map(int, sizes))])
    assert listing.released is not None
    assert listing.released[:4] == year
    assert spec.name == model


@pytest.mark.parametrize(("model", "size", "formula"), FORMULAS, ids=[row[0] for row in FORMULAS])
def test_each_formula_is_what_the_plan_explains(model: str, size: str, formula: str) -> None:
    rows = {row.what: row for row in explain(kvist.plan(model))}
    row = rows["append, bytes a token"] if rows["append, bytes a token"].value else rows["state, bytes a sequence"]
    assert (f"{row.value:,}", row.formula) == (size, formula)


def test_what_the_text_says() -> None:
    assert len(ROWS) == 9
    assert [row[0] for row in FORMULAS] == [row[0] for row in ROWS[:5]]
    v3 = {row.what: row for row in explain(kvist.plan("deepseek-v3"))}
    assert f"{v3['expanded, bytes a token'].value:,} bytes" in PAGE
    assert f"{float(v3['expanded, times the latents'].value):.3f} times" in PAGE
    gemma, llama = listed("gemma-3-27b-it").spec, listed("llama-3-8b").spec
    whole = 131072 * gemma.append_bytes_per_token(BF16)
    assert f"takes {gemma.sequence_bytes(131072, BF16) / whole:.0%} of".replace("%", " %") in PAGE
    tokens = listed("mamba-1.4b").spec.state_bytes(BF16) / llama.append_bytes_per_token(BF16)
    assert f"as large as {tokens:.0f} tokens of Llama 3" in PAGE
    as_mha = kvist.ModelSpec.read("llama-3-8b", assume={"num_key_value_heads": 32})
    assert f"{format_size(as_mha.append_bytes_per_token(BF16))}." in PAGE
