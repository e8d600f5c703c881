"""What fits, how fast it could be, and which devices would do, as tables."""

from collections.abc import Sequence

from kvist.planning.deployment import Deployment
from kvist.planning.fleet import GpuSet
from kvist.planning.plan import Budget
from kvist.planning.roofline import Speed, Step
from kvist.report.tables import Column, print_facts, print_table
from kvist.units import counted, format_size

_MOST_SETS = 16


def print_capacity(budget: Budget, speed: Speed | None) -> None:
    """Print where the memory goes, how many users fit, and the bounds on their speed."""
    facts = []
    if budget.deployment is not None:
        facts += _device_facts(budget.deployment)
    facts.append(("memory", format_size(budget.memory)))
    if budget.weights:
        facts.append(("weights", format_size(budget.weights)))
    if budget.overhead:
        facts.append(("overhead", format_size(budget.overhead)))
    average = "on average" if budget.mix else "of blocks"
    if budget.deployment is not None and budget.deployment.machine.tp * budget.deployment.machine.pp > 1:
        average += " on a device,"
    facts += [
        (
            "cache",
            f"{format_size(budget.cache)}: {counted(budget.cache_tokens, 'token')} in blocks of {budget.block_tokens}",
        ),
        *(
            [
                (
                    "cartridge",
                    f"{format_size(budget.cartridge_bytes)} of {counted(budget.cartridge, 'token')}, once for all"
                    f"{f' in {budget.cartridge_format}' if budget.cartridge_format else ''}",
                )
            ]
            if budget.cartridge
            else []
        ),
        ("one user", f"{format_size(budget.sequence_allocated)} {average} at {counted(budget.context, 'token')}"),
    ]
    if budget.mix is not None:
        mix = budget.mix
        facts.append(
            (
                "lengths",
                f"{counted(len(mix.requests), 'sequence')}, up to {counted(mix.limit, 'token')}; at a random moment "
                f"{mix.moments.mean_tokens:,.0f} on average, {mix.moments.quantile(0.99):,} at the 99th percentile",
            )
        )
    print_facts(facts)
    _print_users(budget)
    if speed is not None:
        _print_speed(speed)


def _device_facts(deployment: Deployment) -> list[tuple[str, str]]:
    machine = deployment.machine
    if machine.accelerator is None and machine.devices == 1:
        return []
    shared = []
    if machine.tp > 1:
        shared.append(f"{machine.tp} ranks")
    if machine.pp > 1:
        shared.append(f"{machine.pp} stages")
    if machine.replicas > 1:
        shared.append(f"{machine.replicas} replicas")
    return [("devices", machine.label + (f": {' x '.join(shared)}" if shared else ""))]


def _print_users(budget: Budget) -> None:
    mean = budget.users_mean
    columns = [
        Column(title=f"users at {counted(budget.context, 'token')}" if mean is None else "users of these lengths"),
        Column(title="fit" if mean is None else "99 % safe", number=True),
    ]
    if mean is not None:
        columns.append(Column(title="on average", number=True))
    columns.append(Column(title="waste", number=True))
    lines: list[tuple[str, int, int | None, int | None]] = [
        ("slab: longest context reserved at once", budget.users_slab, mean.slab if mean else None, budget.waste_slab),
        ("paged: blocks as sequences grow", budget.users_paged, mean.paged if mean else None, budget.waste_paged),
    ]
    if budget.users_prefix is not None:
        lines.append(("paged, shared prefixes stored once", budget.users_prefix, mean.prefix if mean else None, None))
    print_table(
        columns,
        [
            [
                name,
                f"{users:,}",
                *([] if mean is None else [f"{average or 0:,}"]),
                "" if waste is None else format_size(waste),
            ]
            for name, users, average, waste in lines
        ],
    )


def _print_speed(speed: Speed) -> None:
    what_binds = {
        "memory": "memory: more users would cost a step little, but do not fit",
        "bandwidth": "bandwidth: each user more makes a step longer by what it reads",
        "compute": "compute: each user more makes a step longer by what it computes",
    }
    rows: list[tuple[str, str, str, str]] = [
        ("decode, one step", _time(speed.decode), f"{speed.decode_rate:,.0f}", speed.decode.binds),
        ("decode, each user", "", f"{speed.user_rate:,.1f}", ""),
    ]
    if speed.prefill is not None:
        what = f"prefill of {counted(speed.prompt, 'token')}"
        rows.append((what, _time(speed.prefill), f"{speed.prefill_rate:,.0f}", speed.prefill.binds))
    print_table(
        (
            Column(title=f"at best, with {counted(speed.users, 'user')}"),
            Column(title="time", number=True),
            Column(title="tokens/s", number=True),
            Column(title="bound by"),
        ),
        rows,
    )
    print_facts([("binds", what_binds[speed.binds])])


def _time(step: Step) -> str:
    milliseconds = step.seconds * 1000
    return f"{milliseconds:,.1f} ms" if milliseconds < 1000 else f"{step.seconds:,.2f} s"


def print_sets(sets: Sequence[GpuSet]) -> None:
    """Print the smallest sets of devices, the least memory first."""
    rows = [
        (
            each.accelerator.name if each.link_counted else f"{each.accelerator.name} *",
            f"{each.devices}" if each.pp == 1 else f"{each.tp} x {each.pp}",
            format_size(each.devices * each.memory),
            f"{each.needed / each.memory:.0%}",
            "" if each.speed is None or each.speed.prefill is None else f"{each.speed.prefill_rate:,.0f}",
            "" if each.speed is None else f"{each.speed.user_rate:,.1f}",
        )
        for each in sets[:_MOST_SETS]
    ]
    more = len(sets) - len(rows)
    print_table(
        (
            Column(title="device"),
            Column(title="count", number=True),
            Column(title="memory", number=True),
            Column(title="used", number=True),
            Column(title="prefill/s", number=True),
            Column(title="decode/s", number=True),
        ),
        rows,
        title="Smallest sets that hold these users; tokens a second at best, decode for each user",
    )
    if not all(each.link_counted for each in sets[:_MOST_SETS]):
        print_facts([("*", "its link is not known: the time in which ranks send each other results is left out")])
    if more > 0:
        print_facts([("note", f"with more memory {more} more would do; --json lists them")])
