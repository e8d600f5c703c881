"""Layers that remember tokens: a key and a value, a latent vector or a compressed entry of each."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvist.errors import InputError
from kvist.spec.formats import CacheFormat
from kvist.spec.layer import Layer
from kvist.spec.rates import Rate, spread, total


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The part of sparse attention that picks the tokens to attend to; it stores keys of its own.

    Sources: DeepSeek-V3.2 (one head of 128), MiniMax-M3, and pooled keys in GLM-5.3-Flash.

    Attributes:
        heads: keys of one token; 1 where all heads of the indexer share one.
        dim: width of a key.
        pool: tokens, or compressed entries, that share one set of keys.
    """

    heads: int
    dim: int
    pool: int = 1

    def key_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one set of keys: ``heads x key vector``, in the key codec."""
        return self.heads * fmt.key_bytes(self.dim)

    def append_bytes(self, fmt: CacheFormat) -> Rate:
        """Bytes of one more token or entry."""
        return spread(self.key_bytes(fmt), self.pool)

    def bytes(self, held: int, fmt: CacheFormat) -> int:
        """Bytes for ``held`` tokens or entries; a pool has keys once it is full."""
        return held // self.pool * self.key_bytes(fmt)


@dataclass(frozen=True, kw_only=True)
class Attention(Layer):
    """Softmax attention that keeps a key and a value for each token and KV head (MHA, GQA and MQA).

    Attributes:
        kv_heads: heads that are stored; queries may share them.
        key_dim: width of a key.
        value_dim: width of a value.
        window: a query at position p sees the keys at positions > p - window; None sees all.
        chunk: a query at position p sees the keys from p // chunk x chunk on (Llama 4); None sees all.
        indexer: of sparse attention, which keeps every token (MiniMax-M3).
        sealed: this is the part of a layer that holds whole runs of so many tokens, of which a query at position p sees
            those before p // sealed x sealed; the tail has the others.
        tail: this is the part that holds the tokens from there on, less than so many between steps.
        lead: this is the part that holds what stands before sequences, of which every query sees all.
    """

    kind: ClassVar[str] = "attention"

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    indexer: Indexer | None = None
    sealed: int | None = None
    tail: int | None = None
    lead: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise InputError(
                f"window: {self.window} and chunk: {self.chunk} are both given; a layer has one of them", key="window"
            )

    @property
    def endless(self) -> bool:
        """Whether a query sees all tokens, in this one place."""
        parts = (self.window, self.chunk, self.indexer, self.sealed, self.tail)
        return not self.lead and all(limit is None for limit in parts)

    def pieces(self, fmt: CacheFormat) -> tuple[tuple[Layer, CacheFormat], ...]:
        """Sealed runs and a tail, in formats that have one, of layers that keep every token."""
        if not fmt.tail:
            return ((self, fmt),)
        if not self.endless:
            return ((self, fmt.of_single),)
        return ((replace(self, sealed=fmt.tail), fmt.of_sealed), (replace(self, tail=fmt.tail), fmt.of_tail))

    def token_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one token's keys and values: ``kv_heads x (key vector + value vector)``."""
        return self.kv_heads * (fmt.key_bytes(self.key_dim) + fmt.value_bytes(self.value_dim))

    def append_bytes(self, fmt: CacheFormat) -> Rate:
        """``kv_heads x (key vector + value vector)``, and the indexer's keys."""
        return self.token_bytes(fmt) + self.indexer_bytes(fmt)

    def retained_bytes(self, fmt: CacheFormat) -> Rate:
        """Nothing with a window or chunk, which has given back as many by then, nor of a tail."""
        return self.append_bytes(fmt) if self.window is None and self.chunk is None and self.tail is None else 0

    def indexer_bytes(self, fmt: CacheFormat) -> Rate:
        """Bytes of a token's indexer keys."""
        return self.indexer.append_bytes(fmt) if self.indexer else 0

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Bytes of a sequence of ``tokens``; a window or chunk holds ``min(tokens, window)`` of them.

        In formats with a tail whole runs of ``fmt.tail`` tokens are sealed, and the rest is in the tail.
        """
        if fmt.tail and self.endless:
            return sum(piece.bytes(tokens, plain) for piece, plain in self.pieces(fmt))
        held = held_tokens(tokens, self.window, self.chunk)
        if self.sealed is not None or self.tail is not None:
            rest = tokens % (self.sealed or self.tail or 1)
            held = rest if self.tail is not None else tokens - rest
        return held * self.token_bytes(fmt) + (self.indexer.bytes(held, fmt) if self.indexer else 0)


@dataclass(frozen=True, kw_only=True)
class Latent(Layer):
    """Attention over one latent vector a token (MLA), stored once in the key codec for keys, values and all heads.

    Source: DeepSeek-V2; a token costs ``rank + rope_dim`` elements, 576 in DeepSeek-V3.

    Attributes:
        rank: width of the latent.
        rope_dim: width of the rotary key beside it, shared by all heads.
        window: as in :class:`Attention`.
        indexer: of sparse attention.
    """

    kind: ClassVar[str] = "latent"

    rank: int
    rope_dim: int
    window: int | None = None
    indexer: Indexer | None = None

    def token_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one token's vector: ``rank + rope_dim`` elements; the latter in bf16 beside a latent in fp8."""
        return fmt.latent_bytes(self.rank, self.rope_dim)

    def append_bytes(self, fmt: CacheFormat) -> Rate:
        """The vector, and the indexer's keys."""
        return self.token_bytes(fmt) + self.indexer_bytes(fmt)

    def retained_bytes(self, fmt: CacheFormat) -> Rate:
        """Nothing with a window."""
        return self.append_bytes(fmt) if self.window is None else 0

    def indexer_bytes(self, fmt: CacheFormat) -> Rate:
        """Bytes of a token's indexer keys."""
        return self.indexer.append_bytes(fmt) if self.indexer else 0

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Bytes of a sequence of ``tokens``; a window holds ``min(tokens, window)`` of them."""
        held = held_tokens(tokens, self.window)
        return held * self.token_bytes(fmt) + (self.indexer.bytes(held, fmt) if self.indexer else 0)


@dataclass(frozen=True, kw_only=True)
class Compressed(Layer):
    """Attention over compressed entries, one vector for ``ratio`` tokens, and a window of single tokens.

    Source: DeepSeek-V4; keys and values are one vector, in the key codec. An entry exists once its ``ratio`` tokens
    are there. What the compressor keeps of a group that is not full yet is an engine's business and not counted.

    Attributes:
        rank: elements of a vector without the rotary ones.
        rope_dim: rotary elements of it.
        ratio: tokens of one entry.
        window: single tokens kept beside the entries; None where the entries are all.
        indexer: with keys for each entry.
    """

    kind: ClassVar[str] = "compressed"

    rank: int
    rope_dim: int
    ratio: int
    window: int | None = None
    indexer: Indexer | None = None

    def vector_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one vector, of a token in the window or of an entry."""
        return fmt.latent_bytes(self.rank, self.rope_dim)

    def append_bytes(self, fmt: CacheFormat) -> Rate:
        """A vector of the window, and one entry's bytes spread over its ``ratio`` tokens."""
        single = 0 if self.window is None else self.vector_bytes(fmt)
        return total((single, self.retained_bytes(fmt)))

    def retained_bytes(self, fmt: CacheFormat) -> Rate:
        """One entry's bytes spread over its ``ratio`` tokens."""
        return total((spread(self.vector_bytes(fmt), self.ratio), self.indexer_bytes(fmt)))

    def indexer_bytes(self, fmt: CacheFormat) -> Rate:
        """One entry's indexer keys spread over its ``ratio`` tokens."""
        return spread(self.indexer.key_bytes(fmt), self.ratio * self.indexer.pool) if self.indexer else 0

    def entries_bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Bytes of the whole entries of ``tokens``."""
        entries = tokens // self.ratio
        return entries * self.vector_bytes(fmt) + (self.indexer.bytes(entries, fmt) if self.indexer else 0)

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """The window's ``min(tokens, window)`` vectors, and whole entries."""
        single = 0 if self.window is None else min(tokens, self.window)
        return single * self.vector_bytes(fmt) + self.entries_bytes(tokens, fmt)

    @property
    def stored(self) -> tuple[Layer, ...]:
        """The window's vectors, which are given back, and the entries, which stay."""
        if self.window is None:
            return (self,)
        return (
            Latent(rank=self.rank, rope_dim=self.rope_dim, window=self.window),
            replace(self, window=None),
        )


@dataclass(frozen=True, kw_only=True)
class Cross(Layer):
    """Attention to the output of an encoder, whose keys and values are kept for each of the encoder's tokens.

    Attributes:
        kv_heads: heads that are stored.
        key_dim: width of a key.
        value_dim: width of a value.
        encoder_tokens: where the encoder's length is fixed (Whisper: 1,500).
    """

    kind: ClassVar[str] = "cross"

    kv_heads: int
    key_dim: int
    value_dim: int
    encoder_tokens: int | None = None

    def cross_bytes_per_encoder_token(self, fmt: CacheFormat) -> int:
        """``kv_heads x (key vector + value vector)``."""
        return self.kv_heads * (fmt.key_bytes(self.key_dim) + fmt.value_bytes(self.value_dim))


def held_tokens(tokens: int, window: int | None, chunk: int | None = None) -> int:
    """Tokens of a sequence that a layer holds: all, or those of its window or chunk."""
    return min([tokens, *(limit for limit in (window, chunk) if limit is not None)])
