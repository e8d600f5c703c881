"""kvist itself, through its public Python API, on the GGUF.

Options: `arguments` go to `kvist.Engine`, `format` to `kvist.CacheFormat`.
"""

from __future__ import annotations

from time import perf_counter

import torch
from protocol import Job, Outcome, Run, Work, serve

import kvist


def load(job: Job) -> Run:
    torch.set_num_threads(job.threads)
    arguments = {"memory": "2GiB", "dtype": "bf16", **job.options.get("arguments", {})}
    fmt = kvist.CacheFormat(**job.options["format"]) if "format" in job.options else None
    engine = kvist.Engine(job.models["gguf"], format=fmt, **arguments)

    def run(work: Work) -> Outcome:
        start = perf_counter()
        answers = list(engine.generate(work.prompts, max_tokens=work.out, ignore_eos=True, temperature=0))
        return Outcome(
            total=perf_counter() - start,
            first=[answer.timing["ttft"] for answer in answers],
            answers=[list(answer.tokens) for answer in answers],
        )

    return run


if __name__ == "__main__":
    serve(load, distribution="kvist")
