"""In how many bytes a key or a value is stored.

A :class:`Codec` stores one vector; a :class:`CacheFormat` says which codecs a cache uses, in each of its layers.

::

    CacheFormat(key="int8", value="int4", rotate=True, keep_layers=2)

    layer 0 … 1          keys bf16, values bf16          as attention is most sensitive there
    layer 2 … n - 3      keys int8, values int4, both rotated
    layer n - 2 … n - 1  keys bf16, values bf16

:meth:`CacheFormat.of_layer` is the plain pair of one layer; nothing else decides what a layer is stored in.

With an open *tail* a sequence is stored in two formats: a token is kept as it was computed until its run of ``tail``
tokens is whole, which is then sealed in the codecs. Queries see runs before their own sealed, and their own run exact::

    CacheFormat(key="int4", value="int4", tail=32)

    tokens 0 … 31 | 32 … 63 | 64 … 70            a query at 70
    sealed: int4  | int4    | open: bf16         sees them so, as does one that comes in a prompt of 71 tokens
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvist.errors import InputError
from kvist.spec.codecs import (
    CODECS,
    KEEP_CODECS,
    KEY_CODECS,
    SINGLE,
    STATE_CODECS,
    Codec,
    codec_named,
    keep_codec_named,
    key_codec_named,
    state_codec_named,
)

__all__ = [
    "CODECS",
    "KEEP_CODECS",
    "KEY_CODECS",
    "MOST_TAIL",
    "SINGLE",
    "STATE_CODECS",
    "TAIL_STEP",
    "CacheFormat",
    "Codec",
    "codec_named",
    "keep_codec_named",
    "key_codec_named",
    "require_format",
    "state_codec_named",
]

TAIL_STEP = 16
"""Tails are whole multiples of so many tokens, of which kernels read."""

MOST_TAIL = 1024
"""Longest tail: what is sealed at once is in memory twice for a step."""


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """In what keys, values and states are stored.

    Attributes:
        key: codec of the keys, and of latents; one of :data:`KEY_CODECS` has a tail of a run where none is given.
        value: codec of the values.
        rotate: keys, queries and values are turned by a normalised Hadamard matrix over each head, which spreads
            outliers, before they are stored in a codec of 8 bits or fewer; others are stored as they are. Costs no
            byte.
        keep_layers: so many first and so many last layers of the model keep keys and values in ``keep``.
        keep: their codec, and that of tails; None is bf16 in a plan, and in an engine the type in which it computes.
        layers: formats of single layers, by index, before ``keep_layers``; a mapping, kept as pairs in order.
        state: codec of the recurrent parts of states; None: each model's own (f32, unless its configuration says
            otherwise).
        tail: tokens that are sealed at once, in layers of attention that keep every token; until then they are stored
            in ``keep``. 0: each is stored in its codecs at once.

    Raises:
        InputError: a codec is none, a number is out of range, or a layer's format is more than one.
    """

    key: str = "bf16"
    value: str = "bf16"
    rotate: bool = False
    keep_layers: int = 0
    keep: str | None = None
    layers: "Mapping[int, CacheFormat] | tuple[tuple[int, CacheFormat], ...]" = ()
    state: str | None = None
    tail: int = 0

    def __post_init__(self) -> None:
        run = key_codec_named(self.key).run
        codec_named(self.value, key="value")
        if self.keep is not None:
            keep_codec_named(self.keep)
        if self.state is not None:
            state_codec_named(self.state)
        if type(self.rotate) is not bool:
            raise InputError(f"rotate: {self.rotate!r}; True or False", key="rotate")
        if type(self.keep_layers) is not int or self.keep_layers < 0:
            raise InputError(
                f"keep_layers: {self.keep_layers!r}; a whole number of layers at either end, 0 or more",
                key="keep_layers",
            )
        if type(self.tail) is not int or self.tail % TAIL_STEP or not 0 <= self.tail <= MOST_TAIL:
            raise InputError(
                f"tail: {self.tail!r}; tokens that are sealed at once, a multiple of {TAIL_STEP} up to {MOST_TAIL}, "
                f"or 0 for no tail",
                key="tail",
            )
        if self.tail % run:
            raise InputError(
                f"tail: {self.tail}; keys in {self.key} are sealed in runs of {run}: give a multiple of {run}",
                key="tail",
            )
        own = dict(self.layers)
        for index, fmt in own.items():
            if type(index) is not int or index < 0:
                raise InputError(f"layers: {index!r}; layers are counted from 0", key="layers")
            if not isinstance(fmt, CacheFormat) or fmt.keep_layers or fmt.layers or fmt.tail:
                raise InputError(f"layers: layer {index} is in {fmt}; give it a plain CacheFormat", key="layers")
        object.__setattr__(self, "layers", tuple(sorted(own.items())))

    @property
    def key_codec(self) -> Codec:
        """The codec of the keys."""
        return key_codec_named(self.key)

    @property
    def value_codec(self) -> Codec:
        """The codec of the values."""
        return CODECS[self.value]

    @property
    def rotates_keys(self) -> bool:
        """Whether keys, and the queries that meet them, are turned."""
        return self.rotate and self.key_codec.rotatable

    @property
    def rotates_values(self) -> bool:
        """Whether values are turned, and the output of attention back."""
        return self.rotate and self.value_codec.rotatable

    @property
    def rotates(self) -> bool:
        """Whether anything is turned in layers of which nothing else is said."""
        return self.rotates_keys or self.rotates_values

    @cached_property
    def own(self) -> "Mapping[int, CacheFormat]":
        """Formats of single layers, by index, in order."""
        return dict(self.layers)

    @property
    def uniform(self) -> bool:
        """Whether all layers are stored alike."""
        return not self.keep_layers and not self.layers

    @cached_property
    def plain(self) -> "CacheFormat":
        """What layers are stored in of which nothing else is said; no rotation or tail that would change nothing."""
        kept = self.keep or "bf16"
        run = self.key_codec.run
        tail = self.tail or (run if run > 1 else 0)
        if (self.key, self.value) == (kept, kept):
            tail = 0
        bare = replace(self, keep_layers=0, keep=kept if tail else None, layers=(), tail=tail)
        return replace(bare, rotate=bare.rotates)

    @cached_property
    def of_sealed(self) -> "CacheFormat":
        """Of a plain format, what whole runs are stored in: all there is, where it has no tail."""
        return replace(self, tail=0, keep=None) if self.tail else self

    @cached_property
    def of_single(self) -> "CacheFormat":
        """Of a plain format, what tokens are stored in that no run holds."""
        return replace(self.of_sealed, key=SINGLE.get(self.key, self.key))

    @cached_property
    def of_tail(self) -> "CacheFormat":
        """Of a plain format with a tail, what that is stored in."""
        kept = self.keep or "bf16"
        return CacheFormat(key=kept, value=kept, state=self.state)

    def of_layer(self, index: int, count: int) -> "CacheFormat":
        """What one layer is stored in: a plain format.

        Args:
            index: of the layer, from 0.
            count: layers of the model.

        Raises:
            InputError: more layers are kept, or others named, than there are.
        """
        if self.uniform:
            return self.plain
        self.require_layers(count)
        own = self.own.get(index)
        if own is not None:
            return replace(own, state=own.state or self.state, tail=self.tail, keep=self.keep).plain
        if self.keep_layers and not self.keep_layers <= index < count - self.keep_layers:
            kept = self.keep or "bf16"
            return CacheFormat(key=kept, value=kept, rotate=self.rotate, state=self.state).plain
        return self.plain

    def within(self, first: int, end: int, count: int) -> "CacheFormat":
        """The format of the layers ``first`` to ``end``, without the latter, of ``count``, as of a model of their own.

        Raises:
            InputError: as :meth:`of_layer`.
        """
        if self.uniform or (first, end) == (0, count):
            return self
        found = {index - first: self.of_layer(index, count) for index in range(first, end)}
        return replace(self.plain, layers={index: fmt for index, fmt in found.items() if fmt != self.plain})

    def computed_in(self, codec: str) -> "CacheFormat":
        """The same format as an engine that computes in this type has it: kept layers and tails are as they come."""
        runs = any(fmt.key_codec.run > 1 for fmt in (self, *self.own.values()))
        kept = self.keep_layers or self.tail or runs
        return replace(self, keep=codec) if kept and self.keep is None else self

    def require_layers(self, count: int, *, name: str = "the model") -> None:
        """Raise :class:`InputError` unless a model of ``count`` layers, called ``name``, can be stored so."""
        if 2 * self.keep_layers > count:
            raise InputError(
                f"keep_layers: {self.keep_layers} at either end; {name} has {count} layers: at most {count // 2}",
                key="keep_layers",
            )
        last = max(self.own, default=-1)
        if last >= count:
            raise InputError(f"layers: {last}; {name} has {count} layers, 0 to {count - 1}", key="layers")

    def key_bytes(self, width: int) -> int:
        """Bytes of one key of ``width`` elements.

        Raises:
            InputError: the width is no whole number of the codec's groups.
        """
        return self.key_codec.vector_bytes(width, key="key")

    def value_bytes(self, width: int) -> int:
        """Bytes of one value of ``width`` elements.

        Raises:
            InputError: the width is no whole number of the codec's groups.
        """
        return self.value_codec.vector_bytes(width, key="value")

    def latent_bytes(self, rank: int, rope_dim: int) -> int:
        """Bytes of one latent vector, in the key codec: ``rank`` elements and ``rope_dim`` rotary ones.

        In fp8 the rotary elements are in bf16, as in FlashMLA's and vLLM's ``fp8_ds_mla``: all heads read them, and
        nothing trained into the latent's norm bounds them.

        Raises:
            InputError: the width is no whole number of the codec's groups.
        """
        if self.key == "fp8":
            return self.key_bytes(rank) + CODECS["bf16"].vector_bytes(rope_dim)
        return self.key_bytes(rank + rope_dim)

    def to_dict(self) -> dict[str, Any]:
        """As under ``format`` in JSON: key and value; the rest, and all of it in words, where more is said."""
        more: dict[str, Any] = {}
        if self.rotates:
            more["rotate"] = True
        if self.keep_layers:
            more |= {"keep_layers": self.keep_layers, "keep": self.keep or "bf16"}
        if self.tail:
            more |= {"tail": self.tail, "keep": self.keep or "bf16"}
        if self.own:
            more["layers"] = {str(index): fmt.to_dict() for index, fmt in self.own.items()}
        if self.state is not None:
            more["state"] = self.state
        return {"key": self.key, "value": self.value} | more | ({"text": str(self)} if more else {})

    @property
    def words(self) -> str:
        """A line for people: ``keys int8, values int4, rotated, 2 + 2 layers bf16``."""
        return ", ".join([f"keys {self.key}, values {self.value}", *(["rotated"] if self.rotates else []), *self._more])

    def __str__(self) -> str:
        """In short, and whole: formats that store any layer otherwise are never called the same."""
        return ", ".join([f"{self.key}/{self.value}{' rotated' if self.rotates else ''}", *self._more])

    @property
    def _more(self) -> list[str]:
        """What is said beside codecs and rotation; in brackets what says several things of one layer."""
        parts = [f"layer {index} ({fmt})" if fmt.state else f"layer {index} {fmt}" for index, fmt in self.own.items()]
        if self.keep_layers:
            parts.append(f"{self.keep_layers} + {self.keep_layers} layers {self.keep or 'bf16'}")
        if self.tail:
            parts.append(f"tails of {self.tail} {self.keep or 'bf16'}")
        return parts if self.state is None else [*parts, f"states {self.state}"]


def require_format(fmt: object, *, key: str = "format") -> CacheFormat:
    """Return ``fmt``, the value of ``key``.

    Raises:
        InputError: it is something else than a :class:`CacheFormat`, such as the name of a codec.
    """
    if isinstance(fmt, CacheFormat):
        return fmt
    example = fmt if isinstance(fmt, str) and fmt in CODECS else "bf16"
    raise InputError(
        f"{key}: {fmt!r} is not a CacheFormat; write kvist.CacheFormat(key={example!r}, value={example!r})", key=key
    )
