"""Where other engines are installed, and how they are asked; tests skip where they are not."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "shared" / "data"
PEERS = Path(os.environ.get("KVIST_PEERS", "~/.cache/kvist/peers")).expanduser()


def python_of(peer: str) -> Path:
    """The interpreter that has a peer, as ``benchmarks/peers/setup.sh`` installs it."""
    found = PEERS / peer / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{found} is not there: benchmarks/peers/setup.sh installs it, KVIST_PEERS says where")
    return found


def ask(peer: str, script: str, what: str, cases: list[Any]) -> list[dict[str, Any]]:
    """What a peer says: the last line of what a script of these tests prints under its interpreter."""
    done = subprocess.run(
        [python_of(peer), HERE / script, what], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    return answers


def recorded(engine: str) -> list[dict[str, Any]]:
    """Real runs of an engine that others recorded; none where the shared folder is not there."""
    path = DATA / "expected" / f"{engine}.json"
    return json.loads(path.read_text()) if path.is_file() else []


def load(path: str) -> dict[str, Any]:
    """A published configuration, by its path in the shared folder."""
    content: dict[str, Any] = json.loads((DATA / "configs" / path).read_text())
    return content


def spec_of(config: dict[str, Any], name: str = "a model") -> ModelSpec:
    """A configuration as a model."""
    return read_description(config, name=name)
