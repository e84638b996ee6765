"""Rows of a checkpoint's matrix -> the packed layouts of matmul.py."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from engine.kernels.activations import BLOCK, padded
from engine.kernels.int8 import STEP, half
from engine.kernels.jit import inlined, kernel
from engine.kernels.simd import I16, I32, LANES, widen


@intrinsic
def narrow(tc, value, like):
    """A float32 as an element of `like`: itself, or the nearest bfloat16, ties to even."""

    def build(ctx, b, sig, args):
        if sig.return_type == types.float32:
            return args[0]
        bits = b.bitcast(args[0], I32)
        odd = b.and_(b.lshr(bits, I32(16)), I32(1))
        return b.trunc(b.lshr(b.add(b.add(bits, I32(0x7FFF)), odd), I32(16)), I16)

    return like.dtype(types.float32, like), build


@inlined
def is_finite(x):
    return x - x == 0


@kernel
def pack_rows(out, at, rows):
    """Pack `rows` (n, k) from out[at] on; a last group of fewer than 16 is filled with zeros.

    rows: float32, or bfloat16 as uint16. out: float32 or bfloat16, flat.
    Returns whether every weight is finite, as it is kept.
    """
    n, k = rows.shape
    finite = True
    for first in range(0, n, LANES):
        group = at + first * k
        height = min(LANES, n - first)
        for c in range(k):
            for r in range(height):
                value = widen(rows[first + r, c])
                kept = narrow(value, out)
                finite &= is_finite(value) and is_finite(widen(kept))
                out[group + c * LANES + r] = kept
            for r in range(height, LANES):
                out[group + c * LANES + r] = 0
    return finite


@kernel
def quantize_rows(out, scales, at, rows):
    """Pack `rows` (n, k) as Q8_0 from out[at] on; columns are padded with zeros to whole blocks.

    As ggml defines it: a block of 32 along the row has the scale d = max |w| / 127, kept as
    float16, and q = w / d rounded, halves away from zero (d not yet rounded). out holds q + 128.
    rows: float32, or bfloat16 as uint16. Returns whether every weight and scale is finite.
    """
    n, k = rows.shape
    width = padded(k)
    block = np.zeros(BLOCK, np.float32)
    finite = True
    for first in range(0, n, LANES):
        group = at + first * width
        for r in range(LANES):
            for start in range(0, width, BLOCK):
                peak = np.float32(0.0)
                for c in range(BLOCK):
                    inside = first + r < n and start + c < k
                    value = widen(rows[first + r, start + c]) if inside else np.float32(0.0)
                    finite &= is_finite(value)
                    block[c] = value
                    peak = max(peak, abs(value))
                d = peak / np.float32(127.0)
                inverse = np.float32(1.0) / d if d > 0 else np.float32(0.0)
                for c in range(BLOCK):
                    value = block[c] * inverse
                    q = np.trunc(value)
                    q += np.trunc(np.float32(2.0) * (value - q))  # -1, 0 or 1
                    i = group + (start + c // STEP * STEP) * LANES + r * STEP + c % STEP
                    out[i] = np.uint8(np.int32(q) + 128)
                scales[(group + start * LANES) // BLOCK + r] = half(d)
                finite &= is_finite(widen(half(d)))
    return finite
