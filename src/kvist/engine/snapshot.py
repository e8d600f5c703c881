"""A picture of an engine, as JSON: what ``/cache`` shows."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.engine.engine import Engine


def snapshot(engine: "Engine") -> dict[str, Any]:
    """Where every block is (:mod:`kvist.cache.snapshot`), how it is stored, and what the engine does; under its lock.

    Args:
        engine: whose picture it is.
    """
    seen = engine.scheduler.snapshot(engine.tokenizer.decode)
    if engine.runner.tiers:
        seen["tiers"] = engine.runner.tiers.snapshot(seen["tiers"], engine.scheduler.tier_hit_tokens)
    return {
        "model": engine.model_id,
        "format": engine.format.to_dict(),
        "dtype": engine.dtype,
        "evict": str(engine.evict or "none"),
        "uptime_seconds": time.time() - engine.started,
        **seen,
        "cartridges": engine.shelf.snapshot(),
        "joined": engine.shelf.joined(),
        "speed": {"tokens_per_second": engine.throughput.tokens_per_second()},
    }
