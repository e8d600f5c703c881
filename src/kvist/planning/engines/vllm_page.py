"""A page: what one layer takes of one block of vLLM's pool, and how many such blocks one sequence needs.

Source: ``vllm/v1/kv_cache_interface.py`` (the specs) and the ``customize_spec`` of the attention backends (packed
content) of 0.32.
"""

from dataclasses import dataclass
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.planning.engines.vllm_settings import ELEMENT_BYTES, PER_TOKEN_HEAD, TURBOQUANT, VllmSettings
from kvist.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Page:
    """One layer's part of a block; equal pages share a group.

    Attributes:
        kind: ``full``, ``window``, ``chunk``, ``state`` or ``cross``.
        block_tokens: tokens of a block; of a state, how far apart two of them are kept.
        content_bytes: of one token, or of a state.
        limit: tokens of the window or chunk, or of the encoder.
        state_blocks: states of one sequence.
        shape: what else must be equal: heads and widths.
        latent: the page holds one latent vector a token, which cannot be padded.
        padded_bytes: of the page with padding, where there is some.
    """

    kind: str
    block_tokens: int
    content_bytes: int
    limit: int | None = None
    state_blocks: int = 0
    shape: tuple[Any, ...] = ()
    latent: bool = False
    padded_bytes: int | None = None

    @property
    def bare_bytes(self) -> int:
        """Bytes without padding."""
        return self.content_bytes if self.kind == "state" else self.content_bytes * self.block_tokens

    @property
    def bytes(self) -> int:
        """Bytes of the page."""
        return self.bare_bytes if self.padded_bytes is None else self.padded_bytes

    def blocks(self, length: int, in_flight: int) -> int:
        """Blocks that vLLM counts for one sequence of ``length`` tokens, ``in_flight`` of them being computed.

        A window may begin inside a block, which takes one more (``max_admission_blocks_per_request``).
        """
        if self.kind == "state":
            return self.state_blocks
        if self.limit is None:
            return -(-length // self.block_tokens)
        if self.kind == "cross":
            return -(-self.limit // self.block_tokens)
        if self.kind == "window":
            return -(-min(self.limit - 1 + in_flight, length) // self.block_tokens) + 1
        return -(-min(self.limit + in_flight, length) // self.block_tokens)


def content_bytes(key_dim: int, value_dim: int, dtype: str, settings: VllmSettings) -> int:
    """Bytes of one token's key and value in one head.

    Raises:
        InputError: this type does not store such widths.
    """
    if dtype in PER_TOKEN_HEAD:
        half = 2 if dtype.startswith("int4") else 1
        # One f32 scale each for key and value (``triton_attn.py``).
        return key_dim // half + value_dim // half + 2 * 4
    if dtype.startswith("nvfp4"):
        # Packed fp4 and one fp8 scale for 16 elements (``nvfp4_kv_cache_full_dim``).
        _require_equal(key_dim, value_dim, dtype)
        return 2 * (key_dim // 2 + key_dim // 16)
    if dtype in TURBOQUANT:
        _require_equal(key_dim, value_dim, dtype)
        return turboquant_slot(key_dim, dtype)
    element = ELEMENT_BYTES[settings.dtype if dtype == "auto" else _plain(dtype)]
    return (key_dim + value_dim) * element


def turboquant_slot(head_dim: int, dtype: str) -> int:
    """Bytes of a TurboQuant slot, key and value of one token and head, rounded up to even.

    An fp8 key is its elements; other keys add 2 bytes of norm, values 4 of scale and zero.
    """
    key_bits, value_bits = TURBOQUANT[dtype]
    key = head_dim if key_bits == 8 else -(-head_dim * key_bits // 8) + 2
    slot = key + -(-head_dim * value_bits // 8) + 4
    return slot + slot % 2


def _require_equal(key_dim: int, value_dim: int, dtype: str) -> None:
    if key_dim != value_dim:
        raise InputError(
            f"set: kv_cache_dtype={dtype} stores keys and values of one width, not {key_dim} and {value_dim}; take "
            f"auto or fp8",
            key="set",
        )


def _plain(dtype: str) -> str:
    if dtype not in ELEMENT_BYTES:
        raise InputError(f"set: kv_cache_dtype={dtype} is for MLA models only; take auto or fp8", key="set")
    return dtype


def shard(heads: int, settings: VllmSettings) -> int:
    """KV heads on one rank: shared where there are enough, else one each (``ModelConfig.get_num_kv_heads``)."""
    ranks = settings.tensor_parallel_size
    if max(heads, ranks) % min(heads, ranks):
        raise InputError(
            f"set: tensor_parallel_size={ranks} and {heads} KV heads do not divide each other, which vLLM refuses",
            key="set",
        )
    return max(1, heads // ranks)


def unsupported(spec: ModelSpec, index: int, what: str) -> UnsupportedModel:
    """The error for a layer that the account does not cover, or vLLM does not run."""
    return UnsupportedModel(
        f"engine: layer {index} of {spec.name} has {what}, which the account of vLLM does not cover; plan it without "
        f"--engine",
        key="engine",
    )
