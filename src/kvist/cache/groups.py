"""Layer groups: layers with the same lifetime rule and the same block shape.

A block of a group holds ``block_tokens`` tokens of all its layers. Inside a block the bytes lie so::

    block = layer 0 keys | layer 0 values | layer 1 keys | layer 1 values | …
    keys  = kv head 0: token 0, token 1, … | kv head 1: … | …        (one vector of key_dim a token)
    values likewise

so that one head of one layer is one contiguous run of ``block_tokens`` vectors.

Groups answer two questions: which of my blocks are dead at this position, and how much of this prefix can I
reuse.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec

DEFAULT_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share block tables.

    Attributes:
        name: ``full`` or ``window-512``; unique within a cache.
        layer: the shape and lifetime rule that all of them have.
        layers: their indices in the model.
        block_tokens: tokens of one block.
        format: how keys and values are stored.
    """

    name: str
    layer: Attention
    layers: tuple[int, ...]
    block_tokens: int
    format: CacheFormat

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers of the group."""
        return len(self.layers) * self.layer.token_bytes(self.format)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block; scales are inside."""
        return self.block_tokens * self.token_bytes

    @property
    def head_run_bytes(self) -> tuple[int, int]:
        """Bytes of one head's run of a block for keys and for values: the unit in which kernels read."""
        return (
            self.block_tokens * self.format.key_codec.vector_bytes(self.layer.key_dim),
            self.block_tokens * self.format.value_codec.vector_bytes(self.layer.value_dim),
        )

    def first_live_block(self, length: int) -> int:
        """First block that the query at position ``length`` still sees; all blocks before it are dead."""
        window = self.layer.window
        if window is None or length < window:
            return 0
        return (length - window + 1) // self.block_tokens

    def live_blocks(self, length: int, in_flight: int = 0) -> int:
        """Blocks held by a sequence of which ``length`` tokens are stored and ``in_flight`` more are being."""
        end = -(-(length + in_flight) // self.block_tokens)
        return end - min(self.first_live_block(length), end)

    def peak_blocks(self, length: int, chunk: int) -> int:
        """Most blocks held on the way to ``length`` tokens when at most ``chunk`` of them are in flight at once."""
        all_blocks = -(-length // self.block_tokens)
        if self.layer.window is None:
            return all_blocks
        span = self.layer.window - 1 + min(chunk, length)
        return min(all_blocks, (span + self.block_tokens - 2) // self.block_tokens + 1)

    def reusable_blocks(self, present: npt.NDArray[np.bool_]) -> int:
        """Longest prefix, in blocks, after which a sequence can go on with what is ``present``.

        A full group needs every block; a window needs those that its next query sees.
        """
        missing = np.flatnonzero(~present)
        if self.layer.window is None:
            return int(missing[0]) if missing.size else len(present)
        needed = -(-(self.layer.window - 1) // self.block_tokens)
        end = len(present)
        for gap in missing[::-1].tolist():
            if end - 1 - gap >= needed:
                return end
            end = gap
        return end


def groups_of(spec: ModelSpec, fmt: CacheFormat, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> tuple[Group, ...]:
    """Gather a model's layers into groups, in the order in which their first layers appear.

    Raises:
        InputError: ``block_tokens`` is not a whole number of tokens, or no vector can be stored so.
    """
    if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise InputError(
            f"block_tokens: {block_tokens!r}; a whole number of tokens, 1 to {MAX_BLOCK_TOKENS}", key="block_tokens"
        )
    members: dict[Attention, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        members.setdefault(layer, []).append(index)
    names = _names(members)
    return tuple(
        Group(name=name, layer=layer, layers=tuple(indices), block_tokens=block_tokens, format=fmt)
        for name, (layer, indices) in zip(names, members.items(), strict=True)
    )


def _names(layers: Iterable[Attention]) -> list[str]:
    names: list[str] = []
    for layer in layers:
        name = "full" if layer.window is None else f"window-{layer.window}"
        twins = sum(1 for other in names if other == name or other.startswith(f"{name}."))
        names.append(f"{name}.{twins}" if twins else name)
    return names
