"""A model with one cache that is read and asked at will: the engine's own scheduler, cache and pruner."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.batch import Chunk, Request
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.engine.cartridges import Shelf
from kvist.engine.pruner import Pruner
from kvist.engine.runner import Runner
from kvist.engine.stored import stored_format, stored_groups
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import DoesNotFit
from kvist.planning.capacity import allocated_bytes
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import Pruning
from kvist.store.cartridge_file import Cartridge

CHUNK = 512
"""Tokens of a prompt that are computed at once."""


class Reader:
    """A model with a cache in one format.

    Args:
        spec: of a model whose files are on disk.
        fmt: None for the type of computation.
        dtype: ``f32``, ``bf16`` or ``f16``.
        most: tokens that are held at once.
        cartridges: that stand for texts, by their names.
        cartridge_format: in which they are stored; None: as all else.

    Raises:
        InputError, BadFile: a cartridge is of another model, or its tensors are not what the model stores.
    """

    def __init__(
        self,
        spec: ModelSpec,
        fmt: CacheFormat | None,
        *,
        dtype: str,
        most: int,
        cartridges: Mapping[str, Cartridge] | None = None,
        cartridge_format: CacheFormat | None = None,
    ) -> None:
        groups = stored_groups(spec, stored_format(fmt, dtype), dtype, cartridge_format=cartridge_format)
        # A prompt, what stays of it, and what is asked behind it; and for every group a slab that is not full.
        trained = [cartridge.tokens for cartridge in (cartridges or {}).values()]
        lengths = [most, most, most, *trained]
        memory = sum(group.peak_blocks(length, CHUNK) * group.block_bytes for length in lengths for group in groups)
        memory += sum(allocated_bytes(groups, 0, before=tokens) for tokens in trained)
        largest = max(group.block_bytes for group in groups)
        layout = ArenaLayout.of(groups, memory + 16 * len(groups) * largest)
        self.runner = Runner(spec, groups, layout, dtype=dtype)
        self.manager = CacheManager(groups, layout, prefix_cache=False)
        limits = Limits(max_context=min(most, spec.max_context or most), max_batch_tokens=CHUNK)
        self.scheduler = Scheduler(manager=self.manager, limits=limits)
        self.pruner = Pruner(self.runner, self.scheduler)
        self.shelf: Shelf | None = None
        if cartridges:
            self.shelf = Shelf(spec, Tokenizer.read(spec), self.runner, self.manager)
            for name, cartridge in cartridges.items():
                self.shelf.load(name, cartridge, PrefixKey())
        self._next = 0

    def cartridge(self, name: str) -> Request:
        """What a cartridge holds, to be read behind; it stays, and is never to be ended."""
        assert self.shelf is not None
        loaded = self.shelf.named(name)
        if isinstance(loaded.pin, Sequence):
            return Request(name, loaded.pin, 1)
        begin = self.shelf.beginning(loaded, PrefixKey())
        sequence = self.manager.begin(begin.tokens, begin.key)
        sequence.lead = begin.lead
        # It has no token of its own, and refers to what stands before it.
        self.manager.reserve(sequence, 0)
        return Request(name, sequence, 1)

    def read_behind(self, name: str, tokens: Seq[int], *, answer: int) -> Request:
        """:meth:`read` behind a cartridge."""
        assert self.shelf is not None
        begin = self.shelf.beginning(self.shelf.named(name), PrefixKey())
        self._next += 1
        prompt = np.concatenate((begin.tokens, np.array(tokens, np.int32)))
        request = self.scheduler.add(
            str(self._next), prompt, answer + 1, begin.key, pinned=begin.tokens.size, lead=begin.lead
        )
        while request.sequence.length < len(prompt):
            self._step()
        return request

    def read(self, tokens: Seq[int], pruning: Pruning | None, *, answer: int = 1) -> Request:
        """Compute a prompt as the engine does, and prune it; an answer of so many tokens may follow.

        Raises:
            DoesNotFit: the model's context does not hold it.
        """
        self._next += 1
        request = self.scheduler.add(str(self._next), np.array(tokens, np.int32), answer + 1, pruning=pruning)
        while request.sequence.length < len(tokens):
            self._step()
        return request

    def _step(self) -> Tensor:
        batch = self.scheduler.step()
        if not batch.chunks:
            raise DoesNotFit("context: the prompt does not fit into the model's context")
        logits = self.runner.run(batch)
        self.runner.copy(self.scheduler.commit(batch))
        self.pruner.prune(batch.chunks)
        return logits

    def held_bytes(self, request: Request) -> int:
        """What a request holds in the arena now."""
        return self.manager.held_bytes(request.sequence)

    def behind(self, request: Request, tokens: Seq[int]) -> Tensor:
        """Log-probabilities behind each of these tokens, float32 ``[tokens, vocab]``, if they came next.

        A fork reads them; the request stays as it is.
        """
        fork = self.manager.fork(request.sequence)
        assert fork is not None, "the arena holds a prompt and what is asked behind it"
        self.runner.copy(fork.copies)
        twin = Request("fork", fork.sequence, 1)
        twin.sequence.pruning = None
        for token in tokens:
            twin.sequence.append(token)
        start = twin.sequence.length
        found = []
        while start < twin.sequence.size:
            count = min(CHUNK, twin.sequence.size - start)
            reservation = self.manager.reserve(twin.sequence, count)
            assert reservation.limit == start + count
            found.append(F.log_softmax(self.runner.score([Chunk(twin, start, count, samples=True)]).float(), dim=1))
            self.runner.copy(self.manager.commit(twin.sequence, start + count))
            start += count
        self.manager.release(twin.sequence)
        return torch.cat(found)

    def seconds_to_answer(self, request: Request, first: int, count: int) -> float:
        """Let a request answer with ``first`` and what is likeliest behind it, so many tokens, one a step."""
        token = first
        started = time.perf_counter()
        for _ in range(count):
            self.scheduler.append(request, token)
            token = int(self._step()[0].argmax())
        return time.perf_counter() - started

    def end(self, request: Request) -> None:
        """Give a request's memory back."""
        self.scheduler.finish(request)
        self.pruner.forget(request.id)
