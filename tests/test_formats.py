"""Formats of caches: bytes of codecs, formats of single layers, and that every number counts them alike."""

import argparse
import json
import random
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_layers import models

import kvist
from kvist.cache.digests import Digests
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cli import build_parser, main
from kvist.cli_values import cache_format
from kvist.errors import BadFile, InputError
from kvist.planning.attending import attending_of
from kvist.planning.deployment import Cutting, Machine, stages_of
from kvist.planning.explain import explain
from kvist.planning.sharding import split_layers
from kvist.spec.fidelity import Fidelity, measured, read_measured
from kvist.spec.format_words import options_of
from kvist.spec.formats import CODECS, KEEP_CODECS, STATE_CODECS, CacheFormat, codec_named
from kvist.spec.layers import Attention, Compressed, Latent, Layer, Parallel, Shared, State
from kvist.spec.model import ModelSpec

OWN = Attention(kv_heads=3, key_dim=64, value_dim=64)
SSM = State(name="mamba2", conv_elements=300, conv_columns=3, state_elements=4000)
PLAIN = st.builds(
    CacheFormat,
    key=st.sampled_from(list(CODECS)),
    value=st.sampled_from(list(CODECS)),
    rotate=st.booleans(),
    state=st.sampled_from([None, *STATE_CODECS]),
)


def model(*layers: Layer) -> ModelSpec:
    return ModelSpec(name="toy", source="test", layers=layers, max_context=4096)


@st.composite
def formats(draw: st.DrawFn, count: int) -> CacheFormat:
    """Any format of a model of ``count`` layers."""
    own = st.dictionaries(st.integers(0, count - 1), PLAIN, max_size=3)
    kept = draw(st.integers(0, count // 2))
    return replace(draw(PLAIN), keep_layers=kept, keep=draw(st.sampled_from([None, "f32"])), layers=draw(own))


@st.composite
def stored(draw: st.DrawFn) -> tuple[ModelSpec, CacheFormat]:
    spec = draw(models())
    return spec, draw(formats(len(spec.layers)))


def test_codecs_take_what_ggml_takes() -> None:
    # block_q8_0, block_q4_0 and block_q4_1 of ggml-common.h: 32 codes, an f16 scale, an f16 minimum.
    sizes = {name: codec.vector_bytes(32) for name, codec in CODECS.items()}
    assert sizes == {"f32": 128, "f16": 64, "bf16": 64, "fp8": 32, "int8": 34, "int4": 18, "int4a": 20}
    assert [codec_named(name).rotatable for name in CODECS] == [False, False, False, True, True, True, True]


def test_smollm2_in_eight_and_four_bits() -> None:
    # 30 layers x 3 KV heads x 64: a key is 64 + 2 x 2 bytes, a value 32 + 2 x 2; in bf16 both take 128.
    spec = ModelSpec.read("smollm2-135m")
    fmt = CacheFormat(key="int8", value="int4")
    assert spec.append_bytes_per_token(fmt) == 30 * 3 * (68 + 36) == 9360
    assert spec.append_bytes_per_token(CacheFormat()) == 30 * 3 * 256 == 23040
    assert spec.append_bytes_per_token(replace(fmt, rotate=True)) == 9360
    assert spec.append_bytes_per_token(replace(fmt, keep_layers=2)) == 3 * (26 * 104 + 4 * 256) == 11184
    assert spec.append_bytes_per_token(replace(fmt, value="int4a")) == 30 * 3 * (68 + 40)
    assert spec.append_bytes_per_token(replace(fmt, layers={29: CacheFormat(key="fp8", value="f32")})) == (
        29 * 3 * 104 + 3 * (64 + 256)
    )


def test_latents_in_fp8_keep_their_rotary_elements() -> None:
    # vLLM's fp8_ds_mla: 512 fp8 and 64 rotary elements in bf16, here without its four f32 scales.
    fp8 = CacheFormat(key="fp8", value="bf16")
    assert Latent(rank=512, rope_dim=64).append_bytes(fp8) == 656 - 4 * 4
    assert Latent(rank=512, rope_dim=0).append_bytes(fp8) == 512
    assert Latent(rank=512, rope_dim=64).append_bytes(CacheFormat(key="int8")) == 18 * 34
    assert Compressed(rank=448, rope_dim=64, ratio=4).append_bytes(fp8) == (448 + 128) // 4
    plan = kvist.plan(model(Latent(rank=512, rope_dim=64)), format=fp8, tokens=10)
    assert plan.sequence_bytes[10] == 6400
    assert "the rotary elements of a latent in fp8 are stored in bf16" in plan.notes
    assert {row.what: row.formula for row in explain(plan)}["one latent vector"] == "512 x 8 bit + 64 x 16 bit"


def test_states_in_bf16() -> None:
    spec, bf16 = model(SSM, Parallel(parts=(OWN, SSM))), CacheFormat(state="bf16")
    assert spec.state_bytes() == 2 * (600 + 16000)
    assert spec.state_bytes(bf16) == 2 * (600 + 8000)
    states, own = groups_of(spec, bf16)
    assert (states.name, states.block_bytes, states.layers) == ("state-mamba2", 8600, (0, 1))
    assert isinstance(states.layer, State)
    assert states.layer.state_codec == "bf16"
    assert (own.name, own.format) == ("full", CacheFormat())
    plan = kvist.plan(spec, format=bf16)
    assert plan.to_dict()["layers"][0]["state_codec"] == "bf16"
    assert plan.to_dict()["format"] == {
        "key": "bf16", "value": "bf16", "state": "bf16", "text": "bf16/bf16, states bf16",
    }  # fmt: skip
    assert not plan.notes
    assert kvist.plan(model(OWN), format=bf16).notes == ("toy has no recurrent state that could be stored in bf16",)
    one = groups_of(model(SSM, SSM), CacheFormat(layers={1: bf16}))
    assert [(group.name, group.block_bytes) for group in one] == [("state-mamba2", 16600), ("state-mamba2.1", 8600)]


def test_kept_layers_are_the_first_and_the_last() -> None:
    fmt = CacheFormat(key="int8", value="int4", rotate=True, keep_layers=2)
    kept, rest = CacheFormat(), CacheFormat(key="int8", value="int4", rotate=True)
    assert [fmt.of_layer(index, 6) for index in range(6)] == [kept, kept, rest, rest, kept, kept]
    assert {fmt.computed_in("f32").of_layer(index, 4) for index in range(4)} == {CacheFormat(key="f32", value="f32")}
    ends, middle = groups_of(model(*[OWN] * 6), fmt)
    assert (ends.name, ends.layers, ends.format) == ("full-bf16", (0, 1, 4, 5), kept)
    assert (middle.name, middle.layers, middle.format) == ("full", (2, 3), rest)
    rows = kvist.plan(model(*[OWN] * 6), format=fmt).to_dict()["layers"]
    assert [(row["count"], row.get("format")) for row in rows] == [(4, {"key": "bf16", "value": "bf16"}), (2, None)]


def test_a_rotation_is_of_what_is_stored_in_few_bits() -> None:
    for key, value, turned in (("int8", "bf16", (True, False)), ("f16", "fp8", (False, True))):
        plain = CacheFormat(key=key, value=value, rotate=True).plain
        assert (plain.rotates_keys, plain.rotates_values) == turned
    assert CacheFormat(rotate=True).of_layer(0, 1) == CacheFormat()


@given(stored(), st.integers(0, 400))
def test_a_sequence_is_the_sum_of_its_layers(pair: tuple[ModelSpec, CacheFormat], tokens: int) -> None:
    spec, fmt = pair
    each = [(layer, fmt.of_layer(index, len(spec.layers))) for index, layer in enumerate(spec.layers)]
    assert all(plain.uniform for _, plain in each)
    assert spec.sequence_bytes(tokens, fmt) == sum(layer.bytes(tokens, plain) for layer, plain in each)
    assert spec.append_bytes_per_token(fmt) == sum(layer.append_bytes(plain) for layer, plain in each)
    assert spec.retained_bytes_per_token(fmt) == sum(layer.retained_bytes(plain) for layer, plain in each)
    assert spec.state_bytes(fmt) == sum(layer.state_bytes(plain) for layer, plain in each)
    crossed = sum(layer.cross_bytes_per_encoder_token(plain) for layer, plain in each)
    assert spec.cross_bytes_per_encoder_token(fmt) == crossed
    plan = kvist.plan(spec, format=fmt, tokens=tokens + 1)
    assert plan.sequence_bytes[tokens + 1] == spec.sequence_bytes(tokens + 1, fmt)
    assert sum(row.count for row in plan.layers) == len(spec.layers)
    assert sum(row.count * row.layer.bytes(tokens, row.format) for row in plan.layers) == spec.sequence_bytes(
        tokens, fmt
    )


@given(stored(), st.sampled_from([1, 16, 24]))
def test_groups_are_of_one_format_and_add_up(pair: tuple[ModelSpec, CacheFormat], block: int) -> None:
    spec, fmt = pair
    groups = groups_of(spec, fmt, block)
    assert len({group.name for group in groups}) == len(groups)
    assert all(group.format.uniform and group.format.state is None for group in groups)
    for group in groups:
        if not isinstance(group.layer, State):
            for index in group.layers:
                assert replace(fmt.of_layer(index, len(spec.layers)), state=None) == group.format
    tokens = 4 * 129 * 48 * 16 * 3
    whole = sum(
        group.block_bytes
        * (group.fixed_blocks or 0 if group.fixed_blocks is not None else tokens // group.block_tokens)
        for group in groups
        if group.layer.kind != "cross"
    )
    assert whole == spec.append_bytes_per_token(fmt) * tokens + spec.state_bytes(fmt)


@given(stored(), st.integers(1, 3))
def test_stages_store_their_own_layers_formats(pair: tuple[ModelSpec, CacheFormat], stages: int) -> None:
    spec, fmt = pair
    # A stage knows no memory of another's.
    spec = replace(spec, layers=tuple(layer for layer in spec.layers if not isinstance(layer, Shared)))
    count = len(spec.layers)
    fmt = CacheFormat(key=fmt.key, value=fmt.value, rotate=fmt.rotate, keep_layers=min(fmt.keep_layers, count // 2))
    machine = Machine(
        accelerator=None, devices=1, tp=1, pp=min(stages, count), memory=None, memory_source="", cache=2**30
    )
    cutting = Cutting(fmt=fmt, block_tokens=16, chunk=64)
    found = stages_of(spec, None, machine, cutting=cutting)
    assert sum(stage.spec.sequence_bytes(333, stage.fmt) for stage in found) == spec.sequence_bytes(333, fmt)
    read = sum(attending_of(spec, fmt, stage.spec.layers, tp=1, first=stage.layers.first).appended for stage in found)
    assert read == pytest.approx(float(spec.append_bytes_per_token(fmt)))
    for stage, part in zip(found, split_layers(count, len(found)), strict=True):
        for index in range(part.count):
            assert stage.fmt.of_layer(index, part.count) == fmt.of_layer(part.first + index, count)


@given(st.integers(1, 6).flatmap(lambda count: st.tuples(st.just(count), formats(count), formats(count))))
def test_what_a_format_says_of_itself_is_its_own(three: tuple[int, CacheFormat, CacheFormat]) -> None:
    count, one, other = three
    if str(one) == str(other):
        assert [one.of_layer(index, count) for index in range(count)] == [
            other.of_layer(index, count) for index in range(count)
        ]
    assert hash(one) == hash(replace(one))
    assert replace(one, layers=dict(random.sample(list(one.layers), len(one.layers)))) == one


@pytest.mark.parametrize(
    ("fmt", "says"),
    [
        (CacheFormat(key="int8", value="int4"), "int8/int4"),
        (CacheFormat(key="int8", value="int4", rotate=True), "int8/int4 rotated"),
        (
            CacheFormat(key="int8", value="int4", rotate=True, keep_layers=2),
            "int8/int4 rotated, 2 + 2 layers bf16",
        ),
        (
            CacheFormat(key="int8", value="int8", layers={3: CacheFormat(key="f16", value="int4a")}, state="bf16"),
            "int8/int8, layer 3 f16/int4a, states bf16",
        ),
    ],
)
def test_formats_in_words(fmt: CacheFormat, says: str) -> None:
    assert str(fmt) == says


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"key": "int3"}, "key: 'int3' is not a codec; choose one of f32, f16, bf16, fp8, int8, int4, int4a"),
        ({"keep": "x"}, "keep: 'x' is not a codec"),
        ({"state": "int8"}, "state: 'int8' is not a codec for recurrent states; choose one of f32, f16, bf16"),
        ({"rotate": 1}, "rotate: 1; True or False"),
        ({"keep_layers": -1}, "keep_layers: -1; a whole number of layers at either end, 0 or more"),
        ({"keep_layers": True}, "keep_layers: True; a whole number"),
        ({"layers": {-1: CacheFormat()}}, "layers: -1; layers are counted from 0"),
        ({"layers": {1: "bf16"}}, "layers: layer 1 is in bf16; give it a plain CacheFormat"),
        ({"layers": {1: CacheFormat(keep_layers=1)}}, r"layers: layer 1 is in bf16/bf16, 1 \+ 1 layers bf16; give"),
    ],
)
def test_what_no_format_can_be(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        CacheFormat(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fmt", "says"),
    [
        (CacheFormat(keep_layers=2), "keep_layers: 2 at either end; toy has 3 layers: at most 1"),
        (CacheFormat(layers={3: CacheFormat()}), "layers: 3; toy has 3 layers, 0 to 2"),
        (CacheFormat(value="int4"), "value: codec int4 stores groups of 32 elements; a width of 80 is not a multiple"),
        (CacheFormat(key="int8"), "key: codec int8 stores groups of 32 elements; a width of 80 is not a multiple"),
    ],
)
def test_what_a_model_cannot_be_stored_in(fmt: CacheFormat, says: str) -> None:
    spec = model(*[Attention(kv_heads=1, key_dim=80, value_dim=80)] * 3)
    for ask in (
        spec.append_bytes_per_token,
        lambda fmt: groups_of(spec, fmt),
        lambda fmt: kvist.plan(spec, format=fmt),
    ):
        with pytest.raises(InputError, match=says):
            list(groups_of(spec, fmt)[0].head_run_bytes) if ask(fmt) else None


# -- as commands write them ---------------------------------------------------------------------------------------


PARSER = cache(build_parser)


def options(words: list[str]) -> argparse.Namespace:
    return PARSER().parse_args(["plan", "smollm2-135m", *words])


@given(PLAIN, st.integers(0, 9), st.sampled_from(KEEP_CODECS), st.dictionaries(st.integers(0, 29), PLAIN, max_size=3))
def test_options_say_a_whole_format(plain: CacheFormat, kept: int, keep: str, own: dict[int, CacheFormat]) -> None:
    layers = {index: replace(fmt, rotate=plain.rotate, state=None) for index, fmt in own.items()}
    fmt = replace(plain, rotate=plain.rotates, keep_layers=kept, keep=keep if kept else None, layers=layers)
    if not fmt.rotate:
        fmt = replace(fmt, layers={index: replace(each, rotate=False) for index, each in layers.items()})
    assert cache_format(options(list(options_of(fmt)))) == fmt


@pytest.mark.parametrize(
    ("words", "format"),
    [
        ("", {"key": "bf16", "value": "bf16"}),
        ("--rotate", {"key": "bf16", "value": "bf16"}),
        (
            "--key int8 --value int4 --rotate",
            {"key": "int8", "value": "int4", "rotate": True, "text": "int8/int4 rotated"},
        ),
        (
            "--value fp8 --keep-layers 2 --layer-format 7=f32 --state f16",
            {
                "key": "bf16", "value": "fp8", "keep_layers": 2, "keep": "bf16", "state": "f16",
                "layers": {"7": {"key": "f32", "value": "f32"}},
                "text": "bf16/fp8, layer 7 f32/f32, 2 + 2 layers bf16, states f16",
            },
        ),
    ],
)  # fmt: skip
def test_plan_and_simulate_say_the_format(
    words: str, format: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "smollm2-135m", "--json", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == format
    trace = ["simulate", "--mean-length", "20", "--requests", "3", "--model", "smollm2-135m", "--gpu", "L4", "--json"]
    assert main([*trace, *words.split()]) == 0
    told = json.loads(capsys.readouterr().out)["format"]
    assert told == format.get("text", f"{format['key']}/{format['value']}")


def test_the_engines_flags_ask_for_the_planned_format() -> None:
    fmt = CacheFormat(key="int8", value="int4", keep_layers=2, layers={9: CacheFormat(value="int8")})
    account = kvist.plan("smollm2-135m", format=fmt, cache_memory="64MiB", engine="kvist").engine
    assert account is not None
    flags = account.to_dict()["flags"]
    assert flags[flags.index("--key") : flags.index("--max-context")] == list(options_of(fmt))
    assert [group.name for group in account.groups] == ["full-bf16", "full", "full-bf16-int8"]


def test_what_other_engines_cannot_store_is_said() -> None:
    fmt = CacheFormat(key="fp8", value="fp8", keep_layers=2)
    plan = kvist.plan("llama-3-8b", format=fmt, cache_memory="8GiB", engine="vllm")
    assert plan.engine is not None
    note = "vllm stores all layers as fp8/fp8; what is said outside its account is in fp8/fp8, 2 + 2 layers bf16"
    assert note in plan.engine.notes
    alike = kvist.plan("llama-3-8b", format=replace(fmt, keep_layers=0), cache_memory="8GiB", engine="vllm")
    assert alike.engine is not None
    assert alike.engine.num_blocks == plan.engine.num_blocks
    assert note not in alike.engine.notes


def test_llama_cpp_has_a_type_for_each_codec_with_groups() -> None:
    for codec, name in (("int8", "q8_0"), ("int4", "q4_0"), ("int4a", "q4_1")):
        fmt = CacheFormat(key=codec, value=codec)
        plan = kvist.plan("llama-3-8b", format=fmt, cache_memory="8GiB", context=8192, engine="llama.cpp")
        assert plan.engine is not None
        assert plan.engine.settings["type_k"] == plan.engine.settings["type_v"] == name
        assert plan.engine.sequence_bytes == plan.spec.sequence_bytes(8192, fmt)


def test_models_that_cannot_be_stored_so_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "opt", "--value", "int8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "opt-2.7b" not in [row["name"] for row in answer["rows"]]
    assert [entry["name"] for entry in answer["left_out"]] == ["opt-2.7b"]
    assert "a width of 80 is not a multiple" in answer["left_out"][0]["why"]
    assert main(["models", "opt", "--value", "int8"]) == 0
    assert "bf16/int8 cannot store opt-2.7b" in capsys.readouterr().out


# -- what was measured of them ------------------------------------------------------------------------------------


ENTRY: dict[str, Any] = {
    "model": "x", "key": "int8", "value": "int8", "rotate": False, "kl": 1, "top1_agreement": 1,
    "perplexity_ratio": 1.0, "tokens": 1,
}  # fmt: skip


def test_formats_are_listed_with_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Fidelity(
            model=name, key=key, value=value, rotate=rotate, kl=kl, top1_agreement=0.97, perplexity_ratio=1.01,
            tokens=4096,
        )
        for name, key, value, rotate, kl in (
            ("smollm2-135m", "int8", "int8", False, 0.00123), ("smollm2-135m", "int8", "int8", True, 0.00045),
            ("smollm2-135m", "int8", "int4", True, 0.0044), ("gemma-3-270m", "int4", "int4", False, 0.5),
        )
    ]  # fmt: skip
    monkeypatch.setattr("kvist.report.listings.measured", lambda: tuple(found))
    assert main(["formats", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fidelity"] == [asdict(entry) for entry in found]
    rows = {row["name"]: row for row in answer["rows"]}
    assert (rows["int8"]["kl"], rows["int8"]["kl_rotated"], rows["int4"]["kl"]) == (0.00123, 0.00045, None)
    assert {name: row["bits_per_element"] for name, row in rows.items()} == {
        "f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "int8": 8.5, "int4": 4.5, "int4a": 5, "int4c": 5,
    }  # fmt: skip
    assert main(["formats"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    ours, theirs = out[out.index("Measured: smollm2-135m, 4,096") :].split("Measured: gemma-3-270m, 4,096")
    for told in ("0.0012", "0.00045", "int8/int4", "0.0044", "97.0 %", "+1.00 %"):
        assert told in ours
    assert "int4/int4" in theirs
    assert "0.5" in theirs
    assert "0.5" not in ours


def test_what_was_measured_is_of_formats_that_there_are() -> None:
    for entry in measured():
        assert CacheFormat(key=entry.key, value=entry.value, rotate=entry.rotate)
        assert entry.kl >= 0
        assert 0 <= entry.top1_agreement <= 1
        assert entry.perplexity_ratio > 0
        assert entry.tokens > 0


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"model": "x"}, "key"),
        (ENTRY | {"value": "int9"}, "value: 'int9' is not a codec"),
        (ENTRY | {"kl": "much"}, "kl: 'much' is of another type"),
        (ENTRY | {"tokens": True}, "tokens: True is of another type"),
        (ENTRY | {"more": 1}, "more is no field"),
    ],
)
def test_what_is_measured_otherwise_is_refused(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(BadFile, match=says):
        read_measured(path)


# -- what is shared -----------------------------------------------------------------------------------------------

WAYS = [
    CacheFormat(key="int8", value="int4"),
    CacheFormat(key="int8", value="int4a"),
    CacheFormat(key="int4", value="int8"),
    CacheFormat(key="int8", value="int4", rotate=True),
    CacheFormat(key="int8", value="int4", keep_layers=1),
    CacheFormat(key="int8", value="int4", keep_layers=1, keep="f32"),
    CacheFormat(key="int8", value="int4", keep_layers=2),
    CacheFormat(key="int8", value="int4", layers={3: CacheFormat()}),
    CacheFormat(key="int8", value="int4", layers={4: CacheFormat()}),
    CacheFormat(key="int8", value="int4", layers={3: CacheFormat(key="int8", value="int4", rotate=True)}),
    CacheFormat(key="int8", value="int4", state="bf16"),
    CacheFormat(key="int8", value="int4", state="f16"),
]


def test_a_prefix_is_found_in_its_own_format_alone() -> None:
    """In the tree, and by the names under which tiers and other replicas keep blocks."""
    keys = [PrefixKey(model="toy", format=str(fmt)) for fmt in WAYS]
    digests = Digests(16)
    assert len({digests.root(key) for key in keys}) == len(WAYS)
    groups = groups_of(model(*[OWN] * 6), WAYS[0])
    cache = CacheManager(groups, ArenaLayout.of(groups, 2**22))
    prompt = list(range(64))
    first = cache.begin(prompt, keys[0])
    cache.commit(first, cache.reserve(first, 64).limit)
    cache.release(first)
    for key in keys[1:]:
        other = cache.begin(prompt, key)
        assert cache.reserve(other, 64).hit_tokens == 0
        cache.release(other, keep=False)
    assert cache.reserve(cache.begin(prompt, keys[0]), 64).hit_tokens == 48
