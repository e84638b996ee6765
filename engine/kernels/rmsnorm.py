"""RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import numpy as np

from engine.kernels.jit import inlined, kernel
from engine.kernels.simd import LANES, fma, lane_sum, load, splat, store


@inlined
def rmsnorm(out, out_at, x, x_at, weight, weight_at, n, width, eps):
    """out[:width] = x / sqrt(mean(x[:n]^2) + eps) * weight, from the given places.

    `width` is a multiple of 16; x is zero from n on, so the sum may run over all.
    """
    squares = splat(np.float32(0.0))
    for i in range(0, width, LANES):
        part = load(x, x_at + i)
        squares = fma(part, part, squares)
    mean = lane_sum(squares) / np.float32(n)
    scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
    for i in range(0, width, LANES):
        store(out, out_at + i, load(x, x_at + i) * scale * load(weight, weight_at + i))


@kernel
def rmsnorm_rows(out, x, weight, weight_at, n, eps, first, last):
    """RMSNorm of rows first to last of `x` into those of `out`, both Rows of one stride."""
    for t in range(first, last):
        to, at = out.at + t * out.stride, x.at + t * x.stride
        rmsnorm(out.data, to, x.data, at, weight, weight_at, n, x.stride, eps)
