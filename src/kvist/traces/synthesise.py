"""Make a trace: requests of given lengths and arrivals, whose prompts share what a tree of prefixes says.

**Sessions.** Each begins with one of the system prompts, by Zipf's law, and has one turn or more (geometric). A turn's
prompt is all that was said before, the answers too, and new tokens of its own. Sessions begin as the arrivals say;
the next turn comes after a time to think (exponential) from the last one's arrival.

**Blocks.** Named are those that two requests can share: the whole blocks of system prompts, and of a session's turns
up to what its last turn repeats. What lies behind is a request's own, and a million requests stay small.

**The same everywhere.** A seed means the same trace on every machine: see :mod:`kvist.traces.laws`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.traces.blocks import chained, offsets_of
from kvist.traces.laws import Arrivals, Draws, Empirical, Law
from kvist.traces.trace import Trace

_Ints = npt.NDArray[np.int64]
_MOST_REQUESTS = 10_000_000
# With what is made of them on the way less than 2 GiB.
_MOST_REFERENCES = 40_000_000
_MOST_SECONDS = 10**9
_SLICE = 4096
# Purposes of random numbers.
_ARRIVE, _SYSTEM, _TURNS, _PROMPT, _OUTPUT, _TURN, _THINK = range(7)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What prompts share.

    Attributes:
        systems: different system prompts; 0 for none.
        system_tokens: tokens of each.
        zipf: how popular they are: the k-th as 1 / k to this power; 0 makes all equal.
        turns: mean turns of a session.
        turn: new tokens of each turn after the first; None for as many as a first prompt has.
        think: mean seconds from one turn to the next.
    """

    systems: int = 0
    system_tokens: int = 0
    zipf: float = 1.0
    turns: float = 1.0
    turn: Law | None = None
    think: float = 60.0

    def __post_init__(self) -> None:
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("systems", self.systems, 0, 10**7),
            ("system_tokens", self.system_tokens, 0, 2**24),
            ("zipf", self.zipf, 0, 10),
            ("turns", self.turns, 1, 10**4),
            ("think", self.think, 0, 10**6),
        )
        for name, value, least, most in ranges:
            if not least <= value <= most:
                raise InputError(f"{name}: {value:g} is out of range; {least:,} to {most:,}", key=name)
        if bool(self.systems) != bool(self.system_tokens):
            missing = "system_tokens" if self.systems else "systems"
            raise InputError(f"{missing}: 0, but system prompts need their number and their length", key=missing)


def synthesise(
    requests: int,
    *,
    seed: int = 0,
    arrivals: Arrivals,
    prompt: Law,
    output: Law,
    tree: Tree | None = None,
    block_tokens: int = 16,
) -> Trace:
    """Make a trace.

    Args:
        requests: how many.
        seed: the same seed makes the same trace, on any machine.
        arrivals: of requests; sessions begin as much rarer as they have more turns.
        prompt: new tokens of a session's first prompt, beside the system prompt.
        output: tokens of an answer. Where both are :class:`Empirical` with as many lengths, each prompt is drawn with
            the answer that it had.
        tree: what prompts share; None for nothing.
        block_tokens: tokens of a block.

    Raises:
        InputError: a number is out of range, or more blocks are shared than memory should hold.
    """
    tree = tree or Tree()
    for name, value, least, most in (
        ("requests", requests, 1, _MOST_REQUESTS),
        ("seed", seed, 0, 2**63 - 1),
        ("block_tokens", block_tokens, 1, 2**20),
    ):
        if not least <= value <= most:
            raise InputError(f"{name}: {value} is out of range; {least:,} to {most:,}", key=name)
    if requests / arrivals.rate > _MOST_SECONDS:
        raise InputError(
            f"rate: {arrivals.rate:g} requests a second; {requests:,} requests would take more than 30 years",
            key="rate",
        )
    sessions = _sessions(requests, seed, tree)
    lengths = _lengths(sessions, seed, tree, prompt, output)
    times = _times(sessions, seed, tree, arrivals)
    order = np.argsort(times, kind="stable")
    times = times[order]
    blocks, offsets = _blocks(sessions, lengths, tree, block_tokens, order)
    return Trace(
        source=f"synthetic, seed {seed}",
        arrivals=(times - times[0]) / 1e6,
        timed=True,
        prompts=lengths.prompts[order],
        outputs=lengths.outputs[order],
        block_tokens=block_tokens if blocks.size else None,
        blocks=chained(blocks, offsets),
        offsets=offsets,
    )


@dataclass(frozen=True, kw_only=True)
class _Sessions:
    """Which requests belong together; requests are counted session after session.

    Attributes:
        starts: int64 ``[sessions]``, each one's first request.
        turns: int64 ``[sessions]``.
        of: int64 ``[requests]``, the session of each.
        systems: int64 ``[sessions]``, the system prompt of each; 0 where there are none.
    """

    starts: _Ints
    turns: _Ints
    of: _Ints
    systems: _Ints

    def summed(self, values: _Ints) -> _Ints:
        """Sums of each session's values up to each request, that request's own included."""
        sums = np.cumsum(values)
        return sums - (sums - values)[self.starts][self.of]


def _sessions(requests: int, seed: int, tree: Tree) -> _Sessions:
    turns = np.ones(requests, np.int64)
    if tree.turns > 1:
        falls = np.log1p(-Draws(seed, _TURNS).uniform(requests)) / np.log1p(-1 / tree.turns)
        turns += np.minimum(falls, requests).astype(np.int64)
        count = int(np.searchsorted(np.cumsum(turns), requests)) + 1
        turns = turns[:count]
        # The last session is cut off where enough requests are there.
        turns[-1] -= int(turns.sum()) - requests
    systems = np.zeros(turns.size, np.int64)
    if tree.systems:
        popularity = np.cumsum(np.arange(1, tree.systems + 1, dtype=np.float64) ** -tree.zipf)
        drawn = Draws(seed, _SYSTEM).uniform(turns.size) * popularity[-1]
        systems = np.minimum(np.searchsorted(popularity, drawn, side="right"), tree.systems - 1)
    return _Sessions(
        starts=offsets_of(turns)[:-1], turns=turns, of=np.repeat(np.arange(turns.size), turns), systems=systems
    )


@dataclass(frozen=True, kw_only=True)
class _Lengths:
    """Of each request, int64 ``[requests]``: prompt, answer, and the tokens that it has in common with another."""

    prompts: _Ints
    outputs: _Ints
    common: _Ints


def _lengths(sessions: _Sessions, seed: int, tree: Tree, prompt: Law, output: Law) -> _Lengths:
    requests = sessions.of.size
    new = prompt.draw(Draws(seed, _PROMPT), requests)
    paired = (
        isinstance(prompt, Empirical) and isinstance(output, Empirical) and prompt.tokens.size == output.tokens.size
    )
    outputs = output.draw(Draws(seed, _PROMPT if paired else _OUTPUT), requests)
    later = np.ones(requests, bool)
    later[sessions.starts] = False
    if tree.turn is not None:
        new[later] = tree.turn.draw(Draws(seed, _TURN), int(np.count_nonzero(later)))
    prompts = sessions.summed(new) + sessions.summed(outputs) - outputs + tree.system_tokens
    last = np.ones(requests, bool)
    last[:-1] = ~later[1:]
    return _Lengths(prompts=prompts, outputs=outputs, common=np.where(last, prompts - new, prompts))


def _times(sessions: _Sessions, seed: int, tree: Tree, arrivals: Arrivals) -> _Ints:
    """Microseconds, int64 ``[requests]``."""
    begins = arrivals.draw(Draws(seed, _ARRIVE), sessions.turns.size, slower=tree.turns)[sessions.of]
    if sessions.turns.size == sessions.of.size:
        return begins
    thinks = np.rint(Draws(seed, _THINK).exponential(sessions.of.size) * (tree.think * 1e6)).astype(np.int64)
    thinks[sessions.starts] = 0
    return begins + sessions.summed(thinks)


def _blocks(sessions: _Sessions, lengths: _Lengths, tree: Tree, block_tokens: int, order: _Ints) -> tuple[_Ints, _Ints]:
    """Blocks and offsets of the requests in the order of their arrival."""
    counts = lengths.common // block_tokens
    references = int(counts.sum())
    if references > _MOST_REFERENCES:
        raise InputError(
            f"block_tokens: prompts have {references:,} blocks of {block_tokens} tokens in common with others; at most "
            f"{_MOST_REFERENCES:,}: raise `block_tokens`, or make fewer requests",
            key="block_tokens",
        )
    of_system = tree.system_tokens // block_tokens
    own = np.maximum(0, np.maximum.reduceat(counts, sessions.starts) - of_system)
    begins = np.cumsum(own) - own + tree.systems * of_system
    counts, of = counts[order], sessions.of[order]
    offsets = offsets_of(counts)
    blocks = np.empty(references, np.int64)
    for start in range(0, of.size, _SLICE):
        part = slice(start, min(of.size, start + _SLICE))
        first, end = int(offsets[part.start]), int(offsets[part.stop])
        place = np.arange(first, end) - np.repeat(offsets[part], counts[part])
        shared = np.repeat(sessions.systems[of[part]] * of_system, counts[part])
        private = np.repeat(begins[of[part]] - of_system, counts[part])
        blocks[first:end] = place + np.where(place < of_system, shared, private)
    return blocks, offsets
