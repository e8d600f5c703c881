"""How many conversations of 4,096 tokens each engine holds at once in a cache of one size, and serves: all of them run.

    bash benchmarks/peers/setup.sh
    python benchmarks/conversations_held.py --json held.json

Each engine runs alone, in its own interpreter (`peers/held_*.py`), on the same SmolLM2 and the same texts. A
conversation has two turns: a prompt of 3,936 tokens answered with 64, then 32 more answered with 64. All conversations
of a trial are submitted at once; none has text in common with another. They were *held* if in both turns all received a
token in the same step and none was preempted, evicted or computed again (`peers/held_protocol.py`). The table shows the
most that were, and how one more failed. *found* are tokens of the second turn's prompts that the engine had in its
cache from the first, as a part of the histories. Seconds are of the trial that held most, for the whole turn.

What was asked is the size of the cache alone; *allocated* is what the engine cut its blocks from, or its buffer.
Weights and working memory come on top for everybody.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from peers.held_protocol import HeldJob
from serving import HERE, MODELS, PEERS, TEXT, machine

from kvist.units import parse_size

PROMPT, QUESTION, OUT = 3936, 32, 64
OURS = "kvist-k8-v4"
# Talks that a search may take: about the most that some engine holds, three times.
TALKS = 40


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A worker with its options; `venv` is the peer's environment, None for this interpreter's own."""

    worker: str
    label: str
    venv: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return PEERS / self.venv / "bin" / "python" if self.venv else Path(sys.executable)


def ours(key: str, value: str) -> Engine:
    return Engine(worker="kvist", label=f"kvist {key}/{value}", options={"format": {"key": key, "value": value}})


def openvino(key: str, value: str) -> Engine:
    label = f"OpenVINO {key}/{value}"
    return Engine(worker="openvino", venv="openvino", label=label, options={"key": key, "value": value})


def llama_cpp(key: str, value: str) -> Engine:
    label = f"llama.cpp {key}/{value}"
    return Engine(worker="llamacpp", venv="llama", label=label, options={"key": key, "value": value})


ENGINES = {
    OURS: ours("int8", "int4"),
    "kvist": ours("bf16", "bf16"),
    "vllm": Engine(worker="vllm", venv="vllm", label="vLLM bf16"),
    "vllm-fp8": Engine(worker="vllm", venv="vllm", label="vLLM fp8", options={"kv_cache_dtype": "fp8"}),
    "openvino": openvino("u8", "u8"),
    "openvino-u4": openvino("u8", "u4"),
    "llamacpp-q8-q4": llama_cpp("q8_0", "q4_0"),
    # Beside the defaults, on request:
    "kvist-k4-v4": ours("int4", "int4"),
    "openvino-u4-u4": openvino("u4", "u4"),
    "llamacpp-q4-q4": llama_cpp("q4_0", "q4_0"),
    "llamacpp": llama_cpp("f16", "f16"),
}
DEFAULT_ENGINES = tuple(takewhile(lambda name: name != "kvist-k4-v4", ENGINES))


def talks(text: Path) -> list[list[int]]:
    """Pieces of the text, one after the other, each as long as what a user says in one conversation."""
    from tokenizers import Tokenizer

    length = PROMPT + QUESTION
    with gzip.open(text, "rt", encoding="utf-8") as file:
        characters = file.read(8 * TALKS * length)
    tokenizer = Tokenizer.from_file(str(MODELS["bf16"] / "tokenizer.json"))
    tokens = tokenizer.encode(characters, add_special_tokens=False).ids
    if len(tokens) < TALKS * length:
        raise SystemExit(f"{text} holds {len(tokens)} tokens, {TALKS * length} are needed")
    return [tokens[begin : begin + length] for begin in range(0, TALKS * length, length)]


def run(engine: Engine, job: HeldJob, timeout: float) -> Iterator[dict[str, Any]]:
    """Start the worker on the job; yield each trial as it says it."""
    command = ["timeout", str(timeout), engine.python, HERE / "peers" / f"held_{engine.worker}.py"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        json.dump(asdict(job), worker.stdin)
        worker.stdin.close()
        for line in worker.stdout:
            yield json.loads(line)
        if worker.wait() != 0:
            log.seek(0)
            raise RuntimeError(f"exit status {worker.returncode}\n{''.join(log.readlines()[-30:])}")


def failure(trial: dict[str, Any]) -> str:
    """Why one more was not held."""
    if trial["refused"]:
        return str(trial["refused"])
    turn = trial["turns"][-1]
    preempted = f", {turn['preempted']} preempted" if turn["preempted"] else ""
    return f"{turn['together']} together{preempted} in turn {len(trial['turns'])}"


def table(trials: dict[str, list[dict[str, Any]]], asked: int) -> str:
    """As Markdown. The ratio is ours to the engine's, above 1 where kvist holds more."""
    best = {
        name: max((trial for trial in of if trial["held"]), key=lambda trial: int(trial["conversations"]), default=None)
        for name, of in trials.items()
    }
    our_best = best.get(OURS)
    lines = [
        "| engine, keys/values | asked MiB | allocated MiB | held and served | kvist int8/int4 | one more "
        "| found in turn 2 | turn 1, s | turn 2, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, of in trials.items():
        most = best[name]
        held = most["conversations"] if most else 0
        failed = [trial for trial in of if not trial["held"]]
        cells = [
            ENGINES[name].label,
            f"{asked / 2**20:,.0f}",
            f"{(most or of[-1])['allocated'] / 2**20:,.1f}",
            str(held),
            f"{our_best['conversations'] / held:.2f}×" if our_best and held and name != OURS else "",
            failure(failed[0]) if failed else "",
        ]
        if most:
            second = most["turns"][1]
            found = second["hit_tokens"] / (held * (PROMPT + OUT))
            cells += [f"{'at least ' if second['hits_at_least'] else ''}{found:.1%}"]
            cells += [f"{turn['seconds']:.1f}" for turn in most["turns"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(DEFAULT_ENGINES))
    parser.add_argument("--memory", default="256MiB", help="of the cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one engine may take")
    parser.add_argument("--text", type=Path, default=TEXT, help="gzipped English text")
    parser.add_argument("--json", type=Path, help="keep every trial here; written anew after each")
    args = parser.parse_args()

    missing = [path for path in (args.text, *MODELS.values()) if not path.exists()]
    missing += [ENGINES[name].python for name in args.engines if not ENGINES[name].python.exists()]
    if missing:
        parser.error(f"missing: {', '.join(map(str, missing))} (see {HERE / 'peers' / 'setup.sh'})")

    memory = parse_size(args.memory, key="memory")
    said: dict[str, list[dict[str, Any]]] = {}
    pieces = talks(args.text)
    for name in args.engines:
        engine = ENGINES[name]
        job = HeldJob(
            models={kind: str(path) for kind, path in MODELS.items()},
            threads=args.threads,
            memory=memory,
            prompt=PROMPT,
            question=QUESTION,
            out=OUT,
            options=engine.options,
            talks=pieces,
        )
        try:
            for trial in run(engine, job, args.timeout):
                said.setdefault(name, []).append(trial)
                outcome = "held" if trial["held"] else failure(trial)
                print(f"{engine.label} {trial['version']}: {trial['conversations']}: {outcome}", file=sys.stderr)
                if args.json:
                    record = {"machine": machine(), "threads": args.threads, "memory": memory, "trials": said}
                    args.json.write_text(json.dumps(record) + "\n")
        except RuntimeError as error:
            print(f"{name} failed: {error}", file=sys.stderr)
    if not said:
        raise SystemExit("no engine finished a trial")
    print(f"Conversations of {job.tokens:,} tokens, SmolLM2-135M-Instruct, {args.memory} of cache\n")
    print(table(said, memory))


if __name__ == "__main__":
    main()
