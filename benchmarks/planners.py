"""Ask kvist and other planners for the cache of one sequence of published models, and count who is right.

    python benchmarks/planners.py --install           # environments, once (hf-vram-calc brings torch: some GB)
    python benchmarks/planners.py > planners.md

The quantity is the same for all: the bytes that one sequence of 8,192 and of 32,768 tokens keeps, in bf16, on one
device. Two tables: the models of `expected/models.json`, against the verified answers written there; and all of
`configs/full`, each once, against our own answer, which the tests hold against a forward pass of transformers.
`peers/ask_planner.py` says how each planner is asked.

*right*: within 0.1 % at both lengths, in our convention or in one that an engine uses: a window of W tokens that keeps
W - 1, a convolution that keeps a column more, states in f32 or in bf16, indexer keys in bf16 or fp8, for DeepSeek-V4
also in fp4 beside the buffers of its compressors. Whoever counts all but the recurrent state, or all but the indexer,
is told apart as *no state* and *no indexer*. Else ×F: what it says over what is right, at the length where that is
worse.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from kvist import CacheFormat, ModelSpec
from kvist.spec.layers import Attention, Compressed, Indexer, Latent, Layer, Parallel, State

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "shared" / "data"
PEERS = Path(os.environ.get("KVIST_PEERS", "~/.cache/kvist/peers")).expanduser() / "planners"
TOKENS = (8192, 32768)
BF16 = CacheFormat(key="bf16", value="bf16")
OURS = "kvist"
# Name on PyPI and version. Left out: planners with a fixed catalogue (iaexplore-llm-profiler, kvcache-simulator,
# llm-sizer), and those that take no length (llm-mem, llm-resource-planner).
PLANNERS = {
    "kvfit": "0.3.0",
    "vramscout": "0.7.0",
    "aiconfigurator": "0.12.0",
    "sparkfit": "0.5.0",
    "ridgepoint": "0.1.2",
    "hf-mem": "0.5.6",
    "hf-vram-calc": "1.0.9",
    "modelinfo-cli": "1.4.4",
    "vramcalc": "0.1.2",
    "llm-mem-planner": "0.2.2",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published configuration, and what is right at each length."""

    name: str
    hub: str
    config: Path
    spec: ModelSpec
    bytes: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a planner's answers: right, no state, no indexer, wrong by a factor, refused or crashed."""

    kind: str
    factor: float = 1.0
    why: str = ""

    def __str__(self) -> str:
        factor = "×0" if self.factor == 0 else f"×{self.factor:.3g}"
        return factor if self.kind == "wrong" else self.kind


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Which parts of a memory are counted, and how, beside what the planner under test is known to leave out."""

    window_less: int = 0
    conv_more: int = 0
    state_bytes: int | None = 4
    indexer_bytes: int | None = 256
    compressor: bool = False


def conventions() -> dict[str, list[Conventions]]:
    """All combinations that count as right, and those that leave a part out."""
    whole = [
        Conventions(window_less=less, conv_more=more, state_bytes=state, indexer_bytes=indexer)
        for less, more, state, indexer in itertools.product((0, 1), (0, 1), (4, 2), (256, 132))
    ]
    # DeepSeek-V4: indexer keys in fp4, and the compressors' entries under way in f32.
    whole.append(Conventions(indexer_bytes=64, compressor=True))
    stateless = [Conventions(window_less=less, state_bytes=None) for less in (0, 1)]
    unindexed = [Conventions(window_less=less, indexer_bytes=None) for less in (0, 1)]
    return {"right": whole, "no state": stateless, "no indexer": unindexed}


def held(layer: Layer, tokens: int, how: Conventions) -> float:
    """Bytes of a layer in bf16 under a convention."""
    if isinstance(layer, Parallel):
        return sum(held(part, tokens, how) for part in layer.parts)
    if isinstance(layer, State):
        if how.state_bytes is None:
            return 0
        columns = layer.conv_elements / layer.conv_columns * (layer.conv_columns + how.conv_more)
        return columns * 2 + layer.state_elements * how.state_bytes
    kept = layer.bytes(tokens, BF16)
    if isinstance(layer, Attention | Latent | Compressed):
        if layer.window is not None and tokens >= layer.window and how.window_less:
            kept -= layer.bytes(layer.window, BF16) - layer.bytes(layer.window - 1, BF16)
        if layer.indexer is not None and how.indexer_bytes != 256:
            keys = indexer_bytes(layer, layer.indexer, tokens)
            kept += keys * ((how.indexer_bytes or 0) / 256 - 1)
    if isinstance(layer, Compressed) and how.compressor:
        widths = layer.rank + layer.rope_dim + (layer.indexer.dim if layer.indexer else 0)
        kept += 2 * layer.ratio * (2 if layer.indexer else 1) * widths * 4
    return kept


def indexer_bytes(layer: Layer, indexer: Indexer, tokens: int) -> int:
    """What the indexer's keys take of a layer, in bf16."""
    entries = tokens // layer.ratio if isinstance(layer, Compressed) else tokens
    return entries * indexer.heads * indexer.dim * 2


def judge(model: Model, answers: dict[int, dict[str, Any]]) -> Verdict:
    """Hold a planner's answers at all lengths against what is right."""
    for kind in ("crashed", "refused"):
        for found in answers.values():
            if kind in found:
                return Verdict(kind=kind, why=found[kind])
    for kind, allowed in conventions().items():
        for how in allowed:
            wanted = {tokens: sum(held(layer, tokens, how) for layer in model.spec.layers) for tokens in TOKENS}
            if all(abs(answers[tokens]["bytes"] - wanted[tokens]) <= 1e-3 * wanted[tokens] for tokens in TOKENS):
                # No state and no indexer where there is none is simply right.
                exact = all(wanted[tokens] == model.bytes[tokens] for tokens in TOKENS)
                return Verdict(kind="right" if exact else kind)
    factors = [answers[tokens]["bytes"] / model.bytes[tokens] for tokens in TOKENS]
    return Verdict(kind="wrong", factor=max(factors, key=lambda factor: max(factor, 1 / factor if factor else 1e9)))


def verified() -> list[Model]:
    """The models whose answers were worked out apart from this project."""
    cases = json.loads((DATA / "expected" / "models.json").read_text())["cases"]
    found = []
    for case in cases:
        total = {int(tokens): size for tokens, size in case["total_bytes"].items() if tokens.isdigit()}
        if not set(TOKENS) <= set(total):
            continue
        path = DATA / "configs" / "full" / case["file"]
        found.append(Model(name=case["id"], hub=case["hf_id"], config=path, spec=ModelSpec.read(path), bytes=total))
    return found


def published() -> list[Model]:
    """All whole configurations, by our own answer; the same configuration under two names counts once."""
    found: dict[str, Model] = {}
    hubs = {model.config.name: model.hub for model in verified()}
    for path in sorted((DATA / "configs" / "full").glob("*.json")):
        spec = ModelSpec.read(path)
        hub = hubs.get(path.name, path.stem.replace("--", "/"))
        total = {tokens: spec.sequence_bytes(tokens, BF16) for tokens in TOKENS}
        key = json.dumps(json.loads(path.read_text()), sort_keys=True)
        found.setdefault(key, Model(name=path.stem, hub=hub, config=path, spec=spec, bytes=total))
    return list(found.values())


def memory_kind(spec: ModelSpec) -> str:
    """The kind of memory that decides whether a formula works."""
    layers = [part for layer in spec.layers for part in (layer.parts if isinstance(layer, Parallel) else (layer,))]
    if any(isinstance(layer, Compressed) for layer in layers):
        return "compressed"
    if any(isinstance(layer, State) for layer in layers):
        return "states"
    if any(isinstance(layer, Latent) for layer in layers):
        indexed = any(isinstance(layer, Latent) and layer.indexer for layer in layers)
        return "latents + indexer" if indexed else "latents"
    if any(isinstance(layer, Attention) and (layer.window or layer.chunk) for layer in layers):
        return "windows"
    return "full attention"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A planner's answers: by model and length, with the seconds of an answer, and of the start."""

    version: str
    start_seconds: float
    answers: dict[str, dict[int, dict[str, Any]]]

    @property
    def milliseconds(self) -> float:
        """Median over models of one answer, loaded and warm."""
        return 1000 * statistics.median(found["seconds"] for each in self.answers.values() for found in each.values())


def run(planner: str, models: Sequence[Model], root: Path) -> Run:
    """Ask a planner in its own interpreter; the time to start is that of the process up to its first answer.

    Raises:
        SystemExit: its environment is missing.
    """
    python = Path(sys.executable) if planner == OURS else PEERS / planner / "bin" / "python"
    if not python.exists():
        sys.exit(f"{python} is missing: run benchmarks/planners.py --install, or point KVIST_PEERS at what it made")
    asks = [(model, tokens) for model in models for tokens in TOKENS]
    job = {
        "planner": planner,
        "asks": [{"directory": str(root / model.hub), "tokens": tokens} for model, tokens in asks],
    }
    start = perf_counter()
    process = subprocess.Popen(
        [python, HERE / "peers" / "ask_planner.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        json.dump(job, process.stdin)
        process.stdin.close()
        loaded = json.loads(process.stdout.readline() or "{}")
        if not loaded:
            sys.exit(f"{planner}: did not start")
        lines = [json.loads(process.stdout.readline())]
        started = perf_counter() - start
        lines += [json.loads(line) for line in process.stdout]
    answers: dict[str, dict[int, dict[str, Any]]] = {}
    for (model, tokens), found in zip(asks, lines, strict=True):
        answers.setdefault(model.name, {})[tokens] = found
    return Run(version=loaded["version"], start_seconds=started, answers=answers)


def row(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def print_models(models: Sequence[Model], verdicts: dict[str, dict[str, Verdict]]) -> None:
    """One row a model, one column a planner."""
    print(row(["model", "MiB at 32k", *verdicts]))
    print(row(["---"] * (len(verdicts) + 2)))
    for model in models:
        size = f"{model.bytes[TOKENS[-1]] / 2**20:,.1f}"
        print(row([model.name, size, *(str(each[model.name]) for each in verdicts.values())]))
    print()


def print_counts(models: Sequence[Model], verdicts: dict[str, dict[str, Verdict]], runs: dict[str, Run]) -> None:
    """One row a planner: how often it is right, by what factor wrong, and how long it takes."""
    heads = [
        "planner",
        "right",
        "no state",
        "no indexer",
        "wrong",
        "factors",
        "refused",
        "crashed",
        "ms/model",
        "start s",
    ]
    print(row(heads))
    print(row(["---"] * len(heads)))
    for planner, each in verdicts.items():
        count = Counter(verdict.kind for verdict in each.values())
        wrong = sorted(verdict.factor for verdict in each.values() if verdict.kind == "wrong")
        factors = f"{wrong[0]:.3g}–{wrong[-1]:.3g}" if wrong else ""
        kinds = (count[kind] for kind in ("right", "no state", "no indexer", "wrong"))
        time = runs[planner]
        cells = [f"{planner} {time.version}", *kinds, factors, count["refused"], count["crashed"]]
        print(row([*cells, f"{time.milliseconds:.2f}", f"{time.start_seconds:.2f}"]))
    print()
    totals = Counter(memory_kind(model.spec) for model in models)
    print(row(["right, by memory", *(f"{kind} ({number})" for kind, number in totals.most_common())]))
    print(row(["---"] * (len(totals) + 1)))
    for planner, each in verdicts.items():
        count = Counter(memory_kind(model.spec) for model in models if each[model.name].kind == "right")
        print(row([planner, *(count[kind] for kind, _ in totals.most_common())]))
    print()


def install() -> None:
    """Make the environments that are missing."""
    for planner, number in PLANNERS.items():
        if (PEERS / planner / ".complete").exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", PEERS / planner], check=True)
        python = PEERS / planner / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"{planner}=={number}"], check=True)
        (PEERS / planner / ".complete").touch()


def main() -> None:
    """Print both tables as Markdown; the reasons of refusals and crashes go to ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="make the environments, and stop")
    parser.add_argument("--only", action="append", metavar="PLANNER", help="ask this one; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="each answer, with the reason of each refusal")
    options = parser.parse_args()
    if options.install:
        install()
        return
    planners = [OURS, *(name for name in PLANNERS if not options.only or name in options.only)]
    details: dict[str, Any] = {}
    for title, models in (("verified models", verified()), ("distinct whole configurations", published())):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for model in models:
                # A folder named as on the hub: some planners read the name too.
                (root / model.hub).mkdir(parents=True, exist_ok=True)
                (root / model.hub / "config.json").write_bytes(model.config.read_bytes())
            runs = {planner: run(planner, models, root) for planner in planners}
        verdicts = {
            planner: {model.name: judge(model, done.answers[model.name]) for model in models}
            for planner, done in runs.items()
        }
        print(f"### {len(models)} {title}\n")
        print_counts(models, verdicts, runs)
        if title.startswith("verified"):
            print_models(models, verdicts)
        details[title] = {
            planner: {model.name: {"verdict": str(each[model.name]), "why": each[model.name].why} for model in models}
            for planner, each in verdicts.items()
        }
    if options.json:
        options.json.write_text(json.dumps(details, indent=1))


if __name__ == "__main__":
    main()
