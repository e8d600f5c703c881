"""The teacher: the same model with the document before an item; what it expects behind each token that is learnt."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvist.batch import Batch, Chunk, Request
from kvist.cache.prefix import PrefixKey
from kvist.cartridges.distillation import Targets
from kvist.cartridges.self_study import Item
from kvist.engine.cartridges import Joined, Loaded
from kvist.engine.engine import Engine
from kvist.errors import DoesNotFit

# Tokens that are read at once.
_CHUNK = 512


class Teacher:
    """Reads items behind contexts, of which its engine's prefix tree keeps what was read.

    Args:
        engine: idle while the teacher reads.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.key: PrefixKey = engine.prefix_key("self-study")

    def targets(self, context: Sequence[int], item: Item) -> Targets:
        """What is expected of the tokens that the item teaches."""
        return Targets.of(self.logits(context, item.tokens, item.learnt))

    def logits(
        self, context: Sequence[int], tokens: Sequence[int], first: int, *, behind: Loaded | Joined | None = None
    ) -> Tensor:
        """Logits before each of ``tokens[first:]``, float32 ``[tokens - first, vocab]``.

        Args:
            context: what stands before them.
            tokens: of the item.
            first: of them that is foretold.
            behind: a cartridge of the engine, or several, in the place of the context.

        Raises:
            DoesNotFit: the cache cannot hold them.
        """
        stands = None if behind is None else self.engine.shelf.beginning(behind, self.engine.prefix_key(""))
        if stands is not None:
            context = stands.tokens.tolist()
            self.engine.shelf.store_joined()
        # The last token is foretold, and never read.
        whole = np.array([*context, *tokens[:-1]], np.int32)
        start = len(context) + first - 1
        cache, runner = self.engine.cache, self.engine.runner
        # What is learnt is no part of what the tree is asked for: its logits are wanted, and so it is read each time.
        sequence = cache.begin(whole[: start + 1], self.key if stands is None else stands.key)
        if stands is not None:
            sequence.pinned, sequence.lead = stands.tokens.size, stands.lead
        request = Request("self-study", sequence, 0)
        found: list[Tensor] = []
        try:
            while sequence.length < len(whole):
                reservation = cache.reserve(sequence, _CHUNK)
                if reservation.granted and reservation.limit == start + 1 == sequence.size:
                    for token in whole[start + 1 :].tolist():
                        sequence.append(token)
                    # In one step with what stands before it.
                    reservation = cache.reserve(sequence, max(_CHUNK, start + 1 - sequence.length))
                if not reservation.granted:
                    raise DoesNotFit(
                        f"memory: the cache cannot hold {len(whole)} tokens of document and question; give it more, or "
                        f"shorter chunks"
                    )
                runner.copy(reservation.copies)
                begin, end = sequence.length, reservation.limit
                chunk = Chunk(request, begin, end - begin, samples=True)
                if end > start:
                    found.append(runner.score([chunk])[max(0, start - begin) :])
                else:
                    runner.run(Batch([chunk], []))
                runner.copy(cache.commit(sequence, end))
        finally:
            cache.release(sequence, keep=False)
        return torch.cat(found)
