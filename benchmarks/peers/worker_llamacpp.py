"""llama.cpp through its C interface, many sequences in one context, on the GGUF itself.

Does what its server does: prompts fill batches of 2,048 tokens in order of arrival, then all sequences decode
together; a shared prefix is computed once and lent to the others with `llama_memory_seq_cp`. Each work gets a
context of just its size, made before the clock starts.

Options: `key` and `value` name the cache's types; `unified` keeps all sequences in one buffer rather than one
each (by default where they share a prefix: apart from that, one each is faster); `flash` turns flash attention
off, which is slower and excludes a quantised value cache.
"""

from __future__ import annotations

import ctypes
from time import perf_counter

import llama_cpp as ll
import numpy as np
from protocol import Job, Outcome, Run, Work, serve

BATCH = 2048
TYPES = {"f16": ll.GGML_TYPE_F16, "q8_0": ll.GGML_TYPE_Q8_0, "q4_0": ll.GGML_TYPE_Q4_0}

Slot = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


def load(job: Job) -> Run:
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(job.models["gguf"].encode(), ll.llama_model_default_params())
    words = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(BATCH, 0, 1)

    def make_context(work: Work) -> int:
        streams = len(work.prompts)
        unified = job.options.get("unified", bool(work.shared))
        longest = max(map(len, work.prompts)) + work.out
        private = sum(len(prompt) - work.shared + work.out for prompt in work.prompts)
        params = ll.llama_context_default_params()
        params.n_ctx = work.shared + private if unified else streams * -(-longest // 256) * 256
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = job.threads
        params.flash_attn_type = int(job.options.get("flash", True))
        params.kv_unified = unified
        params.type_k = TYPES[job.options.get("key", "f16")]
        params.type_v = TYPES[job.options.get("value", "f16")]
        return ll.llama_init_from_model(model, params)

    def decode(context: int, slots: list[Slot]) -> dict[int, int]:
        """Compute at most `BATCH` slots; the likeliest next token of each sequence where it is wanted."""
        batch.n_tokens = len(slots)
        for index, (token, position, sequence, wanted) in enumerate(slots):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        status = ll.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status}")
        return {
            sequence: argmax(ll.llama_get_logits_ith(context, index))
            for index, (_, _, sequence, wanted) in enumerate(slots)
            if wanted
        }

    def argmax(logits: ctypes._Pointer[ctypes.c_float]) -> int:
        return int(np.ctypeslib.as_array(logits, (words,)).argmax())

    def run(work: Work) -> Outcome:
        context = make_context(work)
        memory = ll.llama_get_memory(context)
        streams = range(len(work.prompts))
        answers: list[list[int]] = [[] for _ in streams]
        first = [0.0 for _ in streams]
        start = perf_counter()

        prefix = [(token, at, 0, False) for at, token in enumerate(work.prompts[0][: work.shared])]
        for begin in range(0, len(prefix), BATCH):
            decode(context, prefix[begin : begin + BATCH])
        if work.shared:
            for stream in streams[1:]:
                ll.llama_memory_seq_cp(memory, 0, stream, -1, -1)
        waiting = [
            (token, at, stream, at == len(prompt) - 1)
            for stream, prompt in enumerate(work.prompts)
            for at, token in enumerate(prompt)
            if at >= work.shared
        ]
        for begin in range(0, len(waiting), BATCH):
            for stream, token in decode(context, waiting[begin : begin + BATCH]).items():
                answers[stream].append(token)
                first[stream] = perf_counter() - start
        for step in range(work.out - 1):
            slots = [(answers[s][-1], len(work.prompts[s]) + step, s, True) for s in streams]
            for stream, token in decode(context, slots).items():
                answers[stream].append(token)
        total = perf_counter() - start
        ll.llama_free(context)
        return Outcome(total=total, first=first, answers=answers)

    return run


if __name__ == "__main__":
    serve(load, distribution="llama-cpp-python")
