"""The server's routes with a fake engine: what it answers, what it refuses, and that it lives on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import SENTENCE, FakeLoop
from server_checks import CHAT, CHECKS, HELLO, TEXT, Served, metric_samples, serving, wait_until

from kvist.errors import InputError, UnsupportedModel
from kvist.server.openai import MAX_BODY_BYTES
from kvist.server.run import bind
from kvist.server.schemas import NO_EFFECT


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    loop = FakeLoop()
    loop.start()
    with serving(loop) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """An engine that takes its time, so that a request is still running when something happens to it."""
    loop = FakeLoop(step=0.01)
    loop.start()
    with serving(loop) as server:
        yield server


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_behaviour(check: Callable[[Served], None], served: Served, slow: Served) -> None:
    check(slow if "hang_up" in check.__name__ else served)


def test_characters_of_several_tokens_arrive_whole(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "!utf8"}]
    stream = served.client.chat.completions.create(model=served.model, messages=messages, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == "Blåbär och träd: 🌱🌿🌳"
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_of_a_stream(served: Served) -> None:
    body = {"model": served.model, "prompt": "x", "max_tokens": 2, "stream": True}
    status, answer, headers = served.call("POST", TEXT, body)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer["text"].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    # Tokens that wait together may come in one event.
    *texts, last = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert ("".join(texts), last) == ("Th", "")


def test_content_parts_are_joined(served: Served) -> None:
    parts: Any = [
        {"type": "text", "text": "Name three trees"},
        {"type": "text", "text": "that grow in the north, please."},
    ]
    joined = served.client.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": parts}], max_tokens=1
    )
    plain = served.client.chat.completions.create(model=served.model, messages=HELLO, max_tokens=1)
    assert joined.usage is not None
    assert plain.usage is not None
    assert joined.usage.prompt_tokens == plain.usage.prompt_tokens


def test_an_answer_can_be_sent_back_as_it_came(served: Served) -> None:
    answer = served.client.chat.completions.create(model=served.model, messages=HELLO)
    messages: Any = [*HELLO, answer.choices[0].message.model_dump(), {"role": "user", "content": "And more?"}]
    assert served.client.chat.completions.create(model=served.model, messages=messages).choices


def test_answer_carries_its_account(served: Served) -> None:
    status, answer, _ = served.call("POST", CHAT, served.chat(n=2))
    assert status == 200
    assert len(answer["kvist"]) == 2
    for entry in answer["kvist"]:
        assert entry["account"]["planned_bytes"] == entry["account"]["allocated_bytes"] > 0


def test_no_effect_values_are_accepted(served: Served) -> None:
    fields = {name: values[0] if values else None for name, values in NO_EFFECT.items()}
    status, answer, _ = served.call("POST", CHAT, served.chat(**fields, seed=None, stop=None, n=None, user="somebody"))
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == SENTENCE


WRONG: list[tuple[str, Any, str]] = [
    ("temperature", 2.5, "less than or equal to 2"),
    ("temperature", "0.5", "valid number"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.1, "less than or equal to 1"),
    ("top_k", -2, "greater than or equal to -1"),
    ("min_p", -0.1, "greater than or equal to 0"),
    ("max_tokens", 0, "greater than or equal to 1"),
    ("max_tokens", 1.5, "integer"),
    ("n", 0, "greater than or equal to 1"),
    ("n", 129, "less than or equal to 128"),
    ("seed", 2**63, "less than"),
    ("stop", ["a", ""], "empty stop"),
    ("stop", 5, "array"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stream", "yes", "boolean"),
    ("stream_options", {"include_usage": True}, "stream is true"),
    ("logprobs", 3, "boolean"),
    ("top_logprobs", 2, "logprobs is true"),
    ("stop_token_ids", [0] * 1025, "at most 1024"),
    ("messages", HELLO * 4097, "at most 4096"),
    ("messages", [], "at least 1"),
    ("messages", "hello", "valid"),
    ("cache_salt", 5, "string"),
    ("evict", "h2o", "is no budget of h2o"),
    ("evict", "lru:5", "is no method"),
    ("cartridge", "manual", "'manual' is not loaded"),
    ("cartridge", 5, "string"),
    ("cartridge", ["manual", "other"], "is not loaded"),
    ("cartridge", ["manual", 5], "a list of 1 to 16 names"),
    # Known, but only without effect.
    ("presence_penalty", 0.5, "not supported"),
    ("frequency_penalty", -1, "not supported"),
    ("logit_bias", {"50": 1}, "not supported"),
    ("response_format", {"type": "json_object"}, "not supported"),
    ("tools", [{"type": "function"}], "not supported"),
    # Unknown.
    ("temprature", 1, "unknown field"),
    ("temprature", None, "unknown field"),
    ("stream_options.usage", True, "unknown field"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=lambda value: str(value)[:20])
def test_a_wrong_field_is_named(served: Served, field: str, value: Any, message: str) -> None:
    outer, _, inner = field.partition(".")
    status, error = served.error(CHAT, served.chat(**{outer: {inner: value} if inner else value}))
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert message in error["message"]
    assert field in error["message"]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ({"role": "user"}, "messages[0].content", "missing"),
        ({"role": "tool", "content": "x"}, "messages[0].role", "'assistant'"),
        ({"role": "user", "content": "x", "name": "y"}, "messages[0].name", "not supported"),
        ({"role": "user", "content": "x", "nmae": "y"}, "messages[0].nmae", "unknown field"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content", "image_url"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content", "text"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls", "not supported"),
        ("hello", "messages[0]", "object"),
    ],
)
def test_a_wrong_message_is_named(served: Served, message: Any, param: str, text: str) -> None:
    status, error = served.error(CHAT, served.chat(messages=[message]))
    assert (status, error["param"]) == (400, param)
    assert text in error["message"]


@pytest.mark.parametrize("prompt", [[], [[]], [1.5], [-1], ["a", 1], [["a"]], 5, None, [True]], ids=str)
def test_a_wrong_prompt_is_named(served: Served, prompt: Any) -> None:
    status, error = served.error(TEXT, {"model": served.model, "prompt": prompt})
    assert (status, error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'"' + b"x" * 4096,
    ],
    ids=lambda body: repr(body[:12]),
)
def test_malformed_bodies(served: Served, body: bytes) -> None:
    status, error = served.error(CHAT, body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert served.call("GET", "/health")[0] == 200


def test_both_limits_must_agree(served: Served) -> None:
    assert served.call("POST", CHAT, served.chat(max_tokens=2, max_completion_tokens=2))[0] == 200
    status, error = served.error(CHAT, served.chat(max_tokens=2, max_completion_tokens=3))
    assert (status, error["param"]) == (400, "max_completion_tokens")


def test_echo_with_logprobs_is_refused(served: Served) -> None:
    status, error = served.error(TEXT, {"model": served.model, "prompt": "x", "echo": True, "logprobs": 1})
    assert (status, error["param"]) == (400, "echo")


def test_routes_and_methods(served: Served) -> None:
    status, answer, _ = served.call("GET", "/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    status, answer, headers = served.call("GET", CHAT)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert headers["allow"] == "POST"


def test_only_json_is_read(served: Served) -> None:
    status, error = served.error(CHAT, served.chat(), content_type="text/plain")
    assert status == 415
    assert "application/json" in error["message"]
    assert served.call("POST", CHAT, served.chat(), content_type="application/json; charset=utf-8")[0] == 200


def test_a_body_that_is_too_large(served: Served) -> None:
    status, error = served.error(CHAT, b"x", content_length=str(MAX_BODY_BYTES + 1))
    assert (status, error["code"]) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        part = b"%x\r\n" % 2**20 + b" " * 2**20 + b"\r\n"
        try:
            for _ in range(MAX_BODY_BYTES // 2**20 + 2):
                connection.sendall(part)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b"HTTP/1.1 413"
    assert b" 413" in answer.partition(b"\r\n")[0]
    assert served.call("GET", "/health")[0] == 200


def test_an_answer_that_fails(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "!fail"}]
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        served.client.chat.completions.create(model=served.model, messages=messages)
    with pytest.raises(openai.APIError, match="told to fail"):
        list(served.client.chat.completions.create(model=served.model, messages=messages, stream=True, n=2))
    assert not served.loop.snapshot()["requests"]
    assert metric_samples(served)["kvist_request_success_total[error]"] >= 2


def test_a_request_larger_than_the_cache() -> None:
    loop = FakeLoop(blocks=8)
    loop.start()
    with serving(loop) as served:
        with pytest.raises(openai.BadRequestError, match=r"= 14 blocks of 16; the cache has 8") as caught:
            served.client.completions.create(model=served.model, prompt="x" * 99, max_tokens=120)
        assert caught.value.code == "does_not_fit"
        # The copies before the one that is refused are taken back.
        assert served.client.completions.create(model=served.model, prompt="x", max_tokens=2).choices
        assert metric_samples(served)["kvist_num_refused_total"] == 1


def test_an_engine_that_died() -> None:
    loop = FakeLoop()
    loop.start()
    with serving(loop) as served:
        with pytest.raises(openai.InternalServerError, match="told to die") as caught:
            served.client.completions.create(model=served.model, prompt="!die")
        assert caught.value.code == "engine_failure"
        assert served.call("GET", "/cache")[0] == 200
        status, answer, _ = served.call("GET", "/health")
        assert (status, answer["status"]) == (503, "failed")


def test_a_model_without_a_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> list[int]:
        raise UnsupportedModel("messages: fake-1m has no chat template", key="messages")

    loop = FakeLoop()
    monkeypatch.setattr(loop.tokenizer, "chat", refuse)
    loop.start()
    with serving(loop) as served:
        status, error = served.error(CHAT, served.chat())
        assert (status, error["code"], error["param"]) == (400, "unsupported_model", "messages")
        assert served.client.completions.create(model=served.model, prompt="x").choices


def test_api_key() -> None:
    loop = FakeLoop()
    loop.start()
    with serving(loop, api_key="sesam") as served:
        assert served.client.chat.completions.create(model=served.model, messages=HELLO).choices
        for path in ("/cache", "/v1/models"):
            status, answer, headers = served.call("GET", path)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer sesame", "Bearer", "sesam", "Basic sesam", "Bearer å"):
            status, error = served.error(CHAT, served.chat(), authorization=wrong)
            assert (status, error["code"]) == (401, "invalid_api_key")
        assert served.call("GET", "/cache", authorization="bearer sesam")[0] == 200
        for path in ("/", "/health", "/metrics"):
            assert served.call("GET", path)[0] == 200


def test_page(served: Served) -> None:
    status, answer, headers = served.call("GET", "/")
    assert status == 200
    assert headers.get_content_type() == "text/html"
    assert "default-src 'none'" in headers["content-security-policy"]
    page = answer["text"]
    assert "/cache" in page
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not [word for word in ("https://", "http://", "@import", "innerHTML") if word in page]


def test_metrics_follow_what_happened(slow: Served) -> None:
    before = metric_samples(slow)
    slow.client.chat.completions.create(model=slow.model, messages=HELLO, n=2, max_tokens=5)
    after = metric_samples(slow)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert gained("kvist_request_success_total[length]") == 2
    assert gained("kvist_generation_tokens_total") == 10
    assert gained("kvist_e2e_request_latency_seconds_count") == 2
    assert gained("kvist_time_per_output_token_seconds_count") == 2
    assert gained("kvist_prefix_cache_hits_total") > 0
    assert after["kvist_num_requests_running"] == 0
    assert sum(after[f"kvist_cache_bytes[{state}]"] for state in ("free", "cached", "held", "waste")) > 0
    assert f"kvist_info[{slow.model}]" in "".join(after)


def test_abort_is_told_to_the_engine_once(slow: Served) -> None:
    from server_checks import hang_up

    before = len(slow.loop.aborted)
    hang_up(slow, {"stream": True, "n": 2}, after=b'"delta": {"content"')
    wait_until(lambda: not slow.loop.snapshot()["requests"])
    assert len(slow.loop.aborted) == before + 2


def test_addresses_that_cannot_be_used(served: Served) -> None:
    for host, port, named in (
        ("127.0.0.1", served.port, "--port"),
        ("127.0.0.1", 70_000, "--port"),
        ("no such host", 80, "--host"),
        ("192.0.2.1", 80, "--port"),
    ):
        with pytest.raises(InputError, match=named):
            bind(host, port).close()


def test_docs_name_every_field_and_metric(served: Served) -> None:
    docs = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    metrics = {
        name.partition("[")[0].removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in metric_samples(served)
    }  # fmt: skip
    from kvist.server.schemas import ChatRequest, CompletionRequest

    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *NO_EFFECT}
    missing = [name for name in sorted(metrics | fields) if f"`{name}" not in docs and not name.endswith("_created")]
    assert not missing
