"""What any kvist server must do, whatever engine is behind it; run against the fake one and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from kvist.server.app import create_app
from kvist.server.run import bind

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Name three trees that grow in the north, please."}]


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server on a free port, and the loop behind it."""

    port: int
    loop: Any
    client: openai.OpenAI
    api_key: str | None

    @property
    def model(self) -> str:
        return self.loop.model_id

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        """Send ``body`` (bytes as they are, else as JSON) and return status, JSON object and headers."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            content = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(content) if is_json else {"text": content.decode()}, response.headers

    def error(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Post what must be refused; return the status and the error, whose shape is checked."""
        status, answer, _ = self.call("POST", path, body, **headers)
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return status, error

    def chat(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": HELLO, **fields}


@contextlib.contextmanager
def serving(loop: Any, *, api_key: str | None = None, hosts: frozenset[str] | None = None) -> Iterator[Served]:
    """Serve a loop from a thread of this process."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(create_app(loop, api_key=api_key, hosts=hosts), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    wait_until(lambda: server.started)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=api_key or "none", max_retries=0)
    try:
        with client:
            yield Served(port=port, loop=loop, client=client, api_key=api_key)
    finally:
        server.should_exit = True
        thread.join(20)
        loop.stop(drain=False)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for what another thread does; the limit is only there to fail instead of hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def check_chat_stream_equals_whole(served: Served) -> None:
    fields: dict[str, Any] = {"model": served.model, "messages": HELLO, "temperature": 0, "max_tokens": 12}
    whole = served.client.chat.completions.create(**fields)
    chunks = list(served.client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "chat.completion"
    assert whole.id.startswith("chatcmpl-")
    assert whole.system_fingerprint == chunks[0].system_fingerprint
    assert whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *middle, last, usage = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == whole.choices[0].message.content
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == []
    assert all(chunk.usage is None for chunk in [*middle, last])
    assert whole.usage is not None
    assert usage.usage is not None
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.usage.completion_tokens == whole.usage.completion_tokens <= 12
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + usage.usage.completion_tokens
    assert usage.usage.prompt_tokens_details is not None
    # The same prompt again: all its full blocks are in the prefix cache.
    assert usage.usage.prompt_tokens_details.cached_tokens >= 16


def check_completions_stream_equals_whole(served: Served) -> None:
    fields: dict[str, Any] = {"model": served.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 9}
    whole = served.client.completions.create(**fields)
    chunks = list(served.client.completions.create(**fields, stream=True))
    assert whole.object == "text_completion"
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def check_prompts_of_every_kind(served: Served) -> None:
    tokenizer = served.loop.tokenizer
    texts = ["Birch and pine", "Spruce"]
    ids = [tokenizer.encode(text) for text in texts]

    def answers(prompt: Any, **more: Any) -> list[str]:
        answer = served.client.completions.create(
            model=served.model, prompt=prompt, temperature=0, max_tokens=5, **more
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    both = answers(texts)
    assert len(both) == 2
    assert answers(ids) == both
    assert answers(ids[0]) == answers(texts[0]) == both[:1]
    assert answers(texts, n=2) == [both[0], both[0], both[1], both[1]]
    assert answers(texts, echo=True) == [texts[0] + both[0], texts[1] + both[1]]
    assert len(answers(texts, echo=True, n=2)) == 4


def check_choices(served: Served) -> None:
    fields: dict[str, Any] = {"model": served.model, "messages": HELLO, "n": 3, "seed": 7, "max_tokens": 8}
    whole = served.client.chat.completions.create(**fields)
    texts: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in served.client.chat.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    # A seed makes each choice the same again, but not the same as its siblings.
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert len(set(texts.values())) > 1
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 3
    one = served.client.chat.completions.create(**fields | {"n": 1})
    assert one.usage is not None
    assert one.usage.prompt_tokens == whole.usage.prompt_tokens


def check_stop(served: Served) -> None:
    fields: dict[str, Any] = {"model": served.model, "messages": HELLO, "temperature": 0, "max_tokens": 24}
    free = served.client.chat.completions.create(**fields).choices[0].message.content
    assert free is not None
    stop = free[len(free) // 2 :][:3]
    whole = served.client.chat.completions.create(**fields, stop=[stop, "never said"])
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == free[: free.index(stop)]
    streamed = served.client.chat.completions.create(**fields, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == free[: free.index(stop)]
    first = served.client.completions.create(model=served.model, prompt="A", temperature=0, max_tokens=1, logprobs=0)
    assert first.choices[0].logprobs is not None


def check_length(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model=served.model, messages=HELLO, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def check_chat_logprobs(served: Served) -> None:
    fields: dict[str, Any] = {
        "model": served.model, "messages": HELLO, "temperature": 0, "max_tokens": 4, "logprobs": True,
        "top_logprobs": 2,
    }  # fmt: skip
    whole = served.client.chat.completions.create(**fields)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert -9999 <= token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
    streamed = []
    for chunk in served.client.chat.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [token.token for token in streamed] == [token.token for token in logprobs.content]
    plain = served.client.chat.completions.create(**fields | {"logprobs": False, "top_logprobs": None})
    assert plain.choices[0].logprobs is None


def check_completion_logprobs(served: Served) -> None:
    fields: dict[str, Any] = {
        "model": served.model,
        "prompt": "The sea",
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": 2,
    }
    logprobs = served.client.completions.create(**fields).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 4
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    offsets: list[int] = []
    for chunk in served.client.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == logprobs.text_offset


def check_models(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [served.model]
    assert served.client.models.retrieve(served.model).owned_by == "kvist"
    with pytest.raises(openai.NotFoundError, match=served.model):
        served.client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match=served.model) as caught:
        served.client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"


def check_salt_keeps_tenants_apart(served: Served) -> None:
    def cached(salt: str) -> int:
        answer = served.client.chat.completions.create(
            model=served.model, max_tokens=1, extra_body={"cache_salt": salt},
            messages=[{"role": "user", "content": "A secret of one tenant, told to nobody else at all, ever."}],
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    other = cached("other")
    cached("own")
    assert cached("own") > other
    assert cached("third") == other


def check_many_streams(served: Served) -> None:
    """64 at once; all answer in full, and they share the server's one event loop."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str | None, int]:
        messages: Any = [{"role": "user", "content": f"Count to {number}, then stop."}]
        stream = await client.chat.completions.create(
            model=served.model, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        reason, tokens = None, 0
        async for chunk in stream:
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return reason, tokens

    async def ask_all() -> list[tuple[str | None, int]]:
        key = served.api_key or "none"
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [("length", 8)] * 64


def hang_up(served: Served, fields: dict[str, Any], *, after: bytes = b"") -> None:
    """Send a request that would go on for long, and drop the connection once ``after`` has been read."""
    body = json.dumps(served.chat(ignore_eos=True, **fields)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        read = b""
        while after and after not in read:
            read += connection.recv(4096)
        wait_until(lambda: bool(served.loop.snapshot()["requests"]))


def check_hang_up_frees(served: Served) -> None:
    for fields, after in (
        ({"stream": True}, b'"delta": {"content"'),
        ({"stream": True, "n": 3}, b'"delta": {"content"'),
        ({}, b""),
        ({"n": 3}, b""),
    ):
        hang_up(served, fields, after=after)
        wait_until(lambda: not served.loop.snapshot()["requests"])
        assert sum(group["held"] for group in served.loop.snapshot()["groups"]) == 0
    assert served.client.chat.completions.create(model=served.model, messages=HELLO, max_tokens=2).choices


def check_too_long(served: Served) -> None:
    most = served.loop.max_context
    status, error = served.error(TEXT, {"model": served.model, "prompt": [1] * (most + 1)})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert str(most) in error["message"]
    # Refused by its size, without a look at what it says.
    for prompt in (" " * 2_000_000, ["x", "x" * 2_000_000]):
        status, error = served.error(TEXT, {"model": served.model, "prompt": prompt})
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert "at least" in error["message"]
    status, error = served.error(CHAT, served.chat(messages=[{"role": "user", "content": "x" * 2_000_000}]))
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    status, error = served.error(CHAT, served.chat(max_tokens=most))
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="longest context"):
        served.client.chat.completions.create(model=served.model, messages=HELLO, max_tokens=most)
    status, error = served.error(TEXT, {"model": served.model, "prompt": [served.loop.tokenizer.vocab_size]})
    assert (status, error["param"]) == (400, "prompt")


def check_cache_and_metrics(served: Served) -> None:
    served.client.chat.completions.create(model=served.model, messages=HELLO, max_tokens=2)
    status, now, _ = served.call("GET", "/cache")
    assert status == 200
    assert now["model"] == served.model
    assert sum(now["bytes"].values()) == now["arena"]["bytes"]
    for group in now["groups"]:
        assert group["free"] + group["cached"] + group["held"] <= group["blocks_total"]
        states = decode_states(group["block_states"])
        assert len(states) == group["blocks_total"]
        assert states.count("h") == group["held"]
        assert states.count("c") == group["cached"]
    metrics = metric_samples(served)
    assert metrics["kvist_prompt_tokens_total"] > 0
    assert metrics["kvist_generation_tokens_total"] >= 2
    assert metrics["kvist_time_to_first_token_seconds_count"] >= 1


def decode_states(coded: str) -> str:
    """``2h3f`` -> ``hhfff``."""
    states, count = "", ""
    for letter in coded:
        if letter.isdecimal():
            count += letter
        else:
            states, count = states + letter * int(count), ""
    assert set(states) <= set("fchx")
    return states


def metric_samples(served: Served) -> dict[str, float]:
    """Read ``/metrics`` as Prometheus would; labels are joined to the name."""
    status, answer, headers = served.call("GET", "/metrics")
    assert status == 200
    assert headers.get_content_type() == "text/plain"
    samples = {}
    for family in text_string_to_metric_families(answer["text"]):
        for sample in family.samples:
            labels = "".join(f"[{value}]" for value in sample.labels.values())
            samples[sample.name + labels] = sample.value
    return samples


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
