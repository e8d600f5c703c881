"""The thread that steps an engine while there is work; what the server talks to."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvist.engine.answer import Event
from kvist.engine.engine import Engine
from kvist.engine.sampler import SamplingParams
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import EngineFailure

_log = logging.getLogger("kvist")


class EngineLoop:
    """Owns an engine and its thread. Every method is safe from any thread and returns at once.

    A request's events are delivered on the engine's thread; a listener must not block.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._ending: str | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)

    @property
    def model_id(self) -> str:
        """The name by which requests ask for the model."""
        return self.engine.model_id

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and answer together, that a request may have."""
        return self.engine.max_context

    def context_behind(self, cartridge: str | Sequence[str]) -> int:
        """Most tokens, prompt and answer together, that a request may have behind a cartridge, or several."""
        return self.engine.context_behind(cartridge)

    @property
    def cache_tokens(self) -> int:
        """Tokens of full-attention cache, or of windows where there is nothing else, that the arena holds."""
        return self.engine.cache_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def failure(self) -> str | None:
        """Why the thread has ended by itself; None while all is well."""
        return f"{type(self._failure).__name__}: {self._failure}" if self._failure else None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, drain: bool) -> None:
        """End the thread and wait for it: after the requests that live (``drain``), or at once, aborting them."""
        with self._wake:
            self._ending = "drain" if drain and self._ending is None else "now"
            self._wake.notify()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        evict: str | None = None,
        cartridge: str | Sequence[str] | None = None,
        on_event: Callable[[Event], None],
    ) -> str:
        """Queue a request and return its id.

        Raises:
            InputError: the prompt or the parameters are wrong.
            DoesNotFit: it could never fit; the message shows the sum.
            EngineFailure: the engine has stopped.
        """
        with self._wake:
            if self._ending or self._failure:
                raise EngineFailure(f"the engine has stopped{f': {self.failure}' if self._failure else ''}")
            request_id = self.engine.submit(
                prompt_ids, params, cache_salt=cache_salt, evict=evict, cartridge=cartridge, on_event=on_event
            )
            self._wake.notify()
        return request_id

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks before the next step."""
        self.engine.abort(request_id)
        with self._wake:
            self._wake.notify()

    def snapshot(self) -> dict[str, Any]:
        """Where every block is; what ``/cache`` shows."""
        return self.engine.snapshot()

    def _run(self) -> None:
        try:
            while self._wait():
                self.engine.step()
        except BaseException as error:
            _log.exception("the engine has stopped")
            with self._wake:
                self._failure = error
        self.engine.abort_all("error" if self._failure else "abort", self.failure)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread is to end."""
        with self._wake:
            while not self.engine.has_work():
                if self._ending:
                    return False
                self._wake.wait()
            return self._ending != "now"
