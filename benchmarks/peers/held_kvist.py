"""kvist itself, through its public Python API, on the GGUF. Option: `format` goes to `kvist.CacheFormat`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from held_protocol import HeldJob, Step, serve

import kvist
from kvist.engine.answer import Event
from kvist.engine.sampler import SamplingParams


class Kvist:
    """The engine's own counters tell of preemptions; each answer's account of what was found in the cache."""

    hits_at_least = False

    def __init__(self, job: HeldJob) -> None:
        torch.set_num_threads(job.threads)
        self.engine = kvist.Engine(
            job.models["gguf"],
            format=kvist.CacheFormat(**job.options["format"]),
            memory=job.memory,
            dtype="bf16",
            max_context=job.tokens,
        )
        self.allocated = self.engine.runner.arena_bytes
        self.likely = self.engine.cache_tokens // job.tokens
        self.preempted: int | None = None
        self.hit_tokens: int | None = None

    def begin(self, conversations: int) -> None:
        """There is one arena for any number."""

    def turn(self, prompts: list[list[int]], out: int) -> Iterator[Step]:
        """One batch of the engine a step."""
        received: Step = {}
        before = self.engine.scheduler.counters.preempted
        self.hit_tokens = 0

        def listen(index: int, event: Event) -> None:
            if event.token_ids:
                received.setdefault(index, []).extend(event.token_ids)
            if event.account:
                self.hit_tokens = (self.hit_tokens or 0) + event.account["prefix_hit_tokens"]

        params = SamplingParams(max_tokens=out, ignore_eos=True, temperature=0)
        for index, prompt in enumerate(prompts):
            self.engine.submit(prompt, params, on_event=lambda event, index=index: listen(index, event))
        try:
            while self.engine.has_work():
                received.clear()
                self.engine.step()
                self.preempted = self.engine.scheduler.counters.preempted - before
                yield dict(received)
        finally:
            self.engine.abort_all("abort")


if __name__ == "__main__":
    serve(Kvist, distribution="kvist")
