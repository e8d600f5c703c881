"""Each number of a plan as formula x source, for ``--explain``."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvist.planning.explain_layers import config_keys, explain_vectors, terms_of
from kvist.planning.plan import Budget, Plan
from kvist.spec.layers import Rate, rate_in_json


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One number: what it is, how much, how it comes about, and whose numbers went in."""

    what: str
    value: Rate
    formula: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """As under ``explain`` in the JSON of ``kvist plan --explain``."""
        return {
            "what": self.what, "value": rate_in_json(self.value), "formula": self.formula, "source": self.source,
        }  # fmt: skip


def explain(plan: Plan) -> list[Explained]:
    """Explain every number of a plan, in the order in which they build on each other."""
    rows = [*_tokens(plan), *_sequences(plan), *_apart(plan), *_weights(plan)]
    if plan.capacity is not None:
        rows.extend(_capacity(plan, plan.capacity))
    return rows


def _tokens(plan: Plan) -> Iterator[Explained]:
    fmt = plan.format
    vectors = (vector for row in plan.layers for vector in explain_vectors(row.layer, fmt))
    for vector in dict.fromkeys(vectors):
        yield Explained(what=vector.what, value=vector.size, formula=vector.formula, source=vector.source)
    terms = terms_of(plan.layers, fmt)
    yield Explained(
        what="append, bytes a token",
        value=plan.append_bytes_per_token,
        formula=_sum(term.append for term in terms if term.append) or "no layer grows with the tokens",
        source=config_keys(plan.spec),
    )
    yield Explained(
        what="retained, bytes a token",
        value=plan.retained_bytes_per_token,
        formula=_sum(term.append for term in terms if term.append and term.limit is None)
        or "no layer grows past its window",
        source="append, without the layers that have a window",
    )
    if plan.indexer_bytes_per_token:
        yield Explained(
            what="of append, indexer keys",
            value=plan.indexer_bytes_per_token,
            formula=_sum(term.append for term in terms if term.indexer),
            source="the indexers; in append and retained, left out of published tables",
        )
    if plan.state_bytes:
        yield Explained(
            what="state, bytes a sequence",
            value=plan.state_bytes,
            formula=_sum(term.fixed for term in terms if term.fixed),
            source="shapes of the recurrent layers, in their own types whatever the format",
        )


def _sequences(plan: Plan) -> Iterator[Explained]:
    terms = terms_of(plan.layers, plan.format)
    rules = [
        ("a window of W tokens holds min(tokens, W)", any(term.limit is not None for term in terms)),
        ("compressed entries and pools are whole: //", any("//" in term.held(1) for term in terms)),
        ("a state is there whatever the length", any(term.fixed for term in terms)),
    ]
    source = "; ".join(rule for rule, used in rules if used) or "every layer holds every token"
    for tokens, size in plan.sequence_bytes.items():
        parts = (term.fixed or f"{term.held(tokens)} x {term.unit}" for term in terms)
        yield Explained(
            what=f"sequence of {tokens:,} tokens",
            value=size,
            formula=_sum(parts) or "no layer stores anything",
            source=source,
        )


def _apart(plan: Plan) -> Iterator[Explained]:
    """What no other number counts: the encoder's side, and draft layers."""
    if plan.cross_bytes_per_encoder_token:
        terms = terms_of(plan.layers, plan.format, cross=True)
        yield Explained(
            what="cross, bytes an encoder token",
            value=plan.cross_bytes_per_encoder_token,
            formula=_sum(term.unit for term in terms),
            source="the layers that attend to the encoder; beside the sequence's own tokens",
        )
        if plan.cross_bytes is not None:
            yield Explained(
                what="cross, bytes a sequence",
                value=plan.cross_bytes,
                formula=_sum(f"{term.encoder_tokens or plan.encoder_tokens:,} x {term.unit}" for term in terms),
                source="tokens of the encoder's output, by the model or as given",
            )
    if plan.spec.draft_layers:
        terms = terms_of(plan.draft_layers, plan.format)
        yield Explained(
            what="draft layers, bytes a token",
            value=plan.draft_append_bytes_per_token,
            formula=_sum(term.append for term in terms if term.append) or "no draft layer grows with the tokens",
            source="layers for multi-token prediction; in no other number",
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
    reserved = plan.spec.sequence_bytes(longest, plan.format) + (plan.cross_bytes or 0)
    encoder = " and the encoder" if plan.cross_bytes else ""
    yield Explained(
        what="users, slab",
        value=budget.users_slab,
        formula=f"{budget.cache:,} // {reserved:,} B of {longest:,} tokens{encoder}",
        source="each user's longest context reserved in one piece",
    )


def _sum(parts: Iterable[str]) -> str:
    return " + ".join(parts)
