"""From logits to tokens.

What is asked is applied in the order of vLLM's sampler: temperature, min-p, top-k, top-p, then one draw. Every request
draws from its own generator, so that a seed gives the same tokens alone and in a batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.errors import EngineFailure, InputError

_MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request wants of its tokens.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest; 0 for all.
        top_p: draw among the likeliest that together have this probability.
        min_p: draw among those at least this fraction as likely as the likeliest.
        seed: makes the draws repeatable; None for fresh ones.
        max_tokens: most tokens to generate; None for as many as there is room.
        stop: texts that end the answer and are not part of it.
        stop_token_ids: tokens that end it.
        ignore_eos: go on past the model's own end.
        logprobs: how many of the likeliest tokens to report with each; 0 for the chosen one alone, None for none.

    Raises:
        InputError: a value is out of range; names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(key: str, fine: bool, right: str) -> None:
            if not fine:
                raise InputError(f"{key}: {getattr(self, key)!r} will not do; {right}", key=key)

        for key in ("temperature", "top_p", "min_p"):
            check(key, isinstance(getattr(self, key), int | float), "a number")
        for key in ("top_k", "seed", "max_tokens", "logprobs"):
            value = getattr(self, key)
            check(key, type(value) is int or (value is None and key != "top_k"), "a whole number")
        check("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")
        check("stop", all(isinstance(text, str) for text in self.stop), "texts")
        check("stop_token_ids", all(type(token) is int for token in self.stop_token_ids), "token ids")
        check("temperature", 0 <= self.temperature <= 100, "0 to 100")
        check("top_k", self.top_k >= 0, "0 (all) or more")
        check("top_p", 0 < self.top_p <= 1, "above 0, at most 1")
        check("min_p", 0 <= self.min_p <= 1, "0 to 1")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit whole number")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more")
        check("logprobs", self.logprobs is None or 0 <= self.logprobs <= _MAX_LOGPROBS, f"0 to {_MAX_LOGPROBS}")
        check("stop", all(self.stop), "an empty text cannot be found")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """Make them from single fields; lists and a lone text stand for tuples.

        Raises:
            InputError: a field is not known, of the wrong kind or out of range; names it.
        """
        known = {field.name for field in fields(cls)}
        values = dict(given)
        for key, value in values.items():
            if key not in known:
                raise InputError(f"{key}: is not a sampling parameter; known are {', '.join(sorted(known))}", key=key)
            if key == "stop" and isinstance(value, str):
                values[key] = (value,)
            elif key in ("stop", "stop_token_ids") and value is not None:
                values[key] = tuple(value)
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"sampling: {error}; numbers and texts were expected", key="sampling") from error

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A chosen token.

    Attributes:
        token_id: the choice.
        logprob: natural logarithm of its probability before temperature and cuts; nan where the request did not ask.
        top: the likeliest tokens and their log-probabilities, likeliest first, where it asked for any.
    """

    token_id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """One request's choices, with their own random state.

    Args:
        params: what the request wants.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator: torch.Generator | None = None
        if not params.greedy:
            self.generator = torch.Generator()
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(params.seed)

    def choose(self, logits: Tensor) -> int:
        """Draw a token from float32 ``[vocab]`` logits; advances the random state."""
        if self.generator is None:
            return int(logits.argmax())
        params = self.params
        # The largest becomes 0 first, so that a tiny temperature sends the others to minus infinity and nothing to NaN.
        values, tokens = (logits - logits.max()) / params.temperature, None
        if params.min_p > 0:
            # p >= min_p x max(p), in logits.
            values = values.masked_fill(values < values.max() + torch.tensor(params.min_p).log(), -torch.inf)
        if 0 < params.top_k < len(values):
            values, tokens = values.topk(params.top_k)
        if params.top_p < 1:
            if tokens is None:
                values, tokens = values.sort(descending=True, stable=True)
            probabilities = values.softmax(-1)
            # A token stays while those before it have not reached top_p.
            before = probabilities.cumsum(-1) - probabilities
            values = values.masked_fill(before >= params.top_p, -torch.inf)
        # The likeliest after dividing by exponential noise: one draw from the distribution.
        noise = torch.empty_like(values).exponential_(generator=self.generator)
        place = int((values - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()).argmax())
        return place if tokens is None else int(tokens[place])

    @staticmethod
    def sample(logits: Tensor, samplers: Sequence["Sampler"]) -> list[Sampled]:
        """Choose one token a row.

        Args:
            logits: float32 ``[rows, vocab]``.
            samplers: one a row; their random states advance.
        """
        with torch.inference_mode():
            # NumPy looks at a vocabulary in a tenth of PyTorch's time; to both what is no number is the largest.
            values = logits.numpy()
            likeliest = values.argmax(-1)
            if not np.isfinite(values[np.arange(len(values)), likeliest]).all():
                raise EngineFailure("the model's logits are not finite numbers; try another compute type")
            tokens = [
                int(best) if sampler.params.greedy else sampler.choose(row)
                for sampler, row, best in zip(samplers, logits, likeliest, strict=True)
            ]
            return [
                _sampled(token, row, sampler.params.logprobs)
                for token, row, sampler in zip(tokens, logits, samplers, strict=True)
            ]


def _sampled(token: int, logits: Tensor, count: int | None) -> Sampled:
    if count is None:
        return Sampled(token_id=token)
    logprobs = logits.log_softmax(-1)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sampled(token_id=token, logprob=float(logprobs[token]), top=top)
