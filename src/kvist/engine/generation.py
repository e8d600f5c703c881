"""One request's way from sampled tokens to text: detokenisation, stop conditions, timing."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvist.batch import Request
from kvist.engine.answer import Event, FinishReason, TokenLogprob
from kvist.engine.sampler import Sampled, Sampler, SamplingParams
from kvist.engine.stream import StopMatcher
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import InputError


def check_ids(prompt: Sequence[int], vocabulary: int) -> None:
    """See that a prompt is token ids of a vocabulary of this size.

    Raises:
        InputError: one is not.
    """
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InputError(f"prompt: token id {token!r} is not a whole number in 0 … {vocabulary - 1}", key="prompt")


class Generation:
    """What the engine keeps of a request beside its cache.

    Attributes:
        request: the scheduler's side of it.
        sampler: its parameters and its random numbers.
        on_event: is told every piece of the answer.
        started: when a step first worked on it, in seconds of the performance counter; None before.
    """

    __slots__ = (
        "_detokenizer", "_eos_ids", "_first_token", "_last_token", "_params", "_stops", "_submitted",
        "on_event", "request", "sampler", "started",
    )  # fmt: skip

    def __init__(
        self, request: Request, params: SamplingParams, tokenizer: Tokenizer, on_event: Callable[[Event], None]
    ) -> None:
        self.request = request
        self.sampler = Sampler(params)
        self.on_event = on_event
        self.started: float | None = None
        self._params = params
        self._eos_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        self._detokenizer = tokenizer.stream(continues=True)
        self._stops = StopMatcher(params.stop)
        self._submitted = time.perf_counter()
        self._first_token: float | None = None
        self._last_token: float | None = None

    def take(self, sampled: Sampled) -> Event:
        """The piece of the answer that a sampled token makes; its ``finish_reason`` is set where the answer ends."""
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token
        token = sampled.token_id
        reason: FinishReason | None = None
        if token in self._eos_ids:
            text, reason = "", "stop"
        else:
            shown = self._stops.push(self._detokenizer.push(token))
            text = shown.emit
            if shown.stopped:
                reason = "stop"
            elif self.request.generated >= self.request.max_tokens:
                reason = "length"
            if shown.stopped:
                return self._event(text, sampled, reason)
        if reason:
            rest = self._stops.push(self._detokenizer.flush())
            text += rest.emit + self._stops.flush()
            reason = "stop" if rest.stopped else reason
        return self._event(text, sampled, reason)

    def _event(self, text: str, sampled: Sampled, reason: FinishReason | None) -> Event:
        logprobs = (
            []
            if self._params.logprobs is None
            else [TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob, top=sampled.top)]
        )
        return Event(text=text, token_ids=(sampled.token_id,), logprobs=logprobs, finish_reason=reason)

    def timing(self) -> dict[str, Any]:
        """Seconds, and tokens per second of the decode; empty before the first token."""
        if self._first_token is None or self._last_token is None:
            return {}
        decode = self._last_token - self._first_token
        return {
            "ttft": self._first_token - self._submitted,
            "prefill": self._first_token - (self.started or self._submitted),
            "decode": decode,
            "tokens_per_second": (self.request.generated - 1) / decode if decode > 0 else 0.0,
        }
