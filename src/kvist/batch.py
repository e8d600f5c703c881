"""What a step computes, and of whom: requests, their parts of a step, and all parts together."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from kvist.cache.sequence import Move, Sequence
from kvist.cache.traffic import NO_TRAFFIC, Moved, Traffic


class Request:
    """A prompt and the tokens generated for it.

    Attributes:
        id: unique among those that live.
        sequence: what it holds in the cache; ``sequence.tokens`` are its prompt and generated tokens.
        prompt_tokens: length of the prompt, and of what is pinned before it.
        max_tokens: most tokens to generate.
        first_hit_tokens: prompt tokens found in the prefix tree and the tiers when it was first admitted; None before.
        first_loads: what of them was loaded from tiers.
        preemptions: times that it had to give its blocks back.
        lost_tokens: tokens that were stored when it last had to.
        arrived: when, in seconds since the epoch.
        state: ``waiting``, ``running`` or ``ended``.
        alone: it had to make room for itself, and is computed again with the whole arena, unshared.
    """

    __slots__ = (
        "alone",
        "arrived",
        "first_hit_tokens",
        "first_loads",
        "id",
        "lost_tokens",
        "max_tokens",
        "preemptions",
        "prompt_tokens",
        "sequence",
        "state",
    )

    def __init__(self, request_id: str, sequence: Sequence, max_tokens: int) -> None:
        self.id = request_id
        self.sequence = sequence
        self.prompt_tokens = sequence.size
        self.max_tokens = max_tokens
        self.first_hit_tokens: int | None = None
        self.first_loads: tuple[Moved, ...] = ()
        self.preemptions = 0
        self.lost_tokens = 0
        self.arrived = time.time()
        self.alone = False
        self.state: Literal["waiting", "running", "ended"] = "waiting"

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.sequence.size - self.prompt_tokens


@dataclass(slots=True)
class Chunk:
    """One request's part of a step: the tokens at positions ``start … start + count - 1`` are computed.

    ``samples`` tells that the logits of the last of them are wanted: the prompt ends here, or it is a decode.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass
class Batch:
    """What one step computes, and which requests had to make room for it.

    Attributes:
        others: parts of requests, but for those in ``decoding``.
        preempted: requests that had to give their blocks back, or were swapped out.
        decoding: requests of which the one token is computed that was sampled last; there may be more among the others.
        starts: the position of that token, for each.
        traffic: what moves between the device and its tiers before the step, or has moved since the last one.
        copies: states, and what goes to real tiers or comes from them: to copy before the step, in order.
    """

    others: list[Chunk]
    preempted: list[Request]
    decoding: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    traffic: Traffic = NO_TRAFFIC
    copies: list[Move] = field(default_factory=list)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """A part for each request that takes part; made when it is asked for, as a simulation never does."""
        decodes = [Chunk(request, start, 1, True) for request, start in zip(self.decoding, self.starts, strict=True)]
        return decodes + self.others

    @property
    def sampling(self) -> list[Request]:
        """Requests for which a token is sampled, in the order of ``chunks``."""
        return self.decoding + [chunk.request for chunk in self.others if chunk.samples]

    @property
    def sequences(self) -> list[Sequence]:
        """Of all that take part."""
        return [request.sequence for request in self.decoding] + [chunk.request.sequence for chunk in self.others]

    @property
    def tokens(self) -> int:
        """Tokens computed in the step."""
        return len(self.decoding) + sum(chunk.count for chunk in self.others)
