"""When a sequence's states are checkpointed, and how it goes on from a checkpoint: :mod:`kvist.cache.checkpoints`."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from kvist.cache.arena import Ids
from kvist.cache.checkpoints import Checkpoint
from kvist.cache.sequence import NO_BLOCKS, BlockCopy, Sequence

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


class Checkpointing:
    """The part of a :class:`CacheManager` that only models with states have.

    Args:
        manager: whose tree keeps them.
        every: tokens after which they are taken, beside the points that :mod:`kvist.cache.checkpoints` names; rounded
            up to the unit.
    """

    def __init__(self, manager: "CacheManager", every: int | None) -> None:
        self._manager = manager
        self._groups = manager.tree.checkpoints.groups
        unit = manager.unit_tokens
        self._every = -(-every // unit) * unit if every else None

    def resume(self, sequence: Sequence, saved: Checkpoint) -> None:
        """Let a sequence go on from a checkpoint: with copies in its own blocks, or with the blocks themselves."""
        checkpoints = self._manager.tree.checkpoints
        if not sequence.tables[self._groups[0]].size:
            blocks = checkpoints.strip(saved)
            for group, ids in zip(self._groups, blocks, strict=True):
                sequence.tables[group] = ids
            checkpoints.give_back(blocks)
            return
        self._pass_by(saved)
        for group, ids in zip(self._groups, saved.blocks, strict=True):
            self._manager.arena.drop(group, ids)
        self._copy(saved.blocks, [sequence.tables[group] for group in self._groups])

    def _pass_by(self, checkpoint: Checkpoint) -> None:
        """A second sequence has come to it: it belongs to neither, and others may come."""
        checkpoint.moves = False
        self._manager.tree.checkpoints.use(checkpoint, self._manager.tree.clock)

    def _copy(self, sources: Seq[Ids], targets: Seq[Ids]) -> None:
        """All blocks of the state groups."""
        self._manager.moves += [
            BlockCopy(group, source, target)
            for group, olds, news in zip(self._groups, sources, targets, strict=True)
            for source, target in zip(olds.tolist(), news.tolist(), strict=True)
        ]

    def stop(self, sequence: Sequence, stored: int, limit: int, parting: int) -> int:
        """Cut ``limit`` where the next checkpoint of a prompt is due."""
        stop = self._last_stop(sequence)
        if stored < parting < stop:
            stop = parting
        if self._every:
            stop = min(stop, (stored // self._every + 1) * self._every)
        return stop if stored < stop < limit else limit

    def _last_stop(self, sequence: Sequence) -> int:
        """The last boundary at which a repeat of a prompt can begin: it computes one token at least."""
        return (sequence.prompt_size - 1) // self._manager.unit_tokens * self._manager.unit_tokens

    def is_due(self, sequence: Sequence, length: int) -> bool:
        """Whether a checkpoint is due at ``length``: at the points of :meth:`stop`, and along an answer."""
        return length % self._manager.unit_tokens == 0 and (
            length >= self._last_stop(sequence)
            or length == sequence.parting
            or (self._every is not None and length % self._every == 0)
        )

    def take(self, sequence: Sequence) -> None:
        """Keep a copy of the states that a sequence has reached, if there is memory for it that nobody else uses."""
        checkpoints, length = self._manager.tree.checkpoints, sequence.length
        trailing = sequence.trailing
        if trailing is not None and (trailing.node is None or not trailing.moves):
            trailing = sequence.trailing = None
        moves = length >= sequence.prompt_size and not (self._every and length % self._every == 0)
        last = sequence.node
        if last is not None and last.end == length and last.checkpoint:
            self._pass_by(last.checkpoint)
            return
        blocks = checkpoints.strip(trailing) if trailing else self._blocks()
        if blocks is None:
            return
        sequence.trailing = None
        if trailing and last is not None and last.users == 1 and not last.children and last.end == sequence.published:
            self._manager.tree.lengthen(last, sequence.tokens, sequence.tables, length)
            sequence.published = length
        else:
            self._manager.publish(sequence, length)
        self._manager.tree.seal(sequence.node)
        node = sequence.node
        assert node is not None
        assert node.end == length
        if node.checkpoint:
            self._pass_by(node.checkpoint)
            checkpoints.give_back(blocks)
            return
        self._copy([sequence.tables[group] for group in self._groups], blocks)
        kept = checkpoints.put(node, blocks, self._manager.tree.clock, moves=moves)
        if moves:
            sequence.trailing = kept
        elif self._manager.tiers:
            self._manager.tiers.sealed(self._manager.tree, node)

    def _blocks(self) -> list[Ids] | None:
        checkpoints = self._manager.tree.checkpoints
        if checkpoints.most is not None and len(checkpoints) >= checkpoints.most:
            self._manager.reclaimer.reclaim_checkpoint()
        if not self._manager.arena.could_take(checkpoints.wanted, [NO_BLOCKS] * len(self._manager.groups)):
            return None
        self._manager.free_up(checkpoints.wanted)
        return checkpoints.take()
