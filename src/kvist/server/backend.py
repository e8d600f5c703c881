"""What the server asks of the engine, and nothing more.

`kvist.engine.loop.EngineLoop` fulfils `Backend`; the tests' fake loop does too, so that every route is tested without
a model.

``snapshot()`` is what ``/cache`` sends. Its keys (sizes in bytes, times in seconds)::

    model            id that requests name
    format           {"key": codec, "value": codec}; with rotate, keep_layers, keep, layers and state where they are
                     said, and then "text", all of it in words
    dtype            compute type
    uptime_seconds
    arena            {"bytes", "slab_bytes", "slabs", "slabs_free"}
    bytes            {"free", "cached", "held", "waste"}: they add up to arena bytes
    groups           [{"name", "layers", "window", "block_tokens", "block_bytes", "blocks_total",
                       "free", "cached", "held", "block_states", "held_by"}]
    tree             {"tokens", "nodes": [{"id", "parent", "tokens", "users", "last_used", "text", "pinned"}]}, biggest
                     first; "text" is what the beginning of the tokens says, null where the prompt was salted; "pinned"
                     where a cartridge stands for them
    tiers            [{"name", "bytes", "allocated_bytes", "cached", "swapped", "free", "blocks", "hit_tokens",
                       "read_bytes", "written_bytes"}], the nearest first: memory behind the arena; cached, swapped and
                     free add up to its bytes
    requests         [{"id", "state": "running"|"waiting", "prompt_tokens", "output_tokens", "length", "pruned_tokens",
                       "hit_tokens", "blocks": {group: count}, "bytes", "planned_bytes", "age_seconds"}]
    counters         {"requests", "finished", "preempted", "refused", "prompt_tokens", "output_tokens",
                      "hit_tokens", "query_tokens", "pruned_tokens", "pruned_blocks"}
    cartridges       [{"name", "document", "document_tokens", "tokens", "bytes", "users"}]: trained caches in the arena
    joined           [{"names", "tokens", "bytes", "users"}]: lists that live requests name, one cartridge behind
                     the other; their bytes are those behind the first
    speed            {"tokens_per_second"}

``block_states`` is one letter a block in the order of block ids, run-length coded as count and letter,
``120h16c4096f``: f free, c cached, h held, x in a slab that is not lent to this group. ``held_by`` is
``[[first block, count, request id], …]``, so that the page can give each request its hue; a block that several requests
share is named for each.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvist.engine.answer import Event

if TYPE_CHECKING:
    from kvist.engine.sampler import SamplingParams


class Tokenizer(Protocol):
    """Text to token ids and back, as the model's own files say."""

    vocab_size: int

    @property
    def longest_token(self) -> int:
        """Bytes of the longest text that one id stands for; may take some tenths of a second at first."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, with what the model puts around texts."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without control tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one id writes; it may be a part of a character."""
        ...

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation, through the model's template."""
        ...


class Backend(Protocol):
    """One running engine. Every method but `stop` is safe from any thread and returns at once.

    ``max_context`` is the least of the model's context, ``--max-context`` and what an empty cache holds for one
    sequence. ``cache_tokens`` is the number of tokens that the whole cache holds when every window is full.
    """

    @property
    def model_id(self) -> str:
        """The name that requests give."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        ...

    def context_behind(self, cartridge: str | Sequence[str]) -> int:
        """Most tokens of one request behind a cartridge or several, prompt and answer together.

        Raises:
            InputError: there is no cartridge of this name.
        """
        ...

    @property
    def cache_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped by itself; None while all is well."""
        ...

    def submit(
        self,
        prompt_ids: list[int],
        params: "SamplingParams",
        *,
        cache_salt: str = "",
        evict: str | None = None,
        cartridge: str | Sequence[str] | None = None,
        on_event: Callable[[Event], None],
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
