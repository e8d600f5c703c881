"""``kvist serve``: the address, the engine, its loop and the HTTP server, in this order.

What takes long to import is imported when it is needed: a port that is taken is said at once, and signals are heeded
from the beginning.
"""

import os
import socket
from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvist.cli_values import by_name, cache_format, format_said
from kvist.errors import InputError
from kvist.server.loading import ended_by_signals, ignore_signals
from kvist.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvist.server.backend import Backend

# A client that takes nothing is noticed once this much lies in the kernel, which doubles it, and not after megabytes.
_SEND_BUFFER = 2**16
# Milliseconds after which the kernel drops a connection whose other side takes nothing, or has vanished.
_VANISHED = 90_000


def serve(args: Namespace) -> int:
    """Serve a model until SIGTERM or SIGINT; return the exit code.

    ``args`` has what the command line gives: model, host, port, memory, key, value and what else says a format, dtype,
    block, evict, tier, tier_dir, max_running, max_context, cartridge, cartridge_format, api_key. The last may also
    come from the variable ``KVIST_API_KEY``, which no process list shows.

    Raises:
        InputError: the address cannot be used, or the engine refuses its settings.
        DoesNotFit: the model or one block a group does not fit into the memory.
        SystemExit: with 0, where a signal came while the model was loading.
    """
    # First the address, which can fail at once, then the model, which takes seconds.
    with ended_by_signals(), bind(args.host, args.port) as listener:
        from kvist.engine.engine import Engine
        from kvist.engine.loading import DEFAULT_MODEL, best_dtype
        from kvist.engine.loop import EngineLoop

        given = {
            "dtype": args.dtype, "block_tokens": args.block, "max_running": args.max_running,
            "max_context": args.max_context, "memory": args.memory, "evict": args.evict, "tiers": args.tier,
            "tier_directory": args.tier_dir,
            "cartridge_format": args.cartridge_format,
        }  # fmt: skip
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if format_said(args):
            spec = ModelSpec.read(args.model or DEFAULT_MODEL)
            settings["format"] = cache_format(args, args.dtype or best_dtype(spec))
        if args.cartridge:
            settings["cartridges"] = by_name(args.cartridge)
        model = (args.model,) if args.model else ()
        loop = EngineLoop(Engine(*model, **settings))
        loop.start()
        return run(loop, listener, api_key=args.api_key or os.environ.get("KVIST_API_KEY"), host=args.host)


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
    # Its connections inherit these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _in_use(host, port, error) from None
    return listener


def _in_use(host: str, port: int, error: OSError) -> InputError:
    return InputError(f"--port {port} on {host}: {error.strerror}; choose another with --port", key="port")


def run(loop: "Backend", listener: socket.socket, *, api_key: str | None = None, host: str | None = None) -> int:
    """Answer on a bound socket until a signal; then finish what runs (a second signal aborts it). Return 0.

    Args:
        loop: the running engine, which is stopped in the end.
        listener: from `bind`.
        api_key: what clients must send; None: nothing.
        host: the name that was bound, by which clients may call the server.
    """
    from kvist.server.lifetime import listen

    try:
        listen(loop, listener, api_key=api_key, host=host)
    except OSError as error:
        # Two servers that start at the same moment can both bind; only one can listen.
        bound, port = listener.getsockname()[:2]
        raise _in_use(bound, port, error) from None
    finally:
        ignore_signals()
        loop.stop(drain=False)
    return 0
