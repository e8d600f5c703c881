"""By which names a server on the loopback address may be called.

A page in a browser on this machine can make its own name point to 127.0.0.1 (DNS rebinding) and would then read
``/cache`` and use the model as if it came from here. Its requests still carry its own name in the ``Host`` header.
"""

import os
from ipaddress import ip_address

from kvist.server.errors import ApiError

VARIABLE = "KVIST_ALLOWED_HOSTS"
_ALWAYS = frozenset({"localhost", "127.0.0.1", "::1"})


def allowed_hosts(bound: str, *names: str) -> frozenset[str] | None:
    """Return the names that requests may give a server bound to the address ``bound``; None: any name.

    Args:
        bound: the address that is listened on.
        names: others to allow, such as the one that was given as ``--host``; those in the variable
            ``KVIST_ALLOWED_HOSTS``, separated by commas, are added.
    """
    if not ip_address(bound.partition("%")[0]).is_loopback:
        return None
    more = os.environ.get(VARIABLE, "").split(",")
    return _ALWAYS | {_plain(name) for name in (bound, *names, *more) if name.strip()}


def check_host(header: bytes | None, allowed: frozenset[str]) -> ApiError | None:
    """Return the refusal of a request with this ``Host`` header, or None where it is allowed.

    A request without the header is allowed: every browser sends it.
    """
    if header is None:
        return None
    shown = header.decode("latin-1")
    if _plain(shown) in allowed:
        return None
    return ApiError(
        421, f"Host: {shown[:80]!r} is not a name of this server; use {', '.join(sorted(allowed))}, or start it with "
        f"the name in {VARIABLE}", code="unknown_host",
    )  # fmt: skip


def _plain(host: str) -> str:
    """``LocalHost:80`` -> ``localhost``, ``[::1]:80`` -> ``::1``."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    if colon and ":" not in name and (port.isdecimal() or not port):
        host = name
    return host.removesuffix(".")
