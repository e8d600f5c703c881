"""What several commands have in common: how they are added, options of one meaning, and JSON."""

import argparse
from collections.abc import Callable
from typing import Any

from kvist import cli_values as values
from kvist.errors import InputError

BLOCK = values.tokens(most=2**20)
MODEL_HELP = "config.json, model directory, .gguf file or known name"


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], **options: Any
) -> argparse.ArgumentParser:
    """Add a command that ``run`` carries out."""
    command: argparse.ArgumentParser = commands.add_parser(name, **options)
    command.set_defaults(run=run)
    return command


def add_format(command: argparse.ArgumentParser, *, default: str | None, layers: bool = True) -> None:
    """Add how keys, values and states are stored; without ``layers`` what can be said of models of any length."""
    shown = f" ({default})" if default else ""
    command.add_argument(
        "--key",
        type=values.key_codec,
        default=default,
        metavar="CODEC",
        help=f"how keys are stored{shown}: kvist formats",
    )
    command.add_argument(
        "--value", type=values.codec, default=default, metavar="CODEC", help=f"how values are stored{shown}"
    )
    if layers:
        command.add_argument(
            "--rotate", action="store_true", help="turn keys and values before they are stored in 8 bits or fewer"
        )
    command.add_argument(
        "--keep-layers",
        type=values.kept_layers,
        metavar="N",
        help=f"store the N first and last layers in {default or 'the type of computation'}; N=f32 in another",
    )
    if layers:
        command.add_argument(
            "--layer-format",
            type=values.layer_format,
            action="append",
            metavar="L=K/V",
            help="how layer L is stored, such as 0=bf16 or 7=int8/int4; repeatable",
        )
    if layers:
        command.add_argument(
            "--tail",
            type=values.whole(0, 1024),
            default=0,
            metavar="N",
            help=f"keep tokens in {default or 'the type of computation'} until N of them are sealed together, "
            "a multiple of 16 (0: each at once)",
        )
    command.add_argument(
        "--state",
        type=values.state_codec,
        metavar="CODEC",
        help="how recurrent states are stored (as the model says)",
    )


def add_dtype(command: argparse.ArgumentParser, *types: str) -> None:
    """Add ``--dtype``, one of ``types``."""
    command.add_argument("--dtype", choices=types, help="in which the network computes")


def add_cartridges(command: argparse.ArgumentParser, *, help: str) -> None:
    """Add ``--cartridge NAME=FILE``, which may be repeated."""
    command.add_argument("--cartridge", type=values.named_file, action="append", metavar="NAME=FILE", help=help)


def add_cartridge_format(command: argparse.ArgumentParser) -> None:
    """Add how cartridges are stored."""
    command.add_argument(
        "--cartridge-format",
        type=values.cartridge_format,
        metavar="K/V",
        help="how cartridges are stored, such as int8/int4, whatever the cache is stored in (as the cache)",
    )


def require_cartridge(args: argparse.Namespace) -> None:
    """Raise :class:`InputError` where a format of cartridges is given and none of them."""
    if args.cartridge_format and not args.cartridge:
        raise InputError(
            "cartridge_format: there is no cartridge to store so; name one with `cartridge`", key="cartridge_format"
        )


def add_settings(command: argparse.ArgumentParser, *, help: str) -> None:
    """Add ``--set KEY=VALUE``, settings of an engine."""
    command.add_argument("--set", type=values.assumption, action="append", metavar="KEY=VALUE", help=help)


def add_assume(command: argparse.ArgumentParser, *, help: str = "override a published key; repeatable") -> None:
    """Add ``--assume KEY=VALUE``, keys of a configuration."""
    command.add_argument("--assume", type=values.assumption, action="append", metavar="KEY=VALUE", help=help)


def add_machine(command: argparse.ArgumentParser, *, cache_memory: str, overhead: str) -> None:
    """Add the devices and their memory; ``cache_memory`` and ``overhead`` end what is said of these options."""
    command.add_argument("--gpu", metavar="NAME[xN]", help="device and how many, such as H100 or H100x8 (kvist gpus)")
    memory = command.add_mutually_exclusive_group()
    memory.add_argument(
        "--memory", type=values.size, metavar="SIZE", help="of each device, for weights, cache and overhead together"
    )
    memory.add_argument("--cache-memory", type=values.size, metavar="SIZE", help=cache_memory)
    command.add_argument(
        "--weights", type=values.weight_codec, metavar="CODEC", help="how weights are stored (as the model says)"
    )
    command.add_argument("--tp", type=values.whole(1, 1024), metavar="N", help="ranks that share each layer")
    command.add_argument("--pp", type=values.whole(1, 1024), metavar="N", help="stages that share the layers (1)")
    command.add_argument(
        "--overhead", type=values.size, metavar="SIZE", help=f"of each device, in place of the {overhead}"
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    command.add_argument("--json", action="store_true", help="one JSON object on standard output")


def print_json(content: dict[str, Any]) -> int:
    """Print one JSON object; return exit code 0."""
    import json

    print(json.dumps(content, indent=2))
    return 0


def check_place(path: str, *taken: str | None) -> None:
    """Tell before long work that what it makes has no place to go to.

    Args:
        path: of what is made.
        taken: files that are read, or made besides.

    Raises:
        InputError: ``path`` is a directory, lies in none or in one that is not to be written to, or is taken.
    """
    from pathlib import Path

    place = Path(path)
    try:
        if place.is_dir():
            raise InputError(f"{path}: cannot be written: is a directory; name a file in it")
        if not place.parent.is_dir():
            raise InputError(f"{path}: cannot be written: there is no directory {place.parent}; make it first")
        if any(other is not None and Path(other).resolve() == place.resolve() for other in taken):
            raise InputError(f"{path}: cannot be written: the call names this file twice; give another name")
    except OSError as error:
        shown = path if len(path) <= 60 else f"{path[:59]}…"
        raise InputError(f"{shown}: cannot be written: {error.strerror or error}") from error
