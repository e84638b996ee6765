"""The machine's own limits: how fast it reads memory, and what it is."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import numpy as np

from engine import memory
from engine.kernels.jit import cpu, kernel
from engine.kernels.simd import LANES, lane_sum, load, splat
from engine.kernels.team import share
from engine.model import Team

SIZE = 512 << 20  # bytes: far more than any cache holds


@kernel
def read_all(me, data, sums):
    """Read this rank's share of `data`, four streams at a time, into a sum that is kept."""
    first, last = share(len(data) // (4 * LANES), me)
    quarter = (last - first) * LANES
    a = b = c = d = splat(np.float32(0.0))
    for i in range(first * 4 * LANES, first * 4 * LANES + quarter, LANES):
        a = a + load(data, i)
        b = b + load(data, i + quarter)
        c = c + load(data, i + 2 * quarter)
        d = d + load(data, i + 3 * quarter)
    sums[me.rank] = lane_sum(a + b + (c + d))


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
