"""Each number of a plan as formula x source, for ``--explain``."""

from collections.abc import Iterable, Iterator
from fractions import Fraction

from kvist.errors import InputError
from kvist.planning.explain_layers import config_keys, expanded_of, explain_vectors, terms_of
from kvist.planning.explained import Explained
from kvist.planning.plan import Plan
from kvist.planning.weights import weights_of
from kvist.spec.rates import spread
from kvist.units import counted


def explain(plan: Plan) -> list[Explained]:
    """Explain every number of a plan, in the order in which they build on each other."""
    rows = [*_tokens(plan), *_sequences(plan), *_apart(plan), *_weights(plan)]
    if plan.capacity is not None:
        from kvist.planning.explain_capacity import explain_capacity

        rows.extend(explain_capacity(plan, plan.capacity))
    return [*rows, *_engine(plan)]


def _engine(plan: Plan) -> Iterator[Explained]:
    """What another engine counts, by its own rules and files."""
    if plan.engine is None:
        return
    for figure in plan.engine.figures:
        yield Explained(
            what=f"{plan.engine.name}, {figure.what}",
            value=figure.value if isinstance(figure.value, int) else Fraction(figure.value),
            formula=figure.formula,
            source=figure.source,
        )


def _tokens(plan: Plan) -> Iterator[Explained]:
    vectors = (vector for row in plan.layers for vector in explain_vectors(row.layer, row.format))
    for vector in dict.fromkeys(vectors):
        yield Explained(what=vector.what, value=vector.size, formula=vector.formula, source=vector.source)
    terms = terms_of(plan.layers)
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
    expanded = expanded_of(plan.spec, plan.layers)
    if expanded is not None:
        yield Explained(
            what="expanded, bytes a token",
            value=expanded.size,
            formula=expanded.formula,
            source=f"{expanded.source}: the keys and values of all heads, for which the latents stand",
        )
        yield Explained(
            what="expanded, times the latents",
            value=spread(expanded.size, expanded.latent_size),
            formula=f"{expanded.size:,} / {expanded.latent_size:,} B",
            source="what keeping them would take, by what keeping latents does",
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
            source="shapes of the recurrent layers, in their own types whatever the format"
            if plan.format.state is None
            else f"shapes of the recurrent layers, their states in {plan.format.state} as the format says",
        )


def _sequences(plan: Plan) -> Iterator[Explained]:
    terms = terms_of(plan.layers)
    rules = [
        ("a window of W tokens holds min(tokens, W)", any(term.limit is not None for term in terms)),
        ("compressed entries and pools are whole: //", any("//" in term.held(1) for term in terms)),
        ("whole runs are sealed, and the rest is in the tail", any(term.run for term in terms)),
        ("a state is there whatever the length", any(term.fixed for term in terms)),
    ]
    source = "; ".join(rule for rule, used in rules if used) or "every layer holds every token"
    for tokens, size in plan.sequence_bytes.items():
        parts = (term.fixed or f"{term.held(tokens)} x {term.unit}" for term in terms)
        yield Explained(
            what=f"sequence of {counted(tokens, 'token')}",
            value=size,
            formula=_sum(parts) or "no layer stores anything",
            source=source,
        )


def _apart(plan: Plan) -> Iterator[Explained]:
    """What no other number counts: the encoder's side, and draft layers."""
    if plan.cross_bytes_per_encoder_token:
        terms = terms_of(plan.layers, cross=True)
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
        terms = terms_of(plan.draft_layers)
        yield Explained(
            what="draft layers, bytes a token",
            value=plan.draft_append_bytes_per_token,
            formula=_sum(term.append for term in terms if term.append) or "no draft layer grows with the tokens",
            source="layers for multi-token prediction; in no other number",
        )


def _weights(plan: Plan) -> Iterator[Explained]:
    try:
        weights = plan.weights or weights_of(plan.spec)
    except InputError:
        return
    yield Explained(
        what="weights",
        value=weights.total,
        formula=_sum(f"{size:,} {kind}" for kind, size in weights.by_type.items()),
        source=weights.source,
    )


def _sum(parts: Iterable[str]) -> str:
    return " + ".join(parts)
