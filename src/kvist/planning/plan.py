"""The plan: what one sequence of a model costs and, where a memory is given, how many fit."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Compressed, Indexer, Latent, Layer, Parallel, State
from kvist.spec.model import ModelSpec
from kvist.spec.rates import Rate, rate_in_json

if TYPE_CHECKING:
    from kvist.planning.deployment import Deployment
    from kvist.planning.engines.account import EngineAccount
    from kvist.planning.fleet import GpuSet
    from kvist.planning.mix import Mix
    from kvist.planning.roofline import Speed
    from kvist.planning.weights import Weights

# Left out of a row where a layer has none of it.
_OPTIONAL = ("chunk", "indexer", "lead", "sealed", "tail")


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Equal layers, counted.

    Attributes:
        layer: what each of them is.
        count: of them.
        format: plain, in which keys and values of each of them are stored; of states the layer says it.
        special: whether that is another than the plan's own.
    """

    layer: Layer
    count: int
    format: CacheFormat
    special: bool = False

    @property
    def kind(self) -> str:
        """Of the layers, such as ``attention``."""
        return self.layer.kind

    def to_dict(self) -> dict[str, Any]:
        """As under ``layers`` in the JSON of ``kvist plan``: kind, count, its own fields, a format of its own."""
        told = {"format": self.format.to_dict()} if self.special else {}
        return {"kind": self.kind, "count": self.count} | _fields(self.layer) | told


def _fields(layer: Layer) -> dict[str, Any]:
    if isinstance(layer, Parallel):
        return {"parts": [{"kind": part.kind} | _fields(part) for part in layer.parts]}
    found: dict[str, Any] = {}
    for entry in fields(layer):
        value = getattr(layer, entry.name)
        if entry.name in _OPTIONAL and (value is None or value is False):
            continue
        if isinstance(value, Indexer):
            value = {"heads": value.heads, "dim": value.dim, "pool": value.pool}
        found[entry.name] = value
    return found


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where a memory goes, in bytes.

    Attributes:
        memory: all of it.
        weights: of it, for the weights; 0 where the memory was given for the cache alone.
        overhead: of it, for what an engine needs besides.
        cache: of it, for the cache.
        cache_tokens: tokens that the cache holds.
        context: tokens of each user's sequence, on average where lengths are many.
        block_tokens: tokens of a block.
        users_slab: users when each reserves the longest context in one piece.
        users_paged: users when blocks are taken as sequences grow.
        waste_slab: bytes reserved by ``users_slab`` that hold no token.
        waste_paged: the same of ``users_paged``: the ends of their blocks.
        sequence_allocated: bytes of the blocks of one sequence of ``context``.
        prefill_chunk: prompt tokens that one step can compute while all but one of ``users_paged`` decode.
        users_prefix: users when shared prefixes are stored once besides; None where none is known.
        users_mean: where lengths are many: how many fit on average, while the other numbers hold 99 % of the time.
        slab_idle: share of the slabs that holds nothing.
        binds: what keeps more users out: ``cache`` where only a memory is known; with a device ``memory``,
            ``bandwidth`` or ``compute``.
        deployment: the devices, and where the memory of each goes.
        mix: the lengths, where they are many.
        cartridge: tokens of a trained cache behind which all users begin, no part of ``context``; 0 for none.
        cartridge_bytes: of its blocks, stored once on each replica.
        cartridge_format: how it is stored; None: as the cache is.
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
    users_prefix: int | None = None
    users_mean: "UsersMean | None" = None
    slab_idle: float = 0.0
    binds: str = "cache"
    deployment: "Deployment | None" = None
    mix: "Mix | None" = None
    cartridge: int = 0
    cartridge_bytes: int = 0
    cartridge_format: CacheFormat | None = None

    @property
    def users(self) -> int:
        """As many as fit, with whatever can be shared."""
        return self.users_paged if self.users_prefix is None else self.users_prefix

    def to_dict(self) -> dict[str, Any]:
        """As under ``capacity`` in the JSON of ``kvist plan``."""
        answer = {
            "memory_bytes": self.memory,
            "weights_bytes": self.weights,
            "overhead_bytes": self.overhead,
            "cache_bytes": self.cache,
            "cache_tokens": self.cache_tokens,
            "context": self.context,
            "block_tokens": self.block_tokens,
            "sequence_allocated_bytes": self.sequence_allocated,
            "prefill_chunk_tokens": self.prefill_chunk,
            "users": {"slab": self.users_slab, "paged": self.users_paged, "paged_prefix": self.users_prefix},
            "waste_bytes": {"slab": self.waste_slab, "paged": self.waste_paged},
            "slab_idle_ratio": self.slab_idle,
            "binds": self.binds,
        }
        if self.cartridge:
            stored = {} if self.cartridge_format is None else {"format": self.cartridge_format.to_dict()}
            answer["cartridge"] = {"tokens": self.cartridge, "bytes": self.cartridge_bytes, **stored}
        if self.users_mean is not None:
            answer["users_mean"] = self.users_mean.to_dict()
        if self.mix is not None:
            answer["workload"] = self.mix.to_dict()
        if self.deployment is not None:
            answer["deployment"] = self.deployment.to_dict()
        return answer


@dataclass(frozen=True, kw_only=True)
class UsersMean:
    """Users that fit on average, where lengths are many."""

    slab: int
    paged: int
    prefix: int | None

    def to_dict(self) -> dict[str, Any]:
        """As under ``capacity.users_mean`` in the JSON of ``kvist plan``."""
        return {"slab": self.slab, "paged": self.paged, "paged_prefix": self.prefix}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer of :func:`kvist.plan`.

    Attributes:
        spec: the model.
        format: how keys and values are stored.
        sequence_bytes: logical bytes of a sequence, by its tokens; state included, an encoder not.
        notes: what must be known beside the numbers, a sentence each.
        capacity: where a memory was given.
        engine: where an engine was named.
        encoder_tokens: length of the encoder's output where it was given.
        weights: what the weights weigh, and why; None where it is not known.
        speed: bounds on the speed, where a device was named.
        sets: the smallest sets of devices that hold the users, where users and no memory were given.
    """

    spec: ModelSpec
    format: CacheFormat
    sequence_bytes: Mapping[int, int]
    notes: tuple[str, ...] = ()
    capacity: Budget | None = None
    engine: "EngineAccount | None" = None
    encoder_tokens: int | None = None
    weights: "Weights | None" = None
    speed: "Speed | None" = None
    sets: "tuple[GpuSet, ...] | None" = None

    @property
    def layers(self) -> tuple[LayerRow, ...]:
        """Equal layers, counted, in the order in which they first appear; different formats are apart."""
        usual = replace(self.format.plain, state=None)
        return tuple(
            LayerRow(layer=layer, count=count, format=fmt, special=fmt != usual)
            for (layer, fmt), count in _told_apart(self.spec, self.format).items()
        )

    @property
    def draft_layers(self) -> tuple[LayerRow, ...]:
        """The same of the draft layers."""
        counted = Counter(self.spec.draft_layers)
        return tuple(LayerRow(layer=layer, count=count, format=self.format.plain) for layer, count in counted.items())

    @property
    def append_bytes_per_token(self) -> Rate:
        """Bytes of one more token while every layer grows; amortised over compressed entries."""
        return self.spec.append_bytes_per_token(self.format)

    @property
    def retained_bytes_per_token(self) -> Rate:
        """The same once every window and chunk is full."""
        return self.spec.retained_bytes_per_token(self.format)

    @property
    def indexer_bytes_per_token(self) -> Rate:
        """The part of append that is indexer keys."""
        return self.spec.indexer_bytes_per_token(self.format)

    @property
    def draft_append_bytes_per_token(self) -> Rate:
        """Bytes of one more token in the draft layers, counted nowhere else."""
        return self.spec.draft_append_bytes_per_token(self.format)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence whatever its length."""
        return self.spec.state_bytes(self.format)

    @property
    def cross_bytes_per_encoder_token(self) -> int:
        """Bytes of one token of the encoder, counted nowhere else."""
        return self.spec.cross_bytes_per_encoder_token(self.format)

    @property
    def cross_bytes(self) -> int | None:
        """Bytes that a sequence keeps of its encoder; None where there is none, or its length is not known."""
        if not self.spec.cross_layers:
            return None
        return self.spec.cross_bytes(self.format, encoder_tokens=self.encoder_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of ``kvist plan --json``."""
        spec = self.spec
        answer: dict[str, Any] = {
            "model": spec.name,
            "source": spec.source,
            "exact": spec.exact,
            "assumed": [{"key": a.key, "value": a.value, "source": a.source} for a in spec.assumed],
            "notes": list(self.notes),
            "format": self.format.to_dict(),
            "layers": [row.to_dict() for row in self.layers],
            "max_context": spec.max_context,
            "append_bytes_per_token": rate_in_json(self.append_bytes_per_token),
            "retained_bytes_per_token": rate_in_json(self.retained_bytes_per_token),
            "indexer_bytes_per_token": rate_in_json(self.indexer_bytes_per_token),
            "draft_append_bytes_per_token": rate_in_json(self.draft_append_bytes_per_token),
            "state_bytes": self.state_bytes,
            "cross_bytes_per_encoder_token": self.cross_bytes_per_encoder_token,
            "sequence_bytes": {str(tokens): size for tokens, size in self.sequence_bytes.items()},
            "weights_bytes": spec.weights_bytes,
            "weights_by_type": dict(spec.weights_by_type),
            "parameters": spec.parameters,
        }
        if self.cross_bytes is not None:
            answer["cross_bytes"] = self.cross_bytes
        if self.capacity is not None:
            answer["capacity"] = self.capacity.to_dict()
        if self.weights is not None:
            answer["weights_source"] = self.weights.source
        if self.engine is not None:
            answer["engine"] = self.engine.to_dict()
        if self.speed is not None:
            answer["speed"] = self.speed.to_dict()
        if self.sets is not None:
            answer["sets"] = [each.to_dict() for each in self.sets]
        return answer


def format_notes(spec: ModelSpec, fmt: CacheFormat) -> tuple[str, ...]:
    """Where a format does not mean for a model's layers what it seems to, a sentence each."""
    kinds = {type(piece) for layer in spec.layers for piece in layer.stored}
    notes = []
    if fmt.key != fmt.value and kinds & {Latent, Compressed}:
        notes.append(f"a latent is key and value in one and is stored in the key codec, {fmt.plain.of_single.key}")
    if fmt.key == "fp8" and kinds & {Latent, Compressed}:
        notes.append("the rotary elements of a latent in fp8 are stored in bf16")
    if fmt.rotate and not any(fmt.of_layer(index, len(spec.layers)).rotates for index in range(len(spec.layers))):
        notes.append("nothing is rotated: only codecs of 8 bits or fewer are")
    if fmt.state is not None and State not in kinds:
        notes.append(f"{spec.name} has no recurrent state that could be stored in {fmt.state}")
    elif fmt.state is None and fmt != CacheFormat() and State in kinds:
        notes.append("states keep types of their own; the format is that of keys and values")
    return tuple(notes)


def _told_apart(spec: ModelSpec, fmt: CacheFormat) -> Mapping[tuple[Layer, CacheFormat], int]:
    """Layers as they are stored and their formats, counted; those without keys and values have none of their own."""
    counted: Counter[tuple[Layer, CacheFormat]] = Counter()
    for (layer, plain), count in spec.counted_in(fmt).items():
        bare = isinstance(layer, State) or not layer.stored
        counted[layer.stored_in(plain), replace(fmt.plain if bare else plain, state=None)] += count
    return counted
