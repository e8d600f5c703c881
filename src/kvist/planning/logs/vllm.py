"""vLLM's start-up log held against its account, and the effects that explain where they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.planning.engines.account import EngineBudget
from kvist.planning.engines.settings import read_settings
from kvist.planning.engines.vllm import VllmPool, pool_of
from kvist.planning.engines.vllm_settings import SETTINGS
from kvist.planning.logs.figures import (
    GIB,
    LogCheck,
    Rounded,
    other_model,
)
from kvist.planning.logs.vllm_log import READY, WORDS, VllmLog
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Latent, State
from kvist.spec.model import ModelSpec
from kvist.units import parse_size, parse_tokens

__all__ = ["READY", "WORDS", "VllmLog", "hold"]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The figures of a plan: those that the log has where rounding allows it, else those of the printed memory."""

    pool: VllmPool
    memory: Rounded | None
    agrees: bool
    difference: int
    planned: Mapping[str, Any]


def hold(log: VllmLog, spec: ModelSpec, given: Mapping[str, Any]) -> LogCheck:
    """Hold a log against the account of vLLM.

    Args:
        log: with a figure.
        spec: the model that was started.
        given: settings that the log does not say, or says wrongly.

    Raises:
        BadFile: the log does not say how much memory its figures are for.
        InputError: a setting is wrong.
        UnsupportedModel: the account does not cover the model.
    """
    settings = {**log.settings, **read_settings("vllm", SETTINGS, given)}
    if log.length is not None:
        settings["max_model_len"] = log.length
    held = _held(log, spec, settings)
    return LogCheck(
        engine="vllm",
        found=_found(log, settings, held.memory),
        planned=held.planned,
        agrees=held.agrees,
        difference_bytes=held.difference,
        explained_by=()
        if held.agrees
        else (*_explained(log, spec, settings, held), *other_model(log.model, spec.name)),
    )


def _found(log: VllmLog, settings: Mapping[str, Any], memory: Rounded | None) -> dict[str, Any]:
    every = {
        "version": log.version,
        "model": log.model,
        "cache_tokens": min(log.tokens, default=None),
        "max_concurrency": None if log.concurrency is None else float(log.concurrency),
        "num_blocks": log.blocks,
        "needed_bytes": None if log.needed is None else Rounded.of(log.needed, GIB).value,
        "longest_sequence": log.estimate,
        "block_tokens": log.aligned,
        "cache_bytes": None if memory is None else memory.value,
    }
    return {key: value for key, value in every.items() if value is not None} | {"settings": dict(settings)}


def _memory(log: VllmLog, settings: Mapping[str, Any]) -> Rounded | None:
    """Bytes of the cache on the rank with the least; None where the log does not say."""
    if (size := settings.get("kv_cache_memory_bytes")) is not None:
        return Rounded.exactly(parse_size(str(size), key="kv_cache_memory_bytes"))
    if log.memory:
        return Rounded.of(min(log.memory, key=float), GIB)
    return None


def _held(log: VllmLog, spec: ModelSpec, settings: Mapping[str, Any]) -> _Held:
    memory = _memory(log, settings)
    if memory is None and log.available is None and "num_gpu_blocks_override" not in settings:
        raise BadFile(
            "log: vLLM's figures are there, but not the memory they are for; add --set kv_cache_memory_bytes=SIZE",
            key="log",
        )
    budget = EngineBudget(cache=0 if memory is None else memory.value)
    length = parse_tokens(settings.get("max_model_len") or spec.max_context, key="max_model_len")
    pool = pool_of(spec, CacheFormat(), budget=budget, context=length, settings=settings)
    if memory is None and log.available is not None:
        # What is available is without the null block.
        left = Rounded.of(log.available, GIB)
        memory = Rounded(value=left.value + pool.block_bytes, low=left.low, high=left.high + pool.block_bytes)
    return _held_refusal(log, pool, memory) if log.needed is not None else _held_pool(log, pool, memory)


def _held_refusal(log: VllmLog, pool: VllmPool, memory: Rounded | None) -> _Held:
    length = pool.settings.max_model_len
    needed = pool.needed_bytes(length)
    said = Rounded.of(log.needed or "0", GIB)
    planned: dict[str, Any] = {"needed_bytes": needed, "block_tokens": pool.block_tokens}
    difference = said.difference(needed)
    agrees = difference == 0
    if memory is not None and log.estimate is not None:
        shortest, longest = (replace(pool, budget=size).longest(length) for size in (memory.low, memory.high))
        planned["longest_sequence"] = min(max(log.estimate, shortest), longest)
        agrees = agrees and shortest <= log.estimate <= longest
    return _Held(pool=pool, memory=memory, agrees=agrees, difference=difference, planned=planned)


def _held_pool(log: VllmLog, pool: VllmPool, memory: Rounded | None) -> _Held:
    """The number of blocks, among those that the printed memory allows, that makes what the log says."""
    pools = [replace(pool, num_blocks=count) for count in _counts(log, pool, memory)]
    made = next((one for one in pools if _says(log, one)), None)
    shown = made or pools[0]
    difference = 0
    if made is None:
        per_block = _figure(log, shown) / max(shown.num_blocks, 1)
        difference = round((_said(log) - _figure(log, shown)) / max(per_block, 1)) * pool.block_bytes
    return _Held(
        pool=shown,
        memory=memory,
        agrees=made is not None,
        difference=difference,
        planned={
            "cache_tokens": shown.cache_tokens,
            "cache_tokens_before_0_21": shown.cache_tokens_before,
            "max_concurrency": shown.max_concurrency,
            "num_blocks": shown.num_blocks,
            "block_bytes": shown.block_bytes,
            "block_tokens": shown.block_tokens,
            "cache_bytes": shown.num_blocks * shown.block_bytes,
        },
    )


def _counts(log: VllmLog, pool: VllmPool, memory: Rounded | None) -> Iterator[int]:
    if memory is None or pool.settings.num_gpu_blocks_override is not None:
        yield pool.num_blocks
        return
    least, most, middle = (size // pool.block_bytes for size in (memory.low, memory.high, memory.value))
    if log.blocks is not None:
        yield min(max(log.blocks, least), most)
        return
    # From the middle outwards, so that the likeliest is taken where several say the same.
    yield middle
    for step in range(1, most - least + 1):
        yield from (count for count in (middle - step, middle + step) if least <= count <= most)


def _says(log: VllmLog, pool: VllmPool) -> bool:
    """Whether a pool prints what the log has: of two lines the size may have either meaning, of one the present."""
    if log.blocks is not None and log.blocks != pool.num_blocks:
        return False
    before = pool.cache_tokens_before
    present = {f"{pool.max_concurrency:.2f}"}
    # Until 0.8 the concurrency was the size over the length.
    either = present if log.in_one_line else present | {f"{before / pool.settings.max_model_len:.2f}"}
    if log.concurrency is not None and log.concurrency not in either:
        return False
    sizes = {pool.cache_tokens} if log.in_one_line else {pool.cache_tokens, before}
    return not log.tokens or min(log.tokens) in sizes


def _said(log: VllmLog) -> int:
    return min(log.tokens) if log.tokens else log.blocks or 0


def _figure(log: VllmLog, pool: VllmPool) -> int:
    """What a pool would print in the place of :func:`_said`."""
    if not log.tokens:
        return pool.num_blocks
    return pool.cache_tokens if log.in_one_line else pool.cache_tokens_before


def _explained(log: VllmLog, spec: ModelSpec, settings: Mapping[str, Any], held: _Held) -> Iterator[str]:
    """The known effects that make the plan say what the log says, else those at which the log hints."""
    found = [what for what, changed in _effects(spec, held.pool) if _agrees(log, spec, settings, changed)]
    if held.pool.num_blocks and log.needed is None:
        for what, more in (("null block: one block fewer is lent", -1), ("null block: one block more is counted", 1)):
            if _says(log, replace(held.pool, num_blocks=held.pool.num_blocks + more)):
                found.append(what)
    if found:
        yield from found
        return
    ranks = held.pool.settings.tensor_parallel_size * held.pool.settings.pipeline_parallel_size
    if ranks > 1 and held.difference < 0:
        yield f"another rank: the one of {ranks} with the least memory decides, and it may not be in the log"
    if log.drafts:
        yield "draft model: its layers take part of the cache, which may be the difference"
    if len(held.pool.groups) > 1 and not log.in_one_line:
        yield "grouping: versions before 0.21 may have gathered these layers otherwise"


def _agrees(log: VllmLog, spec: ModelSpec, settings: Mapping[str, Any], changed: Mapping[str, Any]) -> bool:
    try:
        return _held(log, spec, {**settings, **changed}).agrees
    except (InputError, UnsupportedModel):
        return False


def _effects(spec: ModelSpec, pool: VllmPool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a log may not say, or a reader may have got wrong, as settings that would make it so."""
    now = pool.settings
    pieces = [piece for layer in spec.layers for piece in layer.stored]
    for dtype in ("bfloat16", "fp8", "float32", "fp8_ds_mla"):
        if dtype != (now.dtype if now.kv_cache_dtype == "auto" else now.kv_cache_dtype):
            yield f"other dtype: keys and values as {dtype}", {"kv_cache_dtype": dtype}
    for tokens in (16, 32, 64, 128, 256):
        if tokens != now.block_size:
            why = "block size: 128 is the default on a CPU" if 128 in (tokens, now.block_size) else "block size"
            yield f"{why}; blocks of {tokens} tokens, not {now.block_size}", {"block_size": tokens}
    if len(pool.groups) > 1:
        yield (
            "grouping waste: windows are kept as if they saw everything (--disable-hybrid-kv-cache-manager)",
            {"disable_hybrid_kv_cache_manager": True},
        )
    heads = {piece.kv_heads for piece in pieces if hasattr(piece, "kv_heads")}
    for ranks in (1, 2, 4, 8, 16, 32):
        if ranks != now.tensor_parallel_size:
            copied = bool(heads) and ranks > min(heads)
            yield (
                f"tensor_parallel_size={ranks}" + (": KV heads are replicated on its ranks" if copied else ""),
                {"tensor_parallel_size": ranks},
            )
    if any(isinstance(piece, State) for piece in pieces):
        caching = not now.enable_prefix_caching
        yield (
            f"prefix caching {'on' if caching else 'off'}: other states for each sequence",
            {"enable_prefix_caching": caching},
        )
        for dtype in ("float32", "bfloat16"):
            yield f"other dtype: recurrent states as {dtype}", {"mamba_ssm_cache_dtype": dtype}
    if any(isinstance(piece, Latent) for piece in pieces):
        for backend in ("FLASHMLA", "CUTLASS_MLA", "FLASHINFER_MLA", "CPU_MLA", "AMX_MLA"):
            if backend != now.attention_backend:
                yield f"attention_backend={backend}: blocks of its own", {"attention_backend": backend}
    if any(group.page.limit for group in pool.groups):
        for batch in (2048, 4096, 8192, 16384):
            if batch != now.max_num_batched_tokens:
                yield f"max_num_batched_tokens={batch}, held beside windows", {"max_num_batched_tokens": batch}
        yield "async scheduling: one step in flight, not two", {"async_scheduling": not now.async_scheduling}
