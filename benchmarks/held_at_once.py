"""How many sequences a cache of some size holds at once, beside what their bytes alone would allow and what vLLM does.

``kvist`` admits sequences of the context's length, of which nothing is shared, to the engine's own cache manager until
one is refused; each is written in the chunks that the scheduler would cut. No tensors are made. ``logical`` is the
memory over the exact bytes of one such sequence, windows and states included and nothing rounded to blocks. ``vLLM`` is
the concurrency that vLLM prints, by its own account (``kvist.planning.engines.vllm``), with its defaults for a CPU and
for a GPU, where steps in flight are larger and windows keep room for them.

    python benchmarks/held_at_once.py [--memory 1GiB] [--context 8192] [MODEL ...]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import floor

import numpy as np

from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.cache.sequence import Sequence
from kvist.errors import DoesNotFit
from kvist.planning.capacity import DEFAULT_CHUNK
from kvist.planning.engines import engine_account
from kvist.planning.engines.account import EngineBudget
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import parse_size

MODELS = ("gemma-3-1b", "gpt-oss-20b", "qwen3-next-80b", "jamba-v0.1")
FORMAT = CacheFormat()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Sequences at once: those that the manager took, what bytes allow, what vLLM prints.

    It prints one number on a CPU and another on a GPU; None where it would not start.
    """

    model: str
    held: int
    logical: float
    vllm: tuple[float | None, float | None]

    @property
    def share(self) -> float:
        """Of the whole sequences that bytes allow."""
        return self.held / floor(self.logical)


def count(model: str, memory: int, context: int) -> Held:
    """Fill a cache of ``memory`` bytes with sequences of ``context`` tokens."""
    spec = ModelSpec.read(model)
    groups = groups_of(spec, FORMAT)
    manager = CacheManager(groups, ArenaLayout.of(groups, memory))
    held: list[Sequence] = []
    while True:
        first = len(held) * context
        sequence = manager.begin(np.arange(first, first + context, dtype=np.int32))
        if not _write(manager, sequence):
            break
        held.append(sequence)
    assert all(sequence.length == context for sequence in held)
    assert sum(manager.held_bytes(sequence) for sequence in held) <= memory
    return Held(
        model=spec.name,
        held=len(held),
        logical=memory / spec.sequence_bytes(context, FORMAT),
        vllm=(_vllm(spec, memory, context, device="cpu"), _vllm(spec, memory, context)),
    )


def _vllm(spec: ModelSpec, memory: int, context: int, **settings: str) -> float | None:
    budget = EngineBudget(cache=memory)
    said = {"dtype": "bfloat16", **settings}
    try:
        account = engine_account(spec, FORMAT, engine="vllm", budget=budget, context=context, settings=said)
    except DoesNotFit:
        return None
    return account.max_concurrency


def _write(manager: CacheManager, sequence: Sequence) -> bool:
    """Admit a sequence and store all of it in chunks; where windows leave little room in smaller ones."""
    chunk = DEFAULT_CHUNK
    while sequence.length < sequence.size:
        reservation = manager.reserve(sequence, chunk, admit_chunk=None if sequence.begun else chunk)
        if reservation.granted:
            manager.commit(sequence, reservation.limit)
        elif chunk <= manager.block_tokens or not manager.windows:
            manager.release(sequence)
            return False
        else:
            chunk = max(manager.block_tokens, chunk // 2)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS)
    parser.add_argument("--memory", default="1GiB", help="of the cache")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence")
    args = parser.parse_args()

    print(f"{args.memory} for the cache, sequences of {args.context:,} tokens, bf16\n")
    print("| model | kvist holds | logical limit | of its whole sequences | vLLM, CPU | vLLM, GPU |")
    print("|---|---|---|---|---|---|")
    for model in args.models:
        found = count(model, parse_size(args.memory, key="memory"), args.context)
        theirs = " | ".join("does not start" if each is None else f"{each:.2f}" for each in found.vllm)
        print(f"| {found.model} | {found.held} | {found.logical:.2f} | {found.share:.1%} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
