"""Compile the GPU's kernels for compute capability 9.0, without a GPU; run by test_triton_compile.py.

Prints a line a kernel: name, registers, bytes that did not fit into them. ``python compile_triton.py all`` compiles
every pair of codecs.
"""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvist.kernels.triton_append import append_side
from kvist.kernels.triton_attention import attend_pages, merge_pieces
from kvist.kernels.triton_blocks import copy_words
from kvist.kernels.triton_latent import attend_latents
from kvist.kernels.triton_memory import constants_of
from kvist.kernels.triton_sides import side_of
from kvist.store.codecs import STORED, Coding

POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}
RESULTS = {"partial_ptr": "*fp32", "lse_ptr": "*fp32"}
STEPS = {"tables_ptr": "*i64", "pieces_ptr": "*i32", "scale": "fp32", "cap": "fp32"}


def build(kernel, given, constants, warps):
    """Compile; ``given`` are the types of the arguments, of which strides and pointers are multiples of 16."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: given.get(name, "constexpr") for name in names}
    whole = [name for name, kind in given.items() if kind.startswith("*") or name.endswith(("stride", "step", "begin"))]
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": 2},
    )
    file = Path(sys.argv[1]) / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    print(kernel.__name__, *found.groups(), flush=True)


def attention(key, value, dim, repeats, heads, rows, keys, warps):
    codings = [Coding(codec, side=side, dim=dim, tokens=16) for side, codec in (("key", key), ("value", value))]
    keys_side, values_side = (side_of(coding) for coding in codings)
    arena = {"key_ptr": POINTERS[keys_side.dtype], "value_ptr": POINTERS[values_side.dtype], "scales_ptr": "*fp16"}
    given = {
        "q_ptr": "*bf16", "q_stride": "i32", "out_ptr": "*bf16", "sinks_ptr": "*fp32", **RESULTS, **arena, **STEPS,
        "key_begin": "i32", "value_begin": "i32",
    }  # fmt: skip
    constants = {
        "KEY": key, "VALUE": value, "TOKENS": 16, "DIM": dim, "KV_HEADS": heads, "REPEATS": repeats, "WINDOW": 0,
        "CAPPED": True, "SINKS": True, "ALIGN": 16, "ROWS": rows, "KEYS": keys,
    }  # fmt: skip
    build(
        attend_pages,
        given,
        {**constants, **constants_of(keys_side, "KEY_"), **constants_of(values_side, "VALUE_")},
        warps,
    )


def append(codec, side):
    described = side_of(Coding(codec, side=side, dim=128, tokens=16))
    constants = constants_of(described)
    given = {
        "x_ptr": "*bf16", "x_stride": "i32", "codes_ptr": POINTERS[described.dtype], "scales_ptr": "*fp16",
        "offsets_ptr": "*i64", "slots_ptr": "*i64", "count": "i32", "begin": "i32",
    }  # fmt: skip
    more = {"CODEC": codec, "RUN_BYTES": constants.pop("RUN"), "TOKENS": 16, "X_ITEM_STEP": 128}
    build(append_side, given, {**constants, **more}, 4)


def latents(dtype, codec):
    given = {
        "q_ptr": "*bf16", "q_stride": "i32", "q_step": "i32", "out_ptr": "*bf16", **RESULTS,
        "latent_ptr": POINTERS[dtype], "rope_ptr": "*bf16", **STEPS, "begin": "i32",
    }  # fmt: skip
    latent = 512 * dtype.itemsize
    constants = {
        "CODEC": codec, "TOKENS": 16, "RANK": 512, "ROPE": 64, "HEADS": 128, "CAPPED": False, "ALIGN": 16, "ROWS": 16,
        "KEYS": 32, "LATENT_ITEM": dtype.itemsize, "ROPE_ITEM": 2, "ROPE_BYTES": latent, "VECTOR_BYTES": latent + 128,
        "LATENT_COLUMNS": 512, "ROPE_COLUMNS": 64,
    }  # fmt: skip
    build(attend_latents, given, constants, 8)


def main():
    attention("int8", "int4", 64, 3, 3, 16, 64, 4)
    append("int8", "key")
    append("int4", "value")
    latents(torch.uint8, "fp8")
    given = {**RESULTS, "out_ptr": "*bf16", "sinks_ptr": "*fp32", **dict.fromkeys(
        ("rows_ptr", "bounds_ptr", "sources_ptr"), "*i32"
    )}  # fmt: skip
    sizes = {"DIM": 128, "KV_HEADS": 8, "REPEATS": 4, "SINKS": True, "ROWS": 4, "COLUMNS": 128}
    build(merge_pieces, given, sizes, 4)
    places = dict.fromkeys(("source_ptr", "target_ptr", "source_at_ptr", "target_at_ptr"), "*i64")
    build(copy_words, {**places, "words": "i32"}, {"WORDS": 2048}, 4)
    if "all" in sys.argv:
        for key, value in product(STORED, STORED):
            attention(key, value, 128, 4, 8, 16, 64, 4)
        attention("int8", "int4", 128, 4, 8, 64, 64, 8)
        attention("int8", "int4", 256, 4, 1, 16, 32, 4)
        attention("int8", "int4", 256, 4, 1, 32, 32, 8)
        for codec, side in product(STORED, ("key", "value")):
            append(codec, side)
        latents(torch.bfloat16, "bf16")


if __name__ == "__main__":
    main()
