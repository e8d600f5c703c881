"""``kvist.plan``: (model, format, memory, workload) to a :class:`Plan`.

Costs of one sequence are logical and come from the layers; what fits into a memory comes from
:mod:`kvist.planning.capacity`, which is only loaded when it is asked for.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvist.errors import DoesNotFit, InputError
from kvist.planning.plan import Budget, EngineAccount, EngineGroup, Plan, format_notes
from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.model import ModelSpec
from kvist.units import MAX_TOKENS, format_size, parse_size, parse_tokens

DEFAULT_TOKENS = (1024, 8192, 32768, 131072)
DEFAULT_CONTEXT = 8192
ENGINES = ("kvist",)

_MAX_USERS = 10**9
_MAX_BLOCK = 2**20


def plan(
    spec: ModelSpec | str | Path,
    *,
    format: CacheFormat | None = None,
    tokens: Iterable[int | str] | int | str | None = None,
    memory: int | str | None = None,
    cache_memory: int | str | None = None,
    context: int | str | None = None,
    users: int | None = None,
    block_tokens: int | None = None,
    chunk: int | None = None,
    engine: str | None = None,
    encoder_tokens: int | str | None = None,
) -> Plan:
    """Say what one sequence of a model costs and how many fit.

    Args:
        spec: a model, or what :meth:`ModelSpec.read` takes.
        format: codecs of keys and values; bf16 by default.
        tokens: lengths to price; by default those of 1k, 8k, 32k, 128k that the model allows. Others may be beyond
            what it was made for, which a note then says.
        memory: bytes for weights and cache together.
        cache_memory: bytes for the cache alone; one of the two, or neither.
        context: tokens of each user's sequence; by default 8k, or the longest that the model allows.
        users: how many must fit.
        block_tokens: tokens of a block; the engine's default where left out.
        chunk: most prompt tokens that a step computes; the engine's default where left out.
        engine: whose accounting to show; ``kvist``.
        encoder_tokens: length of the encoder's output, where a model attends to one and does not fix it.

    Raises:
        InputError: a value is out of range or two contradict each other.
        DoesNotFit: the weights or the users do not fit; the message shows the sum.
    """
    if not isinstance(spec, ModelSpec):
        spec = ModelSpec.read(spec)
    fmt = CacheFormat() if format is None else require_format(format)
    if memory is not None and cache_memory is not None:
        raise InputError(
            "`memory` and `cache_memory` are both given; `memory` includes the weights: give one", key="memory"
        )
    if engine is not None and engine not in ENGINES:
        raise InputError(f"engine: {engine!r} is not accounted for; choose one of {', '.join(ENGINES)}", key="engine")
    if memory is None and cache_memory is None:
        _refuse_without_memory(users=users, engine=engine, context=context, block_tokens=block_tokens, chunk=chunk)
    if users is not None:
        _whole("users", users, most=_MAX_USERS)
    lengths = _lengths(spec, tokens)
    encoder = None if encoder_tokens is None else _encoder(spec, encoder_tokens)
    result = Plan(
        spec=spec,
        format=fmt,
        sequence_bytes={count: spec.sequence_bytes(count, fmt) for count in lengths},
        notes=(*_notes(spec, lengths), *format_notes(spec, fmt)),
        encoder_tokens=encoder,
    )
    if memory is None and cache_memory is None:
        return result
    return _with_capacity(
        result,
        memory=None if memory is None else parse_size(memory, key="memory"),
        cache_memory=None if cache_memory is None else parse_size(cache_memory, key="cache_memory"),
        context=_context(spec, context),
        users=users,
        block_tokens=block_tokens,
        chunk=chunk,
        engine=engine,
    )


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
    return (f"{spec.name} was made for {spec.max_context:,} tokens; what {', '.join(beyond)} would cost is arithmetic",)


def _refuse_without_memory(**settings: object) -> None:
    """These count what fits, and there is nothing to fit into."""
    for key, value in settings.items():
        if value is not None:
            aside = "; a length is priced with `tokens`" if key == "context" else ""
            raise InputError(
                f"{key}: {value} needs a memory to count in; add `memory` or `cache_memory`{aside}", key=key
            )


def _whole(key: str, value: object, *, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{key}: {value!r}; a whole number from 1 to {most}", key=key)
    return value


def _context(spec: ModelSpec, context: int | str | None) -> int:
    if context is None:
        return min(DEFAULT_CONTEXT, spec.max_context)
    count = parse_tokens(context, key="context")
    if not 1 <= count <= spec.max_context:
        raise InputError(f"context: {count} tokens; {spec.name} allows 1 to {spec.max_context}", key="context")
    return count


def _with_capacity(
    result: Plan,
    *,
    memory: int | None,
    cache_memory: int | None,
    context: int,
    users: int | None,
    block_tokens: int | None,
    chunk: int | None,
    engine: str | None,
) -> Plan:
    from kvist.cache.groups import DEFAULT_BLOCK_TOKENS, groups_of
    from kvist.planning.capacity import DEFAULT_CHUNK, Capacity, capacity_of

    spec, fmt = result.spec, result.format
    block = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
    _whole("block_tokens", block, most=_MAX_BLOCK)
    weights = 0
    if cache_memory is None:
        assert memory is not None
        weights = _weights(spec)
        cache_memory = memory - weights
        if cache_memory <= 0:
            raise DoesNotFit(
                f"the weights of {spec.name} take {format_size(weights)}; {format_size(memory)} leaves no cache"
            )
    try:
        capacity: Capacity = capacity_of(
            spec,
            fmt,
            groups_of(spec, fmt, block, encoder_tokens=result.encoder_tokens),
            cache_bytes=cache_memory,
            context=context,
            chunk=DEFAULT_CHUNK if chunk is None else _whole("chunk", chunk, most=MAX_TOKENS),
        )
    except DoesNotFit as error:
        # The arena calls what it is given its memory; here that is the word for weights and cache together.
        raise DoesNotFit(f"the cache: {str(error).removeprefix('memory: ')}") from error
    if users is not None:
        capacity.require(users)
    budget = Budget(
        memory=cache_memory if memory is None else memory,
        weights=weights,
        overhead=0,
        cache=cache_memory,
        cache_tokens=capacity.cache_tokens,
        context=context,
        block_tokens=block,
        users_slab=capacity.users_slab,
        users_paged=capacity.users_paged,
        waste_slab=capacity.waste_slab,
        waste_paged=capacity.waste_paged,
        sequence_allocated=capacity.sequence_allocated,
        prefill_chunk=capacity.prefill_chunk,
    )
    account = None
    if engine is not None:
        growing = next((index for index, group in enumerate(capacity.groups) if group.lifetime == "full"), 0)
        account = EngineAccount(
            name=engine,
            num_blocks=capacity.layout.total_blocks(growing),
            cache_tokens=capacity.cache_tokens,
            max_concurrency=capacity.cache_tokens / context,
            slab_bytes=capacity.layout.slab_bytes,
            num_slabs=capacity.layout.num_slabs,
            groups=tuple(
                EngineGroup(
                    name=group.name, layers=len(group.layers), block_bytes=group.block_bytes, blocks_per_slab=per
                )
                for group, per in zip(capacity.groups, capacity.layout.blocks_per_slab, strict=True)
            ),
            flags=(
                *("--memory", str(cache_memory), "--block", str(block)),
                *("--key", fmt.key, "--value", fmt.value, "--max-context", str(context)),
            ),
        )
    return replace(result, capacity=budget, engine=account)


def _weights(spec: ModelSpec) -> int:
    if spec.weights_bytes is None:
        raise InputError(
            f"memory: the weights of {spec.name} are not known from {spec.source}; name a model directory or a .gguf "
            f"file, or give the cache alone with `cache_memory`",
            key="memory",
        )
    return spec.weights_bytes
