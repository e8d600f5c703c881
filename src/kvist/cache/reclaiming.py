"""Taking back cached blocks, where others are wanted: what goes, in the order that :mod:`kvist.cache.reclaim` tells."""

from collections.abc import Sequence

from kvist.cache.arena import Arena
from kvist.cache.groups import Group, unit_of
from kvist.cache.prefix import PrefixTree
from kvist.cache.reclaim import Node


class Reclaimer:
    """Takes blocks from a prefix tree that no running sequence uses.

    Args:
        tree: whose they are.
        groups: of what is stored.
        arena: to which they go back.
    """

    def __init__(self, tree: PrefixTree, groups: Sequence[Group], arena: Arena) -> None:
        self._tree = tree
        self._groups = groups
        self._arena = arena
        self._unit = unit_of(groups)
        self._windowed = [index for index, group in enumerate(groups) if group.gives_back]

    def reclaim(self, wanted: int) -> bool:
        """Take back some blocks, of a lone group no more than ``wanted``; False when nothing is left to take.

        First window blocks that lie further than a window before any reuse point, then leaves that nobody uses, in the
        tree's order and from their tails, then any idle window block and any checkpoint. A checkpoint that was not used
        since the next leaf was goes before it: whoever came by went on from a later one.
        """
        return (
            (bool(self._windowed) and self._reclaim_stale())
            or self._reclaim_leaf(wanted)
            or self._reclaim_idle_windows()
            or self.reclaim_checkpoint()
        )

    def _reclaim_stale(self) -> bool:
        while (node := self._tree.queue.next_stale()) is not None:
            if self._reclaim_windows(node, keep_tail=True):
                return True
        return False

    def _reclaim_leaf(self, wanted: int) -> bool:
        leaf = self._tree.queue.first_leaf()
        if leaf is None:
            return False
        if self._tree.checkpoints.groups and self.reclaim_checkpoint(before=leaf.last_used):
            return True
        # With several groups a whole run goes: slabs come back only when all their blocks are free.
        most = 1 if self._tree.queue.by_block else wanted
        keep = 0 if len(self._groups) > 1 else max(0, leaf.blocks[0].size - most)
        if self._tree.tiers is not None:
            self._tree.tiers.reclaimed(self._tree, leaf, keep)
        self._tree.cut(leaf, keep * self._unit)
        if keep and self._tree.queue.by_block:
            self._tree.queue.offer(leaf)
        return True

    def reclaim_checkpoint(self, *, before: int | None = None) -> bool:
        """Let the least recently used checkpoint go, if it was not used since ``before``; whether one went."""
        oldest = self._tree.checkpoints.oldest()
        if oldest is None or (before is not None and oldest.used >= before):
            return False
        self._tree.forget_checkpoint(oldest)
        return True

    def _reclaim_idle_windows(self) -> bool:
        if not self._windowed:
            return False
        taken = [self._reclaim_windows(node, keep_tail=False) for node in self._tree.nodes()]
        return any(taken)

    def _reclaim_windows(self, node: Node, *, keep_tail: bool) -> bool:
        taken = False
        for group in self._windowed:
            ids = node.blocks[group]
            end = ids.size
            if keep_tail:
                # The node ends where sequences part or stopped: the window before it is what they would reuse.
                first = (node.end - node.tokens.size) // self._groups[group].block_tokens
                end = min(end, self._groups[group].first_live_block(node.end) - first)
            if end <= 0:
                continue
            head = ids[:end]
            idle = (head >= 0) & (self._arena.refs[group][head] == 0)
            if idle.any():
                self._arena.forget(group, head[idle])
                head[idle] = -1
                taken = True
        return taken
