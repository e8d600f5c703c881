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

class Segment:
    def __init__(
        self,
        *,
        geometry: Geometry,
        arena: int,
        layers: list[int],
        blocks: _Numbers,
        begin: _Numbers,
        count: _Numbers,
        seen: _Numbers,
    ) -> None: ...

class Plan:
    def __init__(
        self,
        *,
        segments: list[Segment],
        open: int,
        scale: float,
        softcap: float,
        window: int,
        runs: _Numbers,
        sealed: _Numbers,
        drawn: list[int] = ...,
    ) -> None: ...
    def attend(self, kind: int, slot: int, q: int, q_stride: int, kv: int, kv_stride: int, out: int, /) -> None: ...
    def weigh(self, amx: bool, slot: int, q: int, q_stride: int, /) -> None: ...
    def attend_anywhere(
        self,
        build: int,
        type: int,
        slot: int,
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
    def multiply(self, kind: int, x: int, rows: int, out: int, bias: int, /) -> None: ...

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
        spread_begin: int,
        spread_end: int,
        turns_back: bool,
        spread: float,
    ) -> None: ...
    def run(
        self,
        kind: int,
        plans: list[Plan | None],
        tables: list[int],
        stream: int,
        change: int,
        kept: int,
        rows: int,
        count: int,
        /,
    ) -> None: ...

def spread(kind: int, x: int, rows: int, stride: int, heads: int, dim: int, factor: float, /) -> None: ...
def move_kept(
    arena: int,
    layer_bytes: int,
    layers: int,
    kv_heads: int,
    block_tokens: int,
    pieces: _Numbers,
    source: _Numbers,
    target: _Numbers,
    kept: int,
    count: int,
    /,
) -> None: ...
def rotate(
    kind: int, x: int, rows: int, stride: int, heads: int, dim: int, cos: int, sin: int, weight: int, eps: float, /
) -> None: ...
def add_norm(
    kind: int, stream: int, change: int, after: int, weight: int, out: int, rows: int, width: int, eps: float, /
) -> None: ...
