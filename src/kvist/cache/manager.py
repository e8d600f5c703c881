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

from kvist.cache.arena import Arena
from kvist.cache.checkpointing import Checkpointing
from kvist.cache.compaction import compact
from kvist.cache.forking import fork
from kvist.cache.groups import Group, unit_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.lead_groups import lead_unit
from kvist.cache.leads import Lead
from kvist.cache.offers import Found, Offers
from kvist.cache.pinning import Pins
from kvist.cache.places import Places
from kvist.cache.prefix import PrefixKey, PrefixTree
from kvist.cache.promises import Promises
from kvist.cache.reclaim import LRU, Order, order_of
from kvist.cache.reclaiming import Reclaimer
from kvist.cache.resumption import Swapped
from kvist.cache.sequence import Compaction, Fork, Move, Reservation, Sequence
from kvist.cache.snapshot import snapshot
from kvist.cache.tier import Tier
from kvist.cache.tiers import TierStack
from kvist.errors import InputError


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
        pins: what stays until it is let go.
        moving: whether the tiers' bytes are real.
        moves: copies that were decided and not yet returned, in order.
        promises: what a sequence may be promised before it begins.
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
        self.pins = Pins(self)
        self.tree.checkpoints.most = max_checkpoints
        self._states = self.tree.checkpoints.groups
        encoder = any(group.lifetime == "cross" for group in self.groups)
        self.prefix_cache = prefix_cache and not encoder and not (self._states and max_checkpoints == 0)
        self.block_tokens = min(group.block_tokens for group in self.groups)
        self.unit_tokens = unit_of(self.groups)
        self.leads = lead_unit(self.groups) > 0
        self._checkpointing = Checkpointing(self, checkpoint_every) if self._states and self.prefix_cache else None
        self.moving = moving
        self.moves: list[Move] = []
        places = Places(layout, [tier.capacity_bytes for tier in tiers], self.moves) if moving else None
        self.tiers = TierStack(tiers, self.groups, self.unit_tokens, places) if tiers else None
        self.tree.tiers = self.tiers
        self._windowed = [index for index, group in enumerate(self.groups) if group.gives_back]
        self.windows = bool(self._windowed)
        self.promises = Promises(self.groups, layout, self.pins)
        self._offers = Offers(
            self.groups,
            self.arena,
            self.tree,
            self.promises,
            self._checkpointing,
            prefix_cache=self.prefix_cache,
        )
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
        offer = self._offers.make(sequence, budget, admit_chunk)
        if offer is None:
            return Reservation(False)
        found = offer.found
        if found:
            self._begin(sequence, found)
        self.free_up(offer.wanted)
        for group, count in enumerate(offer.wanted):
            if count > 0:
                new = self.arena.take(group, count)
                table = sequence.tables[group]
                sequence.tables[group] = np.concatenate((table, new)) if table.size else new
            elif found:
                # The match's arrays may be views of the tree's.
                sequence.tables[group] = sequence.tables[group].copy()
        if found and found.behind and self.tiers:
            self.tiers.loaded(found.behind, sequence.tables)
        if found and found.saved and self._checkpointing:
            self._checkpointing.resume(sequence, found.saved)
        sequence.in_flight = offer.limit - sequence.length
        sequence.room = self.room(sequence)
        self._publish_new(sequence, offer.limit)
        loads = found.behind.loads if found and found.behind else ()
        return Reservation(True, offer.limit, found.tokens if found else 0, loads, self.take_moves())

    def _begin(self, sequence: Sequence, found: Found) -> None:
        """Let a sequence refer to what was found of it, before anything is reclaimed."""
        sequence.node = self.tree.attach(found.match)
        sequence.published = found.match.tokens
        sequence.hit_tokens = sequence.length = found.tokens
        sequence.parting = found.parting
        sequence.tables = list(found.tables)
        sequence.given_back = [0] * len(self.groups)
        for group in self._windowed:
            sequence.given_back[group] = found.tables[group].size - found.revived[group].size
        sequence.begun = True
        for group, ids in enumerate(found.revived):
            if ids.size:
                self.arena.share(group, ids)
        if self.tiers:
            # The device is about to reclaim, which may make the tiers evict what was found.
            if found.behind:
                self.tiers.load(found.behind)
            self.forget_swapped(sequence)

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
        self.note_stored(sequence, length)
        return self.take_moves()

    def note_stored(self, sequence: Sequence, length: int) -> None:
        """:meth:`commit`, whose copies are left to the next verb that returns any."""
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
        if self._checkpointing and sequence.shared and self._checkpointing.is_due(sequence, length):
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
                self.note_stored(sequence, length + sequence.in_flight)
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
        if self.tiers and sequence.trailing and sequence.trailing.node and sequence.trailing.moves:
            self.tiers.sealed(self.tree, sequence.trailing.node)
        sequence.forget_blocks()

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
