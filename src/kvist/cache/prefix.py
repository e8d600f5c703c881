"""The prefix tree: a radix tree over runs of tokens, each run with the blocks that store it.

::

    root(salt "")                              edges hold whole blocks of tokens, so siblings differ within
      └── "You are a helpful …"  64 blocks     their first block and are found by it
            ├── "What is …"       4 blocks
            └── "Translate …"     9 blocks     a leaf that no sequence uses is reclaimed from its tail

Blocks of a window group may be missing inside a node (-1): they were reclaimed alone, since only the last window
before a reuse point is ever read again.

Runs are cut where every group's blocks end: at multiples of the *unit*, the least common multiple of their blocks. A
group of larger blocks could go on nowhere else, so that finer runs would find no more. The blocks themselves stay
each group's own. States have none: where a sequence can go on with them there is a checkpoint at the end of a node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvist.cache.arena import Arena, Ids
from kvist.cache.checkpoints import Checkpoint, Checkpoints
from kvist.cache.groups import Group, unit_of
from kvist.cache.matching import Match, Matching
from kvist.cache.reclaim import LRU, Node, Order, ReclaimQueue, Tokens
from kvist.cache.tiers import TierStack


@dataclass(frozen=True, kw_only=True)
class PrefixKey:
    """All that must be equal, beside the tokens, for a prefix to be reused.

    Attributes:
        model: name or hash of the weights.
        format: how keys and values are stored.
        cartridge: the trained cache before the prompt, if any.
        adapter: fine-tuning applied to the weights, if any.
        salt: keeps tenants apart.
    """

    model: str = ""
    format: str = ""
    cartridge: str = ""
    adapter: str = ""
    salt: str = ""


class PrefixTree:
    """Finds, stores and reclaims prefixes. Every block in it is marked as kept in the arena.

    Attributes:
        checkpoints: states kept at the ends of runs.
        clock: ascends whenever a sequence lets go of a run.
        queue: of what could be reclaimed.
        tiers: where blocks go that it loses, if anywhere.
        tokens: tokens that it has.
        stored: tokens that it was given so far, whether or not it has them still.
    """

    def __init__(self, groups: Sequence[Group], arena: Arena, order: Order = LRU) -> None:
        self._groups = groups
        self._arena = arena
        self.checkpoints = Checkpoints(groups, arena)
        self._unit = unit_of(groups)
        self._sizes = [group.run_block_tokens for group in groups]
        self._windowed = [index for index, group in enumerate(groups) if group.gives_back]
        # Of a tail nothing is ever read behind a whole unit, and so nothing is kept.
        self._tails = [index for index, group in enumerate(groups) if group.lifetime == "tail"]
        # Whether nodes hold no blocks at all.
        self._blockless = all(group.fixed_blocks is not None for group in groups)
        self._matching = Matching(groups)
        self._roots: dict[PrefixKey, Node] = {}
        self._root_keys: dict[int, PrefixKey] = {}
        self._ids = count()
        self.clock = 0
        self.queue = ReclaimQueue(order)
        self.tiers: TierStack | None = None
        self.tokens = 0
        self.stored = 0

    # -- find -----------------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, tokens: Tokens, limit: int) -> Match:
        """Longest stored prefix of ``tokens[:limit]`` that every group can reuse. Changes nothing."""
        nodes: list[Node] = []
        position = 0
        node = self._roots.get(key)
        unit = self._unit
        while node is not None and position + unit <= limit:
            node = node.children.get(tokens[position : position + unit].tobytes())
            if node is None:
                break
            nodes.append(node)
            common = self._common(node, tokens, position, limit)
            position += common
            if common < node.tokens.size:
                break
        return self._matching.agree(nodes, position)

    def _common(self, node: Node, tokens: Tokens, position: int, limit: int) -> int:
        """Tokens, in whole units, that a node's run shares with ``tokens`` from ``position``."""
        run = node.tokens
        length = min(run.size, limit - position)
        differ = run[:length] != tokens[position : position + length]
        first = int(differ.argmax())
        if not differ[first]:
            first = length
        return first - first % self._unit

    # -- hold -----------------------------------------------------------------------------------------------

    def attach(self, match: Match) -> Node | None:
        """Count one more user on a match's path and return where it ends; a run matched in part is split there."""
        if not match.nodes:
            return None
        last = match.nodes[-1]
        surplus = last.end - match.tokens
        if surplus:
            last = self._split(last, last.tokens.size - surplus)
        self.hold(last)
        return last

    def hold(self, node: Node | None) -> None:
        """Count one more user from a node up to the root."""
        while node is not None:
            node.users += 1
            node = node.parent

    def let_go(self, node: Node | None) -> None:
        """Count one user fewer, and one use more; what nobody uses becomes reclaimable."""
        self.clock += 1
        clock = self.clock
        if self.checkpoints.groups:
            self._use_last_checkpoint(node)
        while node is not None:
            parent = node.parent
            node.users -= 1
            node.last_used = clock
            node.uses += 1
            if not node.users and not node.children:
                self._idle(node)
            node = parent

    def _use_last_checkpoint(self, node: Node | None) -> None:
        """Who comes back to ``node`` would go on from the last one before it."""
        while node is not None and node.checkpoint is None:
            node = node.parent
        if node is not None and node.checkpoint is not None:
            self.checkpoints.use(node.checkpoint, self.clock)

    def mark_stale(self, node: Node | None) -> None:
        """A window has given back blocks on the way to ``node``."""
        self.queue.mark_stale(node)

    # -- store ----------------------------------------------------------------------------------------------

    def has_edge(self, key: PrefixKey, node: Node | None, tokens: Tokens, start: int) -> bool:
        """Whether the block of tokens at ``start`` is stored below ``node`` (None: the key's root)."""
        parent = self._roots.get(key) if node is None else node
        return parent is not None and tokens[start : start + self._unit].tobytes() in parent.children

    def insert(
        self, key: PrefixKey, node: Node | None, tokens: Tokens, tables: Sequence[Ids], start: int, end: int
    ) -> Node | None:
        """Store the run ``tokens[start:end]`` below ``node`` for the sequence that holds ``node``.

        ``start`` and ``end`` are multiples of the unit; ``tables[g]`` are the sequence's blocks from position 0. Where
        the tree has a run already, the sequence changes over to the tree's blocks (``tables`` is written to, its
        own blocks are dropped) and gives the tree the window blocks that it lacks. Returns the node in which the run
        ends, held by the sequence.
        """
        unit = self._unit
        if node is None and start < end:
            node = self._root(key)
            node.users += 1
        while node is not None and start < end:
            edge = tokens[start : start + unit].tobytes()
            child = node.children.get(edge)
            if child is None:
                blocks = self._blocks(tables, start, end)
                run = tokens[start:end]
                # A view would keep the whole prompt alive: not for the end of a long conversation.
                child = self._new(node, run if 2 * run.size >= tokens.size else run.copy(), blocks, end)
                self._keep(blocks)
                self._count(end - start)
                node.children[edge] = child
            else:
                common = self._common(child, tokens, start, end)
                if common < child.tokens.size:
                    child = self._split(child, common)
                self._adopt(child, tables)
            child.users += 1
            start = child.end
            node = child
        return node

    def lengthen(self, node: Node, tokens: Tokens, tables: Sequence[Ids], end: int) -> None:
        """Let a leaf, which one sequence alone uses, go on to ``end`` with that sequence's tokens and blocks."""
        start = node.end
        blocks = self._blocks(tables, start, end)
        self._keep(blocks)
        node.blocks = [np.concatenate(both) for both in zip(node.blocks, blocks, strict=True)]
        node.tokens = np.concatenate((node.tokens, tokens[start:end]))
        node.end = end
        node.digests = None
        self._count(end - start)

    def _blocks(self, tables: Sequence[Ids], start: int, end: int) -> list[Ids]:
        """A copy of the blocks of a run, whole units."""
        blocks = [table[start // size : end // size].copy() for table, size in zip(tables, self._sizes, strict=True)]
        for group in self._tails:
            blocks[group][:] = -1
        return blocks

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self.stored += tokens

    def _keep(self, blocks: list[Ids]) -> None:
        for group, ids in enumerate(blocks):
            self._arena.keep(group, ids if group not in self._windowed else ids[ids >= 0])

    def _root(self, key: PrefixKey) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(next(self._ids), None, np.empty(0, np.int32), [], 0)
            root.sealed = True
            self._root_keys[root.id] = key
        return root

    def _new(self, parent: Node, tokens: Tokens, blocks: list[Ids], end: int) -> Node:
        return Node(next(self._ids), parent, tokens, blocks, end)

    def _adopt(self, node: Node, tables: Sequence[Ids]) -> None:
        """Make a sequence and a node share one copy of the node's run."""
        start = node.end - node.tokens.size
        for group, mine in enumerate(node.blocks):
            if group in self._tails:
                continue
            first = start // self._sizes[group]
            theirs = tables[group][first : first + mine.size]
            twice = (mine >= 0) & (theirs >= 0) & (mine != theirs)
            if twice.any():
                own = theirs[twice]
                self._arena.share(group, mine[twice])
                theirs[twice] = mine[twice]
                self._arena.drop(group, own)
            lacking = (mine < 0) & (theirs >= 0)
            if lacking.any():
                mine[lacking] = theirs[lacking]
                self._arena.keep(group, theirs[lacking])

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut a node after ``tokens``; the node itself stays the lower part, and the new upper part is returned."""
        assert node.parent is not None
        counts = [tokens // size for size in self._sizes]
        upper = self._new(
            node.parent,
            node.tokens[:tokens],
            [ids[:count] for ids, count in zip(node.blocks, counts, strict=True)],
            node.end - node.tokens.size + tokens,
        )
        upper.users = node.users
        upper.last_used = node.last_used
        upper.uses = node.uses
        upper.stored = node.stored
        upper.sealed = node.sealed
        node.parent.children[self._edge(node)] = upper
        node.tokens = node.tokens[tokens:]
        node.blocks = [ids[count:] for ids, count in zip(node.blocks, counts, strict=True)]
        if node.digests is not None:
            named = tokens // self._unit
            upper.digests, node.digests = node.digests[:named], node.digests[named:]
        node.parent = upper
        upper.children[self._edge(node)] = node
        if node.stale:
            self.queue.mark_stale(upper)
        return upper

    def _edge(self, node: Node) -> bytes:
        return node.tokens[: self._unit].tobytes()

    def seal(self, node: Node | None) -> None:
        """The step that computed this node and its unsealed ancestors is done."""
        while node is not None and not node.sealed:
            node.sealed = True
            if self.tiers is not None:
                self.tiers.sealed(self, node)
            node = node.parent

    def forget_unsealed(self) -> None:
        """Forget what a failed step was to compute, as far as its sequences have let go of it."""
        for node in reversed([node for node in self.nodes() if not node.sealed]):
            if node.parent is not None and not node.users and not node.children:
                self.cut(node, 0)

    def used_alone(self, node: Node | None) -> list[Node]:
        """The runs from ``node`` up, the deepest first, that only the sequence uses which holds ``node``."""
        alone: list[Node] = []
        while node is not None and node.parent is not None and node.users == 1:
            alone.append(node)
            node = node.parent
        return alone

    def withdraw(self, nodes: Sequence[Node]) -> None:
        """Take runs that nobody uses any more out, the deepest first, and what follows them."""
        for node in nodes:
            for below in reversed([*self._below(node)]):
                self.cut(below, 0)

    # -- cut ------------------------------------------------------------------------------------------------

    def cut(self, node: Node, keep: int) -> None:
        """Cut a node's run after ``keep`` tokens, and let the rest of its blocks and its checkpoint go.

        A leaf of which nothing is kept goes itself.
        """
        if node.checkpoint is not None:
            self.checkpoints.forget(node.checkpoint)
        surplus = node.tokens.size - keep
        for group, ids in enumerate(node.blocks):
            kept = keep // self._sizes[group]
            tail = ids[kept:]
            self._arena.forget(group, tail if group not in self._windowed else tail[tail >= 0])
            node.blocks[group] = ids[:kept]
        self.tokens -= surplus
        if keep:
            node.tokens = node.tokens[:-surplus]
            if node.digests is not None:
                del node.digests[keep // self._unit :]
            node.end -= surplus
        else:
            self._remove(node)

    def forget_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Let a checkpoint go, and a run that costs nothing and that nobody can go on from any more."""
        node = checkpoint.node
        self.checkpoints.forget(checkpoint)
        if self._blockless and node is not None and not node.users and not node.children:
            self._idle(node)

    def _remove(self, node: Node) -> None:
        """Take a leaf without blocks out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[self._edge(node)]
        node.parent = None
        if not parent.users and not parent.children:
            self._idle(parent)

    def _idle(self, node: Node) -> None:
        """A node without users and children: a leaf may be reclaimed, a root has no more use."""
        if node.parent is not None:
            if self._blockless and node.checkpoint is None:
                # It costs no block, so that memory would never bound how many there are.
                self.cut(node, 0)
            else:
                self.queue.offer(node)
        elif (key := self._root_keys.pop(node.id, None)) is not None:
            del self._roots[key]

    # -- look -----------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children; the roots, which hold no tokens, are left out."""
        for root in self._roots.values():
            for child in root.children.values():
                yield from self._below(child)

    def key_of(self, node: Node) -> PrefixKey:
        """The key under which a node's prefix is shared."""
        while node.parent is not None:
            node = node.parent
        return self._root_keys[node.id]

    def _below(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            top = stack.pop()
            yield top
            stack.extend(top.children.values())
