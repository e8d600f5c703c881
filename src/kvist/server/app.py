"""The application: all routes, who may call them, and what happens while the server shuts down."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Mapping
from importlib import resources

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.errors import KvistError
from kvist.server.admission import Admission
from kvist.server.backend import Backend
from kvist.server.errors import HTTP_CODES, ApiError, from_kvist
from kvist.server.exchange import Bridge
from kvist.server.hosts import check_host
from kvist.server.metrics import ServerMetrics
from kvist.server.openai import Service, routes
from kvist.server.prompts import Prompts

log = logging.getLogger("kvist.server")

_BODY_PAUSE_SECONDS = 60

# The page loads nothing from elsewhere and is never framed; prompts shown on it can run no script from elsewhere.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


class Gate:
    """Checks host and key, counts what runs, and turns new work away once the server is draining.

    ``/v1`` and ``/cache`` need the key, the latter because it shows the beginnings of prompts. ``/health``,
    ``/metrics`` and the page (which holds nothing by itself) do not.
    """

    def __init__(
        self, app: ASGIApp, *, state: "ServerState", api_key: str | None, hosts: frozenset[str] | None
    ) -> None:
        self._app = app
        self._state = state
        self._api_key = api_key.encode() if api_key else None
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            arrival = _Arrival(receive, self._state)
            try:
                await self._app(scope, arrival.receive, send)
            finally:
                arrival.done()

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._hosts is not None and (refusal := check_host(headers.get(b"host"), self._hosts)):
            return refusal
        if self._api_key is not None and (path.startswith("/v1/") or path == "/cache"):
            given = headers.get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self._api_key):
                problem = "wrong API key" if given else "no API key"
                return ApiError(
                    401, f"{problem}; send 'Authorization: Bearer KEY'", code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
        if self._state.draining and scope["method"] == "POST":
            return ApiError(
                503, "the server is shutting down", code="shutting_down",
                headers={"retry-after": "5", "connection": "close"},
            )  # fmt: skip
        return None


class _Arrival:
    """A request's body on its way in: it counts as work once it is all here, and it may not take for ever."""

    def __init__(self, receive: Receive, state: "ServerState") -> None:
        self._receive = receive
        self._state = state
        self._arrived = False

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ApiError: nothing of the rest of the body came for a while.
        """
        if self._arrived:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), _BODY_PAUSE_SECONDS)
        except TimeoutError:
            raise ApiError(
                408, f"no more of the body came for {_BODY_PAUSE_SECONDS} seconds; send all that content-length says",
                code="request_timeout", headers={"connection": "close"},
            ) from None  # fmt: skip
        if not message.get("more_body"):
            self._arrived = True
            self._state.active += 1
        return message

    def done(self) -> None:
        """The request has been answered, or given up."""
        if self._arrived:
            self._state.active -= 1
            self._state.changed.set()


class ServerState:
    """Whether the server is going down, and how many requests it still answers."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self.changed = asyncio.Event()

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        while self.active:
            self.changed.clear()
            await self.changed.wait()


def create_app(loop: Backend, *, api_key: str | None = None, hosts: frozenset[str] | None = None) -> FastAPI:
    """Build the application around a running engine loop; its `ServerState` is ``app.state.server``.

    Args:
        loop: what answers.
        api_key: what clients must send; None: nothing.
        hosts: names by which clients may call the server; None: any.
    """
    app = FastAPI(title="kvist", openapi_url=None)
    state = app.state.server = ServerState()
    metrics = ServerMetrics(loop.snapshot)
    service = Service(
        backend=loop, bridge=Bridge(), metrics=metrics, prompts=Prompts(loop), admission=Admission(),
        created=int(time.time()),
    )  # fmt: skip
    page = resources.files("kvist.server").joinpath("page.html").read_bytes()
    app.include_router(routes(service))
    app.add_middleware(Gate, state=state, api_key=api_key, hosts=hosts)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        if loop.failure:
            return JSONResponse({"status": "failed", "reason": loop.failure}, 503)
        return JSONResponse({"status": "ok"})

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def prometheus() -> Response:
        text = await asyncio.to_thread(metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/cache", methods=["GET", "HEAD"])
    async def cache() -> Response:
        content = await asyncio.to_thread(lambda: json.dumps(loop.snapshot()).encode())
        return Response(content, media_type="application/json", headers={"cache-control": "no-store"})

    @app.api_route("/", methods=["GET", "HEAD"])
    async def live_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(KvistError)
    async def kvist_error(_: Request, error: KvistError) -> Response:
        return from_kvist(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        message = {404: f"no such route: {what}", 405: f"method not allowed: {what}"}.get(
            error.status_code, str(error.detail)
        )
        code = HTTP_CODES.get(error.status_code)
        headers: Mapping[str, str] | None = error.headers
        return ApiError(error.status_code, message, code=code, headers=headers).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return ApiError(500, f"{type(error).__name__} in the server; its log has more", code="internal").response()

    return app
