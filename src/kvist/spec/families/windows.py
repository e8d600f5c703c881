"""Which layers see everything and which a window or chunk: the rules of the families, by name.

A rule answers for a configuration that prints no ``layer_types``; a printed list always wins.
"""

from collections.abc import Callable

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import CHUNKED, FULL, SLIDING, class_default

Rule = Callable[[ConfigKeys, int], list[str]]


def full(keys: ConfigKeys, layers: int) -> list[str]:
    """No windows."""
    return [FULL] * layers


def everywhere(keys: ConfigKeys, layers: int) -> list[str]:
    """A window on every layer where one is printed."""
    return [FULL if keys.get("sliding_window") is None else SLIDING] * layers


def full_every(period: int, *, key: str | None = None, last: bool = False) -> Rule:
    """Windows, and a full layer at the end of every ``period`` layers.

    Args:
        period: of the class.
        key: that replaces it.
        last: whether the last layer is full besides.
    """

    def rule(keys: ConfigKeys, layers: int) -> list[str]:
        used = keys.count(key, default=period, source=class_default(keys)) if key else period
        return [
            FULL if (index + 1) % used == 0 or (last and index == layers - 1) else SLIDING for index in range(layers)
        ]

    return rule


def full_first(period: int, *, key: str | None = None) -> Rule:
    """Windows, and a full layer at the beginning of every ``period`` layers."""

    def rule(keys: ConfigKeys, layers: int) -> list[str]:
        used = keys.count(key, default=period, source=class_default(keys)) if key else period
        return [SLIDING if index % used else FULL for index in range(layers)]

    return rule


def full_from_the_end(period: int) -> Rule:
    """Windows, and a full layer at the end of every ``period`` layers counted backwards from the last."""

    def rule(keys: ConfigKeys, layers: int) -> list[str]:
        return [SLIDING if (layers - 1 - index) % period else FULL for index in range(layers)]

    return rule


def switched(keys: ConfigKeys, layers: int) -> list[str]:
    """Qwen: windows when ``use_sliding_window`` is on, from layer ``max_window_layers`` on; the first stay full."""
    if not keys.flag("use_sliding_window", default=False):
        return [FULL] * layers
    return from_max_window_layers(keys, layers)


def from_max_window_layers(keys: ConfigKeys, layers: int, default: int = 28) -> list[str]:
    """Windows from layer ``max_window_layers`` on."""
    first = keys.count("max_window_layers", default=default, least=0, source=class_default(keys))
    return [SLIDING if index >= first else FULL for index in range(layers)]


def switched_for_all(keys: ConfigKeys, layers: int) -> list[str]:
    """Qwen 3 MoE: windows on all layers when ``use_sliding_window`` is on."""
    return [SLIDING if keys.flag("use_sliding_window", default=False) else FULL] * layers


def switched_alternating(keys: ConfigKeys, layers: int) -> list[str]:
    """Qwen 2 MoE: windows, when on, on every other layer below ``max_window_layers``."""
    if not keys.flag("use_sliding_window", default=False):
        return [FULL] * layers
    first = keys.count("max_window_layers", default=28, least=0, source=class_default(keys))
    return [SLIDING if index % 2 == 0 and index < first else FULL for index in range(layers)]


def dots(keys: ConfigKeys, layers: int) -> list[str]:
    """dots.llm1: as Qwen, without the switch; an explicit null is no window."""
    if "sliding_window" in keys and keys.get("sliding_window") is None:
        return [FULL] * layers
    return from_max_window_layers(keys, layers, default=62)


def exaone(keys: ConfigKeys, layers: int) -> list[str]:
    """EXAONE 4: ``sliding_window_pattern`` is a period, or letters for each layer of one (``LLLG``)."""
    pattern = keys.get("sliding_window_pattern")
    if "sliding_window" in keys and keys.get("sliding_window") is None:
        return [FULL] * layers
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise keys.wrong("sliding_window_pattern", "a period, or L (local) and G (global) for each layer of one")
        return [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(layers)]
    return full_every(4, key="sliding_window_pattern")(keys, layers)


def cohere_moe(keys: ConfigKeys, layers: int) -> list[str]:
    """Command A with experts: the first dense layers have a period of their own."""
    default = class_default(keys)
    dense = keys.count("first_k_dense_replace", default=0, least=0, most=layers, source=default)
    dense_period = keys.count("prefix_dense_sliding_window_pattern", default=1, source=default)
    period = keys.count("sliding_window_pattern", default=4, source=default)
    first = [SLIDING if (index + 1) % dense_period else FULL for index in range(dense)]
    return first + [SLIDING if (index + 1) % period else FULL for index in range(layers - dense)]


def flint(keys: ConfigKeys, layers: int) -> list[str]:
    """Flint: the first two layers, every fourth and the last are full."""
    return [FULL if index < 2 or index % 4 == 1 or index == layers - 1 else SLIDING for index in range(layers)]


def without_rope(keys: ConfigKeys, layers: int) -> list[str]:
    """SmolLM3: windows, when switched on, on the layers that turn no positions."""
    if not keys.flag("use_sliding_window", default=False) or keys.get("sliding_window") is None:
        return [FULL] * layers
    return [FULL if turned else SLIDING for turned in rope_layers(keys, layers)]


def chunked(keys: ConfigKeys, layers: int) -> list[str]:
    """Llama 4: chunks on the layers that turn positions, everything on the others."""
    if "attention_chunk_size" in keys and keys.get("attention_chunk_size") is None:
        return [FULL] * layers
    return [CHUNKED if turned else FULL for turned in rope_layers(keys, layers)]


def rope_layers(keys: ConfigKeys, layers: int) -> list[bool]:
    """Return which layers turn positions: ``no_rope_layers`` has a 1 for those that do, in spite of its name."""
    if keys.get("no_rope_layers"):
        return [bool(turned) for turned in keys.each("no_rope_layers", layers, least=0)]
    period = keys.count("no_rope_layer_interval", default=4, source=class_default(keys))
    return [bool((index + 1) % period) for index in range(layers)]
