"""Layer groups: pieces of layers with the same lifetime rule and the same block shape.

A block of a group holds ``block_tokens`` tokens of all its layers; a block of states, which are large, holds the whole
state of one layer, so that slabs stay small. Inside a block of attention the bytes lie so::

    block = layer 0 keys | layer 0 values | layer 1 keys | layer 1 values | …
    keys  = kv head 0: token 0, token 1, … | kv head 1: … | …        (one vector of key_dim a token)
    values likewise

so that one head of one layer is one contiguous run of ``block_tokens`` vectors. Of codecs with scales, codes come first
in a run and scales behind, and values lie transposed (:mod:`kvist.store.codecs`).

============  ==========================================  ============================================
lifetime      blocks of a sequence                        of a stored prefix, what can be reused
============  ==========================================  ============================================
full          of all tokens                               up to the first block that is gone
window        of those that its next query sees           up to a point whose window is all there
chunk         of those since the chunk's first token      up to a point whose chunk, so far, is there
compressed    of whole entries, ``ratio`` tokens each     as full
sealed        of whole runs, ``sealed`` tokens each       as full
tail          of the tokens behind the last whole run     all: it is empty where runs are shared
lead          none: those that it refers to were there    all: what stands before it is shared already
state         one a layer, whatever the length            up to a point where a checkpoint was taken
cross         of the encoder's tokens                     none: they are not the sequence's own
============  ==========================================  ============================================

Block ``i`` of a state group's table is the state of ``layers[i]``; an encoder's lie in the order of its tokens.

Groups answer two questions: which of my blocks are dead at this position, and how much of this prefix can I
reuse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING, Literal

from kvist.errors import UnsupportedModel
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Layer, State

if TYPE_CHECKING:
    # Planning counts blocks without NumPy, which takes longer to load than all the rest.
    import numpy as np
    import numpy.typing as npt

ENDLESS = 1 << 62
"""More tokens than any sequence has: what fixed blocks are enough for."""

Lifetime = Literal["full", "window", "chunk", "compressed", "sealed", "tail", "lead", "state", "cross"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share block tables.

    Attributes:
        name: ``full``, ``window-512``, ``latent``, ``state-mamba2`` …, with the format behind it where that is not the
            cache's own (``full-bf16``); unique within a cache.
        layer: the shape and lifetime rule that all of them have; one piece of :attr:`Layer.stored`.
        layers: their indices in the model.
        block_tokens: tokens of one block; whole entries and pools, so that it may be larger than that of other groups.
            A state's block holds any number of them.
        format: how keys and values are stored: plain, the same for all of them.
    """

    name: str
    layer: Layer
    layers: tuple[int, ...]
    block_tokens: int
    format: CacheFormat

    @cached_property
    def lifetime(self) -> Lifetime:
        """The rule by which blocks die."""
        match self.layer:
            case Attention(sealed=int()):
                return "sealed"
            case Attention(tail=int()):
                return "tail"
            case Attention(lead=True):
                return "lead"
            case Attention(chunk=int()):
                return "chunk"
            case Attention(window=int()) | Latent(window=int()):
                return "window"
            case Compressed():
                return "compressed"
            case State():
                return "state"
            case Cross():
                return "cross"
            case _:
                return "full"

    @cached_property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included, where that is the rule."""
        return self.layer.window if isinstance(self.layer, Attention | Latent) else None

    @cached_property
    def chunk(self) -> int | None:
        """Tokens of a chunk, before whose first one none of its queries sees anything here, where that is the rule."""
        return self.layer.chunk or self.layer.tail if isinstance(self.layer, Attention) else None

    @property
    def gives_back(self) -> bool:
        """Whether blocks die before their sequence does."""
        return self.lifetime in ("window", "chunk", "tail")

    @property
    def keeps_all(self) -> bool:
        """Whether every token stays here: all of them from the first on, or once their run is sealed."""
        return self.lifetime in ("full", "sealed")

    @property
    def prunable(self) -> bool:
        """Whether tokens of a running sequence may be dropped: it keeps keys and values of all of them."""
        return self.lifetime == "full" and isinstance(self.layer, Attention) and self.layer.indexer is None

    @cached_property
    def fixed_blocks(self) -> int | None:
        """Blocks of every sequence, whatever its length; None where blocks are those of its tokens."""
        match self.layer:
            case State():
                return len(self.layers)
            case Cross(encoder_tokens=int(encoder)):
                return -(-encoder // self.block_tokens)
            case Attention(lead=True):
                return 0
            case _:
                return None

    @property
    def run_block_tokens(self) -> int:
        """Tokens of a block of a run; where blocks are not those of tokens, so many that no run fills any."""
        return self.block_tokens if self.fixed_blocks is None else ENDLESS

    @property
    def attention(self) -> Attention:
        """The layer, where it is plain attention: what the engine computes.

        Raises:
            UnsupportedModel: it is of another kind.
        """
        if not isinstance(self.layer, Attention) or self.layer.indexer is not None:
            raise UnsupportedModel(
                f"{self.name}: the engine runs attention over all tokens, a window or chunks; "
                f"`kvist plan` counts this kind too"
            )
        return self.layer

    @property
    def latent(self) -> Latent:
        """The layer, where it is a latent: what the engine computes.

        Raises:
            UnsupportedModel: it is of another kind.
        """
        if not isinstance(self.layer, Latent) or self.layer.window is not None or self.layer.indexer is not None:
            raise UnsupportedModel(
                f"{self.name}: the engine runs latents over all tokens; `kvist plan` counts this kind too"
            )
        return self.layer

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers of the group; amortised, and rounded down, where tokens share bytes."""
        return self.block_bytes // self.block_tokens

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block; scales are inside."""
        match self.layer:
            case State():
                return self.layer.state_bytes(self.format)
            case Cross():
                one = self.block_tokens * self.layer.cross_bytes_per_encoder_token(self.format)
            case _:
                # A block holds whole entries and pools, so that their fractions add up.
                one = int(self.block_tokens * self.layer.append_bytes(self.format))
        return len(self.layers) * one

    @property
    def head_run_bytes(self) -> tuple[int, int]:
        """Bytes of one head's run of a block for keys and for values: the unit in which kernels read."""
        return (
            self.block_tokens * self.format.key_bytes(self.attention.key_dim),
            self.block_tokens * self.format.value_bytes(self.attention.value_dim),
        )

    def first_live_block(self, length: int) -> int:
        """First block that the query at position ``length`` still sees; all blocks before it are dead."""
        if self.chunk is not None:
            return length // self.chunk * self.chunk // self.block_tokens
        window = self.window
        if window is None or length < window:
            return 0
        return (length - window + 1) // self.block_tokens

    def all_blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` fill, the last one maybe in part, if none die; of compressed layers, their entries."""
        fixed = self.fixed_blocks
        if fixed is not None:
            return fixed if tokens else 0
        return -(-self.whole_tokens(tokens) // self.block_tokens)

    def whole_tokens(self, tokens: int) -> int:
        """Of ``tokens``, those that are stored: whole entries of compressed layers, whole runs of sealed ones."""
        return tokens - tokens % self._entry_tokens

    def room(self, blocks: int) -> int:
        """Most tokens of a sequence for which so many blocks, dead ones included, are enough."""
        if self.fixed_blocks is not None:
            return ENDLESS if blocks or self.lifetime == "lead" else 0
        return blocks * self.block_tokens + self._entry_tokens - 1

    def unfilled_bytes(self, blocks: int, tokens: int) -> int:
        """Bytes of a sequence's ``blocks``, dead ones included, that ``tokens`` leave empty."""
        match self.layer:
            case State() | Attention(lead=True):
                return 0
            case Cross(encoder_tokens=int(encoder)):
                tokens = encoder
        empty = blocks * self.block_tokens - self.whole_tokens(tokens)
        return max(0, empty) * self.block_bytes // self.block_tokens

    def live_blocks(self, length: int, in_flight: int = 0) -> int:
        """Blocks held by a sequence of which ``length`` tokens are stored and ``in_flight`` more are being."""
        end = self.all_blocks(length + in_flight)
        return end - min(self.first_live_block(length), end)

    def peak_blocks(self, length: int, chunk: int) -> int:
        """Most blocks held on the way to ``length`` tokens when at most ``chunk`` of them are in flight at once."""
        all_blocks = self.all_blocks(length)
        block, flight = self.block_tokens, min(chunk, length)
        if self.window is not None:
            return min(all_blocks, (self.window - 1 + flight + block - 2) // block + 1)
        if self.chunk is not None:
            # The last token of a chunk is still to come; chunks begin at multiples of gcd(chunk, block) into a block.
            span = self.chunk - 1 + flight
            return min(all_blocks, -(-(block - gcd(self.chunk, block) + span) // block))
        return all_blocks

    def reusable_blocks(self, present: "npt.NDArray[np.bool_]") -> int:
        """Longest prefix, in blocks, after which a sequence can go on with what is ``present``.

        A full group needs every block; a window or chunk those that its next query sees; a state must have been kept
        at the very end, and what is ``present`` of it are the blocks of tokens at whose end it was. An encoder's tokens
        cannot be found in blocks of the sequence's at all, and what stands before a sequence need not be.
        """
        if self.lifetime == "lead":
            return len(present)
        if self.fixed_blocks is not None:
            (kept,) = present.nonzero()
            return int(kept[-1]) + 1 if kept.size and self.lifetime == "state" else 0
        (missing,) = (~present).nonzero()
        if self.chunk is not None:
            return self._reusable_chunk(present, self.chunk)
        if self.window is None:
            return int(missing[0]) if missing.size else len(present)
        needed = -(-(self.window - 1) // self.block_tokens)
        end = len(present)
        for gap in missing[::-1].tolist():
            if end - 1 - gap >= needed:
                return end
            end = gap
        return end

    def _reusable_chunk(self, present: "npt.NDArray[np.bool_]", chunk: int) -> int:
        import numpy as np

        ends = np.arange(len(present) + 1)
        last_gap = np.maximum.accumulate(np.concatenate(([-1], np.where(present, -1, ends[:-1]))))
        needed_from = ends * self.block_tokens // chunk * chunk // self.block_tokens
        return int(ends[last_gap < needed_from].max(initial=0))

    @cached_property
    def _entry_tokens(self) -> int:
        """Tokens that are stored together, once all are there."""
        match self.layer:
            case Compressed(ratio=int(entry)) | Attention(sealed=int(entry)):
                return entry
            case _:
                return 1


def unit_of(groups: Sequence[Group]) -> int:
    """Tokens of which every shared prefix is a multiple: whole blocks of each group that stores tokens."""
    paged = [group.block_tokens for group in groups if group.fixed_blocks is None]
    return lcm(*paged) if paged else groups[0].block_tokens


def cannot_prune(groups: Iterable[Group]) -> str:
    """Why tokens of a sequence cannot be dropped from these groups, in words; empty where they can."""
    groups = tuple(groups)
    if any(group.lifetime == "sealed" for group in groups):
        return "runs that are sealed stay whole; leave out the tail"
    if not any(group.prunable for group in groups):
        names = ", ".join(group.name for group in groups)
        return f"{names} hold no token for good; leave evict out"
    return ""
