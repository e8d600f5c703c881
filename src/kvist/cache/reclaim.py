"""What goes first when cached blocks must be reclaimed.

1. *Stale* window blocks: behind every window, and further than a window from the end of their node, where
   sequences parted or stopped and would be taken up again.
2. *Idle leaves* of the tree, which no sequence uses: least recently used first. A leaf's parent is offered once
   its last child is gone, so that a prefix outlives what follows it.
"""

import heapq
from collections import deque
from itertools import count

import numpy as np
import numpy.typing as npt

from kvist.cache.arena import Ids

Tokens = npt.NDArray[np.int32]


class Node:
    """A run of whole blocks of tokens that follows its parent's.

    Attributes:
        tokens: int32 ``[blocks x block_tokens]``.
        blocks: per group, int64 ``[blocks]``; -1 where a window group's block was reclaimed.
        end: tokens from the root to the end of this run.
        users: sequences whose prefix ends in this node or below it.
        last_used: the tree's clock when a sequence last let go of it; the order of reclaim.
        sealed: its blocks have been computed; a node is unsealed while the step that computes it is under way.
        stale: listed as having window blocks that may have fallen out of every window.
    """

    __slots__ = (
        "blocks",
        "children",
        "end",
        "id",
        "last_used",
        "parent",
        "sealed",
        "stale",
        "tokens",
        "users",
    )

    def __init__(self, node_id: int, parent: "Node | None", tokens: Tokens, blocks: list[Ids], end: int) -> None:
        self.id = node_id
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.last_used = 0
        self.sealed = False
        self.stale = False


class ReclaimQueue:
    """The order of reclaim; entries that later uses have outdated are skipped when they come up."""

    def __init__(self) -> None:
        self._leaves: list[tuple[int, int, Node]] = []
        self._valid_leaves = 0
        self._offers = count()
        self._stale: deque[Node] = deque()

    def offer(self, leaf: Node) -> None:
        """A leaf has no more users: its turn is given by ``last_used``."""
        if len(self._leaves) > 64 + 4 * self._valid_leaves:
            self._leaves = [entry for entry in self._leaves if _is_idle(entry[2], entry[0])]
            self._valid_leaves = len(self._leaves)
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (leaf.last_used, next(self._offers), leaf))

    def oldest_leaf(self) -> Node | None:
        """The idle leaf that was used longest ago; it stays in the queue until it is used or removed."""
        while self._leaves:
            last_used, _, leaf = self._leaves[0]
            if _is_idle(leaf, last_used):
                return leaf
            heapq.heappop(self._leaves)
        return None

    def mark_stale(self, node: Node | None) -> None:
        """Window blocks on the way to ``node`` have lost a user."""
        while node is not None and node.parent is not None:
            if not node.stale:
                node.stale = True
                self._stale.append(node)
            node = node.parent

    def next_stale(self) -> Node | None:
        """A node that was marked, in the order of marking, and takes it off the queue."""
        while self._stale:
            node = self._stale.popleft()
            node.stale = False
            if node.parent is not None:
                return node
        return None


def _is_idle(node: Node, last_used: int) -> bool:
    return node.parent is not None and not node.users and not node.children and node.last_used == last_used
