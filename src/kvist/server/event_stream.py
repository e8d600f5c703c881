"""An answer as it comes: server-sent events, and what happens when nobody reads them."""

import asyncio
import json
import logging
from contextlib import closing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvist.server.errors import ApiError
from kvist.server.exchange import Exchange, HungUpError
from kvist.server.shapes import Envelope

# A comment after so many silent seconds keeps proxies from closing a stream during a long prefill.
PING_SECONDS = 15.0
# A client that takes nothing for so long, while there is something to take, is given up; its blocks serve others.
STALLED_SECONDS = 60.0
# Sent at a time, so that a slow client shows some progress within the time above.
_SLICE = 2**16

log = logging.getLogger("kvist.server")


class EventStream(Response):
    """Server-sent events of one exchange: opening, pieces as they come, usage when asked for, ``[DONE]``."""

    def __init__(self, exchange: Exchange, envelope: Envelope, *, usage_per_prompt: int | None) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        self._exchange = exchange
        self._envelope = envelope
        self._usage_per_prompt = usage_per_prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until every choice is finished, or the client is gone or reads no more."""
        exchange, envelope = self._exchange, self._envelope
        try:
            with closing(exchange):
                try:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if opening := b"".join(envelope.opening(choice.index) for choice in exchange.choices):
                        await _write(send, opening)
                    while not exchange.finished:
                        pieces = await exchange.take(PING_SECONDS)
                        data = b"".join(envelope.piece(piece) for piece in pieces) if pieces else b": waiting\n\n"
                        if data:
                            await _write(send, data)
                    last = b"data: [DONE]\n\n"
                    if self._usage_per_prompt is not None:
                        last = envelope.usage(exchange.choices, self._usage_per_prompt) + last
                except ApiError as error:
                    last = b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"
            await _write(send, last)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except HungUpError:
            return


async def _write(send: Send, data: bytes) -> None:
    """Send in slices, each of which the client must take in time.

    Raises:
        HungUpError: it did not.
    """
    for at in range(0, len(data), _SLICE):
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                await send({"type": "http.response.body", "body": data[at : at + _SLICE], "more_body": True})
        except TimeoutError:
            log.info("a client took nothing of its stream for %g seconds and is given up", STALLED_SECONDS)
            raise HungUpError from None
