"""How fast a plan comes: a whole process from a cold start of the interpreter, and all known models in one process.

    python benchmarks/plan_start.py
    python benchmarks/plan_start.py --model smollm2-135m --rounds 50

A process is timed from its creation to its end, with its output read and thrown away; the bare interpreter is timed in
the same rounds, since it is the least that any command in Python takes. CPU time (user and system) is told beside
the wall clock: it moves less when the machine is busy. Expected: under 150 ms a process, under 1 s for all models.
Modules are compiled beforehand, as an installer does: compiling them anew takes longer than all the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

KVIST = [str(Path(sys.executable).with_name("kvist"))]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Wall-clock and CPU milliseconds of some rounds."""

    wall: list[float]
    cpu: list[float]

    def __str__(self) -> str:
        wall = f"{statistics.median(self.wall):6.1f} ms ({min(self.wall):.1f}–{max(self.wall):.1f})"
        return f"{wall}, CPU {statistics.median(self.cpu):6.1f} ms ({min(self.cpu):.1f}–{max(self.cpu):.1f})"


def compiled(folder: str) -> dict[str, str]:
    """An environment in which the first run leaves its bytecode, also for a checkout that is never to have any."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": folder}


def time_processes(commands: dict[str, Sequence[str]], rounds: int, folder: str) -> dict[str, Times]:
    """Run each command once a round, in turn; the first round compiles, warms the disk's cache and is not counted."""
    environment = compiled(folder)
    found = {name: Times(wall=[], cpu=[]) for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            before, start = os.times(), perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
            wall, after = perf_counter() - start, os.times()
            if number:
                found[name].wall.append(1000 * wall)
                found[name].cpu.append(
                    1000 * (after.children_user + after.children_system - before.children_user - before.children_system)
                )
    return found


def known_models() -> list[str]:
    """The names that ``kvist models`` lists."""
    listed = subprocess.run([*KVIST, "models", "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [row["name"] for row in json.loads(listed)["rows"]]


def plan_all(names: Sequence[str]) -> None:
    """Read and plan each model in this process, as the command does, and write each answer as JSON."""
    import kvist

    for name in names:
        json.dumps(kvist.plan(name).to_dict())


def main() -> None:
    """Print medians and ranges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    commands: dict[str, Sequence[str]] = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "kvist --version": [*KVIST, "--version"],
        f"kvist plan {options.model}": [*KVIST, "plan", options.model],
        f"kvist plan {options.model} --json": [*KVIST, "plan", options.model, "--json"],
        f"kvist plan {options.model} --gpu H100": [*KVIST, "plan", options.model, "--gpu", "H100"],
    }
    print(f"whole processes, {options.rounds} rounds: median (range)")
    with tempfile.TemporaryDirectory() as folder:
        for name, times in time_processes(commands, options.rounds, folder).items():
            print(f"  {name:42} {times}")
    names = known_models()
    first = Times(wall=[], cpu=[])
    again = Times(wall=[], cpu=[])
    for number in range(options.rounds):
        wall, cpu = perf_counter(), process_time()
        plan_all(names)
        times = again if number else first
        times.wall.append(1000 * (perf_counter() - wall))
        times.cpu.append(1000 * (process_time() - cpu))
    print(f"all {len(names)} known models in one process")
    print(f"  {'the first time, imports included':42} {first}")
    if again.wall:
        print(f"  {'again':42} {again}")


if __name__ == "__main__":
    main()
