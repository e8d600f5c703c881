"""A plan as tables."""

import re

from kvist.planning.explain import explain
from kvist.planning.plan import Plan
from kvist.report.layer_lines import format_rate, layer_lines
from kvist.report.tables import Column, print_entries, print_facts, print_table
from kvist.units import counted, format_size

_LINE = 60


def print_plan(plan: Plan, *, explained: bool = False) -> None:
    """Print a plan; with ``explained`` each number as formula and source too."""
    spec = plan.spec
    facts = [("model", spec.name), ("source", spec.source if spec.exact else f"{spec.source} (overridden: not exact)")]
    if spec.weights_bytes is not None:
        by_type = ", ".join(f"{kind} {format_size(size)}" for kind, size in spec.weights_by_type.items())
        facts.append(("weights", f"{format_size(spec.weights_bytes)}{f' ({by_type})' if by_type else ''}"))
    if spec.parameters is not None:
        facts.append(("parameters", f"{spec.parameters:,}"))
    facts += [("layers", line) for line in layer_lines(plan.layers)]
    facts += [("draft layers", line) for line in layer_lines(plan.draft_layers)]
    facts.append(("format", plan.format.words))
    facts += _token_facts(plan)
    print_facts(facts)
    print_table(
        (
            Column(title="tokens", number=True),
            Column(title="one sequence", number=True),
            Column(title="bytes", number=True),
        ),
        [(f"{tokens:,}", format_size(size), f"{size:,}") for tokens, size in plan.sequence_bytes.items()],
    )
    if plan.notes:
        print_facts([("note", note) for note in plan.notes])
    if plan.capacity is not None:
        from kvist.report.capacity_tables import print_capacity

        print_capacity(plan.capacity, plan.speed)
    if plan.sets is not None:
        from kvist.report.capacity_tables import print_sets

        print_sets(plan.sets)
    if plan.engine is not None:
        _print_engine(plan)
    if explained:
        print_entries(
            [
                (row.what, format_rate(row.value), (*_formula_lines(row.formula), f"from {row.source}"))
                for row in explain(plan)
            ],
            title="How each number comes about",
        )
    if spec.assumed:
        print_table(
            (Column(title="key", whole=True), Column(title="value", whole=True), Column(title="why")),
            [(entry.key, str(entry.value), entry.source) for entry in spec.assumed],
            title="Assumed, because the source leaves it out",
        )


def print_what_if(plan: Plan, published: Plan) -> None:
    """Print what overriding keys changes: each number as published, as assumed, and how many times as much."""
    rows = [
        ("append", published.append_bytes_per_token, plan.append_bytes_per_token),
        ("retained", published.retained_bytes_per_token, plan.retained_bytes_per_token),
        ("state", published.state_bytes, plan.state_bytes),
        *(
            (counted(tokens, "token"), size, plan.sequence_bytes[tokens])
            for tokens, size in published.sequence_bytes.items()
            if tokens in plan.sequence_bytes
        ),
    ]
    print_table(
        (
            Column(title="what if", whole=True),
            Column(title="as published", number=True),
            Column(title="as assumed", number=True),
            Column(title="times", number=True),
        ),
        [
            (
                what,
                format_size(float(before)),
                format_size(float(after)),
                f"{float(after) / float(before):.3g}" if before else "",
            )
            for what, before, after in rows
            if before or after
        ],
    )


def _formula_lines(formula: str) -> list[str]:
    """A long sum with a line for each product."""
    products = re.split(r" \+ (?![^(]*\))", formula) if len(formula) > _LINE else [formula]
    return [f"{'=' if index == 0 else '+'} {product}" for index, product in enumerate(products)]


def _token_facts(plan: Plan) -> list[tuple[str, str]]:
    facts = [
        ("append", f"{format_size(float(plan.append_bytes_per_token))} a token while every layer grows"),
        ("retained", f"{format_size(float(plan.retained_bytes_per_token))} a token once every window is full"),
    ]
    if plan.indexer_bytes_per_token:
        share = format_size(float(plan.indexer_bytes_per_token))
        facts.append(("indexer", f"{share} of append; published tables leave it out"))
    if plan.state_bytes:
        facts.append(("state", f"{format_size(plan.state_bytes)} a sequence, whatever its length"))
    if plan.cross_bytes_per_encoder_token:
        line = f"{format_size(plan.cross_bytes_per_encoder_token)} a token of the encoder, not counted below"
        if plan.cross_bytes is not None:
            line += f"; {format_size(plan.cross_bytes)} in all"
        facts.append(("cross", line))
    if plan.draft_layers:
        more = format_size(float(plan.draft_append_bytes_per_token))
        facts.append(("draft", f"{more} a token more with the draft layers, not counted below"))
    return facts


def _print_engine(plan: Plan) -> None:
    account = plan.engine
    assert account is not None
    facts = [("engine", f"{account.name} {account.version}".strip())]
    facts += [
        (group.name, f"{counted(group.layers, 'layer')}, blocks of {format_size(group.block_bytes)}")
        for group in account.groups
    ]
    facts += [
        ("blocks", f"{account.num_blocks:,}; {counted(account.cache_tokens, 'token')}"),
        ("concurrency", f"{account.max_concurrency:.2f} sequences of full length at once"),
        ("start", account.start(plan.spec.name)),
    ]
    print_facts(facts)
    if account.notes:
        print_facts([("note", note) for note in account.notes])
