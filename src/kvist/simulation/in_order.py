"""Requests one after the other, without a clock: what a prefix cache of some size finds."""

from collections.abc import Callable

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.errors import InputError
from kvist.simulation.cache_only import cache_hits
from kvist.simulation.future import Future
from kvist.simulation.prompts import Prompts
from kvist.simulation.results import PolicyResult
from kvist.traces.trace import Trace


def hits_in_order(
    trace: Trace,
    groups: Callable[[int], tuple[Group, ...]] | None,
    cache_bytes: int | None,
    reclaim: str,
    block_tokens: int | None,
) -> PolicyResult:
    """Replay the prompts of a trace.

    Where every layer keeps every token, and blocks are the trace's, by counting blocks; else through the engine's
    cache.

    Args:
        trace: requests in the order of their arrival.
        groups: what a model remembers, in blocks of so many tokens; None for an endless cache.
        cache_bytes: for it; None for an endless cache.
        reclaim: the order in which cached blocks go.
        block_tokens: of a block; those that the trace names where left out.

    Raises:
        InputError: blocks are asked for that an endless cache knows nothing of.
        DoesNotFit: the memory holds not one block of each group.
    """
    size = block_tokens or trace.block_tokens or 16
    if groups is None or cache_bytes is None:
        if block_tokens is not None and block_tokens != trace.block_tokens:
            raise InputError(
                f"block_tokens: {block_tokens}; an endless cache finds the blocks that the trace names "
                f"({trace.block_tokens or 'none'}): leave it out, or give a memory",
                key="block_tokens",
            )
        found = cache_hits(trace, None, reclaim=reclaim)
        return _result(trace, found.hit_tokens, found.refused, found.refused_tokens, 0)
    made = groups(size)
    layout = ArenaLayout.of(made, cache_bytes)
    if len(made) == 1 and made[0].lifetime == "full" and made[0].block_tokens == trace.block_tokens:
        found = cache_hits(trace, layout.total_blocks(0), reclaim=reclaim)
        return _result(trace, found.hit_tokens, found.refused, found.refused_tokens, layout.total_bytes)
    return _through_manager(trace, made, layout, reclaim)


def _through_manager(trace: Trace, groups: tuple[Group, ...], layout: ArenaLayout, reclaim: str) -> PolicyResult:
    prompts = Prompts.of(trace)
    future = Future.of(prompts) if reclaim == "optimal" else None
    manager = CacheManager(groups, layout, reclaim=future.order() if future else reclaim)
    hits = refused = refused_tokens = 0
    longest = manager.promises.longest(int(trace.prompts.max()), int(trace.prompts.max()))
    for index, prompt in enumerate(trace.prompts.tolist()):
        if prompt > longest:
            refused += 1
            refused_tokens += prompt
            continue
        sequence = manager.begin(prompts.tokens(index))
        reservation = manager.reserve(sequence, sequence.size)
        if not reservation.granted:
            refused += 1
            refused_tokens += sequence.size
            continue
        hits += reservation.hit_tokens
        if future is not None:
            future.admit(index)
        manager.commit(sequence, reservation.limit)
        while sequence.length < sequence.size:
            # A model with states stops where one is to be kept.
            manager.commit(sequence, manager.reserve(sequence, sequence.size).limit)
        manager.release(sequence)
    return _result(trace, hits, refused, refused_tokens, layout.total_bytes)


def _result(trace: Trace, hit_tokens: int, refused: int, refused_tokens: int, cache_bytes: int) -> PolicyResult:
    asked = int(trace.prompts.sum()) - refused_tokens
    return PolicyResult(
        policy="prefix",
        hit_tokens=hit_tokens,
        hit_ratio=hit_tokens / asked if asked else 0.0,
        finished=len(trace) - refused,
        refused=refused,
        cache_bytes=cache_bytes,
    )
