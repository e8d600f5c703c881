"""The command line: parse, call, print; every error is one line and an exit code.

Exit codes: 0 done, 1 our own failure, 2 the input or the call is wrong, 3 it does not fit, 130 interrupted. Imports
are inside the commands, so that ``kvist plan`` starts in a tenth of a second and needs no engine.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from kvist import cli_values as values
from kvist._version import __version__
from kvist.cli_streams import drop_output, finish_output, is_output_error, prepare_streams
from kvist.cli_values import in_options, join_negatives
from kvist.errors import InputError, KvistError

_ENGINE_MODULES = {"torch", "safetensors", "gguf", "tokenizers", "jinja2", "fastapi", "uvicorn", "prometheus_client"}

_BLOCK = values.tokens(most=2**20)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    prepare_streams()
    args = argparse.Namespace(command=None)
    try:
        try:
            parse(sys.argv[1:] if argv is None else argv, args)
            if sys.stdout is None and args.command != "serve":
                return _fail(None, "standard output is closed; the answer has nowhere to go", 1)
            return finish_output(args.run(args))
        except SystemExit as stop:
            # argparse has printed help or the version.
            return finish_output(int(stop.code or 0))
    except KvistError as error:
        key = error.key if isinstance(error, InputError) else None
        return _fail(error, in_options(str(error), key, _option_names(args.command)), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough.
        drop_output()
        return 0
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _ENGINE_MODULES:
            return _internal(error)
        return _fail(error, f"{missing} is not installed; this command needs it: pip install 'kvist[engine]'", 2)
    except OSError as error:
        if not is_output_error(error):
            return _internal(error)
        drop_output()
        return _fail(error, f"standard output cannot be written: {error.strerror}", 1)
    except Exception as error:
        return _internal(error)


def _internal(error: Exception) -> int:
    hint = "" if os.environ.get("KVIST_DEBUG") else " (KVIST_DEBUG=1 shows the traceback)"
    return _fail(error, f"internal error: {type(error).__name__}: {error}{hint}", 1)


def _fail(error: Exception | None, message: str, code: int) -> int:
    with suppress(OSError):
        if error is not None and os.environ.get("KVIST_DEBUG"):
            import traceback

            traceback.print_exception(error)
        print(f"kvist: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


class _Parser(argparse.ArgumentParser):
    """argparse with errors as one line, and help that is the same on every terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own swallows a failed write.
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{_without_prefix(message)}; see {self.prog} --help")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=26, width=80)


def _without_prefix(message: str) -> str:
    """``argument --x: …`` becomes ``--x: …``."""
    return message.removeprefix("argument ")


def parse(argv: Sequence[str], into: argparse.Namespace | None = None) -> argparse.Namespace:
    """Read the command line: sizes become bytes, token counts become integers.

    ``into`` is filled as far as the reading comes.

    Raises:
        InputError: an option is unknown or its value is wrong.
        SystemExit: help or the version was asked for.
    """
    parser = build_parser()
    words = list(argv)
    command = _commands(parser).get(words[0]) if words else None
    if command is not None:
        words[1:] = join_negatives(words[1:], command._option_string_actions)
    args, extras = parser.parse_known_args(words, into)
    unknown = [extra for extra in extras if extra.startswith("-") and extra != "-"]
    if args.command == "generate" and not unknown:
        # Words on both sides of an option come in two parts.
        args.words = [*args.words, *extras]
    elif extras:
        raise InputError(
            f"{args.command}: unknown argument {(unknown or extras)[0]!r}; see kvist {args.command} --help"
        )
    if args.command == "generate":
        _name_words(args)
        if args.top_k is not None:
            args.top_k = max(0, args.top_k)
    return args


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _option_names(command: str | None) -> dict[str, str]:
    """The options of a command by the names of their values; ``{}`` where no command was read."""
    parser = _commands(build_parser()).get(command or "")
    actions = () if parser is None else parser._actions
    return {action.dest: action.option_strings[-1] for action in actions if action.option_strings}


def _name_words(args: argparse.Namespace) -> None:
    match args.words:
        case [prompt]:
            args.model, args.prompt = None, prompt
        case [model, prompt]:
            args.model, args.prompt = model, prompt
        case words:
            raise InputError(f"generate: {len(words)} words; give [MODEL] PROMPT, a prompt with spaces in quotes")
    del args.words


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options; ``docs/cli.md`` is written from it."""
    parser = _Parser(
        prog="kvist",
        usage="kvist COMMAND [options]",
        description="Plan and serve the KV cache of large language models, to the byte.",
        epilog="example:\n  kvist plan smollm2-135m --cache-memory 1GiB",
    )
    parser.add_argument("--version", action="version", version=f"kvist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog="kvist")
    _add_plan(commands)
    _add_models(commands)
    _add_formats(commands)
    _add_generate(commands)
    _add_serve(commands)
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], **options: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, **options)
    command.set_defaults(run=run)
    return command


def _add_plan(commands: Any) -> None:
    command = _add(
        commands,
        "plan",
        run_plan,
        usage="kvist plan MODEL [options]",
        help="what a sequence costs and how many fit",
        description="What one sequence of a model costs and, with a memory, how many fit.",
        epilog="example:\n  kvist plan gemma-3-270m --cache-memory 1GiB --context 8k --users 30",
    )
    command.add_argument("model", metavar="MODEL", help="config.json, model directory, .gguf file or known name")
    command.add_argument(
        "--tokens",
        type=values.tokens(),
        action="append",
        metavar="N",
        help="length to price; repeatable (1k 8k 32k 128k)",
    )
    _add_format(command, default="bf16")
    command.add_argument("--block", type=_BLOCK, metavar="N", help="tokens of a block (16); with a memory")
    memory = command.add_mutually_exclusive_group()
    memory.add_argument("--memory", type=values.size, metavar="SIZE", help="for weights and cache together")
    memory.add_argument(
        "--cache-memory", type=values.size, metavar="SIZE", help="for the cache alone: --memory of generate and serve"
    )
    command.add_argument(
        "--users", type=values.whole(1, 10**9), metavar="N", help="how many must fit; exit code 3 where they do not"
    )
    command.add_argument(
        "--context", type=values.tokens(), metavar="N", help="tokens of each user's sequence (8k); with a memory"
    )
    command.add_argument(
        "--encoder-tokens",
        type=values.tokens(),
        metavar="N",
        help="length of an encoder's output, where it is open",
    )
    command.add_argument("--engine", choices=["kvist"], help="show how this engine cuts the memory")
    command.add_argument(
        "--assume",
        type=values.assumption,
        action="append",
        metavar="KEY=VALUE",
        help="override a published key; repeatable",
    )
    command.add_argument("--explain", action="store_true", help="each number as formula and source")
    _add_json(command)


def _add_models(commands: Any) -> None:
    command = _add(
        commands,
        "models",
        run_models,
        usage="kvist models [options]",
        help="the models that answer to a name",
        description="The models that answer to a name, and what a token of each costs in bf16.",
        epilog="example:\n  kvist models --json",
    )
    _add_json(command)


def _add_formats(commands: Any) -> None:
    command = _add(
        commands,
        "formats",
        run_formats,
        usage="kvist formats [options]",
        help="the codecs in which keys and values are stored",
        description="The codecs in which keys and values are stored.",
        epilog="example:\n  kvist formats",
    )
    _add_json(command)


def _add_generate(commands: Any) -> None:
    command = _add(
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
    command.add_argument("--no-cache", action="store_true", help="compute every token again at each step")
    template = command.add_mutually_exclusive_group()
    template.add_argument("--chat", action="store_true", default=None, help="put the prompt in the chat template")
    template.add_argument("--raw", dest="chat", action="store_false", help="take the prompt as it is")
    _add_engine(command)
    _add_json(command)


def _add_serve(commands: Any) -> None:
    command = _add(
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
    command.add_argument("--api-key", metavar="KEY", help="what clients must send; or the variable KVIST_API_KEY")
    _add_engine(command)


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=["f32", "bf16", "f16"], help="in which the network computes")
    command.add_argument(
        "--memory", type=values.size, metavar="SIZE", help="for the cache alone; the weights come on top (512MiB)"
    )
    _add_format(command, default=None)
    command.add_argument("--block", type=_BLOCK, metavar="N", help="tokens of a block (16)")


def _add_format(command: argparse.ArgumentParser, *, default: str | None) -> None:
    shown = f" ({default})" if default else ""
    command.add_argument(
        "--key", type=values.codec, default=default, metavar="CODEC", help=f"how keys are stored{shown}"
    )
    command.add_argument(
        "--value", type=values.codec, default=default, metavar="CODEC", help=f"how values are stored{shown}"
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run_plan(args: argparse.Namespace) -> int:
    """``kvist plan``."""
    from kvist.planning.planner import plan
    from kvist.spec.formats import CacheFormat
    from kvist.spec.model import ModelSpec

    answer = plan(
        ModelSpec.read(args.model, assume=dict(args.assume or ())),
        format=CacheFormat(key=args.key, value=args.value),
        tokens=args.tokens,
        memory=args.memory,
        cache_memory=args.cache_memory,
        context=args.context,
        users=args.users,
        block_tokens=args.block,
        engine=args.engine,
        encoder_tokens=args.encoder_tokens,
    )
    if not args.json:
        from kvist.report.plan_tables import print_plan

        print_plan(answer, explained=args.explain)
        return 0
    content = answer.to_dict()
    if args.explain:
        from kvist.planning.explain import explain

        content["explain"] = [row.to_dict() for row in explain(answer)]
    return _print_json(content)


def run_models(args: argparse.Namespace) -> int:
    """``kvist models``."""
    from kvist.report.listings import model_rows, print_models

    return _print_json({"rows": model_rows()}) if args.json else print_models()


def run_formats(args: argparse.Namespace) -> int:
    """``kvist formats``."""
    from kvist.report.listings import format_rows, print_formats

    return _print_json({"rows": format_rows()}) if args.json else print_formats()


def run_generate(args: argparse.Namespace) -> int:
    """``kvist generate``: ``args`` has the options by name, ``model`` (None: the default) and ``prompt``."""
    from kvist.engine.commands import generate

    code: int = generate(args)
    return code


def run_serve(args: argparse.Namespace) -> int:
    """``kvist serve``: ``args`` has the options by name and ``model`` (None: the default)."""
    from kvist.server.run import serve

    return serve(args)


def _print_json(content: dict[str, Any]) -> int:
    import json

    print(json.dumps(content, indent=2))
    return 0
