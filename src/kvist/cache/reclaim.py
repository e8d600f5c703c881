"""What goes first when cached blocks must be reclaimed.

1. *Stale* window blocks: behind every window, and further than a window from the end of their node, where
   sequences parted or stopped and would be taken up again.
2. *Idle leaves* of the tree, which no sequence uses, in one of these orders. A leaf's parent is offered once its last
   child is gone, so that a prefix outlives what follows it, in every order.

=========  =======================================================================================================
order      which leaf goes first
=========  =======================================================================================================
lru        least recently used
lfu        used by the fewest sequences; of those, least recently used
fifo       stored first
optimal    whose last block is used again last, or never (Belady, IBM Systems Journal 5(2), 1966): it needs to know the
           future, and bounds what the others reach
=========  =======================================================================================================
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvist.cache.arena import Ids
from kvist.errors import InputError

if TYPE_CHECKING:
    from kvist.cache.checkpoints import Checkpoint

Tokens = npt.NDArray[np.int32]


class Node:
    """A run of whole blocks of tokens that follows its parent's.

    Attributes:
        tokens: int32 ``[blocks x block_tokens]``.
        blocks: per group, int64 ``[blocks]``; -1 where a window group's block was reclaimed.
        end: tokens from the root to the end of this run.
        digests: names of its blocks in the tiers, as :class:`kvist.cache.tiers.TierStack` makes them; None before.
        users: sequences whose prefix ends in this node or below it.
        last_used: the tree's clock when a sequence last let go of it.
        uses: times that a sequence let go of it.
        stored: when it was stored: ascends from node to node, and stays with both parts of one that is split.
        sealed: its blocks have been computed; a node is unsealed while the step that computes it is under way.
        offer: number of its last entry in the queue of leaves; earlier ones no longer hold.
        stale: listed as having window blocks that may have fallen out of every window.
        checkpoint: states at the end of this run, where they were kept.
    """

    __slots__ = (
        "blocks",
        "checkpoint",
        "children",
        "digests",
        "end",
        "id",
        "last_used",
        "offer",
        "parent",
        "sealed",
        "stale",
        "stored",
        "tokens",
        "users",
        "uses",
    )

    def __init__(self, node_id: int, parent: "Node | None", tokens: Tokens, blocks: list[Ids], end: int) -> None:
        self.id = node_id
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.digests: list[bytes] | None = None
        self.users = 0
        self.last_used = 0
        self.uses = 0
        self.stored = node_id
        self.offer = 0
        self.sealed = False
        self.stale = False
        self.checkpoint: Checkpoint | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which idle leaf is reclaimed first.

    Attributes:
        name: as it is asked for.
        turn: the leaf with the least goes first; it is asked when a leaf becomes idle.
        by_block: the turn is that of a leaf's last block: leaves go block by block, and are asked again in between.
    """

    name: str
    turn: Callable[[Node], Any]
    by_block: bool = False


LRU = Order(name="lru", turn=attrgetter("last_used"))
ORDERS = {
    "lru": LRU,
    "lfu": Order(name="lfu", turn=attrgetter("uses", "last_used")),
    "fifo": Order(name="fifo", turn=attrgetter("stored")),
}


def optimal(next_use: Callable[[Node], float]) -> Order:
    """The order that knows the future.

    Args:
        next_use: when the *last* block of an idle leaf is used again, in any unit; infinity for never. It is asked when
            the leaf becomes idle, and must not change until the block is used.
    """
    return Order(name="optimal", turn=lambda node: -next_use(node), by_block=True)


def order_of(reclaim: str | Order) -> Order:
    """The order of that name; an order itself is passed on.

    Raises:
        InputError: there is none, or it is ``optimal``, which :func:`optimal` makes of an oracle.
    """
    if isinstance(reclaim, Order):
        return reclaim
    if reclaim not in ORDERS:
        hint = "; optimal needs to know the future: pass optimal(next_use)" if reclaim == "optimal" else ""
        raise InputError(f"reclaim: {reclaim!r}; one of {', '.join(ORDERS)}{hint}", key="reclaim")
    return ORDERS[reclaim]


class ReclaimQueue:
    """The order of reclaim; entries that later uses have outdated are skipped when they come up.

    Args:
        order: of idle leaves.

    Attributes:
        by_block: leaves go block by block, and are offered again in between.
    """

    def __init__(self, order: Order = LRU) -> None:
        self.by_block = order.by_block
        self._turn = order.turn
        self._leaves: list[tuple[Any, int, Node]] = []
        self._valid_leaves = 0
        self._offers = count(1)
        self._stale: deque[Node] = deque()

    def offer(self, leaf: Node) -> None:
        """A leaf has no more users, or was cut: the order gives its turn."""
        if len(self._leaves) > 64 + 4 * self._valid_leaves:
            self._leaves = [entry for entry in self._leaves if _is_idle(entry[2], entry[1])]
            self._valid_leaves = len(self._leaves)
            heapq.heapify(self._leaves)
        leaf.offer = offer = next(self._offers)
        heapq.heappush(self._leaves, (self._turn(leaf), offer, leaf))

    def first_leaf(self) -> Node | None:
        """The idle leaf whose turn it is; it stays in the queue until it is used or removed."""
        while self._leaves:
            _, offer, leaf = self._leaves[0]
            if _is_idle(leaf, offer):
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


def _is_idle(node: Node, offer: int) -> bool:
    return node.parent is not None and not node.users and not node.children and node.offer == offer
