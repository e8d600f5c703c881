"""``kvist check``: whether a plan and an engine's start-up log agree."""

import argparse
from typing import Any

from kvist.commands.options import MODEL_HELP, add_assume, add_command, add_json, add_settings, print_json

_DISAGREES = 3


def add_check(commands: Any) -> None:
    """Add ``kvist check``."""
    command = add_command(
        commands,
        "check",
        run_check,
        usage="kvist check LOG --model MODEL [options]",
        help="whether an engine's start-up log agrees with the plan",
        description="Finds the cache's figures in a start-up log of vLLM, SGLang or llama.cpp and\n"
        "holds them against the plan: exit code 0 where they agree, 3 where they do not,\n"
        "with the known effects that would explain it.",
        epilog="example:\n  kvist check vllm.log --model llama-3-8b",
    )
    command.add_argument("log", metavar="LOG", help="start-up log, gzip or not; - for standard input")
    command.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    add_settings(command, help="setting of the engine that the log does not say; repeatable")
    add_assume(command)
    add_json(command)


def run_check(args: argparse.Namespace) -> int:
    """``kvist check``."""
    from kvist.planning.log_check import check_log, open_log
    from kvist.spec.model import ModelSpec

    spec = ModelSpec.read(args.model, assume=dict(args.assume or ()))
    with open_log(args.log) as stream:
        answer = check_log(stream, spec, source=args.log, settings=dict(args.set or ()))
    if args.json:
        print_json(answer.to_dict())
    else:
        from kvist.report.check_tables import print_check

        print_check(answer)
    return 0 if answer.agrees else _DISAGREES
