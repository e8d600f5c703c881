"""SGLang's account: the tokens of its pools, and the command that starts it so.

Read from the sources of 0.5.23, which has no build for CPUs to ask: ``model_executor/pool_configurator.py`` (pools),
``mem_cache/kv_cache_configurator.py`` (budget, states), ``arg_groups/memory_hook.py`` (the static fraction) and
``configs/model_config.py`` (whose windows have a pool of their own).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvist.errors import DoesNotFit, InputError
from kvist.planning.engines.account import EngineAccount, EngineBudget, EngineFigure, EngineGroup
from kvist.planning.engines.settings import Setting, fraction, one_of, read_settings, switch, whole
from kvist.planning.engines.sglang_cells import Cells, cells_of, stages
from kvist.planning.engines.sglang_memory import static_fraction
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size

VERSION = "0.5.23"

SETTINGS = {
    "mem_fraction_static": Setting(read=fraction(0, 1), help="share for weights and cache; by default what is left"),
    "page_size": Setting(read=whole(1, 2**20), help="tokens of a page (1)"),
    "tp_size": Setting(read=whole(1, 2**16), help="ranks that share each layer's heads"),
    "pp_size": Setting(read=whole(1, 2**16), help="ranks that share the layers"),
    "kv_cache_dtype": Setting(
        read=one_of("auto", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "mxfp8"),
        help="how keys and values are stored",
    ),
    "max_total_tokens": Setting(read=whole(1), help="most tokens, whatever the memory"),
    "max_running_requests": Setting(read=whole(1, 2**30), help="most sequences at once"),
    "chunked_prefill_size": Setting(read=whole(1, 2**30), help="most prompt tokens of a step"),
    "swa_full_tokens_ratio": Setting(
        read=fraction(0, 1), help="tokens of the windows' pool for one of the other (0.8)"
    ),
    "mamba_full_memory_ratio": Setting(
        read=fraction(0, 2**20), help="bytes of states for one of keys and values (0.9)"
    ),
    "max_mamba_cache_size": Setting(read=whole(1, 2**30), help="states, whatever the memory"),
    "mamba_ssm_dtype": Setting(read=one_of("float32", "bfloat16", "float16"), help="of recurrent states (f32)"),
    "disable_radix_cache": Setting(read=switch, help="no prefix cache: one state a sequence, not three"),
}


@dataclass(frozen=True, kw_only=True)
class SglangSettings:
    """Every setting that decides, with a value; names as in :data:`SETTINGS`. None: the memory decides."""

    mem_fraction_static: float | None
    page_size: int
    tp_size: int
    pp_size: int
    kv_cache_dtype: str
    max_total_tokens: int | None
    max_running_requests: int | None
    chunked_prefill_size: int | None
    swa_full_tokens_ratio: float
    mamba_full_memory_ratio: float
    max_mamba_cache_size: int | None
    mamba_ssm_dtype: str | None
    disable_radix_cache: bool

    @property
    def slots_per_request(self) -> int:
        """States that a request may hold: three with the prefix cache (``_calculate_mamba_ratio``)."""
        return 1 if self.disable_radix_cache else 3


@dataclass(frozen=True, kw_only=True)
class SglangPools:
    """The pools of one rank.

    Attributes:
        settings: all that decide.
        cells: what one token takes of each.
        budget: bytes for all of them.
        tokens: of the pool of full attention, ``max_total_num_tokens``.
        window_tokens: of the windows' pool; 0 where there is none.
        states: slots for recurrent states, without the padding slot.
    """

    settings: SglangSettings
    cells: Cells
    budget: int
    tokens: int
    window_tokens: int
    states: int

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of both pools, each with one page more than its tokens."""
        return self._bytes(self.cells.full_key, self.cells.window_key)

    @property
    def value_bytes(self) -> int:
        """Bytes of the values, likewise; of latents none."""
        return self._bytes(self.cells.full_value, self.cells.window_value)

    def _bytes(self, full: int, window: int) -> int:
        page = self.settings.page_size
        return full * (self.tokens + page) + (window * (self.window_tokens + page) if self.window_tokens else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of all state slots and the padding slot."""
        return self.cells.state * (self.states + 1) if self.cells.state else 0

    @property
    def bytes(self) -> int:
        """Bytes of everything."""
        return self.key_bytes + self.value_bytes + self.state_bytes

    def sequences(self, context: int) -> int:
        """Sequences of ``context`` tokens at once: by tokens, by what windows hold while they decode, and by states."""
        page = self.settings.page_size
        most = self.tokens // (-(-context // page) * page)
        if self.window_tokens:
            held = min(context, (self.cells.window or context) + page)
            most = min(most, self.window_tokens // held)
        if self.cells.state:
            most = min(most, self.states // self.settings.slots_per_request)
        return most if self.settings.max_running_requests is None else min(most, self.settings.max_running_requests)


def pools_of(spec: ModelSpec, fmt: CacheFormat, *, budget: EngineBudget, settings: Mapping[str, Any]) -> SglangPools:
    """Size the pools.

    Raises:
        InputError: a setting is wrong, or no memory is given.
        UnsupportedModel: a layer is not accounted for.
    """
    resolved = _resolve(fmt, settings)
    on_ranks = [
        cells_of(
            spec,
            layers=layers,
            dtype=_dtype(fmt, resolved),
            ranks=resolved.tp_size,
            ssm_dtype=resolved.mamba_ssm_dtype,
            ratio=resolved.swa_full_tokens_ratio,
        )
        for layers in stages(len(spec.layers), resolved.pp_size)
    ]
    # The rank with the largest cells holds the fewest tokens, and all take that number.
    cells = replace(max(on_ranks, key=lambda one: one.total), state=max(one.state for one in on_ranks))
    given = _budget(resolved, budget, latent=cells.latent)
    rest, states = given, 0
    if cells.state:
        states = resolved.max_mamba_cache_size or _states(resolved, cells, given)
        rest = given - cells.state * (states + 1)
    # Without attention tokens cost nothing, and their number is the longest sequence.
    tokens = max(0, int(rest // cells.total)) if cells.total else spec.max_context
    if resolved.max_total_tokens is not None:
        tokens = min(tokens, resolved.max_total_tokens)
    page = resolved.page_size
    tokens = tokens // page * page
    # The windows' pool follows from the tokens of the other; all windows alone have the tokens themselves.
    window = int(tokens * resolved.swa_full_tokens_ratio) // page * page if cells.full else tokens
    return SglangPools(
        settings=resolved,
        cells=cells,
        budget=given,
        tokens=tokens,
        window_tokens=window if cells.window_bytes else 0,
        states=max(0, states),
    )


def _states(settings: SglangSettings, cells: Cells, budget: int) -> int:
    """Slots that the share of the states pays for, the padding slot set aside (``_handle_max_mamba_cache``)."""
    if settings.disable_radix_cache and settings.max_running_requests is not None:
        return settings.max_running_requests
    share = budget * settings.mamba_full_memory_ratio / (1 + settings.mamba_full_memory_ratio)
    return int((share - cells.state) // cells.state)


def _budget(settings: SglangSettings, budget: EngineBudget, *, latent: bool) -> int:
    """``_profile_available_bytes``: what is free beside the weights, less the share that is not static."""
    if budget.cache is not None:
        return budget.cache
    if budget.device is None:
        raise InputError("engine: sglang needs a memory to cut; add `memory` or `cache_memory`", key="engine")
    share = settings.mem_fraction_static or static_fraction(
        budget.device,
        tp_size=settings.tp_size,
        pp_size=settings.pp_size,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_running_requests=settings.max_running_requests,
        latent=latent,
    )
    return int(budget.device - budget.taken - budget.device * (1 - share))


def _resolve(fmt: CacheFormat, given: Mapping[str, Any]) -> SglangSettings:
    said = read_settings("sglang", SETTINGS, given)
    return SglangSettings(
        mem_fraction_static=said.get("mem_fraction_static"),
        page_size=said.get("page_size", 1),
        tp_size=said.get("tp_size", 1),
        pp_size=said.get("pp_size", 1),
        kv_cache_dtype=said.get("kv_cache_dtype") or _cache_dtype(fmt),
        max_total_tokens=said.get("max_total_tokens"),
        max_running_requests=said.get("max_running_requests"),
        chunked_prefill_size=said.get("chunked_prefill_size"),
        swa_full_tokens_ratio=said.get("swa_full_tokens_ratio", 0.8),
        mamba_full_memory_ratio=said.get("mamba_full_memory_ratio", 0.9),
        max_mamba_cache_size=said.get("max_mamba_cache_size"),
        mamba_ssm_dtype=said.get("mamba_ssm_dtype"),
        disable_radix_cache=said.get("disable_radix_cache", False),
    )


def _cache_dtype(fmt: CacheFormat) -> str:
    known = {"bf16": "auto", "f16": "auto", "fp8": "fp8_e4m3"}
    if fmt.key != fmt.value or fmt.key not in known:
        raise InputError(
            f"format: SGLang stores keys and values alike, and not as {fmt}; plan with bf16, f16 or fp8 for both",
            key="format",
        )
    return known[fmt.key]


def _dtype(fmt: CacheFormat, settings: SglangSettings) -> str:
    if settings.kv_cache_dtype != "auto":
        return settings.kv_cache_dtype
    return "float16" if fmt.key == "f16" else "bfloat16"


def account(
    spec: ModelSpec, fmt: CacheFormat, *, budget: EngineBudget, context: int, settings: Mapping[str, Any]
) -> EngineAccount:
    """What SGLang makes of a memory.

    Args:
        spec: the model.
        fmt: how keys and values are stored, unless ``kv_cache_dtype`` says otherwise.
        budget: of one rank.
        context: tokens of each sequence.
        settings: SGLang's own, by name (:data:`SETTINGS`).

    Raises:
        DoesNotFit: no token or no state fits.
        InputError: a setting is wrong, or no memory is given.
        UnsupportedModel: a layer is not accounted for.
    """
    pools = pools_of(spec, fmt, budget=budget, settings=settings)
    cells = pools.cells
    if pools.tokens <= 0 or (cells.state and pools.states < pools.settings.slots_per_request):
        raise DoesNotFit(
            f"sglang: {format_size(max(0, pools.budget))} hold {pools.tokens:,} tokens of {cells.total:,.0f} B"
            + (f" beside {pools.states:,} states of {format_size(cells.state)}" if cells.state else "")
        )
    return EngineAccount(
        name="sglang",
        version=VERSION,
        num_blocks=pools.tokens // pools.settings.page_size,
        cache_tokens=pools.tokens,
        max_concurrency=float(pools.sequences(context))
        if cells.window_bytes or cells.state
        else pools.tokens / context,
        cache_bytes=pools.budget,
        allocated_bytes=pools.bytes,
        sequence_bytes=int(cells.full * context + cells.window_bytes * min(context, cells.window or 0) + cells.state),
        groups=tuple(_groups(pools)),
        settings={key: value for key, value in asdict(pools.settings).items() if value is not None},
        figures=tuple(_figures(pools)),
        command="python -m sglang.launch_server --model-path {model}",
        flags=tuple(_flags(pools, context, settings)),
        details={
            "cell_bytes": cells.full,
            "window_cell_bytes": cells.window_bytes,
            "window_tokens": pools.window_tokens,
            "max_mamba_cache_size": pools.states,
            "key_bytes": pools.key_bytes,
            "value_bytes": pools.value_bytes,
            "state_bytes": pools.state_bytes,
        },
    )


def _groups(pools: SglangPools) -> Iterator[EngineGroup]:
    cells, page = pools.cells, pools.settings.page_size
    if cells.full:
        yield EngineGroup(name="full", layers=cells.full_layers, block_bytes=cells.full * page, block_tokens=page)
    if cells.window_bytes:
        yield EngineGroup(
            name="window", layers=cells.window_layers, block_bytes=cells.window_bytes * page, block_tokens=page
        )
    if cells.state:
        yield EngineGroup(name="state", layers=cells.state_layers, block_bytes=cells.state)


def _figures(pools: SglangPools) -> Iterator[EngineFigure]:
    cells, settings = pools.cells, pools.settings
    configurator = "sglang/srt/model_executor/pool_configurator.py"
    if cells.state:
        yield EngineFigure(
            what="max_mamba_cache_size",
            value=pools.states,
            formula=f"share of {settings.mamba_full_memory_ratio:g} to 1 in states of {cells.state:,} B, one padding",
            source="sglang/srt/mem_cache/kv_cache_configurator.py",
        )
    yield EngineFigure(
        what="cell, bytes a token",
        value=cells.total,
        formula=f"{cells.full:,} + {settings.swa_full_tokens_ratio:g} x {cells.window_bytes:,}"
        if cells.window_bytes
        else "all layers",
        source=configurator,
    )
    yield EngineFigure(
        what="max_total_num_tokens",
        value=pools.tokens,
        formula=f"{pools.budget - pools.state_bytes:,} // cell, in whole pages of {settings.page_size}",
        source=configurator,
    )


def _flags(pools: SglangPools, context: int, given: Mapping[str, Any]) -> Iterator[str]:
    said = {key.replace("-", "_") for key in given}
    settings = pools.settings
    yield from ("--context-length", str(context))
    if settings.kv_cache_dtype != "auto":
        yield from ("--kv-cache-dtype", settings.kv_cache_dtype)
    for key, value in asdict(settings).items():
        if key not in said or value is None or key == "kv_cache_dtype":
            continue
        if value is True:
            yield f"--{key.replace('_', '-')}"
        elif value is not False:
            yield from (f"--{key.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value))


__all__ = ["SETTINGS", "SglangPools", "account", "pools_of"]
