"""What a simulation found: plain numbers, and a picture of memory over time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# What kept a step from being shorter, or more requests from running; the codes of `Timeline.bound`.
Bound = Literal["idle", "compute", "bandwidth", "memory", "slots", "tiers"]
BOUNDS: tuple[Bound, ...] = ("idle", "compute", "bandwidth", "memory", "slots", "tiers")


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of the requests that finished; seconds, all 0 where none did."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: npt.ArrayLike) -> "Percentiles":
        """Linear interpolation between neighbours, as NumPy's default."""
        found = np.asarray(values, np.float64)
        if not found.size:
            return cls(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
        p50, p90, p99 = np.percentile(found, [50, 90, 99])
        return cls(mean=float(found.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Means over equal stretches of time, at most some 1,000 of them; every array is ``[stretches]``.

    The first begins at 0; the last may be shorter than the others.

    Attributes:
        seconds: float64, the middle of each stretch, since the first arrival.
        running: float64, requests that run.
        waiting: float64, requests that wait.
        running_bytes: float64, tokens of running requests.
        cached_bytes: float64, what only the prefix tree keeps.
        waste_bytes: float64, reserved bytes that hold no token.
        free_bytes: float64, the rest of the cache's memory: the four add up to it.
        bound: int8, index into `BOUNDS`: what bound for the longest part of the stretch.
    """

    seconds: npt.NDArray[np.float64]
    running: npt.NDArray[np.float64]
    waiting: npt.NDArray[np.float64]
    running_bytes: npt.NDArray[np.float64]
    cached_bytes: npt.NDArray[np.float64]
    waste_bytes: npt.NDArray[np.float64]
    free_bytes: npt.NDArray[np.float64]
    bound: npt.NDArray[np.int8]

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Seconds at which stretches begin and end, float64 ``[stretches + 1]``; empty where there are none."""
        middles = self.seconds
        if not middles.size:
            return np.zeros(0)
        begins = np.concatenate(([0.0], middles[:-1] + middles[0]))
        return np.append(begins, 2 * middles[-1] - begins[-1])

    def to_dict(self) -> dict[str, Any]:
        """Columns as lists; ``bound`` by name."""
        columns: dict[str, Any] = {
            name: np.round(getattr(self, name), 6).tolist() for name in self.__dataclass_fields__ if name != "bound"
        }
        return {**columns, "bound": [BOUNDS[code] for code in self.bound]}


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What one policy made of the trace.

    Attributes:
        policy: ``slab``, ``paged`` or ``prefix``.
        hit_tokens: prompt tokens that were found in the cache, of requests' first admission.
        hit_ratio: over the prompt tokens of requests that were admitted.
        tier_hit_tokens: of these, by the tier that they were loaded from.
        finished: requests.
        refused: requests that could never fit.
        preempted: times that a running request had to give its memory back.
        recomputed_tokens: tokens that were computed again after that.
        peak_running: most requests that ran at once; of several replicas those of each, added up.
        mean_running: over the time in which there was work; of several replicas those of each, added up.
        waste_ratio: reserved bytes that held no token, over reserved bytes of running requests; means over time.
        waste: the same by cause: ``unused`` (reserved for an answer that did not come, the ends of blocks included)
            and ``slab_tails`` (what is left over of the slabs that their blocks lie in, by their share).
        reserved_bytes_peak: most bytes of running requests at once, waste included; added up likewise.
        cache_bytes: the memory that it had.
        ttft, tpot, latency, queue: seconds to the first token, for each further token, to the last token, and until
            admission. None without a clock; ``tpot`` also where nobody got a second token.
        makespan: seconds from the first arrival to the last token; 0 without a clock.
        tokens_per_second: generated, over the makespan.
        steps: of the scheduler.
        bound: shares of the time, by what bound.
        timeline: None without a clock.
    """

    policy: str
    hit_tokens: int
    hit_ratio: float
    finished: int
    refused: int
    cache_bytes: int
    tier_hit_tokens: Mapping[str, int] = field(default_factory=dict)
    preempted: int = 0
    recomputed_tokens: int = 0
    peak_running: int = 0
    mean_running: float = 0.0
    waste_ratio: float = 0.0
    waste: Mapping[str, float] = field(default_factory=dict)
    reserved_bytes_peak: int = 0
    ttft: Percentiles | None = None
    tpot: Percentiles | None = None
    latency: Percentiles | None = None
    queue: Percentiles | None = None
    makespan: float = 0.0
    tokens_per_second: float = 0.0
    steps: int = 0
    bound: Mapping[str, float] = field(default_factory=dict)
    timeline: Timeline | None = None

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON of ``kvist simulate``."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "policy"}
        for name, value in content.items():
            if isinstance(value, Percentiles):
                content[name] = asdict(value)
            elif isinstance(value, Timeline):
                content[name] = value.to_dict()
            elif isinstance(value, Mapping):
                content[name] = dict(value)
        return content


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The policies side by side.

    Attributes:
        trace: where the requests came from.
        model: its name.
        format: codecs of keys and values, such as ``bf16/bf16``.
        machine: what it ran on, in words; "" without a clock.
        requests, prompt_tokens, output_tokens: of the trace.
        policies: by name, in the order in which they were asked for.
        simulated_requests_per_second: requests of all policies over the seconds that simulating them took.
        notes: what a reader should know, a sentence each.
    """

    trace: str
    model: str
    format: str
    machine: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    policies: Mapping[str, PolicyResult]
    simulated_requests_per_second: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``kvist simulate``."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **content,
            "notes": list(self.notes),
            "policies": {name: result.to_dict() for name, result in self.policies.items()},
        }
