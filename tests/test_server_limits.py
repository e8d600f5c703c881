"""No client, page or prompt can take the server away from the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import SENTENCE, ByteTokenizer, FakeLoop
from pydantic import ValidationError
from server_checks import CHAT, HELLO, TEXT, Served, serving, wait_until

from kvist.server import event_stream, exchange
from kvist.server.admission import MAX_WAITING, Admission
from kvist.server.errors import ApiError, from_validation
from kvist.server.hosts import VARIABLE, allowed_hosts, check_host
from kvist.server.openai import MAX_BODY_BYTES
from kvist.server.schemas import MAX_ANSWERS, ChatRequest, CompletionRequest


@contextlib.contextmanager
def fake(**settings: Any) -> Iterator[Served]:
    loop = FakeLoop(**settings)
    loop.start()
    with serving(loop) as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave its connection to the caller."""
    data = json.dumps({"model": served.model, "ignore_eos": True, **body}).encode()
    connection = socket.socket()
    # Small, so that what is not read soon stays with the server.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", served.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(("prompts", "n"), [(1000, 128), (MAX_ANSWERS // 2 + 1, 2), (5, 128)])
def test_answers_of_one_request_are_bounded(prompts: int, n: int) -> None:
    with fake() as served:
        status, error = served.error(TEXT, {"model": served.model, "prompt": ["x"] * prompts, "n": n})
        assert status == 400
        assert str(MAX_ANSWERS) in error["message"]
        if prompts <= MAX_ANSWERS:
            assert error["param"] == "n"
            assert f"n and prompt: {n} answers to each of {prompts} prompts are {n * prompts};" in error["message"]
        assert served.loop.snapshot()["counters"]["requests"] == 0


def test_as_many_as_are_allowed_are_answered() -> None:
    with fake(max_running=MAX_ANSWERS) as served:
        prompts = ["x"] * (MAX_ANSWERS // 128)
        answer = served.client.completions.create(model=served.model, prompt=prompts, n=128, max_tokens=1)
        assert len(answer.choices) == MAX_ANSWERS


def test_others_are_heard_while_a_request_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes a submission only after somebody else was answered: a loop that is not free would hang."""
    with fake(max_running=MAX_ANSWERS) as served:
        heard = threading.Event()
        submit, begun = served.loop.submit, threading.Event()

        def slow(*args: Any, **settings: Any) -> str:
            begun.set()
            time.sleep(0.003)
            return submit(*args, **settings)

        def look() -> None:
            begun.wait(20)
            assert served.call("GET", "/health")[0] == 200
            submitted.append(served.loop.snapshot()["counters"]["requests"])
            heard.set()

        submitted: list[int] = []
        monkeypatch.setattr(served.loop, "submit", slow)
        other = threading.Thread(target=look)
        other.start()
        served.client.completions.create(model=served.model, prompt=["x"] * 4, n=128, max_tokens=1)
        other.join(20)
        assert heard.is_set()
        assert submitted[0] < MAX_ANSWERS


def test_a_hang_up_ends_the_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake(max_running=1, step=0.01) as served:
        submit, begun = served.loop.submit, threading.Event()

        def slow(*args: Any, **settings: Any) -> str:
            begun.set()
            time.sleep(0.003)
            return submit(*args, **settings)

        monkeypatch.setattr(served.loop, "submit", slow)
        with post(served, TEXT, {"prompt": ["x"] * 4, "n": 128, "max_tokens": 1900}):
            assert begun.wait(20)
        wait_until(lambda: bool(served.loop.aborted) and not served.loop.snapshot()["requests"])
        assert served.loop.snapshot()["counters"]["requests"] < MAX_ANSWERS
        # Its places are free again.
        monkeypatch.undo()
        answer = served.client.completions.create(model=served.model, prompt=["x"] * 4, n=128, max_tokens=1)
        assert len(answer.choices) == MAX_ANSWERS


def test_a_hang_up_while_a_long_text_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    free, begun, seen = threading.Event(), threading.Event(), []
    encode = ByteTokenizer.encode

    def slow(self: ByteTokenizer, text: str, **settings: Any) -> list[int]:
        if len(text) > 4_000:
            seen.append(text[0])
            begun.set()
            free.wait(20)
        return encode(self, text, **settings)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    with fake(max_context=8192) as served:
        first = post(served, TEXT, {"prompt": "a" * 5_000, "max_tokens": 1})
        assert begun.wait(20)
        second = post(served, TEXT, {"prompt": "b" * 5_000, "max_tokens": 1})
        # Short texts do not wait behind it.
        assert served.client.completions.create(model=served.model, prompt="x").choices
        second.close()
        assert served.client.completions.create(model=served.model, prompt="x").choices
        free.set()
        with first:
            assert b" 200 " in first.recv(4096)
        assert served.client.completions.create(model=served.model, prompt="c" * 5_000).choices
    assert seen == ["a", "c"]


def test_answers_that_wait_are_bounded() -> None:
    with fake(max_running=1, step=0.05) as served:
        waiting = [
            post(served, TEXT, {"prompt": ["x"] * 4, "n": 128, "max_tokens": 1900})
            for _ in range(MAX_WAITING // MAX_ANSWERS)
        ]
        wait_until(lambda: len(served.loop.snapshot()["requests"]) >= MAX_WAITING - 1)
        with pytest.raises(openai.InternalServerError, match="wait for their first token") as caught:
            served.client.completions.create(model=served.model, prompt="x", n=3)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert caught.value.response.headers["retry-after"] == "2"
        for connection in waiting:
            connection.close()
        wait_until(lambda: not served.loop.snapshot()["requests"])
        assert served.client.completions.create(model=served.model, prompt="x", n=3).choices


def test_admission_counts() -> None:
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(ApiError, match="2 answers wait"):
        admission.enter(2)
    assert admission.waiting == 2
    admission.leave(1)
    admission.enter(2)
    assert admission.waiting == 3


@pytest.mark.parametrize("bound", ["time", "size"])
def test_a_client_that_reads_no_more(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """It stays connected; its requests end long before their last token."""
    if bound == "time":
        monkeypatch.setattr(event_stream, "STALLED_SECONDS", 0.2)
    else:
        monkeypatch.setattr(exchange, "MAX_BUFFERED", 500)
    tokens = 500_000
    with (
        fake(max_context=2 * tokens, blocks=2**17) as served,
        post(served, CHAT, {"messages": HELLO, "stream": True, "n": 2, "max_tokens": tokens}),
    ):
        wait_until(lambda: len(served.loop.aborted) >= 2 and not served.loop.snapshot()["requests"])
        assert served.loop.held_blocks == 0
        assert served.loop.snapshot()["counters"]["output_tokens"] < 2 * tokens
        assert served.client.completions.create(model=served.model, prompt="x").choices


def test_a_slow_reader_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake(max_context=20_000) as served:
        fields = {"messages": HELLO, "stream": True, "n": 2, "max_tokens": 4_000, "top_logprobs": 20, "logprobs": True}
        with post(served, CHAT, fields) as connection:
            wait_until(lambda: served.loop.snapshot()["counters"]["finished"] == 2)
            read = bytearray()
            while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                read += connection.recv(2**16)
        assert read.count(b'"finish_reason": "length"') == 2
        assert not served.loop.aborted


MILLION = b",".join([b'""'] * 1_000_000)


@pytest.mark.parametrize(
    "field",
    [b'"stop": [%b]', b'"stop_token_ids": [%b]', b'"messages": [%b]', b'"stream_options": {%b}', b"%b"],
    ids=lambda field: field.decode(),
)
def test_a_million_faults_are_one(field: bytes) -> None:
    faults = MILLION
    if field in (b"%b", b'"stream_options": {%b}'):
        faults = b",".join(b'"%x":1' % number for number in range(100_000))
    head = b'{"model": "m", ' + (b"" if b"messages" in field else b'"messages": [{"role": "user", "content": "x"}], ')
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(head + field % faults + b"}")
    assert caught.value.error_count() == 1
    assert from_validation(caught.value).status == 400


def test_a_body_of_another_kind() -> None:
    for body, shown in (("[]", ", got []"), ("null", ", got None"), ('"x"', ", got 'x'")):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate_json(body)
        message = from_validation(caught.value).message
        assert message == f'the body must be a JSON object, such as {{"model": "NAME", …}}{shown}'


def test_long_contexts_may_have_long_bodies() -> None:
    with fake(max_context=2**20, blocks=2**17) as served:
        body = json.dumps({"model": served.model, "prompt": [1] * 1000, "max_tokens": 1}).encode()
        assert served.call("POST", TEXT, body + b" " * MAX_BODY_BYTES)[0] == 200


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/cache", "/v1/models", "/v1/models/fake-1m"])
def test_head(path: str) -> None:
    with fake() as served:
        get, answer, wanted = served.call("GET", path)
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
            connection.sendall(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            read = b""
            while part := connection.recv(4096):
                read += part
        head, _, body = read.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert wanted["content-type"].encode() in head
        assert body == b""
        assert get == 200
        assert answer


def test_health_asks_the_engine() -> None:
    with fake() as served:
        assert served.call("GET", "/health")[0] == 200
        served.loop._dead = True
        status, answer, _ = served.call("GET", "/health")
        assert (status, answer) == (503, {"status": "failed", "reason": "told to die"})


LOCAL = ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "localhost.", "localhost:")
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "::2")


def test_names_of_a_local_server() -> None:
    hosts = allowed_hosts("127.0.0.1", "127.0.0.1")
    assert hosts is not None
    for name in LOCAL:
        assert check_host(name.encode(), hosts) is None, name
    assert check_host(None, hosts) is None
    for name in FOREIGN:
        refusal = check_host(name.encode(), hosts)
        assert refusal is not None, name
        assert (refusal.status, refusal.code) == (421, "unknown_host")
        assert VARIABLE in refusal.message


def test_more_names_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_hosts("0.0.0.0") is None
    assert allowed_hosts("::") is None
    assert allowed_hosts("192.0.2.1") is None
    monkeypatch.setenv(VARIABLE, "Twig.example, other.example:80,")
    hosts = allowed_hosts("127.0.0.2", "my-host")
    assert hosts == {"localhost", "127.0.0.1", "::1", "127.0.0.2", "my-host", "twig.example", "other.example"}
    assert check_host(b"twig.example:8000", hosts) is None


def test_a_foreign_page_learns_nothing() -> None:
    loop = FakeLoop()
    loop.start()
    with serving(loop, hosts=allowed_hosts("127.0.0.1")) as served:
        assert served.client.chat.completions.create(model=served.model, messages=HELLO).choices  # type: ignore[arg-type]
        for method, path in (("GET", "/cache"), ("GET", "/"), ("GET", "/metrics"), ("POST", CHAT), ("GET", "/nothing")):
            status, answer, _ = served.call(method, path, served.chat() if method == "POST" else None, host="evil:80")
            assert (status, answer["error"]["code"]) == (421, "unknown_host")
            assert SENTENCE not in json.dumps(answer)


def test_a_task_that_is_cancelled_did_not_hang_up() -> None:
    async def cancelled() -> None:
        from concurrent.futures import ThreadPoolExecutor

        async def nobody() -> Any:
            await asyncio.Event().wait()

        waits: Any = exchange.Exchange(FakeLoop(), exchange.Bridge(), None, Admission(), nobody)  # type: ignore[arg-type]
        waits.begin(1)
        go = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            task = asyncio.create_task(waits.wait_for(pool, lambda: go.wait(20)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
        waits.close()

    asyncio.run(cancelled())
