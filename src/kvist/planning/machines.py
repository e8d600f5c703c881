"""From what a user says of devices and memory to a :class:`Machine`."""

from dataclasses import dataclass

from kvist.errors import InputError
from kvist.hardware import Accelerator, Gpus, gpus_named
from kvist.planning.deployment import Machine
from kvist.planning.sharding import rank_spec, split_layers
from kvist.spec.model import ModelSpec
from kvist.units import counted, parse_size

_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was said of the machine, as it was said.

    Attributes:
        gpu: name and number of devices.
        memory: of each device, for everything.
        cache_memory: of each device, for the cache alone.
        tp: ranks.
        pp: stages.
        overhead: of each device, neither weights nor cache.
    """

    gpu: str | None = None
    memory: int | str | None = None
    cache_memory: int | str | None = None
    tp: int | None = None
    pp: int | None = None
    overhead: int | str | None = None

    @property
    def names_memory(self) -> bool:
        """Whether there is anything to fit into."""
        return any(value is not None for value in (self.gpu, self.memory, self.cache_memory))

    def check(self) -> None:
        """Raise :class:`InputError` where two wishes contradict each other."""
        if self.memory is not None and self.cache_memory is not None:
            raise InputError(
                "`memory` and `cache_memory` are both given; `memory` includes the weights: give one", key="memory"
            )
        if self.gpu is not None and self.cache_memory is not None:
            raise InputError(
                "`gpu` and `cache_memory` are both given; the cache of a device is what weights and overhead leave: "
                "give one, or `memory` for another size of device",
                key="cache_memory",
            )
        if self.overhead is not None and self.cache_memory is not None:
            raise InputError(
                "`overhead` and `cache_memory` are both given; the cache alone has no overhead: leave it out",
                key="overhead",
            )


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A machine, and what must be known of how it was understood."""

    machine: Machine
    notes: tuple[str, ...]


def machine_of(wish: Wish, spec: ModelSpec) -> Placed:
    """Say which devices a wish means.

    Raises:
        InputError: a value is wrong, or numbers do not go together; names them.
        UnsupportedModel: heads or layers cannot be dealt out so.
    """
    wish.check()
    gpus = None if wish.gpu is None else gpus_named(wish.gpu)
    tp = None if wish.tp is None else _ranks("tp", wish.tp)
    pp = 1 if wish.pp is None else _ranks("pp", wish.pp)
    devices = None if gpus is None else gpus.count
    if tp is None:
        tp = 1 if devices is None else _widest(spec, devices, pp)
    if devices is None:
        devices = tp * pp
    if devices % (tp * pp):
        raise InputError(
            f"gpu: {counted(devices, 'device')} cannot be shared by {counted(tp, 'rank')} x {counted(pp, 'stage')}; "
            f"name {tp * pp} or a multiple, or other `tp` and `pp`",
            key="gpu",
        )
    overhead = None if wish.overhead is None else parse_size(wish.overhead, key="overhead")
    accelerator = None if gpus is None else gpus.accelerator
    cache = None if wish.cache_memory is None else parse_size(wish.cache_memory, key="cache_memory")
    memory, source = None, "--cache-memory"
    if wish.memory is not None:
        memory, source = parse_size(wish.memory, key="memory"), "--memory"
    elif accelerator is not None:
        fact = accelerator.memory()
        memory, source = int(fact.value), fact.source
    machine = Machine(
        accelerator=accelerator, devices=devices, tp=tp, pp=pp, memory=memory, memory_source=source, cache=cache,
        overhead=overhead,
    )  # fmt: skip
    return Placed(
        machine=machine, notes=(*_name_notes(gpus), *_memory_notes(accelerator, wish), *_shape_notes(machine, wish))
    )


def _ranks(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_RANKS:
        raise InputError(f"{key}: {value!r}; a whole number from 1 to {_MOST_RANKS}", key=key)
    return value


def _widest(spec: ModelSpec, devices: int, pp: int) -> int:
    """Most ranks that divide both the devices and the heads; the rest of the devices are replicas."""
    for tp in range(devices // pp, 1, -1):
        if devices % (tp * pp):
            continue
        try:
            for part in split_layers(len(spec.layers), pp):
                rank_spec(spec, part, tp)
        except InputError as error:
            if error.key == "pp":
                raise
            continue
        return tp
    return 1


def _name_notes(gpus: Gpus | None) -> tuple[str, ...]:
    if gpus is None or not gpus.shortened:
        return ()
    return (f"taken as {gpus.accelerator.name}; there are also {', '.join(gpus.shortened)}",)


def _memory_notes(accelerator: Accelerator | None, wish: Wish) -> tuple[str, ...]:
    if accelerator is None or wish.memory is not None or accelerator.usable is not None:
        return ()
    assert accelerator.nominal is not None
    return (
        f"what the driver of {accelerator.name} reports is not known: its nominal "
        f"{accelerator.nominal.value / 10**9:g} GB are read as decimal ones",
    )


def _shape_notes(machine: Machine, wish: Wish) -> tuple[str, ...]:
    if machine.replicas == 1 or wish.tp is not None:
        return ()
    together = machine.tp * machine.pp
    each = "one device each" if together == 1 else f"{together} devices each"
    return (f"{machine.replicas} replicas of {each}: more ranks cannot share the model's heads",)
