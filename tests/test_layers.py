"""What every kind of layer answers, and that published models can be written with them to the byte."""

import json
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_layers import LAYERS, crosses

from kvist.errors import InputError
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

BF16 = CacheFormat()
FORMATS = st.builds(CacheFormat, key=st.sampled_from(["f32", "bf16", "fp8", "int8", "int4"]), value=st.just("int8"))
MODELS = Path(__file__).parents[2] / "shared" / "data" / "expected" / "models.json"
KIB = 1024


def model(*layers: Layer, **fields: Any) -> ModelSpec:
    return ModelSpec(name="toy", source="test", layers=layers, max_context=4096, **fields)


def pieces(layer: Layer) -> list[Layer]:
    return [piece for part in layer.parts for piece in pieces(part)] if isinstance(layer, Parallel) else [layer]


def period(layer: Layer) -> int:
    """Tokens after which the bytes grow as they did before."""
    tokens = 1
    for piece in pieces(layer):
        indexer = getattr(piece, "indexer", None)
        tokens = lcm(tokens, getattr(piece, "ratio", 1) * (indexer.pool if indexer else 1))
    return tokens


def full_at(layer: Layer) -> int:
    """Tokens that fill every window and chunk."""
    limits = [getattr(piece, name, None) or 0 for piece in pieces(layer) for name in ("window", "chunk")]
    return max(limits, default=0)


@given(LAYERS, st.integers(0, 400), FORMATS)
def test_bytes_grow_with_the_tokens_and_by_no_more_than_append(layer: Layer, tokens: int, fmt: CacheFormat) -> None:
    step = period(layer)
    assert layer.bytes(0, fmt) == layer.state_bytes(fmt)
    assert layer.bytes(tokens, fmt) <= layer.bytes(tokens + 1, fmt)
    grown = layer.bytes(tokens + step, fmt) - layer.bytes(tokens, fmt)
    assert step * layer.retained_bytes(fmt) <= grown <= step * layer.append_bytes(fmt)
    assert layer.bytes(tokens, fmt) - layer.state_bytes(fmt) <= tokens * layer.append_bytes(fmt)


@given(LAYERS, st.integers(0, 300), FORMATS)
def test_past_every_window_a_token_costs_what_is_retained(layer: Layer, beyond: int, fmt: CacheFormat) -> None:
    tokens, step = full_at(layer) + beyond, period(layer)
    grown = layer.bytes(tokens + step, fmt) - layer.bytes(tokens, fmt)
    assert grown == step * layer.retained_bytes(fmt)


@given(LAYERS, FORMATS)
def test_while_nothing_is_full_a_token_costs_append(layer: Layer, fmt: CacheFormat) -> None:
    step = period(layer)
    if all(getattr(p, n, None) is None or getattr(p, n) >= step for p in pieces(layer) for n in ("window", "chunk")):
        assert layer.bytes(step, fmt) - layer.state_bytes(fmt) == step * layer.append_bytes(fmt)


@given(LAYERS | crosses(), st.integers(0, 400), FORMATS)
def test_a_layer_is_the_sum_of_what_it_stores(layer: Layer, tokens: int, fmt: CacheFormat) -> None:
    stored = layer.stored
    assert sum(piece.bytes(tokens, fmt) for piece in stored) == layer.bytes(tokens, fmt)
    assert sum(piece.append_bytes(fmt) for piece in stored) == layer.append_bytes(fmt)
    assert sum(piece.retained_bytes(fmt) for piece in stored) == layer.retained_bytes(fmt)
    assert sum(piece.state_bytes(fmt) for piece in stored) == layer.state_bytes(fmt)
    crossed = sum(piece.cross_bytes_per_encoder_token(fmt) for piece in stored)
    assert crossed == layer.cross_bytes_per_encoder_token(fmt)
    assert all(piece.stored == (piece,) for piece in stored)


@given(LAYERS, FORMATS)
def test_rates_are_integers_where_they_are_whole(layer: Layer, fmt: CacheFormat) -> None:
    for rate in (layer.append_bytes(fmt), layer.retained_bytes(fmt), layer.indexer_bytes(fmt)):
        assert isinstance(rate, int) or (isinstance(rate, Fraction) and rate.denominator > 1)


def test_states_keep_their_types_whatever_the_format() -> None:
    # One layer of Qwen3.5-27B: 3 columns of 10,240 channels in bf16, 48 heads of 128 x 128 in f32.
    state = State(name="gated-delta", conv_elements=3 * 10240, state_elements=48 * 128 * 128, conv_columns=3)
    for fmt in (BF16, CacheFormat(key="int4", value="int4"), CacheFormat(key="f32", value="f32")):
        assert state.bytes(10**6, fmt) == state.state_bytes(fmt) == 3 * 10240 * 2 + 786432 * 4
    assert State(name="lightning", state_elements=8, state_codec="bf16").state_bytes(BF16) == 16


def test_compressed_entries_are_whole() -> None:
    layer = Compressed(rank=448, rope_dim=64, ratio=4, window=128, indexer=Indexer(heads=1, dim=128))
    assert [layer.bytes(tokens, BF16) for tokens in (3, 4, 7, 8)] == [
        3 * 1024, 4 * 1024 + 1280, 7 * 1024 + 1280, 8 * 1024 + 2 * 1280,
    ]  # fmt: skip
    assert layer.append_bytes(BF16) == 1024 + 320
    odd = Compressed(rank=448, rope_dim=64, ratio=3)
    assert odd.append_bytes(BF16) == odd.retained_bytes(BF16) == Fraction(1024, 3)
    pooled = Latent(rank=512, rope_dim=0, indexer=Indexer(heads=1, dim=128, pool=4))
    assert (pooled.bytes(7, BF16), pooled.append_bytes(BF16)) == (7 * 1024 + 256, 1024 + 64)


# Published tables leave indexers out; their append in KiB, then the slope past every window, which has them.
PUBLISHED = [
    ("DeepSeek-V3", [Latent(rank=512, rope_dim=64)] * 61, 68.625, 68.625),
    ("DeepSeek-V3.2", [Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128))] * 61, 68.625, 83.875),
    ("GLM-5", [Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128))] * 78, 87.75, 107.25),
    ("Llama-3-8B", [Attention(kv_heads=8, key_dim=128, value_dim=128)] * 32, 128, 128),
    (
        "Llama-4-Maverick",
        [
            Attention(kv_heads=8, key_dim=128, value_dim=128, chunk=None if index % 4 == 3 else 8192)
            for index in range(48)
        ],
        192,
        48,
    ),
    (
        "MiMo-V2-Flash",
        [Attention(kv_heads=8, key_dim=192, value_dim=128, window=128)] * 39
        + [Attention(kv_heads=4, key_dim=192, value_dim=128)] * 9,
        217.5,
        22.5,
    ),
    (
        "Kimi-Linear",
        [Latent(rank=512, rope_dim=64)] * 7 + [State(name="kda", conv_elements=36864, state_elements=524288)] * 20,
        7.875,
        7.875,
    ),
]


@pytest.mark.parametrize(("name", "layers", "append", "retained"), PUBLISHED, ids=[case[0] for case in PUBLISHED])
def test_published_costs_of_a_token(name: str, layers: list[Layer], append: float, retained: float) -> None:
    spec = model(*layers)
    published = spec.append_bytes_per_token(BF16) - spec.indexer_bytes_per_token(BF16)
    assert published == append * KIB
    assert spec.retained_bytes_per_token(BF16) == retained * KIB


def layers_of(case: dict[str, Any]) -> list[Layer]:
    """The layers of a case of the shared answers, from its components."""
    layers: list[Layer] = []
    parts = {part["kind"] + (f"/{part['ratio']}" if "ratio" in part else ""): part for part in case["components"]}
    window = parts.get("sliding", parts.get("chunked"))
    if "compressed/4" in parts:
        assert window is not None
        latent = {"rank": 448, "rope_dim": 64, "window": window["window"]}
        for name, part in parts.items():
            if name.startswith("compressed/"):
                indexed = f"compressed_indexer/{part['ratio']}" in parts
                indexer = Indexer(heads=1, dim=128) if indexed else None
                layers += [Compressed(**latent, ratio=part["ratio"], indexer=indexer)] * part["layers"]
        return layers + [Latent(**latent)] * (window["layers"] - len(layers))
    for name, part in parts.items():
        width = part["bytes_per_token_per_layer"] // 4
        if name == "mla":
            indexer = Indexer(heads=1, dim=128) if "indexer_key" in parts else None
            layers += [Latent(rank=512, rope_dim=2 * width - 512, indexer=indexer)] * part["layers"]
        elif name != "indexer_key":
            limit = {"sliding": "window", "chunked": "chunk"}.get(name)
            limits = {limit: part["window"]} if limit else {}
            layers += [Attention(kv_heads=1, key_dim=width, value_dim=width, **limits)] * part["layers"]
    if (state := case["state"]) is not None:
        columns = state["conv_kernel"] - 1
        conv = columns * state["conv_dim"]
        one = State(name="any", conv_elements=conv, conv_columns=columns, state_elements=state["ssm_elems"])
        layers += [one] * state["layers"]
    return layers


@pytest.mark.skipif(not MODELS.is_file(), reason=f"{MODELS} is not there")
def test_the_shared_answers_can_be_written_as_layers() -> None:
    compared = 0
    for case in json.loads(MODELS.read_text())["cases"]:
        if "components" not in case:
            continue
        spec = model(*layers_of(case))
        assert spec.append_bytes_per_token(BF16) == case["append_bytes_per_token"], case["id"]
        assert spec.retained_bytes_per_token(BF16) == case["retained_bytes_per_token"], case["id"]
        assert spec.state_bytes() == case["state_bytes"], case["id"]
        for tokens, size in case["total_bytes"].items():
            assert spec.sequence_bytes(int(tokens), BF16) == size, (case["id"], tokens)
        kernel_columns = case["alternates"].get("state_conv_k_columns_ssm_fp32 (transformers)")
        if kernel_columns is not None:
            more = sum(s.conv_elements // s.conv_columns * 2 for s in spec.layers if isinstance(s, State))
            assert spec.state_bytes() + more == kernel_columns, case["id"]
        compared += 1
    assert compared >= 29


def test_an_encoder_is_apart() -> None:
    # BART-large: 12 layers of 16 heads of 64, for the decoder's own tokens and again for the encoder's.
    own = Attention(kv_heads=16, key_dim=64, value_dim=64)
    bart = model(*[Parallel(parts=(own, Cross(kv_heads=16, key_dim=64, value_dim=64)))] * 12)
    assert bart.append_bytes_per_token(BF16) == bart.cross_bytes_per_encoder_token(BF16) == 49152
    assert bart.cross_bytes(BF16) is None
    assert bart.sequence_bytes(100, BF16) == 100 * 49152
    assert bart.cross_bytes(BF16, encoder_tokens=777) == 777 * 49152
    fixed = model(Cross(kv_heads=1, key_dim=64, value_dim=64, encoder_tokens=1500))
    assert fixed.cross_bytes(BF16, encoder_tokens=7) == fixed.cross_bytes(BF16) == 1500 * 256
    assert model(own).cross_bytes(BF16) == 0


def test_draft_layers_are_counted_nowhere_else() -> None:
    own = Attention(kv_heads=1, key_dim=64, value_dim=64)
    spec = model(own, draft_layers=(own, own))
    assert spec.draft_append_bytes_per_token(BF16) == 2 * 256
    assert spec.append_bytes_per_token(BF16) == 256
    assert spec.sequence_bytes(10, BF16) == 2560


@pytest.mark.parametrize("source", [-1, 1, 2, 3])
def test_a_shared_memory_must_be_there(source: int) -> None:
    own = Attention(kv_heads=1, key_dim=64, value_dim=64)
    assert model(own, Shared(source=0)).append_bytes_per_token(BF16) == 256
    with pytest.raises(InputError, match=rf"layers\[2\]: reads the memory of layer {source}; of the 3 layers"):
        model(own, Nothing(), Parallel(parts=(own, Shared(source=source))) if source != 2 else Shared(source=2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Attention(kv_heads=1, key_dim=1, value_dim=1, window=2, chunk=3), "window: 2 and chunk: 3 are both"),
        (lambda: State(name="x", state_elements=1, state_codec="f64"), "state_codec: 'f64' is not a codec"),
        (lambda: State(name="x", state_elements=1, conv_codec="x"), "conv_codec: 'x' is not a codec"),
        (lambda: State(name="x"), "a state of 0 bytes"),
    ],
)
def test_what_cannot_be_a_layer_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    "layer",
    [
        Attention(kv_heads=1, key_dim=80, value_dim=64),
        Latent(rank=512, rope_dim=16),
        Compressed(rank=512, rope_dim=16, ratio=4),
        Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=48)),
        Cross(kv_heads=1, key_dim=48, value_dim=64),
    ],
)
def test_widths_that_a_codec_cannot_group_are_refused(layer: Layer) -> None:
    spec = model(layer)
    assert spec.append_bytes_per_token(BF16) + spec.cross_bytes_per_encoder_token(BF16) > 0
    with pytest.raises(InputError, match=r"codec int8 stores groups of 32 elements; a width of \d+ is not a multiple"):
        spec.append_bytes_per_token(CacheFormat(key="int8")) + spec.cross_bytes_per_encoder_token(
            CacheFormat(key="int8")
        )
