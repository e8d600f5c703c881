"""Each number of a plan as formula x source, for ``--explain``."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvist.planning.plan import Budget, LayerRow, Plan
from kvist.spec.formats import CODECS, CacheFormat

_KEYS = "num_hidden_layers, num_key_value_heads, head_dim"


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One number: what it is, how much, how it comes about, and whose numbers went in."""

    what: str
    value: int
    formula: str
    source: str


def explain(plan: Plan) -> list[Explained]:
    """Explain every number of a plan, in the order in which they build on each other."""
    rows = [*_tokens(plan), *_sequences(plan), *_weights(plan)]
    if plan.capacity is not None:
        rows.extend(_capacity(plan, plan.capacity))
    return rows


def _tokens(plan: Plan) -> Iterator[Explained]:
    source = f"{_KEYS}; {plan.spec.source}"
    for side in ("key", "value"):
        widths = sorted({getattr(row, f"{side}_dim") for row in plan.layers})
        name = getattr(plan.format, side)
        for width in widths:
            yield Explained(
                what=f"one {side} vector",
                value=CODECS[name].vector_bytes(width),
                formula=_vector(name, width),
                source=f"codec {name}",
            )
    yield Explained(
        what="append, bytes a token",
        value=plan.append_bytes_per_token,
        formula=_sum(_layers(row, plan.format) for row in plan.layers),
        source=source,
    )
    growing = [row for row in plan.layers if row.window is None]
    yield Explained(
        what="retained, bytes a token",
        value=plan.retained_bytes_per_token,
        formula=_sum(_layers(row, plan.format) for row in growing) or "no layer grows past its window",
        source="append, without the layers that have a window",
    )


def _sequences(plan: Plan) -> Iterator[Explained]:
    for tokens, size in plan.sequence_bytes.items():
        parts = [f"{_held(tokens, row.window)} x {_layers(row, plan.format)}" for row in plan.layers]
        yield Explained(
            what=f"sequence of {tokens:,} tokens",
            value=size,
            formula=_sum(parts),
            source="a window of W tokens holds min(tokens, W)",
        )


def _weights(plan: Plan) -> Iterator[Explained]:
    if plan.spec.weights_bytes is not None:
        yield Explained(
            what="weights",
            value=plan.spec.weights_bytes,
            formula=_sum(f"{size:,} {kind}" for kind, size in plan.spec.weights_by_type.items()),
            source=f"tensors listed in {plan.spec.source}",
        )


def _capacity(plan: Plan, budget: Budget) -> Iterator[Explained]:
    if budget.weights:
        yield Explained(
            what="cache",
            value=budget.cache,
            formula=f"{budget.memory:,} - {budget.weights:,} weights - {budget.overhead:,} overhead",
            source="--memory; step buffers of the engine are not set aside",
        )
    else:
        yield Explained(what="cache", value=budget.cache, formula="as given", source="--cache-memory")
    yield Explained(
        what="cache, tokens",
        value=budget.cache_tokens,
        formula=f"whole blocks of {budget.block_tokens} tokens in {budget.cache:,} B",
        source="slabs and blocks as kvist's arena cuts them",
    )
    yield Explained(
        what=f"one user's blocks at {budget.context:,} tokens",
        value=budget.sequence_allocated,
        formula="whole blocks of every group; a window holds those that its next query sees",
        source=f"--context, --block {budget.block_tokens}",
    )
    yield Explained(
        what="users, paged",
        value=budget.users_paged,
        formula=f"most that fit, {budget.sequence_allocated:,} B of blocks each, one of them in its prompt",
        source="slabs and blocks as kvist's arena cuts them",
    )
    longest = max(plan.spec.max_context, budget.context)
    yield Explained(
        what="users, slab",
        value=budget.users_slab,
        formula=f"{budget.cache:,} // {plan.spec.sequence_bytes(longest, plan.format):,} B of {longest:,} tokens",
        source="each user's longest context reserved in one piece",
    )


def _layers(row: LayerRow, fmt: CacheFormat) -> str:
    key, value = fmt.key_codec.vector_bytes(row.key_dim), fmt.value_codec.vector_bytes(row.value_dim)
    return f"{row.count} layers x {row.kv_heads} heads x ({key} + {value} B)"


def _held(tokens: int, window: int | None) -> str:
    return f"{tokens:,}" if window is None else f"min({tokens:,}, {window:,})"


def _vector(codec: str, width: int) -> str:
    known = CODECS[codec]
    data = f"{width} x {known.bits} bit"
    return f"{data} + {width // known.group} x {known.scale_bytes} B scale" if known.scale_bytes else data


def _sum(parts: Iterator[str] | list[str]) -> str:
    return " + ".join(parts)
