"""The engine: from prompts to tokens, one step after another.

::

    submit -> scheduler.add                 queued, or refused at once
    step   -> scheduler.step                which tokens; blocks reserved           } the lock is held
           -> runner.run                    keys, values, logits
           -> scheduler.commit, sampler     tokens; events to whoever asked         } the lock is held

Every method is safe from any thread. Steps follow one another, whoever calls them; listeners are called between
them, without the lock. An :class:`Engine` is used directly, or handed to :class:`kvist.engine.loop.EngineLoop`.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvist.batch import Batch
from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.tier import Tier
from kvist.engine.account import Account
from kvist.engine.answer import Answer, Event, FinishReason
from kvist.engine.behind import BehindCartridges
from kvist.engine.cartridges import Shelf, stays_whole
from kvist.engine.generation import Generation, check_ids
from kvist.engine.loading import DEFAULT_MODEL, with_weights
from kvist.engine.outbox import Outbox
from kvist.engine.pruner import Pruner, pruning_of
from kvist.engine.runner import Runner
from kvist.engine.sampler import Sampled, Sampler, SamplingParams
from kvist.engine.snapshot import snapshot
from kvist.engine.stored import compute_type, stored_format, stored_groups
from kvist.engine.throughput import Throughput
from kvist.engine.tiers import TierBytes, check_tiers, tiers_of
from kvist.engine.together import answer_together
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import EngineFailure, InputError
from kvist.model.families import network_of
from kvist.planning.capacity import DEFAULT_CHUNK, tokens_at_fullest
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import Pruning
from kvist.store.cartridge_file import Cartridge
from kvist.units import parse_size

_log = logging.getLogger("kvist")

DEFAULT_MEMORY = "512MiB"


class Engine:
    """Serves one model from one paged cache.

    Args:
        model: a name, a model directory or a ``.gguf`` file.
        memory: for the cache, as ``512MiB`` or bytes.
        format: how keys, values and states are stored; the compute type where it is left out.
        dtype: ``f32``, ``bf16`` or ``f16``; left out, the fastest that this machine computes well.
        block_tokens: tokens of a block.
        max_running: sequences that run at once.
        max_context: longest sequence; the model's own limit where it is left out.
        max_batch_tokens: tokens that one step computes.
        prefix_cache: share prefixes among requests.
        evict: how requests are pruned of which nothing else is said: ``h2o:0.5``, ``snapkv:512``,
            ``streaming:4+1020``, or ``none`` (:mod:`kvist.spec.pruning`).
        reuse: keep keys and values between steps; without it everything is computed again for every token, which
            shows what the cache saves.
        cartridges: files of trained caches, by the names under which requests ask for them.
        cartridge_format: how their keys and values are stored; left out, as ``format`` says.
        tiers: memory for prefixes that the cache has no room for, the nearest first: ``host=4GiB``, ``disk=20GiB``.
        tier_directory: where the disk's file is put; the user's cache directory where it is left out.

    Raises:
        KvistError: the model cannot be had, read or held.
    """

    def __init__(
        self,
        model: str | Path | ModelSpec = DEFAULT_MODEL,
        *,
        memory: str | int = DEFAULT_MEMORY,
        format: CacheFormat | None = None,
        dtype: str | None = None,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        max_running: int = 256,
        max_context: int | None = None,
        max_batch_tokens: int = DEFAULT_CHUNK,
        prefix_cache: bool = True,
        evict: Pruning | str | None = None,
        reuse: bool = True,
        cartridges: Mapping[str, str | Path | Cartridge] | None = None,
        cartridge_format: CacheFormat | None = None,
        tiers: Sequence[Tier | str] | Tier | str = (),
        tier_directory: str | Path | None = None,
    ) -> None:
        if format is not None and not isinstance(format, CacheFormat):
            raise InputError(f"format: {format!r}; write kvist.CacheFormat(key=…, value=…)", key="format")
        spec = model if isinstance(model, ModelSpec) else ModelSpec.read(model)
        network_of(spec)
        self.dtype = compute_type(dtype, spec)
        if max_context is not None and not 1 <= max_context <= spec.max_context:
            raise InputError(
                f"max_context: {max_context}; {spec.name} was made for 1 to {spec.max_context} tokens",
                key="max_context",
            )
        self.format = stored_format(format, self.dtype)
        self.groups = stored_groups(
            spec, self.format, self.dtype, block_tokens=block_tokens, cartridge_format=cartridge_format
        )
        self.spec = spec
        self.evict = pruning_of(evict, spec, self.groups)
        if self.evict is not None and cartridge_format is not None:
            raise stays_whole(self.evict)
        layout = ArenaLayout.of(self.groups, parse_size(memory, key="memory"))
        behind = tiers_of(tiers)
        check_tiers(behind, self.groups, prefixes=prefix_cache and reuse, directory=tier_directory)
        limits = Limits(
            max_running=max_running, max_batch_tokens=max_batch_tokens, max_context=max_context or spec.max_context
        )
        # All that can be refused has been: only now is anything fetched or loaded.
        away = TierBytes(behind, layout.total_bytes, tier_directory) if behind else None
        self.spec = spec = with_weights(spec)
        self.tokenizer = Tokenizer.read(spec)
        # Some rotary positions depend on the longest sequence.
        limited = replace(spec, max_context=limits.max_context)
        self.runner = Runner(limited, self.groups, layout, dtype=self.dtype)
        self.runner.tiers = away
        self.cache = CacheManager(self.groups, layout, prefix_cache=prefix_cache and reuse, tiers=behind, moving=True)
        self.scheduler = Scheduler(manager=self.cache, limits=limits)
        self.pruner = Pruner(self.runner, self.scheduler)
        if self.runner.arena_bytes != layout.total_bytes:
            raise EngineFailure(
                f"{layout.total_bytes} bytes of cache were planned, {self.runner.arena_bytes} allocated"
            )
        self.reuse = reuse
        self.started = time.time()
        self._generations: dict[str, Generation] = {}
        self._aborts: set[str] = set()
        self._ids = itertools.count(1)
        self._outbox = Outbox()
        self.shelf = Shelf(limited, self.tokenizer, self.runner, self.cache)
        self._behind = BehindCartridges(self.shelf, self.scheduler)
        self._lock = threading.RLock()
        self._stepping = threading.Lock()
        self.throughput = Throughput()
        for name, file in (cartridges or {}).items():
            self.load_cartridge(name, file)

    @property
    def model_id(self) -> str:
        """The name by which requests ask for the model."""
        return self.spec.name

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and answer together, that a request may have."""
        return min(self.scheduler.limits.max_context, self.scheduler.admission.longest() + 1)

    def context_behind(self, cartridge: str | Sequence[str]) -> int:
        """Most tokens, prompt and answer together, that a request may have behind a cartridge, or several.

        Raises:
            InputError: there is none of this name.
        """
        with self._lock:
            return self._behind.context(cartridge)

    @property
    def cache_tokens(self) -> int:
        """Tokens of the full groups, or of the first where there is none, that the arena would hold at its fullest."""
        return tokens_at_fullest(self.groups, self.cache.layout, self.max_context)

    # -- cartridges -----------------------------------------------------------------------------------------

    def load_cartridge(self, name: str, file: str | Path | Cartridge) -> None:
        """Put a trained cache into the arena, between steps; requests may name it from then on.

        Raises:
            InputError: the name is taken, or the cartridge was made for another model.
            BadFile: the file is torn, or not what it says.
            DoesNotFit: there is no room for it now.
        """
        with self._stepping, self._lock:
            self._behind.load(name, file, self.prefix_key(""))

    def unload_cartridge(self, name: str) -> None:
        """Take a trained cache off; those who live on it finish, and then its blocks go back.

        Raises:
            InputError: there is none of this name.
        """
        with self._stepping, self._lock:
            self.shelf.unload(name)

    # -- requests -------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        evict: Pruning | str | None = None,
        cartridge: str | Sequence[str] | None = None,
        on_event: Callable[[Event], None],
    ) -> str:
        """Queue a prompt of token ids and return the request's id; ``on_event`` is called by whoever steps.

        Args:
            prompt: its token ids.
            params: how tokens are sampled.
            cache_salt: keeps tenants apart.
            evict: how it is pruned; None: as the engine prunes.
            cartridge: name of the trained cache behind which the prompt stands, at the positions after it; or names
                of several, which follow one another in this order.
            on_event: is told every piece of the answer.

        Raises:
            InputError: the prompt is empty, too long or has unknown ids, or there is no such cartridge.
            UnsupportedModel: several cartridges, and keys of this model cannot be turned to follow others.
            DoesNotFit: it could never fit; the message shows the sum. Or there is no room for a second cartridge now.
        """
        check_ids(prompt, self.spec.config["vocab_size"])
        key = self.prefix_key(cache_salt)
        pruning = self.evict if evict is None else pruning_of(evict, self.spec, self.groups)
        with self._lock:
            request_id = f"request-{next(self._ids)}"
            if cartridge is None:
                request = self.scheduler.add(request_id, list(prompt), params.max_tokens, key, pruning)
            else:
                request = self._behind.add(cartridge, request_id, prompt, params.max_tokens, key, pruning)
            try:
                self._generations[request.id] = Generation(request, params, self.tokenizer, on_event)
            except BaseException:
                self.scheduler.finish(request)
                self._behind.let_go(request.id)
                raise
        return request.id

    def prefix_key(self, cache_salt: str) -> PrefixKey:
        """What a prompt must have in common with another, beside its tokens, to share its prefix."""
        # What convolutions keep is stored as it is computed.
        stored = f"{self.format}, computed in {self.dtype}"
        return PrefixKey(model=self.spec.name, format=stored, salt=cache_salt)

    def abort(self, request_id: str) -> None:
        """Stop a request before the next step; one that is over already is no error."""
        with self._lock:
            if request_id in self._generations:
                self._aborts.add(request_id)

    def has_work(self) -> bool:
        """Whether a step would do something."""
        with self._lock:
            return bool(self._aborts) or self.scheduler.has_work()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        params: SamplingParams | None = None,
        cache_salt: str = "",
        evict: Pruning | str | None = None,
        cartridge: str | Sequence[str] | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Answer prompts, texts or lists of token ids, together; the answers come in their order.

        ``sampling`` are the fields of :class:`SamplingParams`, in the place of ``params``; ``evict`` says how they are
        pruned, where that is not as the engine prunes; ``cartridge`` names the trained cache before them, or several.

        Raises:
            InputError: a prompt or a parameter is wrong; nothing is queued then.
            DoesNotFit: a prompt could never fit.
            EngineFailure: a step failed.
        """
        if params is None:
            params = SamplingParams.of(sampling)
        elif sampling:
            raise InputError(f"{next(iter(sampling))}: give params or single fields, not both", key="params")
        return answer_together(self, prompts, params, cache_salt=cache_salt, evict=evict, cartridge=cartridge)

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> Batch:
        """Compute one batch, and tell everyone who waits for it what came of it."""
        with self._stepping:
            try:
                return self._step()
            finally:
                self._outbox.deliver(self.abort)

    def _step(self) -> Batch:
        with self._lock:
            self._end_aborted()
            self._forget_torn()
        batch = Batch([], [])
        try:
            with self._lock:
                self.shelf.store_joined()
                batch = self.scheduler.step()
                now = time.perf_counter()
                for chunk in batch.chunks:
                    generation = self._generations[chunk.request.id]
                    generation.started = generation.started or now
            self.runner.copy(batch.copies)
            if self.runner.tiers and self.runner.tiers.lost:
                raise EngineFailure(f"what a tier held was lost, ask again: {self.runner.tiers.torn!r}")
            if not batch.chunks:
                return batch
            logits = self.runner.run(batch)
            sampling = [self._generations[chunk.request.id] for chunk in batch.chunks if chunk.samples]
            sampled = Sampler.sample(logits, [generation.sampler for generation in sampling])
        except BaseException as error:
            with self._lock:
                if isinstance(error, Exception):
                    _log.exception("a step failed")
                for request in self.scheduler.fail():
                    failure = Event(finish_reason="error", error=f"{type(error).__name__}: {error}")
                    self._end(self._generations[request.id], failure)
                if self.cache.tiers:
                    # What was on its way may not have come.
                    self.cache.tiers.clear()
            if not isinstance(error, Exception):
                raise
            return batch
        with self._lock:
            self.runner.copy(self.scheduler.commit(batch))
            self.pruner.prune(batch.chunks)
            self.throughput.add(len(sampled))
            for generation, token in zip(sampling, sampled, strict=True):
                self._take(generation, token)
        return batch

    def _forget_torn(self) -> None:
        """Where something could not be moved, the tiers do not hold what they should: they begin anew."""
        if self.cache.tiers and self.runner.tiers and self.runner.tiers.torn:
            _log.error("tiers are emptied: %s", self.runner.tiers.torn)
            self.cache.tiers.clear()
            self.runner.tiers.renew()

    def _take(self, generation: Generation, sampled: Sampled) -> None:
        self.scheduler.append(generation.request, sampled.token_id)
        event = generation.take(sampled)
        if event.finish_reason:
            self._end(generation, event)
            return
        if not self.reuse:
            self.cache.release(generation.request.sequence, keep=False)
        self._outbox.put(generation, event)

    def _end(self, generation: Generation, event: Event) -> None:
        """A request is over: its account is taken, and its blocks go back before anyone hears of it."""
        request = generation.request
        account = Account.of(request, self.cache)
        self.scheduler.finish(request)
        self.pruner.forget(request.id)
        self._behind.let_go(request.id)
        del self._generations[request.id]
        self._aborts.discard(request.id)
        self._outbox.put(generation, replace(event, account=account.to_dict(), timing=generation.timing()))

    def apply_aborts(self) -> None:
        """End the requests that are to be aborted without another step, and tell whoever waits for them."""
        with self._lock:
            self._end_aborted()
        self._outbox.deliver(self.abort)

    def _end_aborted(self) -> None:
        for request_id in self._aborts & self._generations.keys():
            self._end(self._generations[request_id], Event(finish_reason="abort"))
        self._aborts.clear()

    def abort_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, between steps."""
        with self._lock:
            for generation in list(self._generations.values()):
                self._end(generation, Event(finish_reason=reason, error=error))
        self._outbox.deliver(self.abort)

    # -- look -----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Where every block is; what ``/cache`` shows."""
        with self._lock:
            return snapshot(self)
