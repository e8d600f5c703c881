"""llama.cpp's start-up log: its context's settings, and the size of each cache.

The wording is that of ``llama_kv_cache_init`` (2023), ``llama_kv_cache_unified`` (2025) and ``llama_kv_cache`` (2026).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.planning.engines.llama_cells import PAD, LlamaContext, context_of
from kvist.planning.engines.llama_cpp import SETTINGS, resolve
from kvist.planning.engines.settings import read_settings
from kvist.planning.logs.figures import MIB, NUMBER, WHOLE, LogCheck, Rounded, named_model, other_model
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

WORDS = (
    b"llama_context:", b"llama_new_context_with_model:", b"llama_init_from_model:", b"llama_kv_cache",
    b"llama_memory_recurrent", b"KV self size", b"loaded meta data with",
)  # fmt: skip
READY = b"server is listening"

_SETTING = re.compile(
    r"llama_[a-z_]{1,40}: {1,20}(n_ctx|n_seq_max|n_ubatch|n_batch|kv_unified|flash_attn) {1,40}= {1,20}([a-z0-9]{1,15})"
)
_FLASH = re.compile(r"Flash Attention was auto, set to (enabled|disabled)")
_MODEL = re.compile(r"loaded meta data with .{1,80} tensors from (.{1,300}?) \(version")
_CACHE = re.compile(
    rf"size = {{0,9}}{NUMBER} MiB \( {{0,9}}{WHOLE} cells, {{0,9}}{WHOLE} layers, {{0,9}}{WHOLE}(?:/ {{0,9}}{WHOLE})? "
    rf"seqs[^)]{{0,40}}\), ([KR]) \(([a-z0-9_]{{1,9}})\): {{0,9}}{NUMBER} MiB"
    rf"(?:, ([VS]) \(([a-z0-9_]{{1,9}})\): {{0,9}}{NUMBER} MiB)?"
)
_SELF = re.compile(
    rf"KV self size {{0,9}}= {{0,9}}{NUMBER} MiB, K \(([a-z0-9_]{{1,9}})\): {{0,9}}{NUMBER} MiB, "
    rf"V \(([a-z0-9_]{{1,9}})\): {{0,9}}{NUMBER} MiB"
)
_SWITCH = {"true": True, "1": True, "enabled": True, "false": False, "0": False, "disabled": False}


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """One printed cache; of an old log all together, without cells."""

    key: Rounded
    value: Rounded
    cells: int | None
    recurrent: bool


@dataclass
class LlamaLog:
    """What lines of one context say.

    Attributes:
        settings: of :data:`kvist.planning.engines.llama_cpp.SETTINGS`.
        caches: as printed.
        model: the name of its file.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    caches: list[_Cache] = field(default_factory=list)
    model: str | None = None

    engine = "llama.cpp"

    @property
    def has_figure(self) -> bool:
        """Whether there is something to hold against the plan."""
        return bool(self.caches)

    def see(self, line: str) -> bool:
        """Take what a line says; False where another context begins, such as a draft model's, which is not read."""
        if (found := _MODEL.search(line)) and not self.caches:
            self.model = named_model(found[1])
        if found := _SETTING.search(line):
            if self.caches:
                return False
            self._setting(found[1], found[2])
        if found := _FLASH.search(line):
            self.settings["flash_attn"] = found[1] == "enabled"
        if "using full-size SWA cache" in line:
            self.settings["swa_full"] = True
        if found := _CACHE.search(line):
            self._cache(found)
        elif (found := _SELF.search(line)) and not self.caches:
            self.settings |= {"type_k": found[2], "type_v": found[4]}
            key, value = Rounded.of(found[3], MIB), Rounded.of(found[5], MIB)
            self.caches.append(_Cache(key=key, value=value, cells=None, recurrent=False))
        return True

    def _setting(self, name: str, value: str) -> None:
        if name in ("kv_unified", "flash_attn"):
            if value in _SWITCH:
                self.settings[name] = _SWITCH[value]
        elif name in SETTINGS and value.isdecimal():
            self.settings[name] = int(value)

    def _cache(self, found: re.Match[str]) -> None:
        recurrent = found[6] == "R"
        if not recurrent:
            self.settings |= {"type_k": found[7], "type_v": found[10] or found[7]}
            sequences, streams = int(found[4]), int(found[5] or 1)
            self.settings.setdefault("n_seq_max", sequences)
            self.settings.setdefault("kv_unified", streams == 1)
            self.settings.setdefault("n_ctx", int(found[2]) * streams)
        self.caches.append(
            _Cache(
                key=Rounded.of(found[8], MIB),
                value=Rounded.of(found[11] or "0", MIB),
                cells=int(found[2]),
                recurrent=recurrent,
            )
        )


@dataclass(frozen=True, kw_only=True)
class _Held:
    made: LlamaContext
    difference: int

    @property
    def agrees(self) -> bool:
        return self.difference == 0


def hold(log: LlamaLog, spec: ModelSpec, given: Mapping[str, Any]) -> LogCheck:
    """Hold a log against the account of llama.cpp.

    Raises:
        InputError: a setting is wrong.
        UnsupportedModel: the account does not cover the model.
    """
    settings = {**log.settings, **read_settings("llama.cpp", SETTINGS, given)}
    held = _held(log, spec, settings)
    return LogCheck(
        engine="llama.cpp",
        found={
            **({} if log.model is None else {"model": log.model}),
            "caches": [
                {"cells": cache.cells, "key_bytes": cache.key.value, "value_bytes": cache.value.value}
                for cache in log.caches
            ],
            "allocated_bytes": sum(cache.key.value + cache.value.value for cache in log.caches),
            "settings": settings,
        },
        planned={
            "caches": [
                {
                    "name": cache.name,
                    "cells": cache.cells,
                    "key_bytes": cache.key_bytes * cache.cells * cache.streams,
                    "value_bytes": cache.value_bytes * cache.cells * cache.streams,
                }
                for cache in held.made.caches
            ],
            "allocated_bytes": held.made.bytes,
        },
        agrees=held.agrees,
        difference_bytes=held.difference,
        explained_by=()
        if held.agrees
        else (*_explained(log, spec, settings, held), *other_model(log.model, spec.name)),
    )


def _held(log: LlamaLog, spec: ModelSpec, settings: Mapping[str, Any]) -> _Held:
    made = context_of(spec, resolve(spec, CacheFormat(key="f16", value="f16"), settings))
    return _Held(made=made, difference=_difference(log, made))


def _difference(log: LlamaLog, made: LlamaContext) -> int:
    """Bytes that the printed caches have above the planned: one by one where they are as many, else in all."""
    planned = [
        (cache.key_bytes * cache.cells * cache.streams, cache.value_bytes * cache.cells * cache.streams)
        for cache in made.caches
    ]
    if len(planned) == len(log.caches):
        off = [
            cache.key.difference(key) + cache.value.difference(value)
            for cache, (key, value) in zip(log.caches, planned, strict=True)
        ]
        return sum(off) or max(off, key=abs, default=0)
    printed = [_total(cache.key for cache in log.caches), _total(cache.value for cache in log.caches)]
    totals = [sum(key for key, _ in planned), sum(value for _, value in planned)]
    return sum(size.difference(total) for size, total in zip(printed, totals, strict=True))


def _total(sizes: Iterator[Rounded]) -> Rounded:
    every = list(sizes)
    return Rounded(
        value=sum(size.value for size in every),
        low=sum(size.low for size in every),
        high=sum(size.high for size in every),
    )


def _explained(log: LlamaLog, spec: ModelSpec, settings: Mapping[str, Any], held: _Held) -> Iterator[str]:
    for what, changed in _effects(settings, held.made):
        try:
            if _held(log, spec, {**settings, **changed}).agrees:
                yield what
        except (InputError, UnsupportedModel):
            continue
    asked = int(settings.get("n_ctx", 0))
    if asked % PAD and _difference(log, _unpadded(held.made, asked)) == 0:
        yield f"padding to {PAD}: {asked} cells, as before llama.cpp padded them"


def _unpadded(made: LlamaContext, cells: int) -> LlamaContext:
    return replace(
        made,
        caches=tuple(
            cache if cache.name == "recurrent" else replace(cache, cells=cells // cache.streams)
            for cache in made.caches
        ),
    )


def _effects(settings: Mapping[str, Any], made: LlamaContext) -> Iterator[tuple[str, dict[str, Any]]]:
    now = made.settings
    if any(cache.name == "swa" for cache in made.caches):
        full = not now.swa_full
        yield f"SWA full: windows are {'' if full else 'not '}kept as if they saw everything", {"swa_full": full}
        for step in (32, 128, 256, 1024, 2048, 4096):
            if step != now.n_ubatch:
                yield f"n_ubatch={step}, held beside windows", {"n_ubatch": step, "n_batch": max(step, now.n_batch)}
    yield (
        "flash attention: values without it are as wide as the widest layer's",
        {"flash_attn": not now.flash_attn},
    )
    for kind in ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        if kind not in (now.type_k, now.type_v):
            yield f"other dtype: keys and values as {kind}", {"type_k": kind, "type_v": kind}
    if now.n_seq_max > 1:
        unified = not now.kv_unified
        yield f"kv_unified={str(unified).lower()}: other streams", {"kv_unified": unified}
    # Until 2025 the default was one sequence, then four.
    for sequences in (1, 2, 4, 8):
        if sequences != now.n_seq_max:
            yield f"n_seq_max={sequences}: other streams and states", {"n_seq_max": sequences}
