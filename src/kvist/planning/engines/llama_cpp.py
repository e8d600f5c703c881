"""llama.cpp's account: cells, streams, rows and recurrent tensors, and the command that starts it so.

llama.cpp takes no memory and asks for none: its cache is as long as ``n_ctx`` says. Where nothing says so, the account
gives a memory to as many streams of the planned context as fit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from kvist.errors import DoesNotFit, InputError
from kvist.planning.engines.account import EngineAccount, EngineBudget, EngineFigure, EngineGroup
from kvist.planning.engines.llama_cells import PAD, ROW_TYPES, LlamaContext, LlamaSettings, context_of, padded
from kvist.planning.engines.settings import Setting, one_of, read_settings, switch, whole
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size

VERSION = "llama-cpp-python 0.3.36"

_MAX_STREAMS = 256


# kvist's codecs of the same size.
_ROW_TYPE_OF = {"f32": "f32", "f16": "f16", "bf16": "f16", "int8": "q8_0", "int4": "q4_0", "int4a": "q4_1"}

SETTINGS = {
    "n_ctx": Setting(read=whole(1, 2**31), help="tokens of all sequences; --ctx-size"),
    "n_seq_max": Setting(read=whole(1, _MAX_STREAMS), help="sequences; --parallel"),
    "kv_unified": Setting(read=switch, help="one stream for all sequences; --kv-unified"),
    "n_ubatch": Setting(read=whole(1, 2**20), help="tokens of a step, which windows hold besides (512)"),
    "n_batch": Setting(read=whole(1, 2**20), help="tokens of a batch (2048); a step is no longer"),
    "swa_full": Setting(read=switch, help="keep windows as if they saw everything; --swa-full"),
    "type_k": Setting(read=one_of(*ROW_TYPES), help="of keys; --cache-type-k"),
    "type_v": Setting(read=one_of(*ROW_TYPES), help="of values; --cache-type-v; needs flash_attn where quantised"),
    "flash_attn": Setting(read=switch, help="on by default; without it values are stored transposed"),
}


def resolve(spec: ModelSpec, fmt: CacheFormat, given: Mapping[str, Any]) -> LlamaSettings:
    """Fill in what llama.cpp's server takes by itself.

    Raises:
        InputError: a setting is unknown or wrong, or no row type stores this format.
    """
    said = read_settings("llama.cpp", SETTINGS, given)
    types = {}
    for setting, codec in (("type_k", fmt.key), ("type_v", fmt.value)):
        if setting not in said and codec not in _ROW_TYPE_OF:
            raise InputError(
                f"format: llama.cpp stores nothing as {codec}; plan with {', '.join(_ROW_TYPE_OF)}, or name one of its "
                f"own types with --set {setting}=…",
                key="format",
            )
        types[setting] = said.get(setting) or _ROW_TYPE_OF[codec]
    return LlamaSettings(
        n_ctx=said.get("n_ctx"),
        n_seq_max=said.get("n_seq_max", 1),
        kv_unified=said.get("kv_unified", False),
        n_ubatch=said.get("n_ubatch", 512),
        n_batch=said.get("n_batch", 2048),
        swa_full=said.get("swa_full", False),
        flash_attn=said.get("flash_attn", True),
        **types,
    )


def account(
    spec: ModelSpec, fmt: CacheFormat, *, budget: EngineBudget, context: int, settings: Mapping[str, Any]
) -> EngineAccount:
    """What llama.cpp allocates.

    Args:
        spec: the model.
        fmt: how keys and values are stored, unless ``type_k`` and ``type_v`` say otherwise.
        budget: memory; without ``n_ctx`` it is given to as many streams as fit.
        context: tokens of each sequence.
        settings: llama.cpp's own, by name (:data:`SETTINGS`).

    Raises:
        DoesNotFit: the cache is larger than the memory.
        InputError: a setting is wrong, or neither memory nor ``n_ctx`` is given.
        UnsupportedModel: a layer is not accounted for.
    """
    resolved = resolve(spec, fmt, settings)
    memory = budget.left
    chosen = _most_streams(spec, resolved, context, memory) if resolved.n_ctx is None else resolved
    made = context_of(spec, chosen)
    if memory is not None and made.bytes > memory:
        raise DoesNotFit(
            f"llama.cpp: {counted(chosen.n_seq_max, 'sequence')} of {made.n_ctx:,} cells in all: "
            f"{format_size(made.bytes)}; there are {format_size(max(0, memory))}"
        )
    return EngineAccount(
        name="llama.cpp",
        version=VERSION,
        num_blocks=made.n_ctx,
        cache_tokens=made.n_ctx,
        max_concurrency=float(_sequences(made, context)),
        cache_bytes=made.bytes if memory is None else memory,
        allocated_bytes=made.bytes,
        sequence_bytes=made.bytes // chosen.n_seq_max,
        groups=tuple(
            EngineGroup(
                name=cache.name,
                layers=cache.layers,
                block_bytes=cache.key_bytes + cache.value_bytes,
                block_tokens=None if cache.name == "recurrent" else 1,
                sequence_blocks=1 if cache.name == "recurrent" else cache.cells,
            )
            for cache in made.caches
        ),
        settings={**asdict(chosen), "n_ctx": made.n_ctx},
        figures=tuple(_figures(made)),
        command="llama-server -m {model}",
        flags=tuple(_flags(made)),
        details={
            "n_ctx": made.n_ctx,
            "n_ctx_seq": made.n_ctx_seq,
            "caches": [
                {
                    "name": cache.name,
                    "layers": cache.layers,
                    "cells": cache.cells,
                    "streams": cache.streams,
                    "key_bytes": cache.key_bytes * cache.cells * cache.streams,
                    "value_bytes": cache.value_bytes * cache.cells * cache.streams,
                }
                for cache in made.caches
            ],
        },
    )


def _most_streams(spec: ModelSpec, settings: LlamaSettings, context: int, memory: int | None) -> LlamaSettings:
    """As many sequences of ``context`` as fit, each in its own stream."""
    if memory is None:
        raise InputError(
            "engine: llama.cpp needs a length or a memory; add --set n_ctx=N, `memory` or `cache_memory`", key="engine"
        )

    def of(streams: int) -> LlamaSettings:
        return replace(settings, n_ctx=streams * padded(context), n_seq_max=streams, kv_unified=False)

    low, high = 1, _MAX_STREAMS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if context_of(spec, of(middle)).bytes <= memory else (low, middle - 1)
    return of(low)


def _sequences(made: LlamaContext, context: int) -> int:
    """Sequences of ``context`` tokens at once: a stream each, or as many as share the cells of one."""
    if made.settings.kv_unified:
        return min(made.settings.n_seq_max, made.n_ctx // context)
    return made.settings.n_seq_max if made.n_ctx_seq >= context else 0


def _figures(made: LlamaContext) -> Iterator[EngineFigure]:
    yield EngineFigure(
        what="n_ctx",
        value=made.n_ctx,
        formula=f"{made.n_ctx_seq:,} cells a sequence, padded to {PAD}",
        source="llama.cpp src/llama-context.cpp",
    )
    files = {
        "recurrent": "llama-memory-recurrent.cpp",
        "swa": "llama-kv-cache-iswa.cpp",
        "indexer": "llama-kv-cache-dsa.cpp",
    }
    for cache in made.caches:
        yield EngineFigure(
            what=f"{cache.name} cache",
            value=cache.bytes,
            formula=(
                f"({cache.key_bytes:,} + {cache.value_bytes:,} B in {counted(cache.layers, 'layer')}) x "
                f"{counted(cache.cells, 'cell')} x {counted(cache.streams, 'stream')}"
            ),
            source=f"llama.cpp src/{files.get(cache.name, 'llama-kv-cache.cpp')}",
        )


def _flags(made: LlamaContext) -> Iterator[str]:
    settings = made.settings
    yield from ("--ctx-size", str(made.n_ctx), "--parallel", str(settings.n_seq_max))
    yield "--kv-unified" if settings.kv_unified else "--no-kv-unified"
    yield from ("--cache-type-k", settings.type_k, "--cache-type-v", settings.type_v)
    yield from ("--flash-attn", "on" if settings.flash_attn else "off", "--ubatch-size", str(settings.n_ubatch))
    if settings.swa_full:
        yield "--swa-full"


__all__ = ["SETTINGS", "LlamaContext", "account", "context_of", "resolve"]
