"""OpenVINO GenAI's continuous batching on the int4 export of the weights. Options: `key` and `value`, u8 or u4.

`SchedulerConfig.cache_size` is in whole GiB, so the pool is sized by `num_kv_blocks`: as many as the memory holds. A
block has 32 tokens. Keys are quantised by channel, values by token, each group with a scale and a zero point in f32: of
one block and head, 64 x 32 elements and 64 x 8 bytes for keys, 64 x 32 elements and 32 x 8 bytes for values. The
pipeline's metric `cache_size_in_bytes` counts a whole byte for each element of u4 and each half byte of its scales; the
process's address space grows by what is said here (measured: 345,776 bytes a block of SmolLM2 in u8/u4; 345,600 said).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openvino
import openvino_genai as genai
from held_protocol import HeldJob, Step, serve

BLOCK_TOKENS = 32
HEADS, WIDTH = 30 * 3, 64  # of all layers
SCALES = 8  # bytes: scale and zero point
BITS = {"u8": 8, "u4": 4}
BATCH = 2048


class OpenVino:
    """It counts no preemptions: a conversation that misses a step was preempted.

    Nor does it count hits. A step computes at most `BATCH` tokens, so what more there was to compute until
    all had their first token was found in the cache.
    """

    preempted = None
    hits_at_least = True

    def __init__(self, job: HeldJob) -> None:
        key, value = job.options.get("key", "u8"), job.options.get("value", "u8")
        keys = WIDTH * BLOCK_TOKENS * BITS[key] // 8 + WIDTH * SCALES
        values = WIDTH * BLOCK_TOKENS * BITS[value] // 8 + BLOCK_TOKENS * SCALES
        block_bytes = HEADS * (keys + values)
        # As the metric has it.
        self._said_bytes = HEADS * (keys * 8 // BITS[key] + values * 8 // BITS[value])
        self._blocks = job.memory // block_bytes
        self.allocated = self._blocks * block_bytes
        self.likely = self._blocks * BLOCK_TOKENS // job.tokens
        self.hit_tokens: int | None = None
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = self._blocks
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = BATCH
        properties = {
            "INFERENCE_NUM_THREADS": job.threads,
            "KEY_CACHE_PRECISION": key,
            "VALUE_CACHE_PRECISION": value,
        }
        self.pipeline = genai.ContinuousBatchingPipeline(job.models["int4"], scheduler, "CPU", properties)
        self._begun = 0

    def begin(self, conversations: int) -> None:
        """There is one pool of blocks for any number."""

    def turn(self, prompts: list[list[int]], out: int) -> Iterator[Step]:
        """One step of the pipeline at a time."""
        config = genai.GenerationConfig()
        config.max_new_tokens = out
        config.ignore_eos = True
        config.do_sample = False
        handles = []
        for prompt in prompts:
            tokens = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipeline.add_request(self._begun, tokens, config))
            self._begun += 1
        computed, first = 0, set()
        try:
            while self.pipeline.has_non_finished_requests():
                self.pipeline.step()
                said = self.pipeline.get_metrics().cache_size_in_bytes
                if said != self._blocks * self._said_bytes:
                    raise SystemExit(f"the cache was to be {self._blocks * self._said_bytes} bytes, it says {said}")
                received: Step = {}
                for index, handle in enumerate(handles):
                    while handle.can_read():
                        received.setdefault(index, []).extend(next(iter(handle.read().values())).generated_ids)
                computed += BATCH if len(first) < len(prompts) else 0
                first |= received.keys()
                self.hit_tokens = max(0, sum(map(len, prompts)) - computed)
                yield received
        finally:
            for handle in handles:
                handle.cancel()
            while self.pipeline.has_non_finished_requests():
                self.pipeline.step()


if __name__ == "__main__":
    serve(OpenVino, distribution="openvino-genai")
