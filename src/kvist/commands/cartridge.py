"""``kvist cartridge``: a document as a short trained cache."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

from kvist import cli_values as values
from kvist.commands.options import MODEL_HELP, add_command, add_dtype, add_format, add_json, check_place, print_json
from kvist.commands.progress import Bar

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.cartridges.training import Progress


def add_cartridge(commands: Any) -> None:
    """Add ``kvist cartridge`` and what it does."""
    command = commands.add_parser(
        "cartridge",
        usage="kvist cartridge COMMAND [options]",
        help="train a document into a short cache, and look at such caches",
        description="Train a document into a short cache, and look at such caches. A cartridge stands\n"
        "for its document in `kvist generate` and `kvist serve`: --cartridge NAME=FILE.",
        epilog="example:\n  kvist cartridge train smollm2-135m manual.txt --tokens 128 --out manual.cartridge",
    )
    parts = command.add_subparsers(dest="part", metavar="COMMAND", required=True, prog="kvist cartridge")
    for add in (_add_train, _add_info, _add_eval, _add_list):
        add(parts)


def _add_train(parts: Any) -> None:
    command = add_command(
        parts,
        "train",
        run_train,
        usage="kvist cartridge train MODEL DOCUMENT --tokens P --out FILE [options]",
        help="train one",
        description="Train a cartridge: keys and values of P tokens, which begin as those of the\n"
        "document's first and learn to answer as the model does that reads all of it.",
        epilog="example:\n  kvist cartridge train smollm2-135m manual.txt --tokens 128 --out manual.cartridge",
    )
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("document", metavar="DOCUMENT", help="a file of text")
    command.add_argument(
        "--tokens", type=values.tokens(1, 2**20), required=True, metavar="P", help="length; rounded up to blocks of 16"
    )
    command.add_argument("-o", "--out", required=True, metavar="FILE", help="where to")
    length = command.add_mutually_exclusive_group()
    length.add_argument("--steps", type=values.whole(1, 10**7), metavar="N", help="of training (200)")
    length.add_argument("--minutes", type=values.number(0, 10**5, above=True), metavar="X", help="of training instead")
    command.add_argument("--items", type=values.whole(20, 10**6), default=480, metavar="N", help="to learn from (480)")
    command.add_argument(
        "--written", type=values.number(0, 1), default=0.4, metavar="X", help="share that the model writes (0.4)"
    )
    command.add_argument(
        "--chunk", type=values.tokens(16, 2**20), default=2048, metavar="N", help="tokens read before an item (2k)"
    )
    command.add_argument(
        "--rate", type=values.number(0, 10, above=True), default=2e-2, metavar="X", help="of Adam, at most (0.02)"
    )
    command.add_argument(
        "--batch", type=values.tokens(16, 2**20), default=512, metavar="N", help="tokens of a step (512)"
    )
    command.add_argument(
        "--frozen", type=values.whole(0, 2**20), default=1, metavar="N", help="leading tokens that stay (1)"
    )
    command.add_argument(
        "--seed", type=values.whole(0, 2**63 - 1), default=0, metavar="N", help="of what is random (0)"
    )
    add_dtype(command, "f32", "bf16")
    command.add_argument("--memory", type=values.size, metavar="SIZE", help="for the teacher's cache (512MiB)")
    command.add_argument("--resume", action="store_true", help="go on from FILE.checkpoint")
    add_json(command)


def _add_info(parts: Any) -> None:
    command = add_command(
        parts,
        "info",
        run_info,
        usage="kvist cartridge info FILE [options]",
        help="what one was made of, and for which model",
        description="What a cartridge was made of, and for which model.",
        epilog="example:\n  kvist cartridge info manual.cartridge",
    )
    command.add_argument("file", metavar="FILE", help="a cartridge")
    add_json(command)


def _add_eval(parts: Any) -> None:
    command = add_command(
        parts,
        "eval",
        run_eval,
        usage="kvist cartridge eval FILE DOCUMENT [options]",
        help="hold one against the whole document, and against shorter caches of it",
        description="Ask questions behind a cartridge, and hold the answers against those of the model\n"
        "that reads the whole document; beside it the document cut to as many tokens, and\n"
        "pruned to as many before the questions were known.",
        epilog="example:\n  kvist cartridge eval manual.cartridge manual.txt --questions manual.json",
    )
    command.add_argument("file", metavar="FILE", help="a cartridge")
    command.add_argument("document", metavar="DOCUMENT", help="of which it was made")
    command.add_argument("--model", metavar="MODEL", help="for which it was made (as it says)")
    command.add_argument("--questions", metavar="FILE", help="JSON, a list of [question, answer] (made of sentences)")
    command.add_argument("--count", type=values.whole(1, 10**5), default=24, metavar="N", help="questions made (24)")
    add_dtype(command, "f32", "bf16")
    command.add_argument("--memory", type=values.size, metavar="SIZE", help="for each cache (512MiB)")
    add_format(command, default=None)
    add_json(command)


def _add_list(parts: Any) -> None:
    command = add_command(
        parts,
        "list",
        run_list,
        usage="kvist cartridge list [DIRECTORY] [options]",
        help="the cartridges in a directory",
        description="The cartridges in a directory; other files are passed over.",
        epilog="example:\n  kvist cartridge list cartridges/",
    )
    command.add_argument("directory", nargs="?", default=".", metavar="DIRECTORY", help="where to look (here)")
    add_json(command)


def run_train(args: argparse.Namespace) -> int:
    """``kvist cartridge train``."""
    check_place(args.out, args.document)
    check_place(f"{args.out}.checkpoint", args.document)
    from pathlib import Path

    from kvist.cartridges.make import BLOCK, Study, make
    from kvist.cartridges.training import Settings
    from kvist.spec.model import ModelSpec

    study = Study(tokens=args.tokens, items=args.items, written=args.written, chunk=args.chunk)
    settings = Settings(
        steps=args.steps if args.steps or args.minutes else 200,
        minutes=args.minutes,
        rate=args.rate,
        batch_tokens=args.batch,
        frozen=args.frozen,
        seed=args.seed,
    )
    if study.blocks_of_tokens != args.tokens:
        _note(f"{args.tokens} tokens are rounded up to {study.blocks_of_tokens}, whole blocks of {BLOCK}")
    more = {} if args.memory is None else {"memory": args.memory}
    with _resumable(Path(f"{args.out}.checkpoint")), Bar() as bar:
        cartridge = make(
            ModelSpec.read(args.model),
            Path(args.document),
            study,
            settings,
            Path(args.out),
            dtype=args.dtype,
            resume=args.resume,
            told=_shown(bar),
            **more,
        )
    content = {"file": args.out, "digest": cartridge.digest, "bytes": cartridge.bytes, **cartridge.manifest.to_dict()}
    if args.json:
        return print_json(content)
    losses = cartridge.manifest.losses
    print(
        f"{args.out}: {cartridge.tokens} tokens for {cartridge.manifest.document_tokens:,}; divergence on held-out "
        f"items {losses['before']:.3f} before training, {losses['after']:.3f} after {cartridge.manifest.steps} steps"
    )
    return 0


def run_info(args: argparse.Namespace) -> int:
    """``kvist cartridge info``."""
    from pathlib import Path

    from kvist.store.cartridge_file import load

    cartridge = load(Path(args.file))
    manifest = cartridge.manifest
    if args.json:
        return print_json(
            {"file": args.file, "digest": cartridge.digest, "bytes": cartridge.bytes, **manifest.to_dict()}
        )
    from kvist.report.tables import print_facts
    from kvist.units import counted, format_size

    losses = manifest.losses
    print_facts(
        [
            ("document", f"{manifest.document}, {counted(manifest.document_tokens, 'token')}"),
            ("document sha256", manifest.document_digest),
            ("model", manifest.model),
            ("model digest", manifest.model_digest),
            ("cartridge", f"{counted(manifest.tokens, 'token')} at position {manifest.position}, of which "
                          f"{manifest.frozen} frozen"),
            ("size", f"{format_size(cartridge.bytes)} in {manifest.codec}, {len(cartridge.layers)} layers"),
            ("training", f"{counted(manifest.steps, 'step')}, seed {manifest.seed}, kvist {manifest.kvist}"),
            ("held-out items", f"divergence {losses['before']:.3f} before, {losses['after']:.3f} after"
                               if {"before", "after"} <= losses.keys() else "not measured"),
            ("digest", cartridge.digest),
        ]
    )  # fmt: skip
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """``kvist cartridge eval``."""
    from hashlib import sha256
    from pathlib import Path

    from kvist.cartridges.evaluation import evaluate, made_questions, read_questions
    from kvist.cartridges.make import read_document
    from kvist.cartridges.self_study import Writer
    from kvist.engine.engine import Engine
    from kvist.engine.loading import best_dtype
    from kvist.errors import InputError
    from kvist.spec.model import ModelSpec
    from kvist.store.cartridge_file import load

    cartridge = load(Path(args.file))
    text = read_document(Path(args.document))
    if sha256(text.encode()).hexdigest() != cartridge.manifest.document_digest:
        raise InputError(
            f"document: {args.document} is not the {cartridge.manifest.document} of which {args.file} was made; name "
            f"that",
            key="document",
        )
    spec = ModelSpec.read(args.model or cartridge.manifest.model)
    dtype = args.dtype or best_dtype(spec)
    settings: dict[str, Any] = {"dtype": dtype} | ({} if args.memory is None else {"memory": args.memory})
    name = "cartridge"
    engine = Engine(spec, cartridges={name: cartridge}, **settings)
    cartridges = {name: (engine, engine.shelf.named(name))}
    if values.format_said(args):
        stored = Engine(engine.spec, format=values.cache_format(args, dtype), cartridges={name: cartridge}, **settings)
        cartridges[f"{name} in {stored.format}"] = stored, stored.shelf.named(name)
    writer = Writer(engine.tokenizer)
    questions = (
        made_questions(text, writer, args.count)
        if args.questions is None
        else read_questions(Path(args.questions), writer)
    )
    with Bar() as bar:
        found = evaluate(
            engine,
            engine.tokenizer.encode(text, parse_special=False),
            questions,
            cartridges,
            tokens=cartridge.tokens,
            told=lambda done: bar.show("questions", done),
        )
    if args.json:
        return print_json({"file": args.file, "questions": len(questions), "rows": [row.to_dict() for row in found]})
    from kvist.report.tables import Column, print_table

    titles = ("tokens", "divergence", "agreement", "likelihood")
    columns = (Column(title="memory"), *(Column(title=title, number=True) for title in titles))
    rows = [
        (row.memory, f"{row.tokens:,}", f"{row.kl:.3f}", f"{row.top1_agreement:.1%}", f"{row.likelihood:.3f}")
        for row in found
    ]
    print_table(columns, rows, title=f"{len(questions)} questions about {cartridge.manifest.document}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """``kvist cartridge list``."""
    from pathlib import Path

    from kvist.errors import BadFile, InputError
    from kvist.store.cartridge_file import read_manifest

    directory = Path(args.directory)
    try:
        paths = sorted(directory.iterdir())
    except (NotADirectoryError, FileNotFoundError) as error:
        raise InputError(f"{directory}: no directory; name one with cartridges", key="directory") from error
    except OSError as error:
        raise InputError(f"{args.directory[:60]}: cannot be read: {error.strerror}", key="directory") from error
    found = []
    for path in paths:
        if path.is_file() and not path.name.endswith(".checkpoint"):
            try:
                found.append((path, read_manifest(path)))
            except BadFile:
                continue
    if args.json:
        return print_json({"cartridges": [{"file": str(path), **manifest.to_dict()} for path, manifest in found]})
    from kvist.report.tables import Column, print_table

    columns = (
        Column(title="file"),
        Column(title="model"),
        Column(title="document"),
        Column(title="tokens", number=True),
        Column(title="for", number=True),
        Column(title="divergence", number=True),
    )
    rows = [
        (
            path.name,
            told.model,
            told.document,
            f"{told.tokens:,}",
            f"{told.document_tokens:,}",
            f"{told.losses['after']:.3f}" if "after" in told.losses else "–",
        )
        for path, told in found
    ]
    print_table(columns, rows)
    return 0


@contextmanager
def _resumable(checkpoint: "Path") -> Iterator[None]:
    """Within, SIGTERM interrupts as Ctrl-C does, so that what was learnt is kept; where, is told."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop) if current_thread() is main_thread() else None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if checkpoint.exists():
            _note(f"interrupted; {checkpoint} has what was learnt: go on with --resume")
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _shown(bar: Bar) -> Callable[..., None]:
    """What training tells, on a bar."""

    def show(stage: str, done: float, progress: "Progress | None" = None) -> None:
        text = None
        if progress is not None and progress.loss is not None:
            speed = progress.tokens / max(progress.seconds, 1e-3)
            text = f"step {progress.step}: {progress.loss:.3f}, held out {progress.held_out:.3f}, {speed:.0f} tokens/s"
        bar.show(stage, done, text)

    return show


def _note(text: str) -> None:
    print(f"kvist: {text}", file=sys.stderr)
