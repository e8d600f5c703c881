"""When blocks are used again, which a simulation knows and no server does: what the optimal order of reclaim asks."""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from kvist.cache.reclaim import Node, Order, optimal
from kvist.simulation.prompts import Prompts


@dataclass(kw_only=True)
class Future:
    """The requests that will name each block.

    Attributes:
        users: requests that name a block, in their order, block after block in the order of :class:`Prompts`' ids.
        starts: ``[blocks + 1]``, into ``users``.
        past: the last request that was admitted.
    """

    users: list[int]
    starts: list[int]
    past: int = -1

    @classmethod
    def of(cls, prompts: Prompts) -> "Future":
        """That of a trace from which prompts are made."""
        ids = prompts.ids
        order = np.argsort(ids, kind="stable")
        requests = np.repeat(np.arange(len(prompts.trace)), np.diff(prompts.trace.offsets))
        counts = np.bincount(ids)
        return cls(users=requests[order].tolist(), starts=[0, *np.cumsum(counts).tolist()])

    def admit(self, index: int) -> None:
        """A request of the trace has been admitted; those before it are over, as far as blocks are concerned."""
        self.past = max(self.past, index)

    def next_use(self, node: Node) -> float:
        """The next request that names the block at the end of a node; infinity where none does."""
        block = int(node.tokens[-1])
        if not 0 <= block < len(self.starts) - 1:
            return float("inf")
        end = self.starts[block + 1]
        place = bisect_right(self.users, self.past, self.starts[block], end)
        return self.users[place] if place < end else float("inf")

    def order(self) -> Order:
        """The order of reclaim that knows it."""
        return optimal(self.next_use)
