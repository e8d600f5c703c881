"""SGLang's start-up log: the pools' tokens and sizes, which must be what the model's cells make of each other.

SGLang does not print the budget that it cuts, so the number of tokens is taken from the log, and its bytes are held.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.planning.engines.account import EngineBudget
from kvist.planning.engines.settings import read_settings
from kvist.planning.engines.sglang import SETTINGS, SglangPools, pools_of
from kvist.planning.logs.figures import GIB, NUMBER, WHOLE, LogCheck, Rounded, named_model, other_model, value_of
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec

WORDS = (
    b"Cache is allocated.", b"max_total_num_tokens=", b"server_args", b"sliding window memory pool",
    b"Using KV cache dtype", b"Load weight end",
)  # fmt: skip
READY = b"The server is fired up"

_RANK = re.compile(r"\[[^\]]{0,60}TP([0-9]{1,4})\b")
_POOL = re.compile(
    r"(?:(Full|SWA) )?KV Cache is allocated\.(?: dtype: ([a-z0-9_.]{1,40}),)? "
    rf"#tokens: {WHOLE}, (?:K size: {NUMBER} ?GB, V size: {NUMBER} ?GB|KV size: {NUMBER} ?GB)"
)
_STATES = re.compile(
    rf"Mamba Cache is allocated\. max_mamba_cache_size: {WHOLE}, conv_state size: {NUMBER} ?GB, "
    rf"ssm_state size: {NUMBER} ?GB"
)
_WINDOWS = re.compile(rf"full_layer_tokens={WHOLE}, swa_layer_tokens={WHOLE}")
_TOTAL = re.compile(rf"\bmax_total_num_tokens={WHOLE}")
_DTYPE = re.compile(r"Using KV cache dtype: ([a-z0-9_.]{1,40})")
_MODEL = re.compile(r"model_path=['\"]([^'\"]{1,300})['\"]")
_DTYPES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "fp8": "fp8_e4m3",
}
# What the log gives as a result, not as a setting.
_RESULTS = ("max_total_tokens", "max_mamba_cache_size", "mem_fraction_static")
_PLENTY = EngineBudget(cache=2**62)


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """One printed pool: its tokens, and the sizes of keys and values; of latents both together."""

    label: str | None
    tokens: int
    key: Rounded
    value: Rounded | None


@dataclass
class SglangLog:
    """What lines of one start say; of several ranks the first that speaks.

    Attributes:
        settings: of :data:`kvist.planning.engines.sglang.SETTINGS`.
        pools: as printed, in order.
        states: slots, and the sizes of their convolutions and recurrent parts.
        windows: tokens of the windows' pool.
        total: ``max_total_num_tokens``.
        ranks: seen in the lines' prefixes.
        model: its name.
        loads: how often weights were loaded; the second time those of a draft model.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    pools: list[_Pool] = field(default_factory=list)
    states: tuple[int, Rounded, Rounded] | None = None
    windows: int | None = None
    total: int | None = None
    ranks: set[int] = field(default_factory=set)
    model: str | None = None
    loads: int = 0
    _rank: str | None = None

    engine = "sglang"

    @property
    def has_figure(self) -> bool:
        """Whether there is something to hold against the plan."""
        return bool(self.pools) or self.states is not None or self.total is not None

    def see(self, line: str) -> bool:
        """Take what a line says; False where another start begins, which is not read."""
        if "server_args=" in line:
            if self.has_figure:
                return False
            # An earlier start that did not come to its cache says nothing of this one.
            self.settings.clear()
            self.ranks.clear()
            self.loads = 0
            self.model = named_model(found[1]) if (found := _MODEL.search(line)) else None
        rank = found[1] if (found := _RANK.search(line)) else None
        if rank is not None:
            self.ranks.add(int(rank))
        if "server_args" in line:
            for key in SETTINGS:
                if key not in _RESULTS and (value := value_of(line, key)) is not None:
                    self.settings[key] = value
        if found := _DTYPE.search(line):
            self._dtype(found[1])
        if "Cache is allocated." in line:
            if self._rank is None:
                self._rank = rank
            if rank == self._rank:
                self._allocated(line)
        if found := _WINDOWS.search(line):
            self.windows = int(found[2])
        if found := _TOTAL.search(line):
            self.total = int(found[1])
        self.loads += "Load weight end" in line and rank in (None, "0")
        return True

    def _allocated(self, line: str) -> None:
        if found := _POOL.search(line):
            self._dtype(found[2])
            self.pools.append(
                _Pool(
                    label=found[1],
                    tokens=int(found[3]),
                    key=Rounded.of(found[4] or found[6], GIB),
                    value=Rounded.of(found[5], GIB) if found[5] else None,
                )
            )
        if (found := _STATES.search(line)) and self.states is None:
            self.states = int(found[1]), Rounded.of(found[2], GIB), Rounded.of(found[3], GIB)

    def _dtype(self, name: str | None) -> None:
        if name is not None:
            self.settings["kv_cache_dtype"] = _DTYPES.get(name, name)


@dataclass(frozen=True, kw_only=True)
class _Held:
    pools: SglangPools
    planned: Mapping[str, Any]
    difference: int

    @property
    def agrees(self) -> bool:
        return self.difference == 0


def hold(log: SglangLog, spec: ModelSpec, given: Mapping[str, Any]) -> LogCheck:
    """Hold a log against the account of SGLang.

    Raises:
        BadFile: the log has tokens but no size.
        InputError: a setting is wrong.
        UnsupportedModel: the account does not cover the model.
    """
    if not log.pools and log.states is None:
        raise BadFile(
            "log: SGLang's max_total_num_tokens is there, but no size of a pool to hold it against; keep the line "
            "'KV Cache is allocated.'",
            key="log",
        )
    settings = {**log.settings, **read_settings("sglang", SETTINGS, given)}
    if log.ranks:
        settings.setdefault("tp_size", max(log.ranks) + 1)
    held = _held(log, spec, settings)
    found: dict[str, Any] = {
        "model": log.model,
        "cache_tokens": log.pools[0].tokens if log.pools else log.total,
        "window_tokens": log.windows,
        "max_mamba_cache_size": None if log.states is None else log.states[0],
        "key_bytes": sum(pool.key.value for pool in log.pools),
        "value_bytes": sum(pool.value.value for pool in log.pools if pool.value is not None),
        "state_bytes": None if log.states is None else log.states[1].value + log.states[2].value,
    }
    return LogCheck(
        engine="sglang",
        found={key: value for key, value in found.items() if value is not None} | {"settings": settings},
        planned=held.planned,
        agrees=held.agrees,
        difference_bytes=held.difference,
        explained_by=()
        if held.agrees
        else (*_explained(log, spec, settings, held), *other_model(log.model, spec.name)),
    )


def _held(log: SglangLog, spec: ModelSpec, settings: Mapping[str, Any]) -> _Held:
    """The bytes that the printed tokens and slots take."""
    limits: dict[str, Any] = {"max_total_tokens": max((pool.tokens for pool in log.pools), default=1)}
    if log.states is not None:
        limits["max_mamba_cache_size"] = log.states[0]
    pools = pools_of(spec, CacheFormat(), budget=_PLENTY, settings={**settings, **limits})
    cells, page = pools.cells, pools.settings.page_size
    difference = keys = values = states = 0
    for windowed, pool in _by_cell(log, pools):
        key, value = (
            (cells.window_key, cells.window_value) if windowed else (cells.full_key + cells.full_more, cells.full_value)
        )
        key, value = key * (pool.tokens + page), value * (pool.tokens + page)
        if pool.value is None:
            key, value = key + value, 0
        keys, values = keys + key, values + value
        difference += pool.key.difference(key) + (0 if pool.value is None else pool.value.difference(value))
    if log.states is not None:
        states = pools.state_bytes
        difference += _sum(log.states[1], log.states[2]).difference(states)
    planned: dict[str, Any] = {"key_bytes": keys, "value_bytes": values}
    if log.states is not None:
        planned["state_bytes"] = states
    planned |= {"cell_bytes": cells.full, "window_cell_bytes": cells.window_bytes, "state_slot_bytes": cells.state}
    return _Held(pools=pools, planned=planned, difference=difference)


def _by_cell(log: SglangLog, pools: SglangPools) -> Iterator[tuple[bool, _Pool]]:
    """Printed pools with whether they are the windows'; what is printed beside these belongs to a draft model."""
    kinds = [kind for kind, size in ((False, pools.cells.full), (True, pools.cells.window_bytes)) if size]
    if len(kinds) == 1 or len(log.pools) == 1:
        yield from ((kinds[0], pool) for pool in log.pools[:1] if kinds)
        return
    for pool in log.pools[:2]:
        labelled = None if pool.label is None else pool.label == "SWA"
        yield pool.tokens == log.windows if labelled is None else labelled, pool


def _sum(one: Rounded, other: Rounded) -> Rounded:
    return Rounded(value=one.value + other.value, low=one.low + other.low, high=one.high + other.high)


def _explained(log: SglangLog, spec: ModelSpec, settings: Mapping[str, Any], held: _Held) -> Iterator[str]:
    found = [what for what, changed in _effects(spec, held.pools) if _agrees(log, spec, settings, changed)]
    yield from found
    if not found and log.loads > 1:
        yield "draft model: a second model was loaded, whose pool may be the printed one"


def _agrees(log: SglangLog, spec: ModelSpec, settings: Mapping[str, Any], changed: Mapping[str, Any]) -> bool:
    try:
        return _held(log, spec, {**settings, **changed}).agrees
    except (InputError, UnsupportedModel):
        return False


def _effects(spec: ModelSpec, pools: SglangPools) -> Iterator[tuple[str, dict[str, Any]]]:
    now = pools.settings
    for dtype in ("bfloat16", "fp8_e4m3", "mxfp8"):
        if dtype != now.kv_cache_dtype:
            yield f"other dtype: keys and values as {dtype}", {"kv_cache_dtype": dtype}
    heads = {piece.kv_heads for layer in spec.layers for piece in layer.stored if isinstance(piece, Attention)}
    for ranks in (1, 2, 4, 8, 16, 32):
        if ranks != now.tp_size:
            copied = bool(heads) and ranks > min(heads)
            yield f"tp_size={ranks}" + (": KV heads are replicated on its ranks" if copied else ""), {"tp_size": ranks}
    for page in (1, 16, 64, 128):
        if page != now.page_size:
            yield f"page_size={page}: one page more than its tokens", {"page_size": page}
    if pools.cells.state:
        for dtype in ("bfloat16", "float32"):
            yield f"other dtype: recurrent states as {dtype}", {"mamba_ssm_dtype": dtype}
