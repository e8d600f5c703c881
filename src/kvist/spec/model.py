"""One description of a model's memory, which the planner, the simulator and the engine share."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from kvist.errors import InputError
from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.layers import Cross, Layer, Parallel, Shared, State
from kvist.spec.rates import Rate, total
from kvist.units import require_tokens

__all__ = ["Assumption", "Layer", "ModelSpec"]

_Kind = TypeVar("_Kind", bound=Layer)

# Formats of which a model remembers how its layers are counted.
_MOST_COUNTS = 64


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A key that the published files leave out, the value taken for it, and where that value comes from."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model must remember, and what its weights weigh.

    Attributes:
        name: how the model is called in answers and by the server.
        source: the file or list that it was read from.
        layers: one entry a decoder layer, first to last.
        max_context: longest sequence, in tokens, that the model was made for.
        parameters: number of weights, where the source tells.
        weights_bytes: bytes of the weights as stored in the source.
        weights_by_type: the same by stored type, such as ``{"Q4_1": 84934656, "F32": 140544}``.
        config: the published configuration under Hugging Face's names, whatever the source's own names are;
            what the engine builds the network from.
        assumed: what the source leaves out.
        path: the file or directory on disk, where there is one.
        exact: false only where the user overrode what is published.
        draft_layers: of the draft model that is published with it (multi-token prediction), whose memory is counted
            apart.

    Raises:
        InputError: a layer shares the memory of one that is not there or stores nothing.
    """

    name: str
    source: str
    layers: tuple[Layer, ...]
    max_context: int
    parameters: int | None = None
    weights_bytes: int | None = None
    weights_by_type: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[Assumption, ...] = ()
    path: Path | None = None
    exact: bool = True
    draft_layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            for shared in _leaves(layer, Shared):
                if not (0 <= shared.source < len(self.layers) and self.layers[shared.source].stored):
                    raise InputError(
                        f"layers[{index}]: reads the memory of layer {shared.source}; of the {len(self.layers)} layers "
                        f"of {self.name}, the source must be one that stores something",
                        key="layers",
                    )

    def sequence_bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Logical bytes of one sequence of ``tokens``, state included.

        Windows hold ``min(tokens, window)``, compressed layers whole entries; no block rounding. What cross-attention
        keeps of an encoder is apart: :meth:`cross_bytes`.

        Raises:
            InputError: ``tokens`` is no whole number of 0 or more, ``fmt`` no :class:`CacheFormat`, or a vector's
                width no whole number of the codec's groups.
        """
        require_tokens(tokens)
        require_format(fmt)
        return sum(count * layer.bytes(tokens, plain) for layer, plain, count in self._counted(fmt))

    def append_bytes_per_token(self, fmt: CacheFormat) -> Rate:
        """Bytes that one more token adds while every layer still grows; a fraction where layers compress."""
        require_format(fmt)
        return total(count * layer.append_bytes(plain) for layer, plain, count in self._counted(fmt))

    def retained_bytes_per_token(self, fmt: CacheFormat) -> Rate:
        """Bytes that one more token adds once every window and chunk is full."""
        require_format(fmt)
        return total(count * layer.retained_bytes(plain) for layer, plain, count in self._counted(fmt))

    def indexer_bytes_per_token(self, fmt: CacheFormat) -> Rate:
        """The part of :meth:`append_bytes_per_token` that published tables leave out: indexer keys."""
        require_format(fmt)
        return total(count * layer.indexer_bytes(plain) for layer, plain, count in self._counted(fmt))

    def state_bytes(self, fmt: CacheFormat | None = None) -> int:
        """Bytes of a sequence whatever its length; of a format, only the codec of states changes them."""
        used = CacheFormat() if fmt is None else require_format(fmt)
        return sum(count * layer.state_bytes(plain) for layer, plain, count in self._counted(used))

    def computed_in(self, codec: str) -> "ModelSpec":
        """The same model as an engine runs it in this type: convolutions keep their inputs as they are computed."""
        return replace(self, layers=tuple(_with_conv(layer, codec) for layer in self.layers))

    def draft_append_bytes_per_token(self, fmt: CacheFormat) -> Rate:
        """Bytes that one more token adds in the draft layers, which no other number counts."""
        require_format(fmt)
        return total(layer.append_bytes(fmt.plain) for layer in self.draft_layers)

    def cross_bytes_per_encoder_token(self, fmt: CacheFormat) -> int:
        """Bytes of one token of the encoder, in all layers that attend to it."""
        require_format(fmt)
        return sum(count * layer.cross_bytes_per_encoder_token(plain) for layer, plain, count in self._counted(fmt))

    def cross_bytes(self, fmt: CacheFormat, *, encoder_tokens: int | None = None) -> int | None:
        """Bytes that a sequence keeps of its encoder.

        Args:
            fmt: how keys and values are stored.
            encoder_tokens: length of the encoder's output, where the model does not fix it; a fixed one stays.

        Returns:
            None where a layer attends to an encoder whose length is neither fixed nor given.

        Raises:
            InputError: ``encoder_tokens`` is no whole number of 0 or more.
        """
        require_format(fmt)
        if encoder_tokens is not None:
            require_tokens(encoder_tokens, key="encoder_tokens")
        size = 0
        for index, layer in enumerate(self.layers):
            for cross in _leaves(layer, Cross):
                length = encoder_tokens if cross.encoder_tokens is None else cross.encoder_tokens
                if length is None:
                    return None
                size += length * cross.cross_bytes_per_encoder_token(fmt.of_layer(index, len(self.layers)))
        return size

    @property
    def cross_layers(self) -> tuple[Cross, ...]:
        """Every attention to an encoder, first to last."""
        return tuple(cross for layer in self.layers for cross in _leaves(layer, Cross))

    def counted_in(self, fmt: CacheFormat) -> Mapping[tuple[Layer, CacheFormat], int]:
        """How many layers are of one kind and stored in one plain format, in the order in which they first appear.

        Raises:
            InputError: the format speaks of layers that there are not.
        """
        found = self._counts.get(fmt)
        if found is None:
            if len(self._counts) >= _MOST_COUNTS:
                self._counts.clear()
            count = len(self.layers)
            fmt.require_layers(count, name=self.name)
            found = Counter((layer, fmt.of_layer(index, count)) for index, layer in enumerate(self.layers))
            self._counts[fmt] = found
        return found

    def _counted(self, fmt: CacheFormat) -> Iterator[tuple[Layer, CacheFormat, int]]:
        for (layer, plain), count in self.counted_in(fmt).items():
            yield layer, plain, count

    @cached_property
    def _counts(self) -> dict[CacheFormat, Mapping[tuple[Layer, CacheFormat], int]]:
        return {}

    @classmethod
    def read(cls, model: str | Path, *, assume: Mapping[str, Any] | None = None) -> "ModelSpec":
        """Read a model from a ``config.json``, a model directory, a ``.gguf`` file or a known name.

        ``assume`` replaces or completes published keys, by Hugging Face's names; the answer is then not exact.

        Raises:
            UnknownModel: nothing of that name.
            UnsupportedModel: it cannot be read exactly; names the key that stopped it.
            BadFile: the file is torn or of another kind.
        """
        from kvist.spec.read import read_model

        return read_model(model, assume=assume)


def _leaves(layer: Layer, kind: type[_Kind]) -> Iterator[_Kind]:
    """The layers of one kind in a layer, itself or among its parts."""
    if isinstance(layer, kind):
        yield layer
    elif isinstance(layer, Parallel):
        for part in layer.parts:
            yield from _leaves(part, kind)


def _with_conv(layer: Layer, codec: str) -> Layer:
    match layer:
        case State():
            return replace(layer, conv_codec=codec)
        case Parallel(parts=parts):
            return replace(layer, parts=tuple(_with_conv(part, codec) for part in parts))
        case _:
            return layer
