"""What an engine makes of a plan's memory: kvist's own account, or that of another engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvist.errors import DoesNotFit, InputError
from kvist.planning.deployment import Stage
from kvist.planning.engines import engine_account
from kvist.planning.engines.account import EngineAccount, EngineBudget, EngineGroup
from kvist.planning.fit import Fit
from kvist.planning.plan import Plan
from kvist.spec.format_words import options_of
from kvist.units import format_size

# What other engines call ranks and stages, where they have them.
_SHARING = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size"),
    "sglang": ("tp_size", "pp_size"),
}

# What an engine's own share of a device already leaves room for, and would be counted twice.
_SET_ASIDE = {"sglang": ("activations", "sampling", "graphs")}

# Settings by which an engine stores keys and values whatever format is planned with, and their words for our codecs.
_STORAGE = {
    "vllm": ("kv_cache_dtype", "dtype"),
    "sglang": ("kv_cache_dtype",),
    "llama.cpp": ("type_k", "type_v"),
    "transformers": ("dtype",),
}
_WORDS = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "fp8_e4m3": "fp8", "q8_0": "int8", "q4_0": "int4",
    "q4_1": "int4a",
}  # fmt: skip


def account_of(plan: Plan, fit: Fit, engine: str, settings: Mapping[str, Any] | None) -> EngineAccount:
    """What an engine makes of one device of a plan.

    Raises:
        InputError: there is no such engine, or a setting is wrong.
        DoesNotFit: the engine would not start, or its settings ask for more than a device has.
    """
    if engine == "kvist":
        return _kvist(plan, fit, settings)
    machine = fit.deployment.machine
    if engine not in _SHARING and machine.tp * machine.pp > 1:
        raise InputError(
            f"engine: {engine} is accounted for on one device, not on {machine.tp * machine.pp} that share a model; "
            "leave the engine out, or plan with one",
            key="engine",
        )
    budget = EngineBudget(
        cache=machine.cache,
        device=machine.memory,
        taken=0 if machine.cache is not None else max(_taken(fit, stage, engine) for stage in fit.deployment.stages),
    )
    chosen = dict(settings or {})
    said = _said(settings)
    for key, option, ranks in zip(_SHARING.get(engine, ()), ("tp", "pp"), (machine.tp, machine.pp), strict=False):
        if said.get(key, str(ranks)) != str(ranks):
            raise InputError(
                f"settings: {key}={said[key]}, but {option} is {ranks} in this plan; give `{option}` alone",
                key="settings",
            )
        if ranks > 1:
            chosen.setdefault(key, ranks)
    account = engine_account(
        plan.spec, plan.format, engine=engine, budget=budget, context=fit.demand.context, settings=chosen
    )
    weights = max(stage.weights for stage in fit.deployment.stages)
    if machine.memory is not None and weights + account.allocated_bytes > machine.memory:
        raise DoesNotFit(
            f"{engine}: its settings ask for {format_size(account.allocated_bytes)} of cache beside "
            f"{format_size(weights)} of weights; {format_size(machine.memory)} is all that a device has"
        )
    return replace(account, notes=(*_storage_notes(plan, engine, said), *account.notes))


def _said(settings: Mapping[str, Any] | None) -> dict[str, str]:
    """Settings as texts, by the names that accounts know them by."""
    return {key.removeprefix("--").replace("-", "_"): str(value) for key, value in (settings or {}).items()}


def _storage_notes(plan: Plan, engine: str, said: Mapping[str, str]) -> tuple[str, ...]:
    """That an engine was told to store keys and values otherwise than the plan does."""
    told = {key: said[key] for key in _STORAGE[engine] if said.get(key, "auto") != "auto"}
    if "kv_cache_dtype" in told:
        told.pop("dtype", None)
    if {_WORDS.get(value, value) for value in told.values()} <= {plan.format.key, plan.format.value}:
        fmt = plan.format
        if fmt.uniform and not fmt.rotates and not fmt.plain.tail and fmt.state is None:
            return ()
        return (f"{engine} stores all layers as {fmt.key}/{fmt.value}; what is said outside its account is in {fmt}",)
    words = " and ".join(f"{key}={value}" for key, value in told.items())
    return (
        f"{engine} stores keys and values by {words}; what is said of them outside its account is in {plan.format}",
    )


def _taken(fit: Fit, stage: Stage, engine: str) -> int:
    """What a device of a stage holds before an engine cuts its cache."""
    counted = (cost for cost in fit.deployment.costs(stage) if cost.what not in _SET_ASIDE.get(engine, ()))
    return stage.weights + sum(cost.size for cost in counted)


def _kvist(plan: Plan, fit: Fit, settings: Mapping[str, Any] | None) -> EngineAccount:
    """kvist's own, which runs on one device."""
    machine, capacity = fit.deployment.machine, fit.capacity
    if settings:
        raise InputError(
            f"engine: kvist has no setting {next(iter(settings))!r}; its options are kvist's own", key="engine"
        )
    if machine.devices > 1:
        raise InputError(f"engine: kvist runs on one device, not on {machine.devices}", key="engine")
    if capacity is None:
        raise InputError(f"engine: {plan.spec.name} remembers nothing that a cache could hold", key="engine")
    growing = next((index for index, group in enumerate(capacity.groups) if group.keeps_all), 0)
    cache = capacity.cache_bytes
    return EngineAccount(
        name="kvist",
        num_blocks=capacity.layout.total_blocks(growing),
        cache_tokens=capacity.cache_tokens,
        max_concurrency=capacity.cache_tokens / capacity.context,
        cache_bytes=cache,
        allocated_bytes=capacity.layout.total_bytes,
        sequence_bytes=capacity.sequence_allocated,
        groups=tuple(
            EngineGroup(
                name=group.name,
                layers=len(group.layers),
                block_bytes=group.block_bytes,
                blocks_per_slab=per,
                block_tokens=group.block_tokens,
                sequence_blocks=blocks,
            )
            for group, per, blocks in zip(
                capacity.groups, capacity.layout.blocks_per_slab, capacity.sequence_blocks, strict=True
            )
        ),
        command="kvist serve {model}",
        flags=(
            *("--memory", str(cache), "--block", str(fit.cutting.block_tokens)),
            *options_of(plan.format),
            *("--max-context", str(capacity.context)),
        ),
        details={"slab_bytes": capacity.layout.slab_bytes, "num_slabs": capacity.layout.num_slabs},
    )
