"""kvist itself on the GGUF, its cache in int8/int8: elements as wide as OpenVINO's."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from eviction_protocol import Answer, EvictionJob, Question, serve

import kvist
from kvist.engine.answer import Event
from kvist.engine.sampler import SamplingParams


def load(job: EvictionJob) -> Callable[[Question], Answer]:
    torch.set_num_threads(job.threads)
    engine = kvist.Engine(
        job.models["gguf"],
        format=kvist.CacheFormat(key="int8", value="int8"),
        memory="512MiB",
        dtype="bf16",
        max_context=job.context,
        prefix_cache=False,
    )
    sizes = [group.block_bytes for group in engine.groups]

    def ask(question: Question) -> Answer:
        tokens: list[int] = []
        first = 0.0
        held = [0]

        def listen(event: Event) -> None:
            nonlocal first
            if event.token_ids:
                first = first or perf_counter()
                tokens.extend(event.token_ids)

        params = SamplingParams(max_tokens=question.out, ignore_eos=True, temperature=0)
        evict = "none" if question.method == "none" else f"{question.method}:{question.budget}"
        start = perf_counter()
        engine.submit(question.prompt, params, on_event=listen, evict=evict)
        while engine.has_work():
            engine.step()
            if engine.has_work():
                held.append(sum(engine.cache.arena.held(group) * size for group, size in enumerate(sizes)))
        end = perf_counter()
        return Answer(tokens=tokens, first=first - start, rest=end - first, held=held[-1], most=max(held))

    return ask


if __name__ == "__main__":
    serve(load, distribution="kvist")
