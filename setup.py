"""What pyproject.toml cannot say: the kernels of the CPU, in C++ and optional.

Where no compiler is there, or it fails, the installation goes on without them; kvist then computes with PyTorch's
operators.
"""

import os
from pathlib import Path

import nanobind
from setuptools import Extension, setup

KERNELS = Path("src/kvist/kernels")
SOURCES = (
    "cpu.cpp",
    "cpu_attention.cpp",
    "cpu_attention_few.cpp",
    "cpu_chain.cpp",
    "cpu_elementwise.cpp",
    "cpu_matrix.cpp",
    "cpu_matrix_bytes.cpp",
    "cpu_matrix_few.cpp",
    "cpu_merge.cpp",
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

setup(
    ext_modules=[
        Extension(
            "kvist.kernels._cpu",
            sources=[
                *(str(KERNELS / name) for name in SOURCES),
                str(NANOBIND / "nb_combined.cpp"),
            ],
            depends=[str(path) for path in sorted(KERNELS.glob("cpu*.h"))],
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
                "-Wno-psabi",
                *SANITIZE,
            ],
            extra_link_args=SANITIZE,
            language="c++",
            optional=True,
        )
    ]
)
