"""What the server asks of the engine, and nothing more.

`kvist.engine.loop.EngineLoop` fulfils `Backend`; the tests' fake loop does too, so that every route is tested without
a model.

``snapshot()`` is what ``/cache`` sends. Its keys (sizes in bytes, times in seconds)::

    model            id that requests name
    format           {"key": codec, "value": codec}
    dtype            compute type
    uptime_seconds
    arena            {"bytes", "slab_bytes", "slabs", "slabs_free"}
    bytes            {"free", "cached", "held", "waste"}: they add up to arena bytes
    groups           [{"name", "layers", "window", "block_tokens", "block_bytes", "blocks_total",
                       "free", "cached", "held", "block_states", "held_by"}]
    tree             {"tokens", "nodes": [{"id", "parent", "tokens", "users", "last_used", "text"}]}, biggest first
    requests         [{"id", "state": "running"|"waiting", "prompt_tokens", "output_tokens", "length", "hit_tokens",
                       "blocks": {group: count}, "bytes", "planned_bytes", "age_seconds"}]
    counters         {"requests", "finished", "preempted", "refused", "prompt_tokens", "output_tokens",
                      "hit_tokens", "query_tokens"}
    speed            {"tokens_per_second"}

``block_states`` is one letter a block in the order of block ids, run-length coded as count and letter: ``120h16c4096f``
(f free, c cached, h held, - in a slab that is not lent to this group). ``held_by`` is optional: ``[[first block, count, request id], …]``, so that the page can
give each request its hue; a block that several requests share may be named once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from kvist.engine.sampler import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Tokenizer(Protocol):
    """Text to token ids and back, as the model's own files say."""

    vocab_size: int

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]: ...


class TokenLogprob(Protocol):
    """Log-probability of a sampled token, natural logarithm, with the likeliest alternatives, best first."""

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class Event(Protocol):
    """One piece of an answer; the last one has a ``finish_reason``, the account and the timing."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[TokenLogprob]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def account(self) -> dict[str, Any] | None: ...

    @property
    def timing(self) -> dict[str, Any] | None: ...

    @property
    def error(self) -> str | None: ...


class Backend(Protocol):
    """One running engine. Every method is safe from any thread and returns at once.

    ``max_context`` is the most tokens, prompt and answer together, that one request may have: the least of the model's
    context, ``--max-context`` and what an empty cache holds for one sequence. ``cache_tokens`` is the number of tokens
    that the whole cache holds when every window is full.
    """

    @property
    def model_id(self) -> str: ...

    @property
    def max_context(self) -> int: ...

    @property
    def cache_tokens(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def submit(
        self,
        prompt_ids: list[int],
        params: "SamplingParams",
        *,
        cache_salt: str = "",
        on_event: Callable[[Any], None],
    ) -> str:
        """Queue a request and return its id; ``on_event`` is called from the engine's thread.

        Raises:
            InputError: the prompt or the parameters are wrong.
            DoesNotFit: the request can never fit; the message shows the sum.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks; a request that is already over is no error."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Where every block is, as the module's docstring draws it."""
        ...

    def stop(self, drain: bool) -> None:
        """End the engine's thread: after what runs (``drain``) or at once, with ``abort`` events."""
        ...
