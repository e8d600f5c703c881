"""Where the memory of a deployment goes: weights, cache, activations, and what a device's runtime takes.

::

    a device's memory = weights of its rank and stage        exact, from shapes or the file
                      + activations of a step                from shapes, see :func:`activations_of`
                      + logits and sampling, last stage      for each sequence that is sampled
                      + runtime                              context, communication, graphs: see RUNTIME
                      + cache                                the rest

Every rank of a stage holds the same; the stage with the least room decides for all. Activations and runtime are
estimates and say where they come from; :attr:`Machine.overhead` replaces them by what was measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.cache.lead_groups import lead_groups
from kvist.errors import DoesNotFit
from kvist.hardware import Accelerator
from kvist.planning.capacity import most_that_fit
from kvist.planning.overhead import MAX_SAMPLED, Cost, activations_of, runtime_of, sampled_bytes, sampling_cost
from kvist.planning.sharding import LayerRange, rank_spec, split_layers
from kvist.planning.weights import Weights
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size

__all__ = [
    "MAX_SAMPLED",
    "Cost",
    "Cutting",
    "Deployment",
    "Machine",
    "Stage",
    "activations_of",
    "deploy",
    "runtime_of",
    "sampling_cost",
    "stages_of",
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that are planned for.

    Attributes:
        accelerator: each of them; None for a memory without a device.
        devices: how many there are.
        tp: ranks that share each layer.
        pp: stages that share the layers.
        memory: bytes of each; None where the cache's are given instead.
        memory_source: who says so.
        cache: bytes for the cache alone of each, where that is what is given.
        overhead: bytes of each that are not for weights and cache, in place of the formulas.
    """

    accelerator: Accelerator | None
    devices: int
    tp: int
    pp: int
    memory: int | None
    memory_source: str
    cache: int | None = None
    overhead: int | None = None

    @property
    def replicas(self) -> int:
        """Copies of the model that run beside each other."""
        return self.devices // (self.tp * self.pp)

    @property
    def label(self) -> str:
        """How messages call it: ``4 x H100 SXM5 80GB``."""
        name = "memory" if self.accelerator is None else self.accelerator.name
        return name if self.devices == 1 else f"{self.devices} x {name}"


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How caches are cut, and how large a step is.

    Attributes:
        fmt: how the model's keys and values are stored.
        block_tokens: tokens of a block.
        chunk: most prompt tokens that a step computes.
        encoder_tokens: of an encoder's output, where its length is open.
        cartridge: tokens of a trained cache that is stored once, and behind which all sequences begin.
        cartridge_format: how it is stored; None: as the caches are.
    """

    fmt: CacheFormat
    block_tokens: int
    chunk: int
    encoder_tokens: int | None = None
    cartridge: int = 0
    cartridge_format: CacheFormat | None = None

    def groups(self, spec: ModelSpec, fmt: CacheFormat) -> tuple[Group, ...]:
        """The groups of what a rank remembers, in the format of its own layers."""
        if not any(layer.stored for layer in spec.layers):
            return ()
        groups = groups_of(spec, fmt, self.block_tokens, encoder_tokens=self.encoder_tokens)
        if self.cartridge_format is None:
            return groups
        return groups + lead_groups(spec, self.cartridge_format, self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the pipeline, as each of its ranks is.

    Attributes:
        layers: which ones.
        spec: what a rank remembers.
        fmt: how, by the indices of its own layers.
        groups: how its cache is grouped; none where the stage remembers nothing.
        weights: bytes of its weights.
        fixed: what else it holds, whatever the number of sequences.
        sampled: bytes for each sequence that is sampled, in the stage with the head.
    """

    layers: LayerRange
    spec: ModelSpec
    fmt: CacheFormat
    groups: tuple[Group, ...]
    weights: int
    fixed: tuple[Cost, ...]
    sampled: int

    def overhead(self, sequences: int) -> int:
        """Bytes that are neither weights nor cache when ``sequences`` are sampled at once."""
        return sum(cost.size for cost in self.fixed) + sequences * self.sampled

    def cache(self, machine: Machine, sequences: int) -> int:
        """Bytes left for the cache; negative where there are none."""
        if machine.cache is not None:
            return machine.cache
        assert machine.memory is not None
        return machine.memory - self.weights - self.overhead(sequences)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on a machine.

    Attributes:
        machine: the devices.
        stages: of the pipeline, first to last.
        sampled: sequences for which sampling is provided.
        notes: what is not counted, a sentence each.
    """

    machine: Machine
    stages: tuple[Stage, ...]
    sampled: int
    notes: tuple[str, ...]

    @property
    def weights(self) -> int:
        """Bytes of weights on all devices."""
        return self._all(lambda stage: stage.weights)

    @property
    def overhead(self) -> int:
        """Bytes on all devices that are neither weights nor cache."""
        return self._all(lambda stage: stage.overhead(self.sampled)) if self.machine.cache is None else 0

    @property
    def cache(self) -> int:
        """Bytes for the cache on all devices, copies of shared heads included."""
        return self._all(lambda stage: stage.cache(self.machine, self.sampled))

    @property
    def memory(self) -> int:
        """Bytes of all devices, or of their caches where those are given."""
        each = self.machine.memory if self.machine.cache is None else self.machine.cache
        assert each is not None
        return self.machine.devices * each

    def to_dict(self) -> dict[str, Any]:
        """As under ``capacity.deployment`` in the JSON of ``kvist plan``: sizes are those of one device."""
        machine = self.machine
        return {
            "gpu": None if machine.accelerator is None else machine.accelerator.name,
            "devices": machine.devices,
            "tp": machine.tp,
            "pp": machine.pp,
            "replicas": machine.replicas,
            "memory_bytes": machine.memory if machine.cache is None else machine.cache,
            "memory_source": machine.memory_source,
            "sampled_sequences": self.sampled,
            "stages": [
                {
                    "layers": [stage.layers.first, stage.layers.end],
                    "weights_bytes": stage.weights,
                    "cache_bytes": stage.cache(machine, self.sampled),
                    "overhead": [
                        {"what": cost.what, "bytes": cost.size, "formula": cost.formula, "source": cost.source}
                        for cost in self.costs(stage)
                    ],
                }
                for stage in self.stages
            ],
        }

    def costs(self, stage: Stage) -> tuple[Cost, ...]:
        """What a device of a stage holds beside weights and cache."""
        if self.machine.cache is not None:
            return ()
        return (*stage.fixed, sampling_cost(stage.sampled, self.sampled)) if stage.sampled else stage.fixed

    def _all(self, of: Callable[[Stage], int]) -> int:
        return self.machine.replicas * self.machine.tp * sum(of(stage) for stage in self.stages)


def stages_of(spec: ModelSpec, weights: Weights | None, machine: Machine, *, cutting: Cutting) -> tuple[Stage, ...]:
    """Deal a model out to the stages of a machine.

    Args:
        spec: the model.
        weights: its weights; None where only the cache is planned.
        machine: the devices.
        cutting: how caches are cut.

    Raises:
        InputError: layers or heads cannot be dealt out so.
    """
    total = len(spec.layers)
    runtime = runtime_of(machine.accelerator, machine.tp * machine.pp)
    stages = []
    for part in split_layers(total, machine.pp):
        inventory = None if weights is None else weights.inventory
        fixed: tuple[Cost, ...] = ()
        sampled = 0
        if machine.overhead is not None:
            fixed = (Cost(what="overhead", size=machine.overhead, formula="as given", source="--overhead"),)
        elif weights is not None:
            fixed = runtime
            if inventory is not None:
                fixed = (
                    activations_of(inventory, part, machine.tp, chunk=cutting.chunk, width=_compute_bytes(weights)),
                    *runtime,
                )
                sampled = sampled_bytes(inventory) if part.end == total else 0
        held, fmt = rank_spec(spec, part, machine.tp), cutting.fmt.within(part.first, part.end, total)
        stages.append(
            Stage(
                layers=part,
                spec=held,
                fmt=fmt,
                groups=cutting.groups(held, fmt),
                weights=0 if weights is None else weights.held(part.first, part.end, layers=total, tp=machine.tp),
                fixed=fixed,
                sampled=sampled,
            )
        )
    return tuple(stages)


def _compute_bytes(weights: Weights) -> int:
    """Bytes of an element in which a network with these weights computes."""
    return 4 if set(weights.by_type) <= {"f32", "F32"} else 2


def deploy(
    stages: Sequence[Stage],
    machine: Machine,
    holds: Callable[[Stage, int, int], bool],
    *,
    most: int = MAX_SAMPLED,
    notes: tuple[str, ...] = (),
) -> Deployment:
    """Set memory aside for as many sequences as then fit, up to ``most``.

    Each sampled sequence takes memory from the cache, so that their number is the largest n for which the caches,
    with n sampled, still hold n.

    Args:
        stages: of the pipeline.
        machine: the devices.
        holds: whether the cache of a stage's rank, in bytes, holds so many sequences.
        most: sequences to provide for at most.
        notes: what is not counted.

    Raises:
        DoesNotFit: weights and overhead leave no cache; shows the sum.
    """
    for stage in stages:
        if stage.cache(machine, 1) <= 0:
            raise DoesNotFit(_no_cache(stage, machine))

    def fits(sequences: int) -> bool:
        caches = ((stage, stage.cache(machine, sequences)) for stage in stages)
        return all(cache > 0 and holds(stage, cache, sequences) for stage, cache in caches)

    sampled = most if not any(stage.sampled for stage in stages) else most_that_fit(fits, most)
    return Deployment(machine=machine, stages=tuple(stages), sampled=max(1, sampled), notes=notes)


def _no_cache(stage: Stage, machine: Machine) -> str:
    """The sum that shows why there is no cache."""
    if machine.memory is None:
        return f"the cache: {format_size(machine.cache or 0)} holds nothing of {stage.spec.name}"
    each = "" if machine.tp * machine.pp == 1 else " on a device"
    overhead = stage.overhead(1)
    sum_of = f"the weights of {stage.spec.name} take {format_size(stage.weights)}{each}"
    assumed = next((entry.value for entry in stage.spec.assumed if entry.key == "dtype"), None)
    if assumed is not None:
        sum_of += f" (taken to be {assumed}, which `weights` overrides)"
    if overhead:
        sum_of += f" and overhead {format_size(overhead)}"
    which = "" if machine.accelerator is None else f" of {machine.accelerator.name}"
    return f"{sum_of}; {format_size(machine.memory)}{which} leaves no cache"
