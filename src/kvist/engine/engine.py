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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvist.batch import Batch, Request
from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS, groups_of
from kvist.cache.groups import cannot_prune
from kvist.cache.layout import ArenaLayout
from kvist.cache.lead_groups import lead_groups
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.tier import Tier
from kvist.engine.account import Account
from kvist.engine.answer import Answer, Event, FinishReason
from kvist.engine.cartridges import Joined, Loaded, Shelf, names_of, stays_whole
from kvist.engine.generation import Generation
from kvist.engine.loading import DEFAULT_MODEL, DTYPES, best_dtype, with_weights
from kvist.engine.pruner import Pruner
from kvist.engine.runner import Runner
from kvist.engine.sampler import Sampled, Sampler, SamplingParams
from kvist.engine.tiers import TierBytes, check_capacities, tiers_of
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import DoesNotFit, EngineFailure, InputError, UnsupportedModel
from kvist.model.families import network_of
from kvist.planning.capacity import DEFAULT_CHUNK, most_that_fit
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import Pruning
from kvist.store.cartridge_file import Cartridge
from kvist.store.layouts import check_format
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
        if dtype is not None and dtype not in DTYPES:
            raise InputError(f"dtype: {dtype!r} is not a compute type; choose one of {', '.join(DTYPES)}", key="dtype")
        if format is not None and not isinstance(format, CacheFormat):
            raise InputError(f"format: {format!r}; write kvist.CacheFormat(key=…, value=…)", key="format")
        spec = model if isinstance(model, ModelSpec) else ModelSpec.read(model)
        network_of(spec)
        if dtype == "f16" and str(spec.config["model_type"]).startswith("gemma"):
            raise InputError("dtype: Gemma's activations overflow f16; choose bf16 or f32", key="dtype")
        if max_context is not None and not 1 <= max_context <= spec.max_context:
            raise InputError(
                f"max_context: {max_context}; {spec.name} was made for 1 to {spec.max_context} tokens",
                key="max_context",
            )
        self.dtype = dtype or best_dtype()
        self.format = (format or CacheFormat(key=self.dtype, value=self.dtype)).computed_in(self.dtype)
        self.groups = groups_of(spec.computed_in(self.dtype), self.format, block_tokens)
        if cartridge_format is not None:
            self.groups += lead_groups(spec, require_format(cartridge_format, key="cartridge_format"), block_tokens)
        for group in self.groups:
            check_format(group)
        self.spec = spec
        self.evict = self._pruning(evict)
        if self.evict is not None and cartridge_format is not None:
            raise stays_whole(self.evict)
        layout = ArenaLayout.of(self.groups, parse_size(memory, key="memory"))
        behind = tiers_of(tiers)
        check_capacities(behind, self.groups)
        if behind and not (prefix_cache and reuse):
            raise InputError("tier: it keeps prefixes, and nothing keeps any here; leave it out", key="tier")
        if tier_directory is not None and not any(tier.name == "disk" for tier in behind):
            raise InputError(
                "tier_directory: there is no tier on a disk; add one, such as disk=20GiB", key="tier_directory"
            )
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
        if away and away.allocated_bytes != sum(tier.capacity_bytes for tier in behind):
            raise EngineFailure(f"{away.allocated_bytes} bytes of tiers were allocated, others planned: {behind}")
        self.reuse = reuse
        self.started = time.time()
        self._generations: dict[str, Generation] = {}
        self._aborts: set[str] = set()
        self._ids = itertools.count(1)
        self._events: deque[tuple[Generation, Event]] = deque()
        self.shelf = Shelf(limited, self.tokenizer, self.runner, self.cache)
        self._on_cartridges: dict[str, Loaded | Joined] = {}
        self._lock = threading.RLock()
        self._stepping = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque(maxlen=256)
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
            tokens = self.shelf.tokens(names_of(cartridge))
            return min(self.scheduler.limits.max_context - tokens, self.scheduler.admission.longest() + 1)

    @property
    def cache_tokens(self) -> int:
        """Tokens of the full groups, or of the first where there is none, that the arena would hold at its fullest."""
        layout = self.cache.layout
        full = [index for index, group in enumerate(self.groups) if group.keeps_all] or [0]
        blocks = [group.peak_blocks(self.max_context, 1) for group in self.groups]

        def fits(tokens: int) -> bool:
            for index in full:
                blocks[index] = -(-tokens // self.groups[index].block_tokens)
            return layout.slabs_for(blocks) <= layout.num_slabs

        most = min(layout.num_slabs * layout.blocks_per_slab[index] * self.groups[index].block_tokens for index in full)
        return most_that_fit(fits, most)

    # -- cartridges -----------------------------------------------------------------------------------------

    def load_cartridge(self, name: str, file: str | Path | Cartridge) -> None:
        """Put a trained cache into the arena, between steps; requests may name it from then on.

        Raises:
            InputError: the name is taken, or the cartridge was made for another model.
            BadFile: the file is torn, or not what it says.
            DoesNotFit: there is no room for it now.
        """
        with self._stepping, self._lock:
            self.shelf.load(name, Path(file) if isinstance(file, str) else file, self.prefix_key(""))
            if not self.scheduler.all_fit():
                self.shelf.unload(name)
                raise DoesNotFit(
                    f"memory: {name} would take what requests before it have been promised; load it later, or give the "
                    f"cache more"
                )

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
        vocabulary: int = self.spec.config["vocab_size"]
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise InputError(
                    f"prompt: token id {token!r} is not a whole number in 0 … {vocabulary - 1}", key="prompt"
                )
        key = self.prefix_key(cache_salt)
        pruning = self.evict if evict is None else self._pruning(evict)
        with self._lock:
            request_id = f"request-{next(self._ids)}"
            if cartridge is None:
                request = self.scheduler.add(request_id, list(prompt), params.max_tokens, key, pruning)
            else:
                request = self._add_behind(names_of(cartridge), request_id, prompt, params.max_tokens, key, pruning)
            try:
                self._generations[request.id] = Generation(request, params, self.tokenizer, on_event)
            except BaseException:
                self.scheduler.finish(request)
                self._let_go(request)
                raise
        return request.id

    def _pruning(self, evict: Pruning | str | None) -> Pruning | None:
        """What is asked for, where the model can be pruned.

        Raises:
            InputError: it is written otherwise, or the model keeps nothing that can be pruned.
        """
        pruning = Pruning.read(evict) if isinstance(evict, str) else evict
        if not isinstance(pruning, Pruning | None):
            raise InputError(f"evict: {evict!r}; write h2o:0.5, snapkv:512, streaming:4+1020 or none", key="evict")
        if pruning is not None and (why := cannot_prune(self.groups)):
            raise UnsupportedModel(
                f"evict: {self.spec.name} keeps nothing that {pruning} could prune: {why}", key="evict"
            )
        return pruning

    def _add_behind(
        self,
        names: Sequence[str],
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int | None,
        key: PrefixKey,
        pruning: Pruning | None,
    ) -> Request:
        """Queue a prompt behind cartridges.

        What a tenant says behind them is shared with nobody, itself included, where they are pinned in the tree.
        """
        if pruning is not None and self.cache.leads:
            raise stays_whole(pruning)
        held = self.shelf.hold(names)
        try:
            if isinstance(held, Joined) and not self.scheduler.all_fit():
                raise DoesNotFit(
                    f"memory: {' + '.join(names)} would take what requests before this one have been promised; ask "
                    f"again later, or give the cache more"
                )
            begin = self.shelf.beginning(held, key)
            request = self.scheduler.add(
                request_id,
                [*begin.tokens.tolist(), *prompt],
                max_tokens,
                begin.key,
                pruning,
                pinned=begin.tokens.size,
                lead=begin.lead,
                apart=bool(key.salt) and begin.lead is None,
            )
        except BaseException:
            self.shelf.let_go(held)
            raise
        self._on_cartridges[request_id] = held
        return request

    def _let_go(self, request: Request) -> None:
        held = self._on_cartridges.pop(request.id, None)
        if held is not None:
            self.shelf.let_go(held)

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
        if isinstance(prompts, str | bytes):
            raise InputError(
                "prompts: one text was given; give a list of texts or of lists of token ids", key="prompts"
            )
        answers: list[Answer] = []
        ids: list[str] = []
        try:
            for prompt in prompts:
                if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
                    raise InputError(f"prompt: {prompt!r} is neither a text nor a list of token ids", key="prompt")
                tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                answer = Answer(prompt_tokens=len(tokens))
                ids.append(
                    self.submit(
                        tokens, params, cache_salt=cache_salt, evict=evict, cartridge=cartridge, on_event=answer.add
                    )
                )
                answers.append(answer)
            while any(answer.finish_reason is None for answer in answers):
                self.step()
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            with self._lock:
                self._apply_aborts()
            self._deliver()
            raise
        failed = next((answer for answer in answers if answer.finish_reason == "error"), None)
        if failed:
            raise EngineFailure(failed.error or "a step failed")
        return answers

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> Batch:
        """Compute one batch, and tell everyone who waits for it what came of it."""
        with self._stepping:
            try:
                return self._step()
            finally:
                self._deliver()

    def _step(self) -> Batch:
        with self._lock:
            self._apply_aborts()
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
            self._recent.append((time.perf_counter(), len(sampled)))
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
        self._events.append((generation, event))

    def _end(self, generation: Generation, event: Event) -> None:
        """A request is over: its account is taken, and its blocks go back before anyone hears of it."""
        request = generation.request
        account = Account.of(request, self.cache)
        self.scheduler.finish(request)
        self.pruner.forget(request.id)
        self._let_go(request)
        del self._generations[request.id]
        self._aborts.discard(request.id)
        self._events.append((generation, replace(event, account=account.to_dict(), timing=generation.timing())))

    def _deliver(self) -> None:
        """Tell the listeners, without the lock: they may call back from any thread."""
        while self._events:
            generation, event = self._events.popleft()
            try:
                generation.on_event(event)
            except Exception:
                # Whoever asked is gone; the others go on.
                _log.exception("a listener of %s failed", generation.request.id)
                self.abort(generation.request.id)

    def _apply_aborts(self) -> None:
        for request_id in self._aborts & self._generations.keys():
            self._end(self._generations[request_id], Event(finish_reason="abort"))
        self._aborts.clear()

    def abort_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, between steps."""
        with self._lock:
            for generation in list(self._generations.values()):
                self._end(generation, Event(finish_reason=reason, error=error))
        self._deliver()

    # -- look -----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Where every block is; what ``/cache`` shows."""
        with self._lock:
            seen = self.scheduler.snapshot(self.tokenizer.decode)
            if self.runner.tiers:
                seen["tiers"] = self.runner.tiers.snapshot(seen["tiers"], self.scheduler.tier_hit_tokens)
            return {
                "model": self.model_id,
                "format": self.format.to_dict(),
                "dtype": self.dtype,
                "evict": str(self.evict or "none"),
                "uptime_seconds": time.time() - self.started,
                **seen,
                "cartridges": self.shelf.snapshot(),
                "joined": self.shelf.joined(),
                "speed": {"tokens_per_second": self._tokens_per_second()},
            }

    def _tokens_per_second(self) -> float:
        """Generated tokens over the last ten seconds."""
        now = time.perf_counter()
        recent = [(then, count) for then, count in self._recent if now - then < 10]
        return sum(count for _, count in recent) / max(now - recent[0][0], 1e-3) if len(recent) > 1 else 0.0
