"""One HTTP request and the answers that the engine gives to it.

The engine's thread posts events; `Bridge` carries all that wait over to the event loop in one wake-up, because a
wake-up (a write to a pipe and a turn of the loop) costs more than the event itself, and a step of the engine ends for
all running requests at once.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive

from kvist.engine.answer import Event, FinishReason, TokenLogprob
from kvist.server.admission import Admission
from kvist.server.backend import Backend
from kvist.server.errors import ApiError
from kvist.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from kvist.engine.sampler import SamplingParams

# Events of one request that may lie unsent: a client that reads so much more slowly than the engine writes is given up.
MAX_BUFFERED = 2**16
# The event loop is given to others this often, in seconds, while one request is being submitted.
_BREATH = 0.002

_T = TypeVar("_T")

log = logging.getLogger("kvist.server")


class HungUpError(Exception):
    """The client hung up, or is given up because it does not read; nobody is left to answer."""


class Bridge:
    """Carries events from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Exchange, int, Event, float]] = deque()
        self._scheduled = False

    def sink(self, exchange: "Exchange", index: int) -> Callable[[Event], None]:
        """Return the ``on_event`` of one submission; called in the event loop."""
        loop = asyncio.get_running_loop()

        def post(event: Event) -> None:
            self._waiting.append((exchange, index, event, time.monotonic()))
            # Appended before the flag is read, and the flag is cleared before the queue is emptied: none stays behind.
            if not self._scheduled:
                self._scheduled = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    log.debug("an event came after the event loop had closed")

        return post

    def _deliver(self) -> None:
        self._scheduled = False
        while self._waiting:
            exchange, index, event, moment = self._waiting.popleft()
            exchange.put(index, event, moment)


@dataclass(kw_only=True)
class Choice:
    """One answer of a request as far as it has come."""

    index: int
    prompt_tokens: int
    request_id: str = ""
    waits: bool = True
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token: float | None = None
    finish_reason: FinishReason | None = None
    account: dict[str, Any] | None = None
    timing: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Piece:
    """What one choice has gained since the last look: one event, or several that waited together."""

    choice: Choice
    text: str
    logprobs: Sequence[TokenLogprob]
    finish_reason: FinishReason | None


class Exchange:
    """The submissions of one HTTP request; whatever ends it, none of them is left running.

    Used in the event loop only. ``begin``, ``submit`` as often as there are choices, ``take`` until `finished`; and
    ``close``, however far it came.
    """

    def __init__(
        self, backend: Backend, bridge: Bridge, metrics: ServerMetrics, admission: Admission, receive: Receive
    ) -> None:
        self._backend = backend
        self._bridge = bridge
        self._metrics = metrics
        self._admission = admission
        self._receive = receive
        self._events: list[tuple[int, Event, float]] = []
        self._wake = asyncio.Event()
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._work: asyncio.Future[Any] | None = None
        self._started = self._breathed = time.monotonic()
        self._waiting = 0
        self._open = 0
        self.choices: list[Choice] = []

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return self._open == 0

    def begin(self, count: int) -> None:
        """Take ``count`` places among the answers that wait, and watch from now on whether the client hangs up.

        Raises:
            ApiError: too many wait already.
        """
        self._admission.enter(count)
        self._waiting = count
        self._watcher = asyncio.create_task(self._watch())

    async def wait_for(self, executor: Executor, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns in a thread; it is not begun any more once the client has hung up.

        Raises:
            HungUpError: the client has hung up.
        """
        self._work = future = asyncio.get_running_loop().run_in_executor(executor, work)
        try:
            return await future
        except asyncio.CancelledError:
            if self._gone:
                raise HungUpError from None
            raise
        finally:
            self._work = None

    def submit(
        self,
        prompt_ids: list[int],
        params: "SamplingParams",
        *,
        cache_salt: str,
        evict: str | None = None,
        cartridge: str | Sequence[str] | None = None,
    ) -> None:
        """Hand one more choice to the engine.

        Raises:
            InputError, DoesNotFit: from the engine.
        """
        choice = Choice(index=len(self.choices), prompt_tokens=len(prompt_ids))
        choice.request_id = self._backend.submit(
            prompt_ids,
            params,
            cache_salt=cache_salt,
            evict=evict,
            cartridge=cartridge,
            on_event=self._bridge.sink(self, choice.index),
        )
        self.choices.append(choice)
        self._open += 1

    async def breathe(self) -> None:
        """Between two submissions: let others have the event loop when it has been ours for long.

        Raises:
            HungUpError: the client has hung up.
        """
        if time.monotonic() - self._breathed > _BREATH:
            await asyncio.sleep(0)
            self._breathed = time.monotonic()
        if self._gone:
            raise HungUpError

    def put(self, index: int, event: Event, moment: float) -> None:
        """Called by the bridge for each event."""
        choice = self.choices[index]
        if choice.waits and self._waiting:
            choice.waits = False
            self._waiting -= 1
            self._admission.leave(1)
        if self._gone:
            return
        if len(self._events) >= MAX_BUFFERED:
            log.info("a client reads its stream more slowly than it is written and is given up")
            self._give_up()
            return
        self._events.append((index, event, moment))
        self._wake.set()

    async def take(self, patience: float | None = None) -> list[Piece]:
        """Wait for news and return it, one piece a choice; an empty list when ``patience`` seconds brought none.

        Raises:
            HungUpError: the client has hung up.
            ApiError: the engine failed, or the server aborted the request.
        """
        if not self._events and not self._gone:
            try:
                async with asyncio.timeout(patience):
                    await self._wake.wait()
            except TimeoutError:
                return []
        if self._gone:
            raise HungUpError
        self._wake.clear()
        events, self._events = self._events, []
        pieces: dict[int, Piece] = {}
        for index, event, moment in events:
            self._note(self.choices[index], event, moment)
            piece = pieces.get(index)
            if piece is None:
                pieces[index] = Piece(
                    choice=self.choices[index], text=event.text, logprobs=event.logprobs,
                    finish_reason=event.finish_reason,
                )  # fmt: skip
            else:
                piece.text += event.text
                piece.logprobs = [*piece.logprobs, *event.logprobs]
                piece.finish_reason = event.finish_reason
        return list(pieces.values())

    async def collect(self) -> None:
        """Wait for every choice's end and keep the whole text and log-probabilities; raises as `take`."""
        while not self.finished:
            for piece in await self.take():
                piece.choice.text.append(piece.text)
                piece.choice.logprobs.extend(piece.logprobs)

    def _note(self, choice: Choice, event: Event, moment: float) -> None:
        if event.token_ids and choice.first_token is None:
            choice.first_token = moment
            self._metrics.time_to_first_token.observe(moment - self._started)
        choice.output_tokens += len(event.token_ids)
        if event.finish_reason is None:
            return
        self._open -= 1
        choice.finish_reason = event.finish_reason
        choice.account = event.account
        choice.timing = event.timing
        if event.account:
            choice.cached_tokens = int(event.account.get("prefix_hit_tokens", 0))
        self._metrics.finished(event.finish_reason)
        if event.finish_reason == "error":
            raise ApiError(500, event.error or "the engine failed", code="engine_failure")
        if event.finish_reason == "abort":
            raise ApiError(503, event.error or "the server is shutting down", code="shutting_down")
        self._metrics.end_to_end.observe(moment - self._started)
        if choice.first_token is not None and choice.output_tokens > 1:
            seconds = (moment - choice.first_token) / (choice.output_tokens - 1)
            self._metrics.time_per_output_token.observe(seconds)

    def abort(self) -> None:
        """Free every submission that is still open."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self._metrics.finished("abort")
                self._backend.abort(choice.request_id)
        self._open = 0

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._give_up()

    def _give_up(self) -> None:
        self._gone = True
        # At once, not when the request's task gets its turn: a task that waits to send may get none.
        self.abort()
        self._events.clear()
        self._wake.set()
        if self._work is not None:
            self._work.cancel()

    def close(self) -> None:
        """Stop what still runs and give back what was taken."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.abort()
        self._admission.leave(self._waiting)
        self._waiting = 0
