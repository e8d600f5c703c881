"""kvist's pruning beside OpenVINO GenAI's cache eviction: the same prompts, the same budgets, the same cores.

    bash benchmarks/peers/setup.sh
    python benchmarks/eviction.py --json eviction.json

A prompt is a text of some length with facts hidden in it and a question about one of them, so that both know what is
asked when they choose what they keep. Each engine is held against itself with its full cache, on weights in 4 bits and
a cache in 8:

    found     share of the facts whose answer is the likeliest token, and of those that the full cache finds
    same      tokens of a greedy answer before the first that the full cache's has not, as a share of all
    held      bytes of the cache in use behind the answer, of the full cache's
    tok/s     one stream's decode, of the full cache's

Both engines are loaded all the time and asked by turns, prompt by prompt and setting by setting
(`peers/eviction_*.py`); figures of speed are medians. A second table has longer prompts, and speed alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.eviction_protocol import Answer, EvictionJob, Question
from serving import HERE, MODELS, PEERS, machine

from kvist.comparison.questions import DEPTHS, pieces_of
from kvist.engine.tokenizer import Tokenizer
from kvist.spec.model import ModelSpec

TEXT = HERE.parents[1] / "shared" / "data" / "text" / "paradise_lost.txt.gz"
ENGINES = {"kvist": Path(sys.executable), "openvino": PEERS / "openvino" / "bin" / "python"}
METHODS = {"kvist": ["h2o", "h2o-sum", "snapkv"], "openvino": ["norm-sum", "sum"]}
# Of which the others are as fast.
LONG_METHODS = {"kvist": ["h2o", "snapkv"], "openvino": ["norm-sum"]}

# Tokens of a prompt by which engines warm up.
_WARM = 512


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens, and the one that answers."""

    tokens: list[int]
    told: int


class Worker:
    """An engine in its own interpreter, loaded."""

    def __init__(self, name: str, job: EvictionJob) -> None:
        command = [ENGINES[name], HERE / "peers" / f"eviction_{name}.py"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._said(asdict(job))["version"]

    def _said(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(content), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended with exit status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, question: Question) -> Answer:
        return Answer(**self._said(asdict(question)))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def prompts_of(text: str, *, tokens: int, count: int, seed: int) -> list[Prompt]:
    """Pieces of a text with a fact at one of some depths, and the question about it."""
    tokenizer = Tokenizer.read(ModelSpec.read(str(MODELS["gguf"])))
    pieces = pieces_of(tokenizer, text, context=tokens, following=2, pieces=count, seed=seed)
    facts = [(piece, piece.facts[number % len(DEPTHS)]) for number, piece in enumerate(pieces)]
    return [Prompt(tokens=[*piece.hidden, *fact.question, *fact.answer], told=fact.told) for piece, fact in facts]


def settings(methods: Mapping[str, Sequence[str]], budgets: Sequence[int]) -> list[tuple[str, str, int]]:
    """Engine, method and budget; the full caches first."""
    full = [(engine, "none", 0) for engine in ENGINES]
    return [*full, *((engine, method, n) for n in budgets for engine in ENGINES for method in methods[engine])]


def common(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of the tokens before the first that differs."""
    parted = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return parted / len(one)


def row_of(
    name: tuple[str, str, int], found: list[Answer], full: list[Answer], prompts: list[Prompt]
) -> dict[str, Any]:
    """One engine with one setting against its own full cache."""
    right = [answer.tokens[0] == prompt.told for answer, prompt in zip(found, prompts, strict=True)]
    known = [answer.tokens[0] == prompt.told for answer, prompt in zip(full, prompts, strict=True)]
    speed = [(len(answer.tokens) - 1) / answer.rest for answer in found]
    speed_full = [(len(answer.tokens) - 1) / answer.rest for answer in full]
    return {
        "engine": name[0],
        "method": name[1],
        "budget": name[2] or None,
        "found": sum(right) / len(right),
        "found_of_full": sum(map(min, right, known)) / max(1, sum(known)),
        "same": statistics.mean(common(a.tokens, b.tokens) for a, b in zip(found, full, strict=True)),
        "held_bytes": round(statistics.mean(answer.held for answer in found)),
        "held": sum(answer.held for answer in found) / sum(answer.held for answer in full),
        "most_bytes": max(answer.most for answer in found),
        "prefill_seconds": statistics.median(answer.first for answer in found),
        "prefill": statistics.median(a.first / b.first for a, b in zip(found, full, strict=True)),
        "tokens_per_second": statistics.median(speed),
        "speed": statistics.median(a / b for a, b in zip(speed, speed_full, strict=True)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown; × are of the engine's own full cache."""
    lines = [
        "| engine | method | kept | found | of full's | same | held MiB | × | first token s | × | tok/s | × |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['engine']} | {row['method']} | {row['budget'] or 'all'} | {row['found']:.0%} | "
        f"{row['found_of_full']:.0%} | {row['same']:.0%} | {row['held_bytes'] / 2**20:.2f} | {row['held']:.2f} | "
        f"{row['prefill_seconds']:.2f} | {row['prefill']:.2f} | {row['tokens_per_second']:.1f} | {row['speed']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def ratios(rows: list[dict[str, Any]]) -> str:
    """Each of ours to each of theirs of the same budget; above 1 kvist has more."""
    lines = ["| kept | kvist / OpenVINO | found | same | held bytes | tok/s |", "|---|---|---|---|---|---|"]
    for ours in (row for row in rows if row["engine"] == "kvist"):
        for theirs in (row for row in rows if row["engine"] == "openvino" and row["budget"] == ours["budget"]):
            cells = [
                f"{ours[name] / theirs[name]:.2f}" if theirs[name] else "–"
                for name in ("found", "same", "held_bytes", "tokens_per_second")
            ]
            what = f"{ours['method']} / {theirs['method']}"
            lines.append(f"| {ours['budget'] or 'all'} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(
    workers: dict[str, Worker], prompts: list[Prompt], names: list[tuple[str, str, int]], *, out: int, rounds: int = 1
) -> list[dict[str, Any]]:
    """All settings on all prompts, by turns."""
    found: dict[tuple[str, str, int], list[Answer]] = {name: [] for name in names}
    # First engines warm up.
    asked = [(prompts[0].tokens[:_WARM], 4), *((prompt.tokens, out) for prompt in prompts * rounds)]
    for number, (tokens, count) in enumerate(asked):
        for name in names:
            engine, method, budget = name
            answer = workers[engine].ask(Question(prompt=tokens, out=count, method=method, budget=budget))
            if number:
                found[name].append(answer)
        print(f"prompt {number} of {len(prompts) * rounds} done", file=sys.stderr, flush=True)
    return [row_of(name, found[name], found[name[0], "none", 0], prompts * rounds) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10, help="of the first table; 0 leaves it out")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt's text")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024], help="multiples of 32, 96 or more")
    parser.add_argument("--out", type=int, default=48)
    parser.add_argument("--long", type=int, default=7900, help="tokens of the second table's prompts; 0 leaves it out")
    parser.add_argument("--long-budget", type=int, default=2048)
    parser.add_argument("--long-out", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of the second table")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", type=Path, default=TEXT, help="gzipped English text")
    parser.add_argument("--json", type=Path, help="keep every figure here")
    args = parser.parse_args()
    missing = [path for path in (args.text, MODELS["gguf"], MODELS["int4"], *ENGINES.values()) if not path.exists()]
    if missing:
        parser.error(f"missing: {', '.join(map(str, missing))} (see {HERE / 'peers' / 'setup.sh'})")
    text = gzip.decompress(args.text.read_bytes()).decode()
    prompts = prompts_of(text, tokens=args.tokens, count=args.prompts, seed=args.seed) if args.prompts else []
    long = prompts_of(text, tokens=args.long, count=1, seed=args.seed) if args.long else []
    context = max(len(prompt.tokens) for prompt in [*prompts, *long]) + max(args.out, args.long_out)
    models = {name: str(MODELS[name]) for name in ("gguf", "int4")}
    job = EvictionJob(models=models, threads=args.threads, context=context)
    workers = {name: Worker(name, job) for name in ENGINES}
    content: dict[str, Any] = {
        "machine": machine(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }
    content["versions"] = {name: worker.version for name, worker in workers.items()}
    try:
        if prompts:
            content["rows"] = rows = run(workers, prompts, settings(METHODS, args.budgets), out=args.out)
            print(f"{len(prompts)} prompts of {args.tokens:,} tokens, {args.out} tokens answered\n\n{table(rows)}\n")
            print(ratios(rows), flush=True)
        if long:
            names = settings(LONG_METHODS, [args.long_budget])
            content["long"] = rows = run(workers, long, names, out=args.long_out, rounds=args.rounds)
            print(f"\n{args.long:,} tokens, {args.long_out} answered\n\n{table(rows)}\n\n{ratios(rows)}")
        if args.json is not None:
            args.json.write_text(json.dumps(content, indent=1))
    finally:
        for worker in workers.values():
            worker.end()


if __name__ == "__main__":
    main()
