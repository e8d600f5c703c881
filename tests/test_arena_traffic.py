"""Memory moves between groups as traffic changes: after any traffic, an arena holds what a fresh one would."""

import numpy as np
import pytest

from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.sequence import Sequence
from kvist.planning.capacity import DEFAULT_CHUNK
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

MODELS = ("gemma-3-1b", "gpt-oss-20b", "jamba-v0.1", "qwen3-next-80b-a3b")
SHORT, LONG = 192, 8192


class Traffic:
    """An arena of 1 GiB, and prompts that share nothing."""

    def __init__(self, model: str) -> None:
        self.groups = groups_of(ModelSpec.read(model), CacheFormat())
        self.manager = CacheManager(self.groups, ArenaLayout.of(self.groups, 2**30))
        self.seen = 0

    def fill(self, tokens: int) -> list[Sequence]:
        """Admit prompts of so many tokens, a chunk at a time as the scheduler does, until one is refused."""
        held: list[Sequence] = []
        while True:
            sequence = self.manager.begin(np.arange(self.seen, self.seen + tokens))
            self.seen += tokens
            chunk = min(tokens, DEFAULT_CHUNK)
            while sequence.length < tokens and chunk >= 16:
                admit = None if sequence.begun else chunk
                reservation = self.manager.reserve(sequence, chunk, admit_chunk=admit)
                if reservation.granted:
                    self.manager.commit(sequence, reservation.limit)
                else:
                    chunk //= 2
            if sequence.length < tokens:
                self.manager.release(sequence, keep=False)
                return held
            held.append(sequence)

    def leave(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.manager.release(sequence)

    def slabs(self) -> list[int]:
        """Slabs lent to each group."""
        owners = self.manager.arena.owner_of_slabs()
        return [int((owners == group).sum()) for group in range(len(self.groups))]

    def stranded(self) -> int:
        """Bytes of free blocks in slabs that other blocks keep with their group."""
        arena = self.manager.arena
        return sum(arena.free(group) * size for group, size in enumerate(self.manager.layout.block_bytes))


@pytest.mark.parametrize("model", MODELS)
def test_after_short_prompts_as_many_long_ones_fit_as_in_a_fresh_arena(model: str) -> None:
    fresh = {tokens: len(Traffic(model).fill(tokens)) for tokens in (SHORT, LONG)}
    traffic = Traffic(model)
    lent = {}
    # The first ones' blocks stay cached when they leave, and go as the next ones need them.
    for tokens in (SHORT, LONG, SHORT, LONG):
        held = traffic.fill(tokens)
        assert len(held) == fresh[tokens]
        assert lent.setdefault(tokens, traffic.slabs()) == pytest.approx(traffic.slabs(), rel=0.03, abs=2)
        traffic.leave(held)
    full = [group.lifetime for group in traffic.groups].index("full")
    assert lent[LONG][full] > 1.5 * lent[SHORT][full], "the slabs of windows or states went to full attention"


@pytest.mark.parametrize("model", MODELS)
def test_prompts_that_stay_strand_little(model: str) -> None:
    traffic = Traffic(model)
    held = traffic.fill(SHORT)
    stay = held[:: max(2, len(held) // 8)]
    traffic.leave([sequence for sequence in held if sequence not in stay])
    more = traffic.fill(LONG)
    assert more
    assert traffic.stranded() < 0.02 * 2**30
