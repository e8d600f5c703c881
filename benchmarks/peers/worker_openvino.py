"""OpenVINO GenAI's continuous batching on the int4 export of the weights.

Options: `key` and `value` name the cache's precisions (u8 is OpenVINO's default); `first_alone` submits the
first stream of a work with a shared prefix ahead of the others, since OpenVINO shares only what earlier
requests have computed.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
import openvino
import openvino_genai as genai
from protocol import Job, Outcome, Run, Work, serve


def load(job: Job) -> Run:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = job.options.get("cache_gib", 2)
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    properties = {
        "INFERENCE_NUM_THREADS": job.threads,
        "KEY_CACHE_PRECISION": job.options.get("key", "u8"),
        "VALUE_CACHE_PRECISION": job.options.get("value", "u8"),
    }
    pipeline = genai.ContinuousBatchingPipeline(job.models["int4"], scheduler, "CPU", properties)
    request_ids = iter(range(1 << 62))

    def run(work: Work) -> Outcome:
        config = genai.GenerationConfig()
        config.max_new_tokens = work.out
        config.ignore_eos = True
        config.do_sample = False
        answers: list[list[int]] = [[] for _ in work.prompts]
        first = [0.0] * len(work.prompts)
        handles: list[genai.GenerationHandle] = []

        def submit(prompts: list[list[int]]) -> None:
            for prompt in prompts:
                tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
                handles.append(pipeline.add_request(next(request_ids), tokens, config))

        def step() -> None:
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    first[index] = first[index] or perf_counter() - start
                    answers[index] += next(iter(handle.read().values())).generated_ids

        start = perf_counter()
        alone = 1 if work.shared and job.options.get("first_alone") else 0
        submit(work.prompts[:alone])
        while alone and not answers[0]:
            step()
        submit(work.prompts[alone:])
        while pipeline.has_non_finished_requests():
            step()
        return Outcome(total=perf_counter() - start, first=first, answers=answers)

    return run


if __name__ == "__main__":
    serve(load, distribution="openvino-genai")
