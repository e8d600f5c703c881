"""The HTTP server around a running engine loop: until a signal, and the orderly end after it."""

import asyncio
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress

import uvicorn

from kvist.server.app import ServerState, create_app
from kvist.server.backend import Backend
from kvist.server.hosts import allowed_hosts
from kvist.server.loading import say
from kvist.units import format_size

_PATIENCE_SECONDS = 5.0


def listen(loop: Backend, listener: socket.socket, *, api_key: str | None, host: str | None) -> None:
    """Answer on a bound socket until a signal; then finish what runs (a second signal aborts it).

    Raises:
        OSError: another server has begun to listen on the address.
    """
    address, port = listener.getsockname()[:2]
    hosts = None if api_key else allowed_hosts(address, *([host] if host else ()))
    if hosts is None and not api_key:
        say(f"kvist: {address} is open to the network and no --api-key is set: whoever reaches it can use it")
    app = create_app(loop, api_key=api_key, hosts=hosts)
    # Not "warning": a line for every stranger who speaks no HTTP would fill a disk.
    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, lifespan="off", timeout_keep_alive=75,
        # What is left by then are clients that idle.
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = _Server(config, app.state.server, loop, ready=_ready_line(loop, address, port))
    asyncio.run(server.serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """uvicorn's server, which on a signal stays up for ``/health`` until what runs is finished."""

    def __init__(self, config: uvicorn.Config, state: ServerState, loop: Backend, *, ready: str) -> None:
        super().__init__(config)
        self._state = state
        self._backend = loop
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle both signals here: uvicorn's own handler would raise them again at the end, and exit by signal."""
        events = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            events.add_signal_handler(number, self._on_signal)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        say(self._ready)

    def _on_signal(self) -> None:
        if not self._tasks:
            self._state.draining = True
            running = self._state.active
            left = f"; finishing {running} first, a second signal aborts" if running else ""
            say(f"kvist: shutting down{left}")
            self._tasks.append(asyncio.create_task(self._finish()))
        else:
            self._tasks.append(asyncio.create_task(self._abort()))

    async def _finish(self) -> None:
        """Wait for the engine's work, and then a little for clients to take what is theirs."""
        patience = _PATIENCE_SECONDS
        while self._state.active and patience > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._state.idle(), timeout=0.5)
            working = await asyncio.to_thread(lambda: bool(self._backend.snapshot()["requests"]))
            patience = _PATIENCE_SECONDS if working else patience - 0.5
        self.should_exit = True

    async def _abort(self) -> None:
        # In a thread: the engine ends after its step, and until then clients are to hear what happened.
        await asyncio.to_thread(self._backend.stop, drain=False)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._state.idle(), timeout=1)
        self.should_exit = self.force_exit = True


def _ready_line(loop: Backend, host: str, port: int) -> str:
    now = loop.snapshot()
    shown = f"[{host}]" if ":" in host else host
    told = now["format"]
    stored = told.get("text") or f"{told['key']}/{told['value']}"
    cache = f"{loop.cache_tokens:,} tokens in {format_size(now['arena']['bytes'])} ({stored})"
    for tier in now["tiers"]:
        cache += f", {tier['name']} {format_size(tier['bytes'])}"
    return f"kvist: {loop.model_id} in {now['dtype']} is ready on http://{shown}:{port} · cache {cache}"
