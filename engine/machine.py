"""The machine's own limits: how fast it reads memory, how fast it multiplies, and what it is."""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path

import numpy as np

from engine import memory
from engine.kernels.bounds import COLUMNS, multiply_bytes, multiply_floats, read_all
from engine.kernels.int8 import STEP_GROUPS, STEP_TOKENS
from engine.kernels.jit import cpu
from engine.kernels.simd import LANES
from engine.kernels.tile import TILE_GROUPS, TILE_TOKENS
from engine.model import Team

SIZE = 512 << 20  # bytes: far more than any cache holds
PASSES = 20_000  # over those columns: some 5 ms


class ReadBandwidth:
    """Measures reading, so that it can be interleaved with what is compared to it."""

    def __init__(self, threads: int):
        self._team = Team(threads)
        self._data = memory.empty(SIZE // 4)
        self._data[:] = 1.0  # untouched pages are all one page, and read from cache
        self._sums = np.zeros(threads, np.float32)
        self.measure()

    def measure(self) -> float:
        """Bytes a second of one pass over 512 MB."""
        start = time.perf_counter()
        self._team.run(read_all, self._data, self._sums)
        return SIZE / (time.perf_counter() - start)


class Arithmetic:
    """Measures multiplying and adding, in the tiles that the kernels use, where no load waits.

    A product and its sum are two operations. "f32" is the peak of bf16 weights too, which are
    widened.
    """

    KINDS = ("f32", "int8")

    def __init__(self, threads: int):
        self._team = Team(threads)
        room = threads * 2 * LANES * max(TILE_TOKENS, STEP_TOKENS)
        out = memory.zeros(room)

        def full(n: int, dtype=np.float32) -> np.ndarray:
            ones = memory.empty(n, dtype)
            ones[:] = 1
            return ones

        floats = full(2 * COLUMNS * LANES), full(TILE_TOKENS * COLUMNS)
        weights, scales = full(2 * COLUMNS * LANES, np.uint8), full(2 * LANES, np.int16)
        x, x_scales = full(STEP_TOKENS * COLUMNS, np.int8), full(STEP_TOKENS)
        starts = full(STEP_TOKENS, np.int32)
        self._work = {
            "f32": (multiply_floats, out, *floats),
            "int8": (multiply_bytes, out, weights, scales, x, x_scales, starts),
        }
        tile = {"f32": TILE_GROUPS * TILE_TOKENS, "int8": STEP_GROUPS * STEP_TOKENS}
        self._operations = {
            kind: 2 * tile[kind] * LANES * COLUMNS * PASSES * threads for kind in self.KINDS
        }
        for kind in self.KINDS:
            self.measure(kind)

    def measure(self, kind: str) -> float:
        """Operations a second of `kind`, all ranks together: the best of three."""
        took = []
        for _ in range(3):
            start = time.perf_counter()
            self._team.run(*self._work[kind], PASSES)
            took.append(time.perf_counter() - start)
        return self._operations[kind] / min(took)


def bounds(threads: int, kind: str) -> dict[str, float]:
    """What profiles are compared to, a second: bytes read, operations of `kind` (of Arithmetic) and
    of float32; the medians of three."""
    memory, arithmetic = ReadBandwidth(threads), Arithmetic(threads)

    def rate(kind: str) -> float:
        return statistics.median(arithmetic.measure(kind) for _ in range(3))

    return {
        "bytes_per_second": statistics.median(memory.measure() for _ in range(3)),
        "operations_per_second": rate(kind),
        "f32_operations_per_second": rate("f32"),
    }


def describe() -> str:
    """The processor's name, LLVM's word for it and its features that matter here."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.split(":", 1)[1] for x in info.read_text().splitlines() if "model name" in x]
        name = names[0].strip() if names else name
    llvm, features = cpu()
    known = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "avxvnni", "neon", "dotprod")
    return f"{name} ({llvm}; {' '.join(f for f in known if f'+{f}' in features.split(','))})"
