"""Matrix products with packed weights.

A matrix of (n, k) is kept in groups of 16 rows, column by column, so that the 16 weights of a
column are one vector: `packed[(r // 16 * k + c) * 16 + r % 16] = w[r, c]`, rows padded with zeros
to a multiple of 16. No sum crosses lanes, and the order of every sum is that of the columns, so a
token gets the same bits alone and among others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.kernels.jit import inlined, kernel
from engine.kernels.simd import LANES, TILE_GROUPS, TILE_TOKENS, tile_dot, tile_store, tile_zero
from engine.kernels.team import share

# One token's product waits for memory. Four row groups at once are four independent chains of
# FMAs, which is what it takes to keep up with it.
ALONE_GROUPS = 4


class Matrix(NamedTuple):
    """A packed (n, k) matrix that starts at data[at], float32 or bfloat16."""

    data: np.ndarray
    at: int
    n: int
    k: int


class Rows(NamedTuple):
    """A row for each token: data[at + t * stride : + width], float32."""

    data: np.ndarray
    at: int
    stride: int


@inlined
def padded(n):
    """n rounded up to whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@inlined
def of_layer(data, layer, n, k):
    """Matrix `layer` of those that lie one after the other in `data`."""
    return Matrix(data, layer * padded(n) * k, n, k)


@kernel
def matmul(out, w, x, n_tokens, add, me):
    """out[t, r] = sum over c of w[r, c] * x[t, c], for this rank's share of the rows r of w.

    out: (n_tokens, w.n) with room for w.n padded to 16. x: (n_tokens, w.k).
    With `add` the product is added to what `out` holds.
    """
    g, last = share(padded(w.n) // LANES, me)
    group = w.k * LANES  # weights in a group of rows
    if n_tokens == 1:
        while g + ALONE_GROUPS <= last:
            total = tile_zero(ALONE_GROUPS, 1)
            at = w.at + g * group
            total = tile_dot(total, w.data, at, LANES, group, x.data, x.at, x.stride, 1, w.k)
            tile_store(out.data, out.at + g * LANES, out.stride, 1, total, add)
            g += ALONE_GROUPS
    while g + TILE_GROUPS <= last:
        all_tokens(tile_zero(TILE_GROUPS, TILE_TOKENS), out, w, x, g, n_tokens, add)
        g += TILE_GROUPS
    while g < last:
        all_tokens(tile_zero(1, TILE_TOKENS), out, w, x, g, n_tokens, add)
        g += 1


@inlined
def all_tokens(zero, out, w, x, g, n_tokens, add):
    """The rows of the empty tile `zero`, from row group `g` on, times every token."""
    group = w.k * LANES
    at = w.at + g * group
    for t in range(0, n_tokens, TILE_TOKENS):
        valid = min(TILE_TOKENS, n_tokens - t)
        x_at, out_at = x.at + t * x.stride, out.at + t * out.stride + g * LANES
        total = tile_dot(zero, w.data, at, LANES, group, x.data, x_at, x.stride, valid, w.k)
        tile_store(out.data, out_at, out.stride, valid, total, add)
