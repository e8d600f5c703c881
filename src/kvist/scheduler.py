"""Which tokens of which requests the next step computes: continuous batching without tensors.

Running requests go first, oldest first, so that decodes never wait for prompts; what is left of the token budget goes
to prompts, cut in chunks. A request is admitted when its whole prompt fits; when memory runs out for one that runs, the
newest is preempted: its blocks go back (the prefix tree keeps what it can) and it is computed again later, or they are
swapped out and it goes on where it was. A request that could never fit is refused when it arrives.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from kvist.admission import Admission
from kvist.batch import Batch, Chunk, Request
from kvist.cache.leads import Lead
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Compaction, Move, Reservation, append_each
from kvist.cache.traffic import NO_TRAFFIC
from kvist.errors import DoesNotFit, InputError
from kvist.planning.capacity import DEFAULT_CHUNK, allocated_bytes
from kvist.spec.pruning import Pruning


class _Attempt(NamedTuple):
    """What an admission depends on: asked again with all of it equal, the answer would be the same.

    The request, blocks let go of so far, tokens that the prefix tree was given so far, and with windows the step's
    budget. What the tree loses meanwhile would only shorten what it finds.
    """

    request_id: str
    idled: int
    stored: int
    budget: int


@dataclass(kw_only=True)
class Counters:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    preempted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    swapped: int = 0
    prunings: int = 0
    pruned_tokens: int = 0
    pruned_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a step and the scheduler take on.

    Attributes:
        max_running: requests that run at once.
        max_batch_tokens: tokens that one step computes.
        max_context: longest sequence, prompt and generated tokens together.
    """

    max_running: int = 256
    max_batch_tokens: int = DEFAULT_CHUNK
    max_context: int = 8192

    def __post_init__(self) -> None:
        for key in ("max_running", "max_batch_tokens", "max_context"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise InputError(f"{key}: {value!r}; a whole number, at least 1", key=key)


@dataclass(kw_only=True)
class Scheduler:
    """Decides step by step; the cache manager decides with it whether memory allows.

    Attributes:
        manager: of the cache.
        limits: how much a step takes on.
        preempt: whether a request that must make room is computed again, or swapped out to the manager's first tier as
            far as that has room.
        waiting: requests in the order of their turn.
        running: requests, oldest first.
        counters: totals.
        tier_hit_tokens: of ``counters.hit_tokens``, by the tier that they were loaded from.
        admission: whom it takes on.

    Raises:
        InputError: ``preempt`` is neither, or there is no tier to swap to, or its bytes are real.
    """

    manager: CacheManager
    limits: Limits
    preempt: Literal["recompute", "swap"] = "recompute"
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    tier_hit_tokens: dict[str, int] = field(default_factory=dict)
    admission: Admission = field(init=False)
    _withdrawn: int = 0
    _stuck: "_Attempt | None" = None

    def __post_init__(self) -> None:
        if self.preempt not in ("recompute", "swap"):
            raise InputError(f"preempt: {self.preempt!r}; recompute or swap", key="preempt")
        if self.preempt == "swap" and not self.manager.tiers:
            raise InputError("preempt: swap needs a tier to swap to; add one, or use recompute", key="preempt")
        if self.preempt == "swap" and self.manager.moving:
            raise InputError("preempt: swap is simulated, and moves no real bytes; use recompute", key="preempt")
        self.admission = Admission(
            self.manager,
            max_context=self.limits.max_context,
            least_chunk=min(self.limits.max_batch_tokens, self.manager.block_tokens),
        )

    def add(
        self,
        request_id: str,
        tokens: npt.ArrayLike,
        max_tokens: int | None = None,
        key: PrefixKey = PrefixKey(),  # noqa: B008
        pruning: Pruning | None = None,
        *,
        pinned: int = 0,
        lead: Lead | None = None,
        apart: bool = False,
    ) -> Request:
        """Queue a prompt, int32 ``[size]``; without ``max_tokens`` it may generate as far as it can.

        With ``pruning`` no step goes past a length at which the request is to be pruned; whoever steps calls
        :meth:`compact` then.

        Args:
            request_id: unique among those that live.
            tokens: of the prompt; the first ``pinned`` of them are placeholders.
            max_tokens: most to generate.
            key: what must be equal for its prefix to be shared.
            pruning: how far it is pruned, what is pinned included.
            pinned: tokens of a pinned run with which it begins; no part of what is counted.
            lead: what stands before it in blocks of its own; it is not pruned then.
            apart: it takes no part in the tree, but for what is pinned.

        Raises:
            InputError: the prompt is empty, or longer than the context allows with ``max_tokens``.
            DoesNotFit: the cache could not hold the sequence even alone; the message shows the sum.
        """
        try:
            sequence = self.manager.begin(tokens, key)
            sequence.pinned, sequence.apart, sequence.lead = pinned, apart, lead
            sequence.pruning = pruning.of_prompt(sequence.size) if pruning else None
            request = Request(request_id, sequence, self.admission.most_to_generate(sequence, max_tokens))
        except (InputError, DoesNotFit):
            self.counters.refused += 1
            raise
        self.waiting.append(request)
        self.counters.requests += 1
        self.counters.prompt_tokens += request.prompt_tokens - pinned
        return request

    def all_fit(self) -> bool:
        """Whether the cache could still hold each request alone, which something that is pinned may have changed."""
        for request in (*self.running, *(request for request in self.waiting if request.state == "waiting")):
            stored = request.prompt_tokens - request.sequence.pinned + request.max_tokens - 1
            if not self.admission.fits(request.sequence, stored):
                return False
        return True

    def has_work(self) -> bool:
        """Whether a step would find something to do."""
        return len(self.waiting) > self._withdrawn or bool(self.running)

    def step(self) -> Batch:
        """Choose what the next step computes, and reserve its memory."""
        chunks: list[Chunk] = []
        decoding: list[Request] = []
        starts: list[int] = []
        preempted: list[Request] = []
        copies: list[Move] = []
        budget = self.limits.max_batch_tokens
        sequences = [request.sequence for request in self.running]
        index = 0
        while index < len(sequences) and budget:
            stop = self.manager.extend(sequences, index, min(len(sequences), index + budget))
            if stop > index:
                decoding += self.running[index:stop]
                starts += [sequence.length for sequence in sequences[index:stop]]
                budget -= stop - index
                index = stop
                continue
            request = self.running[index]
            reservation = self._reserve(request, budget)
            if not reservation.granted:
                victim = self.running.pop()
                sequences.pop()
                self._preempt(victim)
                preempted.append(victim)
                if not self.running:
                    self._isolate(victim)
                continue
            copies += reservation.copies
            budget -= self._schedule(chunks, request, reservation.limit)
            index += 1
        # Who just had to go would be the first to come back, and go again.
        while self.waiting and budget and not preempted and len(self.running) < self.limits.max_running:
            if self.running and self.running[0].alone:
                break
            request = self.waiting[0]
            if request.state == "ended":
                self.waiting.popleft()
                self._withdrawn -= 1
                continue
            if self.running and self._stuck == self._attempt(request, budget):
                break
            reservation = self._reserve(request, budget, admit=True)
            if not reservation.granted and not self.running:
                self._isolate(request)
                reservation = self._reserve(request, budget, admit=True)
            if not reservation.granted:
                self._stuck = self._attempt(request, budget)
                break
            self.running.append(self.waiting.popleft())
            request.state = "running"
            self._count_hit(request, reservation)
            copies += reservation.copies
            budget -= self._schedule(chunks, request, reservation.limit)
        copies += self.manager.take_moves()
        tiers = self.manager.tiers
        return Batch(chunks, preempted, decoding, starts, tiers.take_traffic() if tiers else NO_TRAFFIC, copies)

    def _attempt(self, request: Request, budget: int) -> "_Attempt":
        manager = self.manager
        return _Attempt(request.id, manager.arena.idled, manager.tree.stored, budget if manager.windows else 0)

    def _isolate(self, request: Request) -> None:
        """A lone request ran out of memory: its blocks lie scattered over slabs that another group needs.

        Started afresh in an empty arena, with nothing cached in between, nobody beside it and the least in flight, each
        group takes blocks from as few slabs as they fill: the sum by which it was accepted.
        """
        self.manager.clear()
        self.manager.forget_swapped(request.sequence)
        request.alone = True
        request.sequence.apart = True

    def _reserve(self, request: Request, budget: int, *, admit: bool = False) -> Reservation:
        """Room for a chunk of ``budget`` tokens, or for as large a part of it as memory allows."""
        sequence = request.sequence
        chunk = min(budget, sequence.size - sequence.length, self.admission.least_chunk if request.alone else budget)
        while True:
            reservation = self.manager.reserve(sequence, chunk, admit_chunk=chunk if admit else None)
            if reservation.granted or chunk <= self.admission.least_chunk or (admit and not self.manager.windows):
                return reservation
            chunk = max(self.admission.least_chunk, chunk // 2)

    def _schedule(self, chunks: list[Chunk], request: Request, limit: int) -> int:
        sequence = request.sequence
        count = limit - sequence.length
        chunks.append(Chunk(request, sequence.length, count, limit == sequence.size))
        return count

    def _count_hit(self, request: Request, reservation: Reservation) -> None:
        hit_tokens = reservation.hit_tokens
        if request.first_hit_tokens is None:
            hit_tokens -= request.sequence.pinned
            request.first_loads = reservation.loads
            for load in reservation.loads:
                self.tier_hit_tokens[load.tier] = self.tier_hit_tokens.get(load.tier, 0) + load.tokens
            request.first_hit_tokens = hit_tokens
            self.counters.query_tokens += request.prompt_tokens - request.sequence.pinned
            self.counters.hit_tokens += hit_tokens
        else:
            self.counters.recomputed_tokens -= min(hit_tokens, request.lost_tokens)

    def _preempt(self, request: Request) -> None:
        request.lost_tokens = request.sequence.length
        self.counters.recomputed_tokens += request.lost_tokens
        if self.preempt == "swap" and self.manager.swap_out(request.sequence):
            self.counters.swapped += 1
        else:
            self.manager.release(request.sequence)
        request.state = "waiting"
        request.preemptions += 1
        self.counters.preempted += 1
        self.waiting.appendleft(request)

    def commit(self, batch: Batch) -> list[Move]:
        """The step's keys and values are stored; returns what to copy, in order, before the next step."""
        return self.manager.commit_all(batch.sequences)

    def compact(self, request: Request) -> list[Compaction] | None:
        """Give back what pruning frees of a request; as :meth:`CacheManager.compact`, and counted."""
        before = request.sequence.pruned
        made = self.manager.compact(request.sequence)
        if made is not None:
            self.counters.prunings += 1
            self.counters.pruned_tokens += request.sequence.pruned - before
            self.counters.pruned_blocks += sum(moved.source.size - moved.target.size for moved in made)
        return made

    def append(self, request: Request, token: int) -> None:
        """A token was sampled for a running request."""
        request.sequence.append(token)
        self.counters.output_tokens += 1

    def append_all(self, requests: Seq[Request], tokens: Seq[int]) -> list[Request]:
        """:meth:`append` for each; returns those that have all their tokens now."""
        append_each([request.sequence for request in requests], tokens)
        self.counters.output_tokens += len(requests)
        return [request for request in requests if request.sequence.size - request.prompt_tokens >= request.max_tokens]

    def finish(self, request: Request) -> None:
        """A request has ended, or is not wanted any more: its blocks go back at once."""
        match request.state:
            case "ended":
                return
            case "running":
                self.running.remove(request)
            case "waiting":
                self._withdraw()
        request.state = "ended"
        self.manager.release(request.sequence)
        self.counters.finished += 1

    def snapshot(self, text_of: Callable[[list[int]], str] | None = None) -> dict[str, Any]:
        """The cache's picture, the requests that live, and the totals."""
        alive = [*self.running, *(request for request in self.waiting if request.state == "waiting")]
        groups = self.manager.groups
        return {
            **self.manager.snapshot({request.id: request.sequence for request in self.running}, text_of),
            "requests": [
                {
                    "id": request.id,
                    "state": request.state,
                    "prompt_tokens": request.prompt_tokens - request.sequence.pinned,
                    "output_tokens": request.generated,
                    "length": request.sequence.length,
                    "pruned_tokens": request.sequence.pruned,
                    "hit_tokens": request.first_hit_tokens or 0,
                    "blocks": {group.name: request.sequence.blocks(index) for index, group in enumerate(groups)},
                    "bytes": self.manager.held_bytes(request.sequence),
                    "planned_bytes": allocated_bytes(
                        groups,
                        request.sequence.length,
                        request.sequence.in_flight,
                        request.sequence.pruned,
                        request.sequence.held_before,
                    ),
                    "age_seconds": time.time() - request.arrived,
                }
                for request in alive
            ],
            "counters": asdict(self.counters),
        }

    def _withdraw(self) -> None:
        """One more request in the queue has ended; the queue is swept when most of it has."""
        self._withdrawn += 1
        if self._withdrawn > 64 and 2 * self._withdrawn > len(self.waiting):
            # The one that is being withdrawn still counts as waiting: it is left for its turn.
            self.waiting = deque(request for request in self.waiting if request.state != "ended")
            self._withdrawn = 1

    def fail(self) -> list[Request]:
        """A step failed before its keys and values were stored: drop its requests and all that it was to store."""
        failed = [request for request in (*self.running, *self.waiting) if request.sequence.in_flight]
        self.manager.abandon([request.sequence for request in failed])
        for request in failed:
            request.state = "ended"
            self._withdrawn += request in self.waiting
        self.running = [request for request in self.running if request.state == "running"]
        return failed
