"""The requests that the server reads: strict, and nothing is silently ignored.

A field is in one of three classes: supported (a field of the models below); known to OpenAI's or vLLM's clients and
accepted only at the value at which it has no effect (`NO_EFFECT`); or unknown. The last two, and every wrong value,
are a 400 that names the field. Reading stops at the first fault of a list or of an object's names: a million faults,
which fit into one body, would keep the event loop for a minute.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from kvist.errors import InputError
from kvist.spec.pruning import Pruning

# Answers to one request: the number of its prompts times n.
MAX_ANSWERS = 512
MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_IDS = 1024
MAX_LOGPROBS = 20
MAX_CARTRIDGES = 16

NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "metadata": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field -> the values at which it changes nothing; null is always one of them."""

_MESSAGE_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def _wrong(message: str) -> PydanticCustomError:
    # The message may hold a user's braces, which pydantic would take for a template.
    return PydanticCustomError("value", "{message}", {"message": message})


def _without_no_effect(data: Any, fields: Mapping[str, Any], no_effect: Mapping[str, tuple[Any, ...]]) -> Any:
    """Drop nulls of known fields and fields at a value without effect; refuse other values and unknown fields."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        known = name in fields or name in no_effect
        if known and value is None:
            continue
        if not known:
            raise PydanticCustomError("unknown", "unknown field", {"field": name})
        if name in fields:
            kept[name] = value
        elif value not in no_effect[name]:
            raise PydanticCustomError(
                "unsupported", "{field} is not supported by this server{hint}",
                {"field": name, "hint": _hint(no_effect[name])},
            )  # fmt: skip
    return kept


def _hint(accepted: tuple[Any, ...]) -> str:
    return (
        f"; only {' or '.join(json.dumps(value) for value in accepted)} is accepted" if accepted else "; leave it out"
    )


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and "" in stops:
        raise _wrong("an empty stop string would stop every answer before its first token")
    return stops


def _pruning(value: Any) -> Any:
    """How the request is pruned, as ``kvist serve --evict`` writes it; null leaves it to the server."""
    if isinstance(value, str):
        try:
            Pruning.read(value)
        except InputError as error:
            raise _wrong(str(error).removeprefix("evict: ")) from None
    return value


def _cartridges(value: Any) -> Any:
    """Names of trained caches, in the order in which they stand before the prompt; null for none."""
    names = [value] if isinstance(value, str) else value
    if names is not None and not (
        isinstance(names, list) and 1 <= len(names) <= MAX_CARTRIDGES and all(isinstance(name, str) for name in names)
    ):
        raise _wrong(f"must be a string, the name, or a list of 1 to {MAX_CARTRIDGES} names")
    return value


def _content(value: Any) -> Any:
    """Text of a message: a string, or a list of text parts, which are joined by newlines as other servers do."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_MESSAGES:
        raise _wrong(f"{len(value)} parts; at most {MAX_MESSAGES} go into one message")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _wrong(f"part {index} has type {kind!r}; only text parts are supported")
        extra = sorted(set(part) - {"type", "text"})
        if extra or not isinstance(part.get("text"), str):
            raise _wrong(f"part {index} must be {{'type': 'text', 'text': string}}" + f", not {extra}" * bool(extra))
        texts.append(part["text"])
    return "\n".join(texts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int} and min(value) >= 0


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or token ids, always returned as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if _is_ids(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong("must be a string, a list of strings, a list of token ids or a list of such lists; not empty")
    if len(value) > MAX_ANSWERS:
        raise _wrong(f"{len(value)} prompts; at most {MAX_ANSWERS} go into one request")
    if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
        return value
    raise _wrong("its items must all be strings, all token ids (0 or more), or all non-empty lists of token ids")


class StreamOptions(BaseModel):
    """What a stream sends beside the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown(cls, data: Any) -> Any:
        return _without_no_effect(data, cls.model_fields, {})

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(BaseModel):
    """Fields that both routes share."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: Annotated[list[str], FailFast(), Field(max_length=MAX_STOPS), BeforeValidator(_stops)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], FailFast(), Field(max_length=MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str = Field("", max_length=1024)
    evict: Annotated[str | None, BeforeValidator(_pruning)] = None
    cartridge: Annotated[str | list[str] | None, BeforeValidator(_cartridges)] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_effect(cls, data: Any) -> Any:
        return _without_no_effect(data, cls.model_fields, NO_EFFECT)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def logprob_count(self) -> int | None:
        """Alternatives wanted beside each sampled token's log-probability; None when none at all are wanted."""
        raise NotImplementedError


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]

    @model_validator(mode="before")
    @classmethod
    def _drop_no_effect(cls, data: Any) -> Any:
        return _without_no_effect(data, cls.model_fields, _MESSAGE_NO_EFFECT)


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError(
                "max_completion_tokens", "max_tokens and max_completion_tokens differ; send one of them"
            )
        return self

    @property
    def logprob_count(self) -> int | None:
        """Alternatives wanted beside each sampled token's log-probability; None when none at all are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "CompletionRequest":
        answers = len(self.prompt) * self.n
        if answers > MAX_ANSWERS:
            raise PydanticCustomError(
                "n", "{message}",
                {"message": f"n and prompt: {self.n} answers to each of {len(self.prompt)} prompts are {answers}; "
                            f"at most {MAX_ANSWERS} go into one request"},
            )  # fmt: skip
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs is not supported: prompts have no log-probabilities")
        return self

    @property
    def logprob_count(self) -> int | None:
        """Alternatives wanted beside each sampled token's log-probability; None when none at all are wanted."""
        return self.logprobs
