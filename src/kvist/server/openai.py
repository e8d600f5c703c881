"""The OpenAI routes: from a request's body to submissions, and from the engine's events to an answer."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvist._version import __version__
from kvist.engine.sampler import SamplingParams
from kvist.server.backend import Backend
from kvist.server.errors import ApiError, from_validation
from kvist.server.exchange import Bridge, Exchange, HungUpError
from kvist.server.metrics import ServerMetrics
from kvist.server.schemas import ChatRequest, CompletionRequest, GenerationRequest
from kvist.server.shapes import ChatShape, CompletionShape, Envelope

MAX_BODY_BYTES = 16 * 2**20
# OpenAI's default of /v1/completions; a chat may by default go on until the context is full.
DEFAULT_COMPLETION_TOKENS = 16
# Longer texts are tokenised in a thread: a millisecond is about what other streams may wait.
LONG_TEXT = 4_000
# A comment after so many silent seconds keeps proxies from closing a stream during a long prefill.
PING_SECONDS = 15.0

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Service:
    """What every request needs: the engine and the server's own parts."""

    backend: Backend
    bridge: Bridge
    metrics: ServerMetrics
    created: int

    @property
    def fingerprint(self) -> str:
        """Name the build and the model: answers with equal fingerprints and seeds are comparable."""
        digest = hashlib.sha256(f"{__version__} {self.backend.model_id}".encode()).hexdigest()
        return f"kvist-{__version__}-{digest[:8]}"


async def read_body(request: Request, model: type[Body]) -> Body:
    """Read and validate a JSON body.

    Raises:
        ApiError: 413 past `MAX_BODY_BYTES`, 415 for another content type, 400 for everything the schema refuses.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also what keeps a foreign page in a browser from posting here without a preflight.
    if kind != "application/json":
        raise ApiError(415, f"content-type {kind!r} is not supported; send application/json")
    declared = request.headers.get("content-length", "")
    content = bytearray()
    too_large = declared.isdecimal() and int(declared) > MAX_BODY_BYTES
    if not too_large:
        async for part in request.stream():
            content += part
            if too_large := len(content) > MAX_BODY_BYTES:
                break
    if too_large:
        raise ApiError(
            413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large",
            headers={"connection": "close"},
        )  # fmt: skip
    try:
        return model.model_validate_json(bytes(content))
    except ValidationError as error:
        raise from_validation(error) from None


def routes(service: Service) -> APIRouter:
    """Build ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``."""
    router = APIRouter()
    backend = service.backend

    def card() -> dict[str, Any]:
        return {
            "id": backend.model_id, "object": "model", "created": service.created, "owned_by": "kvist",
            "max_model_len": backend.max_context,
        }  # fmt: skip

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        _check_model(name, backend)
        return JSONResponse(card())

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        _check_model(body.model, backend)
        messages = [{"role": _role(message.role), "content": message.content} for message in body.messages]
        length = sum(len(message["content"]) for message in messages)
        ids = await _ids(backend.tokenizer.chat, messages, length)
        limit = body.max_completion_tokens or body.max_tokens
        shape = ChatShape(backend.tokenizer, with_logprobs=body.logprobs)
        return await _answer(service, request, body, shape, [ids], limit, "messages")

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        _check_model(body.model, backend)
        prompts = [await _prompt_ids(backend, prompt) for prompt in body.prompt]
        limit = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        echoes = []
        if body.echo:
            texts = [p if isinstance(p, str) else backend.tokenizer.decode(p) for p in body.prompt]
            echoes = [text for text in texts for _ in range(body.n)]
        shape = CompletionShape(backend.tokenizer, with_logprobs=body.logprobs is not None, echoes=echoes)
        return await _answer(service, request, body, shape, prompts, limit, "prompt")

    return router


async def _answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    shape: ChatShape | CompletionShape,
    prompts: Sequence[list[int]],
    limit: int | None,
    field: str,
) -> Response:
    exchange = Exchange(service.backend, service.bridge, service.metrics, request.receive)
    rooms = [_room(service.backend, ids, limit, field) for ids in prompts]
    for ids, room in zip(prompts, rooms, strict=True):
        for copy in range(body.n):
            exchange.submit(ids, _sampling(body, room, copy), cache_salt=body.cache_salt)
    envelope = Envelope(
        shape, model=service.backend.model_id, fingerprint=service.fingerprint, stream_usage=body.include_usage
    )
    if body.stream:
        return EventStream(exchange, envelope, usage_per_prompt=body.n if body.include_usage else None)
    try:
        async with exchange:
            await exchange.collect()
    except HungUpError:
        return Response(status_code=499)
    return Response(envelope.whole(exchange.choices, body.n), media_type="application/json")


class EventStream(Response):
    """Server-sent events of one exchange: opening, pieces as they come, usage when asked for, ``[DONE]``."""

    def __init__(self, exchange: Exchange, envelope: Envelope, *, usage_per_prompt: int | None) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        self._exchange = exchange
        self._envelope = envelope
        self._usage_per_prompt = usage_per_prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until every choice is finished or the client is gone."""
        exchange, envelope = self._exchange, self._envelope

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with exchange:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if opening := b"".join(envelope.opening(choice.index) for choice in exchange.choices):
                    await write(opening)
                while not exchange.finished:
                    pieces = await exchange.take(PING_SECONDS)
                    data = b"".join(envelope.piece(piece) for piece in pieces) if pieces else b": waiting\n\n"
                    if data:
                        await write(data)
                last = b"data: [DONE]\n\n"
                if self._usage_per_prompt is not None:
                    last = envelope.usage(exchange.choices, self._usage_per_prompt) + last
        except HungUpError:
            return
        except ApiError as error:
            last = b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"
        await write(last, more=False)


def _check_model(name: str, backend: Backend) -> None:
    if name != backend.model_id:
        raise ApiError(
            404, f"model {name!r} is not served here; served: {backend.model_id}", param="model",
            code="model_not_found",
        )  # fmt: skip


def _role(role: str) -> str:
    # OpenAI's newer name of the same role; the models' templates know the older one.
    return "system" if role == "developer" else role


Text = TypeVar("Text")


async def _ids(tokenize: Callable[[Text], list[int]], text: Text, length: int) -> list[int]:
    return await asyncio.to_thread(tokenize, text) if length > LONG_TEXT else tokenize(text)


async def _prompt_ids(backend: Backend, prompt: str | list[int]) -> list[int]:
    tokenizer = backend.tokenizer
    if isinstance(prompt, str):
        return await _ids(tokenizer.encode, prompt, len(prompt))
    largest = max(prompt)
    if largest >= tokenizer.vocab_size:
        raise ApiError(
            400, f"prompt: token id {largest} is outside the vocabulary; ids are below {tokenizer.vocab_size}",
            param="prompt", code="invalid_value",
        )  # fmt: skip
    return prompt


def _room(backend: Backend, ids: list[int], limit: int | None, field: str) -> int:
    """Return ``max_tokens`` of a prompt: the limit asked for, or what the context leaves."""
    most, prompt = backend.max_context, len(ids)
    if prompt == 0:
        raise ApiError(400, f"{field}: no tokens; at least one is needed", param=field, code="invalid_value")
    if prompt >= most or prompt + (limit or 1) > most:
        wanted = f" and {limit} more were asked for" if limit else ""
        raise ApiError(
            400, f"the longest context here is {most} tokens; {field} has {prompt} tokens{wanted}", param=field,
            code="context_length_exceeded",
        )  # fmt: skip
    return limit or most - prompt


def _sampling(body: GenerationRequest, room: int, copy: int) -> SamplingParams:
    # Copies of a seeded prompt must differ from each other and be the same again; wrapped to 64 bits.
    seed = None if body.seed is None else (body.seed + copy + 2**63) % 2**64 - 2**63
    return SamplingParams(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=seed,
        max_tokens=room,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.logprob_count,
    )
