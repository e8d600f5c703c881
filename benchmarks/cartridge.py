"""What a cartridge is worth and costs: fidelity against pruning at the same length, and the speed of its training.

    python benchmarks/cartridge.py fidelity --out varde.cartridge
    python benchmarks/cartridge.py fidelity --document tarn --out tarn.cartridge
    python benchmarks/cartridge.py together varde.cartridge tarn.cartridge
    python benchmarks/cartridge.py speed

``fidelity`` trains a cartridge of a short history (``cartridge_data/varde.txt``, or ``tarn.txt``) an eighth as long as
it, as ``kvist cartridge train`` does where nothing else is said, and asks 24 questions that are no part of the
training: divergence of the answers from those behind the whole text, as trained and in int8/int4, beside H2O, SnapKV,
StreamingLLM and truncation at the same length, all of them before the question is known. The questions were written by
hand beside the text.

``together`` asks the questions about each text behind its own cartridge alone, with the other behind it, with the other
before it, and behind the other alone.

``speed`` takes steps of training on one batch, in kvist and in a plain loop over transformers with its cache as the
parameters; weights are random there, which costs the same.
"""

import argparse
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvist.cartridges.distillation import Targets, divergence
from kvist.cartridges.evaluation import Question, evaluate, read_questions
from kvist.cartridges.make import Study, make
from kvist.cartridges.self_study import Item, Writer
from kvist.cartridges.student import Student
from kvist.cartridges.training import Lesson, Progress, Settings, Training, batch_of
from kvist.engine.engine import Engine
from kvist.engine.loading import with_weights
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import load

DATA = Path(__file__).parent / "cartridge_data"
MODEL = "smollm2-135m"


def fidelity(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if not out.exists():
        began, used = time.monotonic(), time.process_time()
        settings = Settings(steps=args.steps, rate=args.rate, batch_tokens=args.batch, seed=args.seed)

        def told(stage: str, done: float, progress: Progress | None = None) -> None:
            if progress is not None and progress.step % 10 == 0:
                print(f"step {progress.step}: held out {progress.held_out:.3f}, {time.monotonic() - began:.0f} s")

        study = Study(tokens=args.tokens, items=args.items)
        resume = out.with_name(f"{out.name}.checkpoint").exists()
        make(
            ModelSpec.read(MODEL),
            DATA / f"{args.document}.txt",
            study,
            settings,
            out,
            dtype="bf16",
            resume=resume,
            told=told,
        )
        print(f"trained in {time.monotonic() - began:.0f} s, {time.process_time() - used:.0f} s of processors")
    cartridge = load(out)
    engine = Engine(MODEL, dtype="bf16", cartridges={"it": cartridge})
    cartridges = {"cartridge": (engine, engine.shelf.named("it"))}
    for key, value in (("int8", "int8"), ("int8", "int4")):
        stored = Engine(
            engine.spec, dtype="bf16", format=CacheFormat(key=key, value=value), cartridges={"it": cartridge}
        )
        cartridges[f"cartridge {key}/{value}"] = stored, stored.shelf.named("it")
    document, questions = asked_about(args.document, engine)
    rows = evaluate(engine, document, questions, cartridges, tokens=cartridge.tokens)
    print(f"{len(questions)} questions, {rows[0].answered} tokens of answers; {cartridge.manifest.steps} steps")
    for row in rows:
        print(f"{row.memory:22} {row.tokens:6,} {row.kl:8.4f} {row.top1_agreement:7.1%} {row.likelihood:8.4f}")
    by_name = {row.memory: row for row in rows}
    print(f"of H2O's divergence: {by_name['cartridge'].kl / by_name['h2o'].kl:.2f}")
    print(json.dumps([row.to_dict() for row in rows]))


def asked_about(name: str, engine: Engine) -> tuple[list[int], list[Question]]:
    """A text's tokens, and the questions about it."""
    document = engine.tokenizer.encode((DATA / f"{name}.txt").read_text())
    return document, read_questions(DATA / f"{name}.json", Writer(engine.tokenizer))


def together(args: argparse.Namespace) -> None:
    files = {Path(load(Path(file)).manifest.document).stem: load(Path(file)) for file in args.files}
    engine = Engine(MODEL, dtype="bf16", cartridges=files)
    for name in files:
        (other,) = files.keys() - {name}
        lists = ([name], [name, other], [other, name], [other])
        held = {" + ".join(names): (engine, engine.shelf.hold(names)) for names in lists}
        document, questions = asked_about(name, engine)
        print(f"questions about {name}")
        for row in evaluate(engine, document, questions, held, tokens=files[name].tokens, against=("truncated",)):
            print(f"{row.memory:22} {row.tokens:6,} {row.kl:8.4f} {row.top1_agreement:7.1%} {row.likelihood:8.4f}")
        for _, each in held.values():
            engine.shelf.let_go(each)


def speed(args: argparse.Namespace) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator().manual_seed(0)
    length, count = 80, args.batch // 80
    items = []
    for _ in range(count):
        tokens = torch.randint(3, 40_000, (length,), generator=generator).tolist()
        items.append(Item(kind="speed", chunk=0, tokens=tuple(tokens), learnt=30))
    student = Student(with_weights(ModelSpec.read(MODEL)), "bf16")
    vocab = student.decoder.vocab
    targets = Targets.of(torch.randn(length - 30, vocab, generator=generator))
    lessons = [Lesson(item=item, targets=targets) for item in items]
    segments = student.read(list(range(100, 100 + args.tokens)))
    settings = Settings(steps=10**6, batch_tokens=args.batch)
    training = Training(student, segments, lessons, lessons[:1], settings)
    ours = _timed(lambda: training.advance(range(count)), args.repeats)
    theirs = _timed(_plain_loop(lessons, args.tokens, student), args.repeats)
    learnt = count * (length - 1)
    for name, (seconds, used) in (("kvist", ours), ("transformers", theirs)):
        print(f"{name:13} {seconds:6.2f} s a step, {learnt / seconds:6.0f} tokens/s; {used:6.2f} s of processors")
    print(f"kvist takes {ours[1] / theirs[1]:.2f} of the time; {count} items of {length} tokens behind {args.tokens}")


def _plain_loop(lessons: list[Lesson], tokens: int, student: Student) -> Callable[[], float]:
    """One step of the same training over transformers."""
    import transformers

    spec = ModelSpec.read(MODEL)
    known = transformers.LlamaConfig(**{key: value for key, value in spec.config.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(known).bfloat16().eval().requires_grad_(False)
    shape = 1, known.num_key_value_heads, tokens, known.hidden_size // known.num_attention_heads
    sides = [torch.randn(shape).requires_grad_() for _ in range(2 * known.num_hidden_layers)]
    optimizer = torch.optim.Adam(sides, lr=5e-3)
    batch = batch_of([lesson.item for lesson in lessons])
    ids = torch.cat([lesson.targets.ids for lesson in lessons])
    logs = torch.cat([lesson.targets.logs for lesson in lessons])
    # Renamed in transformers 5.
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"

    def step() -> float:
        optimizer.zero_grad()
        cache = transformers.DynamicCache(config=known)
        for layer in range(known.num_hidden_layers):
            parts = [side.bfloat16().expand(len(batch.tokens), -1, -1, -1) for side in sides[2 * layer : 2 * layer + 2]]
            cache.update(*parts, layer)
        hidden = model.model(batch.tokens, **{name: cache}).last_hidden_state.flatten(0, 1)
        loss = divergence(model.lm_head(hidden[batch.rows]).float(), Targets(ids=ids, logs=logs))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _timed(step: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Seconds, and seconds of processors, of the shortest of some steps: the latter tells more beside other work."""
    step()
    walls, used = [], []
    for _ in range(repeats):
        began, before = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - began)
        used.append(time.process_time() - before)
    return min(walls), min(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    command = parts.add_parser("fidelity")
    command.add_argument("--out", default="varde.cartridge")
    command.add_argument("--tokens", type=int, default=128)
    command.add_argument("--document", choices=["varde", "tarn"], default="varde")
    command.add_argument("--steps", type=int, default=Settings.steps)
    command.add_argument("--rate", type=float, default=Settings.rate)
    command.add_argument("--batch", type=int, default=Settings.batch_tokens)
    command.add_argument("--items", type=int, default=480)
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=fidelity)
    command = parts.add_parser("together")
    command.add_argument("files", nargs=2, metavar="FILE", help="cartridges of both texts")
    command.set_defaults(run=together)
    command = parts.add_parser("speed")
    command.add_argument("--tokens", type=int, default=128)
    command.add_argument("--batch", type=int, default=Settings.batch_tokens)
    command.add_argument("--repeats", type=int, default=3)
    command.set_defaults(run=speed)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
