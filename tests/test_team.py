"""The kernels' own threads under the thread sanitizer, outside Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parent / "src" / "kvist" / "kernels"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    made = tmp_path_factory.mktemp("team") / "team"
    command = [
        compiler, "-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread",
        f"-I{KERNELS}", "-o", str(made), str(HERE / "team.cpp"),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    return made


@pytest.mark.parametrize("threads", [1, 2, 5, 70])
def test_work_is_shared_without_races(program: Path, threads: int) -> None:
    """Nothing is taken twice or left, and threads but the caller's take part."""
    run = subprocess.run([str(program), str(threads)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    assert int(run.stdout) == (8 if threads > 1 else 0), "in four rounds a team's threads met, and a call's"
