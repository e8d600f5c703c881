"""A hub on this machine: the routes of the real one that a model is read by, and an account of the bytes it sends."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass(kw_only=True)
class LocalHub:
    """What it holds, how it behaves, and what it has sent.

    Attributes:
        root: a directory a model, as ``root/organisation/name``.
        address: to be given as ``HF_ENDPOINT``.
        sent: bytes of each file, whoever asked for them.
        refuse: status, and the code that the real hub names it by, for everything that is asked.
        wait: seconds before each answer.
        ranges: without, whole files are sent.
        sizes: without, the list of files does not say how large they are.
    """

    root: Path
    address: str = ""
    sent: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    refuse: tuple[int, str] | None = None
    wait: float = 0.0
    ranges: bool = True
    sizes: bool = True


@contextmanager
def local_hub(root: Path) -> Iterator[LocalHub]:
    """Start a hub on a free port of 127.0.0.1, and stop it."""
    hub = LocalHub(root=root)

    class Handler(_Handler):
        served = hub

    with _Server(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up has had enough."""


class _Handler(BaseHTTPRequestHandler):
    served: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests[path] += 1
        time.sleep(self.served.wait)
        if self.served.refuse is not None:
            return self.refuse(*self.served.refuse)
        if match := _API.fullmatch(path):
            return self.listing(match[1], match[2] or "main")
        if path.startswith("/storage/"):
            return self.file(path.removeprefix("/storage/"))
        if match := _FILE.fullmatch(path):
            name = f"{match[1]}/{match[3]}"
            if not (self.served.root / name).is_file():
                return self.refuse(404, "EntryNotFound")
            if name.endswith((".safetensors", ".gguf")):
                # Large files lie elsewhere, as on the real hub.
                return self.answer(302, b"", {"Location": f"{self.served.address}/storage/{name}"})
            return self.file(name)
        return self.refuse(404, "")

    def listing(self, repo: str, revision: str) -> None:
        directory = self.served.root / repo
        if not directory.is_dir():
            return self.refuse(401, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        siblings = [
            {"rfilename": str(path.relative_to(directory))}
            | ({"size": path.stat().st_size} if self.served.sizes else {})
            for path in files
        ]
        return self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def file(self, name: str) -> None:
        data = (self.served.root / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.served.ranges:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
            if start >= len(data):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            self.served.sent[name] += stop - start
            return self.answer(206, data[start:stop], headers)
        self.served.sent[name] += len(data)
        return self.answer(200, data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "refused"} if code else {})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
