"""Plans of every kind of layer: their JSON, their explanations and their tables."""

import json
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory_layers import models

import kvist
from kvist.errors import InputError
from kvist.planning.explain import explain
from kvist.report.plan_tables import print_plan
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import (
    Attention,
    Compressed,
    Cross,
    Indexer,
    Latent,
    Layer,
    Nothing,
    Parallel,
    Shared,
    State,
)  # fmt: skip
from kvist.spec.model import ModelSpec
from kvist.units import counted

FORMATS = [CacheFormat(), CacheFormat(key="int8", value="int4"), CacheFormat(key="fp8", value="f32")]
OWN = Attention(kv_heads=2, key_dim=64, value_dim=64)
SSM = State(name="mamba2", conv_elements=300, conv_columns=3, state_elements=4000)


def model(*layers: Layer, **fields: Any) -> ModelSpec:
    return ModelSpec(name="toy", source="test", layers=layers, max_context=8192, **fields)


EVERY = model(
    OWN,
    OWN,
    Attention(kv_heads=2, key_dim=192, value_dim=128, window=128),
    Attention(kv_heads=1, key_dim=64, value_dim=64, chunk=1000),
    Attention(kv_heads=4, key_dim=128, value_dim=128, indexer=Indexer(heads=1, dim=128)),
    Latent(rank=512, rope_dim=64, indexer=Indexer(heads=2, dim=64, pool=4)),
    Compressed(rank=448, rope_dim=64, ratio=4, window=128, indexer=Indexer(heads=1, dim=128)),
    Compressed(rank=448, rope_dim=64, ratio=3, window=128),
    SSM,
    Parallel(parts=(OWN, SSM)),
    Parallel(parts=(OWN, Cross(kv_heads=2, key_dim=64, value_dim=64, encoder_tokens=1500))),
    Shared(source=0),
    Shared(source=1),
    Nothing(),
    draft_layers=(Latent(rank=512, rope_dim=64),),
)


def test_rows_have_the_fields_of_their_kind() -> None:
    answer = kvist.plan(EVERY, tokens=8192).to_dict()
    assert json.loads(json.dumps(answer)) == answer
    attention = {"kind": "attention", "kv_heads": 2, "key_dim": 64, "value_dim": 64, "window": None}
    state = {
        "kind": "state", "name": "mamba2", "conv_elements": 300, "conv_codec": "bf16", "state_elements": 4000,
        "state_codec": "f32", "conv_columns": 3,
    }  # fmt: skip
    cross = {"kind": "cross", "kv_heads": 2, "key_dim": 64, "value_dim": 64, "encoder_tokens": 1500}
    assert answer["layers"] == [
        attention | {"count": 2},
        {"kind": "attention", "count": 1, "kv_heads": 2, "key_dim": 192, "value_dim": 128, "window": 128},
        {"kind": "attention", "count": 1, "kv_heads": 1, "key_dim": 64, "value_dim": 64, "window": None, "chunk": 1000},
        {"kind": "attention", "count": 1, "kv_heads": 4, "key_dim": 128, "value_dim": 128, "window": None,
         "indexer": {"heads": 1, "dim": 128, "pool": 1}},
        {"kind": "latent", "count": 1, "rank": 512, "rope_dim": 64, "window": None,
         "indexer": {"heads": 2, "dim": 64, "pool": 4}},
        {"kind": "compressed", "count": 1, "rank": 448, "rope_dim": 64, "ratio": 4, "window": 128,
         "indexer": {"heads": 1, "dim": 128, "pool": 1}},
        {"kind": "compressed", "count": 1, "rank": 448, "rope_dim": 64, "ratio": 3, "window": 128},
        state | {"count": 1},
        {"kind": "parallel", "count": 1, "parts": [attention, state]},
        {"kind": "parallel", "count": 1, "parts": [attention, cross]},
        {"kind": "shared", "count": 1, "source": 0},
        {"kind": "shared", "count": 1, "source": 1},
        {"kind": "nothing", "count": 1},
    ]  # fmt: skip
    tokens = {"own": 4 * 512, "window": 1280, "chunk": 256, "indexed": 2048, "latent": 1152, "near": 2 * 1024}
    indexers = {"attention": 256, "latent": 64, "compressed": 64}
    retained = tokens["own"] + tokens["indexed"] + tokens["latent"] + sum(indexers.values()) + 256 + Fraction(1024, 3)
    assert answer["append_bytes_per_token"] == float(retained + tokens["window"] + tokens["chunk"] + tokens["near"])
    assert answer["retained_bytes_per_token"] == float(retained)
    assert answer["indexer_bytes_per_token"] == sum(indexers.values())
    assert answer["state_bytes"] == 2 * (600 + 16000)
    assert answer["cross_bytes_per_encoder_token"] == 512
    assert answer["cross_bytes"] == 1500 * 512
    assert answer["draft_append_bytes_per_token"] == 1152
    assert answer["sequence_bytes"]["8192"] == (
        8192 * (tokens["own"] + tokens["indexed"] + tokens["latent"] + 256) + 128 * 1280 + 1000 * 256
        + 2048 * 256 + 2 * 128 * 1024 + 2048 * 1280 + 2730 * 1024 + 2 * 16600
    )  # fmt: skip


def test_whole_rates_are_integers_in_json() -> None:
    answer = kvist.plan(model(Compressed(rank=448, rope_dim=64, ratio=4, window=128)), tokens=1).to_dict()
    assert answer["append_bytes_per_token"] == 1280
    assert isinstance(answer["append_bytes_per_token"], int)
    assert "cross_bytes" not in answer


def again(formula: str) -> Fraction:
    """The value of an explanation's formula, worked out from its text."""
    text = re.sub(r"(?<=\d),(?=\d{3})| (layers?|heads?|B)\b", "", formula).replace("x", "*")
    return Fraction(eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction, "min": min}))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_formulas_of_every_kind_come_out(fmt: CacheFormat) -> None:
    plan = kvist.plan(EVERY, format=fmt, tokens=["1", "1000", "8k"])
    rows = explain(plan)
    for row in rows:
        if re.search(r"layers? x", row.formula):
            assert again(row.formula) == row.value, row
    kinds = [row.what for row in rows]
    assert {"one key vector", "one indexer key", "one latent vector", "one compressed vector"} <= set(kinds)
    assert {"one mamba2 state", "of append, indexer keys", "state, bytes a sequence", "cross, bytes a sequence"} <= set(
        kinds
    )
    assert {"cross, bytes an encoder token", "draft layers, bytes a token"} <= set(kinds)


@settings(max_examples=60)
@given(models(), st.sampled_from(FORMATS), st.integers(1, 5000))
def test_explained_sums_are_the_planned_ones(spec: ModelSpec, fmt: CacheFormat, tokens: int) -> None:
    rows = {row.what: row for row in explain(kvist.plan(spec, format=fmt, tokens=tokens))}
    assert rows["append, bytes a token"].value == spec.append_bytes_per_token(fmt)
    sequence = rows[f"sequence of {counted(tokens, 'token')}"]
    assert sequence.value == spec.sequence_bytes(tokens, fmt)
    for row in rows.values():
        if re.search(r"layers? x", row.formula):
            assert again(row.formula) == row.value, row


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_explanations_are_json(fmt: CacheFormat) -> None:
    for row in explain(kvist.plan(EVERY, format=fmt, tokens=1)):
        assert json.loads(json.dumps(row.to_dict()))["value"] == float(row.value)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_tables_are_readable_at_80_columns(fmt: CacheFormat, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(kvist.plan(EVERY, format=fmt, cache_memory="1GiB", engine="kvist"), explained=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = re.sub(r"\s+", " ", " ".join(lines))
    for said in (
        "2 x attention: 2 KV heads, key 64, value 64, sees all tokens",
        "sees its chunk of 1,000 tokens",
        "latent: 512 + 64 wide, sees all tokens, indexer key 2 x 64 for 4",
        "compressed: 448 + 64 wide, one for 4 tokens, the last 128 singly, indexer key 128",
        "1 x state (mamba2): 300 bf16 + 4,000 f32",
        "and cross: 2 KV heads, key 64, value 64, sees the encoder, 1,500 tokens",
        "2 x shared: reads what layers 0, 1 stored, adds nothing",
        "1 x nothing: stores nothing",
        "a sequence, whatever its length",
        "a token of the encoder, not counted below;",
        "a token more with the draft layers, not counted below",
    ):
        assert said in text, said


def test_notes_say_what_a_format_does_not_mean() -> None:
    notes = kvist.plan(EVERY, format=FORMATS[1], tokens=1).notes
    assert notes == (
        "a latent is key and value in one and is stored in the key codec, int8",
        "states keep types of their own; the format is that of keys and values",
    )
    assert kvist.plan(EVERY, tokens=1).notes == ()


@settings(max_examples=40)
@given(models(), st.integers(1, 4096), st.integers(20, 26))
def test_users_of_every_kind_fit_in_what_is_planned(spec: ModelSpec, context: int, power: int) -> None:
    try:
        plan = kvist.plan(spec, cache_memory=2**power, context=context, engine="kvist")
    except kvist.DoesNotFit:
        return
    capacity = plan.capacity
    assert capacity is not None
    assume(capacity.sequence_allocated > 0)
    encoder = plan.cross_bytes or 0
    assert capacity.sequence_allocated >= spec.sequence_bytes(context, plan.format) + encoder
    assert capacity.users_paged * capacity.sequence_allocated <= capacity.cache
    assert capacity.users_slab * (spec.sequence_bytes(4096, plan.format) + encoder) <= capacity.cache
    json.dumps(plan.to_dict())


def test_the_length_of_an_encoder_is_asked_for_only_where_it_is_open() -> None:
    open_length = model(Parallel(parts=(OWN, Cross(kv_heads=2, key_dim=64, value_dim=64))))
    with pytest.raises(InputError, match="encoder_tokens: toy keeps keys and values of an encoder"):
        kvist.plan(open_length, cache_memory="1MiB")
    assert "cross_bytes" not in kvist.plan(open_length).to_dict()
    plan = kvist.plan(open_length, cache_memory="1MiB", context=16, encoder_tokens=32)
    assert plan.to_dict()["cross_bytes"] == 32 * 512
    assert plan.capacity is not None
    assert plan.capacity.sequence_allocated == 3 * 16 * 512
    assert {row.what: row.formula for row in explain(plan)}["cross, bytes a sequence"] == (
        "32 x 1 layer x 2 heads x (128 + 128 B)"
    )
    with pytest.raises(InputError, match="encoder_tokens: 5; toy attends to no encoder: leave it out"):
        kvist.plan(model(OWN), encoder_tokens=5)
    with pytest.raises(InputError, match="encoder_tokens: 5; toy fixes the length of its encoder"):
        kvist.plan(EVERY, encoder_tokens=5)


@pytest.mark.parametrize(
    "layer",
    [Latent(rank=512, rope_dim=16), Parallel(parts=(SSM, Attention(kv_heads=1, key_dim=80, value_dim=80)))],
)
def test_widths_that_a_codec_cannot_group_stop_the_plan(layer: Layer) -> None:
    with pytest.raises(InputError, match="codec int4 stores groups of 32 elements; a width of"):
        kvist.plan(model(layer), format=CacheFormat(key="int4", value="int4"))
