"""What columns are called in the traces that people have, and what they count.

The names are those of Mooncake, Azure 2023, BurstGPT, LMCache, LLMServingSim and ShareGPT-style files, of kvist itself,
and a few obvious others; letter case does not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_PROMPT = (
    "input_length", "prompt_tokens", "contexttokens", "request tokens", "input_tokens", "input_toks", "prompt_length",
    "prompt_len", "num_prefill_tokens", "prompt", "input",
)  # fmt: skip
_OUTPUT = (
    "output_length", "output_tokens", "completion_tokens", "generatedtokens", "response tokens", "generated_tokens",
    "output_toks", "output_len", "num_decode_tokens", "completion", "output",
)  # fmt: skip
_WHOLE = ("length", "tokens", "total_tokens", "total tokens", "len", "sequence_length")
# What a conversation said before the prompt, where it is counted apart.
_HISTORY = ("history_tokens",)
_CONVERSATION = ("conv", "conversation", "conversation_id")
_BLOCKS = ("hash_ids", "blocks")
# Units a second; ``timestamp`` is milliseconds in JSON lines (Mooncake) and seconds in CSV (BurstGPT).
_TIMES = {
    "arrival": 1, "arrival_time": 1, "arrived_at": 1, "timestamp_s": 1, "arrival_time_ms": 10**3, "timestamp_ms": 10**3,
    "arrival_time_ns": 10**9, "timestamp": None, "time": 1,
}  # fmt: skip
_FORMATS = {
    "Mooncake": {"timestamp", "input_length", "output_length", "hash_ids"},
    "Azure": {"timestamp", "contexttokens", "generatedtokens"},
    "BurstGPT": {"timestamp", "request tokens", "response tokens"},
    "ShareGPT turns": {"conv", "prompt_tokens", "history_tokens", "completion_tokens"},
    "kvist": {"arrival", "prompt_tokens", "output_tokens"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where a row says what, counted from 0; None where it does not.

    Attributes:
        prompt: tokens of the prompt, or of the whole sequence where ``output`` is None.
        output: tokens of the answer.
        history: tokens before the prompt that it does not count.
        blocks: ids of the prompt's blocks.
        conversation: which conversation a request belongs to.
        time: when it came.
        per_second: units of ``time`` a second.
        last: the largest place.
    """

    prompt: int
    output: int | None = None
    history: int | None = None
    blocks: int | None = None
    conversation: int | None = None
    time: int | None = None
    per_second: int = 1

    @property
    def last(self) -> int:
        """The largest place."""
        places = (self.prompt, self.output, self.history, self.blocks, self.conversation, self.time)
        return max(place for place in places if place is not None)


def places_of(names: Iterable[str], *, json: bool) -> Places | None:
    """Find the columns of a row; None where nothing says a length.

    Args:
        names: of the columns, in their order.
        json: whether they are keys of JSON lines.
    """
    found = {name.strip().casefold(): place for place, name in reversed(list(enumerate(names)))}
    prompt, output = _first(found, _PROMPT), _first(found, _OUTPUT)
    if prompt is None or output is None:
        whole = _first(found, _WHOLE)
        return None if whole is None else Places(prompt=whole)
    time = next((name for name in _TIMES if name in found), None)
    per_second = _TIMES[time] if time else 1
    return Places(
        prompt=prompt,
        output=output,
        history=_first(found, _HISTORY),
        blocks=_first(found, _BLOCKS),
        conversation=_first(found, _CONVERSATION),
        time=None if time is None else found[time],
        per_second=per_second or (10**3 if json else 1),
    )


def format_of(names: Iterable[str]) -> str:
    """Whose format has these columns."""
    found = {name.strip().casefold() for name in names}
    return next((name for name, columns in _FORMATS.items() if columns <= found), "columns by name")


def _first(found: dict[str, int], names: tuple[str, ...]) -> int | None:
    return next((found[name] for name in names if name in found), None)
