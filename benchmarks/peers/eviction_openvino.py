"""OpenVINO GenAI's cache eviction on the int4 export, its cache in u8/u8, which is its default.

How tokens are chosen belongs to the pipeline, so that there is one for each method and budget. Prompts are computed
whole; blocks of 32 tokens go at the beginning of the answer, by the weights of the prompt's last queries (its default
of 8), and then whenever the budget is exceeded. The first block and a quarter of the budget, the newest, always stay.
A block's bytes are those of `held_openvino.py`, where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from eviction_protocol import Answer, EvictionJob, Question, serve

BLOCK_TOKENS = 32
# Keys in groups of a channel, values of a token, each with a scale and a zero point in f32.
BLOCK_BYTES = 30 * 3 * (64 * BLOCK_TOKENS + 64 * 8 + 64 * BLOCK_TOKENS + BLOCK_TOKENS * 8)
MODES = {"norm-sum": genai.AggregationMode.NORM_SUM, "sum": genai.AggregationMode.SUM}


def load(job: EvictionJob) -> Callable[[Question], Answer]:
    blocks = 2 * (-(-job.context // BLOCK_TOKENS) + 2)
    pipelines: dict[tuple[str, int], Any] = {}

    def pipeline_of(method: str, budget: int) -> Any:
        key = (method, budget if method != "none" else 0)
        if key not in pipelines:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 0
            scheduler.num_kv_blocks = blocks
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = 2048
            if method != "none":
                scheduler.use_cache_eviction = True
                recent = max(1, budget // 4 // BLOCK_TOKENS) * BLOCK_TOKENS
                scheduler.cache_eviction_config = genai.CacheEvictionConfig(BLOCK_TOKENS, recent, budget, MODES[method])
            properties = {"INFERENCE_NUM_THREADS": job.threads}
            pipelines[key] = genai.ContinuousBatchingPipeline(job.models["int4"], scheduler, "CPU", properties)
        return pipelines[key]

    def ask(question: Question) -> Answer:
        pipeline = pipeline_of(question.method, question.budget)
        config = genai.GenerationConfig()
        config.max_new_tokens = question.out
        config.ignore_eos = True
        config.do_sample = False
        tokens: list[int] = []
        first = 0.0
        held = [0]
        start = perf_counter()
        handle = pipeline.add_request(0, openvino.Tensor(np.array([question.prompt], dtype=np.int64)), config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            while handle.can_read():
                first = first or perf_counter()
                tokens += next(iter(handle.read().values())).generated_ids
            if pipeline.has_non_finished_requests():
                used = round(pipeline.get_metrics().cache_usage / 100 * blocks)
                held.append(used * BLOCK_BYTES)
        end = perf_counter()
        return Answer(tokens=tokens, first=first - start, rest=end - first, held=held[-1], most=max(held))

    return ask


if __name__ == "__main__":
    serve(load, distribution="openvino-genai")
