"""The numbers of devices, users and speed as formula and source."""

from collections.abc import Iterator

from kvist.planning.deployment import Deployment
from kvist.planning.explained import Explained
from kvist.planning.plan import Budget, Plan
from kvist.planning.roofline import Speed, Step
from kvist.units import counted

_ARENA = "slabs and blocks as kvist's arena cuts them"


def explain_capacity(plan: Plan, budget: Budget) -> Iterator[Explained]:
    """Explain what fits, in the order in which the numbers build on each other."""
    yield from _cache(budget)
    yield Explained(
        what="cache, tokens",
        value=budget.cache_tokens,
        formula=f"whole blocks of {counted(budget.block_tokens, 'token')} in {budget.cache:,} B",
        source=_ARENA,
    )
    if budget.cartridge:
        yield Explained(
            what=f"cartridge of {counted(budget.cartridge, 'token')}",
            value=budget.cartridge_bytes,
            formula="whole blocks of every group, stored once; a window holds those that the next query sees",
            source=f"--cartridge, in {budget.cartridge_format or 'the format of the cache'}",
        )
    average = "the average user's" if budget.mix else "one user's"
    yield Explained(
        what=f"{average} blocks at {counted(budget.context, 'token')}",
        value=budget.sequence_allocated,
        formula="whole blocks of every group; a window holds those that its next query sees",
        source=f"{budget.mix.source} at random moments" if budget.mix else f"--context, --block {budget.block_tokens}",
    )
    yield from _users(plan, budget)
    if plan.speed is not None:
        yield from _speed(plan.speed)


def _cache(budget: Budget) -> Iterator[Explained]:
    deployment = budget.deployment
    if deployment is None or deployment.machine.cache is not None:
        yield Explained(what="cache", value=budget.cache, formula="as given", source="--cache-memory")
        return
    yield from _devices(deployment)
    yield Explained(
        what="cache",
        value=budget.cache,
        formula=f"{budget.memory:,} - {budget.weights:,} weights - {budget.overhead:,} overhead",
        source=f"what is left of {deployment.machine.label}",
    )


def _devices(deployment: Deployment) -> Iterator[Explained]:
    """What a device of each stage holds beside its cache."""
    machine = deployment.machine
    assert machine.memory is not None
    yield Explained(
        what="memory",
        value=machine.memory * machine.devices,
        formula=f"{machine.devices} x {machine.memory:,} B",
        source=machine.memory_source,
    )
    for stage in deployment.stages:
        of = "" if len(deployment.stages) == 1 else f", layers {stage.layers.first} to {stage.layers.end - 1}"
        if machine.tp * machine.pp > 1:
            yield Explained(
                what=f"weights on one device{of}",
                value=stage.weights,
                formula=(
                    "its layers, and what is before or behind them"
                    if machine.tp == 1
                    else f"the fullest of {machine.tp} ranks, with what every rank holds"
                ),
                source=(
                    "layers are dealt out"
                    if machine.tp == 1
                    else "heads and widths are dealt out; latents, norms and routers are on every rank"
                ),
            )
        for cost in deployment.costs(stage):
            yield Explained(what=f"{cost.what}{of}", value=cost.size, formula=cost.formula, source=cost.source)


def _users(plan: Plan, budget: Budget) -> Iterator[Explained]:
    certain = ", 99 % of the time" if budget.mix else ""
    how = "independent sequences at random moments" if budget.mix else "one of them in its prompt"
    beside = f" beside {budget.cartridge_bytes:,} B of the cartridge" if budget.cartridge else ""
    yield Explained(
        what="users, paged",
        value=budget.users_paged,
        formula=f"most that fit{certain}, {budget.sequence_allocated:,} B of blocks each{beside}, {how}",
        source=_ARENA,
    )
    if budget.users_prefix is not None:
        yield Explained(
            what="users, paged and sharing prefixes",
            value=budget.users_prefix,
            formula=f"most that fit{certain}, blocks of shared prefixes stored once",
            source="--shared-prefix" if budget.mix is None or budget.mix.shared else f"hash_ids of {budget.mix.source}",
        )
    deployment = budget.deployment
    if deployment is None or deployment.machine.devices == 1:
        longest = budget.mix.limit if budget.mix else max(plan.spec.max_context - budget.cartridge, budget.context)
        reserved = plan.spec.sequence_bytes(longest, plan.format) + (plan.cross_bytes or 0)
        encoder = " and the encoder" if plan.cross_bytes else ""
        left = f"({budget.cache:,} - {budget.cartridge_bytes:,})" if budget.cartridge else f"{budget.cache:,}"
        formula = f"{left} // {reserved:,} B of {counted(longest, 'token')}{encoder}"
    else:
        formula = "the fewest that a stage's caches hold, on all replicas"
    yield Explained(
        what="users, slab",
        value=budget.users_slab,
        formula=formula,
        source="each user's longest context reserved in one piece",
    )


def _speed(speed: Speed) -> Iterator[Explained]:
    for what, step in (("decode", speed.decode), ("prefill", speed.prefill)):
        if step is None:
            continue
        yield Explained(
            what=f"{what}, microseconds a step at best",
            value=round(step.seconds * 10**6),
            formula=_step(step),
            source="peak rates of the device; a bound, not a forecast",
        )
    yield Explained(
        what="decode, tokens a second at best",
        value=round(speed.decode_rate),
        formula=(
            f"{'' if speed.replicas == 1 else f'{speed.replicas} replicas x '}"
            f"{counted(speed.decode.tokens, 'sequence')} every {speed.decode.stage_seconds * 10**6:,.0f} microseconds"
        ),
        source="the step above; stages work on different sequences at once",
    )


def _step(step: Step) -> str:
    work = f"{step.operations:.3g} operations in {step.compute_seconds * 10**6:.0f}"
    read = (
        f"{step.weights_bytes:.3g} B of weights and {step.cache_bytes:.3g} B of cache in "
        f"{step.memory_seconds * 10**6:.0f}"
    )
    sent = f" + {step.link_seconds * 10**6:.0f} between ranks" if step.link_seconds else ""
    stages = f"{step.stages} stages x " if step.stages > 1 else ""
    return f"{stages}max({work}, {read}){sent}"
