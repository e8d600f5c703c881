"""``kvist generate`` and ``kvist serve``: the commands that run the engine."""

import argparse
from typing import Any

from kvist import cli_values as values
from kvist.commands.options import (
    BLOCK,
    add_cartridge_format,
    add_cartridges,
    add_command,
    add_dtype,
    add_format,
    add_json,
    check_place,
    require_cartridge,
)
from kvist.errors import InputError


def add_generate(commands: Any) -> None:
    """Add ``kvist generate``."""
    command = add_command(
        commands,
        "generate",
        run_generate,
        usage="kvist generate [MODEL] PROMPT [options]",
        help="one answer, with the account of its memory",
        description="One answer in the terminal, with the account of its memory.",
        epilog='example:\n  kvist generate smollm2-135m "The capital of France is" --max-tokens 16',
    )
    command.add_argument("words", nargs="*", metavar="[MODEL] PROMPT", help="model (smollm2-135m) and prompt")
    command.add_argument("--max-tokens", type=values.tokens(), metavar="N", help="most tokens to generate")
    command.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    command.add_argument("--temperature", type=values.number(0, 100), metavar="X", help="0 takes the likeliest token")
    command.add_argument(
        "--top-p", type=values.number(0, 1, above=True), metavar="X", help="sample from this much probability"
    )
    command.add_argument(
        "--top-k", type=values.whole(-1), metavar="N", help="sample from this many tokens; 0 and -1: from all"
    )
    command.add_argument(
        "--min-p", type=values.number(0, 1), metavar="X", help="drop tokens less likely than X of the best"
    )
    command.add_argument("--seed", type=values.whole(-(2**63), 2**63 - 1), metavar="N", help="same seed, same answer")
    command.add_argument(
        "--stop", type=values.stop_text, action="append", metavar="TEXT", help="end before this text; repeatable"
    )
    command.add_argument(
        "--no-cache",
        action="store_true",
        help="answer again, computing every token anew at each step, for a minute at most: a table of what the cache "
        "saves",
    )
    command.add_argument("--plot", metavar="FILE", help="with --no-cache: a picture, .png or .svg (needs kvist[plot])")
    command.add_argument(
        "--cartridge",
        action="append",
        metavar="FILE",
        help="a trained cache that stands before the prompt; repeatable, one behind the other",
    )
    template = command.add_mutually_exclusive_group()
    template.add_argument("--chat", action="store_true", default=None, help="put the prompt in the chat template")
    template.add_argument("--raw", dest="chat", action="store_false", help="take the prompt as it is")
    _add_engine(command)
    add_json(command)


def add_serve(commands: Any) -> None:
    """Add ``kvist serve``."""
    command = add_command(
        commands,
        "serve",
        run_serve,
        usage="kvist serve [MODEL] [options]",
        help="an OpenAI-compatible server",
        description="An OpenAI-compatible server with a live picture of its cache.",
        epilog="example:\n  kvist serve smollm2-135m --port 8000 --memory 1GiB",
    )
    command.add_argument("model", nargs="?", metavar="MODEL", help="what to serve (smollm2-135m)")
    command.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="(127.0.0.1)")
    command.add_argument(
        "--port", type=values.whole(0, 65535), default=8000, metavar="N", help="(8000); 0: any that is free"
    )
    command.add_argument("--max-running", type=values.whole(1), metavar="N", help="requests that run at once")
    command.add_argument("--max-context", type=values.tokens(), metavar="N", help="longest sequence of a request")
    add_cartridges(command, help="a trained cache that requests may name; repeatable")
    command.add_argument("--api-key", metavar="KEY", help="what clients must send; or the variable KVIST_API_KEY")
    _add_engine(command)


def _add_engine(command: argparse.ArgumentParser) -> None:
    add_dtype(command, "f32", "bf16", "f16")
    command.add_argument(
        "--memory", type=values.size, metavar="SIZE", help="for the cache alone; the weights come on top (512MiB)"
    )
    add_format(command, default=None)
    add_cartridge_format(command)
    command.add_argument("--block", type=BLOCK, metavar="N", help="tokens of a block (16)")
    command.add_argument(
        "--evict",
        type=values.evict,
        metavar="METHOD:BUDGET",
        help="drop tokens of a prompt once it is computed, and give their memory back: h2o, h2o-sum, snapkv or "
        "streaming, which keep a share (h2o:0.5) or a number of tokens (snapkv:512, streaming:4+1020) (none)",
    )
    command.add_argument(
        "--tier",
        type=values.tier,
        action="append",
        metavar="NAME=SIZE",
        help="where blocks go that the cache has no room for, and come back from: host=4GiB, disk=20GiB"
        "[,write-through]; repeatable, nearest first",
    )
    command.add_argument(
        "--tier-dir",
        metavar="DIR",
        help="where the file of a tier on disk is put (tiers, in the user's cache directory)",
    )


def run_generate(args: argparse.Namespace) -> int:
    """``kvist generate``: ``args`` has the options by name, ``model`` (None: the default) and ``prompt``."""
    if args.plot is not None:
        if not args.no_cache:
            raise InputError("plot: draws what the cache saves; add `no_cache`", key="plot")
        from kvist.report.simulation_plot import check_plot

        check_place(args.plot)
        check_plot(args.plot)
    require_cartridge(args)
    from kvist.engine.commands import generate

    code: int = generate(args)
    return code


def run_serve(args: argparse.Namespace) -> int:
    """``kvist serve``: ``args`` has the options by name and ``model`` (None: the default)."""
    require_cartridge(args)
    from kvist.server.run import serve

    return serve(args)
