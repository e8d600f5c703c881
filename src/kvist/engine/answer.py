"""What comes out of the engine: pieces of an answer as they are made, and the whole of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a sampled token, with the likeliest alternatives, best first.

    Natural logarithms of the model's own distribution, before temperature and cuts.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """A piece of an answer; the last one has a ``finish_reason``, the account and the timing."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    account: dict[str, Any] | None = None
    timing: dict[str, Any] | None = None
    error: str | None = None


@dataclass(kw_only=True)
class Answer:
    """A whole answer.

    Attributes:
        text: generated text, without stop strings and control tokens.
        tokens: generated token ids; an end-of-text token is the last of them.
        prompt_tokens: length of the prompt.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        account: as :class:`kvist.engine.account.Account`, a dict.
        timing: seconds: ``ttft`` from submission to the first token, ``prefill`` from the first step to it,
            ``decode`` from it to the last; and ``tokens_per_second`` of the decode.
        logprobs: one entry a token where they were asked for.
    """

    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    account: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None

    def add(self, event: Event) -> None:
        """Take one more piece."""
        self.text += event.text
        self.tokens.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        if event.finish_reason:
            self.finish_reason = event.finish_reason
            self.account = event.account or {}
            self.timing = event.timing or {}
            self.error = event.error

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``kvist generate``."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "account": self.account,
            "timing": self.timing,
        }
