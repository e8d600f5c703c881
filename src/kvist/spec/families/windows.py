"""Which layers see everything and which a window or chunk: the rules of the families, by name.

A rule answers for a configuration that prints no ``layer_types``; a printed list always wins.
"""

from collections.abc import Callable

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import CHUNKED, FULL, SLIDING, class_default, layer_types

Rule = Callable[[ConfigKeys, int], list[str]]

# What the rules read; a printed list of kinds stands above all of them.
PATTERN_KEYS = (
    "sliding_window_pattern", "global_attn_every_n_layers", "prefix_dense_sliding_window_pattern",
    "first_k_dense_replace", "max_window_layers", "no_rope_layers", "no_rope_layer_interval",
)  # fmt: skip


def full(keys: ConfigKeys, layers: int) -> list[str]:
    """No windows."""
    return [FULL] * layers


def says_window(keys: ConfigKeys, default: int | None) -> bool:
    """Whether the configuration has a window, ``default`` being that of the class.

    Raises:
        UnsupportedModel: a whole file leaves it out where the class has one. Published files print a width or null;
            copies that drop their nulls mean none.
    """
    if "sliding_window" in keys:
        return keys.get("sliding_window") is not None
    if default is None or keys.part:
        return default is not None
    raise UnsupportedModel(
        f"{keys.name}: sliding_window is missing; a {keys.family} configuration says null or a width: "
        f"write it, or --assume sliding_window=null",
        key="sliding_window",
    )


def everywhere(default: int | None = None) -> Rule:
    """A window on every layer, or on none; ``default`` is that of the class."""

    def rule(keys: ConfigKeys, layers: int) -> list[str]:
        return [SLIDING if says_window(keys, default) else FULL] * layers

    return rule


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
    """dots.llm1: as Qwen, without the switch."""
    if not says_window(keys, 4096):
        return [FULL] * layers
    return from_max_window_layers(keys, layers, default=62)


def exaone(keys: ConfigKeys, layers: int) -> list[str]:
    """EXAONE 4: ``sliding_window_pattern`` is a period, or letters for each layer of one (``LLLG``)."""
    pattern = keys.get("sliding_window_pattern")
    if not says_window(keys, 4096):
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


SWITCHED = (switched, switched_for_all, switched_alternating)


def kinds_of(
    keys: ConfigKeys, layers: int, rule: Rule, *, window: int | None = None, chunk: int | None = None
) -> list[str]:
    """Return the kind of every layer: the printed list, or what the family's rule says.

    Args:
        keys: the configuration.
        layers: how many there are.
        rule: of the family.
        window: default width of the class; a list may name windows where there is one, or a rule for them.
        chunk: likewise, of chunks.

    Raises:
        UnsupportedModel: the list names a kind that the family does not have.
    """
    if keys.get("layer_types") is None:
        return hold_counts(keys, rule(keys, layers))
    windowed = window is not None or (rule is not full and chunk is None)
    allowed = [FULL, *([SLIDING] if windowed else []), *([CHUNKED] if chunk is not None else [])]
    kinds = layer_types(keys, layers, allowed)
    if len(allowed) > 1:
        for key in PATTERN_KEYS:
            keys.get(key)
    if SLIDING in kinds and rule in SWITCHED and not keys.flag("use_sliding_window", default=False):
        raise UnsupportedModel(
            f"{keys.name}: layer_types has {SLIDING}, but use_sliding_window is off", key="layer_types"
        )
    return hold_counts(keys, kinds)


def hold_counts(keys: ConfigKeys, kinds: list[str]) -> list[str]:
    """Return the kinds, held against the numbers of layers of each that extracts of configurations give.

    Raises:
        BadFile: they differ.
    """
    for key, kind in (("full_attention_layers", FULL), ("sliding_attention_layers", SLIDING)):
        if keys.get(key) is not None and keys.count(key, least=0) != kinds.count(kind):
            raise keys.wrong(key, f"{kinds.count(kind)}, as many as there are among the {len(kinds)} layers")
    return kinds
