"""From a model and what is said of devices and memory to a :class:`Server`."""

from dataclasses import dataclass

from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS
from kvist.cache.groups import Group
from kvist.errors import DoesNotFit, InputError
from kvist.planning.capacity import DEVICE_CHUNK
from kvist.planning.deployment import MAX_SAMPLED, Cutting, Deployment, Stage, stages_of
from kvist.planning.machines import Wish, machine_of
from kvist.planning.weights import Weights, weights_of
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a model is simulated.

    Attributes:
        deployment: the devices, and the stages of the model's pipeline.
        weights: of the model; None where only the cache's memory is given.
        stage: the one whose cache holds the fewest tokens: its blocks are what is managed.
        cache_bytes: for the cache of a rank of that stage.
        cutting: how caches are cut.
        notes: what a reader should know.
    """

    deployment: Deployment
    weights: Weights | None
    stage: Stage
    cache_bytes: int
    cutting: Cutting
    notes: tuple[str, ...]

    def groups(self, block_tokens: int) -> tuple[Group, ...]:
        """The groups that a rank of the stage remembers, in blocks of so many tokens."""
        cutting = Cutting(
            fmt=self.cutting.fmt,
            block_tokens=block_tokens,
            chunk=self.cutting.chunk,
            encoder_tokens=self.cutting.encoder_tokens,
        )
        return cutting.groups(self.stage.spec, self.stage.fmt)


def site_of(
    spec: ModelSpec,
    fmt: CacheFormat,
    wish: Wish,
    *,
    weights: str | None = None,
    max_running: int = MAX_SAMPLED,
    chunk: int = DEVICE_CHUNK,
    encoder_tokens: int | None = None,
) -> Site:
    """Deal a model out to the devices and say what is left for its cache.

    Args:
        spec: the model.
        fmt: how keys and values are stored.
        wish: devices or memory.
        weights: codec of the weights; by default as the model stores them.
        max_running: sequences that are sampled at once, for which memory is set aside.
        chunk: tokens of a step.
        encoder_tokens: length of the encoder's output, where the model attends to one and does not fix it.

    Raises:
        InputError: no memory is named, values contradict each other, or the model remembers nothing.
        DoesNotFit: weights and overhead leave no cache; shows the sum.
    """
    if not wish.names_memory:
        raise InputError(
            "memory: there is none to simulate in; add `gpu`, `memory` or `cache_memory`, or --cache-only for an "
            "endless cache",
            key="memory",
        )
    if encoder_tokens is not None and all(layer.encoder_tokens is not None for layer in spec.cross_layers):
        why = "fixes the length of its encoder's output" if spec.cross_layers else "has no encoder"
        raise InputError(f"encoder_tokens: {encoder_tokens}; {spec.name} {why}: leave it out", key="encoder_tokens")
    placed = machine_of(wish, spec)
    machine = placed.machine
    weighed = None if machine.cache is not None else weights_of(spec, weights)
    cutting = Cutting(fmt=fmt, block_tokens=DEFAULT_BLOCK_TOKENS, chunk=chunk, encoder_tokens=encoder_tokens)
    stages = stages_of(spec, weighed, machine, cutting=cutting)
    tight = min(stages, key=lambda stage: _tokens(stage, stage.cache(machine, max_running)))
    cache = tight.cache(machine, max_running)
    if not tight.groups:
        raise InputError(f"model: {spec.name} keeps nothing of a sequence; there is no cache to simulate", key="model")
    if cache <= 0:
        assert machine.memory is not None
        raise DoesNotFit(
            f"weights of {format_size(tight.weights)} and overhead of {format_size(tight.overhead(max_running))} leave "
            f"no cache in {format_size(machine.memory)} of {machine.label}"
        )
    return Site(
        deployment=Deployment(machine=machine, stages=stages, sampled=max_running, notes=()),
        weights=weighed,
        stage=tight,
        cache_bytes=cache,
        cutting=cutting,
        notes=placed.notes,
    )


def _tokens(stage: Stage, cache: int) -> float:
    """Tokens, about, that a cache of a stage holds; without end where it remembers no tokens."""
    each = sum(group.token_bytes for group in stage.groups)
    return cache / each if each else float("inf")
