"""Memory for kernels: flat and aligned to cache lines, so that no vector load crosses one."""

from __future__ import annotations

import numpy as np

LINE = 64  # bytes


def empty(n: int, dtype=np.float32) -> np.ndarray:
    """`n` elements that hold anything; (n,), starting on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(n * size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + n * size].view(dtype)


def zeros(n: int, dtype=np.float32) -> np.ndarray:
    """`n` zeros; (n,), starting on a cache line."""
    found = empty(n, dtype)
    found[:] = 0
    return found
