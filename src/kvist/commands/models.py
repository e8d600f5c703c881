"""``kvist models``: the gallery as a list, side by side, or as a page."""

import argparse
from typing import Any

from kvist import cli_values as values
from kvist.commands.options import add_assume, add_command, add_format, add_json, print_json


def add_models(commands: Any) -> None:
    """Add ``kvist models``."""
    command = add_command(
        commands,
        "models",
        run_models,
        usage="kvist models [WORD ...] [options]",
        help="published models by name, and what a token of each costs",
        description="Published models, and what a token of each costs: all, or those with every WORD\n"
        "in their name or as their kind of memory. With --compare models side by side;\n"
        "with --html a page of pictures.",
        epilog="example:\n  kvist models --compare llama-2-7b llama-3-8b gemma-3-27b deepseek-v3",
    )
    command.add_argument("words", nargs="*", metavar="WORD", help="part of a name, or a kind")
    command.add_argument("--kind", metavar="KIND", help="MHA, GQA, MQA, window, latent, compressed, hybrid or state")
    command.add_argument(
        "--sort", metavar="ORDER", help="name, released, append, retained, state, parameters or context (name)"
    )
    command.add_argument(
        "--compare", nargs="+", metavar="MODEL", help="set models side by side: names, files or directories"
    )
    add_assume(command, help="with --compare: each model once more with a published key overridden")
    command.add_argument(
        "--tokens",
        type=values.tokens(),
        action="append",
        metavar="N",
        help="length to compare at; repeatable (8k 32k 128k)",
    )
    add_format(command, default="bf16", layers=False)
    command.add_argument("--html", metavar="FILE", help="write a page with two pictures and all numbers")
    add_json(command)


def run_models(args: argparse.Namespace) -> int:
    """``kvist models``."""
    from kvist.planning.catalogue import LENGTHS, listings, storable

    fmt = values.cache_format(args)
    lengths = tuple(args.tokens or LENGTHS)
    _refuse_mixtures(args)
    compared = _compared(args)
    found = compared
    left_out: dict[str, str] = {}
    if not compared:
        found, left_out = storable(listings(args.words, kind=args.kind, sort=args.sort or "name"), fmt)
    if left_out and not found:
        from kvist.errors import InputError

        name, why = next(iter(left_out.items()))
        raise InputError(f"words: {name} cannot be stored in {fmt}: {why}", key="words")
    if args.html is not None:
        from kvist.report.model_page import write_page

        write_page(args.html, fmt, chosen=compared)
    if args.json:
        rows = [each.to_dict(fmt, lengths) for each in found]
        if compared:
            for row in rows:
                row["ratio_to_first"] = _ratios(row, rows[0])
        more = {"left_out": [{"name": name, "why": why} for name, why in left_out.items()]} if left_out else {}
        return print_json({"format": fmt.to_dict(), "rows": rows} | more)
    if args.html is not None:
        print(f"{args.html}: open it in a browser")
        return 0
    from kvist.report.model_tables import print_compared, print_models

    if compared:
        print_compared(compared, fmt, lengths)
    else:
        print_models(found, fmt, dated=args.sort == "released", left_out=left_out)
    return 0


def _refuse_mixtures(args: argparse.Namespace) -> None:
    from kvist.errors import InputError

    if args.compare and (args.words or args.kind or args.sort):
        raise InputError("compare: takes models by name; leave out WORD, --kind and --sort", key="compare")
    if args.html is not None and (args.words or args.kind or args.sort):
        raise InputError("html: the page has all models; leave out WORD, --kind and --sort", key="html")
    if args.tokens and not (args.compare or args.json):
        raise InputError("tokens: the list has no lengths; add --compare or --json", key="tokens")
    if args.assume and not args.compare:
        raise InputError("assume: overrides keys of the models that --compare names", key="assume")


def _compared(args: argparse.Namespace) -> Any:
    """The models of ``--compare``, each followed by itself with what ``--assume`` overrides."""
    from kvist.planning.catalogue import listed

    found = []
    for model in args.compare or ():
        found.append(listed(model))
        if args.assume:
            found.append(listed(model, assume=dict(args.assume)))
    return found


def _ratios(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """How many times the first; None where that is 0."""

    def ratio(size: float, of_first: float) -> float | None:
        return size / of_first if of_first else None

    return {
        "append": ratio(row["append_bytes_per_token"], first["append_bytes_per_token"]),
        "retained": ratio(row["retained_bytes_per_token"], first["retained_bytes_per_token"]),
        "sequence": {
            tokens: ratio(size, first["sequence_bytes"][tokens]) for tokens, size in row["sequence_bytes"].items()
        },
    }
