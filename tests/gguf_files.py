"""Small GGUF files, written by the `gguf` package, and the bytes that a header of our own making has."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

LLAMA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}

GEMMA3: dict[str, Any] = LLAMA | {
    "block_count": 8,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": 64,
    "rope.freq_base": 1000000.0,
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    tied: bool = True,
    kv_width: int | None = None,
    bias: bool = False,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a model of F32 tensors; ``keys`` are below the architecture's name, ``extra`` are whole keys."""
    keys = LLAMA if keys is None else keys
    writer = GGUFWriter(path, architecture)
    for key, value in {f"{architecture}.{key}": value for key, value in keys.items()}.items():
        _add(writer, key, value)
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    writer.add_token_list([b"<s>", b"</s>", "naïve".encode()])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_token_types([3, 3, 1])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    hidden = keys["embedding_length"]
    heads = keys["attention.head_count"]
    head_dim = keys.get("attention.key_length", hidden // heads)
    width = keys.get("attention.head_count_kv", heads) * head_dim if kv_width is None else kv_width
    writer.add_tensor("token_embd.weight", np.zeros((3, hidden), np.float32))
    for block in range(keys["block_count"]):
        writer.add_tensor(f"blk.{block}.attn_q.weight", np.zeros((heads * head_dim, hidden), np.float16))
        writer.add_tensor(f"blk.{block}.attn_k.weight", np.zeros((width, hidden), np.float16))
        writer.add_tensor(f"blk.{block}.attn_v.weight", np.zeros((width, hidden), np.float16))
        if bias:
            writer.add_tensor(f"blk.{block}.attn_q.bias", np.zeros(heads * head_dim, np.float32))
    if not tied:
        writer.add_tensor("output.weight", np.zeros((3, hidden), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """The fixed head, then ``parts``."""
    return magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    """A string as the format writes it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    """One key of the metadata."""
    return text(key) + _typed(value)


def _typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)


def metadata_header(architecture: str, keys: dict[str, Any], tensors: dict[str, list[int]] | None = None) -> bytes:
    """A header without a file: keys below the architecture's name, and tensors by their shapes, outermost first."""
    entries = [entry("general.architecture", architecture)]
    entries += [entry(f"{architecture}.{key}", value) for key, value in keys.items()]
    listed = [tensor(name, shape[::-1]) for name, shape in (tensors or {}).items()]
    return header(*entries, *listed, keys=len(entries), tensors=len(listed)) + bytes(64)


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """One entry of the tensor list; ``sizes`` innermost first."""
    return (
        text(name)
        + struct.pack("<I", len(sizes))
        + struct.pack(f"<{len(sizes)}Q", *sizes)
        + struct.pack("<IQ", kind, offset)
    )
