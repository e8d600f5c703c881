"""``kvist generate``: one answer in the terminal, with the account of its memory."""

import json
import sys
from argparse import Namespace
from typing import Any

from kvist.engine.answer import Answer, Event
from kvist.engine.engine import Engine
from kvist.engine.sampler import SamplingParams
from kvist.errors import EngineFailure, UnsupportedModel
from kvist.spec.formats import CacheFormat
from kvist.units import format_size

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
_DEFAULT_MAX_TOKENS = 256


def generate(args: Namespace) -> int:
    """Answer ``args.prompt``; return the exit code.

    ``args`` has what the command line gives: model, prompt, the sampling parameters, chat (None: where the model has a
    template), dtype, memory, key, value, block, no_cache, json. Text streams to standard output, all else goes to
    standard error; with ``json`` the answer is one JSON object.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    params = SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, "stop": tuple(args.stop or ()), **given})
    engine = Engine(*([args.model] if args.model else []), **_settings(args))
    prompt, how = _prompt(engine, args.prompt, args.chat)
    answer = Answer(prompt_tokens=len(prompt))
    events: list[Event] = []
    engine.submit(prompt, params, on_event=events.append)
    _note(f"{engine.model_id}, computing in {engine.dtype}, cache {engine.format}, {how}")
    try:
        while answer.finish_reason is None:
            engine.step()
            for event in events:
                answer.add(event)
                if not args.json:
                    print(event.text, end="", flush=True)
            events.clear()
    finally:
        if not args.json:
            print(flush=True)
    if answer.finish_reason == "error":
        raise EngineFailure(answer.error or "a step failed")
    if args.json:
        print(json.dumps(answer.to_dict(), ensure_ascii=False))
    else:
        _print_account(answer)
    return 0


def _settings(args: Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"reuse": not args.no_cache, "max_running": 1}
    for name, value in (("dtype", args.dtype), ("memory", args.memory), ("block_tokens", args.block)):
        if value is not None:
            settings[name] = value
    if args.key or args.value:
        from kvist.engine.engine import best_dtype

        dtype = args.dtype or best_dtype()
        settings["format"] = CacheFormat(key=args.key or dtype, value=args.value or dtype)
    return settings


def _prompt(engine: Engine, text: str, chat: bool | None) -> tuple[list[int], str]:
    if chat is not False:
        try:
            return engine.tokenizer.chat([{"role": "user", "content": text}]), "prompt in the chat template"
        except UnsupportedModel:
            if chat:
                raise
    return engine.tokenizer.encode(text), "prompt as it is"


def _note(text: str) -> None:
    print(f"kvist: {text}", file=sys.stderr)


def _print_account(answer: Answer) -> None:
    account, timing = answer.account, answer.timing
    _note(
        f"{answer.prompt_tokens} prompt tokens, {len(answer.tokens)} generated ({answer.finish_reason}); "
        f"first token after {timing['ttft']:.2f} s, then {timing['tokens_per_second']:.1f} tokens/s"
    )
    same = "as planned" if account["allocated_bytes"] == account["planned_bytes"] else "NOT as planned"
    _note(
        f"cache: {format_size(account['allocated_bytes'])} in {account['blocks']} blocks, {same} "
        f"({account['planned_bytes']:,} bytes); {format_size(account['waste_bytes'])} of it holds no token"
    )
