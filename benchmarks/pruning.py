"""What pruning does to answers, to memory and to speed: every method, on a list of facts and on a long text.

    python benchmarks/pruning.py facts      [--model smollm2-135m] [--list colours] [--budgets 128 256 512]
    python benchmarks/pruning.py streaming  [--tokens 8192] [--window 1024]
    python benchmarks/pruning.py overhead   [--prompt 830] [--budget 256] [--answer 192]
    python benchmarks/pruning.py decode     [--prompt 7900] [--budget 2048] [--answer 64]

``facts``: a list of facts is read and pruned *before* any question is known; then each question with its answer is read
behind it, as a fork of what is left, and behind each of its tokens the distribution of the next one is held against the
one with the full cache (Kullback-Leibler divergence, nats; agreement of the likeliest; how often the answer's first
token is the likeliest). ``random`` keeps sinks and a random choice; ``truncation`` reads the end of the list alone.

``streaming``: a text several times as long as what the model was first trained on, read with a cache of one size:
perplexity of each stretch, with sinks and without.

``overhead``: processor seconds that watching and pruning take. Of a prompt also those of the whole, held against the
prompt that is not pruned, read just before: attention itself adds up what H2O looks at. Of an answer as a share of it.

``decode``: tokens per processor second behind a long prompt, behind what pruning leaves of it, and behind a prompt that
is as short.
"""

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kvist.batch import Chunk, Request
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.engine.loading import best_dtype, with_weights
from kvist.engine.pruner import Pruner
from kvist.engine.runner import Runner
from kvist.engine.tokenizer import Tokenizer
from kvist.kernels.pruning import SCORES, Observed
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import METHODS, Method, Pruning

TEXTS = Path(__file__).resolve().parents[2] / "shared/data/text"
NAMES = """
    Anna Boris Clara David Elena Felix Grace Henry Ingrid James Karen Louis Maria Nathan Olivia Peter Quentin Rosa Simon
    Teresa Ursula Victor Wendy Xavier Yvonne Zachary Alice Bernard Cecilia Daniel Emma Frank Gloria Hugo Irene Julia
    Kevin Laura Martin Nina Oscar Paula Ralph Sarah Thomas Vera Walter Adam Bella Carl Diana Edgar Fiona George Helen
    Ivan Jane Kurt Linda Mark Nora Otto Philip Rachel Stella Tom Violet William Agnes Bruno Claire Dennis Edith Fred
    Gina Harold Isabel Jack Kate Leo Mona Neil Opal Paul
""".split()  # noqa: SIM905
CITIES = """
    Paris London Berlin Madrid Rome Vienna Oslo Stockholm Helsinki Dublin Lisbon Athens Warsaw Prague Budapest Cairo
    Tokyo Boston Chicago Toronto Sydney Moscow Geneva Milan
""".split()  # noqa: SIM905
THINGS = """
    door lamp chair table window boat house coat shoe hat glove scarf shirt cup plate bowl spoon knife fork pot box bag
    book pen desk sofa bed rug wall roof gate fence tree leaf flower stone bridge road car truck bus train plane kite
    ball drum flute bell clock watch ring chain crown flag tent rope ladder bucket broom brush towel soap candle mirror
    vase basket barrel cart wheel anchor sail oar net hook saddle whip sword shield helmet arrow bow cannon tower castle
    church school shop barn mill well garden pond river island hill cave field path stair shelf drawer key lock button
""".split()  # noqa: SIM905
COLOURS = "red blue green yellow black white brown pink orange purple grey silver".split()  # noqa: SIM905
LISTS = {
    "colours": (
        THINGS,
        COLOURS,
        "The colour of the {} is {}.",
        "What is the colour of the {}?",
        "The colour of the {} is",
    ),
    "homes": (NAMES, CITIES, "{} lives in the city of {}.", "Where does {} live?", "{} lives in the city of"),
}
"""What is told of what, the fact, the question, and how its answer begins."""


def at_random(seen: Observed) -> torch.Tensor:
    """Any tokens."""
    return torch.rand(seen.sums.shape)


class Reader:
    """A model with one cache, read token by token of one's own choice."""

    def __init__(self, model: str, *, tokens: int, dtype: str) -> None:
        self.spec = spec = with_weights(ModelSpec.read(model))
        self.tokenizer = Tokenizer.read(spec)
        groups = groups_of(spec.computed_in(dtype), CacheFormat(key=dtype, value=dtype))
        memory = 2 * sum(group.peak_blocks(tokens, 1024) * group.block_bytes for group in groups)
        layout = ArenaLayout.of(groups, memory)
        self.runner = Runner(spec, groups, layout, dtype=dtype)
        self.manager = CacheManager(groups, layout, prefix_cache=False)
        self.scheduler = Scheduler(
            manager=self.manager, limits=Limits(max_context=spec.max_context, max_batch_tokens=1024)
        )
        self.pruner = Pruner(self.runner, self.scheduler)

    def prompt(self, tokens: Sequence[int], evict: str) -> tuple[Request, float]:
        """Compute a prompt, and prune it; with the processor seconds that took."""
        started = time.process_time()
        request = self.scheduler.add("0", np.array(tokens, np.int32), 2, pruning=Pruning.read(evict))
        while request.sequence.length < len(tokens):
            self.step()
        return request, time.process_time() - started

    def step(self) -> torch.Tensor:
        """One step of the scheduler; logits of what samples."""
        batch = self.scheduler.step()
        logits = self.runner.run(batch)
        self.runner.copy(self.scheduler.commit(batch))
        self.pruner.prune(batch.chunks)
        return logits

    def answer(self, request: Request, count: int) -> float:
        """Decode so many tokens, whatever they are; the processor seconds that took."""
        request.max_tokens = count + 1
        started = time.process_time()
        for token in range(count):
            self.scheduler.append(request, token + 100)
            self.step()
        return time.process_time() - started

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.pruner.forget(request.id)

    def behind(self, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities behind each of these tokens, read behind what a request has."""
        fork = self.manager.fork(request.sequence)
        assert fork is not None
        self.runner.copy(fork.copies)
        twin = Request("1", fork.sequence, 1)
        twin.sequence.pruning = None
        for token in tokens:
            twin.sequence.append(token)
        start = twin.sequence.length
        reservation = self.manager.reserve(twin.sequence, len(tokens))
        assert reservation.limit == start + len(tokens)
        logits = self.runner.score([Chunk(twin, start, len(tokens), samples=True)])
        self.manager.commit(twin.sequence, reservation.limit)
        self.manager.release(twin.sequence)
        return F.log_softmax(logits.float(), dim=1)


def facts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chance = random.Random(args.seed)
    reader = Reader(args.model, tokens=2048, dtype=args.dtype)
    encode = reader.tokenizer.encode
    things, values, fact, question, answer = LISTS[args.list]
    text, told = "Facts:", {}
    for thing in chance.sample(things, len(things)):
        told[thing] = chance.choice(values)
        text = f"{text} {fact.format(thing, told[thing])}"
        if len(encode(text)) >= args.prompt:
            break
    prompt = encode(text)
    questions, places = [], []
    for thing in chance.sample([*told], min(args.questions, len(told))):
        asked = encode(f"\nQuestion: {question.format(thing)}\nAnswer: {answer.format(thing)}")
        places.append(len(asked) - 1)
        questions.append([*asked, *encode(f" {told[thing]}.")])
    METHODS["random"] = Method(bounded=False, observes=0, recent=0.0)
    SCORES["random"] = at_random  # type: ignore[index]

    def read(evict: str, tokens: list[int] = prompt) -> list[torch.Tensor]:
        request, _ = reader.prompt(tokens, evict)
        slots = request.sequence.length - request.sequence.pruned
        assert evict == "none" or slots == int(evict.partition(":")[2]), "nothing was pruned"
        found = [reader.behind(request, question) for question in questions]
        reader.end(request)
        return found

    expected = read("none")

    def told_of(name: str, budget: int, found: list[torch.Tensor]) -> dict[str, Any]:
        pairs = list(zip(found, expected, strict=True))
        kl = torch.cat([F.kl_div(f, e, log_target=True, reduction="none").sum(1) for f, e in pairs])
        same = torch.cat([f.argmax(1) == e.argmax(1) for f, e in pairs])
        right = sum(int(f[at].argmax()) == q[at + 1] for f, at, q in zip(found, places, questions, strict=True))
        return {
            "method": name, "budget": budget, "prompt": len(prompt), "kl": round(float(kl.mean()), 4),
            "top1_agreement": round(float(same.float().mean()), 4), "answers": round(right / len(questions), 3),
        }  # fmt: skip

    yield told_of("none", len(prompt), expected)
    for budget in args.budgets:
        for method in args.methods or [*METHODS]:
            yield told_of(method, budget, read(f"{method}:{budget}"))
        if not args.methods:
            yield told_of("truncation", budget, read("none", prompt[-budget:]))


def streaming(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    text = gzip.decompress((TEXTS / "shakespeare_plays.txt.gz").read_bytes()).decode()[: 8 * args.tokens]
    reader = Reader(args.model, tokens=args.tokens, dtype=args.dtype)
    tokens = reader.tokenizer.encode(text)[: args.tokens]
    for evict in ("none", f"streaming:4+{args.window - 4}", f"streaming:0+{args.window}", f"h2o:{args.window}"):
        pruning = Pruning.read(evict)
        request = Request("0", reader.manager.begin(np.array(tokens, np.int32)), 0)
        sequence = request.sequence
        if pruning:
            sequence.pruning = pruning.of_prompt(args.window)
        reader.scheduler.running.append(request)
        losses, most = [], 0
        while sequence.length < len(tokens):
            start = sequence.length
            end = reader.manager.reserve(sequence, 256).limit
            logits = reader.runner.score([Chunk(request, start, end - start, samples=True)])
            following = torch.tensor(tokens[start + 1 : end + 1])
            losses.append(F.cross_entropy(logits[: len(following)].float(), following, reduction="none"))
            reader.manager.commit(sequence, end)
            most = max(most, sequence.length - sequence.pruned)
            reader.pruner.prune([Chunk(request, start, end - start, samples=True)])
        losses_of = torch.cat(losses).split(args.tokens // 8)
        reader.end(request)
        yield {
            "evict": evict, "tokens": len(tokens), "most_slots": most,
            "perplexity": [round(exp(float(part.mean())), 2) for part in losses_of],
        }  # fmt: skip


def overhead(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    text = gzip.decompress((TEXTS / "paradise_lost.txt.gz").read_bytes()).decode()[: 8 * args.prompt]
    reader = Reader(args.model, tokens=args.prompt + args.answer, dtype=args.dtype)
    prompt = reader.tokenizer.encode(text)[: args.prompt]
    pruner = reader.pruner
    spent = [0.0]

    def timed(call: Any) -> Any:
        def wrapped(*given: Any) -> Any:
            started = time.process_time()
            try:
                return call(*given)
            finally:
                spent[0] += time.process_time() - started

        return wrapped

    pruner.prune = timed(pruner.prune)  # type: ignore[method-assign]
    watch = timed(pruner.watch)

    def watched(chunks: Any) -> Any:
        step = watch(chunks)
        if step is not None:
            step.see = timed(step.see)
        return step

    reader.runner.watch = watched
    reader.end(reader.prompt(prompt, "none")[0])
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for evict in ["none", *(f"{method}:{args.budget}" for method in args.methods or METHODS)]:
            spent[0] = 0.0
            request, seconds = reader.prompt(prompt, evict)
            row = {"prefill": seconds, "prefill_pruning": spent[0] / seconds}
            spent[0] = 0.0
            seconds = reader.answer(request, args.answer)
            row |= {"per_token": seconds / args.answer, "decode_pruning": spent[0] / seconds}
            row["slots"] = request.sequence.length - request.sequence.pruned
            reader.end(request)
            rows.setdefault(evict, []).append(row)
            row["prefill_ratio"] = row["prefill"] / rows["none"][number]["prefill"]
    for evict, found in rows.items():
        middle = {name: round(statistics.median(row[name] for row in found), 4) for name in found[0]}
        yield {"evict": evict, "prompt": len(prompt), "answer": args.answer, "rounds": len(found), **middle}


def decode(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    text = gzip.decompress((TEXTS / "paradise_lost.txt.gz").read_bytes()).decode()[: 8 * args.prompt]
    reader = Reader(args.model, tokens=args.prompt + args.answer, dtype=args.dtype)
    prompt = reader.tokenizer.encode(text)[: args.prompt]
    ways = [(prompt, "none"), (prompt[-args.budget :], "none")]
    ways += [(prompt, f"{method}:{args.budget}") for method in args.methods or METHODS]
    found: list[list[float]] = [[] for _ in ways]
    slots = [0] * len(ways)
    for _ in range(args.rounds):
        for number, (tokens, evict) in enumerate(ways):
            request, _ = reader.prompt(tokens, evict)
            found[number].append(args.answer / reader.answer(request, args.answer))
            slots[number] = request.sequence.length - request.sequence.pruned
            reader.end(request)
    for (tokens, evict), speeds, held in zip(ways, found, slots, strict=True):
        times = {
            name: round(statistics.median(a / b for a, b in zip(speeds, found[number], strict=True)), 3)
            for number, name in enumerate(("of_long", "of_short"))
        }
        speed = round(statistics.median(speeds), 1)
        yield {"evict": evict, "prompt": len(tokens), "slots": held, "tokens_per_second": speed, **times}


WHAT = {"facts": facts, "streaming": streaming, "overhead": overhead, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*WHAT])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=best_dtype())
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--list", choices=[*LISTS], default="colours")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=830)
    parser.add_argument("--answer", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with torch.inference_mode():
        for row in WHAT[args.what](args):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
