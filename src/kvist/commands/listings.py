"""``kvist formats`` and ``kvist gpus``: what answers to a name."""

import argparse
from typing import Any

from kvist.commands.options import add_command, add_json, print_json


def add_formats(commands: Any) -> None:
    """Add ``kvist formats``."""
    command = add_command(
        commands,
        "formats",
        run_formats,
        usage="kvist formats [options]",
        help="the codecs in which keys and values are stored",
        description="The codecs in which keys and values are stored, their bytes, and what storing so\n"
        "does to answers, as it was measured.",
        epilog="example:\n  kvist formats",
    )
    add_json(command)


def add_gpus(commands: Any) -> None:
    """Add ``kvist gpus``."""
    command = add_command(
        commands,
        "gpus",
        run_gpus,
        usage="kvist gpus [WORD ...] [options]",
        help="the accelerators that plans know, with their sources",
        description="Accelerators with their memory, bandwidth and rates: all, or those with every\n"
        "WORD in their name, vendor or class.",
        epilog="example:\n  kvist gpus nvidia datacenter",
    )
    command.add_argument("words", nargs="*", metavar="WORD", help="part of a name, a vendor or a class")
    command.add_argument("--sources", action="store_true", help="who says each number")
    add_json(command)


def run_formats(args: argparse.Namespace) -> int:
    """``kvist formats``."""
    from kvist.report.listings import fidelity_rows, format_rows, print_formats

    return print_json({"rows": format_rows(), "fidelity": fidelity_rows()}) if args.json else print_formats()


def run_gpus(args: argparse.Namespace) -> int:
    """``kvist gpus``."""
    from kvist.hardware import accelerators_with, sources

    found = accelerators_with(args.words)
    if args.json:
        return print_json({"rows": [each.to_dict() for each in found], "sources": sources()})
    from kvist.report.gpu_tables import print_gpus

    return print_gpus(found, with_sources=args.sources)
