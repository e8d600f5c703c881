"""Prompts that are answered together, and handed back when all answers are whole."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvist.engine.answer import Answer
from kvist.engine.sampler import SamplingParams
from kvist.errors import EngineFailure, InputError
from kvist.spec.pruning import Pruning

if TYPE_CHECKING:
    from kvist.engine.engine import Engine


def answer_together(
    engine: "Engine",
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    cache_salt: str,
    evict: Pruning | str | None,
    cartridge: str | Sequence[str] | None,
) -> list[Answer]:
    """:meth:`Engine.generate`, of parameters as they are."""
    if isinstance(prompts, str | bytes):
        raise InputError("prompts: one text was given; give a list of texts or of lists of token ids", key="prompts")
    answers: list[Answer] = []
    ids: list[str] = []
    try:
        for prompt in prompts:
            if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
                raise InputError(f"prompt: {prompt!r} is neither a text nor a list of token ids", key="prompt")
            tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            answer = Answer(prompt_tokens=len(tokens))
            ids.append(
                engine.submit(
                    tokens, params, cache_salt=cache_salt, evict=evict, cartridge=cartridge, on_event=answer.add
                )
            )
            answers.append(answer)
        while any(answer.finish_reason is None for answer in answers):
            engine.step()
    except BaseException:
        for request_id in ids:
            engine.abort(request_id)
        engine.apply_aborts()
        raise
    failed = next((answer for answer in answers if answer.finish_reason == "error"), None)
    if failed:
        raise EngineFailure(failed.error or "a step failed")
    return answers
