"""How much of a path of the prefix tree a sequence can reuse: as much as every group of layers can go on from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvist.cache.arena import Ids
from kvist.cache.groups import Group, unit_of
from kvist.cache.reclaim import Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """How much of a prompt the tree holds and every group can reuse.

    Attributes:
        tokens: length of the reusable prefix; a multiple of the unit. With states, where a checkpoint is.
        nodes: the runs it crosses, top to bottom; the last may be matched in part.
        blocks: per group, int64 ``[tokens / block_tokens]``; -1 where a window group no longer needs the block; none
            of a state's.
        found: length of the prefix that the tree holds, reusable or not.
    """

    tokens: int
    nodes: list[Node]
    blocks: list[Ids]
    found: int = 0


class Matching:
    """Cuts paths of the tree down to what all groups of a model agree on.

    Args:
        groups: the model's.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._unit = unit_of(groups)
        self._sizes = [group.run_block_tokens for group in groups]
        self._windowed = [index for index, group in enumerate(groups) if group.gives_back]
        # Those that may reuse less than is there; of states all are kept at the same points.
        states = [index for index, group in enumerate(groups) if group.lifetime == "state"]
        self._particular = [*self._windowed, *states[:1]]

    def agree(self, nodes: list[Node], position: int) -> Match:
        """The match of a path that has ``position`` tokens, whole units, in common with a prompt.

        What windows no longer read is left out. ``nodes`` becomes the match's.
        """
        blocks = [
            np.concatenate([node.blocks[group] for node in nodes]) if len(nodes) > 1 else nodes[0].blocks[group]
            for group in range(len(self._groups))
        ] if nodes else [np.empty(0, np.int64) for _ in self._groups]  # fmt: skip
        found = position
        if self._particular and position:
            previous = -1
            while previous != position:
                previous = position
                for group in self._particular:
                    position = self._reusable(group, nodes, blocks[group], position)
            while nodes and position <= nodes[-1].end - nodes[-1].tokens.size:
                nodes.pop()
        blocks = [ids[: position // size] for ids, size in zip(blocks, self._sizes, strict=True)]
        for group in self._windowed:
            live = self._groups[group].first_live_block(position)
            if live:
                blocks[group] = blocks[group].copy()
                blocks[group][:live] = -1
        return Match(tokens=position, nodes=nodes, blocks=blocks, found=found)

    def _reusable(self, group: int, nodes: list[Node], ids: Ids, position: int) -> int:
        """Longest part of a match of ``position`` tokens, in whole units, after which a group can go on."""
        if self._groups[group].lifetime == "state":
            size = self._unit
            present = np.zeros(position // size, np.bool_)
            present[[node.end // size - 1 for node in nodes if node.checkpoint and node.end <= position]] = True
        else:
            size = self._sizes[group]
            present = ids[: position // size] >= 0
        reusable = self._groups[group].reusable_blocks(present) * size
        return reusable - reusable % self._unit
