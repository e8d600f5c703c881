"""The reader of families whose layers keep keys and values of one shape, all tokens or a window of them.

What is particular to a family is a line of data: what its class fills in, which own names it has for Hugging Face's
keys, and by which rule its layers have windows. The lines are in ``gpt.py``, ``llamas.py`` and ``windowed.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import windows
from kvist.spec.families.reading import (
    CHUNKED,
    FULL,
    SLIDING,
    Reader,
    Reading,
    Size,
    class_default,
    context_of,
    finished,
    heads_and_widths,
    per_layer,
    refuse_encoder,
)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """What is particular to a family.

    Attributes:
        context: longest sequence that the class fills in; None where a file must say.
        layers: what the class fills in for a part of a larger file; likewise heads and hidden.
        heads: query heads.
        hidden: width of a token.
        kv_heads: default of the class; None: as many as query heads.
        head_dim: default of the class; None: hidden size / query heads.
        names: the family's own names of Hugging Face's keys.
        contexts: its own names of the longest sequence, the first printed one counts.
        prepare: what settles a key by others, before heads are read.
        rule: which layers have windows where no list is printed.
        window: default width of the class.
        chunk: default width of chunks.
        own_code: whether the class is published with the models; transformers does not have it. KV heads must then be
            printed, unless ``kv_heads`` or ``prepare`` says what the class takes.
    """

    context: int | None = None
    layers: int | None = None
    heads: int | None = None
    hidden: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contexts: tuple[str, ...] = ()
    prepare: Callable[[ConfigKeys], None] | None = None
    rule: windows.Rule = windows.full
    window: int | None = None
    chunk: int | None = None
    own_code: bool = False


def read_dense(family: Dense, keys: ConfigKeys) -> Reading:
    """Read a configuration of such a family.

    Raises:
        UnsupportedModel, BadFile: as :func:`kvist.spec.families.read_config`.
    """
    keys.rename(family.names)
    if family.own_code:
        keys.origin = "in the code published with it"
    if family.prepare:
        family.prepare(keys)
    elif family.own_code and family.kv_heads is None and "num_key_value_heads" not in keys:
        raise keys.missing("num_key_value_heads")
    size = Size(layers=family.layers, heads=family.heads, hidden=family.hidden)
    shape = heads_and_widths(keys, head_dim=family.head_dim, kv_heads=family.kv_heads, size=size)
    refuse_encoder(keys)
    context_of(keys, *family.contexts, default=family.context)
    kinds = windows.kinds_of(keys, shape.layers, family.rule, window=family.window, chunk=family.chunk)
    full = shape.attention()
    limited = {FULL: full}
    default = class_default(keys)
    if family.window is not None:
        keys.get("sliding_window")
    if SLIDING in kinds:
        width = keys.count("sliding_window", default=family.window, source=default)
        limited[SLIDING] = replace(full, window=width)
    if CHUNKED in kinds:
        width = keys.count("attention_chunk_size", default=family.chunk, source=default)
        limited[CHUNKED] = replace(full, chunk=width)
    keys.set("layer_types", kinds)
    layers = per_layer(keys, kinds, [limited[kind] for kind in kinds])
    return finished(keys, layers, draft=full if set(kinds) == {FULL} else None)


def readers_of(families: Mapping[str, Dense]) -> dict[str, Reader]:
    """Return a reader for each family."""
    return {name: partial(read_dense, family) for name, family in families.items()}
