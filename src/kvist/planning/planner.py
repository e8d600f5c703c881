"""``kvist.plan``: (model, format, devices or memory, workload) to a :class:`Plan`.

Costs of one sequence are logical and come from the layers; what fits into a memory is only loaded when it is asked
for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.errors import DoesNotFit, InputError
from kvist.planning.plan import Plan, format_notes
from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.model import ModelSpec
from kvist.units import MAX_TOKENS, counted, parse_tokens

if TYPE_CHECKING:
    from kvist.planning.demand import Demand
    from kvist.planning.deployment import Cutting, Machine
    from kvist.planning.fit import Fit
    from kvist.planning.machines import Wish
    from kvist.planning.weights import Weights

DEFAULT_TOKENS = (1024, 8192, 32768, 131072)
DEFAULT_CONTEXT = 8192

_MAX_USERS = 10**9
_MAX_BLOCK = 2**20


def plan(
    spec: ModelSpec | str | Path,
    *,
    format: CacheFormat | None = None,
    tokens: Iterable[int | str] | int | str | None = None,
    gpu: str | None = None,
    memory: int | str | None = None,
    cache_memory: int | str | None = None,
    weights: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    overhead: int | str | None = None,
    context: int | str | None = None,
    users: int | None = None,
    lengths: str | Path | None = None,
    shared_prefix: int | str | None = None,
    cartridge: int | str | None = None,
    cartridge_format: CacheFormat | None = None,
    block_tokens: int | None = None,
    chunk: int | None = None,
    engine: str | None = None,
    settings: Mapping[str, Any] | None = None,
    encoder_tokens: int | str | None = None,
) -> Plan:
    """Say what one sequence of a model costs and how many fit.

    With a device or a memory, how many users fit; with ``users`` alone, which devices would hold them.

    Args:
        spec: a model, or what :meth:`ModelSpec.read` takes.
        format: how keys, values and states are stored; keys and values in bf16 by default.
        tokens: lengths to price; by default those of 1k, 8k, 32k, 128k that the model allows. Others may be beyond
            what it was made for, which a note then says.
        gpu: a device of ``kvist gpus`` and how many, such as ``H100`` or ``H100x8``.
        memory: bytes of each device for weights, cache and overhead together; of the named device where both are given.
        cache_memory: bytes of each device for the cache alone.
        weights: codec of the weights; by default as the model stores them.
        tp: ranks that share each layer; by default as many as devices are named and heads allow.
        pp: stages that share the layers; 1 by default.
        overhead: bytes of each device for activations and runtime, in place of the formulas.
        context: tokens of each user's sequence, by default 8k or the longest that the model allows; with ``lengths``
            the longest that the server takes, by default the model's.
        users: how many must fit.
        lengths: file of lengths or trace, see :func:`kvist.planning.lengths.read_lengths`.
        shared_prefix: tokens that every prompt begins with.
        cartridge: tokens of a trained cache in the place of a document, stored once; every sequence stands behind it,
            and ``context`` counts what does. Rounded up to whole blocks.
        cartridge_format: how it is stored, where that is not as ``format`` says.
        block_tokens: tokens of a block; the engine's default where left out.
        chunk: most prompt tokens that a step computes; the engine's default where left out.
        engine: whose accounting to show: ``kvist``, ``vllm``, ``sglang``, ``llama.cpp``, ``transformers``.
        settings: of that engine, by its own names.
        encoder_tokens: length of the encoder's output, where a model attends to one and does not fix it.

    Raises:
        InputError: a value is out of range or two contradict each other.
        DoesNotFit: the weights or the users do not fit; the message shows the sum.
    """
    if not isinstance(spec, ModelSpec):
        spec = ModelSpec.read(spec)
    fmt = CacheFormat() if format is None else require_format(format)
    if users is not None:
        _whole("users", users, most=_MAX_USERS)
    if engine is not None:
        from kvist.planning.engines import ENGINES

        if engine not in ("kvist", *ENGINES):
            known = ", ".join(("kvist", *ENGINES))
            raise InputError(f"engine: {engine!r} is not accounted for; choose one of {known}", key="engine")
    if cartridge_format is not None and cartridge is None:
        raise InputError("cartridge_format: there is no cartridge; give `cartridge` its tokens", key="cartridge_format")
    if settings and engine is None:
        raise InputError(
            f"settings: {next(iter(settings))} is a setting of no engine; name it with `engine`", key="settings"
        )
    counting = {
        "context": context, "lengths": lengths, "shared_prefix": shared_prefix, "cartridge": cartridge,
        "block_tokens": block_tokens, "chunk": chunk,
    }  # fmt: skip
    placing = {"engine": engine, "tp": tp, "pp": pp, "overhead": overhead}
    from_memory = any(value is not None for value in (gpu, memory, cache_memory))
    if not from_memory:
        _refuse(placing, "needs a memory to count in; add `gpu`, `memory` or `cache_memory`")
        if users is None:
            _refuse(counting, "needs a memory to count in; add `gpu`, `memory` or `cache_memory`, or `users`")
    prices = _lengths(spec, tokens)
    weighed = _weigh(
        spec, weights, needed=gpu is not None or memory is not None or (users is not None and not from_memory)
    )
    if weighed is not None:
        spec = _with_weights(spec, weighed)
    result = Plan(
        spec=spec,
        format=fmt,
        sequence_bytes={count: spec.sequence_bytes(count, fmt) for count in prices},
        notes=(*_notes(spec, prices), *format_notes(spec, fmt), *(weighed.notes if weighed is not None else ())),
        encoder_tokens=None if encoder_tokens is None else _encoder(spec, encoder_tokens),
        weights=weighed,
    )
    if not from_memory and users is None:
        return result
    on_device = gpu is not None or not from_memory
    cutting = _cutting(result, block_tokens, chunk, on_device=on_device)
    if cartridge is not None:
        from kvist.planning.cartridge import behind, refuse_beside

        refuse_beside(cartridge, lengths=lengths, engine=engine)
        stored = None if cartridge_format is None else require_format(cartridge_format, key="cartridge_format")
        cutting = behind(spec, cutting, cartridge, stored, most=_most(spec))
    demand = _demand(spec, cutting, context, lengths, shared_prefix)
    result = replace(result, notes=(*result.notes, *_demand_notes(spec, demand)))
    if not from_memory:
        assert weighed is not None
        assert users is not None
        return _turned_round(result, weighed, cutting, demand, users)
    from kvist.planning.machines import Wish

    wish = Wish(gpu=gpu, memory=memory, cache_memory=cache_memory, tp=tp, pp=pp, overhead=overhead)
    return _with_capacity(
        result, wish, None if cache_memory is not None else weighed, cutting, demand, users=users, engine=engine,
        settings=settings,
    )  # fmt: skip


def _weigh(spec: ModelSpec, codec: str | None, *, needed: bool) -> "Weights | None":
    """The weights, where they are known and not yet told; an error only where they are needed."""
    if codec is None and not needed and spec.weights_bytes is not None:
        return None
    from kvist.planning.weights import weights_of

    try:
        return weights_of(spec, codec)
    except InputError:
        if needed or codec is not None:
            raise
        return None


def _with_weights(spec: ModelSpec, weights: "Weights") -> ModelSpec:
    """The model with what its weights weigh, and what was taken for granted of them."""
    return replace(
        spec,
        parameters=weights.parameters,
        weights_bytes=weights.total,
        weights_by_type=weights.by_type,
        assumed=(*spec.assumed, *weights.assumed),
    )


def _cutting(result: Plan, block_tokens: int | None, chunk: int | None, *, on_device: bool) -> "Cutting":
    from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS
    from kvist.planning.capacity import DEFAULT_CHUNK, DEVICE_CHUNK
    from kvist.planning.deployment import Cutting

    return Cutting(
        fmt=result.format,
        block_tokens=DEFAULT_BLOCK_TOKENS
        if block_tokens is None
        else _whole("block_tokens", block_tokens, most=_MAX_BLOCK),
        chunk=(DEVICE_CHUNK if on_device else DEFAULT_CHUNK)
        if chunk is None
        else _whole("chunk", chunk, most=MAX_TOKENS),
        encoder_tokens=result.encoder_tokens,
    )


def _demand(
    spec: ModelSpec,
    cutting: "Cutting",
    context: int | str | None,
    lengths: str | Path | None,
    shared_prefix: int | str | None,
) -> "Demand":
    """What users ask: one length, or those of a file."""
    from kvist.planning.demand import SameLength

    shared = 0 if shared_prefix is None else parse_tokens(shared_prefix, key="shared_prefix")
    if lengths is None:
        length = _context(spec, context, behind=cutting.cartridge)
        if shared >= length:
            raise InputError(
                f"shared_prefix: {counted(shared, 'token')} of sequences of {length:,}; fewer, as each "
                "has a token of its own",
                key="shared_prefix",
            )
        limit = max(spec.max_context - cutting.cartridge, length)
        return SameLength(cutting=cutting, context=length, limit=limit, shared=shared)
    from kvist.planning.lengths import read_lengths
    from kvist.planning.mix import Mix
    from kvist.planning.mixed import MixedLengths

    limit = spec.max_context if context is None else _context(spec, context)
    return MixedLengths(cutting=cutting, mix=Mix.of(read_lengths(lengths), limit=limit, shared=shared))


def _demand_notes(spec: ModelSpec, demand: "Demand") -> tuple[str, ...]:
    notes = []
    if demand.limit + demand.cutting.cartridge > spec.max_context:
        notes.append(f"the longest context of {spec.name} is not published; {spec.max_context:,} tokens are assumed")
    mix = demand.mix
    if mix is None:
        return tuple(notes)
    if mix.dropped:
        every = mix.dropped + len(mix.requests)
        kept_out = f"{mix.dropped:,} of the {counted(every, 'sequence')} of {mix.source}"
        notes.append(f"left out as longer than {counted(mix.limit, 'token')}: {kept_out}")
    if mix.empty:
        notes.append(f"left out as empty: {counted(mix.empty, 'request')} of {mix.source}")
    return tuple(notes)


def _with_capacity(
    result: Plan,
    wish: "Wish",
    weights: "Weights | None",
    cutting: "Cutting",
    demand: "Demand",
    *,
    users: int | None,
    engine: str | None,
    settings: Mapping[str, Any] | None,
) -> Plan:
    from kvist.planning.fit import fit
    from kvist.planning.machines import machine_of

    placed = machine_of(wish, result.spec)
    try:
        found = fit(result.spec, weights, placed.machine, cutting, demand)
        if users is not None:
            found.require(users)
    except DoesNotFit as error:
        remedy = _what_would_fit(result, placed.machine, weights, cutting, demand, users or 1)
        raise DoesNotFit(f"{error}{remedy}") from error
    result = replace(result, capacity=found.budget(), notes=(*result.notes, *placed.notes, *found.deployment.notes))
    if placed.machine.accelerator is not None:
        result = _with_speed(result, found, weights, users)
    if engine is not None:
        from kvist.planning.accounting import account_of

        result = replace(result, engine=account_of(result, found, engine, settings))
    return result


def _with_speed(result: Plan, found: "Fit", weights: "Weights | None", users: int | None) -> Plan:
    """Bounds on the speed at the planned number of users, where all is known that they need."""
    from kvist.planning.roofline import speed_of

    budget = result.capacity
    planned = users or found.best.safe
    if budget is None or not planned or weights is None:
        return result
    if weights.inventory is None:
        return replace(result, notes=(*result.notes, f"no speed: {weights.reason}"))
    try:
        speed = speed_of(
            result.spec, result.format, found.deployment, weights, users=planned,
            context=found.demand.context + found.cutting.cartridge,
            prompt=found.demand.prompt, fills=planned >= found.best.safe,
        )  # fmt: skip
    except InputError as error:
        reason = str(error).removeprefix("gpu: ").partition(";")[0]
        return replace(result, notes=(*result.notes, f"no speed: {reason}"))
    if found.cutting.cartridge_format is not None:
        result = replace(
            result, notes=(*result.notes, "speed: a cartridge is read as if it were stored as the cache is")
        )
    if speed.prefill is None:
        name = found.deployment.machine.label
        note = f"the rate of {name} is not known: no prefill, and decode is bounded by bandwidth alone"
        result = replace(result, notes=(*result.notes, note))
    return replace(result, speed=speed, capacity=replace(budget, binds=speed.binds))


def _what_would_fit(
    result: Plan,
    machine: "Machine",
    weights: "Weights | None",
    cutting: "Cutting",
    demand: "Demand",
    users: int,
) -> str:
    """How many of the same devices would do, to end a message with."""
    from kvist.planning.fleet import smallest_sets

    if machine.accelerator is None or weights is None or not machine.accelerator.plannable:
        return ""
    try:
        sets = smallest_sets(
            result.spec, result.format, weights, cutting, demand, users=users, among=(machine.accelerator,)
        )
    except DoesNotFit:
        return ""
    return (
        f"; {sets[0].devices} x {machine.accelerator.name} would hold them" if sets[0].devices > machine.devices else ""
    )


def _turned_round(result: Plan, weights: "Weights", cutting: "Cutting", demand: "Demand", users: int) -> Plan:
    """The devices that would hold the users."""
    from kvist.planning.fleet import smallest_sets

    sets = smallest_sets(result.spec, result.format, weights, cutting, demand, users=users)
    return replace(result, sets=sets)


def _lengths(spec: ModelSpec, tokens: Iterable[int | str] | int | str | None) -> list[int]:
    if tokens is None:
        return [count for count in DEFAULT_TOKENS if count <= spec.max_context] or [spec.max_context]
    given = [tokens] if isinstance(tokens, (int, str)) else tokens
    lengths = sorted({parse_tokens(count, key="tokens") for count in given})
    if lengths and lengths[0] < 1:
        raise InputError(f"tokens: {lengths[0]}; a sequence has at least 1", key="tokens")
    return lengths


def _encoder(spec: ModelSpec, encoder_tokens: int | str) -> int:
    count = parse_tokens(encoder_tokens, key="encoder_tokens")
    if not any(layer.encoder_tokens is None for layer in spec.cross_layers):
        known = "attends to no encoder" if not spec.cross_layers else "fixes the length of its encoder"
        raise InputError(f"encoder_tokens: {count}; {spec.name} {known}: leave it out", key="encoder_tokens")
    return count


def _notes(spec: ModelSpec, lengths: list[int]) -> tuple[str, ...]:
    beyond = [f"{count:,}" for count in lengths if count > spec.max_context]
    if not beyond:
        return ()
    made = f"{spec.name} was made for {counted(spec.max_context, 'token')}"
    return (f"{made}; what {', '.join(beyond)} would cost is arithmetic",)


def _refuse(settings: Mapping[str, object], why: str) -> None:
    """These count what fits, and there is nothing to fit into."""
    for key, value in settings.items():
        if value is not None:
            aside = "; a length is priced with `tokens`" if key == "context" else ""
            raise InputError(f"{key}: {value} {why}{aside}", key=key)


def _whole(key: str, value: object, *, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{key}: {value!r}; a whole number from 1 to {most}", key=key)
    return value


def _context(spec: ModelSpec, context: int | str | None, *, behind: int = 0) -> int:
    if context is None:
        return max(1, min(DEFAULT_CONTEXT, spec.max_context - behind))
    count = parse_tokens(context, key="context")
    most = _most(spec) - behind
    if not 1 <= count <= most:
        aside = f" behind a cartridge of {behind:,}" if behind else ""
        raise InputError(f"context: {counted(count, 'token')}; {spec.name} allows 1 to {most:,}{aside}", key="context")
    return count


def _most(spec: ModelSpec) -> int:
    """Longest sequence; a limit that nobody published keeps nobody out."""
    published = all(entry.key != "max_position_embeddings" for entry in spec.assumed)
    return spec.max_context if published else MAX_TOKENS
