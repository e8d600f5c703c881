"""llama.cpp through its C interface on the GGUF itself, flash attention on. Options: `key` and `value`, types to store.

Does what its server does with a slot for each conversation: prompts fill batches of 2,048 tokens, then all sequences
decode together; in the second turn a slot computes what its sequence does not hold yet. The cache is one
buffer with as many cells for each sequence as a conversation has tokens. Its size is the one that llama.cpp prints;
as many conversations as make it larger than the memory are refused.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import llama_cpp as ll
import numpy as np
from held_protocol import HeldJob, NoRoom, Step, serve

BATCH = 2048
TYPES = {"f16": ll.GGML_TYPE_F16, "q8_0": ll.GGML_TYPE_Q8_0, "q4_0": ll.GGML_TYPE_Q4_0}
BUFFER = re.compile(r"llama_kv_cache: size =\s*([\d.]+) MiB")

Slot = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class LlamaCpp:
    """It preempts nothing: a batch without room ends the trial."""

    preempted = 0
    hits_at_least = False

    def __init__(self, job: HeldJob) -> None:
        self.job = job
        self._printed: list[str] = []
        self._log = ll.llama_log_callback(
            lambda _level, text, _data: self._printed.append(text.decode(errors="replace"))
        )
        ll.llama_log_set(self._log, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self._model = ll.llama_model_load_from_file(job.models["gguf"].encode(), ll.llama_model_default_params())
        self._words = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))
        self._batch = ll.llama_batch_init(BATCH, 0, 1)
        self._context = None
        self.hit_tokens: int | None = None
        self.allocated = 0
        self._make(1)
        self.likely = job.memory // self.allocated

    def _make(self, sequences: int) -> None:
        if self._context is not None:
            ll.llama_free(self._context)
        params = ll.llama_context_default_params()
        params.n_ctx = sequences * self.job.tokens
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.job.threads
        params.flash_attn_type = 1
        params.kv_unified = False
        params.type_k = TYPES[self.job.options.get("key", "f16")]
        params.type_v = TYPES[self.job.options.get("value", "f16")]
        self._printed.clear()
        self._context = ll.llama_init_from_model(self._model, params)
        found = BUFFER.search("".join(self._printed))
        if self._context is None or found is None:
            raise SystemExit("llama.cpp made no cache: " + "".join(self._printed[-5:]))
        self.allocated = int(float(found[1]) * 2**20)

    def begin(self, conversations: int) -> None:
        """A context of just the size."""
        kept = self.allocated
        self._make(conversations)
        if self.allocated > self.job.memory:
            needed, self.allocated = self.allocated, kept
            raise NoRoom(f"its buffer is {needed / 2**20:.1f} MiB")

    def _decode(self, slots: list[Slot]) -> dict[int, int]:
        """Compute at most `BATCH` slots; the likeliest next token of each sequence where it is wanted."""
        batch = self._batch
        batch.n_tokens = len(slots)
        for index, (token, position, sequence, wanted) in enumerate(slots):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        status = ll.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode answered {status}")
        return {
            sequence: int(np.ctypeslib.as_array(ll.llama_get_logits_ith(self._context, index), (self._words,)).argmax())
            for index, (_, _, sequence, wanted) in enumerate(slots)
            if wanted
        }

    def turn(self, prompts: list[list[int]], out: int) -> Iterator[Step]:
        """First what is new of all prompts, a batch at a time; then a token of each conversation at a time."""
        memory = ll.llama_get_memory(self._context)
        held = [ll.llama_memory_seq_pos_max(memory, index) + 1 for index in range(len(prompts))]
        self.hit_tokens = sum(held)
        waiting = [
            (token, at, index, at == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= held[index]
        ]
        last: dict[int, int] = {}
        for begin in range(0, len(waiting), BATCH):
            last |= self._decode(waiting[begin : begin + BATCH])
        yield {index: [token] for index, token in last.items()}
        for step in range(out - 1):
            last = self._decode(
                [(last[index], len(prompt) + step, index, True) for index, prompt in enumerate(prompts)]
            )
            yield {index: [token] for index, token in last.items()}


if __name__ == "__main__":
    serve(LlamaCpp, distribution="llama-cpp-python")
