"""What full-size models are planned to take is what the engine lays out: on the meta device, to the byte."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import kvist
from kvist.cache.arena import Ids
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.planning.capacity import DEFAULT_CHUNK, allocated_bytes
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.layouts import Scratch
from kvist.store.states import StateStore
from kvist.store.stores import Store, store_of

BF16 = CacheFormat(key="bf16", value="bf16")
# As published with the models.
CODESTRAL: dict[str, Any] = {
    "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
    "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4, "vocab_size": 32768,
}  # fmt: skip
FALCON_H1_7B: dict[str, Any] = {
    "model_type": "falcon_h1", "hidden_size": 3072, "num_hidden_layers": 44, "num_attention_heads": 12,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
    "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4, "intermediate_size": 12288, "vocab_size": 130048,
    "max_position_embeddings": 262144,
}  # fmt: skip


class Case(NamedTuple):
    """A model, and a length at which its windows and chunks hold whole blocks."""

    model: str | dict[str, Any]
    append: int
    state: int = 0
    tokens: int = 8192


CASES = {
    "GPT-2": Case("gpt2-xl", 300 * 1024, tokens=1024),
    "Llama 3": Case("llama-3-8b", 128 * 1024),
    "DeepSeek-V3": Case("deepseek-v3", 61 * 576 * 2),
    "Gemma 3": Case("gemma-3-27b", 496 * 1024),
    "gpt-oss": Case("gpt-oss-120b", 72 * 1024),
    # At 8,192 a chunk has just ended, and nothing of it is seen again.
    "Llama 4": Case("llama-4-maverick", 192 * 1024, tokens=8192 - 16),
    "Mamba": Case("mamba-1.4b", 0, 48 * (12288 * 2 + 65536 * 4)),
    "Mamba-2": Case(CODESTRAL, 0, 64 * (3 * (8192 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4)),
    "Jamba": Case("jamba-v0.1", 16 * 1024, 28 * (24576 * 2 + 131072 * 4)),
    "Qwen3-Next": Case("qwen3-next-80b-a3b", 24 * 1024, 36 * (24576 * 2 + 524288 * 4)),
    "Falcon-H1": Case(FALCON_H1_7B, 44 * 1024, 44 * (3 * (3072 + 2 * 256) * 2 + 24 * 128 * 256 * 4)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plans_bytes_are_those_of_the_stores(case: Case, tmp_path: Path) -> None:
    spec = read(case.model, tmp_path)
    planned = kvist.plan(spec, tokens=[case.tokens])
    assert (planned.append_bytes_per_token, planned.state_bytes) == (case.append, case.state)
    groups = groups_of(spec.computed_in("bf16"), BF16)
    size = allocated_bytes(groups, case.tokens)
    assert size == planned.sequence_bytes[case.tokens]

    layout = ArenaLayout.of(groups, 3 * size)
    arena = torch.empty(layout.total_bytes, dtype=torch.uint8, device="meta")
    stores = [store_of(arena, group, layout, number, Scratch()) for number, group in enumerate(groups)]
    tables = written(CacheManager(groups, layout), case.tokens)
    pieces = [piece for store, table in zip(stores, tables, strict=True) for piece in pieces_of(store, table)]
    begins, ends = np.concatenate(pieces, axis=1)
    order = np.argsort(begins)
    assert begins.min() >= 0
    assert ends.max() <= arena.numel()
    assert (ends[order][:-1] <= begins[order][1:]).all(), "two pieces share bytes"
    assert int((ends - begins).sum()) == size


def read(model: str | dict[str, Any], folder: Path) -> ModelSpec:
    if isinstance(model, str):
        return ModelSpec.read(model)
    path = folder / "config.json"
    path.write_text(json.dumps(model))
    return ModelSpec.read(path)


def written(manager: CacheManager, tokens: int) -> list[Ids]:
    """The blocks that a sequence holds once it is stored, a chunk at a time."""
    sequence = manager.begin(np.arange(tokens))
    while sequence.length < tokens:
        reservation = manager.reserve(sequence, DEFAULT_CHUNK)
        assert reservation.granted
        manager.commit(sequence, reservation.limit)
    return [table[start:] for table, start in zip(sequence.tables, sequence.given_back, strict=True)]


def pieces_of(store: Store, table: Ids) -> list[np.ndarray[Any, Any]]:
    """First and last bytes of every run that the store's views show of these blocks, ``[2, runs]`` each."""
    if isinstance(store, StateStore):
        halves = [half for half in (store.conv, store.recurrent) if half.elements]
        return [rows_of(half.rows, store.bytes_of(table) // half.unit) for half in halves]
    units = store.units(table)
    return [
        rows_of(view, (units[:, None] + np.arange(part.heads) * part.run_units).ravel())
        for part in store.parts
        for view in part.run_views
    ]


def rows_of(view: torch.Tensor, rows: Ids) -> np.ndarray[Any, Any]:
    assert rows.size == 0 or rows.max() < view.shape[0]
    item = view.element_size()
    begins = (view.storage_offset() + rows * view.stride(0)) * item
    return np.stack((begins, begins + view.shape[1] * item))
