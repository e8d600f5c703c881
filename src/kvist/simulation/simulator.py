"""A trace, run through the engine's scheduler and cache under several policies."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from time import perf_counter
from typing import Literal

import numpy as np

from kvist.cache.grouping import MAX_BLOCK_TOKENS
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.tier import Tier
from kvist.errors import DoesNotFit, InputError
from kvist.scheduler import Limits
from kvist.simulation.clock import StepClock
from kvist.simulation.meter import HELD, RUNNING, TAILS, UNUSED, shares, timeline_of
from kvist.simulation.policies import Policy, policy_named
from kvist.simulation.prompts import Prompts
from kvist.simulation.replica import Log, Replica, Shape
from kvist.simulation.results import Percentiles, PolicyResult
from kvist.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the requests are sent to.

    Attributes:
        groups: of what a rank of the tightest stage remembers, in blocks of so many tokens.
        cache_bytes: for its cache.
        clock: how long a step takes.
        max_running: requests that run at once.
        max_batch_tokens: tokens that one step computes.
        max_context: longest sequence; what a slab reserves.
        block_tokens: of a block; the engine's default where left out.
        replicas: that share the requests.
        route: to which of them one goes: ``round-robin``, ``least`` or ``prefix``.
        reclaim: the order in which cached blocks go.
        tiers: where blocks lie beside each replica's device, the nearest first.
        preempt: whether a request that must make room is computed again or swapped out.
    """

    groups: Callable[[int], tuple[Group, ...]]
    cache_bytes: int
    clock: StepClock
    max_running: int
    max_batch_tokens: int
    max_context: int
    block_tokens: int | None = None
    replicas: int = 1
    route: str = "round-robin"
    reclaim: str = "lru"
    tiers: tuple[Tier, ...] = ()
    preempt: Literal["recompute", "swap"] = "recompute"

    def shape(self, policy: Policy) -> Shape:
        """Memory and limits of a replica.

        Raises:
            DoesNotFit: the memory holds not one block of each group.
            InputError: no slab is as long as the longest sequence.
        """
        groups = self._slabs() if policy.one_block else self.groups(policy.block_tokens(self.block_tokens))
        try:
            layout = ArenaLayout.of(groups, self.cache_bytes)
        except DoesNotFit as error:
            if not policy.one_block:
                raise
            raise DoesNotFit(
                f"policy {policy.name}: sequences of up to {self.max_context:,} tokens are too long for its memory, "
                f"lower `max_len`: {error}"
            ) from error
        return Shape(
            groups=groups,
            layout=layout,
            limits=Limits(
                max_running=self.max_running,
                max_batch_tokens=self.max_batch_tokens,
                max_context=self.max_context,
            ),
            prefix_cache=policy.prefix_cache,
            reclaim=self.reclaim,
            tiers=self.tiers,
            preempt=self.preempt,
        )

    def _slabs(self) -> tuple[Group, ...]:
        """Groups whose blocks hold the longest sequence: whole entries of every layer, not a multiple of all tokens."""
        whole = lcm(*(group.block_tokens for group in self.groups(1)))
        longest = -(-self.max_context // whole) * whole
        if longest > MAX_BLOCK_TOKENS:
            raise InputError(
                f"max_len: a slab of {self.max_context:,} tokens; at most {MAX_BLOCK_TOKENS:,}: lower `max_len`",
                key="max_len",
            )
        return self.groups(longest)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Policies that were simulated.

    Attributes:
        policies: what each made of the trace.
        seconds: that simulating took.
    """

    policies: dict[str, PolicyResult]
    seconds: float


def run_policies(
    trace: Trace, server: Server, policies: Sequence[str], *, watch: Callable[[str, float], None] | None = None
) -> Runs:
    """Run a trace under each policy.

    Args:
        trace: requests in the order of their arrival.
        server: what they are sent to.
        policies: names of policies.
        watch: told the policy and the share of requests that have arrived, now and then.

    Raises:
        InputError: a policy is unknown.
        DoesNotFit: the memory holds nothing.
    """
    prompts = Prompts.of(trace)
    started = perf_counter()
    results = {}
    for policy in [policy_named(name) for name in policies]:
        results[policy.name] = _run(trace, prompts, server, policy, watch)
    return Runs(policies=results, seconds=perf_counter() - started)


def _run(
    trace: Trace, prompts: Prompts, server: Server, policy: Policy, watch: Callable[[str, float], None] | None
) -> PolicyResult:
    log = Log.of(len(trace))
    shape = server.shape(policy)
    replicas = [Replica(shape=shape, clock=server.clock, prompts=prompts, log=log) for _ in range(server.replicas)]
    route = router_named(server.route)
    every = max(1, len(trace) // 200)
    arrivals: list[float] = trace.arrivals.tolist()
    for index, arrival in enumerate(arrivals):
        for replica in replicas:
            replica.advance(arrival)
        replicas[route(replicas, index)].give(index)
        if watch is not None and index % every == 0:
            watch(policy.name, index / len(trace))
    for replica in replicas:
        replica.advance(float("inf"))
    end = max(replica.now for replica in replicas)
    for replica in replicas:
        # Who is done first keeps its cache until all are.
        replica.advance(end)
    if watch is not None:
        watch(policy.name, 1.0)
    return _result(trace, policy, shape, replicas, log)


Router = Callable[[Sequence[Replica], int], int]


def _round_robin(replicas: Sequence[Replica], index: int) -> int:
    return index % len(replicas)


def _least(replicas: Sequence[Replica], index: int) -> int:
    """The one with the fewest requests; among equals the next in turn."""

    def load(number: int) -> tuple[int, int]:
        return replicas[number].load, (number - index) % len(replicas)

    return min(range(len(replicas)), key=load)


def _prefix(replicas: Sequence[Replica], index: int) -> int:
    """The one that has the most of the prompt, where that is worth more than its queue; else the one with the fewest.

    A request more in a queue counts as much as a sixteenth of the prompt, so that one popular prefix does not fill one
    replica while others idle.
    """
    first = replicas[0]
    if first.prompts.longest(index) > first.shape.limits.max_context:
        # It is refused by any.
        return _least(replicas, index)
    tokens = first.prompts.tokens(index)

    def merit(number: int) -> tuple[float, int]:
        replica = replicas[number]
        return 16 * replica.found(tokens) / tokens.size - replica.load, -((number - index) % len(replicas))

    return max(range(len(replicas)), key=merit)


ROUTES: dict[str, Router] = {"round-robin": _round_robin, "least": _least, "prefix": _prefix}


def router_named(name: str) -> Router:
    """Look a way to choose replicas up.

    Raises:
        InputError: there is none of that name.
    """
    route = ROUTES.get(name.casefold())
    if route is None:
        raise InputError(f"route: {name!r} is none; choose one of {', '.join(ROUTES)}", key="route")
    return route


def _result(trace: Trace, policy: Policy, shape: Shape, replicas: Sequence[Replica], log: Log) -> PolicyResult:
    finished = ~np.isnan(log.last)
    admitted = ~np.isnan(log.admitted)
    arrivals, outputs = trace.arrivals[finished], trace.outputs[finished]
    answering = log.last[finished] - log.first[finished]
    several = outputs > 1
    makespan = float(np.nanmax(log.last)) if finished.any() else 0.0
    asked = int(trace.prompts[admitted].sum())
    hits = int(log.hit_tokens.sum())
    meters = [replica.meter for replica in replicas]
    counters = [replica.scheduler.counters for replica in replicas]
    held = sum(meter.total(HELD) + meter.total(TAILS) for meter in meters)
    waste = {
        "unused": sum(meter.total(UNUSED) for meter in meters),
        "slab_tails": sum(meter.total(TAILS) for meter in meters),
    }
    bounds = [sum(spans) for spans in zip(*(meter.bounds for meter in meters), strict=True)]
    total_bytes = shape.layout.total_bytes * len(replicas)
    return PolicyResult(
        policy=policy.name,
        hit_tokens=hits,
        hit_ratio=hits / asked if asked else 0.0,
        finished=int(finished.sum()),
        refused=int(log.refused.sum()),
        cache_bytes=total_bytes,
        preempted=sum(counter.preempted for counter in counters),
        recomputed_tokens=sum(counter.recomputed_tokens for counter in counters),
        tier_hit_tokens=dict(sum((Counter(each.scheduler.tier_hit_tokens) for each in replicas), Counter())),
        peak_running=sum(meter.peak_running for meter in meters),
        mean_running=sum(meter.mean(RUNNING) for meter in meters),
        waste_ratio=sum(waste.values()) / held if held else 0.0,
        waste={cause: span / held if held else 0.0 for cause, span in waste.items()},
        reserved_bytes_peak=sum(meter.peak_held for meter in meters),
        ttft=Percentiles.of(log.first[finished] - arrivals),
        tpot=Percentiles.of(answering[several] / (outputs[several] - 1)) if several.any() else None,
        latency=Percentiles.of(log.last[finished] - arrivals),
        queue=Percentiles.of(log.admitted[finished] - arrivals),
        makespan=makespan,
        tokens_per_second=float(outputs.sum() / makespan) if makespan else 0.0,
        steps=sum(replica.steps for replica in replicas),
        bound=shares(bounds),
        timeline=timeline_of(meters, total_bytes),
    )
