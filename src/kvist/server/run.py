"""``kvist serve``: the engine, its loop and the HTTP server, from start to an orderly end."""

import asyncio
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from kvist.errors import InputError
from kvist.server.backend import Backend
from kvist.units import format_size

if TYPE_CHECKING:
    from kvist.server.app import ServerState


def serve(args: Namespace) -> int:
    """Serve a model until SIGTERM or SIGINT; return the exit code.

    ``args`` has what the command line gives: model, host, port, memory, key, value, dtype, block, max_running,
    max_context, api_key. The key may also come from the variable ``KVIST_API_KEY``, which no process list shows.

    Raises:
        InputError: the address cannot be used, or the engine refuses its settings.
        DoesNotFit: the model or one block a group does not fit into the memory.
    """
    # First the address, which can fail at once, then the model, which takes seconds.
    listener = bind(args.host, args.port)
    with listener:
        from kvist.engine.engine import Engine, best_dtype
        from kvist.engine.loop import EngineLoop
        from kvist.spec.formats import CacheFormat

        given = {
            "dtype": args.dtype, "block_tokens": args.block, "max_running": args.max_running,
            "max_context": args.max_context, "memory": args.memory,
        }  # fmt: skip
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if args.key or args.value:
            dtype = args.dtype or best_dtype()
            settings["format"] = CacheFormat(key=args.key or dtype, value=args.value or dtype)
        model = (args.model,) if args.model else ()
        loop = EngineLoop(Engine(*model, **settings))
        loop.start()
        return run(loop, listener, api_key=args.api_key or os.environ.get("KVIST_API_KEY"))


def bind(host: str, port: int) -> socket.socket:
    """Take an address without listening on it yet, so that clients are refused until the model is ready.

    Raises:
        InputError: no such host, or the port is taken or not allowed.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: a port is 0 to 65535 (0: any that is free)", key="port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host}: {error}; give an address of this machine", key="host") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _in_use(host, port, error) from None
    return listener


def _in_use(host: str, port: int, error: OSError) -> InputError:
    return InputError(f"--port {port} on {host}: {error.strerror}; choose another with --port", key="port")


def run(loop: Backend, listener: socket.socket, *, api_key: str | None = None) -> int:
    """Answer on a bound socket until a signal; then finish what runs (a second signal aborts it). Return 0."""
    # Not at the top: a port that is taken should be said before PyTorch is loaded.
    from kvist.server.app import create_app

    app = create_app(loop, api_key=api_key)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_keep_alive=75
    )
    host, port = listener.getsockname()[:2]
    if not (api_key or host.startswith("127.") or host == "::1"):
        _say(f"kvist: {host} is open to the network and no --api-key is set: whoever reaches it can use it")
    server = _Server(config, app.state.server, loop, ready=_ready_line(loop, host, port))
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except OSError as error:
        # Two servers that start at the same moment can both bind; only one can listen.
        raise _in_use(host, port, error) from None
    finally:
        loop.stop(drain=False)
    return 0


class _Server(uvicorn.Server):
    """uvicorn's server, which on a signal stays up for ``/health`` until what runs is finished."""

    def __init__(self, config: uvicorn.Config, state: "ServerState", loop: Backend, *, ready: str) -> None:
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
        _say(self._ready)

    def _on_signal(self) -> None:
        if not self._tasks:
            self._state.draining = True
            running = self._state.active
            left = f"; finishing {running} first, a second signal aborts" if running else ""
            _say(f"kvist: shutting down{left}")
            self._tasks.append(asyncio.create_task(self._finish()))
        else:
            self._tasks.append(asyncio.create_task(self._abort()))

    async def _finish(self) -> None:
        await self._state.idle()
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
    codecs = now["format"]
    cache = f"{loop.cache_tokens:,} tokens in {format_size(now['arena']['bytes'])} ({codecs['key']}/{codecs['value']})"
    return f"kvist: {loop.model_id} in {now['dtype']} is ready on http://{shown}:{port} · cache {cache}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
