"""When requests are pruned, and by what they have been seen to attend to.

A request that is pruned is watched while it is computed: of the queries that its method looks at it is added up what
they weigh each key before them. Where a method looks at all of a chunk, attention does that on its way, if its kernels
can; else these queries are weighed behind it, layer by layer (:mod:`kvist.kernels.pruning`). Of answers the queries are
put aside, and weighed many at a time. After a step that ends where a request is due
(:meth:`kvist.spec.pruning.PruningPlan.due`) its slots are chosen, the cache manager gives blocks back, and the runner
moves what is kept.

Sums and positions take 8 bytes a layer, KV head and slot outside the arena, of methods that look at attention.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvist.batch import Chunk, Request
from kvist.cache.groups import Group, cannot_prune
from kvist.cache.sequence import Sequence
from kvist.engine.runner import Runner
from kvist.errors import InputError, UnsupportedModel
from kvist.kernels.attention import PagedMemory
from kvist.kernels.leading import LedAttention, LedMemory
from kvist.kernels.paged import PagedAttention
from kvist.kernels.pruning import Observed, Weighing, select
from kvist.scheduler import Scheduler
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import SLACK, Pruning, PruningPlan
from kvist.store.layouts import Index


def pruning_of(evict: Pruning | str | None, spec: ModelSpec, groups: Seq[Group]) -> Pruning | None:
    """What is asked for, where a model that is stored in these groups can be pruned.

    Raises:
        InputError: it is written otherwise.
        UnsupportedModel: the model keeps nothing that can be pruned.
    """
    pruning = Pruning.read(evict) if isinstance(evict, str) else evict
    if not isinstance(pruning, Pruning | None):
        raise InputError(f"evict: {evict!r}; write h2o:0.5, snapkv:512, streaming:4+1020 or none", key="evict")
    if pruning is not None and (why := cannot_prune(groups)):
        raise UnsupportedModel(f"evict: {spec.name} keeps nothing that {pruning} could prune: {why}", key="evict")
    return pruning


class Pruner:
    """Watches and prunes the requests of one scheduler; a runner has one.

    Args:
        runner: that computes them, and whose arena it is.
        scheduler: whose they are.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.groups = [number for number, group in enumerate(scheduler.manager.groups) if group.prunable]
        self._watched: dict[str, _Watched] = {}
        self._later: list[_Watched] = []
        runner.watch = self.watch

    def watch(self, chunks: Seq[Chunk]) -> "_Step | None":
        """What looks at the queries of a step with these chunks; None where nobody needs it."""
        step = _Step()
        row = 0
        for place, chunk in enumerate(chunks):
            plan = chunk.request.sequence.pruning
            if plan is not None and plan.method.observes:
                self._look(step, plan, chunk, place, row)
            row += chunk.count
        self._later = [part.watched for part in step.parts if part.weighings is None]
        return step if step.parts or step.sums else None

    def _look(self, step: "_Step", plan: PruningPlan, chunk: Chunk, place: int, row: int) -> None:
        """Let a step look at those queries of a chunk that its method does, if any."""
        end = chunk.start + chunk.count
        first = max(chunk.start, plan.prompt - plan.method.observes)
        if first >= end or (not plan.method.bounded and (chunk.start >= plan.prompt or plan.keep >= plan.prompt)):
            return
        request = chunk.request
        watched = self._watched.get(request.id)
        if watched is None or watched.end != chunk.start:
            watched = self._watched[request.id] = _Watched(self, request.sequence, first)
        watched.end = end
        rows = slice(row + first - chunk.start, row + chunk.count)
        if chunk.count == 1 and chunk.start >= plan.prompt:
            step.parts.append(_Part(watched, rows, None))
            return
        slots, weighings = end - request.sequence.pruned, {}
        for number, tally in watched.tallies.items():
            tally.make_room(slots)
            if first == chunk.start and tally.memory.draws:
                step.sums[number, place] = tally.sums
            else:
                weighings[number] = tally.weighing(request.sequence.tables[number], slots, end - first)
        if weighings:
            step.parts.append(_Part(watched, rows, weighings))

    def prune(self, chunks: Seq[Chunk]) -> None:
        """Prune those of a step's requests that are due; the step has been committed."""
        with torch.inference_mode():
            for watched in self._later:
                watched.count()
            self._later = []
            for chunk in chunks:
                sequence = chunk.request.sequence
                plan = sequence.pruning
                if plan is None or sequence.length < plan.due(chunk.start, sequence.pruned):
                    continue
                if sequence.length - sequence.pruned > plan.target(sequence.length):
                    self._prune(chunk.request, plan)

    def _prune(self, request: Request, plan: PruningPlan) -> None:
        sequence = request.sequence
        watched = self._watched.get(request.id) or _Watched(self, sequence, sequence.length)
        watched.weigh()
        length, slots, target = sequence.length, sequence.length - sequence.pruned, plan.target(sequence.length)
        moves = self.scheduler.compact(request)
        if moves is None:
            return
        # Where the kept ones belong there may lie what is still to go to a tier.
        self.runner.copy(self.scheduler.manager.take_moves())
        for moved in moves:
            tally = watched.tallies[moved.group]
            seen = tally.observed(slots, length, plan.recent(length), watched.first)
            kept = select(plan.pruning.method, seen, keep=target, sinks=plan.pruning.sinks)
            self.runner.compact(moved, kept)
            if plan.method.bounded:
                tally.keep(kept, slots, length)
        if not plan.method.bounded:
            self.forget(request.id)

    def forget(self, request_id: str) -> None:
        """A request is over, or needs to be watched no longer."""
        self._watched.pop(request_id, None)


class _Watched:
    """What is known of one request's attention.

    Attributes:
        first: position of the first query that was looked at.
        end: position behind the last.
    """

    def __init__(self, pruner: Pruner, sequence: Sequence, first: int) -> None:
        self.sequence = sequence
        self.first = first
        self.end = first
        self.tallies = {number: _Tally(pruner.runner, number) for number in pruner.groups}

    def count(self) -> None:
        """One more query was put aside in every layer."""
        for tally in self.tallies.values():
            tally.held += 1
        if tally.held == SLACK:
            self.weigh()

    def weigh(self) -> None:
        """Weigh the queries that were put aside; no key that they saw has been dropped since."""
        slots = self.sequence.length - self.sequence.pruned
        for number, tally in self.tallies.items():
            tally.weigh(self.sequence.tables[number], slots)


class _Tally:
    """What the keys of one group have drawn, in one sequence.

    Attributes:
        sums: float32 ``[layers, kv_heads, room]``: column sums.
        positions: int64 ``[layers, kv_heads, kept]``: of the tokens in the first slots, once some were dropped; those
            behind them have followed one after the other.
    """

    def __init__(self, runner: Runner, number: int) -> None:
        memory = runner.memories[number]
        if isinstance(memory, LedAttention | LedMemory):
            # Nothing stands before what is pruned.
            memory = memory.own
        assert isinstance(memory, PagedAttention | PagedMemory)
        self.memory = memory
        self.dtype = runner.decoder.dtype
        self.layers, kv_heads = len(memory.store.group.layers), memory.store.kv_heads
        self.sums = torch.zeros(self.layers, kv_heads, 0)
        self.positions: Tensor | None = None
        self.sinks: dict[int, Tensor | None] = {}
        self.aside: Tensor | None = None
        self.held = 0

    def weighing(self, table: Index, slots: int, queries: int) -> Weighing:
        """What adds to the sums, layer by layer, what the last queries of so many slots weigh."""
        return Weighing(self.memory, table, slots, queries, self.sums, self.dtype)

    def put_aside(self, slots: slice, queries: Tensor, sinks: Tensor | None) -> None:
        """Keep one query of some layers, ``[layers, repeats, kv_heads, dim]``, for later."""
        if self.aside is None:
            self.aside = queries.new_empty(self.layers, SLACK, *queries.shape[1:])
        self.aside[slots, self.held] = queries
        if sinks is not None:
            self.sinks[slots.start] = sinks

    def weigh(self, table: Index, slots: int) -> None:
        """Weigh what was put aside: queries of the last of so many slots."""
        if not self.held:
            return
        assert self.aside is not None
        self.make_room(slots)
        weighing = self.weighing(table, slots, self.held)
        for slot, queries in enumerate(self.aside[:, : self.held]):
            weighing.add(slot, queries, self.sinks.get(slot))
        self.held = 0

    def make_room(self, slots: int) -> None:
        """Let sums be kept of so many slots."""
        room = self.sums.shape[-1]
        if room < slots:
            grown = torch.zeros(*self.sums.shape[:2], slots + SLACK + slots // 4)
            grown[..., :room] = self.sums
            self.sums = grown

    def observed(self, slots: int, length: int, recent: int, first: int) -> Observed:
        """What a method chooses ``slots`` of a sequence of ``length`` positions by."""
        self.make_room(slots)
        ages = length - self.all_positions(slots, length).clamp(min=first)
        return Observed(sums=self.sums[..., :slots], ages=ages.float(), recent=recent)

    def all_positions(self, slots: int, length: int) -> Tensor:
        """Position of each slot's token, int64, broadcast to ``[layers, kv_heads, slots]``."""
        if self.positions is None:
            return torch.arange(slots)
        after = torch.arange(length - slots + self.positions.shape[-1], length)
        return torch.cat((self.positions, after.expand(*self.positions.shape[:2], -1)), dim=-1)

    def keep(self, kept: Tensor, slots: int, length: int) -> None:
        """Forget all but the kept slots, int64 ``[layers, kv_heads, kept]``."""
        self.positions = self.all_positions(slots, length).expand(*kept.shape[:2], -1).gather(-1, kept)
        sums = torch.zeros(*kept.shape[:2], kept.shape[-1] + SLACK)
        sums[..., : kept.shape[-1]] = self.sums.gather(-1, kept)
        self.sums = sums


class _Part:
    """The queries of one request that a step looks at behind attention.

    Args:
        watched: the request.
        rows: theirs in the step; they end with the chunk.
        weighings: of each group; None: they are put aside.
    """

    def __init__(self, watched: _Watched, rows: slice, weighings: dict[int, Weighing] | None) -> None:
        self.watched = watched
        self.rows = rows
        self.weighings = weighings


class _Step:
    """Looks at the queries of one step.

    Attributes:
        parts: at which it looks behind attention.
        sums: to which attention adds: of a group and the place of a chunk.
    """

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.sums: dict[tuple[int, int], Tensor] = {}

    @property
    def looks(self) -> bool:
        """As :attr:`kvist.model.mixers.places.Observer.looks`."""
        return bool(self.parts)

    def drawn(self, group: int, place: int) -> Tensor | None:
        """As :meth:`kvist.model.mixers.places.Observer.drawn`."""
        return self.sums.get((group, place))

    def see(self, group: int, slots: slice, queries: Tensor, sinks: Tensor | None) -> None:
        """As :meth:`kvist.model.mixers.places.Observer.see`."""
        for part in self.parts:
            if part.weighings is None:
                tally = part.watched.tallies.get(group)
                if tally is not None:
                    tally.put_aside(slots, queries[:, part.rows.start], sinks)
            elif group in part.weighings:
                for slot, seen in enumerate(queries[:, part.rows], slots.start):
                    part.weighings[group].add(slot, seen, sinks)
