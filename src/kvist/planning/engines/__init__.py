"""How other engines count the memory of a cache, to the byte: one module an engine, one answer for all.

Nothing here starts or imports an engine. Each rule names the file of the engine that it was read from, and tests hold
it against figures that the engine printed.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvist.errors import InputError
from kvist.planning.engines.account import EngineAccount, EngineBudget
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

# Modules with an ``account`` and a dict ``SETTINGS``, by the name of the engine; loaded when asked for.
ENGINES = {
    "vllm": "kvist.planning.engines.vllm",
    "sglang": "kvist.planning.engines.sglang",
    "llama.cpp": "kvist.planning.engines.llama_cpp",
    "transformers": "kvist.planning.engines.transformers",
}


def engine_account(
    spec: ModelSpec,
    fmt: CacheFormat,
    *,
    engine: str,
    budget: EngineBudget,
    context: int,
    settings: Mapping[str, Any] | None = None,
) -> EngineAccount:
    """What an engine makes of a memory, by its own arithmetic.

    Args:
        spec: the model.
        fmt: how keys and values are planned to be stored; the engine's own settings go before it.
        engine: one of :data:`ENGINES`.
        budget: the memory of one device; may be empty where settings alone decide.
        context: tokens of each sequence.
        settings: the engine's own, by its own names.

    Raises:
        InputError: no such engine or setting, a wrong value, or no memory where one is needed.
        UnsupportedModel: the model remembers what the account does not cover, or the engine does not run it.
        DoesNotFit: the engine would not start; the message shows the sum.
    """
    if engine not in ENGINES:
        raise InputError(f"engine: {engine!r} is not accounted for; choose one of {', '.join(ENGINES)}", key="engine")
    module = import_module(ENGINES[engine])
    answer: EngineAccount = module.account(spec, fmt, budget=budget, context=context, settings=dict(settings or {}))
    return answer
