"""Hugging Face transformers in bf16: SDPA, greedy, one batch, logits of the last position only.

The prompts of a work have one length, so the batch has no padding and needs no mask. The loop is written out
rather than left to `generate`, which costs more a token and hides the first one. A shared prefix is computed
once and its cache repeated for the batch, as the transformers documentation advises; the option `share` set
to false computes it in each stream.
"""

from __future__ import annotations

from time import perf_counter

import torch
from protocol import Job, Outcome, Run, Work, serve
from transformers import AutoModelForCausalLM, DynamicCache


def load(job: Job) -> Run:
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(
        job.models["bf16"], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def run(work: Work) -> Outcome:
        start = perf_counter()
        prompts = torch.tensor(work.prompts)
        cache = DynamicCache(config=model.config)
        shared = work.shared if job.options.get("share", True) else 0
        if shared:
            model(prompts[:1, :shared], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(prompts))
        tokens = prompts[:, shared:]
        produced = []
        for step in range(work.out):
            logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1:].argmax(-1)
            produced.append(tokens)
            if step == 0:
                first = perf_counter() - start
        answers = torch.cat(produced, dim=1).tolist()
        return Outcome(total=perf_counter() - start, first=[first] * len(answers), answers=answers)

    return run


if __name__ == "__main__":
    serve(load, distribution="transformers")
