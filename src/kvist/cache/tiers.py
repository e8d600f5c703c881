"""The same blocks further away: on the host, a disk or another machine.

::

    device ──reclaimed──▶ host ──evicted──▶ disk ──evicted──▶ remote ──evicted──▶ gone
       ◀──────────────── loaded, from the nearest that has it ─────────────────

What is kept is a *block of the prefix*: what all groups store of ``unit_tokens`` tokens, found by a digest of these
tokens, of all before them and of the prefix's key, whoever computed it. A block that is loaded stays where it was
too. Beside these a tier holds what swapped-out sequences own, which nothing evicts.

This is bookkeeping: which block is where, and the bytes that move. Whoever has a clock charges for them; whoever has
real memory gives it :mod:`kvist.cache.places`, and moves what these write down. Both are decided here, and alike.
"""

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvist.cache.arena import Ids
from kvist.cache.digests import Digests
from kvist.cache.groups import Group
from kvist.cache.places import Pieces, Places
from kvist.cache.reclaim import Node
from kvist.cache.resumption import Resumption, Swapped
from kvist.cache.tier import Tier
from kvist.cache.traffic import Moved, Occupied, Traffic
from kvist.errors import InputError

if TYPE_CHECKING:
    from kvist.cache.matching import Match
    from kvist.cache.prefix import PrefixTree
    from kvist.cache.sequence import Sequence


class _Shelf:
    """What one tier holds."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        # By digest the bits of the groups that are there; least recently used first.
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.cached_bytes = 0
        self.swapped_bytes = 0
        self.read = [0, 0]
        self.written = [0, 0]


class _Sizes(dict[int, int]):
    """Bytes of a block by the bits of the groups that are there."""

    def __init__(self, unit_bytes: Seq[int]) -> None:
        super().__init__()
        self._unit_bytes = unit_bytes

    def __missing__(self, groups: int) -> int:
        size = self[groups] = sum(each for group, each in enumerate(self._unit_bytes) if groups >> group & 1)
        return size


class TierStack:
    """The tiers behind one device, the nearest first.

    Args:
        tiers: what they hold.
        groups: of what is stored.
        unit_tokens: tokens of a block of the prefix.
        places: where it lies, if the bytes are real.

    Raises:
        InputError: there is none, or two have one name.
    """

    def __init__(self, tiers: Seq[Tier], groups: Seq[Group], unit_tokens: int, places: Places | None = None) -> None:
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            raise InputError(f"tier: {', '.join(names) or 'none'}; at least one, and each name once", key="tier")
        self.tiers = tuple(tiers)
        self._groups = tuple(groups)
        self.unit_tokens = unit_tokens
        self._shelves = [_Shelf(tier) for tier in tiers]
        self._through = [level for level, tier in enumerate(tiers) if tier.write == "write-through"]
        self._digests = Digests(unit_tokens)
        # A state is stored whole, with the unit at whose end it was kept.
        self._fixed = [group.fixed_blocks is not None for group in groups]
        self._unit_blocks = [unit_tokens // group.block_tokens if group.fixed_blocks is None else 1 for group in groups]
        self._unit_bytes = [
            (count if group.fixed_blocks is None else group.fixed_blocks) * group.block_bytes
            for count, group in zip(self._unit_blocks, groups, strict=True)
        ]
        self._sizes = _Sizes(self._unit_bytes)
        self._places = places
        # What a sequence is about to load: nothing evicts it before.
        self._held: frozenset[bytes] = frozenset()

    # -- write ----------------------------------------------------------------------------------------------

    def reclaimed(self, tree: "PrefixTree", node: Node, keep: int) -> None:
        """The device is about to let a node's blocks go, all but the first ``keep``."""
        if node.sealed and self.tiers[0].write == "write-back":
            self._put_run(tree, node, keep, (0,))

    def sealed(self, tree: "PrefixTree", node: Node) -> None:
        """The device has computed a node's blocks."""
        if self._through:
            self._put_run(tree, node, 0, self._through)

    def _put_run(self, tree: "PrefixTree", node: Node, keep: int, levels: Seq[int]) -> None:
        if node.tokens[0] < 0 and tree.key_of(node).cartridge:
            # A pinned run (kvist.cache.pinning): it lies in the arena for as long as anybody asks for it.
            return
        # The deepest first, as it is to be evicted first.
        digests = self._digests.of_node(tree, node)[keep:][::-1]
        present = self._present(node)[keep:][::-1]
        sources = self._pieces(self._places, tree, node)[keep:][::-1] if self._places else None
        for level in levels:
            self._put(level, digests, present, sources)

    def _present(self, node: Node) -> list[int]:
        """Bits of the groups of which each block of a node is there."""
        count = node.tokens.size // self.unit_tokens
        bits = np.zeros(count, np.int64)
        for group, ids in enumerate(node.blocks):
            if self._fixed[group]:
                bits[-1] |= (node.checkpoint is not None) << group
                continue
            bits |= (ids.reshape(count, -1) >= 0).all(axis=1).astype(np.int64) << group
        found: list[int] = bits.tolist()
        return found

    def _pieces(self, places: Places, tree: "PrefixTree", node: Node) -> list[Pieces]:
        """Where what is there of each block of a node lies in the arena."""
        pieces: list[Pieces] = [{} for _ in range(node.tokens.size // self.unit_tokens)]
        for group, ids in enumerate(node.blocks):
            if not self._fixed[group]:
                for piece, blocks in zip(pieces, ids.reshape(len(pieces), -1), strict=True):
                    if (blocks >= 0).all():
                        piece[group] = places.on_device(group, blocks)
        if node.checkpoint is not None:
            for group, ids in zip(tree.checkpoints.groups, node.checkpoint.blocks, strict=True):
                pieces[-1][group] = places.on_device(group, ids)
        return pieces

    def _put(self, level: int, digests: list[bytes], groups: list[int], sources: list[Pieces] | None) -> None:
        """Write blocks of which these groups are there to a tier, as far as it lacks them; the most recent last."""
        shelf = self._shelves[level]
        blocks = shelf.blocks
        tokens = size = 0
        new: dict[bytes, Pieces] = {}
        for place, (digest, more) in enumerate(zip(digests, groups, strict=True)):
            before = blocks.get(digest)
            if before is None:
                blocks[digest] = more
                tokens += self.unit_tokens
                size += self._sizes[more]
            else:
                blocks.move_to_end(digest)
                if before | more != before:
                    blocks[digest] = before | more
                    size += self._sizes[before | more] - self._sizes[before]
            if sources is not None:
                there = before or 0
                new[digest] = {group: piece for group, piece in sources[place].items() if not there >> group & 1}
        shelf.cached_bytes += size
        _count(shelf.written, tokens, size)
        self._evict(level, new)
        if self._places:
            for digest, pieces in new.items():
                if pieces and digest in blocks:
                    self._places.put(level, digest, pieces)

    def _evict(self, level: int, new: Mapping[bytes, Pieces] = MappingProxyType({})) -> None:
        """Evict what a tier has too much of, to the next where that one is written back to.

        Args:
            level: of the tier.
            new: what it takes, but has not yet: that goes on from where it comes from.
        """
        shelf = self._shelves[level]
        surplus = shelf.cached_bytes + shelf.swapped_bytes - shelf.tier.capacity_bytes
        digests: list[bytes] = []
        groups: list[int] = []
        sources: list[Pieces] = []
        while surplus > 0 and (digest := self._first_to_go(shelf)) is not None:
            there = shelf.blocks.pop(digest)
            size = self._sizes[there]
            surplus -= size
            shelf.cached_bytes -= size
            digests.append(digest)
            groups.append(there)
            if self._places:
                sources.append({**self._places.leave(level, digest), **new.get(digest, {})})
        following = level + 1
        if digests and following < len(self.tiers) and self.tiers[following].write == "write-back":
            self._put(following, digests, groups, sources if self._places else None)

    def _first_to_go(self, shelf: _Shelf) -> bytes | None:
        return next((digest for digest in shelf.blocks if digest not in self._held), None)

    # -- read -----------------------------------------------------------------------------------------------

    def find(self, tree: "PrefixTree", sequence: "Sequence", match: "Match") -> Resumption | None:
        """How much further than a match a sequence could go on with what the tiers hold. Changes nothing but names.

        None where that is no further, as every group must find what it needs.
        """
        unit = self.unit_tokens
        start = match.tokens // unit
        digests: list[bytes] = []
        levels: list[int] = []
        there: list[int] = []
        for place in range(start, (sequence.size - 1) // unit):
            digest = self._digests.of_sequence(tree, sequence, match, place)
            for level, shelf in enumerate(self._shelves):
                if (groups := shelf.blocks.get(digest)) is not None:
                    digests.append(digest)
                    levels.append(level)
                    there.append(groups)
                    break
            else:
                break
        tokens = self._agree(match, np.array(there, np.int64)) if there else 0
        if tokens <= match.tokens:
            return None
        tables = self._tables(match, tokens)
        count = tokens // unit - start
        sizes = self._missing_bytes(tables, tokens, np.arange(start, start + count))
        near = np.array(levels[:count])
        loads = tuple(
            Moved(self.tiers[level].name, unit * int(np.count_nonzero(near == level)), int(sizes[near == level].sum()))
            for level in sorted(set(levels[:count]))
        )
        return Resumption(tokens, tables, loads, digests[:count], levels[:count])

    def find_swapped(self, swapped: Swapped, match: "Match") -> Resumption | None:
        """The same of what a sequence had when it was swapped out; None where the match has as much."""
        if swapped.tokens <= match.tokens:
            return None
        tables = self._tables(match, swapped.tokens)
        size = int(self._missing_bytes(tables, swapped.tokens, np.arange(-(-swapped.tokens // self.unit_tokens))).sum())
        loads = (Moved(self.tiers[0].name, swapped.tokens - match.tokens, size),)
        return Resumption(swapped.tokens, tables, loads, [], [])

    def load(self, resumption: Resumption) -> None:
        """It is to be loaded; the tiers keep it, as most recently used, and evict none of it before :meth:`loaded`."""
        self._held = frozenset(resumption.digests)
        for load in resumption.loads:
            shelf = next(shelf for shelf in self._shelves if shelf.tier.name == load.tier)
            _count(shelf.read, load.tokens, load.bytes)
        for digest, level in zip(reversed(resumption.digests), reversed(resumption.levels), strict=True):
            self._shelves[level].blocks.move_to_end(digest)

    def loaded(self, resumption: Resumption, tables: Seq[Ids]) -> None:
        """The sequence has blocks for what is loaded now: int64 ``[blocks]`` a group, from position 0."""
        self._held = frozenset()
        if self._places is None or not resumption.digests:
            return
        start = resumption.tokens // self.unit_tokens - len(resumption.digests)
        for number, (group, there, count) in enumerate(
            zip(self._groups, resumption.tables, self._unit_blocks, strict=True)
        ):
            if group.fixed_blocks == 0:
                # What stands before sequences stays in the arena.
                continue
            if group.fixed_blocks is not None:
                self._places.fetch(resumption.levels[-1], resumption.digests[-1], number, 0, tables[number])
                continue
            end = group.first_live_block(resumption.tokens) + group.live_blocks(resumption.tokens)
            first = there.size
            while first < end:
                place, within = divmod(first, count)
                last = min((place + 1) * count, end)
                unit = place - start
                level, digest = resumption.levels[unit], resumption.digests[unit]
                self._places.fetch(level, digest, number, within, tables[number][first:last])
                first = last

    def clear(self) -> None:
        """Forget all blocks of prefixes, as their bytes may be lost; what is swapped out stays."""
        for shelf in self._shelves:
            shelf.blocks.clear()
            shelf.cached_bytes = 0
        self._held = frozenset()
        if self._places:
            self._places.clear()

    def _agree(self, match: "Match", there: npt.NDArray[np.int64]) -> int:
        """Longest prefix of a match and the blocks found behind it that every group can go on from."""
        unit = self.unit_tokens
        tokens = match.tokens + there.size * unit
        presence = []
        for index, (ids, count) in enumerate(zip(match.blocks, self._unit_blocks, strict=True)):
            # Nothing of a state is among a match's blocks.
            before = ids >= 0 if ids.size else np.zeros(match.tokens // unit * count, np.bool_)
            presence.append(np.concatenate((before, np.repeat(there >> index & 1, count).astype(np.bool_))))
        previous = -1
        while previous != tokens:
            previous = tokens
            for group, present, count in zip(self._groups, presence, self._unit_blocks, strict=True):
                reusable = group.reusable_blocks(present[: tokens // unit * count])
                tokens = min(tokens, reusable // count * unit)
        return tokens

    def _tables(self, match: "Match", tokens: int) -> list[Ids]:
        tables = []
        for group, ids in zip(self._groups, match.blocks, strict=True):
            if first := group.first_live_block(tokens):
                kept = np.full(max(first, ids.size), -1, np.int64)
                kept[first : ids.size] = ids[first:]
                tables.append(kept)
            else:
                tables.append(ids)
        return tables

    def _missing_bytes(self, tables: list[Ids], tokens: int, places: Ids) -> npt.NDArray[np.int64]:
        """Of each of these blocks of a prefix of ``tokens``, what the tables lack."""
        sizes = np.zeros(places.size, np.int64)
        for group, table, count in zip(self._groups, tables, self._unit_blocks, strict=True):
            if group.fixed_blocks is not None:
                last = (places + 1) * self.unit_tokens >= tokens
                sizes += last * (group.fixed_blocks * group.block_bytes)
                continue
            end = group.first_live_block(tokens) + group.live_blocks(tokens)
            first = np.maximum(places * count, table.size)
            sizes += np.maximum(np.minimum(places * count + count, end) - first, 0) * group.block_bytes
        return sizes

    # -- swap -----------------------------------------------------------------------------------------------

    def swap_out(self, swapped: Swapped) -> bool:
        """Take what a sequence owns into the first tier, for as long as it waits; False where there is no room."""
        shelf = self._shelves[0]
        if shelf.swapped_bytes + swapped.bytes > shelf.tier.capacity_bytes:
            return False
        shelf.swapped_bytes += swapped.bytes
        _count(shelf.written, swapped.tokens, swapped.bytes)
        self._evict(0)
        return True

    def forget(self, swapped: Swapped) -> None:
        """A sequence has come back, or will not."""
        self._shelves[0].swapped_bytes -= swapped.bytes

    # -- look -----------------------------------------------------------------------------------------------

    def take_traffic(self) -> Traffic:
        """What has moved since the last call."""
        traffic = Traffic(
            read=tuple(Moved(shelf.tier.name, *shelf.read) for shelf in self._shelves if shelf.read[1]),
            written=tuple(Moved(shelf.tier.name, *shelf.written) for shelf in self._shelves if shelf.written[1]),
        )
        for shelf in self._shelves:
            shelf.read, shelf.written = [0, 0], [0, 0]
        return traffic

    def occupied(self) -> list[Occupied]:
        """What each tier holds, the nearest first."""
        return [
            Occupied(
                tier=shelf.tier.name,
                cached_bytes=shelf.cached_bytes,
                swapped_bytes=shelf.swapped_bytes,
                blocks=len(shelf.blocks),
            )
            for shelf in self._shelves
        ]


def _count(moved: list[int], tokens: int, size: int) -> None:
    moved[0] += tokens
    moved[1] += size
