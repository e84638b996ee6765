"""Rows of a checkpoint's matrix -> the packed layout of matmul.py."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.jit import kernel
from engine.kernels.simd import LANES, widen

I16, I32 = ir.IntType(16), ir.IntType(32)


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


@kernel
def pack_rows(out, at, rows):
    """Pack `rows` (n, k) from out[at] on; a last group of fewer than 16 is filled with zeros.

    rows: float32, or bfloat16 as uint16. out: float32 or bfloat16, flat.
    Returns whether every weight is finite.
    """
    n, k = rows.shape
    finite = True
    for first in range(0, n, LANES):
        group = at + first * k
        height = min(LANES, n - first)
        for c in range(k):
            for r in range(height):
                value = widen(rows[first + r, c])
                finite &= value - value == 0
                out[group + c * LANES + r] = narrow(value, out)
            for r in range(height, LANES):
                out[group + c * LANES + r] = 0
    return finite
