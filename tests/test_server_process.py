"""The server as a process: its ready line, its signals and its exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
from fake_engine import FakeLoop
from server_checks import CHAT, HELLO

from kvist.server.run import bind

FAKE = Path(__file__).with_name("fake_engine.py")


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the fake server; yield the process and its port once it says that it is ready."""
    command = [sys.executable, "-W", "error", str(FAKE), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = process.stderr.readline()
            match = re.fullmatch(
                r"kvist: fake-1m in f32 is ready on http://127\.0\.0\.1:(\d+) · "
                r"cache 65,536 tokens in 48 MiB \(bf16/bf16\)\n",
                ready,
            )
            assert match, ready
            yield process, int(match[1])
        finally:
            process.kill()


def status(port: int, method: str, path: str, body: object = None) -> int:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_finish(number: signal.Signals) -> None:
    with started("--step", "0.02") as (process, port):
        assert status(port, "GET", "/health") == 200
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=FakeLoop.model_id, messages=HELLO, stream=True, max_tokens=50, extra_body={"ignore_eos": True}
            )
            next(stream)
            process.send_signal(number)
            assert process.stderr is not None
            assert process.stderr.readline() == "kvist: shutting down; finishing 1 first, a second signal aborts\n"
            assert status(port, "GET", "/health") == 503
            assert status(port, "POST", CHAT, {"model": FakeLoop.model_id, "messages": HELLO}) == 503
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 50
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_a_second_signal_aborts() -> None:
    with started("--step", "0.02") as (process, port):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=FakeLoop.model_id, messages=HELLO, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}
            )
            next(stream)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
        assert process.wait(20) == 0


def test_clients_that_idle_do_not_hold_up_the_end() -> None:
    """One has sent half a body, the other reads nothing of its stream; the engine's work is done."""
    with started() as (process, port):
        half, stalled = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        with half, stalled:
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            half.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
            body = json.dumps({"model": "fake-1m", "prompt": "a", "stream": True, "max_tokens": 9, "ignore_eos": True})
            stalled.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            assert stalled.recv(9) == b"HTTP/1.1 "
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_an_idle_server_ends_at_once() -> None:
    with started() as (process, port), contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as kept_alive:
        kept_alive.request("GET", "/cache")
        kept_alive.getresponse().read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


# Stands for the seconds in which a model is loaded; the signal comes while it says so.
LOADING = """
import sys, time
import kvist.engine.engine as engine

def load(*_, **__):
    print("loading", flush=True)
    time.sleep(60)

engine.Engine = load
from kvist.cli import main
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loading(number: signal.Signals) -> None:
    command = [sys.executable, "-W", "error", "-c", LOADING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(20) == 0
            assert process.stderr.read() == "kvist: shutting down\n"
        finally:
            process.kill()


def test_garbage_leaves_no_trace_in_the_log() -> None:
    with started() as (process, port):
        upgrade = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"hello\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\r\n\r\n",
            upgrade,
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(garbage + b"\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 ")
        assert status(port, "GET", "/health") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "kvist: shutting down\n"


def test_a_local_server_is_called_by_its_own_names() -> None:
    with started() as (_, port), contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for host, expected in ((f"localhost:{port}", 200), (f"evil.example:{port}", 421)):
            connection.request("GET", "/cache", headers={"host": host})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == expected
    with (
        started("--api-key", "sesam") as (_, port),
        contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection,
    ):
        connection.request("GET", "/health", headers={"host": "proxy.example"})
        assert connection.getresponse().status == 200


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-W", "error", "-m", "kvist", "serve", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    expected = f"kvist: --port {port} on 127.0.0.1: Address already in use; choose another with --port\n"
    assert ended.stderr == expected
