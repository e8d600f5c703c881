"""What every kind of layer answers of what it remembers (:mod:`kvist.spec.layers`)."""

from dataclasses import dataclass
from typing import ClassVar

from kvist.spec.formats import CacheFormat
from kvist.spec.rates import Rate


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What every kind answers; here the answers of a layer that holds nothing.

    Attributes:
        kind: the name of the kind in answers.
    """

    kind: ClassVar[str] = ""

    def append_bytes(self, fmt: CacheFormat) -> Rate:
        """Bytes that one more token adds while everything grows, indexer included."""
        return 0

    def retained_bytes(self, fmt: CacheFormat) -> Rate:
        """Bytes that one more token adds once every window and chunk is full."""
        return 0

    def indexer_bytes(self, fmt: CacheFormat) -> Rate:
        """The part of :meth:`append_bytes` that is keys of an indexer, which published tables leave out."""
        return 0

    def state_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of a sequence whatever its length."""
        return 0

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Logical bytes of a sequence of ``tokens``, state included: no block rounding, no encoder."""
        return 0

    def cross_bytes_per_encoder_token(self, fmt: CacheFormat) -> int:
        """Bytes of one token of the encoder that the layer attends to."""
        return 0

    def stored_in(self, fmt: CacheFormat) -> "Layer":
        """The same layer with the codec of recurrent states that a format asks for, where it does."""
        return self

    @property
    def stored(self) -> tuple["Layer", ...]:
        """What the layer stores itself, taken apart so that each piece has one lifetime in formats without a tail."""
        return (self,)

    def pieces(self, fmt: CacheFormat) -> tuple[tuple["Layer", CacheFormat], ...]:
        """What a layer of :attr:`stored` stores in a plain format: pieces of one lifetime and one format each."""
        return ((self.stored_in(fmt), fmt.of_single),)
