"""Sweeps: every combination, the same over processes and Ray, and what is said of those that are refused."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvist.cli import build_parser, main
from kvist.errors import InputError
from kvist.report.sweep_tables import print_sweep
from kvist.simulation.axes import AXES, Axis
from kvist.simulation.question import Question, simulate
from kvist.simulation.sweep import SweepResult, sweep
from kvist.traces.trace import Trace

COMMON = {"model": "smollm2-135m", "gpu": "L4"}
AXES_OF_FOUR = {"memory": "16MiB,8GiB", "format": ["bf16", "int8/int4"]}


def trace_of(count: int, *, longest: int = 60) -> Trace:
    """Prompts whose first block is one of three."""
    rng = np.random.default_rng(5)
    return Trace(
        source="made up",
        arrivals=np.arange(count) * 0.01,
        timed=True,
        prompts=rng.integers(17, longest, count),
        outputs=rng.integers(1, 20, count),
        block_tokens=16,
        blocks=rng.integers(0, 3, count),
        offsets=np.arange(count + 1),
    )


TRACE = trace_of(30)


def without_speed(found: SweepResult) -> Any:
    """All but how long simulating took."""
    content = found.to_dict()
    for cell in content["sweep"]:
        cell.get("result", {}).pop("simulated_requests_per_second", None)
    return content


def test_every_combination_is_the_simulation_of_its_own() -> None:
    found = sweep(TRACE, COMMON, {"max_len": [64, 2048], "policy": "slab,prefix"}, jobs=1)
    assert found.axes == ("max-len", "policy")
    assert [tuple(cell.axes.values()) for cell in found.cells] == [
        ("64", "slab"), ("64", "prefix"), ("2048", "slab"), ("2048", "prefix"),
    ]  # fmt: skip
    for cell in found.cells:
        alone = simulate(TRACE, **COMMON, max_len=int(cell.axes["max-len"]), policies=cell.axes["policy"])
        assert cell.outcome.result is not None
        assert cell.outcome.result.policies[cell.axes["policy"]].to_dict() == (
            alone.policies[cell.axes["policy"]].to_dict()
        )


def test_the_number_of_processes_changes_nothing() -> None:
    seen: list[tuple[int, int]] = []
    two = sweep(TRACE, COMMON, AXES_OF_FOUR, jobs=2, watch=lambda done, cells: seen.append((done, cells)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert without_speed(two) == without_speed(sweep(TRACE, Question(**COMMON), AXES_OF_FOUR, jobs=1))
    # What does not fit is told beside the others.
    assert [cell.outcome.exit_code for cell in two.cells] == [3, 3, 0, 0]
    assert "leave no cache in 16 MiB" in (two.cells[0].outcome.error or "")
    assert two.exit_code == 0
    assert sweep(TRACE, COMMON, {"memory": ["16MiB"]}).exit_code == 3


@pytest.mark.skipif(find_spec("ray") is None, reason="needs kvist[ray]: ray is not installed")
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_finds_the_same() -> None:
    seen: list[tuple[int, int]] = []
    found = sweep(TRACE, COMMON, AXES_OF_FOUR, jobs=2, ray="local", watch=lambda *each: seen.append(each))
    assert seen[-1] == (4, 4)
    assert without_speed(found) == without_speed(sweep(TRACE, COMMON, AXES_OF_FOUR, jobs=1))


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_is_said_what_to_install() -> None:
    with pytest.raises(InputError, match=r"^ray: it is not installed: pip install 'kvist\[ray\]'$"):
        sweep(TRACE, COMMON, AXES_OF_FOUR, ray="local")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "sweep: nothing is swept; name an axis"),
        ({"size": "1"}, "sweep: 'size' cannot be swept; choose of model, format, gpu"),
        ({"memory": "20GiB,much"}, "sweep: memory=much: "),
        ({"memory": "20GiB,,40GiB"}, "sweep: memory=20GiB,,40GiB: a value is empty"),
        ({"memory": "1GiB,2GiB,1GiB"}, "sweep: memory: 1GiB is there twice"),
        ({"tp": [0]}, "sweep: tp=0: .* out of range; 1 to 1024"),
        ({"format": "int8/int9"}, "sweep: format=int8/int9: .*int9"),
        ({"policy": "best"}, "sweep: policy=best: 'best' is none; choose one of slab"),
        ({"reclaim": "mru"}, "sweep: reclaim=mru: 'mru' is none; choose of lru"),
        ({"route": "any"}, "sweep: route=any: "),
        ({"tier": "none,host"}, "sweep: tier=host: 'host'; write NAME=SIZE@RATE"),
        ({"gpu": "L4"}, "sweep: gpu is swept and given beside it"),
        ({"model": "llama-9"}, "sweep: model=llama-9: "),
        ({"preempt": "swap"}, "preempt: swap needs a tier"),
    ],
)
def test_what_cannot_be_swept_is_said(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        sweep(TRACE, COMMON, axes)


def test_tiers_have_commas_of_their_own() -> None:
    axis = Axis.of("tier", "none,host=1GiB@1GB/s,write-through+disk=1TB@1GB/s,host=2GiB@1GB/s")
    assert [each["tiers"] for each in axis.fields] == [
        (), ("host=1GiB@1GB/s,write-through", "disk=1TB@1GB/s"), ("host=2GiB@1GB/s",),
    ]  # fmt: skip


def test_axes_are_read_as_the_options() -> None:
    """Each is an option, and what its reader takes and refuses is what the option does."""
    command = next(
        action.choices["simulate"]
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options = {name.removeprefix("--"): action for action in command._actions for name in action.option_strings}
    assert set(AXES) - {"format"} <= set(options)
    for name, read in AXES.items():
        option = options.get(name)
        for word in ("0", "1", "8k", "1GiB", "1.5", "lru", "swap", "prefix", "bf16", "2048", "-1"):
            if option is None or not (option.type or option.choices):
                continue
            try:
                if option.type:
                    option.type(word)
                expected = option.choices is None or word in option.choices
            except argparse.ArgumentTypeError:
                expected = False
            try:
                read(word)
                taken = True
            except (argparse.ArgumentTypeError, InputError):
                taken = False
            assert taken == expected, (name, word)


# -- the door -----------------------------------------------------------------------------------------------------

WORDS = ["simulate", "--mean-length", "60", "--requests", "40", "--model", "smollm2-135m", "--gpu", "L4"]


def test_the_command_prints_a_row_a_combination(capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = ["--sweep", "memory=16MiB,8GiB", "--sweep", "policy=slab,paged", "--jobs", "1"]
    assert main([*WORDS, *sweeps]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("no result") == 2
    for shown in ("8GiB     paged", "TTFT", "tokens/s", "makespan", "hit", "preempted", "waste"):
        assert shown in text
    assert main([*WORDS, *sweeps, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["sweep"]
    assert [cell["axes"] for cell in cells][2:] == [
        {"memory": "8GiB", "policy": "slab"}, {"memory": "8GiB", "policy": "paged"},
    ]  # fmt: skip
    assert "leave no cache" in cells[0]["error"]
    assert cells[3]["result"]["policies"]["paged"]["finished"] == 40
    assert main([*WORDS, "--sweep", "memory=16MiB"]) == 3


@pytest.mark.parametrize("policies", [("prefix",), ("slab", "paged", "prefix")])
def test_long_values_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], policies: tuple[str, ...]
) -> None:
    tiers = "none,host=64GiB@25GB/s,write-through+disk=1000GB@3GB/s"
    found = sweep(
        TRACE, {**COMMON, "policies": policies}, {"tier": tiers, "max-running": "4", "route": "least"}, jobs=1
    )
    print_sweep(found)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(name) >= 2 for name in policies if len(policies) > 1)


def test_without_a_clock_there_are_hits_alone(capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"cache-memory": "1MiB,1GiB", "reclaim": "lru,optimal"}
    found = sweep(TRACE, {"model": "smollm2-135m", "cache_only": True}, axes, jobs=1)
    print_sweep(found)
    text = capsys.readouterr().out
    assert "hit" in text
    assert "TTFT" not in text
    assert "no result" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "2"], "--jobs: only a sweep has several cells; add --sweep"),
        (["--ray"], "--ray: only a sweep"),
        (["--sweep", "memory"], "--sweep: 'memory'; write KEY=VALUE,VALUE"),
        (["--sweep", "tp=1", "--sweep", "tp=2"], "--sweep: tp is there twice"),
        (["--sweep", "tp=1", "--html", "x.html"], "--html: draws one simulation; leave out --sweep"),
        (["--sweep", "tp=1", "--plot", "x.png"], "--plot: draws one simulation"),
        (["--sweep", "tp=1", "--ray", "here:1", "--jobs", "2"], "--jobs: a cluster has the processors"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvist: {message}")
    assert error.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see processes")
def test_an_interrupt_ends_the_processes() -> None:
    """Ctrl-C says nothing, exits with 130, and leaves no process behind."""
    words = [*WORDS, "--requests", "100000", "--sweep", "policy=slab,paged", "--jobs", "2"]
    made = subprocess.Popen(
        [sys.executable, "-m", "kvist", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # Whoever runs the tests in a shell's background has it ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    children = Path(f"/proc/{made.pid}/task/{made.pid}/children")
    until = time.monotonic() + 60
    # Two workers and what keeps track of their semaphores.
    while len(started := children.read_text().split()) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(started) >= 3, f"no two workers were seen; the command ended with {made.poll()}"
    os.killpg(made.pid, signal.SIGINT)
    out, err = made.communicate(timeout=60)
    assert (made.returncode, out, err) == (130, b"", b"")
    assert len(started) == 3
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
