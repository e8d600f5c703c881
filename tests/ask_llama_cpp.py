"""Asks llama.cpp what it allocates: run by the interpreter that has llama-cpp-python, never imported by a test.

    python ask_llama_cpp.py contexts < CASES.json      # [{"metadata" or "gguf", "asks": [{"n_ctx": …}, …]}, …]

A model of ``metadata`` is a GGUF file whose tensors llama.cpp names itself: what it misses, and the shape that it
expects, are added until it loads. Each context is made in a child process, for a model of zeros may not survive that;
the caches are printed before.
"""

import ctypes
import json
import os
import re
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
LINES: list[str] = []
SINK: list[int] = []


@llama_cpp.llama_log_callback
def keep(level: int, text: bytes, data: Any) -> None:
    LINES.append(text.decode("utf-8", "replace"))
    for sink in SINK:
        os.write(sink, text)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tagged(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case _:
            parts = [tagged(part) for part in value]
            return 9, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(content for _, content in parts)


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, list[int]]) -> None:
    """A GGUF file with f32 tensors of zeros, which the file system need not store."""
    infos, offset = b"", 0
    for name, shape in tensors.items():
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, offset)
        size = 4
        for length in shape:
            size *= length
        offset += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, content = tagged(value)
        head += text(key) + struct.pack("<I", kind) + content
    head += infos
    head += bytes(-len(head) % 32)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + offset)


def load(path: Path) -> Any:
    LINES.clear()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    return llama_cpp.llama_model_load_from_file(str(path).encode(), params)


def build(path: Path, metadata: dict[str, Any]) -> Any:
    tensors: dict[str, list[int]] = {}
    while True:
        write(path, {"tokenizer.ggml.model": "no_vocab"} | metadata, tensors)
        model = load(path)
        if model:
            return model
        said = "".join(LINES)
        wrong = re.search(r"tensor '([^']+)' has wrong shape; expected +([0-9, ]+), got", said)
        missing = re.search(r"tensor '([^']+)' not found|missing tensor '([^']+)'", said)
        if wrong:
            shape = [int(length) for length in wrong[2].split(",") if length.strip()]
            while len(shape) > 1 and shape[-1] == 1:
                shape.pop()
            tensors[wrong[1]] = shape
        elif missing:
            tensors[missing[1] or missing[2]] = [1]
        else:
            raise SystemExit(said[-2000:])


def context(model: Any, asked: dict[str, Any]) -> list[str]:
    """The lines that llama.cpp prints while it makes a context."""
    params = llama_cpp.llama_context_default_params()
    params.swa_full = False
    for key, value in asked.items():
        match key:
            case "type_k" | "type_v":
                setattr(params, key, TYPES[value])
            case "flash_attn":
                params.flash_attn_type = int(value)
            case _:
                setattr(params, key, value)
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        SINK.append(write_end)
        llama_cpp.llama_init_from_model(model, params)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    os.waitpid(child, 0)
    return [re.sub(r"\s+", " ", line).strip() for line in said.splitlines()]


def main() -> None:
    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for case in json.load(sys.stdin):
            path = Path(case["gguf"]) if "gguf" in case else Path(folder) / "model.gguf"
            model = load(path) if "gguf" in case else build(path, case["metadata"])
            answers.append([context(model, asked) for asked in case["asks"]])
            llama_cpp.llama_model_free(model)
    print(f"\n{json.dumps(answers)}")


if __name__ == "__main__":
    main()
