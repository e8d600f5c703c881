"""The GPU's kernels are programs that Triton compiles, and keep what they work on in registers; needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton here: pip install 'kvist[gpu]'")


@pytest.mark.parametrize("what", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu(what, tmp_path):
    script = Path(__file__).parent / "compile_triton.py"
    # In a process of its own: kernels are compiled or interpreted from their first import on.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": ""}
    done = subprocess.run(
        [sys.executable, script, tmp_path, what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == {
        "append_side", "attend_pages", "attend_latents", "merge_pieces", "copy_words"
    }  # fmt: skip
    # Two pairs of codecs lack one register each; tiles that are too large lack hundreds of bytes.
    spilled = [line for line in lines if int(line[2]) > 8]
    assert not spilled, "bytes that did not fit into registers"
