"""vLLM's start-up log: old and new wording, CPU and GPU, and the refusal to start.

The wording is that of 0.6 (``# GPU blocks``) to 0.32 (size and concurrency in one line).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.planning.engines.account import EngineBudget
from kvist.planning.engines.settings import read_settings
from kvist.planning.engines.vllm import VllmPool, pool_of
from kvist.planning.engines.vllm_settings import SETTINGS
from kvist.planning.logs.figures import (
    COUNT,
    GIB,
    NUMBER,
    WHOLE,
    LogCheck,
    Rounded,
    count_of,
    named_model,
    other_model,
    value_of,
)
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Latent, State
from kvist.spec.model import ModelSpec
from kvist.units import parse_size, parse_tokens

WORDS = (
    b" KV cache size: ", b"KV cache memory", b"Maximum concurrency for ", b"KV cache on node", b"KV cache is needed",
    b"for KV Cache", b"kv_cache_size=", b"non-default args", b"LLM engine (v", b"API server version", b" blocks: ",
    b"max_num_batched_tokens=", b"attention block size to", b"MLA", b"in KV cache (",
)  # fmt: skip
READY = b"Application startup complete"

_START = re.compile(r"API server version ([0-9][0-9.]{0,20})|LLM engine \(v([0-9][0-9.]{0,20})")
_SIZE = re.compile(rf"([A-Z]{{3,5}})(?: \+ host)? KV cache size: {COUNT} tokens")
_CONCURRENCY = re.compile(rf"Maximum concurrency for {COUNT} tokens per request: {NUMBER}x")
_BLOCKS = re.compile(rf"# [A-Za-z]{{1,9}} blocks: {WHOLE}, # CPU blocks")
_MEMORY = (
    re.compile(rf"Available KV cache memory: {NUMBER} GiB"),
    re.compile(rf"set \({NUMBER}/[0-9.]{{1,20}}\) GiB for KV cache on node"),
    re.compile(rf"Reserved {NUMBER} GiB memory for KV Cache"),
    re.compile(rf"reserved for KV Cache is {NUMBER}GiB"),
    re.compile(rf"kv_cache_size={NUMBER}GiB"),
)
_NEEDED = re.compile(rf"max seq len \({WHOLE}\), \(?{NUMBER} GiB KV cache is needed")
_AVAILABLE = re.compile(rf"available KV cache memory \({NUMBER} GiB\)")
_ESTIMATE = re.compile(rf"estimated maximum model length is {WHOLE}")
_STORED = re.compile(rf"max seq len \({WHOLE}\) is larger than .{{0,80}}stored in KV cache \({WHOLE}\)")
_ALIGNED = re.compile(rf"Setting attention block size to {WHOLE} tokens")
_MODEL = re.compile(r"(?<![A-Za-z_])model(?:_tag)?['\"]?[=:] ?['\"]([^'\"]{1,300})['\"]")
_BACKEND = re.compile(r"Using ([A-Za-z_]{0,40}[ _]?MLA[A-Z_]{0,40})(?: attention)? backend")
# Settings by the names under which the log has them.
_KEYS = {
    "max_seq_len": "max_model_len",
    **{
        key: key
        for key in (
            "block_size", "max_model_len", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size",
            "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "mamba_cache_dtype",
            "mamba_ssm_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "attention_backend",
            "disable_hybrid_kv_cache_manager", "async_scheduling",
        )
    },
}  # fmt: skip
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


@dataclass
class VllmLog:
    """What lines of one start say.

    Attributes:
        version: as printed.
        model: its name.
        settings: of :data:`kvist.planning.engines.vllm.SETTINGS`.
        memory: for the cache, of each rank that says so.
        blocks: of the pool, where old versions print them.
        tokens: ``KV cache size``, of each rank that prints it.
        length: of the sequences that ``concurrency`` counts.
        concurrency: as printed.
        in_one_line: size and concurrency stand together, as in new versions.
        needed: memory that a refused start would have needed.
        available: what it had, as the refusal says.
        estimate: the longest sequence, as the refusal says.
        aligned: tokens of a block after alignment with states.
        drafts: there is a draft model.
        engine_seen: the engine of this start has said its configuration.
    """

    version: str | None = None
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    memory: list[str] = field(default_factory=list)
    blocks: int | None = None
    tokens: list[int] = field(default_factory=list)
    length: int | None = None
    concurrency: str | None = None
    in_one_line: bool = False
    needed: str | None = None
    available: str | None = None
    estimate: int | None = None
    aligned: int | None = None
    drafts: bool = False
    engine_seen: bool = False

    engine = "vllm"

    @property
    def has_figure(self) -> bool:
        """Whether there is something to hold against the plan."""
        return bool(self.tokens) or self.blocks is not None or self.needed is not None

    def see(self, line: str) -> bool:
        """Take what a line says; False where another start begins, which is not read."""
        if found := _START.search(line):
            if self.has_figure:
                return False
            if found[1] and self.engine_seen:
                # An earlier start that did not come to its cache says nothing of this one.
                self.settings.clear()
                self.memory.clear()
                self.aligned, self.drafts, self.engine_seen = None, False, False
            self.engine_seen |= found[2] is not None
            self.version = found[1] or found[2]
            # Its command line comes next, or the class has none.
            self.settings.setdefault("usage", "server" if found[1] else "offline")
        if "non-default args" in line or "LLM engine (v" in line or "max_num_batched_tokens=" in line:
            self._settings(line)
        for pattern in _MEMORY:
            if found := pattern.search(line):
                self.memory.append(found[1])
                if "on node" in line:
                    self.settings["device"] = "cpu"
        self._figures(line)
        return True

    def _settings(self, line: str) -> None:
        for key, setting in _KEYS.items():
            if (value := value_of(line, key)) is not None:
                # An enumeration is printed with its name.
                self.settings[setting] = value.removeprefix("AttentionBackendEnum.")
        if (dtype := (value_of(line, "dtype") or "").removeprefix("torch.")) in _DTYPES:
            self.settings["dtype"] = _DTYPES[dtype]
        if found := _MODEL.search(line):
            self.model = named_model(found[1])
        self.drafts |= value_of(line, "speculative_config") is not None or "'speculative_config': {" in line

    def _figures(self, line: str) -> None:
        if found := _SIZE.search(line):
            self.tokens.append(count_of(found[2]))
            if found[1].endswith("CPU"):
                self.settings["device"] = "cpu"
        if match := _CONCURRENCY.search(line):
            self.length, self.concurrency = count_of(match[1]), match[2]
            self.in_one_line |= found is not None
        if found := _BLOCKS.search(line):
            self.blocks = int(found[1])
        if found := _NEEDED.search(line):
            self.length, self.needed = int(found[1]), found[2]
            self.available = match[1] if (match := _AVAILABLE.search(line)) else self.available
            self.estimate = int(match[1]) if (match := _ESTIMATE.search(line)) else self.estimate
        if found := _STORED.search(line):
            self.length = int(found[1])
            self.tokens.append(int(found[2]))
        if found := _ALIGNED.search(line):
            self.aligned = int(found[1])
        if found := _BACKEND.search(line):
            self.settings.setdefault("attention_backend", found[1].upper().replace(" ", "_"))


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
