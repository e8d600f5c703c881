"""OpenAI's response bodies: whole answers and the chunks of a stream, for both routes.

A stream sends one chunk a token, so that everything around the text is formatted once for each choice and only the
text itself is encoded for each chunk.
"""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from kvist.engine.answer import TokenLogprob
from kvist.server.backend import Tokenizer
from kvist.server.exchange import Choice, Piece

# JSON has no minus infinity; OpenAI sends this instead.
_LOWEST_LOGPROB = -9999.0


def usage(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """Count tokens as OpenAI does: a prompt once, however many answers (``per_prompt``) it gets."""
    firsts = choices[::per_prompt]
    prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
    }


class ChatShape:
    """Bodies of ``/v1/chat/completions``."""

    route = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        """First chunk of a choice: whose turn it is."""
        return _chunk_choice(index, delta={"role": "assistant", "content": ""})

    def text_choice(self, index: int) -> dict[str, Any]:
        """A chunk's choice with ``_TEXT`` and ``_LOGPROBS`` where those of each piece go."""
        return _chunk_choice(index, delta={"content": _TEXT}, logprobs=_LOGPROBS)

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Last chunk of a choice."""
        return _chunk_choice(index, delta={}, finish_reason=finish_reason)

    def logprobs(self, index: int, tokens: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        """Log-probabilities of some tokens, or None when they were not asked for."""
        del index
        if not self._with_logprobs:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._alternative(token_id, logprob) for token_id, logprob in token.top]
        return {**self._alternative(token.token_id, token.logprob), "top_logprobs": top}

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._tokenizer.token_bytes(token_id)
        return {"token": written.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(written)}

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One answer of a whole response."""
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self.logprobs(choice.index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


class CompletionShape:
    """Bodies of ``/v1/completions``; ``echoes`` has the text to repeat before each choice, or is empty."""

    route = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool, echoes: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """First chunk of a choice: the prompt when it is echoed, else nothing."""
        if not self._echoes:
            return None
        return {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}

    def text_choice(self, index: int) -> dict[str, Any]:
        """A chunk's choice with ``_TEXT`` and ``_LOGPROBS`` where those of each piece go."""
        return {"index": index, "text": _TEXT, "logprobs": _LOGPROBS, "finish_reason": None}

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Last chunk of a choice."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, index: int, tokens: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        """Log-probabilities of some tokens, or None when they were not asked for; offsets go on from the last call."""
        if not self._with_logprobs:
            return None
        texts, values, tops, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        for token in tokens:
            texts.append(self._token_text(token.token_id))
            values.append(_finite(token.logprob))
            tops.append({self._token_text(token_id): _finite(logprob) for token_id, logprob in token.top})
            offsets.append(offset)
            offset += len(self._tokenizer.token_bytes(token.token_id).decode(errors="ignore"))
        self._offsets[index] = offset
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _token_text(self, token_id: int) -> str:
        written = self._tokenizer.token_bytes(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            # Part of a character. OpenAI writes it like this, so that no two tokens look the same.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

    def choice(self, choice: Choice) -> dict[str, Any]:
        """One answer of a whole response."""
        echo = self._echoes[choice.index] if self._echoes else ""
        return {
            "index": choice.index,
            "text": echo + "".join(choice.text),
            "logprobs": self.logprobs(choice.index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


Shape = ChatShape | CompletionShape


class Envelope:
    """The fields around every body of one response; ``stream_usage`` adds OpenAI's ``"usage": null`` to each chunk."""

    def __init__(self, shape: Shape, *, model: str, fingerprint: str, stream_usage: bool = False) -> None:
        self._shape = shape
        self._head = {
            "id": shape.id_prefix + uuid.uuid4().hex,
            "object": shape.route,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._stream_usage = stream_usage
        self._around: dict[int, tuple[bytes, bytes, bytes]] = {}

    def whole(self, choices: Sequence[Choice], per_prompt: int) -> bytes:
        """Return the body of an answer that is sent at once."""
        body = {
            **self._head,
            "choices": [self._shape.choice(choice) for choice in choices],
            "usage": usage(choices, per_prompt),
            "kvist": _accounts(choices),
        }
        return json.dumps(body).encode()

    def opening(self, index: int) -> bytes:
        """Return the event that begins a choice; may be empty."""
        choice = self._shape.opening(index)
        return self._event([choice]) if choice else b""

    def piece(self, piece: Piece) -> bytes:
        """Return the events for what a choice has gained; may be empty."""
        index = piece.choice.index
        events = b""
        if piece.text or (piece.logprobs and self._shape.logprobs(index, ()) is not None):
            around = self._around.get(index)
            if around is None:
                around = self._around[index] = self._cut(index)
            before, between, after = around
            logprobs = self._shape.logprobs(index, piece.logprobs)
            shown = b"null" if logprobs is None else json.dumps(logprobs).encode()
            events = b"".join((before, json.dumps(piece.text).encode(), between, shown, after))
        if piece.finish_reason is not None:
            events += self._event([self._shape.closing(index, piece.finish_reason)])
        return events

    def usage(self, choices: Sequence[Choice], per_prompt: int) -> bytes:
        """Return the event that ends a stream whose client asked for usage."""
        return self._event([], usage=usage(choices, per_prompt), kvist=_accounts(choices))

    def _cut(self, index: int) -> tuple[bytes, bytes, bytes]:
        event = self._event([self._shape.text_choice(index)])
        before, _, rest = event.partition(json.dumps(_TEXT).encode())
        between, _, after = rest.partition(json.dumps(_LOGPROBS).encode())
        return before, between, after

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk: dict[str, Any] = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        if self._stream_usage:
            chunk["usage"] = None
        return b"data: " + json.dumps({**chunk, **more}).encode() + b"\n\n"


_TEXT = "\x00text"
_LOGPROBS = "\x00logprobs"


def _chunk_choice(
    index: int, *, delta: dict[str, Any], logprobs: Any = None, finish_reason: Any = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _accounts(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [{"account": choice.account, "timing": choice.timing} for choice in choices]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
