"""The plan: what one sequence of a model costs and, where a memory is given, how many fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Equal layers, counted."""

    kind: str
    count: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where a memory goes, in bytes.

    Attributes:
        memory: all of it.
        weights: of it, for the weights; 0 where the memory was given for the cache alone.
        overhead: of it, for what an engine needs besides.
        cache: of it, for the cache.
        cache_tokens: tokens that the cache holds.
        context: tokens of each user's sequence.
        block_tokens: tokens of a block.
        users_slab: users when each reserves the longest context in one piece.
        users_paged: users when blocks are taken as sequences grow.
        waste_slab: bytes reserved by ``users_slab`` that hold no token.
        waste_paged: the same of ``users_paged``: the ends of their blocks.
        sequence_allocated: bytes of the blocks of one sequence of ``context``.
        prefill_chunk: prompt tokens that one step can compute while all but one of ``users_paged`` decode.
    """

    memory: int
    weights: int
    overhead: int
    cache: int
    cache_tokens: int
    context: int
    block_tokens: int
    users_slab: int
    users_paged: int
    waste_slab: int
    waste_paged: int
    sequence_allocated: int
    prefill_chunk: int

    def to_dict(self) -> dict[str, Any]:
        """As under ``capacity`` in the JSON of ``kvist plan``."""
        return {
            "memory_bytes": self.memory,
            "weights_bytes": self.weights,
            "overhead_bytes": self.overhead,
            "cache_bytes": self.cache,
            "cache_tokens": self.cache_tokens,
            "context": self.context,
            "block_tokens": self.block_tokens,
            "sequence_allocated_bytes": self.sequence_allocated,
            "prefill_chunk_tokens": self.prefill_chunk,
            "users": {"slab": self.users_slab, "paged": self.users_paged, "paged_prefix": None},
            "waste_bytes": {"slab": self.waste_slab, "paged": self.waste_paged},
            "binds": "cache",
        }


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """How an engine cuts its memory for one group of layers."""

    name: str
    layers: int
    block_bytes: int
    blocks_per_slab: int


@dataclass(frozen=True, kw_only=True)
class EngineAccount:
    """What an engine makes of a memory, and how to start it so.

    Attributes:
        name: of the engine.
        num_blocks: blocks of the group that grows with every token, were all memory its own.
        cache_tokens: tokens that the engine holds.
        max_concurrency: sequences of the planned context at once.
        slab_bytes: unit in which memory moves between groups.
        num_slabs: of them.
        groups: how each cuts a slab.
        flags: of its start command.
    """

    name: str
    num_blocks: int
    cache_tokens: int
    max_concurrency: float
    slab_bytes: int
    num_slabs: int
    groups: tuple[EngineGroup, ...]
    flags: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As under ``engine`` in the JSON of ``kvist plan``."""
        return {
            "name": self.name,
            "num_blocks": self.num_blocks,
            "cache_tokens": self.cache_tokens,
            "max_concurrency": self.max_concurrency,
            "slab_bytes": self.slab_bytes,
            "num_slabs": self.num_slabs,
            "groups": [
                {
                    "name": group.name,
                    "layers": group.layers,
                    "block_bytes": group.block_bytes,
                    "blocks_per_slab": group.blocks_per_slab,
                }
                for group in self.groups
            ],
            "flags": list(self.flags),
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer of :func:`kvist.plan`.

    Attributes:
        spec: the model.
        format: how keys and values are stored.
        layers: equal layers, counted, in the order in which they first appear.
        append_bytes_per_token: bytes of one more token while every layer grows.
        retained_bytes_per_token: the same once every window is full.
        state_bytes: bytes of a sequence whatever its length.
        sequence_bytes: logical bytes of a sequence, by its tokens.
        notes: what must be known beside the numbers, a sentence each.
        capacity: where a memory was given.
        engine: where an engine was named.
    """

    spec: ModelSpec
    format: CacheFormat
    layers: tuple[LayerRow, ...]
    append_bytes_per_token: int
    retained_bytes_per_token: int
    state_bytes: int
    sequence_bytes: Mapping[int, int]
    notes: tuple[str, ...] = ()
    capacity: Budget | None = None
    engine: EngineAccount | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of ``kvist plan --json``."""
        spec = self.spec
        answer: dict[str, Any] = {
            "model": spec.name,
            "source": spec.source,
            "exact": spec.exact,
            "assumed": [{"key": a.key, "value": a.value, "source": a.source} for a in spec.assumed],
            "notes": list(self.notes),
            "format": {"key": self.format.key, "value": self.format.value},
            "layers": [
                {
                    "kind": row.kind,
                    "count": row.count,
                    "kv_heads": row.kv_heads,
                    "key_dim": row.key_dim,
                    "value_dim": row.value_dim,
                    "window": row.window,
                }
                for row in self.layers
            ],
            "max_context": spec.max_context,
            "append_bytes_per_token": self.append_bytes_per_token,
            "retained_bytes_per_token": self.retained_bytes_per_token,
            "state_bytes": self.state_bytes,
            "sequence_bytes": {str(tokens): size for tokens, size in self.sequence_bytes.items()},
            "weights_bytes": spec.weights_bytes,
            "weights_by_type": dict(spec.weights_by_type),
            "parameters": spec.parameters,
        }
        if self.capacity is not None:
            answer["capacity"] = self.capacity.to_dict()
        if self.engine is not None:
            answer["engine"] = self.engine.to_dict()
        return answer
