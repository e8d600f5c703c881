"""Results such as a simulation finds, from a small queue with invented speeds: something to draw and to print.

Numbers fit each other (the four owners add up to the memory, finished and refused to the requests), and look like a
morning of traffic with a rush in it; they are nobody's measurement.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvist.simulation.results import BOUNDS, Percentiles, PolicyResult, SimulationResult, Timeline

_TOKEN = 128 * 1024
_BLOCK = 16
_SHARED = {"prefix": 0.374}
_STRETCH = 2.0
_CLOCK_NOTE = (
    "Seconds are the roofline's: no kernel is faster, most are slower; --calibrate FILE holds them to points that were "
    "measured."
)
_ORDER_NOTE = "There is no clock: requests come one after another, and only what the cache finds is counted."


def sample(
    policies: Sequence[str] = ("slab", "paged", "prefix"),
    *,
    requests: int = 3000,
    memory: int = 16 * 2**30,
    limit: int = 8192,
    minutes: float = 30.0,
    clock: bool = True,
) -> SimulationResult:
    """A result of these policies; without a clock as ``--cache-only`` gives it."""
    rng = np.random.default_rng(7)
    prompts = np.minimum(rng.lognormal(6.9, 0.9, requests), limit - 512).astype(np.int64) + 16
    outputs = np.minimum(rng.lognormal(5.3, 0.7, requests), 480).astype(np.int64) + 1
    rush = rng.random(requests) < 0.45
    arrivals = np.sort(np.where(rush, rng.normal(0.4, 0.07, requests), rng.random(requests)).clip(0, 1)) * minutes * 60
    found = {}
    for policy in policies:
        made = _replay(policy, arrivals, prompts, outputs, memory=memory, limit=limit)
        found[policy] = made if clock else _without_clock(made)
    return SimulationResult(
        trace="traces/conversation.jsonl.gz",
        model="llama-3-8b",
        format="bf16/bf16",
        machine="1 x H100 80 GB" if clock else "",
        requests=requests,
        prompt_tokens=int(prompts.sum()),
        output_tokens=int(outputs.sum()),
        policies=found,
        simulated_requests_per_second=2140.0 if clock else 118_400.0,
        notes=(_CLOCK_NOTE if clock else _ORDER_NOTE,),
    )


def _without_clock(result: PolicyResult) -> PolicyResult:
    return PolicyResult(
        policy=result.policy,
        hit_tokens=result.hit_tokens,
        hit_ratio=result.hit_ratio,
        finished=result.finished,
        refused=result.refused,
        cache_bytes=result.cache_bytes,
        tier_hit_tokens={"host": result.hit_tokens // 4} if result.hit_tokens else {},
    )


def without_timelines(result: SimulationResult) -> SimulationResult:
    """The same, its timelines left out."""
    policies = {name: replace(each, timeline=None) for name, each in result.policies.items()}
    return replace(result, policies=policies)


def with_stretches(result: SimulationResult, count: int) -> SimulationResult:
    """The same, only the first ``count`` stretches of its timelines left."""

    def cut(line: Timeline | None) -> Timeline | None:
        return line and Timeline(**{name: getattr(line, name)[:count] for name in Timeline.__dataclass_fields__})

    policies = {name: replace(each, timeline=cut(each.timeline)) for name, each in result.policies.items()}
    return replace(result, policies=policies)


def _replay(
    policy: str, arrivals: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, *, memory: int, limit: int
) -> PolicyResult:
    share = _SHARED.get(policy, 0.0)
    own = np.ceil(prompts * (1 - share)).astype(np.int64)
    queue: deque[int] = deque()
    running: dict[int, float] = {}
    columns: dict[str, list[float]] = {name: [] for name in Timeline.__dataclass_fields__}
    first, last, began = np.zeros(len(prompts)), np.zeros(len(prompts)), np.zeros(len(prompts))
    came, now, cached, preempted, reserved_most, prefilling = 0, 0.0, 0.0, 0, 0, 0.0

    def reserved(one: int, done: float) -> int:
        if policy == "slab":
            return limit * _TOKEN
        return int(-(-(own[one] + done) // _BLOCK)) * _BLOCK * _TOKEN

    while came < len(prompts) or queue or running:
        while came < len(prompts) and arrivals[came] <= now:
            queue.append(came)
            came += 1
        used = sum(reserved(one, done) for one, done in running.items())
        while queue and len(running) < 256 and used + reserved(queue[0], 1) <= memory and prefilling < 2.5 * _STRETCH:
            one = queue.popleft()
            began[one] = now
            prefilling += float(own[one]) / 9_000
            first[one] = now + prefilling
            running[one] = 1.0
            used += reserved(one, 1)
        prefilling = max(0.0, prefilling - _STRETCH)
        rate = 1 / (0.028 + 0.0005 * len(running)) * (0.6 if prefilling else 1.0)
        for one in list(running):
            running[one] = min(outputs[one], running[one] + rate * _STRETCH * (0.8 + 0.4 * ((one * 37) % 11) / 11))
            if running[one] >= outputs[one]:
                last[one] = max(now + _STRETCH, first[one])
                cached += float(own[one]) * _TOKEN if policy == "prefix" else 0.0
                del running[one]
        used = sum(reserved(one, done) for one, done in running.items())
        while used > memory:
            one = max(running)
            used -= reserved(one, running.pop(one))
            queue.appendleft(one)
            preempted += 1
        tokens = sum(int(own[one] + done) for one, done in running.items()) * _TOKEN
        cached = min(cached, memory - used)
        reserved_most = max(reserved_most, used)
        short = len(queue) > 2
        bound = "idle" if not running else "memory" if short else "compute" if prefilling else "bandwidth"
        for name, value in (
            ("seconds", now + _STRETCH / 2),
            ("running", len(running)),
            ("waiting", len(queue)),
            ("running_bytes", tokens),
            ("cached_bytes", cached),
            ("waste_bytes", used - tokens),
            ("free_bytes", memory - used - cached),
            ("bound", BOUNDS.index(bound)),
        ):
            columns[name].append(value)
        now += _STRETCH
    line = Timeline(
        **{name: np.asarray(column, np.int8 if name == "bound" else np.float64) for name, column in columns.items()}  # type: ignore[arg-type]
    )
    held = line.running_bytes + line.waste_bytes
    waste = float(line.waste_bytes.sum() / held.sum()) if held.any() else 0.0
    busy = line.running > 0
    return PolicyResult(
        policy=policy,
        hit_tokens=int((prompts - own).sum()),
        hit_ratio=float((prompts - own).sum() / prompts.sum()),
        finished=len(prompts),
        refused=0,
        cache_bytes=memory,
        preempted=preempted,
        recomputed_tokens=preempted * 900,
        peak_running=int(line.running.max(initial=0)),
        mean_running=float(line.running[busy].mean()) if busy.any() else 0.0,
        waste_ratio=waste,
        waste={"unused": waste * 0.97, "slab_tails": waste * 0.03},
        reserved_bytes_peak=reserved_most,
        ttft=Percentiles.of(first - arrivals),
        tpot=Percentiles.of((last - first).clip(0.01) / outputs),
        latency=Percentiles.of(last - arrivals),
        queue=Percentiles.of(began - arrivals),
        makespan=now,
        tokens_per_second=float(outputs.sum() / now) if now else 0.0,
        steps=int(now / 0.03),
        bound={BOUNDS[code]: float((line.bound == code).mean()) for code in np.unique(line.bound)},
        timeline=line,
    )
