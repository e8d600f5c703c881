"""kvist: plan, simulate, shrink and serve the KV cache of large language models, to the byte.

Names are loaded when first used, so that ``import kvist`` costs nothing and needs no engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvist._version import __version__

if TYPE_CHECKING:
    from kvist.engine.engine import Engine
    from kvist.engine.sampler import SamplingParams
    from kvist.errors import (
        BadFile,
        DoesNotFit,
        EngineFailure,
        InputError,
        KvistError,
        UnknownModel,
        UnsupportedModel,
    )
    from kvist.planning.plan import Plan
    from kvist.planning.planner import plan
    from kvist.simulation.question import simulate
    from kvist.simulation.results import SimulationResult
    from kvist.spec.formats import CacheFormat
    from kvist.spec.model import ModelSpec

_HOMES = {
    "BadFile": "kvist.errors",
    "CacheFormat": "kvist.spec.formats",
    "DoesNotFit": "kvist.errors",
    "Engine": "kvist.engine.engine",
    "EngineFailure": "kvist.errors",
    "InputError": "kvist.errors",
    "KvistError": "kvist.errors",
    "ModelSpec": "kvist.spec.model",
    "Plan": "kvist.planning.plan",
    "SamplingParams": "kvist.engine.sampler",
    "SimulationResult": "kvist.simulation.results",
    "UnknownModel": "kvist.errors",
    "UnsupportedModel": "kvist.errors",
    "plan": "kvist.planning.planner",
    "simulate": "kvist.simulation.question",
}

__all__ = [
    "BadFile",
    "CacheFormat",
    "DoesNotFit",
    "Engine",
    "EngineFailure",
    "InputError",
    "KvistError",
    "ModelSpec",
    "Plan",
    "SamplingParams",
    "SimulationResult",
    "UnknownModel",
    "UnsupportedModel",
    "__version__",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvist' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
