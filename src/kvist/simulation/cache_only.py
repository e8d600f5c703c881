"""Prefix hits of a trace in a cache of so many blocks: no clock, no model, one request after the other.

A shortcut through the rules of :mod:`kvist.cache`, not other rules: a request finds its leading blocks, takes blocks
for all the rest of its prompt, for which the least useful leaves go, and leaves its blocks behind. As each request uses
a block together with all before it, the order of leaves can be read off the trace:

* ``lru`` and ``lfu``: a block was used no later, and no more often, than the one before it. Blocks ordered by their
  last use, the deepest of a request first, are in the order of reclaim; who is a leaf need not be known.
* ``optimal``: likewise by next use. Blocks that are never used again need only be counted.
* ``fifo``: a block is stored no earlier than the one before it, so that leaves must be kept count of.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.traces.trace import Trace

Ints = npt.NDArray[np.int64]

# Requests of which the ids are Python objects at once: a long trace stays an array.
_STRETCH = 1024
_GONE = -1

# Of a request its number, the blocks that it uses, how many of them it may share, and how many it takes in all.
_Request = tuple[int, list[int], int, int]


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """What a cache of so many blocks would have spared.

    Attributes:
        reclaim: the order in which blocks went.
        blocks: that the cache held; None without a limit.
        requests: of the trace.
        refused: requests with more blocks than the cache; they change nothing and hit nothing.
        refused_tokens: of their prompts.
        prompt_tokens: of all requests.
        hit_tokens: of these, tokens that were found.
        request_hits: int64 ``[requests]``, tokens found by each.
    """

    reclaim: str
    blocks: int | None
    requests: int
    refused: int
    refused_tokens: int
    prompt_tokens: int
    hit_tokens: int
    request_hits: Ints

    @property
    def hit_ratio(self) -> float:
        """Hits over prompt tokens; 0 of an empty trace."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def cache_hits(trace: Trace, blocks: int | None = None, *, reclaim: str = "lru") -> CacheHits:
    """Replay the prompts of a trace in the order of arrival.

    At least the last token of a prompt is computed, in a block of the request's own. The end of a prompt that fills no
    block takes one: if it is named it is found like others, else it is gone when the request ends. Whole blocks that a
    prompt does not name are its own. Answers are not kept.

    Args:
        trace: whose ids name the same prefix where they are equal; without any, nothing is shared.
        blocks: that the cache holds, of ``trace.block_tokens`` tokens; None for no limit.
        reclaim: ``lru``, ``lfu``, ``fifo`` or ``optimal``.

    Raises:
        InputError: the order is none of these, or the cache has no block.
    """
    if reclaim not in _RULES:
        raise InputError(f"reclaim: {reclaim!r}; one of {', '.join(_RULES)}", key="reclaim")
    if blocks is not None and blocks < 1:
        raise InputError(f"blocks: {blocks}; a cache holds at least 1", key="blocks")
    hits = np.zeros(len(trace), np.int64)
    refused = refused_tokens = 0
    if trace.block_tokens is not None:
        uses = _Uses.of(trace)
        room = uses.enough if blocks is None else blocks
        fits = uses.needed <= room
        refused = int(np.count_nonzero(~fits))
        if refused:
            refused_tokens = int(trace.prompts[~fits].sum())
            uses = uses.of_requests(fits)
        # Without a limit no order matters.
        rule = _RULES["lru" if room >= uses.enough else reclaim]
        found = np.fromiter(rule(uses, room), np.int64, uses.most.size)
        hits[fits] = np.minimum(found * trace.block_tokens, trace.prompts[fits] - 1)
    return CacheHits(
        reclaim=reclaim,
        blocks=blocks,
        requests=len(trace),
        refused=refused,
        refused_tokens=refused_tokens,
        prompt_tokens=int(trace.prompts.sum()),
        hit_tokens=int(hits.sum()),
        request_hits=hits,
    )


@dataclass(frozen=True, kw_only=True)
class _Uses:
    """Which blocks each request uses.

    Attributes:
        ids: ``[uses]``, small numbers from 0 for blocks, request after request, from the beginning of each prompt.
        offsets: ``[requests + 1]``, into ``ids``.
        most: ``[requests]``, leading blocks that it may share: not the one with the last token.
        needed: ``[requests]``, blocks that the whole prompt takes.
        names: above every id.
    """

    ids: Ints
    offsets: Ints
    most: Ints
    needed: Ints
    names: int

    @classmethod
    def of(cls, trace: Trace) -> "_Uses":
        assert trace.block_tokens is not None
        ids, offsets = trace.blocks, trace.offsets
        named = np.diff(offsets)
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
        if high - low >= 4 * ids.size + 64:
            # Hashes, say: sorting them costs more than the rest where they are small already.
            found, ids = np.unique(ids, return_inverse=True)
            names = found.size
        else:
            ids = ids - low
            names = high - low + 1
        own = np.maximum(trace.prompts // trace.block_tokens - named, 0)
        if own.any():
            total = int(own.sum())
            # A request's own blocks follow those that it names.
            ids = np.insert(ids, np.repeat(offsets[1:], own), np.arange(names, names + total))
            offsets = offsets + np.concatenate(([0], np.cumsum(own)))
            names += total
        return cls(
            ids=ids,
            offsets=offsets,
            most=np.minimum(np.diff(offsets), (trace.prompts - 1) // trace.block_tokens),
            needed=np.maximum(np.diff(offsets), -(-trace.prompts // trace.block_tokens)),
            names=names,
        )

    def of_requests(self, chosen: npt.NDArray[np.bool_]) -> "_Uses":
        """The same of some of the requests, bool ``[requests]``."""
        counts = np.diff(self.offsets)
        return _Uses(
            ids=self.ids[np.repeat(chosen, counts)],
            offsets=np.concatenate(([0], np.cumsum(counts[chosen]))),
            most=self.most[chosen],
            needed=self.needed[chosen],
            names=self.names,
        )

    @property
    def enough(self) -> int:
        """Blocks with which none is ever reclaimed."""
        return self.names + int(self.needed.max(initial=0))

    def __iter__(self) -> Iterator[_Request]:
        # Without a line of Python for each request: a replay under LRU goes over them twice.
        for start in range(0, self.most.size, _STRETCH):
            stop = min(start + _STRETCH, self.most.size)
            offsets = self.offsets[start : stop + 1]
            ids = self.ids[offsets[0] : offsets[-1]].tolist()
            ends = (offsets - offsets[0]).tolist()
            own = map(ids.__getitem__, map(slice, ends, ends[1:]))
            most, needed = self.most[start:stop].tolist(), self.needed[start:stop].tolist()
            yield from zip(range(start, stop), own, most, needed, strict=True)


def _lru(uses: _Uses, room: int) -> Iterator[int]:
    """Leading blocks that are found, request after request; the end of a prompt may be among them."""
    last = [_GONE] * uses.names
    size = 0
    # The users of blocks again, far behind, as long as they are the last: it is their blocks' turn to go.
    users = iter(uses)
    user, victims = _GONE, list[int]()
    for index, ids, most, needed in uses:
        found = _found(last, ids)
        hits = min(found, most)
        for block in ids[:hits]:
            last[block] = index
        surplus = size - (room - needed + hits)
        if surplus > 0:
            size -= surplus
            while surplus:
                if not victims:
                    user, victims, _, _ = next(users)
                block = victims.pop()
                if last[block] == user:
                    last[block] = _GONE
                    surplus -= 1
        for block in ids[hits:]:
            if last[block] == _GONE:
                size += 1
            last[block] = index
        yield found


def _found(last: list[int], ids: list[int]) -> int:
    """Leading blocks that are in the cache."""
    found = 0
    for block in ids:
        if last[block] == _GONE:
            break
        found += 1
    return found


def _lfu(uses: _Uses, room: int) -> Iterator[int]:
    count = [_GONE] * uses.names
    size = 0
    # By number of uses after the first, the blocks used so often, least recently used first.
    equals: dict[int, OrderedDict[int, None]] = {}

    def take_out(block: int) -> None:
        those = equals[count[block]]
        del those[block]
        if not those:
            del equals[count[block]]

    for _, ids, most, needed in uses:
        found = _found(count, ids)
        hits = min(found, most)
        for block in ids[:hits]:
            take_out(block)
        surplus = size - (room - needed + hits)
        size -= max(0, surplus)
        while surplus > 0:
            least = min(equals)
            those = equals[least]
            while those and surplus > 0:
                count[those.popitem(last=False)[0]] = _GONE
                surplus -= 1
            if not those:
                del equals[least]
        for place in range(len(ids) - 1, -1, -1):
            block = ids[place]
            if count[block] == _GONE:
                size += 1
            elif place >= hits:
                take_out(block)
            count[block] = often = count[block] + 1
            if often not in equals:
                equals[often] = OrderedDict()
            equals[often][block] = None
        yield found


def _fifo(uses: _Uses, room: int) -> Iterator[int]:
    stored = [_GONE] * uses.names
    used = [_GONE] * uses.names
    before = [_GONE] * uses.names
    children = [0] * uses.names
    size = 0
    leaves: list[tuple[int, int]] = []
    for index, ids, most, needed in uses:
        found = _found(stored, ids)
        hits = min(found, most)
        for block in ids[:hits]:
            used[block] = index
        surplus = size - (room - needed + hits)
        size -= max(0, surplus)
        in_use = []
        while surplus > 0:
            entry = heapq.heappop(leaves)
            block = entry[1]
            if stored[block] != entry[0] or children[block]:
                continue
            # The one before was stored no later: where this was the last to follow it, it is the next to go.
            while block != _GONE and not children[block]:
                if used[block] == index:
                    in_use.append((stored[block], block))
                    break
                if not surplus:
                    heapq.heappush(leaves, (stored[block], block))
                    break
                surplus -= 1
                stored[block] = _GONE
                block = before[block]
                if block != _GONE:
                    children[block] -= 1
        for entry in in_use:
            heapq.heappush(leaves, entry)
        last = ids[hits - 1] if hits else _GONE
        for block in ids[hits:]:
            used[block] = index
            if stored[block] == _GONE:
                stored[block] = index
                before[block] = last
                size += 1
                if last != _GONE:
                    children[last] += 1
            last = block
        if last != _GONE and not children[last]:
            heapq.heappush(leaves, (stored[last], last))
        yield found


def _optimal(uses: _Uses, room: int) -> Iterator[int]:
    last = [_GONE] * uses.names
    size = 0
    # Blocks in the cache that nobody will use.
    useless = 0
    never = uses.most.size
    next_use = _next_uses(uses)
    # Blocks that one request uses next: -next use, who used them last, and these blocks, the deepest last. Of those
    # with one next use, the ones used longer ago lie deeper.
    useful: list[tuple[int, int, list[int]]] = []
    for index, ids, most, needed in uses:
        found = _found(last, ids)
        hits = min(found, most)
        for block in ids[:hits]:
            last[block] = index
        surplus = size - (room - needed + hits)
        if surplus > 0:
            size -= surplus
            spared = min(surplus, useless)
            useless -= spared
            surplus -= spared
            while surplus:
                _, user, blocks = useful[0]
                while blocks and surplus:
                    block = blocks.pop()
                    if last[block] == user:
                        last[block] = _GONE
                        surplus -= 1
                if not blocks:
                    heapq.heappop(useful)
        for block in ids[hits:]:
            if last[block] == _GONE:
                size += 1
            last[block] = index
        start = int(uses.offsets[index])
        following = next_use[start : start + len(ids)].tolist()
        place = 0
        while place < len(ids):
            when = following[place]
            end = place + 1
            while end < len(ids) and following[end] == when:
                end += 1
            if when == never:
                useless += end - place
            else:
                heapq.heappush(useful, (-when, index, ids[place:end]))
            place = end
        yield found


def _next_uses(uses: _Uses) -> Ints:
    """``[uses]``: the request that uses the same block next; the number of requests where none does."""
    order = np.argsort(uses.ids, kind="stable")
    request = np.repeat(np.arange(uses.most.size), np.diff(uses.offsets))
    following = np.full(uses.ids.size, uses.most.size, np.int64)
    same = uses.ids[order[:-1]] == uses.ids[order[1:]]
    following[order[:-1][same]] = request[order[1:][same]]
    return following


_RULES: dict[str, Callable[[_Uses, int], Iterator[int]]] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "optimal": _optimal,
}
