"""``kvist generate``: one answer in the terminal, with the account of its memory."""

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import takewhile
from secrets import randbits
from time import perf_counter
from typing import Any

from kvist.cli_values import cache_format, format_said
from kvist.engine.answer import Answer, Event
from kvist.engine.engine import Engine
from kvist.engine.loading import DEFAULT_MODEL, best_dtype
from kvist.engine.sampler import SamplingParams
from kvist.errors import EngineFailure, UnsupportedModel
from kvist.report.saving import Saving, print_saving
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
_DEFAULT_MAX_TOKENS = 256
# Seconds: its time grows with the square of the length.
_LONGEST_WITHOUT = 60.0


def generate(args: Namespace) -> int:
    """Answer ``args.prompt``; return the exit code.

    ``args`` has what the command line gives: model, prompt, the sampling parameters, chat (None: where the model has a
    template), dtype, memory, key, value and what else says a format, block, evict, tier, tier_dir, cartridge, no_cache,
    plot, json.
    Text streams to standard output, all else goes to standard error; with ``json`` the answer is one JSON object. With
    ``no_cache`` the answer is made a second time, all tokens computed again at each step, for a minute at most:
    ``timing`` is of that run, and the table says what the cache saves.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.no_cache:
        # Both answers draw the same.
        given.setdefault("seed", randbits(63))
    params = SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, "stop": tuple(args.stop or ()), **given})
    engine = Engine(*([args.model] if args.model else []), **_settings(args))
    prompt, how = _prompt(engine, args.prompt, args.chat, begins=not args.cartridge)
    if args.cartridge:
        how += f", behind {engine.shelf.tokens(list(engine.shelf.loaded))} tokens of {' and '.join(args.cartridge)}"
        how += f" in {args.cartridge_format}" if args.cartridge_format else ""
    _note(f"{engine.model_id}, computing in {engine.dtype}, cache {engine.format}, {how}")
    try:
        made = _answer(engine, prompt, params, show=not args.json)
    finally:
        if not args.json:
            print(flush=True)
    if not args.json:
        _print_account(made.answer)
    content = made.answer.to_dict()
    if args.no_cache:
        saving, timing = _without_cache(engine, prompt, params, made)
        content |= {"timing": timing, "saving": saving.to_dict()}
        if args.plot is not None:
            from kvist.report.saving_plot import plot_saving

            plot_saving(saving, engine.model_id, args.plot)
        if not args.json:
            with redirect_stdout(sys.stderr):
                print_saving(saving)
        _note(_verdict(saving))
    if args.json:
        print(json.dumps(content, ensure_ascii=False))
    return 0


@dataclass(frozen=True, kw_only=True)
class _Made:
    """An answer; ``seconds`` from its request to each token."""

    answer: Answer
    seconds: list[float]


def _answer(
    engine: Engine, prompt: list[int], params: SamplingParams, *, show: bool, limit: float | None = None
) -> _Made:
    """Make an answer; after ``limit`` seconds it is stopped, but not before its second token, which gives a speed."""
    made = _Made(answer=Answer(prompt_tokens=len(prompt)), seconds=[])
    answer = made.answer
    events: list[Event] = []
    started = perf_counter()
    cartridges = list(engine.shelf.loaded) or None
    request = engine.submit(prompt, params, cartridge=cartridges, on_event=events.append)
    while answer.finish_reason is None:
        engine.step()
        now = perf_counter() - started
        for event in events:
            answer.add(event)
            made.seconds.extend(now for _ in event.token_ids)
            if show:
                print(event.text, end="", flush=True)
        events.clear()
        if limit is not None and now > limit and len(made.seconds) > 1:
            engine.abort(request)
    if answer.finish_reason == "error":
        raise EngineFailure(answer.error or "a step failed")
    return made


def _without_cache(
    engine: Engine, prompt: list[int], params: SamplingParams, cached: _Made
) -> tuple[Saving, dict[str, Any]]:
    """Make the answer again with nothing kept between steps; returns the comparison, and the timing of this run."""
    _note(f"computing it again without the cache, for {_LONGEST_WITHOUT:.0f} s at most")
    engine.reuse = False
    again = _answer(engine, prompt, params, show=False, limit=_LONGEST_WITHOUT)
    pairs = zip(cached.answer.tokens, again.answer.tokens, strict=False)
    saving = Saving(
        prompt_tokens=len(prompt),
        cached=cached.seconds,
        uncached=again.seconds,
        equal_tokens=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),
        stopped=again.answer.finish_reason == "abort",
    )
    return saving, again.answer.timing


def _verdict(saving: Saving) -> str:
    count = counted(saving.compared, "token")
    until = f"stopped after {count}" if saving.stopped else f"{count}"
    if saving.equal:
        return f"without the cache: {until}, the same"
    return (
        f"without the cache: {until}, the first {saving.equal_tokens:,} the same; many tokens at once are rounded "
        f"otherwise than one (--dtype f32 rounds less)"
    )


def _settings(args: Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"prefix_cache": not args.no_cache, "max_running": 1}
    for name, value in (
        ("dtype", args.dtype),
        ("memory", args.memory),
        ("block_tokens", args.block),
        ("evict", args.evict),
        ("tiers", args.tier),
        ("tier_directory", args.tier_dir),
        ("cartridge_format", args.cartridge_format),
    ):
        if value is not None:
            settings[name] = value
    if format_said(args):
        spec = ModelSpec.read(args.model or DEFAULT_MODEL)
        settings["format"] = cache_format(args, args.dtype or best_dtype(spec))
    if args.cartridge:
        settings["cartridges"] = {str(number): file for number, file in enumerate(args.cartridge)}
    return settings


def _prompt(engine: Engine, text: str, chat: bool | None, *, begins: bool) -> tuple[list[int], str]:
    if chat is not False:
        try:
            return engine.tokenizer.chat([{"role": "user", "content": text}]), "prompt in the chat template"
        except UnsupportedModel:
            if chat:
                raise
    return engine.tokenizer.encode(text, special=begins), "prompt as it is"


def _note(text: str) -> None:
    print(f"kvist: {text}", file=sys.stderr)


def _print_account(answer: Answer) -> None:
    account, timing = answer.account, answer.timing
    _note(
        f"{answer.prompt_tokens} prompt tokens, {len(answer.tokens)} generated ({answer.finish_reason}); "
        f"first token after {timing['ttft']:.2f} s, then {timing['tokens_per_second']:.1f} tokens/s"
    )
    if account["pruned_tokens"]:
        _note(f"pruned: {account['pruned_tokens']:,} tokens were dropped, and their blocks given back")
    if account["tier_hit_tokens"]:
        _note(f"tiers: {account['tier_hit_tokens']:,} prompt tokens came back from them")
    same = "as planned" if account["allocated_bytes"] == account["planned_bytes"] else "NOT as planned"
    _note(
        f"cache: {format_size(account['allocated_bytes'])} in {account['blocks']} blocks, {same} "
        f"({account['planned_bytes']:,} bytes); {format_size(account['waste_bytes'])} of it holds no token"
    )
