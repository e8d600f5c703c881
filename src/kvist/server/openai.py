"""The OpenAI routes: from a request's body to submissions, and from the engine's events to an answer."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from kvist._version import __version__
from kvist.engine.sampler import SamplingParams
from kvist.server.admission import Admission
from kvist.server.backend import Backend
from kvist.server.errors import ApiError, from_validation
from kvist.server.event_stream import EventStream
from kvist.server.exchange import Bridge, Exchange, HungUpError
from kvist.server.metrics import ServerMetrics
from kvist.server.prompts import Prompts
from kvist.server.schemas import ChatRequest, CompletionRequest, GenerationRequest
from kvist.server.shapes import ChatShape, CompletionShape, Envelope

# Reading a body of this size takes some tenths of a second, for which the event loop is not free.
MAX_BODY_BYTES = 4 * 2**20
# A token id and what stands between two, in JSON; a context that needs more than the above may have it.
_BYTES_OF_ID = 8
# OpenAI's default of /v1/completions; a chat may by default go on until the context is full.
DEFAULT_COMPLETION_TOKENS = 16

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Service:
    """What every request needs: the engine and the server's own parts."""

    backend: Backend
    bridge: Bridge
    metrics: ServerMetrics
    prompts: Prompts
    admission: Admission
    created: int

    @property
    def fingerprint(self) -> str:
        """Name the build and the model: answers with equal fingerprints and seeds are comparable."""
        digest = hashlib.sha256(f"{__version__} {self.backend.model_id}".encode()).hexdigest()
        return f"kvist-{__version__}-{digest[:8]}"

    @property
    def max_body(self) -> int:
        """Bytes of the largest body that is read."""
        return max(MAX_BODY_BYTES, _BYTES_OF_ID * self.backend.max_context)


async def read_body(request: Request, model: type[Body], *, limit: int) -> Body:
    """Read and validate a JSON body.

    Raises:
        ApiError: 413 past ``limit`` bytes, 415 for another content type, 400 for everything the schema refuses.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also what keeps a foreign page in a browser from posting here without a preflight.
    if kind != "application/json":
        raise ApiError(415, f"content-type {kind!r} is not supported; send application/json")
    declared = request.headers.get("content-length", "")
    content = bytearray()
    too_large = declared.isdecimal() and int(declared) > limit
    if not too_large:
        async for part in request.stream():
            content += part
            if too_large := len(content) > limit:
                break
    if too_large:
        raise ApiError(
            413, f"the body is larger than {limit} bytes", code="body_too_large",
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

    @router.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    @router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def one_model(name: str) -> Response:
        _check_model(name, backend)
        return JSONResponse(card())

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest, limit=service.max_body)
        _check_model(body.model, backend)
        messages = [{"role": _role(message.role), "content": message.content} for message in body.messages]
        shape = ChatShape(backend.tokenizer, with_logprobs=body.logprobs)
        limit = body.max_completion_tokens or body.max_tokens

        async def prompts(exchange: Exchange) -> _Prompts:
            ids = await service.prompts.chat(messages, exchange)
            return _Prompts(field="messages", ids=[ids], limit=limit, shape=shape)

        return await _answer(service, request, body, body.n, prompts)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, limit=service.max_body)
        _check_model(body.model, backend)

        async def prompts(exchange: Exchange) -> _Prompts:
            ids = await service.prompts.ids(body.prompt, exchange, begins=body.cartridge is None)
            texts = await service.prompts.texts(body.prompt, exchange) if body.echo else []
            echoes = [text for text in texts for _ in range(body.n)]
            shape = CompletionShape(backend.tokenizer, with_logprobs=body.logprobs is not None, echoes=echoes)
            limit = body.max_tokens or DEFAULT_COMPLETION_TOKENS
            return _Prompts(field="prompt", ids=ids, limit=limit, shape=shape)

        return await _answer(service, request, body, body.n * len(body.prompt), prompts)

    return router


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """A request's prompts, each with its ids, and what its answers look like; ``field`` is where they stood."""

    field: str
    ids: Sequence[list[int]]
    limit: int | None
    shape: ChatShape | CompletionShape


async def _answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    count: int,
    prompts: Callable[[Exchange], Awaitable[_Prompts]],
) -> Response:
    exchange = Exchange(service.backend, service.bridge, service.metrics, service.admission, request.receive)
    with ExitStack() as stack:
        stack.callback(exchange.close)
        try:
            exchange.begin(count)
            given = await prompts(exchange)
            backend = service.backend
            most = backend.max_context if body.cartridge is None else backend.context_behind(body.cartridge)
            rooms = [_room(most, ids, given.limit, given.field) for ids in given.ids]
            for ids, room in zip(given.ids, rooms, strict=True):
                for copy in range(body.n):
                    exchange.submit(
                        ids,
                        _sampling(body, room, copy),
                        cache_salt=body.cache_salt,
                        evict=body.evict,
                        cartridge=body.cartridge,
                    )
                    await exchange.breathe()
            envelope = Envelope(
                given.shape, model=service.backend.model_id, fingerprint=service.fingerprint,
                stream_usage=body.include_usage,
            )  # fmt: skip
            if body.stream:
                stack.pop_all()
                return EventStream(exchange, envelope, usage_per_prompt=body.n if body.include_usage else None)
            await exchange.collect()
        except HungUpError:
            return Response(status_code=499)
    return Response(envelope.whole(exchange.choices, body.n), media_type="application/json")


def _check_model(name: str, backend: Backend) -> None:
    if name != backend.model_id:
        raise ApiError(
            404, f"model {name!r} is not served here; served: {backend.model_id}", param="model",
            code="model_not_found",
        )  # fmt: skip


def _role(role: str) -> str:
    # OpenAI's newer name of the same role; the models' templates know the older one.
    return "system" if role == "developer" else role


def _room(most: int, ids: list[int], limit: int | None, field: str) -> int:
    """Return ``max_tokens`` of a prompt: the limit asked for, or what the context leaves."""
    prompt = len(ids)
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
