"""Checkpoints: copies of a sequence's states, kept in the prefix tree where another may go on from them.

A running state is overwritten by every token, so that a prefix of a model with states can only be reused where a copy
of them was kept. A checkpoint is one such copy: the blocks of every state group at the end of one node of the tree::

    root ── "You are a helpful …" ─●─ "What is …" ────●          ● a checkpoint
                                   └─ "Translate …" ──●──○       ○ the one that goes along with a sequence

They are taken, where memory allows without taking any from a running sequence,

- at the last block boundary that a repeat of the prompt could begin at;
- where a prompt leaves what the tree has of it, at a block boundary: two prompts share that much, and the third
  will find it there (after Marconi, arXiv 2411.19379);
- every ``checkpoint_every`` tokens, where that is asked for;
- at each block boundary of an answer, in the place of the answer's previous one: it ends where the next turn of a
  conversation begins.

A step must end at each of them, and :attr:`Reservation.limit` is cut accordingly. Nobody refers to the blocks of a
checkpoint: they are *cached* in the arena's account, and so cost running sequences nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvist.cache.arena import Arena, Ids
from kvist.cache.groups import Group
from kvist.cache.reclaim import Node


class Checkpoint:
    """States at the end of a node.

    Attributes:
        node: whose end it is; None once it is forgotten.
        blocks: per state group, int64 ``[layers of the group]``.
        moves: it goes along with the sequence that took it, because nobody else has used it.
        used: the tree's clock when it was last taken, used, or left by a sequence.
    """

    __slots__ = ("blocks", "moves", "node", "used")

    def __init__(self, node: Node, blocks: list[Ids], *, moves: bool) -> None:
        self.node: Node | None = node
        self.blocks = blocks
        self.moves = moves
        self.used = 0


class Checkpoints:
    """Those of a tree, and the order in which they go: least recently used first.

    Attributes:
        groups: indices of the state groups.
        wanted: per group of the cache, blocks of one checkpoint.
        most: how many there may be; None where memory alone bounds them.
    """

    def __init__(self, groups: Sequence[Group], arena: Arena) -> None:
        self.groups = [index for index, group in enumerate(groups) if group.lifetime == "state"]
        self.wanted = [(group.fixed_blocks or 0) if group.lifetime == "state" else 0 for group in groups]
        self.most: int | None = None
        self._arena = arena
        self._order: OrderedDict[Checkpoint, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def put(self, node: Node, blocks: list[Ids], clock: int, *, moves: bool) -> Checkpoint:
        """Keep ``blocks``, which the caller has taken or moved, as the checkpoint at the end of a node without one."""
        kept = Checkpoint(node, blocks, moves=moves)
        node.checkpoint = kept
        self.use(kept, clock)
        return kept

    def use(self, checkpoint: Checkpoint, clock: int) -> None:
        """It is the last to go now."""
        checkpoint.used = clock
        self._order[checkpoint] = None
        self._order.move_to_end(checkpoint)

    def take(self) -> list[Ids]:
        """Take free blocks for one, of which the caller has made sure."""
        taken = []
        for group in self.groups:
            ids = self._arena.take(group, self.wanted[group])
            self._arena.keep(group, ids)
            self._arena.drop(group, ids)
            taken.append(ids)
        return taken

    def strip(self, checkpoint: Checkpoint) -> list[Ids]:
        """Forget a checkpoint, and hand over its blocks, still kept."""
        assert checkpoint.node is not None
        checkpoint.node.checkpoint = None
        checkpoint.node = None
        del self._order[checkpoint]
        return checkpoint.blocks

    def give_back(self, blocks: list[Ids]) -> None:
        """Let kept blocks go; those that a sequence has taken over stay with it."""
        for group, ids in zip(self.groups, blocks, strict=True):
            self._arena.forget(group, ids)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Let a checkpoint go with its blocks."""
        self.give_back(self.strip(checkpoint))

    def oldest(self) -> Checkpoint | None:
        """The least recently used one; None where there is none that could go now."""
        for checkpoint in self._order:
            # One that a sequence is about to copy is held for that long.
            if not self._arena.refs[self.groups[0]][checkpoint.blocks[0][0]]:
                return checkpoint
        return None
