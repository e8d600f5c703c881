"""Run kvist and its peers on the same weights, the same prompts and the same cores, and compare their speed.

    bash benchmarks/peers/setup.sh
    python benchmarks/serving.py --rounds 3 --json serving.json

Each engine runs alone, in its own interpreter (`peers/worker_*.py`), loaded anew in every round; rounds are
the outer loop, so that a noisy minute hurts all engines alike. Prompts are English, each piece of text is
used once, and the warm-up has its own: a prefix cache can only help among the streams of one work.

Definitions: *prefill* is the time from submission until every stream of the work has its first token;
*decode* is the remaining tokens of all streams over the remaining time; *total* is the time until the last
token. Greedy, end tokens ignored. Peak memory is the sum of the peak resident sizes of the engine's processes
since their start, pages that they share counted in each; of what an engine reserves it holds what was touched.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

from peers.protocol import Job, Work

HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("KVIST_PEERS", "~/.cache/kvist/peers")).expanduser()
TEXT = HERE.parents[1] / "shared" / "data" / "text" / "shakespeare_plays.txt.gz"
MODELS = {
    "gguf": PEERS / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf",
    "bf16": PEERS / "models" / "smollm2-bf16",
    "int4": PEERS / "models" / "smollm2-ov-int4",
}
CONTEXT = 8192
OURS = "kvist"


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


ENGINES = {
    OURS: Engine(worker="kvist", label="kvist, Q4_1, cache bf16"),
    "openvino": Engine(worker="openvino", venv="openvino", label="OpenVINO int4, cache u8/u8"),
    "vllm": Engine(worker="vllm", venv="vllm", label="vLLM bf16"),
    "transformers": Engine(worker="transformers", venv="hf", label="transformers bf16"),
    "llamacpp": Engine(worker="llamacpp", venv="llama", label="llama.cpp Q4_1, cache f16/f16"),
    # Beside the defaults, on request:
    "kvist-k8-v4": Engine(
        worker="kvist", label="kvist, Q4_1, cache int8/int4", options={"format": {"key": "int8", "value": "int4"}}
    ),
    "vllm-fp8": Engine(
        worker="vllm", venv="vllm", label="vLLM bf16, cache fp8", options={"arguments": {"kv_cache_dtype": "fp8"}}
    ),
    "openvino-u4": Engine(
        worker="openvino", venv="openvino", label="OpenVINO int4, cache u8/u4", options={"value": "u4"}
    ),
    "openvino-first-alone": Engine(
        worker="openvino",
        venv="openvino",
        label="OpenVINO int4, cache u8/u8, first stream ahead",
        options={"first_alone": True},
    ),
    "llamacpp-q8-q4": Engine(
        worker="llamacpp",
        venv="llama",
        label="llama.cpp Q4_1, cache q8_0/q4_0",
        options={"key": "q8_0", "value": "q4_0"},
    ),
}
DEFAULT_ENGINES = (OURS, "openvino", "vllm", "transformers", "llamacpp")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a work: `shared` prompt tokens are the same in all streams, `own` are not."""

    title: str
    streams: int
    shared: int
    own: int
    out: int = 64

    @property
    def tokens(self) -> int:
        return self.shared + self.streams * self.own

    def fill(self, name: str, take: Callable[[int], list[int]]) -> Work:
        prefix = take(self.shared)
        prompts = [prefix + take(self.own) for _ in range(self.streams)]
        return Work(name=name, prompts=prompts, shared=self.shared, out=self.out)


WARM_UP = Shape(title="warm-up", streams=4, shared=64, own=192, out=8)
SHAPES = {
    "1": Shape(title="1 stream, 64 in, 64 out", streams=1, shared=0, own=64),
    "2": Shape(title="16 streams, 1,024 shared + 64 own in, 64 out", streams=16, shared=1024, own=64),
    "3": Shape(title="16 streams, 1,088 in, 64 out", streams=16, shared=0, own=1088),
    "4": Shape(title="1 stream, 7,900 in, 64 out", streams=1, shared=0, own=7900),
}


def make_works(text: Path, rounds: int, names: list[str]) -> Iterator[list[Work]]:
    """The works of each round, warm-up first. Each round reads further on in the text."""
    from tokenizers import Tokenizer

    shapes = {"warm-up": WARM_UP, **SHAPES}  # all are cut, so that a work's prompts do not depend on `names`
    needed = rounds * sum(shape.tokens for shape in shapes.values())
    with gzip.open(text, "rt", encoding="utf-8") as file:
        characters = file.read(8 * needed)
    tokenizer = Tokenizer.from_file(str(MODELS["bf16"] / "tokenizer.json"))
    tokens = tokenizer.encode(characters, add_special_tokens=False).ids
    if len(tokens) < needed:
        raise SystemExit(f"{text} holds {len(tokens)} tokens, {rounds} rounds need {needed}")
    position = 0

    def take(count: int) -> list[int]:
        nonlocal position
        position += count
        return tokens[position - count : position]

    for _ in range(rounds):
        works = {name: shape.fill(name, take) for name, shape in shapes.items()}
        yield [works[name] for name in ("warm-up", *names)]


def processes(root: int) -> list[Path]:
    """/proc folders of a process and its living descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    tree = [root]
    for pid in tree:
        tree += parents.get(pid, [])
    return [Path("/proc") / str(pid) for pid in tree]


def usage(root: int) -> tuple[float, float, int]:
    """CPU seconds of the process tree and of the whole machine, and the tree's peak resident bytes."""
    own = peak = 0
    for process in processes(root):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            status = (process / "status").read_text()
        except OSError:
            continue
        own += int(fields[11]) + int(fields[12])
        peak += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
    clocks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    return own / tick, (sum(clocks) - clocks[3] - clocks[4]) / tick, peak * 1024


def run(engine: Engine, works: list[Work], threads: int, timeout: float) -> Iterator[dict[str, Any]]:
    """Start the worker on the works; yield what it says, and how much others used the machine meanwhile."""
    job = Job(
        models={name: str(path) for name, path in MODELS.items()},
        threads=threads,
        context=CONTEXT,
        options=engine.options,
        works=works,
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [engine.python, HERE / "peers" / f"worker_{engine.worker}.py"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            ["timeout", str(timeout), *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        json.dump(asdict(job), worker.stdin)
        worker.stdin.close()
        before = usage(worker.pid)
        for line in worker.stdout:
            after = usage(worker.pid)
            own, machine = after[0] - before[0], after[1] - before[1]
            others = max(0.0, machine - own) / machine if machine else 0.0
            yield {
                **json.loads(line),
                "cpu_seconds": own,
                "peak_bytes": after[2],
                "others_cpu_ratio": others,
            }
            before = after
        if worker.wait() != 0:
            log.seek(0)
            tail = "".join(log.readlines()[-30:])
            raise RuntimeError(f"exit status {worker.returncode}\n{tail}")


def measure(outcome: dict[str, Any], shape: Shape) -> dict[str, float]:
    """The figures of one finished work."""
    prefill = max(outcome["first"])
    decoded = shape.streams * (shape.out - 1)
    return {
        "prefill": prefill,
        "decode": decoded / (outcome["total"] - prefill),
        "total": outcome["total"],
        "tokens_per_second": shape.streams * (shape.shared + shape.own + shape.out) / outcome["total"],
        "cpu_seconds": outcome["cpu_seconds"],
        "peak_bytes": outcome["peak_bytes"],
        "others_cpu_ratio": outcome["others_cpu_ratio"],
    }


def spread(values: list[float], digits: int) -> str:
    """Median, with the extremes where there are any."""
    middle, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def table(runs: list[dict[str, Any]], work: str, against: str) -> str:
    """One work as a Markdown table. Ratios are of medians and above 1 where the engine `against` is faster."""
    columns = ("prefill", "decode", "total", "tokens_per_second", "peak_bytes")
    values: dict[str, dict[str, list[float]]] = {}
    for one in runs:
        if one["work"] == work:
            for column in columns:
                values.setdefault(one["engine"], {}).setdefault(column, []).append(one[column])
    lines = [
        f"**{work}. {SHAPES[work].title}**",
        "",
        "| engine | prefill s | decode tok/s | total s | all tok/s | MiB | × prefill | × decode | × total |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ours = {column: statistics.median(v) for column, v in values.get(against, {}).items()}
    for name, of in values.items():
        cells = [
            ENGINES[name].label,
            spread(of["prefill"], 2),
            spread(of["decode"], 0),
            spread(of["total"], 2),
            spread(of["tokens_per_second"], 0),
            spread([value / 2**20 for value in of["peak_bytes"]], 0),
        ]
        if ours and name != against:
            theirs = {column: statistics.median(of[column]) for column in ours}
            cells += [
                f"{theirs['prefill'] / ours['prefill']:.2f}×",
                f"{ours['decode'] / theirs['decode']:.2f}×",
                f"{theirs['total'] / ours['total']:.2f}×",
            ]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(DEFAULT_ENGINES))
    parser.add_argument("--works", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--against", choices=list(ENGINES), default=OURS, help="whose figures the ratios are of")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one engine may take in one round")
    parser.add_argument("--text", type=Path, default=TEXT, help="gzipped English text")
    parser.add_argument("--json", type=Path, help="keep every figure here; written anew after each engine")
    args = parser.parse_args()

    missing = [path for path in (args.text, *MODELS.values()) if not path.exists()]
    missing += [ENGINES[name].python for name in args.engines if not ENGINES[name].python.exists()]
    if missing:
        parser.error(f"missing: {', '.join(map(str, missing))} (see {HERE / 'peers' / 'setup.sh'})")

    runs: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    for number, works in enumerate(make_works(args.text, args.rounds, args.works)):
        for name in args.engines:
            mark = {"round": number, "engine": name}
            print(f"round {number + 1} of {args.rounds}: {ENGINES[name].label}", file=sys.stderr)
            try:
                for said in run(ENGINES[name], works, args.threads, args.timeout):
                    if "version" in said:
                        loads.append(mark | said | {"time": time(), "loadavg": os.getloadavg()})
                    elif said["work"] != WARM_UP.title:
                        figures = measure(said, SHAPES[said["work"]])
                        runs.append(mark | said | figures)
                        shown = {key: round(value, 3) for key, value in figures.items()}
                        print(f"  work {said['work']}: {shown}", file=sys.stderr)
            except RuntimeError as error:
                print(f"{name} failed: {error}", file=sys.stderr)
            if args.json:
                record = {"machine": machine(), "threads": args.threads, "loads": loads, "runs": runs}
                args.json.write_text(json.dumps(record) + "\n")
    if not runs:
        raise SystemExit("no engine finished a work")
    print("\n\n".join(table(runs, work, args.against) for work in args.works))
    busy = max(one["others_cpu_ratio"] for one in runs)
    print(f"\nOther processes took up to {busy:.0%} of the CPU time spent during a work.", end="")
    print(" Not a quiet machine." if busy > 0.05 else "")


if __name__ == "__main__":
    main()
