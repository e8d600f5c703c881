"""Whatever a file holds, it is answered or refused with a message; nothing else happens, and not for long."""

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_inputs
import pytest
from gguf_files import entry, header, metadata_header, tensor, text

from kvist.errors import KvistError
from kvist.planning.planner import plan
from kvist.spec.model import ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_some_hundred_broken_inputs(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    inputs = fuzz_inputs.KINDS[kind](random.Random(f"quick {kind}"))
    answers = {fuzz_inputs.read_one(next(inputs), tmp_path) for _ in range(300)}
    assert answers == {"answered", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_ten_thousand_broken_inputs_in_bounded_time_and_memory(kind: str) -> None:
    command = [sys.executable, str(Path(fuzz_inputs.__file__)), "--seed", "2026", "--count", "10000", "--kind", kind]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["failures"] == []
    assert found["answered"] + found["refused"] == 10_000
    assert found["answered"] > 300
    # Seconds of processor time, and bytes beyond what is loaded once.
    assert found["slowest"] < 1
    assert found["grown_bytes"] < 200 * 2**20


def config(directory: Path, content: bytes) -> Path:
    path = directory / "config.json"
    path.write_bytes(content)
    return path


def with_more(more: str) -> bytes:
    return f"{json.dumps(LLAMA)[:-1]}, {more}}}".encode()


def safetensors(directory: Path, content: bytes) -> Path:
    config(directory, json.dumps(LLAMA).encode())
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    return directory


def gguf(directory: Path, content: bytes, zeros: int = 100) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(content)
    os.truncate(path, len(content) + zeros)
    return path


def index(directory: Path, tensors: int) -> Path:
    config(directory, json.dumps(LLAMA).encode())
    placed = {f"model.layers.{number}.{'y' * 60}": "a.safetensors" for number in range(tensors)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


def many_strings(count: int) -> bytes:
    return header(text("a.key") + struct.pack("<IIQ", 9, 8, count), keys=1)


NO_TENSOR = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
# Sizes at which a careless reader takes minutes or gigabytes.
HOSTILE: dict[str, Callable[[Path], Path]] = {
    "keys": lambda at: config(at, with_more(", ".join(f'"k{number}": 1' for number in range(60_000)))),
    "values": lambda at: config(at, with_more(f'"a": [{"[]," * 2**20}0]')),
    "layers": lambda at: config(at, json.dumps(LLAMA | {"num_hidden_layers": 10_000}).encode()),
    "kinds": lambda at: config(at, json.dumps(LLAMA | {"layer_types": ["full_attention"] * 100_000}).encode()),
    "pattern": lambda at: config(at, with_more(f'"hybrid_override_pattern": "{"M*-" * 2**20}"')),
    "word": lambda at: config(at, json.dumps(LLAMA | {"model_type": "x" * 4_000_000}).encode()),
    "depth": lambda at: config(at, b'{"text_config":' * 900 + b"{}" + b"}" * 900),
    "digits": lambda at: config(at, with_more(f'"a": [{",".join(["9" * 4000] * 900)}]')),
    "emoji": lambda at: config(at, with_more(f'"a": "{chr(0x1F600) * 2**19}"')),
    "zeros": lambda at: gguf(at, b"GGUF" + struct.pack("<IQQ", 3, 9, 9), 2**30),
    "strings": lambda at: gguf(at, many_strings(2**21 - 1), 2**24),
    "more strings": lambda at: gguf(at, many_strings(2**40), 2**24),
    "tensors": lambda at: gguf(at, header(*[tensor(f"t{i}", [0]) for i in range(2**15)], tensors=2**15)),
    "text": lambda at: gguf(at, header(*[entry(f"k{i}", "é" * 2**19) for i in range(20)], keys=20)),
    "entries": lambda at: gguf(
        at, metadata_header("qwen3", {"block_count": 10_000}) + entry("a", [1]), 2**28
    ),
    "header": lambda at: safetensors(at, json.dumps({f"t{i}": NO_TENSOR for i in range(60_000)}).encode()),
    "shape": lambda at: safetensors(at, json.dumps({"t": NO_TENSOR | {"shape": [0] * 300_000}}).encode()),
    "index": lambda at: index(at, 300_000),
}  # fmt: skip


def read_hostile(name: str, directory: Path) -> None:
    path = HOSTILE[name](directory)
    try:
        answer = json.dumps(plan(ModelSpec.read(path), cache_memory="64MiB").to_dict())
    except KvistError as error:
        answer = str(error)
    assert len(answer) < 20_000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sizes(name: str, tmp_path: Path) -> None:
    read_hostile(name, tmp_path)


MEASURE = """
import resource, sys, tempfile, time
from pathlib import Path
import test_fuzz
directory = Path(tempfile.mkdtemp())
path = test_fuzz.HOSTILE[sys.argv[1]](directory)
test_fuzz.HOSTILE["again"] = lambda at: path
unit = 1 if sys.platform == "darwin" else 1024
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
test_fuzz.read_hostile("again", directory)
print(time.process_time() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sizes_take_less_than_a_second_and_200_mib(name: str) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", MEASURE, name]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": here})
    seconds, grown = map(float, answer.stdout.split())
    assert seconds < 1
    assert grown < 200 * 2**20
