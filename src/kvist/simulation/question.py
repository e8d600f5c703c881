"""``kvist.simulate``: a trace, a model, a memory and policies to a :class:`SimulationResult`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast

from kvist.cache.tier import Tier
from kvist.errors import InputError
from kvist.planning.capacity import DEFAULT_CHUNK, DEVICE_CHUNK
from kvist.planning.deployment import MAX_SAMPLED
from kvist.planning.machines import Wish
from kvist.simulation.clock import Clock, StepClock
from kvist.simulation.machine import Site, site_of
from kvist.simulation.policies import policy_named
from kvist.simulation.results import PolicyResult, SimulationResult
from kvist.simulation.simulator import ROUTES, Server, run_policies
from kvist.spec.format_words import format_of, layer_format
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.traces.trace import Trace
from kvist.units import counted, format_size

# Its blocks are counted one by one.
_LONGEST_PROMPT = 2**27

Watch = Callable[[str, float], None]

# Fields that are one of a few words.
CHOICES: dict[str, tuple[str, ...]] = {
    "route": tuple(ROUTES),
    "reclaim": ("lru", "lfu", "fifo", "optimal"),
    "preempt": ("recompute", "swap"),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to simulate; see ``kvist simulate --help``.

    Attributes:
        model: what :meth:`ModelSpec.read` takes; not needed for an endless cache without a clock.
        key, value: codecs of the cache.
        rotate, keep_layers, keep, state, tail: as those of :class:`~kvist.spec.formats.CacheFormat`.
        layer_formats: of single layers, as ``7=int8/int4``.
        gpu, memory, cache_memory, weights, tp, pp, overhead: as those of :func:`kvist.plan`.
        policies: names, in order.
        block_tokens: tokens of a block; the engine's default where left out, the trace's without a clock.
        max_len: longest sequence, which a slab reserves; the model's context where left out.
        max_running: requests that a replica runs at once.
        chunk: tokens that a step computes at most; by default 2,048 on a device and 1,024 elsewhere.
        encoder_tokens: length of the encoder's output, where the model attends to one and does not fix it.
        reclaim: order in which cached blocks go.
        tiers: where blocks lie beside the device, as ``host=64GiB@25GB/s``.
        preempt: ``recompute`` or ``swap``.
        replicas: that share the requests; as many as the devices hold where left out.
        route: how requests are dealt out to them.
        speed: how many times as fast requests arrive.
        requests: of the trace, from its beginning; all where left out.
        cache_only: without a clock: one request after the other, hits of prefixes alone.
        calibrate: file of measured steps that the clock is fitted to.
    """

    model: str | None = None
    key: str = "bf16"
    value: str = "bf16"
    rotate: bool = False
    keep_layers: int = 0
    keep: str | None = None
    layer_formats: tuple[str, ...] = ()
    state: str | None = None
    tail: int = 0
    gpu: str | None = None
    memory: int | str | None = None
    cache_memory: int | str | None = None
    weights: str | None = None
    tp: int | None = None
    pp: int | None = None
    overhead: int | str | None = None
    policies: tuple[str, ...] = ("prefix",)
    block_tokens: int | None = None
    max_len: int | None = None
    max_running: int = MAX_SAMPLED
    chunk: int | None = None
    encoder_tokens: int | None = None
    reclaim: str = "lru"
    tiers: tuple[str, ...] = ()
    preempt: str = "recompute"
    replicas: int | None = None
    route: str = "round-robin"
    speed: float = 1.0
    requests: int | None = None
    cache_only: bool = False
    calibrate: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Question":
        """Make one of fields by name; a lone policy, tier or layer's format needs no list.

        Raises:
            InputError: there is no such field, or a value is wrong.
        """
        for name in fields:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise InputError(f"{name}: nothing to ask of a simulation; choose of {known}", key=name)
        several = {
            name: (value,) if isinstance(value, str) else tuple(value)
            for name, value in fields.items()
            if name in ("policies", "tiers", "layer_formats")
        }
        return cls(**{**fields, **several})

    @property
    def format(self) -> CacheFormat:
        """How keys, values and states are stored.

        Raises:
            InputError: a value is wrong.
        """
        return format_of(
            key=self.key,
            value=self.value,
            rotate=self.rotate,
            keep_layers=(self.keep_layers, self.keep),
            layer_formats=map(layer_format, self.layer_formats),
            state=self.state,
            tail=self.tail,
        )

    def __post_init__(self) -> None:
        # Refused here what is none.
        _ = self.format
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise InputError(f"policy: {', '.join(self.policies) or 'none'}; at least one, each once", key="policy")
        for name in self.policies:
            policy_named(name)
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise InputError(f"{key}: {getattr(self, key)!r}; choose one of {', '.join(known)}", key=key)
        if not 0 < self.speed < float("inf"):
            raise InputError(f"speed: {self.speed:g}; how many times as fast, above 0", key="speed")
        if self.preempt == "swap" and not self.tiers:
            raise InputError("preempt: swap needs a tier to swap to; add one with `tier`", key="preempt")
        if self.cache_only:
            self._check_cache_only()
        elif self.model is None:
            raise InputError("model: none is named; say whose cache it is with `model`", key="model")

    def _check_cache_only(self) -> None:
        if self.policies != ("prefix",):
            raise InputError(
                f"policy: {', '.join(self.policies)}; without a clock there are hits of prefixes alone: leave it out",
                key="policy",
            )
        for key in ("tiers", "calibrate", "max_len", "max_running", "chunk", "preempt", "replicas", "route", "speed"):
            if getattr(self, key) != self.__dataclass_fields__[key].default:
                name = {"tiers": "tier"}.get(key, key)
                raise InputError(f"{name}: needs a clock; leave out `cache_only`, or this", key=name)
        if not any((self.gpu, self.memory, self.cache_memory)):
            for key in ("weights", "tp", "pp", "overhead", "encoder_tokens"):
                if getattr(self, key) is not None:
                    raise InputError(f"{key}: an endless cache has no devices; leave it out, or add `memory`", key=key)
        if self.model is None and any((self.gpu, self.memory, self.cache_memory)):
            raise InputError("model: a memory holds so many tokens of some model's; name it with `model`", key="model")


def simulate(
    trace: "Trace | str | Path", question: Question | None = None, *, watch: Watch | None = None, **fields: Any
) -> SimulationResult:
    """Run a trace through the engine's scheduler and cache, under each of some policies.

    Args:
        trace: requests, or a file of them.
        question: on what, and how; or its fields by name, such as ``model="llama-3-8b", gpu="H100"``.
        watch: told a policy and the part of its requests that have arrived, now and then.

    Raises:
        InputError: a value is wrong, or two contradict each other.
        DoesNotFit: the memory holds nothing; shows the sum.
    """
    question = Question.of(fields) if question is None else question
    if not isinstance(trace, Trace):
        from kvist.traces.read import read_trace

        trace = read_trace(trace)
    trace = trace.part(0, question.requests or len(trace)).sped_up(question.speed)
    if not len(trace):
        raise InputError(f"trace: {trace.source} holds no requests", key="trace")
    fmt = question.format
    spec = None if question.model is None else ModelSpec.read(question.model)
    if question.cache_only:
        return _without_clock(trace, question, spec, fmt)
    assert spec is not None
    site = _site(question, spec, fmt)
    clock, notes = _clock(question, spec, fmt, site)
    server = Server(
        groups=site.groups,
        cache_bytes=site.cache_bytes,
        clock=clock,
        max_running=question.max_running,
        max_batch_tokens=site.cutting.chunk,
        max_context=question.max_len or spec.max_context,
        block_tokens=question.block_tokens,
        replicas=question.replicas or site.deployment.machine.replicas,
        route=question.route,
        reclaim=question.reclaim,
        tiers=tuple(map(Tier.parse, question.tiers)),
        preempt=cast(Literal["recompute", "swap"], question.preempt),
    )
    with _settled():
        runs = run_policies(trace, server, question.policies, watch=watch)
    return SimulationResult(
        trace=trace.source,
        model=spec.name,
        format=str(fmt),
        machine=_machine(site, server),
        requests=len(trace),
        prompt_tokens=int(trace.prompts.sum()),
        output_tokens=int(trace.outputs.sum()),
        policies=runs.policies,
        simulated_requests_per_second=len(trace) * len(question.policies) / max(runs.seconds, 1e-9),
        notes=(*site.notes, *notes, *_notes(trace, spec, server, runs.policies)),
    )


@contextmanager
def _settled() -> Iterator[None]:
    """Keep the garbage collector away from what stays: hundreds of thousands of nodes are no garbage."""
    import gc

    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _site(question: Question, spec: ModelSpec, fmt: CacheFormat) -> Site:
    wish = Wish(
        gpu=question.gpu,
        memory=question.memory,
        cache_memory=question.cache_memory,
        tp=question.tp,
        pp=question.pp,
        overhead=question.overhead,
    )
    chunk = question.chunk or (DEFAULT_CHUNK if question.gpu is None else DEVICE_CHUNK)
    return site_of(
        spec,
        fmt,
        wish,
        weights=question.weights,
        max_running=question.max_running,
        chunk=chunk,
        encoder_tokens=question.encoder_tokens,
    )


def _clock(question: Question, spec: ModelSpec, fmt: CacheFormat, site: Site) -> "tuple[StepClock, tuple[str, ...]]":
    clock = Clock.of(spec, fmt, site.deployment, site.weights)
    if question.calibrate is None:
        bound = "steps take what the roofline allows at best: --calibrate fits them to measured ones"
        return clock, (*clock.notes, bound)
    from kvist.simulation.calibration import calibrate

    found = calibrate(clock, question.calibrate)
    fitted = (
        f"the clock is fitted to {found.points} measured steps, which it tells with a median error of "
        f"{found.after.median:.1%}, 90 % of them within {found.after.p90:.1%}"
    )
    return clock.with_factors(found.factors), (*clock.notes, *found.notes, fitted)


def _machine(site: Site, server: Server) -> str:
    machine = site.deployment.machine
    each = machine.tp * machine.pp
    name = "memory" if machine.accelerator is None else machine.accelerator.name
    one = name if each == 1 else f"{each} x {name}"
    cache = f"{format_size(site.cache_bytes)} of cache{' each' if each > 1 else ''}"
    if server.replicas == 1:
        return f"{one}, {cache}"
    return f"{server.replicas} replicas of {one}, {cache}"


def _notes(trace: Trace, spec: ModelSpec, server: Server, policies: "dict[str, PolicyResult]") -> tuple[str, ...]:
    notes = []
    if server.max_context > spec.max_context:
        notes.append(f"{spec.name} was made for {spec.max_context:,} tokens; {server.max_context:,} are let in")
    if not trace.timed:
        notes.append(f"{trace.source} tells no times: all requests are there at once")
    notes += _left_out(trace)
    if "prefix" in policies and trace.block_tokens is None:
        notes.append(f"{trace.source} does not say what prompts share: prefixes hit nothing")
    refused = max(result.refused for result in policies.values())
    if refused:
        longest = int((trace.prompts + trace.outputs).max())
        why = f"{server.max_context:,} tokens are the longest sequence"
        if longest <= server.max_context:
            why = "the cache does not hold one of them even alone"
        notes.append(f"{counted(refused, 'request')} could never fit: {why}")
    kept = [result.cache_bytes for result in policies.values()]
    if min(kept) < max(kept):
        notes.append("a cache is a whole number of slabs, so that policies with larger blocks have a little less of it")
    return tuple(notes)


def _left_out(trace: Trace) -> tuple[str, ...]:
    if not trace.skipped_rows:
        return ()
    rows = "1 row is no request" if trace.skipped_rows == 1 else f"{trace.skipped_rows:,} rows are no requests"
    return (f"{rows} and left out, of {trace.source}",)


def _without_clock(trace: Trace, question: Question, spec: ModelSpec | None, fmt: CacheFormat) -> SimulationResult:
    """Hits of prefixes, one request after the other."""
    from kvist.simulation.in_order import hits_in_order

    most = int(trace.prompts.max())
    if most > _LONGEST_PROMPT:
        raise InputError(
            f"trace: {trace.source} has a prompt of {most:,} tokens; at most {_LONGEST_PROMPT:,}", key="trace"
        )
    started = perf_counter()
    if spec is None:
        result = hits_in_order(trace, None, None, question.reclaim, question.block_tokens)
        machine = "an endless cache"
    else:
        endless = not any((question.gpu, question.memory, question.cache_memory))
        site = None if endless else _site(question, spec, fmt)
        groups = None if site is None else site.groups
        result = hits_in_order(
            trace, groups, None if site is None else site.cache_bytes, question.reclaim, question.block_tokens
        )
        machine = "an endless cache" if site is None else f"{format_size(site.cache_bytes)} of cache"
    seconds = perf_counter() - started
    notes = _left_out(trace)
    if not trace.block_tokens:
        notes += (f"{trace.source} does not say what prompts share: prefixes hit nothing",)
    if result.refused:
        notes += (f"{counted(result.refused, 'prompt')} could never fit: the cache does not hold one even alone",)
    return SimulationResult(
        trace=trace.source,
        model="" if spec is None else spec.name,
        format=str(fmt),
        machine=machine,
        requests=len(trace),
        prompt_tokens=int(trace.prompts.sum()),
        output_tokens=int(trace.outputs.sum()),
        policies={"prefix": result},
        simulated_requests_per_second=len(trace) / max(seconds, 1e-9),
        notes=notes,
    )
