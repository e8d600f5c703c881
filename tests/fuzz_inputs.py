"""Broken descriptions of models, and a runner that reads them: an answer or a refusal, in bounded time and memory.

Everything follows from a seed. Configurations are published ones from the shared folder, where it is there, and a few
of our own; GGUF headers are made for every architecture. Each is changed in one to four places, in its values or in
its bytes, or cut.

Run alone, as the slow test does, this prints what it found as JSON::

    python tests/fuzz_inputs.py --seed 0 --count 10000
"""

import argparse
import copy
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_files import metadata_header
from gguf_models import keys_of

from kvist.errors import KvistError
from kvist.spec.families import FAMILIES
from kvist.spec.gguf.architectures import ARCHITECTURES
from kvist.spec.known import KNOWN
from kvist.spec.model import ModelSpec

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "configs"


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input: how it came about, the file's name, its bytes, and zeros behind them."""

    label: str
    name: str
    data: bytes
    zeros: int = 0


def base_configs() -> list[tuple[str, dict[str, Any]]]:
    own = [(name, dict(model.config)) for name, model in KNOWN.items()]
    files = sorted(PUBLISHED.glob("*/*.json"))
    return own + [(path.stem, json.loads(path.read_bytes())) for path in files]


NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    127,
    128,
    4096,
    2**31,
    2**40,
    2**63,
    10**30,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
)
WORDS = (
    "",
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "mamba",
    "M*-E",
    "LLLG",
    "a" * 5000,
    "\ud800",
    "é\0",
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [1] * 3, ["full_attention"] * 60, {"a": {"b": [1, None]}})


def value(dice: random.Random, old: Any) -> Any:
    """Something that is near to the old value, or nothing like it."""
    match dice.randrange(8):
        case 0 | 1 if isinstance(old, (int, float)) and not isinstance(old, bool):
            return dice.choice([old + 1, old - 1, old * 2, -old, old / 3, str(old), [old]])
        case 2 | 3 if isinstance(old, list):
            shorter = old[: dice.randrange(len(old) + 1)]
            return dice.choice([shorter, old * 2, [*old, dice.choice(NUMBERS)], dice.sample(old, len(old)), old[::-1]])
        case 4:
            return dice.choice(WORDS)
        case 5:
            return copy.deepcopy(dice.choice(OTHERS))
        case 6:
            return [dice.choice(NUMBERS) for _ in range(dice.randrange(100))]
        case _:
            return dice.choice(NUMBERS)


def changed(dice: random.Random, config: dict[str, Any], donors: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """A copy with one to four changes, anywhere in it."""
    config = copy.deepcopy(config)
    for _ in range(dice.randint(1, 4)):
        inner = config
        while inner and dice.random() < 0.5:
            below = [part for part in inner.values() if isinstance(part, dict) and part]
            if not below:
                break
            inner = dice.choice(below)
        if not inner:
            continue
        key = dice.choice(list(inner))
        match dice.randrange(6):
            case 0:
                del inner[key]
            case 1:
                inner["model_type"] = dice.choice(list(FAMILIES))
            case 2:
                donor = dice.choice(donors)[1]
                taken = dice.choice(list(donor))
                inner[taken] = copy.deepcopy(donor[taken])
            case 3:
                inner[key] = copy.deepcopy(inner[dice.choice(list(inner))])
            case _:
                inner[key] = value(dice, inner[key])
    return config


def spoiled(dice: random.Random, data: bytes) -> bytes:
    """The bytes cut, or with some of them changed, left out or put in twice."""
    broken = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(broken) + 1)
        match dice.randrange(5):
            case 0:
                del broken[at:]
            case 1:
                broken[at : at + 1] = bytes([dice.randrange(256)])
            case 2:
                broken[at : at + 8] = dice.choice([0, 1, 255, 2**16, 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
            case 3:
                del broken[at : at + dice.randrange(1, 64)]
            case _:
                broken[at:at] = broken[at : at + dice.randrange(1, 64)]
    return bytes(broken)


def config_inputs(dice: random.Random) -> Iterator[Input]:
    bases = base_configs()
    while True:
        name, config = dice.choice(bases)
        broken = changed(dice, config, bases)
        data = json.dumps(broken).encode()
        if dice.random() < 0.1:
            data = spoiled(dice, data)
        yield Input(label=name, name="config.json", data=data)


def gguf_inputs(dice: random.Random) -> Iterator[Input]:
    while True:
        architecture = dice.choice(list(ARCHITECTURES))
        keys = keys_of(architecture)
        for _ in range(dice.randrange(4)):
            key = dice.choice(list(keys))
            keys[key] = dice.choice([0, 1, 7, 2**31, 2**32 - 1, 1.5, True, "word", [0] * 8, [2] * 9, [True] * 8, ["a"]])
        layers = keys["block_count"] if keys["block_count"] in range(20) else 2
        sides = {"attn_k": [128, 512], "attn_v": [128, 512]}
        tensors = {f"blk.{index}.{side}.weight": sides[side] for index in range(layers) for side in sides}
        data = metadata_header(architecture, keys, tensors)
        if dice.random() < 0.6:
            data = spoiled(dice, data)
        yield Input(label=architecture, name="model.gguf", data=data, zeros=dice.choice([0, 2**22]))


def safetensors_inputs(dice: random.Random) -> Iterator[Input]:
    while True:
        at, header = 0, {}
        for index in range(dice.randrange(4)):
            rows = dice.choice([0, 1, 3, 32])
            header[f"model.layers.{index}.self_attn.k_proj.weight"] = {
                "dtype": dice.choice(["BF16", "F8_E4M3", "F4", "I32", "BOOL"]),
                "shape": [rows, 8],
                "data_offsets": [at, at := at + rows * 16],
            }
        if header and dice.random() < 0.7:
            header = changed(dice, header, [("x", {"__metadata__": {"a": 1}})])
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(min(at, 4096))
        if dice.random() < 0.6:
            data = spoiled(dice, data)
        yield Input(label="safetensors", name="model.safetensors", data=data)


KINDS: dict[str, Callable[[random.Random], Iterator[Input]]] = {
    "config": config_inputs,
    "gguf": gguf_inputs,
    "safetensors": safetensors_inputs,
}


def read_one(found: Input, directory: Path) -> str:
    """Read and plan one input as a user would; ``answered`` or ``refused``."""
    from kvist.planning.planner import plan

    path = directory / found.name
    path.write_bytes(found.data)
    if found.zeros:
        # Without a byte on the disk.
        os.truncate(path, len(found.data) + found.zeros)
    named = directory if found.name == "model.safetensors" else path
    try:
        spec = ModelSpec.read(named)
        json.dumps(plan(spec, cache_memory="64MiB").to_dict())
    except KvistError as error:
        message = str(error)
        assert "\n" not in message, f"a message of several lines: {message[:200]!r}"
        assert len(message) < 1500, f"a message of {len(message)} characters"
        message.encode()
        return "refused"
    return "answered"


def run(seed: int, count: int, kinds: list[str]) -> dict[str, Any]:
    """Read ``count`` inputs of each kind; what failed, what was slowest, and the most memory that any took."""
    import resource

    summary: dict[str, Any] = {"answered": 0, "refused": 0, "failures": [], "slowest": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        ordinary = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
        before = 0
        for kind in kinds:
            (directory / kind).mkdir()
            if kind == "safetensors":
                (directory / kind / "config.json").write_text(json.dumps(ordinary | {"max_position_embeddings": 128}))
            inputs = KINDS[kind](random.Random(f"{seed} {kind}"))
            for number in range(count):
                found = next(inputs)
                started = time.process_time()
                try:
                    summary[read_one(found, directory / kind)] += 1
                except Exception:
                    text = found.data[:3000].decode(errors="replace")
                    trace = traceback.format_exc()
                    summary["failures"].append({"label": found.label, "number": number, "input": text, "trace": trace})
                taken = time.process_time() - started
                if taken > summary["slowest"]:
                    summary |= {"slowest": taken, "slowest_input": f"{kind} {number} {found.label}"}
                # What is loaded and built once is no input's.
                before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    summary["grown_bytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    args = parser.parse_args()
    json.dump(run(args.seed, args.count, args.kind or list(KINDS)), sys.stdout, indent=1)
