"""``kvist plan``: what a sequence costs, how many fit, and on which devices."""

import argparse
from typing import TYPE_CHECKING, Any

from kvist import cli_values as values
from kvist.commands.options import (
    BLOCK,
    MODEL_HELP,
    add_assume,
    add_cartridge_format,
    add_command,
    add_format,
    add_json,
    add_machine,
    add_settings,
    print_json,
)

if TYPE_CHECKING:
    from kvist.planning.plan import Plan


def add_plan(commands: Any) -> None:
    """Add ``kvist plan``."""
    command = add_command(
        commands,
        "plan",
        run_plan,
        usage="kvist plan MODEL [options]",
        help="what a sequence costs, how many fit, and on which devices",
        description="What one sequence of a model costs; with a device or a memory, how many users\n"
        "fit and how fast they could be at best; with --users alone, which devices would\nhold them.",
        epilog="example:\n  kvist plan gemma-3-270m --gpu L4 --context 8k --users 300",
    )
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument(
        "--tokens",
        type=values.tokens(),
        action="append",
        metavar="N",
        help="length to price; repeatable (1k 8k 32k 128k)",
    )
    add_format(command, default="bf16")
    command.add_argument("--block", type=BLOCK, metavar="N", help="tokens of a block (16); with a memory")
    add_machine(
        command, cache_memory="for the cache alone: --memory of generate and serve", overhead="estimates (--explain)"
    )
    _add_users(command)
    command.add_argument(
        "--encoder-tokens",
        type=values.tokens(),
        metavar="N",
        help="length of an encoder's output, where it is open",
    )
    command.add_argument(
        "--engine",
        type=values.engine,
        metavar="NAME",
        help="what kvist, vllm, sglang, llama.cpp or transformers makes of the memory",
    )
    add_settings(command, help="setting of that engine, by its own name; repeatable")
    add_assume(command)
    command.add_argument("--explain", action="store_true", help="each number as formula and source")
    add_json(command)


def _add_users(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--users", type=values.whole(1, 10**9), metavar="N", help="how many must fit; exit code 3 where they do not"
    )
    command.add_argument(
        "--context",
        type=values.tokens(),
        metavar="N",
        help="tokens of each user's sequence (8k); with --lengths the longest that is taken",
    )
    command.add_argument(
        "--lengths", metavar="FILE", help="lengths one a line, CSV, JSON lines or a request trace, gzip or not"
    )
    command.add_argument(
        "--shared-prefix", type=values.tokens(), metavar="N", help="tokens that every prompt begins with"
    )
    command.add_argument(
        "--cartridge",
        type=values.tokens(),
        metavar="N",
        help="tokens of a trained cache, stored once, behind which every sequence begins",
    )
    add_cartridge_format(command)


# What is said of the model as published beside a plan that overrides keys.
_WHAT_IF = (
    "append_bytes_per_token", "retained_bytes_per_token", "state_bytes", "sequence_bytes", "parameters",
)  # fmt: skip


def _published(args: argparse.Namespace, answer: "Plan") -> "Plan | None":
    """The same plan of the model as published; None where it is refused without what is assumed."""
    from kvist.errors import InputError
    from kvist.planning.planner import plan
    from kvist.spec.model import ModelSpec

    try:
        spec = ModelSpec.read(args.model)
    except InputError:
        return None
    return plan(spec, format=answer.format, tokens=list(answer.sequence_bytes), encoder_tokens=args.encoder_tokens)


def run_plan(args: argparse.Namespace) -> int:
    """``kvist plan``."""
    from kvist.planning.planner import plan
    from kvist.spec.model import ModelSpec

    answer = plan(
        ModelSpec.read(args.model, assume=dict(args.assume or ())),
        format=values.cache_format(args),
        tokens=args.tokens,
        gpu=args.gpu,
        memory=args.memory,
        cache_memory=args.cache_memory,
        weights=args.weights,
        tp=args.tp,
        pp=args.pp,
        overhead=args.overhead,
        context=args.context,
        users=args.users,
        lengths=args.lengths,
        shared_prefix=args.shared_prefix,
        cartridge=args.cartridge,
        cartridge_format=args.cartridge_format,
        block_tokens=args.block,
        engine=args.engine,
        settings=None if args.set is None else dict(args.set),
        encoder_tokens=args.encoder_tokens,
    )
    published = _published(args, answer) if args.assume else None
    if not args.json:
        from kvist.report.plan_tables import print_plan, print_what_if

        print_plan(answer, explained=args.explain)
        if published is not None:
            print_what_if(answer, published)
        return 0
    content = answer.to_dict()
    if published is not None:
        whole = published.to_dict()
        content["published"] = {key: whole[key] for key in _WHAT_IF}
    if args.explain:
        from kvist.planning.explain import explain

        content["explain"] = [row.to_dict() for row in explain(answer)]
    return print_json(content)
