"""What a reservation would give a sequence; found out before anything is taken, so that a refusal changes nothing."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvist.cache.arena import Arena, Ids
from kvist.cache.checkpointing import Checkpointing
from kvist.cache.checkpoints import Checkpoint
from kvist.cache.groups import Group
from kvist.cache.matching import Match
from kvist.cache.prefix import PrefixTree
from kvist.cache.promises import Promises
from kvist.cache.resumption import Resumption
from kvist.cache.sequence import NO_BLOCKS, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a sequence that begins has already.

    Attributes:
        match: what the tree holds of it.
        behind: what the tiers have beyond that, if anything.
        saved: the checkpoint from which it goes on, where the model has states.
        tables: per group, int64 ``[blocks]`` from position 0: those that it begins with.
        revived: of these, per group, the ones to which it will refer; of states those of the checkpoint, until they
            are copied.
        parting: where a checkpoint is wanted, as the tree holds more of it than can be reused; else 0.
    """

    match: Match
    behind: Resumption | None
    saved: Checkpoint | None
    tables: list[Ids]
    revived: list[Ids]
    parting: int

    @property
    def tokens(self) -> int:
        """Tokens of which keys and values are stored, or will be loaded."""
        return self.behind.tokens if self.behind else self.match.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What there is room for.

    Attributes:
        limit: tokens that the sequence could store.
        wanted: per group, blocks to take for that.
        found: what it has already, where it has not begun.
    """

    limit: int
    wanted: list[int]
    found: Found | None


class Offers:
    """Finds out what a cache has for sequences; changes nothing.

    Args:
        groups: the model's.
        arena: whose blocks are offered.
        tree: where prefixes are looked for, and the tiers behind it.
        promises: what must fit for a request to be admitted.
        checkpointing: where states take part in prefixes.
        prefix_cache: whether prompts are looked for at all.
    """

    def __init__(
        self,
        groups: Seq[Group],
        arena: Arena,
        tree: PrefixTree,
        promises: Promises,
        checkpointing: Checkpointing | None,
        *,
        prefix_cache: bool,
    ) -> None:
        self._groups = groups
        self._arena = arena
        self._tree = tree
        self._promises = promises
        self._checkpointing = checkpointing
        self._prefix_cache = prefix_cache
        self._states = tree.checkpoints.groups
        self._windowed = [index for index, group in enumerate(groups) if group.gives_back]
        self._nothing = [NO_BLOCKS] * len(groups)

    def make(self, sequence: Sequence, budget: int, admit_chunk: int | None) -> Offer | None:
        """Room for up to ``budget`` more tokens of a sequence, no further than those that are known.

        Args:
            sequence: begun or not.
            budget: at least 1.
            admit_chunk: all known tokens must fit, that many in flight at once; None: the offer alone must.

        Returns:
            None where there is no room.
        """
        found = None if sequence.begun else self._find(sequence)
        stored = found.tokens if found else sequence.length
        limit = min(sequence.size, stored + budget)
        if sequence.pruning:
            due = sequence.pruning.due(stored, sequence.pruned)
            limit = min(limit, due) if due > stored else stored + 1
        if self._checkpointing and sequence.shared:
            parting = found.parting if found else sequence.parting
            limit = self._checkpointing.stop(sequence, stored, limit, parting)
        wanted = [
            group.all_blocks(limit - gone) - table.size
            for group, table, gone in zip(
                self._groups, found.tables if found else sequence.tables, sequence.dropped, strict=True
            )
        ]
        revived = found.revived if found else self._nothing
        if not self._possible(sequence, wanted, revived, admit_chunk):
            if not (found and found.saved):
                return None
            # There is no room for the states and their checkpoint both, but the sequence can take it over.
            for group in self._states:
                wanted[group] = 0
            if not self._possible(sequence, wanted, revived, admit_chunk):
                return None
        return Offer(limit=limit, wanted=wanted, found=found)

    def _find(self, sequence: Sequence) -> Found:
        match = self._match(sequence)
        behind = None if sequence.pruning else self._behind(sequence, match)
        tables = behind.tables if behind else match.blocks
        if sequence.lead is not None:
            sequence.lead.put_before(tables)
        saved = match.nodes[-1].checkpoint if match.nodes and not behind else None
        return Found(
            match=match,
            behind=behind,
            saved=saved,
            tables=tables,
            revived=self._revived(tables, saved),
            parting=match.found if match.found > (behind.tokens if behind else match.tokens) else 0,
        )

    def _match(self, sequence: Sequence) -> Match:
        if not (self._prefix_cache and sequence.shared):
            if sequence.pinned:
                return self._tree.match(sequence.key, sequence.tokens, sequence.pinned)
            return Match(tokens=0, nodes=[], blocks=[NO_BLOCKS] * len(self._groups))
        most = max(sequence.pinned, sequence.pruning.reusable) if sequence.pruning else sequence.size - 1
        return self._tree.match(sequence.key, sequence.tokens, most)

    def _behind(self, sequence: Sequence, match: Match) -> Resumption | None:
        """What the tiers have of a sequence beyond a match."""
        tiers = self._tree.tiers
        if tiers is None:
            return None
        if sequence.swapped is not None:
            return tiers.find_swapped(sequence.swapped, match)
        return tiers.find(self._tree, sequence, match) if self._prefix_cache and sequence.shared else None

    def _revived(self, tables: list[Ids], saved: Checkpoint | None) -> list[Ids]:
        revived = [ids[ids >= 0] if group in self._windowed else ids for group, ids in enumerate(tables)]
        if saved:
            for group, ids in zip(self._states, saved.blocks, strict=True):
                revived[group] = ids
        return revived

    def _possible(self, sequence: Sequence, wanted: list[int], revived: list[Ids], admit_chunk: int | None) -> bool:
        if admit_chunk is not None:
            peaks = self._promises.peak_blocks(sequence.size, admit_chunk, sequence.pruning)
            wanted = [max(count, peak - ids.size) for count, peak, ids in zip(wanted, peaks, revived, strict=True)]
        return max(wanted) <= 0 or self._arena.could_take(wanted, revived)
