"""Tensors of GGUF files, under the network's names."""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.errors import UnsupportedModel
from kvist.model.packed import Codes
from kvist.model.parts import straightened
from kvist.spec.gguf import GGUFTensor, read_gguf
from kvist.spec.gguf.files import part_count

# What one dequantisation works on at a time: small enough to stay in the cache of a core.
_ROWS_ELEMENTS = 2**18

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Norms behind each half of a layer, with others before them or not.
_BEHIND = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_QKV = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attn_qkv")
_GPT2 = {
    "attn.q_proj": "attn_qkv",
    "attn.k_proj": "attn_qkv",
    "attn.v_proj": "attn_qkv",
    "attn.o_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
# By architecture; the others have those of Llama.
_LAYERS = {
    "gemma2": _BEHIND,
    "gemma3": _BEHIND,
    "olmo2": _BEHIND,
    "phi3": _LAYER | _QKV | {"mlp.gate_proj": "ffn_up"},
    "gpt2": _GPT2,
}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READABLE = (*_FLOATS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


class GGUFTensors:
    """A GGUF file, mapped; quantised tensors are unpacked as they are read.

    Args:
        path: of the file.
        config: of its model, under Hugging Face's names.

    Raises:
        UnsupportedModel: the file is one of several.
        BadFile: torn or of another kind.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        header = read_gguf(path)
        if part_count(header) > 1:
            raise UnsupportedModel(
                f"{path}: is one of {part_count(header)} parts, and the engine reads one file; join them with "
                f"llama-gguf-split --merge",
                key="split.count",
            )
        self.name = str(path)
        self.entries = header.tensor_by_name
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r")
        architecture = header.metadata["general.architecture"]
        self.layer_names = _LAYERS.get(architecture, _LAYER)
        self.permuted_heads = {}
        if architecture == "llama":
            self.permuted_heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }
        self.slices: dict[str, slice] = {}
        if "attn_qkv" in self.layer_names.values():
            self.slices = _slices(config)

    def stored(self, name: str) -> str:
        """The name in the file."""
        match = re.fullmatch(r"(?:model\.layers|transformer\.h)\.([0-9]+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in self.layer_names:
            return f"blk.{match[1]}.{self.layer_names[match[2]]}.{match[3]}"
        top, _, kind = name.rpartition(".")
        return f"{_TOP[top]}.{kind}" if top in _TOP else name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See :class:`kvist.model.weights.Tensors`."""
        entry = self.entries.get(self.stored(name))
        if entry is None:
            return None
        rows = range(entry.shape[0])[self._slice(name)]
        return (len(rows), *entry.shape[1:])

    def names(self) -> Iterable[str]:
        """See :class:`kvist.model.weights.Tensors`."""
        return self.entries

    def source(self, name: str) -> str:
        """See :class:`kvist.model.weights.Tensors`."""
        return self.stored(name)

    def read(self, name: str, into: Tensor) -> None:
        """See :class:`kvist.model.weights.Tensors`."""
        entry = self.entries[self.stored(name)]
        if entry.type not in _READABLE:
            raise UnsupportedModel(
                f"{self.name}: tensor {entry.name!r} is stored as {entry.type}; read are {', '.join(_READABLE)}",
                key=entry.name,
            )
        if len(entry.shape) == 1:
            stored = torch.empty(entry.shape, dtype=into.dtype)
            _unpack(self._raw(entry, 1), entry.type, stored.view(1, -1))
            stored = stored[self._slice(name)]
        else:
            stored = torch.empty_like(into) if self._interleaved_heads(name) else into
            _unpack(self._raw(entry, entry.shape[0])[self._slice(name)], entry.type, stored.view(len(stored), -1))
        heads = self._interleaved_heads(name)
        if heads is not None:
            stored = straightened(stored, heads)
        if stored is not into:
            into.copy_(stored)

    def codes(self, name: str) -> Codes | None:
        """See :class:`kvist.model.weights.Tensors`."""
        entry = self.entries[self.stored(name)]
        if len(entry.shape) != 2 or not Codes.reads(entry.type):
            return None
        raw = self._raw(entry, entry.shape[0])[self._slice(name)]
        # A mapped file is read-only, which torch warns about; the copy is let go soon.
        found = Codes.of_blocks(torch.from_numpy(np.array(raw)), entry.type)
        heads = self._interleaved_heads(name)
        return found if heads is None else found.moved(lambda rows: straightened(rows, heads))

    def _raw(self, entry: GGUFTensor, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.bytes[entry.offset : entry.offset + entry.bytes].reshape(height, -1)

    def _slice(self, name: str) -> slice:
        """The rows of the stored tensor that are this one."""
        return next((rows for part, rows in self.slices.items() if f".{part}." in name), slice(None))

    def _interleaved_heads(self, name: str) -> int | None:
        return next((count for part, count in self.permuted_heads.items() if part in name), None)


def _slices(config: Mapping[str, Any]) -> dict[str, slice]:
    """Rows of ``attn_qkv``, and of an ``ffn_up`` that begins with the gate."""
    queries = config["num_attention_heads"] * config["head_dim"]
    keys, inner = config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
    return {
        "q_proj": slice(0, queries),
        "k_proj": slice(queries, queries + keys),
        "v_proj": slice(queries + keys, queries + 2 * keys),
        "gate_proj": slice(0, inner),
        "up_proj": slice(inner, 2 * inner),
    }


def _unpack(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: str, into: Tensor) -> None:
    """Unpack rows of stored bytes ``[rows, bytes]`` into ``into`` ``[rows, elements]``, some rows at a time."""
    if kind in _FLOATS:
        # A mapped file is read-only, which torch warns about; nothing writes here.
        flat = torch.frombuffer(bytearray(raw.tobytes()), dtype=_FLOATS[kind])
        into.copy_(flat.view(into.shape))
        return
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    number = GGMLQuantizationType[kind]
    step = max(1, _ROWS_ELEMENTS // into.shape[1])

    def unpack(start: int) -> None:
        # The mode belongs to a thread.
        with torch.inference_mode():
            rows = dequantize(np.ascontiguousarray(raw[start : start + step]), number)
            into[start : start + step].copy_(torch.from_numpy(rows))

    starts = range(0, len(raw), step)
    if len(starts) == 1:
        unpack(0)
    else:
        list(_workers().map(unpack, starts))


def _workers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=torch.get_num_threads(), thread_name_prefix="kvist-weights")
    return _pool


_pool: ThreadPoolExecutor | None = None
