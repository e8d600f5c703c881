"""What pyproject.toml cannot say: the kernels of the CPU, in C++ and optional.

Where no compiler is there, or it fails, the installation goes on without them; kvist then computes with PyTorch's
operators.
"""

from pathlib import Path

import nanobind
from setuptools import Extension, setup

KERNELS = Path("src/kvist/kernels")
SOURCES = (
    "cpu.cpp",
    "cpu_attention.cpp",
    "cpu_elementwise.cpp",
    "cpu_matrix.cpp",
    "cpu_matrix_few.cpp",
    "cpu_merge.cpp",
    "cpu_pack.cpp",
    "cpu_plan.cpp",
)
NANOBIND = Path(nanobind.source_dir())

setup(
    ext_modules=[
        Extension(
            "kvist.kernels._cpu",
            sources=[
                *(str(KERNELS / name) for name in SOURCES),
                str(NANOBIND / "nb_combined.cpp"),
            ],
            depends=[str(KERNELS / name) for name in ("cpu.h", "cpu_avx512.h", "cpu_codecs.h", "cpu_matrix.h")],
            include_dirs=[nanobind.include_dir(), str(NANOBIND.parent / "ext" / "robin_map" / "include")],
            define_macros=[("NDEBUG", None), ("NB_COMPACT_ASSERTIONS", None)],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
                "-g0",
                "-Wno-uninitialized",
                "-Wno-maybe-uninitialized",
            ],
            language="c++",
            optional=True,
        )
    ]
)
