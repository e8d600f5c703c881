"""Whatever a file holds, it is read or refused with a message; nothing else happens."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf_files import GEMMA3, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist.errors import KvistError
from kvist.planning.planner import plan
from kvist.spec.gguf import read_gguf
from kvist.spec.gguf.config import config_of
from kvist.spec.known import KNOWN
from kvist.spec.read import read_description
from kvist.spec.safetensors import read_header

QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

GEMMA = {"model_type": "gemma3", "text_config": dict(KNOWN["gemma-3-270m"].config), "eos_token_id": [1, 106]}
CONFIGS: list[dict[str, Any]] = [
    dict(KNOWN["smollm2-135m"].config),
    dict(KNOWN["smollm2-135m"].config) | {"model_type": "mistral", "sliding_window": 4096},
    dict(KNOWN["smollm2-135m"].config) | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
    dict(KNOWN["smollm2-135m"].config) | {"model_type": "qwen3"},
    GEMMA,
]
KEYS = sorted(
    {*GEMMA, *(key for config in CONFIGS for key in config), "layer_types", "rope_parameters", "architectures"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "llama", "gemma3", "default"]),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)


def price(config: dict[str, Any]) -> None:
    spec = read_description(config, name="fuzz")
    answer = plan(spec, cache_memory="64MiB")
    json.dumps(answer.to_dict(), allow_nan=True)


@QUICK
@given(st.sampled_from(CONFIGS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3), st.booleans())
def test_mutated_configurations(config: dict[str, Any], changes: dict[str, Any], inner: bool) -> None:
    if inner and "text_config" in config:
        changes = {"text_config": config["text_config"] | changes}
    with suppress(KvistError):
        price({**config, **changes})


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("fuzz") / "gemma.gguf", architecture="gemma3", keys=GEMMA3)
    return path.read_bytes()[: read_gguf(path).data_start]


@QUICK
@given(st.data())
def test_mutated_gguf_headers(gguf_bytes: bytes, data: st.DataObject) -> None:
    mutated = bytearray(gguf_bytes[: data.draw(st.integers(0, len(gguf_bytes)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if mutated:
            mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    with suppress(KvistError):
        price(config_of(read_gguf(bytes(mutated), name="fuzz")).config)


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8", ""]) | VALUES,
        "shape": st.lists(st.integers(0, 9), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(0, 99), min_size=2, max_size=2) | VALUES,
    },
)


@QUICK
@given(st.dictionaries(st.text(max_size=4), ENTRY | VALUES, max_size=3), st.integers(0, 400), st.binary(max_size=16))
def test_mutated_safetensors_headers(header: dict[str, Any], cut: int, tail: bytes) -> None:
    text = json.dumps(header).encode()
    data = (len(text).to_bytes(8, "little") + text)[: len(text) + 8 - min(cut, len(text)) if cut < 100 else None] + tail
    with suppress(KvistError):
        read_header(data, name="fuzz", size=len(data))


def test_a_hostile_header_of_a_whole_file_is_refused_at_once(tmp_path: Path) -> None:
    # A file of zeros after an honest head: every count in it must be held against the bytes that are there.
    path = tmp_path / "zeros.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (9).to_bytes(8, "little") * 2 + bytes(2**20))
    with pytest.raises(KvistError, match="empty"):
        read_gguf(path)
