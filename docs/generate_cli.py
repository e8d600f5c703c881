"""Write docs/cli.md from the help of the commands; a test holds it current.

Run it from anywhere: ``python docs/generate_cli.py``.
"""

import argparse
from pathlib import Path

from kvist.cli import build_parser

PAGE = Path(__file__).with_name("cli.md")

_HEAD = """# The command line

Written by `docs/generate_cli.py` from the commands' own `--help`; do not edit.

Sizes are `512MiB`, `40GiB` (binary), `80GB` (decimal) or plain bytes; token counts are `8k` (8192), `1M` (1048576)
or plain numbers. `--json` prints one JSON object on standard output and nothing else there. Exit codes: 0 done,
1 our own failure, 2 the input or the call is wrong, 3 it does not fit (`kvist check`: log and plan differ),
130 interrupted. An error is one line on standard error that says what, the value, and what would be right;
`KVIST_DEBUG=1` shows the traceback too.

`--memory` means what a machine has to give in `kvist plan`, weights and cache together, and what the cache gets in
`kvist generate` and `kvist serve`, which load the weights beside it. `kvist plan --cache-memory` is the latter.
"""


def page() -> str:
    """The whole page as Markdown."""
    parser = build_parser()
    parts = [_HEAD, _section("kvist", parser)]
    parts += [_section(f"kvist {name}", command) for name, command in commands(parser).items()]
    return "\n".join(parts)


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands by name, each followed by its own."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[name] = command
                found |= {f"{name} {part}": each for part, each in commands(command).items()}
    return found


def _section(title: str, parser: argparse.ArgumentParser) -> str:
    return f"## {title}\n\n```text\n{parser.format_help().strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())
