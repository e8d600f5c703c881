"""What pyproject.toml cannot say: the kernels of the CPU, in C++ and optional.

Where no compiler is there, or it fails, the installation goes on without them; kvist then computes with PyTorch's
operators.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/kvist/kernels")
SOURCES = (
    "cpu.cpp",
    "cpu_append.cpp",
    "cpu_attention.cpp",
    "cpu_attention_few.cpp",
    "cpu_chain.cpp",
    "cpu_elementwise.cpp",
    "cpu_kinds.cpp",
    "cpu_matrix.cpp",
    "cpu_matrix_bytes.cpp",
    "cpu_matrix_few.cpp",
    "cpu_merge.cpp",
    "cpu_move.cpp",
    "cpu_pack.cpp",
    "cpu_plan.cpp",
    "cpu_portable.cpp",
    "cpu_portable_avx2.cpp",
    "cpu_portable_avx512.cpp",
)
NANOBIND = Path(nanobind.source_dir())
# tools/sanitize.py: kernels that look at every access and every operation.
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-O1", "-g"]
SANITIZE = SANITIZED if os.environ.get("KVIST_SANITIZE") else []
if SANITIZE:
    SOURCES = (*SOURCES, "cpu_faults.cpp")


class BuildSideBySide(build_ext):
    """Compiles an extension's files on as many processors as there are."""

    def build_extensions(self):
        """As setuptools does, which takes one file after another."""
        compile_in_turn = self.compiler.compile

        def compile_one(source, extra_postargs, options):
            if NANOBIND in Path(source).parents:
                # Not ours to look at, and by far the slowest to compile so.
                extra_postargs = [option for option in extra_postargs if option not in SANITIZE[:3]]
            return compile_in_turn([source], extra_postargs=extra_postargs, **options)

        def compile_all(sources, extra_postargs=None, **options):
            processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            with ThreadPoolExecutor(processors) as pool:
                objects = list(pool.map(lambda source: compile_one(source, extra_postargs or [], options), sources))
            return [path for paths in objects for path in paths]

        # Other compilers set themselves up at the first file.
        if self.compiler.compiler_type == "unix":
            self.compiler.compile = compile_all
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildSideBySide},
    ext_modules=[
        Extension(
            "kvist.kernels._cpu",
            sources=[
                # The slowest first.
                str(NANOBIND / "nb_combined.cpp"),
                *(str(KERNELS / name) for name in SOURCES),
            ],
            depends=["setup.py", *(str(path) for path in sorted(KERNELS.glob("cpu*.h")))],
            include_dirs=[nanobind.include_dir(), str(NANOBIND.parent / "ext" / "robin_map" / "include")],
            define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
                "-g0",
                # Clang does not know one of the next.
                "-Wno-unknown-warning-option",
                "-Wno-uninitialized",
                "-Wno-maybe-uninitialized",
                "-Wno-psabi",
                *SANITIZE,
            ],
            extra_link_args=SANITIZE,
            language="c++",
            optional=True,
        )
    ],
)
