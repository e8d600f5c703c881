"""What a simulation found, as tables: the policies side by side."""

from collections.abc import Callable, Sequence

from kvist.report.tables import WIDTH, Column, print_facts, print_table
from kvist.simulation.results import BOUNDS, Percentiles, PolicyResult, SimulationResult
from kvist.units import format_size

_GAP = 3
_MARGINS = 2

# What "unused" and "slab_tails" of `PolicyResult.waste` are called; another cause goes by its own name.
WASTE_CAUSES = {"unused": "for tokens that did not come", "slab_tails": "ends of slabs"}

# Rows that belong together: a name, and a cell a policy.
Group = list[tuple[str, Sequence[str]]]


def print_simulation(result: SimulationResult) -> None:
    """Print a simulation: what was replayed, the policies side by side, and what a reader should know.

    Rows that say nothing are left out: a simulation without a clock has no times.
    """
    print_facts(_facts(result))
    groups = comparison(list(result.policies.values()))
    names = list(result.policies)
    for part in _parts(names, groups):
        columns = (Column(title="policy", whole=True), *(Column(title=names[index], number=True) for index in part))
        rows: list[Sequence[str]] = []
        for group in groups:
            if rows:
                rows.append([""] * len(columns))
            rows += ([name, *(cells[index] for index in part)] for name, cells in group)
        if part:
            print_table(columns, rows)
    if result.notes:
        print_facts([("note", note) for note in result.notes])


def format_seconds(seconds: float) -> str:
    """Print a time with three digits and the unit that suits it: ``312 ms``, ``4.52 s``, ``59.1 min``, ``27.8 h``."""
    if seconds == 0:
        return "0 s"
    value, unit = seconds / 3600, "h"
    for size, name, below in ((1e-3, "ms", 1.0), (1.0, "s", 120.0), (60.0, "min", 7200.0)):
        # What would be rounded up to the next unit's first number is printed in it.
        if float(f"{seconds:.3g}") < below:
            value, unit = seconds / size, name
            break
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f} {unit}"


def format_share(share: float) -> str:
    """Print a share of one in percent, with the digits that tell a little from nothing: ``37.4 %``, ``0.04 %``."""
    percent = share * 100
    if percent == 0:
        return "0 %"
    return "< 0.01 %" if percent < 0.005 else f"{percent:.2f} %" if percent < 0.95 else f"{percent:.1f} %"


def _facts(result: SimulationResult) -> list[tuple[str, str]]:
    facts = [("trace", result.trace)]
    if result.model:
        facts += [("model", result.model), ("format", result.format)]
    if result.machine:
        facts.append(("machine", result.machine))
    facts.append(
        (
            "requests",
            f"{result.requests:,}: {result.prompt_tokens:,} tokens of prompts, {result.output_tokens:,} of answers",
        )
    )
    if result.simulated_requests_per_second:
        facts.append(("simulated", f"{result.simulated_requests_per_second:,.0f} requests a second"))
    return facts


def comparison(policies: Sequence[PolicyResult]) -> list[Group]:
    """Rows of the comparison, those that belong together in a list: a name, and a cell a policy.

    A row that says nothing of any policy is not among them, and no list is empty.
    """
    timed = any(each.ttft is not None for each in policies)
    waste: Group = []
    if any(each.waste_ratio for each in policies):
        waste.append(("waste of reserved memory", [format_share(each.waste_ratio) for each in policies]))
        causes = dict.fromkeys(cause for each in policies for cause, share in each.waste.items() if share)
        waste += (
            (f"  {WASTE_CAUSES.get(cause, cause)}", [format_share(each.waste.get(cause, 0)) for each in policies])
            for cause in causes
        )
    tiers = dict.fromkeys(tier for each in policies for tier, found in each.tier_hit_tokens.items() if found)
    groups: list[Group] = [
        [
            ("hit ratio", [format_share(each.hit_ratio) for each in policies]),
            *_counted("hit tokens", policies, lambda each: each.hit_tokens),
            *((f"  from {tier}", [f"{each.tier_hit_tokens.get(tier, 0):,}" for each in policies]) for tier in tiers),
        ],
        [
            ("finished", [f"{each.finished:,}" for each in policies]),
            *_counted("refused", policies, lambda each: each.refused, always=timed),
            *_counted("preempted", policies, lambda each: each.preempted, always=timed),
            *_counted("recomputed tokens", policies, lambda each: each.recomputed_tokens),
            *_counted("running, peak", policies, lambda each: each.peak_running),
            *_where("running, mean", policies, lambda each: each.mean_running, lambda value: f"{value:,.1f}"),
        ],
        [
            *waste,
            *_where("reserved, peak", policies, lambda each: each.reserved_bytes_peak, format_size),
            *_where("memory", policies, lambda each: each.cache_bytes, format_size),
        ],
        [
            *_times("TTFT", policies, lambda each: each.ttft),
            *_times("TPOT", policies, lambda each: each.tpot),
            *_times("latency", policies, lambda each: each.latency),
            *_times("in the queue", policies, lambda each: each.queue),
        ],
        [
            *_where("tokens/s", policies, lambda each: each.tokens_per_second, format_rate),
            *_where("makespan", policies, lambda each: each.makespan, format_seconds),
            *_counted("steps", policies, lambda each: each.steps),
        ],
        [
            (
                "idle" if name == "idle" else f"bound by {name}",
                [format_share(each.bound.get(name, 0)) for each in policies],
            )
            for name in BOUNDS
            if any(each.bound.get(name) for each in policies)
        ],
    ]
    return [group for group in groups if group]


def _where(
    name: str, policies: Sequence[PolicyResult], read: Callable[[PolicyResult], float], show: Callable[[float], str]
) -> Group:
    return [(name, [show(read(each)) for each in policies])] if any(read(each) for each in policies) else []


def _counted(
    name: str, policies: Sequence[PolicyResult], read: Callable[[PolicyResult], int], *, always: bool = False
) -> Group:
    return [(name, [f"{read(each):,}" for each in policies])] if always or any(read(each) for each in policies) else []


def _times(name: str, policies: Sequence[PolicyResult], read: Callable[[PolicyResult], Percentiles | None]) -> Group:
    """The median and the 99th percentile; a policy that finished nothing has neither."""
    found = [read(each) if each.finished else None for each in policies]
    if not any(found):
        return []
    return [
        (f"{name}, p50", ["" if one is None else format_seconds(one.p50) for one in found]),
        (f"{name}, p99", ["" if one is None else format_seconds(one.p99) for one in found]),
    ]


def format_rate(value: float) -> str:
    """Print a rate with at least three digits: ``4.07``, ``61.2``, ``4,481``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _parts(names: Sequence[str], groups: Sequence[Group]) -> list[list[int]]:
    """Indices of the policies that stand side by side in a table; as many as have room, and at least one."""
    rows = [row for group in groups for row in group]
    first = max([len("policy"), *(len(name) for name, _ in rows)])
    parts: list[list[int]] = [[]]
    taken = first
    for index, name in enumerate(names):
        width = max(len(name), *(len(cells[index]) for _, cells in rows)) + _GAP
        if parts[-1] and taken + width > WIDTH - _MARGINS:
            parts.append([])
            taken = first
        parts[-1].append(index)
        taken += width
    return parts
