"""``kvist simulate``: what a request trace does to a cache."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvist import cli_values as values
from kvist.commands.options import BLOCK, add_command, add_format, add_json, add_machine, check_place, print_json
from kvist.errors import InputError

if TYPE_CHECKING:
    from kvist.simulation.question import Question
    from kvist.traces.trace import Trace


def add_simulate(commands: Any) -> None:
    """Add ``kvist simulate``."""
    command = add_command(
        commands,
        "simulate",
        run_simulate,
        usage="kvist simulate [TRACE] --model MODEL [options]",
        help="what a request trace does to slabs, pages and prefix caches",
        description="Runs a request trace through the engine's own scheduler and cache, with a\n"
        "roofline clock in the model's place: how many requests run, how long they wait,\n"
        "what is hit, wasted and preempted, and what binds. Policies stand side by side.",
        epilog="example:\n  kvist simulate trace.jsonl --model llama-3-8b --gpu H100 --policy slab \\\n"
        "    --policy prefix --html day.html",
    )
    command.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Mooncake or kvist JSON lines, Azure or BurstGPT CSV, lengths; gzip or not; - is standard input",
    )
    command.add_argument("--model", metavar="MODEL", help="config.json, model directory, .gguf file or known name")
    add_format(command, default="bf16")
    _add_trace(command)
    _add_machine(command)
    _add_policies(command)
    _add_sweep(command)
    _add_output(command)


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--mean-length",
        type=values.tokens(2, 2**24),
        metavar="N",
        help="without a TRACE: a thousand requests of this mean length, a quarter of it generated, all there at once",
    )
    command.add_argument("--requests", type=values.whole(1), metavar="N", help="of the trace, from its beginning")
    command.add_argument(
        "--speed", type=values.number(0, 1e9, above=True), default=1.0, metavar="X", help="arrivals X times as fast"
    )
    command.add_argument("--skip-bad", action="store_true", help="leave rows out that are no requests, and count them")


def _add_machine(command: argparse.ArgumentParser) -> None:
    add_machine(command, cache_memory="for the cache alone; with --cache-only", overhead="estimates")
    command.add_argument(
        "--calibrate", metavar="FILE", help="measured steps, CSV or JSON lines, to fit the clock to (docs/clock.md)"
    )
    command.add_argument(
        "--cache-only", action="store_true", help="no clock: one request after the other, hits of prefixes alone"
    )


def _add_policies(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--policy",
        choices=("slab", "paged", "prefix"),
        action="append",
        help="slab reserves the longest sequence, paged gives blocks, prefix shares them; repeatable (prefix)",
    )
    command.add_argument("--block", type=BLOCK, metavar="N", help="tokens of a block (16; the trace's without a clock)")
    command.add_argument(
        "--max-len", type=values.tokens(), metavar="N", help="longest sequence, which a slab reserves (the model's)"
    )
    command.add_argument(
        "--max-running", type=values.whole(1, 10**6), default=256, metavar="N", help="requests that run at once (256)"
    )
    command.add_argument(
        "--chunk", type=values.tokens(), metavar="N", help="tokens that a step computes at most (2048)"
    )
    command.add_argument(
        "--encoder-tokens",
        type=values.tokens(),
        metavar="N",
        help="length of an encoder's output, where the model attends to one",
    )
    command.add_argument(
        "--reclaim",
        choices=("lru", "lfu", "fifo", "optimal"),
        default="lru",
        help="which cached blocks go first; optimal knows the future, and is the bound (lru)",
    )
    command.add_argument(
        "--tier",
        action="append",
        metavar="NAME=SIZE@RATE/s",
        help="where blocks go from the device, such as host=64GiB@25GB/s[,write-through]; repeatable, nearest first",
    )
    command.add_argument(
        "--preempt",
        choices=("recompute", "swap"),
        default="recompute",
        help="what becomes of a request that must make room; swap needs a tier (recompute)",
    )
    command.add_argument(
        "--replicas",
        type=values.whole(1, 4096),
        metavar="N",
        help="that share the requests (as many as the devices hold)",
    )
    command.add_argument(
        "--route",
        choices=("round-robin", "least", "prefix"),
        default="round-robin",
        help="to which replica a request goes (round-robin)",
    )


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sweep",
        action="append",
        metavar="KEY=V1,V2,…",
        help="every combination of values of options, such as memory=40GiB,80GiB; format=bf16,int8/int4 is key and "
        "value, tiers are joined by + or none; repeatable (docs/simulation.md)",
    )
    command.add_argument(
        "--jobs", type=values.whole(1, 4096), metavar="N", help="processes of a sweep (as many as processors)"
    )
    command.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="a sweep on a Ray cluster (auto, host:port), or on this machine's Ray (needs kvist[ray])",
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--plot", metavar="FILE", help="a picture, .png or .svg (needs kvist[plot])")
    command.add_argument("--html", metavar="FILE", help="one page with everything")
    add_json(command)


def question_of(args: argparse.Namespace) -> "Question":
    """What the options ask."""
    from kvist.simulation.question import Question

    return Question.of(_fields(args))


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the options ask, by the names of a question's fields; a sweep may add what is not among them."""
    return {
        "model": args.model,
        "key": args.key,
        "value": args.value,
        "rotate": args.rotate,
        "keep_layers": args.keep_layers[0] if args.keep_layers else 0,
        "keep": args.keep_layers[1] if args.keep_layers else None,
        "layer_formats": tuple(f"{layer}={codecs}" for layer, codecs in args.layer_format or ()),
        "state": args.state,
        "tail": args.tail,
        "gpu": args.gpu,
        "memory": args.memory,
        "cache_memory": args.cache_memory,
        "weights": args.weights,
        "tp": args.tp,
        "pp": args.pp,
        "overhead": args.overhead,
        "policies": tuple(dict.fromkeys(args.policy or ("prefix",))),
        "block_tokens": args.block,
        "max_len": args.max_len,
        "max_running": args.max_running,
        "chunk": args.chunk,
        "encoder_tokens": args.encoder_tokens,
        "reclaim": args.reclaim,
        "tiers": tuple(args.tier or ()),
        "preempt": args.preempt,
        "replicas": args.replicas,
        "route": args.route,
        "speed": args.speed,
        "requests": args.requests,
        "cache_only": args.cache_only,
        "calibrate": args.calibrate,
    }


def trace_of(args: argparse.Namespace) -> "Trace":
    """The trace that is named, or one of the mean length that is asked for."""
    if args.trace is not None:
        if args.mean_length is not None:
            raise InputError("mean_length: there is a TRACE already; leave one of them out", key="mean_length")
        from kvist.traces.read import read_trace

        return read_trace(args.trace, skip_bad=args.skip_bad, limit=args.requests)
    if args.mean_length is None:
        raise InputError("trace: none is named; give a file, - for standard input, or --mean-length N", key="trace")
    from kvist.traces.laws import Arrivals, Lognormal
    from kvist.traces.synthesise import synthesise

    output = max(1, args.mean_length // 4)
    return synthesise(
        args.requests or 1000,
        arrivals=Arrivals(rate=1e6),
        prompt=Lognormal(mean=args.mean_length - output, cv=1.0),
        output=Lognormal(mean=output, cv=1.0),
    )


def run_simulate(args: argparse.Namespace) -> int:
    """``kvist simulate``."""
    from kvist.simulation.question import simulate

    if args.sweep is not None:
        return _run_sweep(args)
    for key in ("jobs", "ray"):
        if getattr(args, key) is not None:
            raise InputError(f"{key}: only a sweep has several cells; add `sweep`", key=key)
    question = question_of(args)
    taken = [args.trace]
    for path in (args.plot, args.html):
        if path is not None:
            check_place(path, *taken)
            taken.append(path)
    if args.plot is not None:
        from kvist.report.simulation_plot import check_plot

        check_plot(args.plot)
    trace = trace_of(args)
    with _Progress() as progress:
        result = simulate(trace, question, watch=progress.show)
    if args.plot is not None:
        from kvist.report.simulation_plot import plot

        plot(result, args.plot)
    if args.html is not None:
        from kvist.report.simulation_page import write_page

        write_page(result, args.html)
    if args.json:
        return print_json(result.to_dict())
    from kvist.report.simulation_tables import print_simulation

    print_simulation(result)
    return 0


def _run_sweep(args: argparse.Namespace) -> int:
    from kvist.simulation.sweep import sweep

    for key in ("plot", "html"):
        if getattr(args, key) is not None:
            raise InputError(
                f"{key}: draws one simulation; leave out `sweep`, or take its numbers from `json`", key=key
            )
    axes: dict[str, str] = {}
    for text in args.sweep:
        name, sign, given = text.partition("=")
        if not sign:
            raise InputError(f"sweep: {text!r}; write KEY=VALUE,VALUE, such as memory=40GiB,80GiB", key="sweep")
        if name in axes:
            raise InputError(f"sweep: {name} is there twice; give all its values at once", key="sweep")
        axes[name] = given
    trace = trace_of(args)
    with _Progress() as progress:

        def show(done: int, cells: int) -> None:
            progress.show(f"{cells:,} simulations", done / cells)

        result = sweep(trace, _fields(args), axes, jobs=args.jobs, ray=args.ray, watch=show)
    if args.json:
        print_json(result.to_dict())
    else:
        from kvist.report.sweep_tables import print_sweep

        print_sweep(result)
    return result.exit_code


class _Progress:
    """A bar on standard error, where that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Progress":
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, policy: str, share: float) -> None:
        """A part of a policy's requests has arrived."""
        if self._bar is None:
            return
        if policy not in self._tasks:
            self._tasks[policy] = self._bar.add_task(policy, total=1.0)
        self._bar.update(self._tasks[policy], completed=share)
