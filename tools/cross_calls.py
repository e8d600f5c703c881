"""Calls of the C++ kernels, written to programs that carry them out: what stands in for the extension in the tests.

Two programs get each call (cross_driver.cpp): one for another processor, which an emulator plays, and one for this one.
The tests see what the first answers. Both must have stored the same bytes, and attended alike.
"""

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

# By how much two results may differ: of the largest, and of themselves, for the rounding of their type.
SLACK = 2e-5
ROUNDING = (2**-7, 2**-10, 0.0)  # cpu_portable.h: Type
ITEM_BYTES = (2, 2, 4)
ATTEND, MOVE = 0, 1


class Program:
    """A process that answers calls."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, kind: int, threads: int, parts: Sequence[bytes]) -> None:
        """Write a call: its arrays, each behind its length."""
        assert self.process.stdin is not None
        head = np.array([kind, threads], np.int64).tobytes()
        framed = [piece for part in parts for piece in (np.int64(len(part)).tobytes(), part)]
        self.process.stdin.write(b"".join([head, *framed]))
        self.process.stdin.flush()

    def answer(self) -> bytes:
        """Read one array of what it answers."""
        return self._read(int(np.frombuffer(self._read(8), np.int64)[0]))

    def _read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        found = self.process.stdout.read(count)
        if len(found) < count:
            raise RuntimeError(f"the program of the kernels ended with {self.process.wait()}")
        return found

    def close(self) -> int:
        """Let it end; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


@dataclass
class Met:
    """What the calls were, as far as a run must have seen all of it."""

    calls: int = 0
    codecs: set[tuple[str, int]] = field(default_factory=set)
    worst: float = 0.0
    """The largest difference between both programs' results, as a share of the largest result."""


class Kernels(ModuleType):
    """Takes the place of ``kvist.kernels._cpu``, with the portable kernels alone.

    Args:
        programs: of which the first one's answers count.
    """

    sanitized = False
    Geometry = SimpleNamespace
    Segment = SimpleNamespace

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__("kvist.kernels._cpu")
        self.programs = programs
        self.threads = 1
        self.met = Met()

    def has_avx512(self) -> bool:
        """Of another processor: no."""
        return False

    def ask_for_amx(self) -> bool:
        """Likewise."""
        return False

    def portable_builds(self) -> list[int]:
        """What every processor of the architecture has."""
        return [0]

    def borrow_threads(self, start: int, threads: int) -> None:
        """The programs have threads of their own."""
        self.threads = threads

    def Plan(self, **given: Any) -> "Plan":  # noqa: N802
        """As the extension has it."""
        return Plan(self, SimpleNamespace(**given))

    def move_kept(
        self, arena: int, layer_bytes: int, layers: int, kv_heads: int, block_tokens: int, pieces: Any, source: Any,
        target: Any, kept: int, count: int,
    ) -> None:  # fmt: skip
        """As the extension has it."""
        size = int(max(source.max(), target.max())) + layers * layer_bytes
        shape = [layer_bytes, layers, kv_heads, block_tokens, count]
        parts = [words([size]), held(arena, size), words(shape), words(pieces), words(source), words(target)]
        (found,) = self.call(MOVE, [*parts, held(kept, 8 * layers * kv_heads * count)], 1)
        ctypes.memmove(arena, found, size)

    def call(self, kind: int, parts: Sequence[bytes], arrays: int, dtype: int | None = None) -> list[bytes]:
        """Ask all programs, and hold their answers against each other: the last array is results, of a type."""
        for program in self.programs:
            program.ask(kind, self.threads, parts)
        found, *others = [[program.answer() for _ in range(arrays)] for program in self.programs]
        self.met.calls += 1
        for other in others:
            stored = arrays if dtype is None else arrays - 1
            assert found[:stored] == other[:stored], "two processors stored other bytes"
            if dtype is not None:
                self.compare(numbers(found[-1], dtype), numbers(other[-1], dtype), dtype)
        return found

    def compare(self, one: Any, two: Any, dtype: int) -> None:
        """Results of two processors, which differ in the order of sums."""
        known = np.isfinite(one)
        assert np.array_equal(one[~known], two[~known], equal_nan=True), (
            "one processor has numbers where another has none"
        )
        assert np.isfinite(two[known]).all(), "one processor has numbers where another has none"
        if known.any():
            largest = max(float(np.abs(one[known]).max()), 1e-30)
            difference = np.abs(one[known] - two[known])
            self.met.worst = max(self.met.worst, float(difference.max()) / largest * (dtype == 2))
            assert (difference <= SLACK * largest + ROUNDING[dtype] * np.abs(one[known])).all()


class Plan:
    """A step, kept as it was given: the programs plan it anew with each call."""

    def __init__(self, kernels: Kernels, given: SimpleNamespace) -> None:
        assert not given.drawn, "the portable kernels tell no key what it draws"
        self.kernels = kernels
        self.given = given

    def attend_anywhere(
        self, build: int, dtype: int, slot: int, q: int, q_stride: int, kv: int, kv_stride: int, sinks: int, out: int
    ) -> None:
        """As the extension has it."""
        segments, item = self.given.segments, ITEM_BYTES[dtype]
        shape = segments[0].geometry
        rows, queries = len(segments[0].seen), shape.repeats * shape.kv_heads
        regions = joined([(segment.arena, segment.arena + reach(segment)) for segment in segments])
        parts = [words([end - begin for begin, end in regions]), *(held(begin, end - begin) for begin, end in regions)]
        parts.append(words([len(segments)]))
        for segment in segments:
            g = segment.geometry
            region = next(n for n, (begin, end) in enumerate(regions) if begin <= segment.arena < end)
            place = [region, segment.arena - regions[region][0]]
            sizes = [g.slab_bytes, g.blocks_per_slab, g.block_bytes, g.layer_bytes, g.key_run_bytes, g.value_run_bytes]
            form = [g.key, g.value, g.block_tokens, g.kv_heads, g.dim, g.repeats]
            parts.append(words([*place, *sizes, *form]))
            arrays = (segment.layers, segment.blocks, segment.begin, segment.count, segment.seen)
            parts += [words(array) for array in arrays]
            self.kernels.met.codecs |= {("keys", g.key), ("values", g.value)}
        factors = np.array([self.given.scale, self.given.softcap], np.float32).view(np.int64)
        parts.append(words([self.given.open, self.given.window, *factors]))
        parts += [words(self.given.runs), words(self.given.sealed)]
        out_bytes = rows * queries * shape.dim * item
        parts.append(words([dtype, slot, q_stride, kv_stride, out_bytes]))
        parts.append(held(q, ((rows - 1) * q_stride + queries * shape.dim) * item))
        parts.append(held(kv, ((rows - 1) * kv_stride + 2 * shape.kv_heads * shape.dim) * item))
        parts.append(held(sinks, 4 * queries) if sinks else b"")
        *arenas, results = self.kernels.call(ATTEND, parts, len(regions) + 1, dtype)
        for (begin, end), found in zip(regions, arenas, strict=True):
            ctypes.memmove(begin, found, end - begin)
        ctypes.memmove(out, results, out_bytes)


def words(numbers: Any) -> bytes:
    """As int64."""
    return np.ascontiguousarray(numbers, np.int64).tobytes()


def held(address: int, size: int) -> bytes:
    """What memory holds."""
    return ctypes.string_at(address, size)


def numbers(array: bytes, dtype: int) -> Any:
    """Results as float32."""
    if dtype == 0:
        return (np.frombuffer(array, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(array, np.float16 if dtype == 1 else np.float32).astype(np.float32)


def reach(segment: Any) -> int:
    """Bytes of the arena up to the end of the last block that a segment's tables name."""
    g, last = segment.geometry, max(0, int(segment.blocks.max(initial=0)))
    return last // g.blocks_per_slab * g.slab_bytes + last % g.blocks_per_slab * g.block_bytes + g.block_bytes


def joined(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces of memory, those that overlap as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(regions):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
