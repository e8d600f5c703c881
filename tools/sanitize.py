"""Run the C++ kernels' tests on kernels that look at every access and every operation: ASan and UBSan.

    python tools/sanitize.py [--quick] [pytest's arguments]

The kernels are compiled anew into ``build/sanitize``. Where there is no compiler, or it has no sanitizers' libraries,
nothing is run; that is said, and no failure.

First the kernels are asked for accesses of every sort, two bytes behind the end of a tensor, or of an array in a
struct: plain vectors, AVX-512's, masked ones and the matrix unit's tiles. Each must be found. The compiler looks at the
first two; of the others, which it does not see, the kernels tell the sanitizer themselves (cpu_sanitized.h), as of
fences between the arrays that threads work in. In the end each kernel that this machine has must have been called, on
every codec and with weights of every width.

In the arena the tests forbid the blocks that are no sequence's, or fell out of its window. What is not seen: an access
that leaves one array for another of the same tensor or block (the tests hold all bytes that are written against an
oracle), or one row for the next of the same array; and what was never written (the tests fill it with what is no
number).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "sanitize"
TESTS = (
    "tests/test_cpu_kernels.py",
    "tests/test_cpu_formats.py",
    "tests/test_portable_kernels.py",
    "tests/test_portable_products.py",
    "tests/test_pruning_kernels.py",
    "tests/test_chain.py",
    "tests/test_sealing.py",
)
# Real models take minutes, and add nothing to what the kernels are given.
LEFT_OUT = "not real_models and not stored_weights"
# Every kernel, on every codec.
QUICK = (
    "bytes_are or many_queries or sinks or every_codec or edges or never_written or rotation or residuals or gates "
    "or many_rows or products and 160-576 or spreading or same_to_the_bit and llama or cut_among "
    "or by_channel and not have or sums_do_not or byte_by_byte"
)


def libraries(compiler: str) -> str | None:
    """What must be loaded before all else, as LD_PRELOAD wants it; None where it is missing."""
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        if not Path(path.stdout.strip()).is_absolute():
            return None
        found.append(str(Path(path.stdout.strip()).resolve()))
    return " ".join(found)


def main(arguments: list[str]) -> int:
    """Compile, run, and return pytest's exit status."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or ""
    preload = libraries(compiler) if compiler and sys.platform == "linux" else None
    if preload is None:
        print("sanitize: skipped, as there is no g++ with libasan and libubsan here")
        return 0
    # The package beside the kernels: Python looks for them in one folder.
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", BUILT / "lib", ignore=left_out, dirs_exist_ok=True)
    build = ["build_ext", "--build-lib", str(BUILT / "lib"), "--build-temp", str(BUILT / "objects")]
    log = BUILT / "build.log"
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, "setup.py", *build],
            cwd=ROOT,
            env={**os.environ, "KVIST_SANITIZE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not list((BUILT / "lib" / "kvist" / "kernels").glob("_cpu*.so")):
        print(log.read_text()[-4000:])
        print("sanitize: the kernels were not built")
        return 1
    environment = {
        **os.environ,
        "PYTHONPATH": str(BUILT / "lib"),
        "LD_PRELOAD": preload,
        # What Python keeps until it ends is no leak; its own allocator would hide accesses behind an end.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, __file__, RUN, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


# ---- in the process that has the sanitizers -------------------------------------------------------------------------

RUN = "--run"


def run(arguments: list[str]) -> int:
    """Look whether faults are found, run the tests, and look whether they reached every kernel."""
    import pytest

    from kvist.kernels import _cpu as kernels

    if not kernels.sanitized:
        print(f"sanitize: {kernels.__file__} was imported, which has no sanitizers")
        return 1
    missed = faults_missed(kernels)
    if missed:
        print(f"sanitize: not found: {', '.join(missed)}")
        return 1
    called = calls_of(kernels)
    quick = "--quick" in arguments
    own = [argument for argument in arguments if argument != "--quick"]
    chosen = f"({LEFT_OUT}) and ({QUICK})" if quick else LEFT_OUT
    # What pytest captured of a report would end with the process.
    status = int(pytest.main(["-q", "--capture=sys", "-p", "no:cacheprovider", "-k", chosen, *TESTS, *own]))
    missing = sorted(kernels_here(kernels) - called)
    if status == 0 and not own and missing:
        print(f"sanitize: no test called {', '.join(missing)}")
        return 1
    return status


def faults_missed(kernels: Any) -> list[str]:
    """Accesses two bytes behind the end of a tensor that go through, each made in a process of its own."""
    import torch

    names = ["touch_plainly", "touch_fenced"]
    if kernels.has_avx512():
        names += ["touch_vectors", "touch_lanes"]
        if kernels.ask_for_amx():
            names.append("touch_tiles")
    memory = torch.empty(1024, dtype=torch.uint8)  # cpu_sanitized.h: kTouched
    missed = []
    for name in names:
        for writes in (False, True):
            touch = getattr(kernels, name)
            touch(memory.data_ptr(), writes)
            child = os.fork()
            if child == 0:
                # The report is what is expected.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                touch(memory.data_ptr() + 2, writes)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                missed.append(f"{name} {'writing' if writes else 'reading'}")
    return missed


def calls_of(kernels: Any) -> set[str]:
    """Names of the kernels that are called from now on, by what chooses among their code."""
    called: set[str] = set()

    def watch(owner: Any, name: str, names: Callable[..., list[str]]) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            called.update(names(*arguments))
            return function(*arguments)

        setattr(owner, name, call)

    def attending(kind: str) -> Callable[..., list[str]]:
        def names(plan: Any, chosen: int, *_: int) -> list[str]:
            # The matrix unit has code of its own for few queries.
            kinds = [f"{kind} {chosen}", *[f"{kind} few"] * (kind == "attend" and chosen == 1 and plan.has_few)]
            sides = (("keys", plan.key), ("values", plan.value))
            return [f"{name} on {side} {codec}" for name in kinds for side, codec in sides]

        return names

    def multiplying(matrix: Any, kind: int, _: int, rows: int, *__: int) -> list[str]:
        most = next((most for most in (8, 16) if rows <= most), "all")
        return [f"multiply {kind} with {matrix.bits} bits, up to {most} rows"] if rows else []

    for name in ("rotate", "spread", "add_norm"):
        watch(kernels, name, lambda kind, *_, name=name: [f"{name} {kind}"])
    watch(kernels.Plan, "attend", attending("attend"))
    watch(kernels.Plan, "attend_anywhere", attending("attend_anywhere"))
    watch(kernels.Matrix, "multiply", multiplying)
    watch(kernels.Chain, "run", lambda _, kind, *__: [f"chain {kind}"])
    return called


def kernels_here(kernels: Any) -> set[str]:
    """Those that this machine has, as :func:`calls_of` names them."""
    from kvist.kernels.paged import CODECS, KEY_CODECS

    sides = (("keys", KEY_CODECS), ("values", CODECS))
    stored = [f"on {side} {codec}" for side, codecs in sides for codec in codecs.values()]
    builds = kernels.portable_builds()
    found = {f"attend_anywhere {build} {what}" for build in builds for what in stored}
    # cpu_kinds.h: the portable ones' numbers follow.
    kinds = [2 + build for build in builds]
    chained = max(kinds)
    if kernels.has_avx512():
        amx = kernels.ask_for_amx()
        found |= {f"attend {kind} {what}" for kind in ("0", *("1", "few") * amx) for what in stored}
        kinds += range(1 + amx)
        chained = int(amx)
    found.add(f"chain {chained}")
    for kind in kinds:
        found |= {f"{name} {kind}" for name in ("rotate", "spread", "add_norm")}
        found |= {
            f"multiply {kind} with {bits} bits, up to {rows} rows" for bits in (4, 8, 16) for rows in (8, 16, "all")
        }
    return found


if __name__ == "__main__":
    asked = sys.argv[1:]
    sys.exit(run(asked[1:]) if asked[:1] == [RUN] else main(asked))
