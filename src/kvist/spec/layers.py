"""What one layer remembers of a sequence, and in how many bytes.

Layers are frozen values: two layers that compare equal share a lifetime rule and a block shape, and so one
group of the cache.
"""

from dataclasses import dataclass

from kvist.spec.formats import CacheFormat


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax attention that keeps a key and a value for each token and KV head (MHA, GQA and MQA).

    Attributes:
        kv_heads: heads that are stored; queries may share them.
        key_dim: width of a key.
        value_dim: width of a value.
        window: a query at position p sees the keys at positions > p - window; None sees all.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def token_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one token: ``kv_heads x (key vector + value vector)``."""
        return self.kv_heads * (fmt.key_codec.vector_bytes(self.key_dim) + fmt.value_codec.vector_bytes(self.value_dim))

    def bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Bytes of a sequence of ``tokens``; a window holds ``min(tokens, window)`` of them."""
        held = tokens if self.window is None else min(tokens, self.window)
        return held * self.token_bytes(fmt)
