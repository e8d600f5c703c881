"""The question turned round: the smallest set of devices that holds so many users.

For each way to share a model (ranks, stages) it is worked out once what a device needs: weights, overhead and the
smallest cache that holds the users. Every device with that much memory then will do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvist.errors import DoesNotFit, InputError
from kvist.hardware import Accelerator, accelerators
from kvist.planning.demand import Demand
from kvist.planning.deployment import (
    MAX_SAMPLED,
    Cutting,
    Deployment,
    Machine,
    Stage,
    runtime_of,
    stages_of,
)
from kvist.planning.roofline import Speed, speed_of
from kvist.planning.weights import Weights
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size

# Ranks share a layer up to the eight devices of one machine; beyond, machines share the layers.
_SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))

# A cache is found to within this share.
_CLOSE = 0.002


@dataclass(frozen=True, kw_only=True)
class GpuSet:
    """Devices that hold the users.

    Attributes:
        accelerator: each of them.
        tp: ranks.
        pp: stages.
        memory: bytes of each.
        needed: of these, for weights, overhead and the users' caches, on the fullest.
        speed: bounds on it; None where rates or bandwidth are not known.
    """

    accelerator: Accelerator
    tp: int
    pp: int
    memory: int
    needed: int
    speed: Speed | None

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.tp * self.pp

    @property
    def link_counted(self) -> bool:
        """Whether the speeds count what ranks send each other: there is one rank, or their link is known."""
        return self.tp == 1 or self.accelerator.link is not None

    def to_dict(self) -> dict[str, Any]:
        """As under ``sets`` in the JSON of ``kvist plan``."""
        return {
            "gpu": self.accelerator.name,
            "devices": self.devices,
            "tp": self.tp,
            "pp": self.pp,
            "memory_bytes": self.devices * self.memory,
            "device_memory_bytes": self.memory,
            "device_needed_bytes": self.needed,
            "link_counted": self.link_counted,
            "speed": None if self.speed is None else self.speed.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A way to share a model, and what a device of each stage needs without its runtime."""

    machine: Machine
    stages: tuple[Stage, ...]
    needed: tuple[int, ...]
    caches: tuple[int, ...]


def smallest_sets(
    spec: ModelSpec,
    fmt: CacheFormat,
    weights: Weights,
    cutting: Cutting,
    demand: Demand,
    *,
    users: int,
    among: Iterable[Accelerator] | None = None,
) -> tuple[GpuSet, ...]:
    """For each device the fewest that hold the users, the smallest memory in all first.

    Args:
        spec: the model.
        fmt: how keys and values are stored.
        weights: what its weights weigh.
        cutting: how caches are cut.
        demand: what each user asks.
        users: how many.
        among: devices to choose from; by default all whose memory is known and their own.

    Raises:
        DoesNotFit: not even the largest set holds them; shows what a device of it would need.
    """
    devices = [each for each in (accelerators() if among is None else among) if each.plannable]
    shapes: list[_Shape] = []
    found: dict[str, GpuSet] = {}
    for shape in _shapes(spec, weights, cutting, demand, users):
        shapes.append(shape)
        for accelerator in devices:
            if accelerator.name not in found:
                held = _on(accelerator, shape)
                if held is not None:
                    speed = _speed(spec, fmt, weights, demand, accelerator, shape, users)
                    found[accelerator.name] = replace(held, speed=speed)
        if len(found) == len(devices):
            break
    if not found:
        raise DoesNotFit(_too_much(users, demand, shapes))
    return tuple(sorted(found.values(), key=lambda each: (each.devices * each.memory, each.devices)))


def _shapes(spec: ModelSpec, weights: Weights, cutting: Cutting, demand: Demand, users: int) -> Iterator[_Shape]:
    """Ways to share the model that its heads and layers allow, fewest devices first."""
    for tp, pp in _SHAPES:
        machine = Machine(
            accelerator=None, devices=tp * pp, tp=tp, pp=pp, memory=0, memory_source="each device of the list"
        )
        try:
            stages = stages_of(spec, weights, machine, cutting=cutting)
        except InputError:
            continue
        caches = tuple(_smallest_cache(demand, stage, users) for stage in stages)
        sampled = min(users, MAX_SAMPLED)
        needed = tuple(
            stage.weights + stage.overhead(sampled) + cache for stage, cache in zip(stages, caches, strict=True)
        )
        yield _Shape(machine=machine, stages=stages, needed=needed, caches=caches)


def _smallest_cache(demand: Demand, stage: Stage, users: int) -> int:
    """Bytes of a cache on a rank that holds the users, to within a small part."""
    if not stage.groups:
        return 0
    least = max(2**20, demand.least(stage, users))
    low, more = least, int(least * _CLOSE) + 1
    while not demand.holds(stage, low + more, users):
        low, more = low + more, 2 * more
    high = low + more
    while high - low > int(high * _CLOSE) + 1:
        middle = (low + high) // 2
        if demand.holds(stage, middle, users):
            high = middle
        else:
            low = middle
    return high


def _on(accelerator: Accelerator, shape: _Shape) -> GpuSet | None:
    """The set of this device, where each has enough memory."""
    machine = shape.machine
    runtime = sum(cost.size for cost in runtime_of(accelerator, machine.devices))
    needed = max(shape.needed) + runtime
    memory = int(accelerator.memory().value)
    if needed > memory:
        return None
    return GpuSet(accelerator=accelerator, tp=machine.tp, pp=machine.pp, memory=memory, needed=needed, speed=None)


def _speed(
    spec: ModelSpec,
    fmt: CacheFormat,
    weights: Weights,
    demand: Demand,
    accelerator: Accelerator,
    shape: _Shape,
    users: int,
) -> Speed | None:
    if weights.inventory is None:
        return None
    machine = replace(shape.machine, accelerator=accelerator)
    deployment = Deployment(machine=machine, stages=shape.stages, sampled=min(users, MAX_SAMPLED), notes=())
    try:
        return speed_of(
            spec,
            fmt,
            deployment,
            weights,
            users=users,
            context=demand.context + demand.cutting.cartridge,
            prompt=demand.prompt,
            fills=False,
        )
    except InputError:
        return None


def _too_much(users: int, demand: Demand, shapes: list[_Shape]) -> str:
    if not shapes:
        counts = ", ".join(str(tp * pp) for tp, pp in _SHAPES)
        return f"{counted(users, 'user')}: the model can be shared by none of {counts} devices"
    last = shapes[-1]
    stage = max(range(len(last.stages)), key=lambda index: last.needed[index])
    cache, weights = format_size(last.caches[stage]), format_size(last.stages[stage].weights)
    return (
        f"{counted(users, 'user')} x {counted(demand.context, 'token')} need {cache} of cache and {weights} of weights "
        f"on each of {counted(last.machine.devices, 'device')}; none of the list has as much"
    )
