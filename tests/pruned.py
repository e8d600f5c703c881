"""Networks served and pruned, and their oracle: transformers' own pass in which no query sees what it may not.

What the arena holds of each new token is read back and put in the place of what transformers computes; what was dropped
is masked, for each layer, head and query apart, from the token on at which it was. So the oracle keeps everything,
moves nothing, and knows positions only.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from served import Served, Session
from served_formats import rotated_of
from torch import Tensor

from kvist.batch import Request
from kvist.cache.sequence import Compaction
from kvist.engine import pruner as pruner_module
from kvist.engine.pruner import Pruner
from kvist.kernels.hadamard import hadamard
from kvist.kernels.pruning import Observed, select
from kvist.kernels.reference import read_sequence
from kvist.planning.capacity import allocated_bytes
from kvist.spec.pruning import Pruning

ROOM = 1024


@dataclass
class Dropping:
    """One pruning of one request: at this length each layer and head kept these positions, and saw these sums."""

    length: int
    kept: dict[int, Tensor]
    sums: dict[int, Tensor]


@dataclass
class Story:
    """What became of one request since it was last begun.

    Attributes:
        end: tokens stored.
        positions: of each group, int64 ``[layers, kv_heads, slots]``: which token lies where.
        sides: keys and values of each layer as they were first stored, ``[kv_heads, room, dim]``.
        seen: which tokens' were read, ``[room]``, of each layer.
        droppings: in order.
        rows: logits, and the position of the token of which they are.
    """

    end: int = 0
    positions: dict[int, Tensor] = field(default_factory=dict)
    sides: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    seen: dict[int, Tensor] = field(default_factory=dict)
    droppings: list[Dropping] = field(default_factory=list)
    rows: list[tuple[int, Tensor]] = field(default_factory=list)


class PrunedSession(Session):
    """A session whose requests are pruned, and which remembers everything."""

    def __init__(self, served: Served, **settings: Any) -> None:
        super().__init__(served, **settings)
        self.pruner = Pruner(served.runner, self.scheduler)
        self.stories: dict[str, Story] = {}

    def run(
        self, prompts: Sequence[Sequence[int]], *, steps: int = 6, evict: Sequence[str] = ("none",)
    ) -> list[Request]:
        """Answer prompts greedily; ``evict`` is of each, or one for all."""
        ways = [Pruning.read(way) for way in (evict if len(evict) > 1 else [*evict] * len(prompts))]
        begun = len(self.logits)
        requests = [
            self.scheduler.add(str(begun + number), np.array(prompt, np.int32), steps, pruning=way)
            for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
        ]
        self.logits |= {request.id: [] for request in requests}
        while self.scheduler.has_work():
            self.step(steps)
        return requests

    def step(self, steps: int) -> None:
        """One step; ends requests that have as many tokens."""
        runner = self.served.runner
        batch = self.scheduler.step()
        runner.copy(batch.copies)
        out = iter(runner.run(batch))
        for chunk in batch.chunks:
            story = self.stories.get(chunk.request.id)
            if story is None or chunk.start < story.end:
                story = self.stories[chunk.request.id] = Story()
            self.read(chunk.request, story, chunk.start + chunk.count)
        runner.copy(self.scheduler.commit(batch))
        with self.remembered():
            self.pruner.prune(batch.chunks)
        for chunk in batch.chunks:
            if not chunk.samples:
                continue
            request, row = chunk.request, next(out)
            sequence = request.sequence
            planned = allocated_bytes(self.served.groups, sequence.length, pruned=sequence.pruned)
            assert self.manager.held_bytes(sequence) == planned
            self.logits[request.id].append(row.clone())
            self.stories[request.id].rows.append((chunk.start + chunk.count - 1, row.clone()))
            self.scheduler.append(request, int(row.argmax()))
            if request.generated == steps:
                self.scheduler.finish(request)
                self.pruner.forget(request.id)

    def read(self, request: Request, story: Story, end: int) -> None:
        """Read what was stored of the newest tokens."""
        served, sequence = self.served, request.sequence
        for number, group in enumerate(served.groups):
            size, gone = group.block_tokens, sequence.dropped[number]
            begin = max(story.end, group.first_live_block(sequence.length) * size)
            first, last = (begin - gone) // size, -(-(end - gone) // size)
            table = sequence.tables[number][first:last]
            part = slice(begin - gone - first * size, end - gone - first * size)
            for slot, layer in enumerate(group.layers):
                sides = self.turned(number, slot, table)
                if layer not in story.sides:
                    story.sides[layer] = tuple(  # type: ignore[assignment]
                        torch.zeros(len(side), ROOM, side.shape[2], dtype=torch.float64) for side in sides
                    )
                    story.seen[layer] = torch.zeros(ROOM, dtype=torch.bool)
                for into, side in zip(story.sides[layer], sides, strict=True):
                    into[:, begin:end] = side[:, part]
                story.seen[layer][begin:end] = True
            if group.prunable:
                before = story.positions.get(number)
                new = torch.arange(0 if before is None else story.end, end)
                new = new.expand(len(group.layers), group.attention.kv_heads, -1)
                story.positions[number] = new if before is None else torch.cat((before, new), -1)
        story.end = end

    def turned(self, number: int, slot: int, table: np.ndarray[Any, Any]) -> list[Tensor]:
        """Keys and values of some blocks, in the network's own coordinates."""
        served = self.served
        group = served.groups[number]
        sides = read_sequence(
            served.runner.arena, group, served.layout, number, layer=slot, table=table,
            length=len(table) * group.block_tokens,
        )  # fmt: skip
        return [
            side @ hadamard(side.shape[2], side.dtype) if rotated else side
            for side, rotated in zip(sides, rotated_of(group), strict=True)
        ]

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Within, what is chosen and moved is written down, and held against what was stored."""
        runner, manager = self.served.runner, self.manager
        chosen: list[Observed] = []
        moving = runner.compact

        def choose(method: str, seen: Observed, **settings: Any) -> Tensor:
            chosen.append(Observed(sums=seen.sums.clone(), ages=seen.ages, recent=seen.recent))
            return select(method, seen, **settings)

        def compact(moved: Compaction, kept: Tensor) -> None:
            request = next(r for r in self.scheduler.running if r.sequence.tables[moved.group] is moved_table(moved))
            story, number = self.stories[request.id], moved.group
            before = arena_blocks(foreign(request))
            moving(moved, kept)
            assert arena_blocks(foreign(request)) == before, "a block of another was written to"
            group = self.served.groups[number]
            positions = story.positions[number].gather(-1, kept)
            story.positions[number] = positions
            last = story.droppings[-1] if story.droppings else None
            if last is None or last.length != story.end:
                last = Dropping(story.end, {}, {})
                story.droppings.append(last)
            for slot, layer in enumerate(group.layers):
                last.kept[layer], last.sums[layer] = positions[slot], chosen[-1].sums[slot]
                sides = self.turned(number, slot, moved.target)
                for found, first in zip(sides, story.sides[layer], strict=True):
                    for head in range(len(found)):
                        stored = first[head, positions[slot, head]]
                        assert torch.equal(found[head, : kept.shape[-1]], stored), "a code has changed"

        def moved_table(moved: Compaction) -> Any:
            return next(
                r.sequence.tables[moved.group]
                for r in self.scheduler.running
                if np.array_equal(r.sequence.tables[moved.group], moved.target)
            )

        def foreign(request: Request) -> list[tuple[int, int]]:
            mine = {(n, int(b)) for n, table in enumerate(request.sequence.tables) for b in table}
            others = {
                (n, int(b))
                for r in self.scheduler.running
                for n, table in enumerate(r.sequence.tables)
                for b in table
                if b >= 0
            }
            others |= {(n, int(b)) for n, kept in enumerate(manager.arena.kept) for b in np.flatnonzero(kept)}
            return sorted(others - mine)

        def arena_blocks(blocks: list[tuple[int, int]]) -> list[int]:
            sizes = self.served.layout.block_bytes
            offsets = [(self.served.layout.offset(n, b), sizes[n]) for n, b in blocks]
            return [int(runner.arena[at : at + size].long().sum()) for at, size in offsets]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pruner_module, "select", choose)
            patch.setattr(runner, "compact", compact)
            yield

    def worst_error(self, requests: Sequence[Request], *, sums: str | None = None) -> float:
        """Largest difference of a logit from the oracle's, relative to the largest logit of its answer.

        With ``sums`` of a method the column sums that were seen are held against the oracle's.
        """
        worst = 0.0
        for request in requests:
            story, tokens = self.stories[request.id], request.sequence.known()
            with masked(self.served, story) as weights, torch.no_grad():
                ids = torch.from_numpy(tokens[: story.end].astype(np.int64))[None]
                expected = self.served.oracle(ids, use_cache=False).logits[0]
            for position, row in story.rows:
                assert torch.isfinite(row).all()
                error = (expected[position] - row).abs().max() / expected[position].abs().max()
                worst = max(worst, float(error))
            for dropping in story.droppings if sums else []:
                first = request.prompt_tokens - 32 if sums == "snapkv" else 0
                for layer, found in dropping.sums.items():
                    everything = weights[layer][:, first : dropping.length, : dropping.length].sum(1)
                    earlier = [d.kept[layer] for d in story.droppings if d.length < dropping.length]
                    if earlier:
                        after = torch.arange(story.droppings[len(earlier) - 1].length, dropping.length)
                        slots = torch.cat((earlier[-1], after.expand(len(everything), -1)), -1)
                        everything = everything.gather(-1, slots)
                    assert torch.allclose(found, everything.float(), rtol=1e-3, atol=1e-3)
        return worst


@contextmanager
def masked(served: Served, story: Story) -> Iterator[dict[int, Tensor]]:
    """Within, transformers attends in its own code to what was stored, and to nothing that was dropped.

    Yields weights of each layer, summed over the query heads of a KV head, ``[kv_heads, queries, keys]``.
    """
    module = sys.modules[type(served.oracle).__module__]
    own = module.eager_attention_forward
    weights: dict[int, Tensor] = {}

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any) -> Any:
        index, length, heads = layer.layer_idx, key.shape[2], key.shape[1]
        seen = story.seen[index][:length, None]
        given = [
            torch.where(seen, kept[:, :length].to(computed.dtype), computed)
            for computed, kept in zip((key, value), story.sides[index], strict=True)
        ]
        hidden = torch.zeros(heads, length, length)
        for dropping in story.droppings:
            if index in dropping.kept:
                gone = torch.ones(heads, length, dtype=torch.bool)
                gone[:, dropping.length :] = False
                gone.scatter_(1, dropping.kept[index], False)
                hidden[:, dropping.length :].masked_fill_(gone[:, None], -torch.inf)
        repeats = query.shape[1] // heads
        out, found = own(layer, query, *given, mask + hidden.repeat_interleave(repeats, 0)[None], **settings)
        weights[index] = found[0].unflatten(0, (heads, repeats)).sum(1)
        return out, found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", attend)
        yield weights
