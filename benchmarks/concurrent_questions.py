"""How many questions about one long document are answered at once in a cache of 64 MiB, and how fast.

    python benchmarks/concurrent_questions.py [--memory 64MiB] [--tokens 7900] [--json FILE]

The document, of a book's first tokens, is read once, and the questions share it, in bf16, int8/int4 and int4/int4; or a
cartridge of 256 tokens stands for it, in bf16 and int8/int4. Questions are made of the document's sentences, in the
chat template, none twice; each is answered with 32 tokens, whatever they are. They are served by the engine: the table
shows the most of them that all ran in the same step, none of which waited once all ran, or was preempted. Where the
document itself does not fit into the cache, that is none, and the engine's own words say why.

The cartridge is not trained: what it holds makes no difference to how many share it, nor to their speed. Tokens a
second are all answers' tokens by the time from the first step in which all ran to the last token, and by the
processors' time, which says more beside other work.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from kvist.cartridges.evaluation import made_questions
from kvist.cartridges.self_study import Writer
from kvist.cartridges.student import Student, to_cache
from kvist.engine.answer import Answer
from kvist.engine.engine import Engine
from kvist.engine.loading import with_weights
from kvist.engine.sampler import SamplingParams
from kvist.errors import DoesNotFit
from kvist.model.fingerprints import model_digest, rotary_positions
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge, Manifest

MODEL, DTYPE = "smollm2-135m", "bf16"
TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "paradise_lost.txt.gz"
ANSWER = 32
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
BF16, K8V4, K4V4 = (
    CacheFormat(key=key, value=value) for key, value in (("bf16", "bf16"), ("int8", "int4"), ("int4", "int4"))
)
ROWS: Sequence[tuple[str, CacheFormat, bool]] = (
    ("document, shared, bf16/bf16", BF16, False),
    ("document, shared, int8/int4", K8V4, False),
    ("document, shared, int4/int4", K4V4, False),
    ("cartridge, bf16/bf16", BF16, True),
    ("cartridge, int8/int4", K8V4, True),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Questions that were asked at once.

    Attributes:
        questions: how many.
        together: most of them that ran in one step.
        waited: after all ran, or because not all did, some had to.
        preempted: times that one was.
        seconds: from the first step in which all ran to the last token.
        processor: the same of the processors' time.
        tokens: generated in that time.
    """

    questions: int
    together: int
    waited: bool
    preempted: int
    seconds: float
    processor: float
    tokens: int

    @property
    def held(self) -> bool:
        """Whether all ran at the same time, undisturbed."""
        return self.together == self.questions and not self.waited and not self.preempted


def document_of(engine: Engine, path: Path, tokens: int) -> str:
    """The beginning of a book, of about so many tokens."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read(8 * tokens)
    ids = engine.tokenizer.encode(text, parse_special=False)[:tokens]
    return engine.tokenizer.decode(ids).rsplit("\n", 1)[0]


def untrained(spec: ModelSpec, engine: Engine, text: str, tokens: int) -> Cartridge:
    """A cartridge as training begins with: what the model makes of the document's first tokens."""
    spec = with_weights(spec)
    ids = engine.tokenizer.encode(text, parse_special=False)
    manifest = Manifest(
        model=spec.name,
        model_digest=model_digest(spec),
        tokenizer_digest=engine.tokenizer.digest,
        rope=rotary_positions(spec),
        tokens=tokens,
        frozen=1,
        document="document",
        document_digest=sha256(text.encode()).hexdigest(),
        document_tokens=len(ids),
        seed=0,
        steps=0,
    )
    return Cartridge.of(manifest, to_cache(Student(spec, DTYPE).read(ids[:tokens])))


def ask(engine: Engine, prompts: Sequence[Sequence[int]], cartridge: str | None) -> Trial:
    """Ask all of them at once, and watch where they are after each step."""
    before = engine.scheduler.counters.preempted
    answers = []
    for prompt in prompts:
        answers.append(Answer(prompt_tokens=len(prompt)))
        engine.submit(prompt, GREEDY, cartridge=cartridge, on_event=answers[-1].add)
    together, waited = 0, False
    began = used = 0.0
    first = 0
    while any(answer.finish_reason is None for answer in answers):
        engine.step()
        states = [row["state"] for row in engine.snapshot()["requests"]]
        if states.count("running") == len(prompts) > together:
            began, used = time.perf_counter(), time.process_time()
            first = sum(len(answer.tokens) for answer in answers)
        together = max(together, states.count("running"))
        # Whatever waits once some have ended was not there with the others.
        waited |= "waiting" in states and (together == len(prompts) or len(states) < len(prompts))
    return Trial(
        questions=len(prompts),
        together=together,
        waited=waited,
        preempted=engine.scheduler.counters.preempted - before,
        seconds=time.perf_counter() - began if began else 0.0,
        processor=time.process_time() - used if began else 0.0,
        tokens=sum(len(answer.tokens) for answer in answers) - first,
    )


def most(engine: Engine, prompts: Sequence[Sequence[int]], cartridge: str | None, guess: int) -> Trial:
    """The trial with the most questions that were held; ``guess`` is tried first."""
    held: Trial | None = None
    low, high = 0, len(prompts) + 1
    count = min(max(1, guess), len(prompts))
    while high - low > 1:
        trial = ask(engine, prompts[:count], cartridge)
        print(f"    {count} asked: {trial.together} together, {trial.preempted} preempted", flush=True)
        if trial.held:
            held, low = trial, count
        else:
            high = count
        # A few more than what went well, until too many are known.
        count = (low + high) // 2 if high <= len(prompts) else min(len(prompts), low + max(1, low // 8))
    assert held is not None
    return held


def row(
    name: str, fmt: CacheFormat, args: argparse.Namespace, text: str, cartridge: Cartridge | None
) -> dict[str, Any]:
    """Serve one way to hold the document."""
    loaded = None if cartridge is None else {"it": cartridge}
    engine = Engine(MODEL, memory=args.memory, format=fmt, dtype=DTYPE, cartridges=loaded)
    writer = Writer(engine.tokenizer)
    found = {question.tokens[: question.answer] for question in made_questions(text, writer, 4 * args.most)}
    questions = sorted(found, key=lambda tokens: (len(tokens), tokens))
    # About equally long ones.
    middle = max(0, (len(questions) - args.most) // 2)
    questions = questions[middle : middle + args.most]
    longest = max(map(len, questions)) + ANSWER
    document = [] if cartridge is not None else engine.tokenizer.encode(text, parse_special=False)
    prompts = [[*document, *question] for question in questions]
    said = {"memory": name, "tokens": len(document) if cartridge is None else cartridge.tokens, "longest": longest}
    try:
        if cartridge is None:
            # Read once; the questions find it.
            ask(engine, prompts[:1], None)
        used = sum(each["bytes"] for each in engine.snapshot()["cartridges"]) or engine.spec.sequence_bytes(
            len(document), engine.format
        )
        left = engine.cache.layout.total_bytes - used
        guess = int(left // engine.spec.sequence_bytes(longest, engine.format))
        trial = most(engine, prompts, "it" if cartridge is not None else None, guess)
    except DoesNotFit as error:
        return {**said, "held": 0, "refused": str(error)}
    return {
        **said,
        "held": trial.questions,
        "tokens_per_second": trial.tokens / trial.seconds,
        "tokens_per_processor_second": trial.tokens / trial.processor,
        "trial": asdict(trial),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="64MiB", help="of the cache")
    parser.add_argument("--tokens", type=int, default=7900, help="of the document")
    parser.add_argument("--cartridge", type=int, default=256, help="tokens of the cartridge")
    parser.add_argument("--most", type=int, default=192, help="questions that are asked at most")
    parser.add_argument("--text", type=Path, default=TEXT, help="gzipped English text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if "OMP_NUM_THREADS" not in os.environ else 1)

    spec = ModelSpec.read(MODEL)
    engine = Engine(MODEL, memory="8MiB", dtype=DTYPE)
    text = document_of(engine, args.text, args.tokens)
    cartridge = untrained(spec, engine, text, args.cartridge)
    del engine
    rows = []
    for name, fmt, short in ROWS:
        print(name, flush=True)
        rows.append(row(name, fmt, args, text, cartridge if short else None))
    print(f"\n{args.memory}, questions and answers of at most {rows[-1]['longest']} tokens\n")
    print("| memory of the document | tokens | questions at once | tokens/s | tokens/s of a processor |")
    print("|---|---|---|---|---|")
    for each in rows:
        speed = (
            f"{each['tokens_per_second']:.0f} | {each['tokens_per_processor_second']:.0f}"
            if each["held"]
            else f"refused: {each['refused']} |"
        )
        print(f"| {each['memory']} | {each['tokens']:,} | {each['held']} | {speed} |")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
