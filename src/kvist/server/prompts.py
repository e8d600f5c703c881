"""Texts to token ids, without keeping anybody else waiting.

A text that is longer than the longest context could ever hold is refused by its size, before a tokenizer sees it.
Short texts are tokenised where they stand; long ones, one after the other, in a thread of their own, so that neither
the event loop nor short requests wait for them.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvist.server.backend import Backend
from kvist.server.errors import ApiError
from kvist.server.exchange import Exchange

# Longer texts are tokenised in a thread: a millisecond is about what other streams may wait.
LONG_TEXT = 4_000
# What a message adds to a conversation beside its text, in characters, about.
_MESSAGE = 32

_T = TypeVar("_T")


class Prompts:
    """Tokenises the prompts of all requests of one server."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvist-long-texts")

    async def chat(self, messages: list[dict[str, Any]], exchange: Exchange) -> list[int]:
        """Return the ids of a conversation.

        Raises:
            ApiError: it is too long.
            KvistError: from the tokenizer or its template.
            HungUpError: the client has hung up.
        """
        size = sum(len(message["content"].encode()) for message in messages)
        await self._check_size(size, "messages")
        tokenizer = self._backend.tokenizer
        return await self._run(lambda: tokenizer.chat(messages), size + _MESSAGE * len(messages), exchange)

    async def ids(
        self, prompts: Sequence[str | list[int]], exchange: Exchange, *, begins: bool = True
    ) -> list[list[int]]:
        """Return the ids of each prompt, which is a text or has them already; raises as `chat`.

        Without ``begins`` a text goes on behind something: what the model puts before texts is left out.
        """
        tokenizer = self._backend.tokenizer
        total = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                size = len(prompt.encode())
                await self._check_size(size, "prompt")
                total += size
            elif (largest := max(prompt)) >= tokenizer.vocab_size:
                raise ApiError(
                    400, f"prompt: token id {largest} is outside the vocabulary; ids are below {tokenizer.vocab_size}",
                    param="prompt", code="invalid_value",
                )  # fmt: skip

        def encode() -> list[list[int]]:
            return [
                tokenizer.encode(prompt, special=begins) if isinstance(prompt, str) else prompt for prompt in prompts
            ]

        return await self._run(encode, total, exchange)

    async def texts(self, prompts: Sequence[str | list[int]], exchange: Exchange) -> list[str]:
        """Return the text of each prompt; ids must have been checked by `ids`."""
        tokenizer = self._backend.tokenizer
        total = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await self._run(
            lambda: [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts],
            total,
            exchange,
        )

    async def _check_size(self, size: int, field: str) -> None:
        most = self._backend.max_context
        # A token stands for one byte at least: shorter texts need no closer look.
        if size <= most:
            return
        longest = await asyncio.to_thread(lambda: self._backend.tokenizer.longest_token)
        least = -(-size // longest)
        if least > most:
            raise ApiError(
                400, f"the longest context here is {most} tokens; {field} has {size} bytes, which are at least "
                f"{least} tokens", param=field, code="context_length_exceeded",
            )  # fmt: skip

    async def _run(self, work: Callable[[], _T], size: int, exchange: Exchange) -> _T:
        return await exchange.wait_for(self._thread, work) if size > LONG_TEXT else work()
