"""How long a step of the scheduler takes: the roofline of a deployment, asked for any mixture of prompts and decodes.

For each stage of the pipeline

    compute   = operations of the step / (peak rate x efficiency)
    bandwidth = bytes of the step / (peak bandwidth x efficiency)
    seconds   = stages x (the longer of the two + what ranks send each other), of the slowest stage, + a constant

of as many parts of the step as there are stages: while one works on some of its sequences, the others work on others.

Operations and bytes are those of :mod:`kvist.planning.roofline`, summed over the step: weights once, of experts those
that one of its tokens is sent to; each decode reads its whole sequence and writes a token; each chunk of a prompt reads
what is before it, writes itself and reads that again, and its tokens see what is before each of them.

Attention is linear in the length of a sequence, up to a window. So a step is known from a few sums over its decodes:
how many, their lengths, and for each number of :attr:`StepClock.reaches` their lengths cut off there: docs/clock.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvist.errors import InputError
from kvist.hardware import Accelerator
from kvist.planning.attending import seen_by_chunk
from kvist.planning.deployment import Deployment
from kvist.planning.roofline import StageCosts, costs_of
from kvist.planning.weights import Weights
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec


# A clock is asked for each of some 100,000 steps: named tuples take a third of the time of frozen dataclasses.
class StepTime(NamedTuple):
    """How long a step takes, and what it would take to make it shorter."""

    seconds: float
    bound: Literal["compute", "bandwidth"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: the tokens at the positions ``start … start + count - 1``.

    ``samples`` tells that the prompt ends here, so that its last token goes through the output head.
    """

    start: int
    count: int
    samples: bool = True


class Chunk(Protocol):
    """What a clock must know of a part of a prompt: a :class:`Piece`, or a chunk of the scheduler's."""

    @property
    def start(self) -> int:
        """Tokens before it, which the cache holds."""

    @property
    def count(self) -> int:
        """Tokens that are computed."""

    @property
    def samples(self) -> bool:
        """Whether the last of them goes through the output head."""


class StepClock(Protocol):
    """Anything that tells the time of a step."""

    @property
    def reaches(self) -> tuple[int, ...]:
        """Distinct windows of the model, in tokens, ascending."""

    def step(
        self, prefills: Sequence[Chunk], decodes: int, decode_tokens: int, reached: Sequence[int] | None = None
    ) -> StepTime:
        """Time of one step.

        Args:
            prefills: parts of prompts that are computed in it.
            decodes: sequences that one more token is computed of.
            decode_tokens: their lengths added up, the token that is computed included.
            reached: for each of ``reaches``, ``min(length, reach)`` added up over these sequences. Where it is left
                out all are taken to be of one length, which is exact for equal ones and too much for others.
        """


@dataclass(frozen=True, kw_only=True)
class Factors:
    """How far a device falls short of its peaks.

    Attributes:
        compute: part of the peak rate that is reached.
        bandwidth: part of the peak bandwidth that is reached.
        seconds: that each step takes whatever it computes: launches, scheduling, sampling.
    """

    compute: float = 1.0
    bandwidth: float = 1.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for key in ("compute", "bandwidth"):
            value = getattr(self, key)
            if not 0 < value < float("inf"):
                raise InputError(f"{key}: {value!r}; a part of the peak, above 0", key=key)
        if not 0 <= self.seconds < float("inf"):
            raise InputError(f"seconds: {self.seconds!r} a step; 0 or more", key="seconds")


class Ceilings(NamedTuple):
    """What a stage's step takes at its peaks, in seconds."""

    compute: float
    bandwidth: float
    link: float


class _Rates(NamedTuple):
    """Seconds of a stage, times the number of stages, for each of what a step is made of.

    ``reached_*`` and ``near_*`` belong to `Clock.reaches`; ``experts`` are seconds by the chance not to be chosen.
    """

    token_compute: float
    head_compute: float
    seen_compute: float
    reached_compute: tuple[float, ...]
    step_bandwidth: float
    sequence_bandwidth: float
    append_bandwidth: float
    held_bandwidth: float
    reached_bandwidth: tuple[float, ...]
    chunk_bandwidth: float
    near_bandwidth: tuple[float, ...]
    experts: tuple[tuple[float, float], ...]
    token_link: float


class Clock:
    """The roofline of a deployment as a clock; see the module.

    Attributes:
        reaches: distinct windows of the model, in tokens, ascending.
        factors: how far its devices fall short of their peaks.
        notes: what it does not count, a sentence each.
    """

    def __init__(
        self, costs: Sequence[StageCosts], *, factors: Factors | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        self.factors = Factors() if factors is None else factors
        self.notes = notes
        limits = {line.until for stage in costs for line in stage.attending.lines}
        self.reaches = tuple(sorted(until for until in limits if until is not None))
        self._costs = tuple(costs)
        self._nothing = (0,) * len(self.reaches)
        self._constant = self.factors.seconds
        self._stages = costs[0].stages
        # Stages of equal layers take equally long.
        self._peaks = tuple(dict.fromkeys(_rates(stage, self.reaches, Factors()) for stage in costs))
        self._rates = tuple(dict.fromkeys(_rates(stage, self.reaches, self.factors) for stage in costs))

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        fmt: CacheFormat,
        deployment: Deployment,
        weights: Weights | None,
        *,
        factors: Factors | None = None,
    ) -> "Clock":
        """Make the clock of one replica of a deployment.

        Args:
            spec: the model.
            fmt: how keys and values are stored.
            deployment: where it runs.
            weights: what its weights weigh.
            factors: how far its devices fall short of their peaks; by default they do not.

        Raises:
            InputError: there is no device, its rate or bandwidth is not known, or the shapes of the weights are not.
        """
        machine = deployment.machine
        accelerator = machine.accelerator
        if accelerator is None:
            raise InputError(
                "gpu: a memory without a device has no speed; name a device of `kvist gpus`, or simulate without a "
                "clock (`--cache-only`)",
                key="gpu",
            )
        if weights is None or weights.inventory is None:
            why = "none are planned for" if weights is None else weights.reason
            raise InputError(
                f"weights: {why}, and a clock needs their shapes; simulate without one (`--cache-only`)", key="weights"
            )
        if accelerator.bandwidth is None:
            raise _unknown(accelerator, "memory bandwidth")
        costs = costs_of(spec, fmt, deployment, weights)
        if costs[0].rate is None:
            raise _unknown(accelerator, "bf16 rate")
        silent = machine.tp > 1 and accelerator.link is None
        notes = (f"the link of {accelerator.name} is not known: what ranks send each other takes no time",)
        return cls(costs, factors=factors, notes=notes if silent else ())

    def with_factors(self, factors: Factors) -> "Clock":
        """The same deployment, as far from its peaks as ``factors`` say."""
        return Clock(self._costs, factors=factors, notes=self.notes)

    def step(
        self, prefills: Sequence[Chunk], decodes: int, decode_tokens: int, reached: Sequence[int] | None = None
    ) -> StepTime:
        """Time of one step; see :class:`StepClock`."""
        if self._stages == 1:
            compute, bandwidth, rest = self._slowest(self._rates, prefills, decodes, decode_tokens, reached)
        else:
            compute, bandwidth, rest = self._piped(self._rates, prefills, decodes, decode_tokens, reached)
        rest += self._constant
        return StepTime(compute + rest, "compute") if compute >= bandwidth else StepTime(bandwidth + rest, "bandwidth")

    def ceilings(
        self, prefills: Sequence[Chunk], decodes: int, decode_tokens: int, reached: Sequence[int] | None = None
    ) -> Ceilings:
        """What a step would take at the device's peaks, of the slowest stage times their number."""
        return Ceilings(*self._piped(self._peaks, prefills, decodes, decode_tokens, reached))

    def _piped(
        self,
        stages: Sequence[_Rates],
        prefills: Sequence[Chunk],
        decodes: int,
        decode_tokens: int,
        reached: Sequence[int] | None,
    ) -> tuple[float, float, float]:
        """As many parts as stages, all alike; none is shorter than the largest chunk, which stays in one."""
        parts = max(1, min(self._stages, decodes + len(prefills)))
        found = self._slowest(stages, prefills, decodes, decode_tokens, reached, parts)
        if parts == 1 or not prefills:
            return found
        largest = max(prefills, key=lambda piece: piece.count * (piece.start + piece.count))
        alone = self._slowest(stages, [largest], 0, 0, None)
        return max(found, alone, key=lambda ceilings: max(ceilings[:2]) + ceilings[2])

    def _slowest(
        self,
        stages: Sequence[_Rates],
        prefills: Sequence[Chunk],
        decodes: int,
        decode_tokens: int,
        reached: Sequence[int] | None,
        parts: int = 1,
    ) -> tuple[float, float, float]:
        """Compute, bandwidth and link of the stage that takes the longest, of one of so many parts of the step."""
        tokens: float = decodes
        sampled: float = decodes
        sequences: float = decodes
        alone: float = decodes
        # Tokens that the step's queries see, that its decodes read, and that its chunks read and write.
        seen: float = decode_tokens
        held: float = decode_tokens
        chunked: float = 0
        near_seen: Sequence[float] = ()
        near_held: Sequence[float] = ()
        near_chunked: Sequence[float] = self._nothing
        if self.reaches:
            if reached is None:
                reached = [min(decode_tokens, decodes * reach) for reach in self.reaches]
            near_seen = near_held = reached
            if prefills:
                near_seen, near_chunked = _near(prefills, self.reaches, reached)
        for piece in prefills:
            start, count = piece.start, piece.count
            tokens += count
            seen += count * start + count * (count + 1) // 2
            chunked += start + 2 * count
            sampled += piece.samples
            sequences += 1
        if parts > 1:
            tokens, sampled, sequences, alone = tokens / parts, sampled / parts, sequences / parts, alone / parts
            seen, held, chunked = seen / parts, held / parts, chunked / parts
            near_seen, near_held, near_chunked = (
                [each / parts for each in near] for near in (near_seen, near_held, near_chunked)
            )
        slowest, longest = (0.0, 0.0, 0.0), -1.0
        for (
            token_compute, head_compute, seen_compute, reached_compute,
            step_bandwidth, sequence_bandwidth, append_bandwidth, held_bandwidth, reached_bandwidth,
            chunk_bandwidth, near_bandwidth, experts, token_link,
        ) in stages:  # fmt: skip
            compute = tokens * token_compute + sampled * head_compute + seen * seen_compute
            bandwidth = (
                step_bandwidth
                + sequences * sequence_bandwidth
                + alone * append_bandwidth
                + held * held_bandwidth
                + chunked * chunk_bandwidth
            )  # fmt: skip
            for left, seconds in experts:
                bandwidth += seconds * (1 - left**tokens)
            if near_seen:
                for sees, reads, writes, seconds, read_seconds, write_seconds in zip(
                    near_seen, near_held, near_chunked, reached_compute, reached_bandwidth, near_bandwidth, strict=True
                ):
                    compute += sees * seconds
                    bandwidth += reads * read_seconds + writes * write_seconds
            link = tokens * token_link
            seconds = (compute if compute >= bandwidth else bandwidth) + link
            if seconds > longest:
                slowest, longest = (compute, bandwidth, link), seconds
        return slowest


@dataclass(frozen=True, kw_only=True)
class FixedClock:
    """A clock of constant speeds, for tests and for what is known only by its speed.

    Attributes:
        prefill_rate: prompt tokens a second.
        decode_seconds: of a step with at least one decode.
        sequence_seconds: more for each sequence that decodes.
        overhead: seconds of each step, whatever it computes.
    """

    prefill_rate: float
    decode_seconds: float
    sequence_seconds: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.prefill_rate < float("inf"):
            raise InputError(f"prefill_rate: {self.prefill_rate!r} tokens a second; above 0", key="prefill_rate")
        for key in ("decode_seconds", "sequence_seconds", "overhead"):
            value = getattr(self, key)
            if not 0 <= value < float("inf"):
                raise InputError(f"{key}: {value!r}; seconds, 0 or more", key=key)

    @property
    def reaches(self) -> tuple[int, ...]:
        """None: it does not ask how long sequences are."""
        return ()

    def step(
        self, prefills: Sequence[Chunk], decodes: int, decode_tokens: int, reached: Sequence[int] | None = None
    ) -> StepTime:
        """Prompts, then decodes; see :class:`StepClock`."""
        prompts = sum(piece.count for piece in prefills) / self.prefill_rate
        answers = self.decode_seconds + decodes * self.sequence_seconds if decodes else 0.0
        return StepTime(prompts + answers + self.overhead, "compute" if prompts > answers else "bandwidth")


def _near(prefills: Sequence[Chunk], reaches: tuple[int, ...], reached: Sequence[int]) -> tuple[list[int], list[int]]:
    """What is seen in windows, by decodes as given and by each chunk, and what chunks read and write in them."""
    seen, chunked = list(reached), [0] * len(reaches)
    for index, reach in enumerate(reaches):
        for piece in prefills:
            start, count = piece.start, piece.count
            if start >= reach:
                seen[index] += count * reach
                chunked[index] += reach + 2 * (count if count < reach else reach)
            else:
                seen[index] += seen_by_chunk(start, count, reach)
                chunked[index] += start + 2 * (count if count < reach else reach)
    return seen, chunked


def _rates(stage: StageCosts, reaches: tuple[int, ...], factors: Factors) -> _Rates:
    assert stage.rate is not None
    # A step passes all stages, each as long as the slowest.
    rate = stage.rate * factors.compute / stage.stages
    bandwidth = stage.bandwidth * factors.bandwidth / stage.stages
    attending = stage.attending
    lines = {line.until: line for line in attending.lines}
    everything, near = lines.get(None), [lines.get(reach) for reach in reaches]
    return _Rates(
        token_compute=(stage.multiplied + attending.operations) / rate,
        head_compute=stage.head / rate,
        seen_compute=0.0 if everything is None else everything.operations / rate,
        reached_compute=tuple(0.0 if line is None else line.operations / rate for line in near),
        step_bandwidth=stage.reading.always / bandwidth,
        sequence_bandwidth=attending.bytes / bandwidth,
        append_bandwidth=attending.appended / bandwidth,
        held_bandwidth=0.0 if everything is None else everything.bytes / bandwidth,
        reached_bandwidth=tuple(0.0 if line is None else line.bytes / bandwidth for line in near),
        chunk_bandwidth=0.0 if everything is None else everything.chunk_bytes / bandwidth,
        near_bandwidth=tuple(0.0 if line is None else line.chunk_bytes / bandwidth for line in near),
        experts=tuple((left, size / bandwidth) for left, size in stage.reading.experts.items()),
        token_link=stage.stages * stage.sent / stage.link if stage.link else 0.0,
    )


def _unknown(accelerator: Accelerator, what: str) -> InputError:
    return InputError(
        f"gpu: the {what} of {accelerator.name} is not known (public sources are silent or disagree), and a clock "
        f"needs it; choose another device of `kvist gpus`, or simulate without a clock (`--cache-only`)",
        key="gpu",
    )
