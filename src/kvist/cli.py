"""The command line: parse, call, print; every error is one line and an exit code.

Exit codes: 0 done, 1 our own failure, 2 the input or the call is wrong, 3 it does not fit, 130 interrupted. Imports
are inside the commands, so that ``kvist plan`` starts in a tenth of a second and needs no engine.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from kvist._version import __version__
from kvist.cli_streams import drop_output, finish_output, is_output_error, prepare_streams
from kvist.cli_values import in_options, join_negatives
from kvist.commands.cartridge import add_cartridge
from kvist.commands.check import add_check
from kvist.commands.compare import add_compare
from kvist.commands.engine import add_generate, add_serve
from kvist.commands.listings import add_formats, add_gpus
from kvist.commands.models import add_models
from kvist.commands.plan import add_plan
from kvist.commands.simulate import add_simulate
from kvist.commands.trace import add_trace
from kvist.errors import InputError, KvistError

_ENGINE_MODULES = {"torch", "safetensors", "gguf", "tokenizers", "jinja2", "fastapi", "uvicorn", "prometheus_client"}


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
        return _fail(error, in_options(str(error), key, _option_names(args)), error.exit_code)
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
    named, command = _command(parser, words)
    words[len(named) :] = join_negatives(words[len(named) :], command._option_string_actions)
    args, extras = parser.parse_known_args(words, into)
    unknown = [extra for extra in extras if extra.startswith("-") and extra != "-"]
    if args.command == "generate" and not unknown:
        # Words on both sides of an option come in two parts.
        args.words = [*args.words, *extras]
    elif extras:
        called = " ".join(named)
        raise InputError(f"{called}: unknown argument {(unknown or extras)[0]!r}; see kvist {called} --help")
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


def _command(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], argparse.ArgumentParser]:
    """The words that name a command, as ``trace info`` does, and its parser."""
    named: list[str] = []
    while len(named) < len(words) and words[len(named)] in (commands := _commands(parser)):
        parser = commands[words[len(named)]]
        named.append(words[len(named)])
    return named, parser


def _option_names(args: argparse.Namespace) -> dict[str, str]:
    """The options of a command by the names of their values; ``{}`` where no command was read."""
    if args.command is None:
        return {}
    _, parser = _command(build_parser(), [args.command, getattr(args, "part", "")])
    return {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}


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
    for add in (
        add_plan,
        add_check,
        add_models,
        add_formats,
        add_gpus,
        add_simulate,
        add_trace,
        add_generate,
        add_serve,
        add_cartridge,
        add_compare,
    ):
        add(commands)
    return parser
