"""``kvist compare``: every way to shrink the cache, on a user's own model and text."""

import argparse
from typing import TYPE_CHECKING, Any

from kvist import cli_values as values
from kvist.commands.options import (
    MODEL_HELP,
    add_cartridges,
    add_command,
    add_dtype,
    add_json,
    check_place,
    print_json,
    require_cartridge,
)
from kvist.commands.progress import Bar

if TYPE_CHECKING:
    from kvist.comparison.settings import Setting


def add_compare(commands: Any) -> None:
    """Add ``kvist compare``."""
    command = add_command(
        commands,
        "compare",
        run_compare,
        usage="kvist compare [MODEL] --text FILE [options]",
        help="every way to shrink the cache, on your own model and text",
        description="Hold formats and pruning against the full cache, on your own model and text:\n"
        "memory, fidelity, facts that are found again, and speed. Without --format and\n"
        "--evict: int8 and int4 pairs with rotation and without, and each pruning method\n"
        "at a half and a quarter. With --cartridge or --questions the whole text is read, and\n"
        "the answers to questions about it are compared.",
        epilog="example:\n  kvist compare smollm2-135m --text book.txt --html comparison.html",
    )
    command.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP} (smollm2-135m)")
    command.add_argument("--text", required=True, metavar="FILE", help="of yours; several thousand tokens")
    command.add_argument(
        "--format",
        action="append",
        type=values.compared_format,
        metavar="K/V",
        help="to compare, such as int8/int4; +rotate turns both, +tail=32 keeps a tail as computed; repeatable",
    )
    command.add_argument("--all-formats", action="store_true", help="compare every pair of codecs")
    command.add_argument(
        "--evict",
        action="append",
        type=values.pruning,
        metavar="METHOD",
        help="to compare, such as h2o:0.5; repeatable",
    )
    add_cartridges(command, help="to compare, trained on the text; repeatable")
    command.add_argument(
        "--cartridge-format",
        action="append",
        type=values.cartridge_format,
        metavar="K/V",
        help="compare each --cartridge stored so besides, under the full cache, such as int8/int4; repeatable",
    )
    command.add_argument("--cross", action="store_true", help="each --format with each --evict and --cartridge besides")
    command.add_argument(
        "--questions",
        metavar="FILE",
        help="about the text: JSON, a list of [question, answer], or a line each with answers to choose from: "
        '{"question": text, "choices": [text, ...], "answer": index of the right one} (made of sentences)',
    )
    command.add_argument(
        "--context", type=values.tokens(256, 2**20), default=1024, metavar="N", help="tokens of a piece (1k)"
    )
    command.add_argument(
        "--following", type=values.tokens(64, 2**16), default=256, metavar="N", help="tokens behind it (256)"
    )
    command.add_argument(
        "--pieces", type=values.whole(1, 10**4), default=4, metavar="N", help="of the text, at most (4)"
    )
    command.add_argument(
        "--seed", type=values.whole(0, 2**63 - 1), default=0, metavar="N", help="of the facts that are hidden (0)"
    )
    add_dtype(command, "f32", "bf16", "f16")
    command.add_argument("--journal", metavar="FILE", help="keep rows there, and go on from those that it has")
    command.add_argument("--html", metavar="FILE", help="write a page with the front of fidelity against memory")
    command.add_argument("--plot", metavar="FILE", help="draw it as .png or .svg")
    add_json(command)


def run_compare(args: argparse.Namespace) -> int:
    """``kvist compare``."""
    from pathlib import Path

    from kvist.errors import BadFile, InputError

    taken = [args.text]
    for path in (args.html, args.plot, args.journal):
        if path is not None:
            check_place(path, *taken)
            taken.append(path)
    if args.plot is not None:
        from kvist.report.simulation_plot import check_plot

        check_plot(args.plot)
    if args.cross and not ((args.evict or args.cartridge) and (args.format or args.all_formats)):
        raise InputError(
            "cross: give the formats and the methods or cartridges to put together: --format, and --evict or "
            "--cartridge",
            key="cross",
        )
    try:
        text = Path(args.text).read_bytes().decode("utf-8")
    except OSError as error:
        raise BadFile(f"{args.text}: cannot be read: {error.strerror or error}", key="text") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"{args.text}: is no text in UTF-8 (byte {error.start:,})", key="text") from error

    from kvist.comparison.compare import compare
    from kvist.engine.loading import DEFAULT_MODEL
    from kvist.spec.model import ModelSpec
    from kvist.store.cartridge_file import load

    named = values.by_name(args.cartridge or ())
    cartridges = {name: load(Path(file)) for name, file in named.items()}
    settings = _settings(args)
    labels: dict[str, int] = {}
    with Bar() as bar:

        def told(label: str, share: float) -> None:
            done = labels.setdefault(label, len(labels))
            bar.show("compare", (done + share) / (len(settings) + 1), label)

        found = compare(
            ModelSpec.read(args.model or DEFAULT_MODEL),
            text,
            settings,
            dtype=args.dtype,
            context=args.context,
            following=args.following,
            pieces=args.pieces,
            seed=args.seed,
            lenient=not (args.format or args.evict),
            cartridges=cartridges,
            questions=None if args.questions is None else Path(args.questions),
            journal=None if args.journal is None else Path(args.journal),
            told=told,
        )
    content = found.to_dict()
    if args.html is not None:
        from kvist.report.comparison_page import write_page

        write_page(content, args.html)
    if args.plot is not None:
        from kvist.report.comparison_plot import plot_comparison

        plot_comparison(content, args.plot)
    if args.json:
        return print_json(content)
    from kvist.report.comparison_tables import print_comparison

    print_comparison(content)
    return 0


def _settings(args: argparse.Namespace) -> list["Setting"]:
    from kvist.comparison.settings import Setting, every_format, together, usual

    names = [name for name, _ in args.cartridge or ()]
    require_cartridge(args)
    stored = (None, *(args.cartridge_format or ()))
    trained = [Setting(cartridge=name, cartridge_format=fmt) for name in names for fmt in stored]
    if not (args.format or args.all_formats or args.evict):
        return [*usual(), *trained]
    formats = [Setting(format=fmt) for fmt in args.format or ()]
    if args.all_formats:
        formats += every_format()
    prunings = [pruning for pruning in args.evict or () if pruning is not None]
    both = together([each.format for each in formats if each.format], prunings, names) if args.cross else []
    return [*formats, *(Setting(pruning=pruning) for pruning in prunings), *trained, *both]
