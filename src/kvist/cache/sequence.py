"""What the manager hands out: a sequence, and what became of a call."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.cache.arena import Ids
from kvist.cache.checkpoints import Checkpoint
from kvist.cache.leads import Lead
from kvist.cache.places import Transfer
from kvist.cache.prefix import PrefixKey
from kvist.cache.reclaim import Node
from kvist.cache.resumption import Swapped
from kvist.cache.traffic import Moved
from kvist.spec.pruning import PruningPlan

NO_BLOCKS = np.empty(0, np.int64)


class Sequence:
    """What one running sequence holds.

    Attributes:
        key: what must be equal for its prefix to be shared.
        tokens: int32 ``[capacity]``; the first ``size`` are known.
        size: known tokens, prompt and generated.
        prompt_size: tokens known when it began, or when it was last released.
        length: tokens whose keys and values are stored, or were.
        in_flight: tokens beyond them that the step under way stores.
        apart: it takes no part in the tree, as it is computed with the whole arena.
        pruning: when it is pruned, and how far; None: never. No reservation goes past where it is due.
        pruned: tokens of ``length`` that pruning has dropped.
        dropped: the same per group: 0 of those that are not pruned; of others the tokens that are left fill the first
            slots, in the order of their positions.
        tables: per group, int64 ``[blocks]`` from position 0; -1 where a window gave the block back. Of a state one
            block a layer, of an encoder those of its tokens, held from the first reservation to the release.
        given_back: per group, leading blocks given back.
        hit_tokens: prompt tokens that were found in the tree.
        room: tokens for which it has blocks in every group.
        parting: tokens of its prompt that the tree held when it began; a checkpoint is wanted there.
        trailing: the checkpoint that goes along with it, if it has taken one.
        digests: names of its leading blocks in the tiers, as far as they were looked for.
        swapped: what it has in the first tier while it waits to come back.
        pinned: leading tokens that are a pinned run's (:mod:`kvist.cache.pinning`): found in the tree, never computed.
        lead: what stands before it in blocks of its own, to which its tables refer from the first reservation to the
            release (:mod:`kvist.cache.leads`); none of its tokens.
    """

    __slots__ = (
        "apart", "begun", "digests", "dropped", "given_back", "hit_tokens", "in_flight", "key", "lead", "length",
        "node", "parting", "pinned", "prompt_size", "pruned", "pruning", "published", "room", "size", "swapped",
        "tables", "tokens", "trailing",
    )  # fmt: skip

    def __init__(self, tokens: npt.NDArray[np.int32], key: PrefixKey, groups: int) -> None:
        self.key = key
        self.tokens = tokens
        self.size = self.prompt_size = tokens.size
        self.length = 0
        self.in_flight = 0
        self.apart = False
        self.pruning: PruningPlan | None = None
        self.pruned = 0
        self.dropped = [0] * groups
        self.tables: list[Ids] = [NO_BLOCKS] * groups
        self.given_back = [0] * groups
        self.hit_tokens = 0
        self.room = 0
        self.begun = False
        self.node: Node | None = None
        self.published = 0
        self.parting = 0
        self.trailing: Checkpoint | None = None
        self.digests: list[bytes] | None = None
        self.swapped: Swapped | None = None
        self.pinned = 0
        self.lead: Lead | None = None

    @property
    def shared(self) -> bool:
        """Whether the tree is asked for its prefix, and given its blocks: never those of a pruned sequence."""
        return not (self.apart or self.pruned)

    @property
    def first_position(self) -> int:
        """Position of its first token."""
        return 0 if self.lead is None else self.lead.tokens

    @property
    def before(self) -> int:
        """Positions of cartridges before its own tokens."""
        return self.pinned + self.first_position

    @property
    def held_before(self) -> int:
        """Tokens of its lead, while its tables refer to it."""
        return self.first_position if self.begun else 0

    def forget_blocks(self) -> None:
        """It holds nothing any more, and what is known of it is its prompt from now on."""
        groups = len(self.tables)
        self.tables = [NO_BLOCKS] * groups
        self.given_back = [0] * groups
        self.dropped = [0] * groups
        self.node = self.trailing = None
        self.begun = False
        self.length = self.in_flight = self.pruned = self.published = self.parting = self.room = 0
        self.prompt_size = self.size

    def append(self, token: int) -> None:
        """One more token is known; its key and value are not stored yet."""
        size = self.size
        if size == self.tokens.size:
            grown = np.empty(size + max(64, size // 4), np.int32)
            grown[:size] = self.tokens
            self.tokens = grown
        self.tokens[size] = token
        self.size = size + 1

    def known(self) -> npt.NDArray[np.int32]:
        """Prompt and generated tokens."""
        return self.tokens[: self.size]

    def blocks(self, group: int) -> int:
        """Blocks that it holds in a group."""
        return self.tables[group].size - self.given_back[group]


def append_each(sequences: Seq[Sequence], tokens: Seq[int]) -> None:
    """:meth:`Sequence.append` for each, at half the cost."""
    for sequence, token in zip(sequences, tokens, strict=True):
        size, known = sequence.size, sequence.tokens
        if size < known.size:
            known[size] = token
            sequence.size = size + 1
        else:
            sequence.append(token)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content another must have before either is written to."""

    group: int
    source: int
    target: int


Move = BlockCopy | Transfer
"""What is to be copied, in the order in which it was decided, before the arena is written to otherwise."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The outcome of :meth:`CacheManager.reserve`.

    Attributes:
        granted: False means that nothing has changed.
        limit: tokens that the sequence may store now; 0 where not granted.
        hit_tokens: of these, tokens found by this call, in the prefix tree and in the tiers.
        loads: what must be loaded from tiers before the step.
        copies: states with which it goes on, and what goes to tiers or comes from them where these are real; to be
            done, in order, before the step.
    """

    granted: bool
    limit: int = 0
    hit_tokens: int = 0
    loads: tuple[Moved, ...] = ()
    copies: Seq[Move] = ()


@dataclass(frozen=True, slots=True)
class Compaction:
    """What became of one group's blocks when a sequence was pruned: the outcome of :meth:`CacheManager.compact`.

    Attributes:
        group: whose blocks they are.
        source: int64 ``[blocks]``: where the tokens lie, until the next reservation.
        target: int64 ``[fewer blocks]``: where those that are kept belong; some may be among ``source``.
    """

    group: int
    source: Ids
    target: Ids


@dataclass(frozen=True, slots=True)
class Fork:
    """The outcome of :meth:`CacheManager.fork`."""

    sequence: Sequence
    copies: list[Move]
