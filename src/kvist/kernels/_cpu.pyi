import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.int64]

sanitized: bool

def has_avx512() -> bool: ...
def ask_for_amx() -> bool: ...
def portable_builds() -> list[int]: ...
def borrow_threads(start: int, threads: int, /) -> None: ...

class Geometry:
    def __init__(
        self,
        *,
        slab_bytes: int,
        blocks_per_slab: int,
        block_bytes: int,
        layer_bytes: int,
        key_run_bytes: int,
        value_run_bytes: int,
        key: int,
        value: int,
        block_tokens: int,
        kv_heads: int,
        dim: int,
        repeats: int,
    ) -> None: ...

class Plan:
    def __init__(
        self,
        *,
        geometry: Geometry,
        scale: float,
        softcap: float,
        window: int,
        blocks: _Numbers,
        begin: _Numbers,
        start: _Numbers,
        count: _Numbers,
        runs: _Numbers,
    ) -> None: ...
    def attend(self, amx: bool, arena: int, q: int, q_stride: int, kv: int, kv_stride: int, out: int, /) -> None: ...
    def attend_anywhere(
        self,
        build: int,
        type: int,
        arena: int,
        q: int,
        q_stride: int,
        kv: int,
        kv_stride: int,
        sinks: int,
        out: int,
        /,
    ) -> None: ...

class Matrix:
    def __init__(self, *, outputs: int, inputs: int, bits: int, result: int) -> None: ...
    def pack_bf16(self, weight: int, /) -> None: ...
    def pack_codes(self, codes: int, scales: int, minima: int, /) -> None: ...
    def multiply(self, amx: bool, x: int, rows: int, out: int, bias: int, /) -> None: ...

class Chain:
    def __init__(self) -> None: ...
    def add(
        self,
        *,
        qkv: Matrix,
        output: Matrix,
        gate_up: Matrix,
        down: Matrix,
        biases: list[int],
        norms: list[int],
        eps: list[float],
        slot: int,
        group: int,
        rope: int,
        queries: int,
        kv_heads: int,
        dim: int,
    ) -> None: ...
    def run(
        self,
        amx: bool,
        plans: list[Plan | None],
        arenas: list[int],
        layer_bytes: list[int],
        tables: list[int],
        stream: int,
        change: int,
        kept: int,
        rows: int,
        /,
    ) -> None: ...

def rotate(
    x: int, rows: int, stride: int, heads: int, dim: int, cos: int, sin: int, weight: int, eps: float, /
) -> None: ...
def add_norm(
    stream: int, change: int, after: int, weight: int, out: int, rows: int, width: int, eps: float, /
) -> None: ...
