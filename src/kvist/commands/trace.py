"""``kvist trace``: what a request trace holds, the same in another format, or one made up."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvist import cli_values as values
from kvist.commands.options import BLOCK, add_command, add_json, print_json

if TYPE_CHECKING:
    from kvist.traces.laws import Arrivals, Law
    from kvist.traces.synthesise import Tree
    from kvist.traces.trace import Trace

_MEAN = values.tokens(1, 2**24)
_CV = values.number(0, 100)


def add_trace(commands: Any) -> None:
    """Add ``kvist trace`` and what it does."""
    command = commands.add_parser(
        "trace",
        usage="kvist trace COMMAND [options]",
        help="look at a request trace, convert it, or synthesise one",
        description="Look at a request trace, convert it, or synthesise one. A trace is Mooncake JSON lines,\n"
        "Azure or BurstGPT CSV, ShareGPT-style turns or kvist's own JSON lines, gzip or\n"
        "not; - is standard input.",
        epilog="example:\n  kvist trace info conversation_trace.jsonl",
    )
    parts = command.add_subparsers(dest="part", metavar="COMMAND", required=True, prog="kvist trace")
    for add in (_add_info, _add_convert, _add_synth):
        add(parts)


def _add_info(parts: Any) -> None:
    command = add_command(
        parts,
        "info",
        run_info,
        usage="kvist trace info TRACE [options]",
        help="how many requests, how long, how often, and what they share",
        description="How many requests a trace holds, how long and how often they are, and what a\n"
        "prefix cache without an end would hit.",
        epilog="example:\n  kvist trace info conversation_trace.jsonl",
    )
    _add_reading(command)
    add_json(command)


def _add_convert(parts: Any) -> None:
    command = add_command(
        parts,
        "convert",
        run_convert,
        usage="kvist trace convert TRACE --out FILE [options]",
        help="write a trace in another format",
        description="Write a trace in kvist's own format or Mooncake's, sorted by arrival.",
        epilog="example:\n  kvist trace convert BurstGPT_1.csv --skip-bad --out burst.jsonl.gz",
    )
    _add_reading(command)
    _add_writing(command)


def _add_synth(parts: Any) -> None:
    command = add_command(
        parts,
        "synth",
        run_synth,
        usage="kvist trace synth --out FILE [options]",
        help="synthesise a trace of given lengths, arrivals and shared prefixes",
        description="Synthesise a trace of given lengths, arrivals and shared prefixes. A seed gives\n"
        "the same trace on any machine.",
        epilog="example:\n  kvist trace synth --requests 10000 --systems 20 --system-tokens 1k \\\n"
        "    --turns 3 --turn-tokens 200 --out chat.jsonl",
    )
    command.add_argument("--requests", type=values.whole(1, 10**7), default=1000, metavar="N", help="how many (1000)")
    command.add_argument(
        "--seed", type=values.whole(0, 2**63 - 1), default=0, metavar="N", help="of what is random (0)"
    )
    command.add_argument("--like", metavar="TRACE", help="take lengths and arrivals from a trace, where not given")
    command.add_argument(
        "--fit",
        choices=("empirical", "lognormal"),
        default="empirical",
        help="with --like: its lengths as they are, or lognormal ones (empirical)",
    )
    command.add_argument("--rate", type=values.number(1e-4, 1e6), metavar="X", help="requests a second (1)")
    command.add_argument(
        "--cv", type=_CV, metavar="X", help="how uneven gaps are: 0 a clock, 1 Poisson, above in bursts (1)"
    )
    command.add_argument(
        "--prompt-tokens", type=_MEAN, metavar="N", help="mean of a first prompt, without a system prompt (1000)"
    )
    command.add_argument("--output-tokens", type=_MEAN, metavar="N", help="mean of an answer (200)")
    command.add_argument(
        "--length-cv", type=_CV, default=1.0, metavar="X", help="deviation of given lengths by their mean (1)"
    )
    command.add_argument("--systems", type=values.whole(0, 10**7), default=0, metavar="N", help="system prompts (0)")
    command.add_argument(
        "--system-tokens", type=values.tokens(0, 2**24), default=0, metavar="N", help="tokens of each (0)"
    )
    command.add_argument(
        "--zipf", type=values.number(0, 10), default=1.0, metavar="X", help="how popular the k-th is: 1/k^X (1)"
    )
    command.add_argument(
        "--turns", type=values.number(1, 10**4), default=1.0, metavar="X", help="mean turns of a session (1)"
    )
    command.add_argument("--turn-tokens", type=_MEAN, metavar="N", help="mean of what a turn adds (as a first prompt)")
    command.add_argument(
        "--think", type=values.number(0, 10**6), default=60.0, metavar="X", help="mean seconds between turns (60)"
    )
    command.add_argument("--block", type=BLOCK, default=16, metavar="N", help="tokens of a block (16)")
    command.add_argument("--skip-bad", action="store_true", help="with --like: leave rows out that are no requests")
    _add_writing(command)


def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", metavar="TRACE", help="file, or - for standard input")
    command.add_argument("--skip-bad", action="store_true", help="leave rows out that are no requests, and count them")
    command.add_argument("--limit", type=values.whole(1), metavar="N", help="requests to read, from the beginning")


def _add_writing(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-o", "--out", required=True, metavar="FILE", help="where to, zipped where it ends in .gz; - is standard output"
    )
    command.add_argument("--format", choices=("kvist", "mooncake"), default="kvist", help="kvist or mooncake (kvist)")
    add_json(command)


def run_info(args: argparse.Namespace) -> int:
    """``kvist trace info``."""
    from kvist.traces.summary import Summary

    trace = _read(args)
    summary = Summary.of(trace)
    if args.json:
        rows = [{"line": row.number, "reason": row.reason} for row in trace.skipped]
        return print_json({**summary.to_dict(), "skipped": rows})
    from kvist.report.trace_tables import print_summary

    print_summary(summary, trace.skipped)
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """``kvist trace convert``."""
    _refuse_two_outputs(args)
    return _write(_read(args), args)


def run_synth(args: argparse.Namespace) -> int:
    """``kvist trace synth``."""
    from kvist.traces.read import read_trace
    from kvist.traces.synthesise import synthesise

    _refuse_two_outputs(args)
    like = None if args.like is None else read_trace(args.like, skip_bad=args.skip_bad, key="like")
    trace = synthesise(
        args.requests,
        seed=args.seed,
        arrivals=_arrivals(args, like),
        prompt=_law(args, args.prompt_tokens, 1000, None if like is None else like.prompts),
        output=_law(args, args.output_tokens, 200, None if like is None else like.outputs),
        tree=_tree(args),
        block_tokens=args.block,
    )
    return _write(trace, args)


def _arrivals(args: argparse.Namespace, like: "Trace | None") -> "Arrivals":
    from kvist.traces.laws import Arrivals

    if like is None or (args.rate is not None and args.cv is not None):
        return Arrivals(rate=1.0 if args.rate is None else args.rate, cv=1.0 if args.cv is None else args.cv)
    if args.rate is not None and not like.timed:
        return Arrivals(rate=args.rate)
    fitted = Arrivals.fitted(like)
    return Arrivals(rate=fitted.rate if args.rate is None else args.rate, cv=fitted.cv if args.cv is None else args.cv)


def _law(args: argparse.Namespace, mean: int | None, default: int, tokens: Any) -> "Law":
    from kvist.traces.laws import Empirical, Lognormal

    if tokens is None or mean is not None:
        return Lognormal(mean=mean or default, cv=args.length_cv)
    return Empirical(tokens=tokens) if args.fit == "empirical" else Lognormal.fitted(tokens)


def _tree(args: argparse.Namespace) -> "Tree":
    from kvist.traces.laws import Lognormal
    from kvist.traces.synthesise import Tree

    return Tree(
        systems=args.systems,
        system_tokens=args.system_tokens,
        zipf=args.zipf,
        turns=args.turns,
        turn=None if args.turn_tokens is None else Lognormal(mean=args.turn_tokens, cv=args.length_cv),
        think=args.think,
    )


def _read(args: argparse.Namespace) -> "Trace":
    from kvist.traces.read import read_trace

    return read_trace(args.trace, skip_bad=args.skip_bad, limit=args.limit)


def _refuse_two_outputs(args: argparse.Namespace) -> None:
    from kvist.errors import InputError

    if args.out == "-" and args.json:
        raise InputError("out: - is standard output, where --json prints; name a file", key="out")


def _write(trace: "Trace", args: argparse.Namespace) -> int:
    from kvist.traces.summary import Summary
    from kvist.traces.write import write_trace
    from kvist.units import counted

    write_trace(trace, args.out, format=args.format)
    if args.json:
        return print_json({"out": args.out, **Summary.of(trace).to_dict()})
    skipped = f"; {counted(trace.skipped_rows, 'bad row')} left out" if trace.skipped_rows else ""
    # Where the trace itself is printed, nothing else is.
    stream = sys.stderr if args.out == "-" else sys.stdout
    name = "standard output" if args.out == "-" else args.out
    print(f"{name}: {counted(len(trace), 'request')}{skipped}", file=stream)
    return 0
