"""One replica: the engine's scheduler and cache, and a clock in the place of its model.

A step takes as long as the clock says, and before it what is loaded from tiers; what is written to them goes on beside
the step, and holds it up only where it takes longer.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvist.batch import Batch, Chunk, Request
from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.cache.tier import Tier
from kvist.cache.traffic import NO_TRAFFIC, Traffic
from kvist.errors import DoesNotFit, InputError
from kvist.scheduler import Limits, Scheduler
from kvist.simulation.clock import StepClock
from kvist.simulation.future import Future
from kvist.simulation.meter import Meter
from kvist.simulation.prompts import Prompts
from kvist.simulation.results import BOUNDS

_IDLE, _MEMORY, _SLOTS, _TIERS = (BOUNDS.index(name) for name in ("idle", "memory", "slots", "tiers"))
_CODES: dict[str, int] = {name: code for code, name in enumerate(BOUNDS)}


@dataclass(kw_only=True)
class Log:
    """What became of each request; every array is ``[requests]``, in seconds since the first arrival.

    Attributes:
        admitted, first, last: when it first ran, when its first token came, when its last did; NaN before.
        hit_tokens: prompt tokens found in the cache when it was first admitted.
        refused: whether it could never fit.
    """

    admitted: npt.NDArray[np.float64]
    first: npt.NDArray[np.float64]
    last: npt.NDArray[np.float64]
    hit_tokens: npt.NDArray[np.int64]
    refused: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, requests: int) -> "Log":
        """An empty one."""
        times = [np.full(requests, np.nan) for _ in range(3)]
        return cls(
            admitted=times[0],
            first=times[1],
            last=times[2],
            hit_tokens=np.zeros(requests, np.int64),
            refused=np.zeros(requests, np.bool_),
        )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all replicas of a simulation have in common.

    Attributes:
        groups: of what a rank remembers.
        layout: how its memory is cut.
        limits: of the scheduler.
        prefix_cache: whether prompts share blocks.
        reclaim: the order in which cached blocks go: ``lru``, ``lfu``, ``fifo`` or ``optimal``.
        tiers: where blocks lie beside the device.
        preempt: whether a request that must make room is computed again or swapped out.
    """

    groups: tuple[Group, ...]
    layout: ArenaLayout
    limits: Limits
    prefix_cache: bool
    reclaim: str = "lru"
    tiers: tuple[Tier, ...] = ()
    preempt: Literal["recompute", "swap"] = "recompute"


@dataclass(kw_only=True)
class Replica:
    """Runs requests step by step; time passes in steps alone.

    Attributes:
        shape: memory and limits.
        clock: how long steps take.
        prompts: of the trace.
        log: of the trace's requests, shared by all replicas.
        now: seconds since the first arrival.
    """

    shape: Shape
    clock: StepClock
    prompts: Prompts
    log: Log
    now: float = 0.0
    meter: Meter = field(default_factory=Meter)
    steps: int = 0
    _queue: deque[int] = field(default_factory=deque)
    _index: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self.future = Future.of(self.prompts) if shape.reclaim == "optimal" and shape.prefix_cache else None
        self.manager = CacheManager(
            shape.groups,
            shape.layout,
            prefix_cache=shape.prefix_cache,
            reclaim=self.future.order() if self.future else "lru" if shape.reclaim == "optimal" else shape.reclaim,
            tiers=shape.tiers if shape.prefix_cache or shape.preempt == "swap" else (),
        )
        self.scheduler = Scheduler(manager=self.manager, limits=shape.limits, preempt=shape.preempt)
        self._rates = {tier.name: tier for tier in shape.tiers}
        layout = shape.layout
        self._tails = [
            layout.slab_bytes - count * size
            for count, size in zip(layout.blocks_per_slab, layout.block_bytes, strict=True)
        ]
        (first, *others) = shape.groups
        # Of one group that keeps every token it is enough to count tokens, which takes no time.
        self._token_bytes = 0 if others or first.lifetime != "full" else first.token_bytes
        self._reaches = self.clock.reaches

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.scheduler.running) + len(self.scheduler.waiting) + len(self._queue)

    def found(self, tokens: npt.NDArray[np.int32]) -> int:
        """Tokens of a prompt that its prefix cache holds now."""
        if not self.manager.prefix_cache:
            return 0
        return self.manager.tree.match(PrefixKey(), tokens, tokens.size - 1).tokens

    def give(self, index: int) -> None:
        """Request ``index`` of the trace arrives now."""
        self._queue.append(index)

    def advance(self, until: float) -> None:
        """Step until the clock has reached ``until``, or nothing is left to do; a step that has begun is finished."""
        while self.now < until:
            self._accept()
            if not self.scheduler.has_work():
                if until < float("inf"):
                    self.meter.add(until, _IDLE, self._state())
                    self.now = until
                return
            self._step()

    def _accept(self) -> None:
        """Hand requests on, as many as the scheduler could admit at once: their prompts are large."""
        scheduler = self.scheduler
        trace = self.prompts.trace
        while self._queue and len(scheduler.waiting) <= scheduler.limits.max_running:
            index = self._queue.popleft()
            if self.prompts.longest(index) > scheduler.limits.max_context:
                # Its tokens need not be made, which may be more than fit anywhere.
                self.log.refused[index] = True
                continue
            try:
                request = scheduler.add(str(index), self.prompts.tokens(index), int(trace.outputs[index]))
            except (DoesNotFit, InputError):
                self.log.refused[index] = True
                continue
            self._index[request.id] = index

    def _step(self) -> None:
        scheduler, log = self.scheduler, self.log
        batch = scheduler.step()
        self.steps += 1
        prefills: list[Chunk] = []
        firsts: list[Request] = []
        decodes = len(batch.decoding)
        decode_tokens = sum(batch.starts) + decodes
        for chunk in batch.others:
            request = chunk.request
            if chunk.count == 1 and chunk.start >= request.prompt_tokens:
                decodes += 1
                decode_tokens += chunk.start + 1
            else:
                prefills.append(chunk)
                self._note_admission(request)
                if chunk.samples and chunk.start + chunk.count == request.prompt_tokens:
                    firsts.append(request)
        reached = self._reached(batch) if self._reaches else None
        time = self.clock.step(prefills, decodes, decode_tokens, reached)
        bound = self._bound(decodes, prefills, time.bound)
        if batch.traffic is NO_TRAFFIC:
            self.now += time.seconds
        else:
            loading, writing = self._moving(batch.traffic)
            self.now += loading + max(time.seconds, writing)
            bound = _TIERS if loading + writing > time.seconds else bound
        self.meter.add(self.now, bound, self._state())
        scheduler.commit(batch)
        indices = self._index
        sampled = batch.sampling
        for request in firsts:
            log.first[indices[request.id]] = self.now
        # Answers differ from each other, and from all prompts.
        for request in scheduler.append_all(sampled, [-1 - indices[request.id] for request in sampled]):
            log.last[indices.pop(request.id)] = self.now
            scheduler.finish(request)

    def _note_admission(self, request: Request) -> None:
        index = self._index[request.id]
        if np.isnan(self.log.admitted[index]):
            self.log.admitted[index] = self.now
            self.log.hit_tokens[index] = request.first_hit_tokens or 0
            if self.future is not None:
                self.future.admit(index)

    def _reached(self, batch: Batch) -> list[int]:
        """What windows see of the sequences that decode, added up for each of the clock's reaches."""
        lengths = [
            chunk.start + 1 for chunk in batch.chunks if chunk.count == 1 and chunk.start >= chunk.request.prompt_tokens
        ]
        return [sum([min(length, reach) for length in lengths]) for reach in self._reaches]

    def _moving(self, traffic: Traffic) -> tuple[float, float]:
        """Seconds that loading from tiers takes, one after the other, and writing to them, all at once."""
        loading = sum(self._rates[moved.tier].seconds(moved.bytes) for moved in traffic.read)
        writing = max((self._rates[moved.tier].seconds(moved.bytes) for moved in traffic.written), default=0.0)
        return loading, writing

    def _bound(self, decodes: int, prefills: Seq[Chunk], bound: str) -> int:
        """What kept the step from being shorter, or those that wait from running."""
        scheduler = self.scheduler
        if scheduler.waiting or self._queue:
            if len(scheduler.running) >= scheduler.limits.max_running:
                return _SLOTS
            if decodes + sum([chunk.count for chunk in prefills]) < scheduler.limits.max_batch_tokens:
                return _MEMORY
        return _CODES[bound]

    def _state(self) -> tuple[int, ...]:
        """The meter's columns."""
        arena, running = self.manager.arena, self.scheduler.running
        held = cached = tails = 0
        for group, size in enumerate(self.shape.layout.block_bytes):
            blocks = arena.held(group)
            held += blocks * size
            cached += arena.cached(group) * size
            if self._tails[group]:
                # Its share of what its slabs have left over; what is cached and free has its own.
                tails += blocks * self._tails[group] // self.shape.layout.blocks_per_slab[group]
        unused = 0
        if self._token_bytes:
            for request in running:
                sequence = request.sequence
                unused += sequence.room - sequence.length - sequence.in_flight
            unused *= self._token_bytes
        else:
            for request in running:
                unused += self._unfilled(request.sequence)
        waiting = len(self.scheduler.waiting) + len(self._queue)
        return (len(running), waiting, held, cached, unused, tails)

    def _unfilled(self, sequence: Sequence) -> int:
        """Bytes of its blocks that no token is in, nor computed for now."""
        end = sequence.length + sequence.in_flight
        return sum(
            group.unfilled_bytes(table.size, end)
            for group, table in zip(self.shape.groups, sequence.tables, strict=True)
        )
