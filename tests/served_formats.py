"""Networks served from codes, and their oracle: transformers' own pass over the numbers for which the codes stand.

What the engine stores is read back byte by byte (:mod:`kvist.kernels.reference`) after every step, and put in the place
of the keys and values that transformers computes. Its logits must then be the engine's, whatever the codec loses, and
what it computes itself must lie within a step of each codec of what was stored.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from served import Served, Session, oracle_logits
from torch import Tensor

from kvist.batch import Batch, Chunk, Request
from kvist.cache.groups import Group
from kvist.kernels.hadamard import hadamard
from kvist.kernels.reference import read_sequence

# Half a step, as a part of the largest number of a vector, and what rounding the scale adds.
STEPS = {
    "f32": 1e-5,
    "f16": 2**-11,
    "bf16": 2**-8,
    "fp8": 2**-4,
    "int8": 0.55 / 127,
    "int4": 1.02 / 8,
    "int4a": 1.1 / 15,
}


@dataclass
class Stored:
    """What the arena held of one computation of a sequence, as numbers in the network's own coordinates.

    Attributes:
        end: tokens stored.
        sides: keys and values of each layer, ``[kv_heads, room, dim]``.
        seen: which of the tokens were still there, ``[room]``, of each layer.
        rows: logits, and the position of the token of which they are.
    """

    end: int = 0
    sides: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    seen: dict[int, Tensor] = field(default_factory=dict)
    rows: list[tuple[int, Tensor]] = field(default_factory=list)


class Watched:
    """A runner that tells what it has run."""

    def __init__(self, runner: Any, watch: Callable[[Batch, Tensor], None]) -> None:
        self.runner = runner
        self.copy = runner.copy
        self.watch = watch

    def run(self, batch: Batch) -> Tensor:
        out: Tensor = self.runner.run(batch)
        self.watch(batch, out)
        return out


class FormatSession(Session):
    """A session that reads what is stored; a request that is computed again begins another :class:`Stored`."""

    def __init__(self, served: Served, **settings: Any) -> None:
        super().__init__(replace(served, runner=Watched(served.runner, self.record)), **settings)  # type: ignore[arg-type]
        self.stored: dict[str, list[Stored]] = {}

    def record(self, batch: Batch, out: Tensor) -> None:
        rows = iter(out)
        for chunk in batch.chunks:
            found = self.stored.setdefault(chunk.request.id, [])
            if not found or chunk.start < found[-1].end:
                found.append(Stored())
            self.read(chunk, found[-1])
            if chunk.samples:
                found[-1].rows.append((chunk.start + chunk.count - 1, next(rows).clone()))

    def read(self, chunk: Chunk, stored: Stored) -> None:
        served, sequence = self.served, chunk.request.sequence
        arena, end = served.runner.runner.arena, chunk.start + chunk.count  # type: ignore[attr-defined]
        for number, group in enumerate(served.groups):
            if group.lifetime in ("sealed", "tail"):
                # Whoever asks for these compares logits alone.
                continue
            size = group.block_tokens
            first, last = stored.end // size, -(-end // size)
            table = sequence.tables[number][first:last].copy()
            table[: max(0, sequence.given_back[number] - first)] = -1
            there = torch.from_numpy(table >= 0).repeat_interleave(size)
            for slot, layer in enumerate(group.layers):
                sides = read_sequence(
                    arena, group, served.layout, number, layer=slot, table=table, length=len(table) * size
                )
                turned = tuple(
                    side @ hadamard(side.shape[2], side.dtype) if rotated else side
                    for side, rotated in zip(sides, rotated_of(group), strict=True)
                )
                if layer not in stored.sides:
                    room = [torch.zeros(len(side), 2048, side.shape[2], dtype=torch.float64) for side in turned]
                    stored.sides[layer] = room[0], room[1]
                    stored.seen[layer] = torch.zeros(2048, dtype=torch.bool)
                span = slice(stored.end, end)
                part = slice(stored.end - first * size, end - first * size)
                for into, side in zip(stored.sides[layer], turned, strict=True):
                    into[:, span] = side[:, part]
                stored.seen[layer][span] = there[part]
        stored.end = end

    def worst_error(self, requests: Sequence[Request]) -> float:
        """Largest difference of a logit from the oracle's, relative to the largest logit of its answer."""
        worst = 0.0
        for request in requests:
            tokens = request.sequence.known()
            for stored in self.stored[request.id]:
                whole = all(bool(seen[: stored.end].all()) for seen in stored.seen.values())
                exact = self.served.runner.runner.decoder.dtype == torch.float32  # type: ignore[attr-defined]
                with substituted(self.served, stored, check=whole and exact):
                    expected = oracle_logits(self.served.oracle, tokens[: stored.end])
                for position, row in stored.rows:
                    assert torch.isfinite(row).all()
                    error = (expected[position] - row).abs().max() / expected[position].abs().max()
                    worst = max(worst, float(error))
        return worst

    def begin(self, name: str, prompt: Sequence[int]) -> Request:
        """A request to be driven by :meth:`advance`, without the scheduler."""
        import numpy as np

        return Request(name, self.manager.begin(np.array(prompt, np.int32)), 2048)

    def advance(self, requests: Sequence[Request]) -> list[Tensor]:
        """Compute all that is known of these, in one step; the logits of each."""
        chunks = []
        for request in requests:
            sequence = request.sequence
            reservation = self.manager.reserve(sequence, 2048)
            assert reservation.granted
            self.served.runner.copy(reservation.copies)
            chunks.append(Chunk(request, sequence.length, reservation.limit - sequence.length, True))
        out = self.served.runner.run(Batch(others=chunks, preempted=[]))
        self.served.runner.copy(self.manager.commit_all([request.sequence for request in requests]))
        return list(out)


def rotated_of(group: Group) -> tuple[bool, bool]:
    return group.format.rotates_keys, group.format.rotates_values


@contextmanager
def substituted(served: Served, stored: Stored, *, check: bool) -> Iterator[None]:
    """Within, transformers attends to what was stored, in its own code."""
    module = sys.modules[type(served.oracle).__module__]
    own = module.eager_attention_forward
    groups = {layer: group for group in served.groups for layer in group.layers}

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
        index = layer.layer_idx
        group, length = groups[index], key.shape[2]
        seen = stored.seen[index][:length]
        given = []
        for computed, kept, codec, rotated in zip(
            (key, value), stored.sides[index], (group.format.key, group.format.value), rotated_of(group), strict=True
        ):
            kept = kept[:, :length]
            if check:
                pair = [computed[0].double(), kept]
                if rotated:
                    pair = [side @ hadamard(side.shape[2], side.dtype) for side in pair]
                largest = pair[0].abs().amax(-1, keepdim=True)
                assert ((pair[1] - pair[0]).abs() <= largest * (STEPS[codec] + 1e-4)).all()
            given.append(torch.where(seen[:, None], kept.to(computed.dtype), computed))
        return own(layer, query, given[0], given[1], mask, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", attend)
        yield
