"""vLLM's CPU build in bf16: compiled, prefix caching on, its engine core in a process of its own.

Options: `cache_gib` sizes the cache, `bind` is vLLM's own setting of the cores, `arguments` go to `vllm.LLM`.
"""

from __future__ import annotations

import os
from time import perf_counter

from protocol import Job, Outcome, Run, Work, serve


def load(job: Job) -> Run:
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(job.options.get("cache_gib", 2)),
        # Left to itself vLLM keeps a core free of its threads: half of a machine with two.
        "VLLM_CPU_OMP_THREADS_BIND": job.options.get("bind", ",".join(map(str, cores))),
    }
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=job.models["bf16"],
        dtype="bfloat16",
        max_model_len=job.context,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **job.options.get("arguments", {}),
    )
    engine = llm.llm_engine
    request_ids = iter(range(1 << 62))

    def run(work: Work) -> Outcome:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=work.out,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        answers: list[list[int]] = [[] for _ in work.prompts]
        first = [0.0] * len(work.prompts)
        start = perf_counter()
        index_of = {str(next(request_ids)): index for index in range(len(work.prompts))}
        for request_id, index in index_of.items():
            engine.add_request(request_id, {"prompt_token_ids": work.prompts[index]}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = index_of[output.request_id]
                first[index] = first[index] or perf_counter() - start
                answers[index] += output.outputs[0].token_ids
        return Outcome(total=perf_counter() - start, first=first, answers=answers)

    return run


if __name__ == "__main__":
    serve(load, distribution="vllm-cpu")
