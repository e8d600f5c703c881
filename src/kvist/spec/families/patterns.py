"""Which layer of a hybrid is of which kind: lists, pattern strings, periods and indices, under their published names.

Published files say the same thing in many ways (``layer_types``, ``layers_block_type``, ``hybrid_override_pattern``,
``attn_layer_indices``, ``full_attention_interval`` …). Each function here reads one way and returns one word a layer;
two ways in one file must agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import FULL, Reading, Size, class_default, count_of_layers
from kvist.spec.foreign import refuse_foreign
from kvist.spec.layers import Layer

RECURRENT, BOTH, CONV, NONE = "recurrent", "both", "conv", "none"

# What the published words mean, in the families that use them.
PLAIN = {
    "attention": FULL, "full_attention": FULL, "mamba": RECURRENT, "linear_attention": RECURRENT,
}  # fmt: skip

# A recurrence has no longest sequence; lengths up to this are planned where the file names none.
UNBOUNDED = 2**20
_MOST_LAYERS = 10_000


def number_of_layers(keys: ConfigKeys, *aliases: str, size: Size | None = None) -> int:
    """Return ``num_hidden_layers``, which some files call by one of ``aliases``."""
    if aliases:
        keys.rename({"num_hidden_layers": aliases})
    return count_of_layers(keys, size)


def listed(keys: ConfigKeys, *names: str, layers: int | None, words: Mapping[str, str] = PLAIN) -> list[str] | None:
    """Return the kinds that the first of these lists gives, one a layer; None where there is none of them.

    ``layers`` is their number where it is known otherwise.

    Raises:
        UnsupportedModel: a word of it means nothing here.
        BadFile: it is no list, has another number of entries, or disagrees with another of the lists.
    """
    kinds: list[str] | None = None
    for name in names:
        value = keys.get(name)
        if value is None:
            continue
        found = _words(keys, name, value, layers, words)
        if kinds is not None and kinds != found:
            raise BadFile(f"{keys.name}: {names[0]} and {name} differ; --assume {name}=null", key=name)
        kinds = found
    return kinds


def _words(keys: ConfigKeys, name: str, value: Any, layers: int | None, words: Mapping[str, str]) -> list[str]:
    if not isinstance(value, list) or not value or len(value) > _MOST_LAYERS:
        raise keys.wrong(name, "a list with one entry a layer", shown=_shown(value))
    if layers is not None and len(value) != layers:
        raise keys.wrong(name, f"one entry for each of the {layers} layers", shown=f"of length {len(value)}")
    for index, word in enumerate(value):
        if not isinstance(word, str) or word not in words:
            raise UnsupportedModel(
                f"{keys.name}: {name}[{index}] is {_shown(word)}; supported are {', '.join(words)}", key=name
            )
    return [words[word] for word in value]


def spelled(keys: ConfigKeys, name: str, letters: Mapping[str, str]) -> list[str] | None:
    """Return the kinds that a string spells, a letter a layer; None where it is left out.

    Raises:
        UnsupportedModel: a letter means nothing here.
    """
    value = keys.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_LAYERS:
        raise keys.wrong(name, "a string with a letter for each layer", shown=_shown(value))
    for index, letter in enumerate(value):
        if letter not in letters:
            raise UnsupportedModel(
                f"{keys.name}: {name}[{index}] is {letter!r}; supported are {' '.join(letters)}", key=name
            )
    return [letters[letter] for letter in value]


def indices(keys: ConfigKeys, name: str, *, layers: int, first: int = 0) -> set[int] | None:
    """Return the layers that a list names, counted from 0; None where it is left out.

    Args:
        keys: the configuration.
        name: of the list.
        layers: how many there are.
        first: what the list calls the first layer.
    """
    return indices_of(keys, name, keys.get(name), layers=layers, first=first)


def indices_of(keys: ConfigKeys, name: str, value: Any, *, layers: int, first: int = 0) -> set[int] | None:
    """Return the same of a value that lies elsewhere than at the top."""
    if value is None:
        return None
    last = first + layers - 1
    if not isinstance(value, list) or not all(type(index) is int and first <= index <= last for index in value):
        raise keys.wrong(name, f"a list of layers from {first} to {last}", shown=_shown(value))
    if len(set(value)) != len(value):
        raise keys.wrong(name, "a list without repetition", shown=_shown(value))
    return {index - first for index in value}


def split(layers: int, picked: Iterable[int], *, then: str = FULL, otherwise: str = RECURRENT) -> list[str]:
    """Return ``then`` for the layers picked, ``otherwise`` for the others."""
    chosen = set(picked)
    return [then if index in chosen else otherwise for index in range(layers)]


def placed(kinds: Sequence[str], found: Mapping[str, Layer]) -> list[Layer]:
    """Return the layer of each kind in its places."""
    return [found[kind] for kind in kinds]


def every(keys: ConfigKeys, name: str, *, layers: int, default: int | None) -> list[str]:
    """Return full attention in each last layer of ``name`` of them, recurrence in the others."""
    period = keys.count(name, default=default, most=_MOST_LAYERS, source=class_default(keys))
    return split(layers, range(period - 1, layers, period))


def hold_counts(keys: ConfigKeys, kinds: Sequence[str]) -> None:
    """Hold the kinds against the numbers of layers of each kind, which extracts of configurations give."""
    for name, kind in (("full_attention_layers", FULL), ("linear_attention_layers", RECURRENT)):
        if keys.get(name) is not None and keys.count(name, least=0) != kinds.count(kind):
            raise keys.wrong(name, f"{kinds.count(kind)}, as many as the pattern of the {len(kinds)} layers has")


def missing_pattern(keys: ConfigKeys, name: str, why: str) -> UnsupportedModel:
    """Return the refusal of a file that does not say which layer is of which kind."""
    return UnsupportedModel(f"{keys.name}: {name} is missing; {why}: add it, or --assume {name}=…", key=name)


def own(keys: ConfigKeys, *names: str, prefixes: tuple[str, ...] = ()) -> None:
    """Mark published keys of the family's own mechanism as read: they change no byte of what is remembered."""
    for name in (*names, *(key for key in list(keys.config) if key.startswith(prefixes or ("\0",)))):
        if name not in keys.overrides:
            keys.get(name)


def longest(keys: ConfigKeys, *aliases: str, default: int | None) -> int:
    """Return the longest sequence the model was made for.

    ``default`` is the class's; None for a recurrence, whose class names none.
    """
    if aliases:
        keys.rename({"max_position_embeddings": aliases})
    source = class_default(keys) if default else "a recurrence has no longest sequence; this much is planned"
    return keys.count("max_position_embeddings", default=default or UNBOUNDED, source=source)


def reading(keys: ConfigKeys, layers: Sequence[Layer], *, max_context: int, draft: Sequence[Layer] = ()) -> Reading:
    """Return what was read, once no key is left that means something else."""
    keys.stored_type()
    if keys.get("use_sliding_window") is False:
        own(keys, "sliding_window", "max_window_layers")
    refuse_foreign(keys)
    return Reading(
        layers=tuple(layers),
        max_context=max_context,
        config=dict(keys.config),
        assumed=tuple(keys.assumed),
        draft_layers=tuple(draft),
    )


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"
