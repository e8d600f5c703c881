"""What one layer remembers of a sequence, and in how many bytes.

::

    Attention     a key and a value for each token and KV head; all of them, a window or a chunk of them
    Latent        one vector a token that all heads share (MLA), with the key of a sparse-attention indexer or not
    Compressed    one vector for each ``ratio`` tokens, beside a window of single ones
    State         fixed bytes whatever the length: convolution columns and a recurrent state, in types of their own
    Shared        reads what another layer has stored
    Nothing       holds nothing: feed-forward layers and layers that were cut away
    Cross         keys and values of an encoder's tokens, whatever the length of the sequence itself
    Parallel      several of these in one layer

Layers are frozen values: two layers that compare equal share a lifetime rule and a block shape, and so one
group of the cache. Every kind answers the same questions, in bytes of a format: :meth:`Layer.append_bytes`,
:meth:`Layer.retained_bytes`, :meth:`Layer.state_bytes`, :meth:`Layer.bytes` and, apart from these,
:meth:`Layer.cross_bytes_per_encoder_token`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvist.errors import InputError
from kvist.spec.attention import Attention, Compressed, Cross, Indexer, Latent, held_tokens
from kvist.spec.formats import CacheFormat, codec_named
from kvist.spec.layer import Layer
from kvist.spec.rates import Rate, total

__all__ = [
    "Attention",
    "Compressed",
    "Cross",
    "Indexer",
    "Latent",
    "Layer",
    "Nothing",
    "Parallel",
    "Shared",
    "State",
    "held_tokens",
]


@dataclass(frozen=True, kw_only=True)
class State(Layer):
    """A recurrent layer: fixed bytes a sequence, in types of its own whatever the codecs of keys and values.

    The recurrent part alone may be stored otherwise: in :attr:`CacheFormat.state`, where that is said.

    Attributes:
        name: the mechanism, such as ``mamba``, ``mamba2``, ``gated-delta``, ``kda``, ``lightning``, ``rg-lru``,
            ``short-conv``, ``rwkv``.
        conv_elements: last inputs of a short convolution, kernel - 1 columns of its channels (or what a layer keeps
            of the last token, such as RWKV's token shift); 0 where there is none.
        conv_columns: columns that these are, so that an engine that keeps ``kernel`` of them can be accounted for.
        conv_codec: their codec.
        state_elements: of the recurrent state.
        state_codec: its codec.
    """

    kind: ClassVar[str] = "state"

    name: str
    conv_elements: int = 0
    conv_codec: str = "bf16"
    state_elements: int = 0
    state_codec: str = "f32"
    conv_columns: int = 1

    def __post_init__(self) -> None:
        for key in ("conv_codec", "state_codec"):
            codec_named(getattr(self, key), key=key)
        if self.conv_elements < 0 or self.state_elements < 0 or not self.conv_elements + self.state_elements:
            raise InputError(
                f"{self.name}: a state of 0 bytes, {self.conv_elements} + {self.state_elements} elements; write "
                f"Nothing() for a layer without one",
                key="state_elements",
            )

    def conv_bytes(self) -> int:
        """Bytes of the convolution's columns."""
        return codec_named(self.conv_codec).vector_bytes(self.conv_elements)

    def recurrent_bytes(self) -> int:
        """Bytes of the recurrent state."""
        return codec_named(self.state_codec).vector_bytes(self.state_elements)

    def stored_in(self, fmt: CacheFormat) -> "State":
        """The same layer with the codec of its recurrent part that the format asks for."""
        return self if fmt.state is None or not self.state_elements else replace(self, state_codec=fmt.state)

    def state_bytes(self, fmt: CacheFormat) -> int:
        """``conv_elements`` and ``state_elements``, each in its own codec or, of the latter, that of the format."""
        return self.conv_bytes() + self.stored_in(fmt).recurrent_bytes()

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """The state, whatever the length."""
        return self.state_bytes(fmt)


@dataclass(frozen=True, kw_only=True)
class Shared(Layer):
    """Reads the keys and values that another layer stores, and stores none.

    Attributes:
        source: index of that layer in the model.
    """

    kind: ClassVar[str] = "shared"

    source: int

    @property
    def stored(self) -> tuple[Layer, ...]:
        """Nothing of its own."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Nothing(Layer):
    """Holds nothing of a sequence: a feed-forward layer, or attention that was cut away."""

    kind: ClassVar[str] = "nothing"

    @property
    def stored(self) -> tuple[Layer, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Parallel(Layer):
    """A layer that holds several things: attention beside a state (Falcon-H1), or before cross-attention (BART).

    Attributes:
        parts: layers of other kinds, in the order in which the network has them.
    """

    kind: ClassVar[str] = "parallel"

    parts: tuple[Layer, ...]

    def append_bytes(self, fmt: CacheFormat) -> Rate:
        """Of all parts."""
        return total(part.append_bytes(fmt) for part in self.parts)

    def retained_bytes(self, fmt: CacheFormat) -> Rate:
        """Of all parts."""
        return total(part.retained_bytes(fmt) for part in self.parts)

    def indexer_bytes(self, fmt: CacheFormat) -> Rate:
        """Of all parts."""
        return total(part.indexer_bytes(fmt) for part in self.parts)

    def state_bytes(self, fmt: CacheFormat) -> int:
        """Of all parts."""
        return sum(part.state_bytes(fmt) for part in self.parts)

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Of all parts."""
        return sum(part.bytes(tokens, fmt) for part in self.parts)

    def cross_bytes_per_encoder_token(self, fmt: CacheFormat) -> int:
        """Of all parts."""
        return sum(part.cross_bytes_per_encoder_token(fmt) for part in self.parts)

    def stored_in(self, fmt: CacheFormat) -> "Parallel":
        """All parts so."""
        return self if fmt.state is None else replace(self, parts=tuple(part.stored_in(fmt) for part in self.parts))

    @property
    def stored(self) -> tuple[Layer, ...]:
        """What all parts store."""
        return tuple(layer for part in self.parts for layer in part.stored)
