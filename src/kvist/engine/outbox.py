"""Pieces of answers on their way to whoever asked."""

import logging
from collections import deque
from collections.abc import Callable

from kvist.engine.answer import Event
from kvist.engine.generation import Generation

_log = logging.getLogger("kvist")


class Outbox:
    """Events that listeners have not been told yet, in order; safe from any thread."""

    def __init__(self) -> None:
        self._events: deque[tuple[Generation, Event]] = deque()

    def put(self, generation: Generation, event: Event) -> None:
        """Leave an event for the listener of a request."""
        self._events.append((generation, event))

    def deliver(self, abort: Callable[[str], None]) -> None:
        """Tell the listeners; called without the engine's lock, as they may call it back from any thread.

        Args:
            abort: is told the id of each request whose listener fails.
        """
        while self._events:
            generation, event = self._events.popleft()
            try:
                generation.on_event(event)
            except Exception:
                # Whoever asked is gone; the others go on.
                _log.exception("a listener of %s failed", generation.request.id)
                abort(generation.request.id)
