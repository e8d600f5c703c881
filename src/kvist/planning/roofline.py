"""How fast a deployment could be at best: operations against compute, bytes against bandwidth.

A step takes at least the longer of ``operations / peak rate`` and ``bytes / peak bandwidth`` of a rank, and what its
ranks send each other. Counted are

    operations = 2 x parameters that a token is multiplied with + attention over what each layer keeps
    bytes      = weights, of experts those that the batch is sent to, + the caches of all sequences
    sent       = two all-reduces of the hidden states a layer, ``2 (tp - 1) / tp`` of them a link

This is a bound, not a forecast: it knows no launch, no scheduling and no loss of clock, and takes transfers and
computation inside a step to overlap perfectly; experts are taken to be chosen evenly. Decoding has been measured at
33 % of it (Mistral-7B, one sequence, A100, vLLM of 2023: ggml-org/llama.cpp#3479) to 66 % (a 27B model on RTX 3090:
ashalliants/ninfer-3090#36); docs/clock.md has more. Small models on fast devices, whose steps are a few launches long,
reach less.
"""

from dataclasses import dataclass
from typing import Any, Literal

from kvist.hardware import Accelerator, Fact
from kvist.planning.attending import Attending, attending_of
from kvist.planning.deployment import Deployment
from kvist.planning.sharding import LayerRange
from kvist.planning.weights import Reading, Weights
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.parameters import Inventory

Ceiling = Literal["memory", "bandwidth", "compute"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The least time of a step, and what it goes to, on the slowest stage's ranks.

    Attributes:
        tokens: computed in it.
        operations: of a rank.
        weights_bytes: that a rank reads.
        cache_bytes: that a rank reads and writes.
        compute_seconds: operations over the peak rate; 0 where it is not known.
        memory_seconds: bytes over the peak bandwidth.
        link_seconds: what ranks send each other; 0 where there is one or nothing is known of their link.
        stages: of the pipeline, which a token passes one after the other.
    """

    tokens: int
    operations: float
    weights_bytes: float
    cache_bytes: float
    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    stages: int

    @property
    def stage_seconds(self) -> float:
        """Of the slowest stage."""
        return max(self.compute_seconds, self.memory_seconds) + self.link_seconds

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return self.stages * self.stage_seconds

    @property
    def binds(self) -> Literal["bandwidth", "compute"]:
        """The longer of the two."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "bandwidth"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Bounds on the speed of a deployment.

    Attributes:
        users: sequences that decode at once, over all replicas.
        context: tokens of each.
        decode: one step of all of a replica's sequences.
        prefill: the prompt of one sequence; None where the device's rate is not known.
        prompt: its tokens.
        replicas: that run beside each other.
        binds: what to raise to serve more users.
    """

    users: int
    context: int
    decode: Step
    prefill: Step | None
    prompt: int
    replicas: int
    binds: Ceiling

    @property
    def decode_rate(self) -> float:
        """Tokens a second of all users; stages work on different sequences at once."""
        return self.replicas * self.decode.tokens / self.decode.stage_seconds

    @property
    def user_rate(self) -> float:
        """Tokens a second of each user."""
        return self.decode_rate / self.users

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second, of one replica."""
        return None if self.prefill is None else self.prompt / self.prefill.seconds

    def to_dict(self) -> dict[str, Any]:
        """As under ``speed`` in the JSON of ``kvist plan``."""
        return {
            "users": self.users,
            "context": self.context,
            "binds": self.binds,
            "decode": {
                "seconds": self.decode.seconds,
                "tokens_per_second": self.decode_rate,
                "tokens_per_second_per_user": self.user_rate,
                **_parts(self.decode),
            },
            "prefill": None
            if self.prefill is None
            else {
                "tokens": self.prompt,
                "seconds": self.prefill.seconds,
                "tokens_per_second": self.prefill_rate,
                **_parts(self.prefill),
            },
        }


def _parts(step: Step) -> dict[str, Any]:
    return {
        "binds": step.binds,
        "compute_seconds": step.compute_seconds,
        "memory_seconds": step.memory_seconds,
        "link_seconds": step.link_seconds,
        "operations": step.operations,
        "weights_bytes": step.weights_bytes,
        "cache_bytes": step.cache_bytes,
    }


def rate_of(accelerator: Accelerator, weights: Weights) -> Fact | None:
    """The peak rate at which a device multiplies such weights, where it is known.

    Types that it multiplies directly have their own; all others are widened to bf16 first.
    """
    codec = max(weights.by_type, key=lambda name: weights.by_type[name])
    wanted = {"fp8": "fp8", "F8_E4M3": "fp8", "nvfp4": "fp4"}.get(codec, "bf16")
    return accelerator.rates.get(wanted) or accelerator.rates.get("bf16")


def speed_of(
    spec: ModelSpec,
    fmt: CacheFormat,
    deployment: Deployment,
    weights: Weights,
    *,
    users: int,
    context: int,
    prompt: int,
    fills: bool,
) -> Speed:
    """Bound the speed of a deployment; where its device's rate is not known, by bandwidth alone.

    Args:
        spec: the model.
        fmt: how keys and values are stored.
        deployment: where it runs; with a device.
        weights: with their shapes.
        users: sequences at once, over all replicas.
        context: tokens of each.
        prompt: tokens of a prompt.
        fills: whether more users would not fit into the memory.

    Raises:
        InputError: the bandwidth of the device is not known.
    """
    machine = deployment.machine
    costs = costs_of(spec, fmt, deployment, weights)
    # While one stage works on some sequences, the others work on other ones.
    together = -(-users // (machine.replicas * machine.pp))
    decode = max((stage.decode(together, context) for stage in costs), key=lambda step: step.stage_seconds)
    prefill = None
    if costs[0].rate is not None:
        prefill = max((stage.prefill(prompt) for stage in costs), key=lambda step: step.stage_seconds)
    return Speed(
        users=users,
        context=context,
        decode=decode,
        prefill=prefill,
        prompt=prompt,
        replicas=machine.replicas,
        binds=_binds(decode, fills=fills),
    )


def _binds(decode: Step, *, fills: bool) -> Ceiling:
    """What to raise to serve more users.

    Where a step computes longer than it reads, compute. Where it reads caches for longer than weights, bandwidth: each
    further user makes the step longer by as much. Otherwise a further user costs next to nothing, and memory is what is
    lacking, if it is full.
    """
    if decode.binds == "compute":
        return "compute"
    return "memory" if fills and decode.weights_bytes > decode.cache_bytes else "bandwidth"


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What the steps of a stage are made of; all sizes are a rank's.

    Attributes:
        multiplied: operations of each token in its matrices, the head left out.
        head: operations of the output head for each sequence that is sampled; 0 before the last stage.
        attending: operations and bytes of attention and states.
        reading: bytes of weights.
        sent: bytes over its link for each token: ring all-reduces of bf16 states, one behind attention and one behind
            the MLP.
        rate: operations a second; None where it is not known.
        bandwidth: bytes a second.
        link: bytes a second; None where it is not known.
        stages: of the pipeline.
    """

    multiplied: float
    head: float
    attending: Attending
    reading: Reading
    sent: float
    rate: float | None
    bandwidth: float
    link: float | None
    stages: int

    def decode(self, sequences: int, context: int) -> Step:
        """One token for each of some sequences of ``context`` tokens."""
        attending = self.attending
        operations = self.multiplied + self.head + attending.operations_at(context)
        cache = attending.bytes + attending.held(context) + attending.appended
        return self._step(tokens=sequences, operations=sequences * operations, cache=sequences * cache)

    def prefill(self, prompt: int) -> Step:
        """A prompt, of which each token attends to those before it, in one pass over the weights."""
        attending = self.attending
        operations = prompt * self.multiplied + self.head + attending.operations_of(0, prompt)
        return self._step(
            tokens=prompt, operations=operations, cache=attending.bytes + 2 * attending.chunk_held(prompt)
        )

    def _step(self, *, tokens: int, operations: float, cache: float) -> Step:
        read = self.reading.bytes(tokens)
        return Step(
            tokens=tokens,
            operations=operations,
            weights_bytes=read,
            cache_bytes=cache,
            compute_seconds=operations / self.rate if self.rate else 0.0,
            memory_seconds=(read + cache) / self.bandwidth,
            link_seconds=tokens * self.sent / self.link if self.link else 0.0,
            stages=self.stages,
        )


def costs_of(spec: ModelSpec, fmt: CacheFormat, deployment: Deployment, weights: Weights) -> tuple[StageCosts, ...]:
    """What the steps of each stage of a deployment are made of.

    Args:
        spec: the model.
        fmt: how keys and values are stored.
        deployment: where it runs; with a device.
        weights: with their shapes.

    Raises:
        InputError: the bandwidth of the device is not known.
    """
    machine = deployment.machine
    accelerator = machine.accelerator
    assert accelerator is not None
    if accelerator.bandwidth is None:
        raise accelerator.unknown("memory bandwidth")
    rate = rate_of(accelerator, weights)
    tp, layers, inventory = machine.tp, len(spec.layers), weights.inventory
    assert inventory is not None
    table = inventory.table
    return tuple(
        StageCosts(
            multiplied=_multiplied(inventory, part, tp),
            head=2.0 * table.share(table.elements, tp) if part.end == layers else 0.0,
            attending=attending_of(spec, fmt, stage.spec.layers, tp=tp, first=part.first),
            reading=weights.reading(part.first, part.end, layers=layers, tp=tp),
            sent=2 * part.count * table.shape[1] * 2 * 2 * (tp - 1) / tp,
            rate=None if rate is None else rate.value,
            bandwidth=accelerator.bandwidth.value,
            link=None if accelerator.link is None else accelerator.link.value,
            stages=len(deployment.stages),
        )
        for stage in deployment.stages
        for part in (stage.layers,)
    )


def _multiplied(inventory: Inventory, part: LayerRange, tp: int) -> float:
    """Operations of a token in a rank's matrices, a multiply-add being two."""
    return 2.0 * sum(
        placed.times * placed.tensor.share(placed.tensor.active, tp)
        for placed in inventory.stage(part.first, part.end)
        if placed.tensor.layers
    )
