"""What an engine makes of a memory: the shape of the answer that all engines share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineBudget:
    """The memory of one device that an engine may fill: what it is for the cache alone, or all that the device has.

    Attributes:
        cache: bytes for the cache alone.
        device: bytes of the device; the engine's own rule makes a budget of it.
        taken: of the device, what is not for the cache: weights, activations, runtime.
    """

    cache: int | None = None
    device: int | None = None
    taken: int = 0

    @property
    def left(self) -> int | None:
        """Bytes for the cache where an engine takes all that is left; None where no memory is given."""
        if self.cache is not None:
            return self.cache
        return None if self.device is None else self.device - self.taken


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """How an engine cuts its memory for one group of layers.

    Attributes:
        name: of the group, unique within an account.
        layers: in it.
        block_bytes: of one block in all of its layers.
        blocks_per_slab: blocks of a slab, in an engine that lends slabs.
        block_tokens: tokens of a block; None where a block is a state.
        sequence_blocks: blocks that the engine counts for one sequence of the planned context.
    """

    name: str
    layers: int
    block_bytes: int
    blocks_per_slab: int | None = None
    block_tokens: int | None = None
    sequence_blocks: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As under ``engine.groups`` in the JSON of ``kvist plan``; what an engine has none of is left out."""
        every = {
            "name": self.name,
            "layers": self.layers,
            "block_bytes": self.block_bytes,
            "blocks_per_slab": self.blocks_per_slab,
            "block_tokens": self.block_tokens,
            "sequence_blocks": self.sequence_blocks,
        }
        return {key: value for key, value in every.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class EngineFigure:
    """One number of an account, how it comes about, and the file of the engine that says so."""

    what: str
    value: int | float
    formula: str
    source: str


@dataclass(frozen=True, kw_only=True)
class EngineAccount:
    """What an engine makes of a memory, and how to start it so.

    Attributes:
        name: of the engine.
        num_blocks: that it cuts: blocks of vLLM's shared pool, pages of SGLang's full pool, cells of llama.cpp; for
            kvist those of the group that grows with every token, were all memory its own.
        cache_tokens: tokens that the engine says it holds.
        max_concurrency: sequences of the planned context at once.
        flags: of its start command, or arguments of its call where it has none.
        groups: how it cuts its memory.
        command: what the flags belong to, with ``{model}`` for the model.
        version: of the engine whose rules these are.
        cache_bytes: that the engine may use on one device; 0 where its settings alone decide.
        allocated_bytes: that it takes on one device.
        sequence_bytes: that one sequence of the planned context takes of it.
        settings: every setting that decided, by the engine's own names.
        assumed: settings taken because neither the model nor the caller says, each with the reason.
        figures: each number as formula and source.
        notes: what must be known beside the numbers, a sentence each.
        details: what only this engine has, by the name that it bears in JSON.
    """

    name: str
    num_blocks: int
    cache_tokens: int
    max_concurrency: float
    flags: tuple[str, ...]
    groups: tuple[EngineGroup, ...] = ()
    command: str = ""
    version: str = ""
    cache_bytes: int = 0
    allocated_bytes: int = 0
    sequence_bytes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[tuple[str, str], ...] = ()
    figures: tuple[EngineFigure, ...] = ()
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def start(self, model: str) -> str:
        """The command that starts the engine so, for a model of this name."""
        return " ".join((self.command.format(model=model), *self.flags)).strip()

    def to_dict(self) -> dict[str, Any]:
        """As under ``engine`` in the JSON of ``kvist plan``."""
        return {
            "name": self.name,
            "version": self.version,
            "num_blocks": self.num_blocks,
            "cache_tokens": self.cache_tokens,
            "max_concurrency": self.max_concurrency,
            "cache_bytes": self.cache_bytes,
            "allocated_bytes": self.allocated_bytes,
            "sequence_bytes": self.sequence_bytes,
            **self.details,
            "groups": [group.to_dict() for group in self.groups],
            "settings": dict(self.settings),
            "assumed": [{"setting": setting, "reason": reason} for setting, reason in self.assumed],
            "notes": list(self.notes),
            "flags": list(self.flags),
        }
