"""A stand-in for the engine loop: bytes are tokens, answers are fixed, and time passes only if a test says so.

Run as a program it serves itself (``python tests/fake_engine.py --port 0 --step 0.02``): for the tests that need a
process, and to look at the page.
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import json
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvist.engine.answer import Event, FinishReason, TokenLogprob
from kvist.engine.sampler import SamplingParams
from kvist.engine.stream import StopMatcher
from kvist.errors import DoesNotFit, EngineFailure, InputError

BLOCK = 16
EOS, BOS = 256, 257
SENTENCE = "The twig holds every leaf that it shares."


class ByteTokenizer:
    """Ids below 256 are bytes; then end and begin of a text."""

    vocab_size = 258
    longest_token = 1
    eos_ids = frozenset({EOS})
    bos_id = BOS

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [BOS] * special + list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return self.encode(text + "<assistant>" * add_generation_prompt)


@dataclass(kw_only=True)
class FakeRequest:
    id: str
    prompt: list[int]
    params: SamplingParams
    on_event: Callable[[Event], None]
    stops: StopMatcher
    hit: int
    reply: Iterator[int]
    started: float
    blocks: dict[str, list[int]]
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    outputs: int = 0
    aborted: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + self.outputs


@dataclass(kw_only=True)
class FakeGroup:
    name: str
    layers: int
    window: int | None
    states: list[str]
    last_used: list[float]
    block_bytes: int = 3 * 2**12


class FakeLoop:
    """Follows `kvist.server.backend.Backend`.

    ``!fail`` in a prompt makes the answer fail after three tokens, ``!utf8`` makes it many-byte characters, and
    ``!die`` makes the engine refuse everything from then on.
    """

    model_id = "fake-1m"

    def __init__(
        self,
        *,
        max_context: int = 2048,
        blocks: int = 4096,
        step: float = 0.0,
        max_running: int = 256,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.tokenizer = ByteTokenizer()
        self.max_context = max_context
        self.cache_tokens = blocks * BLOCK
        self.aborted: list[str] = []
        self._step = step
        self._max_running = max_running
        self._groups = [
            FakeGroup(
                name="full" if window is None else f"window {window}", layers=4, window=window,
                states=["f"] * blocks, last_used=[0.0] * blocks,
            )
            for window in windows
        ]  # fmt: skip
        self._running: list[FakeRequest] = []
        self._waiting: deque[FakeRequest] = deque()
        self._known: deque[tuple[str, list[int], float]] = deque(maxlen=64)
        self._counters = dict.fromkeys(
            ("requests", "finished", "preempted", "refused", "prompt_tokens", "output_tokens", "hit_tokens",
             "query_tokens", "pruned_tokens", "pruned_blocks"), 0,
        )  # fmt: skip
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._ids = itertools.count(1)
        self._started = time.monotonic()
        self._ending: str | None = None
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    @property
    def failure(self) -> str | None:
        return "told to die" if self._dead else None

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain: bool) -> None:
        with self._work:
            self._ending = "drain" if drain else "now"
            self._work.notify()
        self._thread.join(10)

    def context_behind(self, cartridge: str) -> int:
        raise InputError(f"cartridge: {cartridge!r} is not loaded; loaded: none", key="cartridge")

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        evict: str | None = None,
        cartridge: str | None = None,
        on_event: Callable[[Event], None],
    ) -> str:
        text = self.tokenizer.decode(prompt_ids)
        with self._work:
            self._dead |= "!die" in text
            if self._dead:
                raise EngineFailure("the engine stopped: told to die")
            needed, there = -(-(len(prompt_ids) + params.max_tokens) // BLOCK), len(self._groups[0].states)
            if needed > there:
                self._counters["refused"] += 1
                raise DoesNotFit(
                    f"{len(prompt_ids)} prompt + {params.max_tokens} new tokens = {needed} blocks of {BLOCK}; "
                    f"the cache has {there}"
                )
            hit = self._match(prompt_ids, cache_salt)
            request = FakeRequest(
                id=f"r{next(self._ids)}", prompt=prompt_ids, params=params, on_event=on_event, hit=hit,
                stops=StopMatcher(params.stop),
                reply=_reply(text, params), started=time.monotonic(), blocks={g.name: [] for g in self._groups},
            )  # fmt: skip
            self._known.append((cache_salt, prompt_ids, time.monotonic()))
            self._counters["requests"] += 1
            self._counters["query_tokens"] += len(prompt_ids)
            self._counters["prompt_tokens"] += len(prompt_ids)
            self._counters["hit_tokens"] += hit
            self._waiting.append(request)
            self._work.notify()
            return request.id

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            for request in [*self._running, *self._waiting]:
                if request.id == request_id:
                    request.aborted = True
                    self._end(request, "abort")

    def _match(self, prompt: list[int], salt: str) -> int:
        best = 0
        for other_salt, other, _ in self._known:
            if other_salt == salt:
                same = next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
                best = max(best, min(len(prompt), len(other)) if same is None else same)
        return min(best, len(prompt) - 1) // BLOCK * BLOCK

    def _run(self) -> None:
        while True:
            with self._work:
                while not (self._running or self._waiting or self._ending):
                    self._work.wait()
                if self._ending == "now":
                    for request in [*self._running, *self._waiting]:
                        self._end(request, "abort")
                if self._ending and not self._running and not self._waiting:
                    return
                while self._waiting and len(self._running) < self._max_running:
                    self._running.append(self._waiting.popleft())
                for request in list(self._running):
                    self._advance(request)
            # Even without a step time the server's thread must get its turn at the lock.
            time.sleep(self._step)

    def _advance(self, request: FakeRequest) -> None:
        self._hold(request)
        token = next(request.reply)
        if token < 0:
            self._end(request, "error")
            return
        params = request.params
        request.outputs += 1
        self._counters["output_tokens"] += 1
        text = "" if token >= 256 else request.decoder.decode(bytes([token]))
        text, matched = request.stops.push(text)
        stopped = matched or (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        logprobs = []
        if params.logprobs is not None:
            others = [(token, -0.5), ((token + 1) % 256, -1.5), ((token + 2) % 256, -math.inf)]
            logprobs = [TokenLogprob(token_id=token, logprob=-0.5, top=others[: params.logprobs])]
        if stopped or request.outputs >= params.max_tokens:
            text += request.stops.flush()
            self._end(request, "stop" if stopped else "length", text=text, token_ids=[token], logprobs=logprobs)
        else:
            request.on_event(Event(text=text, token_ids=[token], logprobs=logprobs))

    def _hold(self, request: FakeRequest) -> None:
        for group in self._groups:
            table = request.blocks[group.name]
            tokens = request.length + 1 if group.window is None else min(request.length + 1, group.window)
            while len(table) < -(-tokens // BLOCK):
                states = group.states
                block = states.index("f") if "f" in states else min(
                    (b for b, s in enumerate(states) if s == "c"), key=group.last_used.__getitem__)  # fmt: skip
                states[block] = "h"
                table.append(block)

    def _end(self, request: FakeRequest, reason: FinishReason, **last: Any) -> None:
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)
        held = sum(len(table) for table in request.blocks.values())
        for group in self._groups:
            for block in request.blocks[group.name]:
                group.states[block] = "c"
                group.last_used[block] = time.monotonic()
        self._counters["finished"] += 1
        bytes_held = held * self._groups[0].block_bytes
        account = {
            "planned_bytes": bytes_held, "allocated_bytes": bytes_held, "waste_bytes": 0, "blocks": held,
            "prefix_hit_tokens": request.hit,
        }  # fmt: skip
        seconds = time.monotonic() - request.started
        timing = {
            "prefill": 0.0,
            "decode": seconds,
            "ttft": 0.0,
            "tokens_per_second": request.outputs / max(seconds, 1e-9),
        }
        error = "told to fail" if reason == "error" else None
        request.on_event(Event(finish_reason=reason, account=account, timing=timing, error=error, **last))

    @property
    def held_blocks(self) -> int:
        with self._lock:
            return sum(group.states.count("h") for group in self._groups)

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        groups = []
        for group in self._groups:
            runs = [(state, len(list(run))) for state, run in itertools.groupby(group.states)]
            groups.append({
                "name": group.name, "layers": group.layers, "window": group.window, "block_tokens": BLOCK,
                "block_bytes": group.block_bytes, "blocks_total": len(group.states),
                "free": group.states.count("f"), "cached": group.states.count("c"), "held": group.states.count("h"),
                "block_states": "".join(f"{count}{state}" for state, count in runs),
                "held_by": [
                    [block, 1, request.id] for request in self._running for block in request.blocks[group.name]
                ],
            })  # fmt: skip
        sizes = {
            state: sum(g[state] * g["block_bytes"] for g in groups) for state in ("free", "cached", "held")
        }  # fmt: skip
        held_tokens = sum(request.length for request in self._running) * groups[0]["block_bytes"] // BLOCK
        waste = max(0, min(sizes["held"] // 8, sizes["held"] - held_tokens))
        total = sum(sizes.values())
        uptime = time.monotonic() - self._started
        return {
            "model": self.model_id, "format": {"key": "bf16", "value": "bf16"}, "dtype": "f32",
            "uptime_seconds": uptime,
            "arena": {"bytes": total, "slab_bytes": 16 * groups[0]["block_bytes"], "slabs": total // (16 * 12288),
                      "slabs_free": sizes["free"] // (16 * 12288)},
            "bytes": {**sizes, "held": sizes["held"] - waste, "waste": waste},
            "groups": groups,
            "tree": self._tree(),
            "tiers": [],
            "requests": [self._request(request, "running") for request in self._running]
            + [self._request(request, "waiting") for request in self._waiting],
            "counters": dict(self._counters),
            "speed": {"tokens_per_second": self._counters["output_tokens"] / max(1.0, uptime)},
        }  # fmt: skip

    def _request(self, request: FakeRequest, state: str) -> dict[str, Any]:
        held = sum(len(table) for table in request.blocks.values()) * self._groups[0].block_bytes
        return {
            "id": request.id, "state": state, "prompt_tokens": len(request.prompt), "output_tokens": request.outputs,
            "length": request.length, "hit_tokens": request.hit,
            "blocks": {name: len(table) for name, table in request.blocks.items()}, "bytes": held,
            "planned_bytes": held, "age_seconds": time.monotonic() - request.started,
        }  # fmt: skip

    def _tree(self) -> dict[str, Any]:
        """A radix tree of the prompts, in whole blocks, built anew each time."""
        root: dict[str, Any] = {"children": {}, "tokens": [], "users": 0, "last_used": 0.0}
        running = {id(request.prompt) for request in self._running}
        for _, prompt, moment in self._known:
            node, at = root, 0
            while at + BLOCK <= len(prompt):
                key = tuple(prompt[at : at + BLOCK])
                new = {"children": {}, "tokens": list(key), "users": 0, "last_used": moment}
                node = node["children"].setdefault(key, new)
                node["users"] += id(prompt) in running
                node["last_used"] = max(node["last_used"], moment)
                at += BLOCK
        nodes: list[dict[str, Any]] = []
        ids = itertools.count(1)

        def walk(node: dict[str, Any], parent: int | None) -> None:
            tokens = list(node["tokens"])
            while (
                len(node["children"]) == 1 and (only := next(iter(node["children"].values())))["users"] == node["users"]
            ):
                node = only
                tokens += node["tokens"]
            number = next(ids)
            text = self.tokenizer.decode(tokens)[:40]
            nodes.append({"id": number, "parent": parent, "tokens": len(tokens), "users": node["users"],
                          "last_used": node["last_used"], "text": text})  # fmt: skip
            for child in node["children"].values():
                walk(child, number)

        for child in root["children"].values():
            walk(child, None)
        return {"nodes": nodes[:200], "tokens": sum(node["tokens"] for node in nodes)}


def _reply(prompt: str, params: SamplingParams) -> Iterator[int]:
    if "!fail" in prompt:
        return iter([*b"Oh ", -1])
    if params.temperature > 0 and params.seed is not None:
        letters = random.Random(params.seed)
        return iter([*(letters.choice(b"abcdefgh") for _ in range(24)), EOS])
    text = "Blåbär och träd: 🌱🌿🌳" if "!utf8" in prompt else SENTENCE
    reply = [*text.encode(), EOS]
    return itertools.cycle([*reply[:-1], ord(" ")]) if params.ignore_eos else iter(reply)


def main() -> int:
    from kvist.server.run import bind, run

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--windows", type=json.loads, default=[None])
    parser.add_argument("--api-key")
    args = parser.parse_args()
    listener = bind("127.0.0.1", args.port)
    loop = FakeLoop(step=args.step, blocks=args.blocks, max_running=args.max_running, windows=tuple(args.windows))
    loop.start()
    return run(loop, listener, api_key=args.api_key)


if __name__ == "__main__":
    raise SystemExit(main())
