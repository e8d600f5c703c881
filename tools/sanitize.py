"""Run the C++ kernels' tests on kernels that look at every access and every operation: ASan and UBSan.

    python tools/sanitize.py [--quick] [pytest's arguments]

The kernels are compiled anew into ``build/sanitize``. Where there is no compiler, or it has no sanitizers' libraries,
nothing is run; that is said, and no failure.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "sanitize"
TESTS = ("tests/test_cpu_kernels.py", "tests/test_cpu_formats.py", "tests/test_portable_kernels.py")
# Real models take minutes, and add nothing to what the kernels are given.
LEFT_OUT = "not real_models and not stored_weights"
# Every kernel and every codec once.
QUICK = "every_pair or any_format or gates or many_rows or rotation or residuals or sinks or never_written"


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
    quick = "--quick" in arguments
    arguments = [argument for argument in arguments if argument != "--quick"]
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
    chosen = f"({LEFT_OUT}) and ({QUICK})" if quick else LEFT_OUT
    environment = {
        **os.environ,
        "PYTHONPATH": str(BUILT / "lib"),
        "LD_PRELOAD": preload,
        # What Python keeps until it ends is no leak; its own allocator would hide accesses behind an end.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *TESTS, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
