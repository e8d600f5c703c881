"""The one door to the arena and the prefix tree: reserve, commit, release, fork.

A step of the scheduler goes::

    sequence = manager.begin(tokens)                 no memory yet
    manager.reserve(sequence, limit)                 prefix hit + blocks for what the step will compute, or nothing
        … the reservation's copies, then the step computes keys and values …
    manager.commit(sequence, stored)                 they are stored: windows give back what fell out of them
        … the copies that it returns, before the next step …
    manager.release(sequence)                        blocks go back; the tree keeps whole ones for the next prompt

Copies are of states (see :mod:`kvist.cache.checkpoints`), and where tiers are real of what goes there and comes back
(:mod:`kvist.cache.places`). They are done in the order in which they were returned: a later one may write where an
earlier one has read. Verbs that return none leave them to the next one that does, or to
:meth:`CacheManager.take_moves` before anything else is written.

Whole blocks of a prompt enter the tree when they are reserved, so that requests of one step already share them (the
engine writes all keys and values of a layer before it reads any). They are *unsealed* until commit: a step that fails
takes them out again with :meth:`CacheManager.abandon`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.cache.arena import Arena, Ids
from kvist.cache.checkpointing import Checkpointing
from kvist.cache.checkpoints import Checkpoint
from kvist.cache.compaction import compact
from kvist.cache.forking import fork
from kvist.cache.groups import Group, unit_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.lead_groups import lead_unit
from kvist.cache.leads import Lead, pin_lead
from kvist.cache.matching import Match
from kvist.cache.pinning import Pins, pin
from kvist.cache.places import Places
from kvist.cache.prefix import PrefixKey, PrefixTree
from kvist.cache.reclaim import LRU, Order, order_of
from kvist.cache.reclaiming import Reclaimer
from kvist.cache.resumption import Resumption, Swapped
from kvist.cache.sequence import NO_BLOCKS, Compaction, Fork, Move, Reservation, Sequence
from kvist.cache.snapshot import snapshot
from kvist.cache.tier import Tier
from kvist.cache.tiers import TierStack
from kvist.errors import InputError
from kvist.spec.pruning import PruningPlan


class CacheManager:
    """Owns the arena and the prefix tree of one model.

    Args:
        groups: the model's.
        layout: how its memory is cut.
        prefix_cache: whether prompts are looked for in the tree, and stored there. Never for a model with an encoder:
            what its layers store depends on the encoder's input as much as on the tokens.
        reclaim: the order in which idle leaves of the tree go: ``lru``, ``lfu``, ``fifo`` or an :class:`Order`.
        tiers: where blocks of prefixes, and sequences that are swapped out, lie beside the device; the nearest first.
        moving: whether the tiers' bytes are real, and moves say what to copy; else they are counted alone.
        checkpoint_every: tokens after which states are checkpointed, beside the points that
            :mod:`kvist.cache.checkpoints` names; rounded up to the unit.
        max_checkpoints: most checkpoints at once; without it memory bounds them. With 0 states take no part in
            prefixes, and so nothing is ever hit where there are any.

    Attributes:
        block_tokens: of the smallest blocks.
        moving: whether the tiers' bytes are real.
        moves: copies that were decided and not yet returned, in order.
        unit_tokens: tokens of which every shared prefix is a multiple.
        windows: whether a group gives blocks back while a sequence runs.
        leads: whether cartridges lie in groups of their own.

    Raises:
        InputError: there is no order of that name, or ``checkpoint_every`` or ``max_checkpoints`` is no such number.
    """

    def __init__(
        self,
        groups: Seq[Group],
        layout: ArenaLayout,
        *,
        prefix_cache: bool = True,
        reclaim: str | Order = LRU,
        tiers: Seq[Tier] = (),
        moving: bool = False,
        checkpoint_every: int | None = None,
        max_checkpoints: int | None = None,
    ) -> None:
        for key, value, least in (("checkpoint_every", checkpoint_every, 1), ("max_checkpoints", max_checkpoints, 0)):
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{key}: {value!r}; a whole number, at least {least}, or None", key=key)
        self.groups = tuple(groups)
        self.layout = layout
        self.arena = Arena(layout)
        self.tree = PrefixTree(self.groups, self.arena, order_of(reclaim))
        self.reclaimer = Reclaimer(self.tree, self.groups, self.arena)
        self.pins = Pins(layout)
        self.tree.checkpoints.most = max_checkpoints
        self._states = self.tree.checkpoints.groups
        encoder = any(group.lifetime == "cross" for group in self.groups)
        self.prefix_cache = prefix_cache and not encoder and not (self._states and max_checkpoints == 0)
        self.block_tokens = min(group.block_tokens for group in self.groups)
        self.unit_tokens = unit_of(self.groups)
        self.leads = lead_unit(self.groups) > 0
        self._checkpointing = Checkpointing(self, checkpoint_every)
        self._checkpointed = self.prefix_cache and bool(self._states)
        self.moving = moving
        self.moves: list[Move] = []
        places = Places(layout, [tier.capacity_bytes for tier in tiers], self.moves) if moving else None
        self.tiers = TierStack(tiers, self.groups, self.unit_tokens, places) if tiers else None
        self.tree.tiers = self.tiers
        self._windowed = [index for index, group in enumerate(self.groups) if group.gives_back]
        self.windows = bool(self._windowed)
        self._plain = len(self.groups) == 1 and self.groups[0].lifetime == "full"

    def begin(self, tokens: npt.ArrayLike, key: PrefixKey = PrefixKey()) -> Sequence:  # noqa: B008 (frozen)
        """A new sequence with these known tokens, int32 ``[size]``; it holds nothing yet.

        An int32 array is kept, not copied: it must not change afterwards.
        """
        return Sequence(np.asarray(tokens, np.int32), key, len(self.groups))

    def reserve(self, sequence: Sequence, budget: int, *, admit_chunk: int | None = None) -> Reservation:
        """Make room for up to ``budget`` more tokens of a sequence, no further than those that are known.

        The first call looks for its prefix in the tree, at most all but the last token. With
        ``admit_chunk`` the call is only granted when all known tokens would fit, that many in flight at once: how a
        request is admitted. A model with states may be given less than there is room for, so that the step ends
        where a checkpoint is due.
        Changes nothing where it is not granted.
        """
        match = behind = saved = None
        stored, parting = sequence.length, sequence.parting
        if not sequence.begun:
            match = self._match(sequence)
            behind = self._behind(sequence, match) if self.tiers and not sequence.pruning else None
            stored = behind.tokens if behind else match.tokens
            parting = match.found if match.found > stored else 0
            saved = match.nodes[-1].checkpoint if match.nodes and not behind else None
        limit = min(sequence.size, stored + budget)
        if sequence.pruning:
            due = sequence.pruning.due(stored, sequence.pruned)
            limit = min(limit, due) if due > stored else stored + 1
        if self._checkpointed and sequence.shared:
            limit = self._checkpointing.stop(sequence, stored, limit, parting)
        found = behind.tables if behind else match.blocks if match else None
        if found and sequence.lead is not None:
            sequence.lead.put_before(found)
        have = found or sequence.tables
        wanted = [
            group.all_blocks(limit - gone) - table.size
            for group, table, gone in zip(self.groups, have, sequence.dropped, strict=True)
        ]
        revived = self._revived(found, saved)
        if not self._possible(sequence, wanted, revived, admit_chunk):
            if saved is None:
                return Reservation(False)
            # There is no room for the states and their checkpoint both, but the sequence can take it over.
            for group in self._states:
                wanted[group] = 0
            if not self._possible(sequence, wanted, revived, admit_chunk):
                return Reservation(False)

        if match and found:
            sequence.node = self.tree.attach(match)
            sequence.published = match.tokens
            sequence.hit_tokens = sequence.length = stored
            sequence.parting = parting
            sequence.tables = list(found)
            sequence.given_back = [0] * len(self.groups)
            for group in self._windowed:
                sequence.given_back[group] = found[group].size - revived[group].size
            sequence.begun = True
            for group, ids in enumerate(revived):
                if ids.size:
                    self.arena.share(group, ids)
            if self.tiers:
                # Before the device reclaims anything, which may make the tiers evict what was found.
                self._load(sequence, behind)
        self.free_up(wanted)
        for group, count in enumerate(wanted):
            if count > 0:
                new = self.arena.take(group, count)
                table = sequence.tables[group]
                sequence.tables[group] = np.concatenate((table, new)) if table.size else new
            elif found:
                # The match's arrays may be views of the tree's.
                sequence.tables[group] = sequence.tables[group].copy()
        if behind and self.tiers:
            self.tiers.loaded(behind, sequence.tables)
        if saved:
            self._checkpointing.resume(sequence, saved)
        sequence.in_flight = limit - sequence.length
        sequence.room = self.room(sequence)
        self._publish_new(sequence, limit)
        return Reservation(True, limit, stored if match else 0, behind.loads if behind else (), self.take_moves())

    def take_moves(self) -> Seq[Move]:
        """What is to be copied, in order, before anything else is written; it is not told again."""
        if not self.moves:
            return ()
        moves = self.moves.copy()
        self.moves.clear()
        return moves

    def room(self, sequence: Sequence) -> int:
        """Tokens for which a sequence has blocks."""
        room = self.groups[0].room(sequence.tables[0].size) + sequence.dropped[0]
        for index in range(1, len(self.groups)):
            room = min(room, self.groups[index].room(sequence.tables[index].size) + sequence.dropped[index])
        return room

    def extend(self, sequences: Seq[Sequence], first: int, last: int) -> int:
        """Take in the next token of sequences that decode, where their blocks have room or one can be had at once.

        What :meth:`reserve` would do, at a fraction of its cost: of sixteen steps fifteen take no block.

        Returns:
            The first of ``sequences[first:last]`` that it leaves to :meth:`reserve`, unchanged; ``last`` if none.
        """
        for index in range(first, last):
            sequence = sequences[index]
            size = sequence.size
            if sequence.length + 1 != size or size <= sequence.prompt_size:
                return index
            if size > sequence.room and not self._take_one(sequence):
                return index
            sequence.in_flight = 1
        return last

    def _take_one(self, sequence: Sequence) -> bool:
        """One more block, of a model whose layers all keep everything."""
        if not self._plain or not sequence.begun:
            return False
        while self.arena.shortage((1,)) > 0:
            # A leaf may go whose blocks a fork still refers to, so that nothing comes of it.
            if not (self.arena.cached(0) and self.reclaimer.reclaim(1)):
                return False
        sequence.tables[0] = np.concatenate((sequence.tables[0], self.arena.take(0, 1)))
        sequence.room += self.block_tokens
        return True

    def _match(self, sequence: Sequence) -> Match:
        if not (self.prefix_cache and sequence.shared):
            if sequence.pinned:
                return self.tree.match(sequence.key, sequence.tokens, sequence.pinned)
            return Match(tokens=0, nodes=[], blocks=[NO_BLOCKS] * len(self.groups))
        most = max(sequence.pinned, sequence.pruning.reusable) if sequence.pruning else sequence.size - 1
        return self.tree.match(sequence.key, sequence.tokens, most)

    def _behind(self, sequence: Sequence, match: Match) -> Resumption | None:
        """What the tiers have of a sequence beyond a match."""
        assert self.tiers is not None
        if sequence.swapped is not None:
            return self.tiers.find_swapped(sequence.swapped, match)
        return self.tiers.find(self.tree, sequence, match) if self.prefix_cache and sequence.shared else None

    def _load(self, sequence: Sequence, behind: Resumption | None) -> None:
        assert self.tiers is not None
        if behind:
            self.tiers.load(behind)
        self.forget_swapped(sequence)

    def _revived(self, found: list[Ids] | None, saved: Checkpoint | None) -> list[Ids]:
        """Blocks that were found which the sequence will refer to, per group; a checkpoint's until they are copied."""
        if found is None:
            return [NO_BLOCKS] * len(self.groups)
        revived = [ids[ids >= 0] if group in self._windowed else ids for group, ids in enumerate(found)]
        if saved:
            for group, ids in zip(self._states, saved.blocks, strict=True):
                revived[group] = ids
        return revived

    def _possible(self, sequence: Sequence, wanted: list[int], revived: list[Ids], admit_chunk: int | None) -> bool:
        if admit_chunk is not None:
            peaks = self.peak_blocks(sequence.size, admit_chunk, sequence.pruning)
            wanted = [max(count, peak - ids.size) for count, peak, ids in zip(wanted, peaks, revived, strict=True)]
        return max(wanted) <= 0 or self.arena.could_take(wanted, revived)

    def free_up(self, wanted: list[int]) -> None:
        """Reclaim cached blocks until all groups can take ``wanted``, which :meth:`Arena.could_take` has promised."""
        while (shortage := self.arena.shortage(wanted)) > 0:
            if len(wanted) > 1 and self.arena.collect_slabs():
                continue
            if not self.reclaimer.reclaim(shortage):
                raise AssertionError(f"{wanted} blocks were promised, and nothing is left to reclaim")

    def _publish_new(self, sequence: Sequence, limit: int) -> None:
        """Show whole blocks of a prompt to the requests that follow, where the tree has nothing of the kind."""
        end = min(limit, sequence.prompt_size) // self.unit_tokens * self.unit_tokens
        start = sequence.published
        if (
            self.prefix_cache
            and sequence.shared
            and end > start
            and not self.tree.has_edge(sequence.key, sequence.node, sequence.tokens, start)
        ):
            self.publish(sequence, end)

    def publish(self, sequence: Sequence, end: int) -> None:
        """Give the tree a sequence's first ``end`` tokens, whole units, and let it use the tree's blocks of them."""
        if self.prefix_cache and sequence.shared and end > sequence.published:
            sequence.node = self.tree.insert(
                sequence.key, sequence.node, sequence.tokens, sequence.tables, sequence.published, end
            )
            sequence.published = end

    def commit(self, sequence: Sequence, length: int) -> Seq[Move]:
        """The keys and values of the first ``length`` tokens are stored now.

        Returns:
            Copies of its states that a checkpoint keeps, and what goes to tiers; to be done before the next step.
        """
        self._commit(sequence, length)
        return self.take_moves()

    def _commit(self, sequence: Sequence, length: int) -> None:
        sequence.length = length
        sequence.in_flight = 0
        if sequence.published < length <= sequence.prompt_size:
            # The tree had this run, or part of it, under other blocks: share them from now on.
            self.publish(sequence, length // self.unit_tokens * self.unit_tokens)
        if sequence.node is not None and not sequence.node.sealed:
            self.tree.seal(sequence.node)
        for group in self._windowed:
            first = self.groups[group].first_live_block(length)
            start = sequence.given_back[group]
            if first > start:
                dead = sequence.tables[group][start:first].copy()
                sequence.tables[group][start:first] = -1
                sequence.given_back[group] = first
                self.arena.drop(group, dead)
                self.tree.mark_stale(sequence.node)
        if self._checkpointed and sequence.shared and self._checkpointing.is_due(sequence, length):
            self._checkpointing.take(sequence)

    def commit_all(self, sequences: Seq[Sequence]) -> list[Move]:
        """:meth:`commit` for each, of all that it had in flight."""
        plain = self._plain
        for sequence in sequences:
            length = sequence.length
            if plain and length >= sequence.prompt_size and sequence.in_flight == 1:
                # Nothing to share, nothing that falls out of a window: of a thousand calls all but a few.
                sequence.length = length + 1
                sequence.in_flight = 0
            else:
                self._commit(sequence, length + sequence.in_flight)
        return [*self.take_moves()]

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give back everything that a sequence holds; the tree keeps its whole blocks unless ``keep`` is False.

        With states it has them already, as far as anybody could go on from them: up to the last checkpoint.
        """
        self.forget_swapped(sequence)
        stored = not sequence.in_flight
        if keep and stored and not self._states:
            self.publish(sequence, sequence.length // self.unit_tokens * self.unit_tokens)
            self.tree.seal(sequence.node)
        for group, table in enumerate(sequence.tables):
            start = sequence.given_back[group]
            self.arena.drop(group, table[start:] if start else table)
        if sequence.node is not None:
            if self._windowed:
                self.tree.mark_stale(sequence.node)
            self.tree.let_go(sequence.node)
            if not stored:
                # What was reserved and never stored must not be found by anyone.
                self.tree.forget_unsealed()
        sequence.tables = [NO_BLOCKS] * len(self.groups)
        sequence.given_back = [0] * len(self.groups)
        sequence.dropped = [0] * len(self.groups)
        sequence.pruned = 0
        sequence.node = None
        if self.tiers and sequence.trailing and sequence.trailing.node and sequence.trailing.moves:
            self.tiers.sealed(self.tree, sequence.trailing.node)
        sequence.trailing = None
        sequence.begun = False
        sequence.length = sequence.in_flight = sequence.published = sequence.parting = sequence.room = 0
        sequence.prompt_size = sequence.size

    def swap_out(self, sequence: Sequence) -> bool:
        """Move all that a sequence holds to the first tier, between steps; its next reservation brings it back.

        The tree keeps of it what it had. False means that nothing has changed: there is no tier, or no room in it, or
        the sequence was pruned.
        """
        if self.tiers is None or sequence.in_flight or not sequence.length or sequence.pruned:
            return False
        before = 0 if sequence.lead is None else self.held_bytes(sequence.lead)
        swapped = Swapped(sequence.length, self.held_bytes(sequence) - before)
        if not self.tiers.swap_out(swapped):
            return False
        self.release(sequence, keep=False)
        sequence.swapped = swapped
        return True

    def forget_swapped(self, sequence: Sequence) -> None:
        """Give up what a sequence has in the first tier, if anything: it is computed again."""
        if sequence.swapped is not None and self.tiers:
            self.tiers.forget(sequence.swapped)
            sequence.swapped = None

    def abandon(self, sequences: Seq[Sequence]) -> None:
        """Release the sequences of a step that failed, and forget what it was to store."""
        for sequence in sequences:
            self.release(sequence, keep=False)

    def compact(self, sequence: Sequence) -> list[Compaction] | None:
        """Give back what pruning frees of a sequence, between steps: :mod:`kvist.cache.compaction`.

        Returns:
            Where the tokens lie and where those that are kept belong, of each group that is pruned; to be moved before
            anything else is reserved. None: memory lacks for those that are kept, and nothing has changed.
        """
        return compact(self, sequence)

    def pin(
        self,
        count: int,
        key: PrefixKey,
        *,
        behind: Sequence | Lead | None = None,
        tokens: npt.NDArray[np.int32] | None = None,
    ) -> Sequence | Lead:
        """Take blocks for a run that stands for ``count`` tokens which nobody has.

        Whoever calls fills them before the next step and says so with :meth:`filled`, or gives them back with
        :meth:`unpin`. Requests whose tokens begin with its own find it under ``key``. Where cartridges have a format of
        their own it is a lead, which those have whose :attr:`Sequence.lead` it is; key and tokens say nothing then.

        Args:
            count: of its tokens.
            key: of the run.
            behind: a run that is pinned under the same key, which it follows and whose blocks it shares.
            tokens: placeholders, int32 ``[count]``, which no other run behind that one has; left out, those of
                :func:`kvist.cache.pinning.placeholders`.

        Raises:
            InputError: ``count`` is no multiple of the unit, or a group keeps something that is no token's.
            DoesNotFit: there is no room now; nothing has changed.
        """
        if self.leads:
            assert not isinstance(behind, Sequence)
            return pin_lead(self, count, behind)
        assert not isinstance(behind, Lead)
        return pin(self, count, key, behind, tokens)

    def filled(self, pinned: Sequence | Lead) -> None:
        """What is pinned is stored now: nothing reclaims it until :meth:`unpin`, but for what windows never read."""
        if isinstance(pinned, Sequence):
            # Nothing is to be copied for it itself; what others are to give up stays to be told.
            self._commit(pinned, pinned.pinned)
        self.pins.add(pinned)

    def unpin(self, pinned: Sequence | Lead) -> None:
        """Let a pinned run go: it is reclaimed like any other once nobody uses it, and at once where it is a lead."""
        filled = self.pins.remove(pinned)
        if isinstance(pinned, Sequence):
            self.release(pinned, keep=filled)
            return
        for group, table in enumerate(pinned.tables):
            self.arena.drop(group, table)

    def clear(self) -> None:
        """Forget every cached block, and take back the slabs that are free then."""
        while self.reclaimer.reclaim(self.layout.total_blocks(0)):
            pass
        self.arena.collect_slabs()

    def fork(self, sequence: Sequence) -> Fork | None:
        """A second sequence with the same tokens that shares every whole unit; None where memory lacks.

        The blocks of the last, partly filled unit are copied, and every state; the caller does the copies before
        either goes on: :mod:`kvist.cache.forking`.
        """
        return fork(self, sequence)

    # -- look -----------------------------------------------------------------------------------------------

    def held_bytes(self, holder: Sequence | Lead) -> int:
        """Bytes of the blocks that a sequence or a lead refers to, shared ones included."""
        if isinstance(holder, Sequence):
            return sum(holder.blocks(group) * size for group, size in enumerate(self.layout.block_bytes))
        return sum(table.size * size for table, size in zip(holder.tables, self.layout.block_bytes, strict=True))

    def snapshot(
        self, sequences: Mapping[str, Sequence] | None = None, text_of: Callable[[list[int]], str] | None = None
    ) -> dict[str, Any]:
        """Where every block is, as :mod:`kvist.cache.snapshot` describes it."""
        return snapshot(self, sequences or {}, text_of)

    def peak_blocks(self, length: int, chunk: int, pruning: PruningPlan | None = None) -> list[int]:
        """Most blocks of each group on the way to ``length`` tokens, ``chunk`` of them in flight, pruned or not."""
        slots = pruning.slots(length) if pruning else length
        return [group.peak_blocks(slots if group.prunable else length, chunk) for group in self.groups]

    def slabs_needed(self, length: int, chunk: int, slots: int | None = None) -> int:
        """Slabs that a lone sequence needs beside what is pinned, ``chunk`` of ``length`` own tokens in flight.

        With ``slots`` no more of these are filled at once where tokens are pruned.
        """
        lengths = (length if slots is None or not group.prunable else slots for group in self.groups)
        blocks = [group.peak_blocks(tokens, chunk) for group, tokens in zip(self.groups, lengths, strict=True)]
        return self.pins.slabs_with(blocks)

    def longest(self, chunk: int, limit: int) -> int:
        """Longest sequence, in tokens and up to ``limit``, that would fit alone with ``chunk`` tokens in flight."""
        low, high = 0, limit + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.slabs_needed(middle, chunk) <= self.layout.num_slabs:
                low = middle
            else:
                high = middle
        return low
