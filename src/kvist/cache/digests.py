"""Names of blocks of a prefix that hold wherever it is stored: digests of their tokens and of all before them.

A chain: the name of a block is the digest of the name before it and its own tokens; before the first block stands the
name of the :class:`~kvist.cache.prefix.PrefixKey`. Whoever computes the same prefix under the same key, on whatever
replica, finds the same names.
"""

from dataclasses import astuple
from hashlib import blake2b
from json import dumps
from typing import TYPE_CHECKING

from kvist.cache.reclaim import Node, Tokens

if TYPE_CHECKING:
    from kvist.cache.matching import Match
    from kvist.cache.prefix import PrefixKey, PrefixTree
    from kvist.cache.sequence import Sequence

DIGEST_BYTES = 16

# Of keys: each has the salt that a request names, of which there is no end.
_MOST_ROOTS = 1024


class Digests:
    """Makes the names, and leaves them with nodes and sequences, so that each block is read once."""

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self._roots: dict[PrefixKey, bytes] = {}

    def root(self, key: "PrefixKey") -> bytes:
        """What stands before the first block."""
        digest = self._roots.get(key)
        if digest is None:
            text = dumps([*astuple(key), self.unit_tokens])
            if len(self._roots) >= _MOST_ROOTS:
                self._roots.clear()
            digest = self._roots[key] = blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        return digest

    def chain(self, previous: bytes, tokens: Tokens) -> list[bytes]:
        """Names of successive whole blocks behind the block called ``previous``."""
        step = self.unit_tokens * tokens.itemsize
        content = tokens.tobytes()
        digests = []
        for start in range(0, len(content) - step + 1, step):
            previous = blake2b(previous + content[start : start + step], digest_size=DIGEST_BYTES).digest()
            digests.append(previous)
        return digests

    def of_node(self, tree: "PrefixTree", node: Node) -> list[bytes]:
        """Names of the blocks of a node's run."""
        path = []
        top = node
        while top.parent is not None and top.digests is None:
            path.append(top)
            top = top.parent
        previous = top.digests[-1] if top.digests else self.root(tree.key_of(top))
        for below in reversed(path):
            below.digests = self.chain(previous, below.tokens)
            previous = below.digests[-1]
        return node.digests or []

    def of_sequence(self, tree: "PrefixTree", sequence: "Sequence", match: "Match", place: int) -> bytes:
        """Name of one block of a sequence, the first behind a match or the next after one that was asked for."""
        names = sequence.digests
        if names is None:
            names = sequence.digests = []
        matched = match.tokens // self.unit_tokens
        if len(names) < matched:
            names[:] = [name for node in match.nodes for name in self.of_node(tree, node)][:matched]
        if len(names) == place:
            # A few at once, as what is found once is often found for long.
            previous = names[-1] if names else self.root(sequence.key)
            end = min(2 * place - matched + 1, sequence.size // self.unit_tokens)
            names += self.chain(previous, sequence.tokens[place * self.unit_tokens : end * self.unit_tokens])
        return names[place]
