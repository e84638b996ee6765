"""Loops that only read, or only multiply: what the kernels' speeds are compared to (machine.py)."""

from __future__ import annotations

import numpy as np

from engine.kernels.int8 import (
    STEP,
    STEP_GROUPS,
    STEP_TOKENS,
    tile_scaled,
    tile_start,
    tile_step,
)
from engine.kernels.jit import kernel
from engine.kernels.simd import LANES, lane_sum, load, splat
from engine.kernels.team import share
from engine.kernels.tile import TILE_GROUPS, TILE_TOKENS, tile_dot, tile_store, tile_zero

COLUMNS = 64  # of the tiles that measure arithmetic: 10 kB of floats, a third of an L1


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


@kernel
def multiply_floats(me, out, w, x, passes):
    """Add w x to a float32 tile `passes` times; w, (groups, COLUMNS, 16), and x stay in L1."""
    total = tile_zero(TILE_GROUPS, TILE_TOKENS)
    for _ in range(passes):
        total = tile_dot(total, w, 0, LANES, COLUMNS * LANES, x, 0, COLUMNS, COLUMNS)
    at = me.rank * (len(out) // me.ranks)
    tile_store(out, at, TILE_GROUPS * LANES, TILE_TOKENS, total, False)


@kernel
def multiply_bytes(me, out, w, scales, x, x_scales, starts, passes):
    """Add w x to an int32 tile `passes` times, 8-bit factors in the form that int8.py chose.

    What it adds up to is of no use, and passes 2^31 on the way.
    """
    total = tile_zero(STEP_GROUPS, STEP_TOKENS)
    acc = tile_start(total, starts, 0)
    for _ in range(passes):
        for i in range(0, COLUMNS, STEP):
            acc = tile_step(acc, w, i * LANES, COLUMNS * LANES, x, i, COLUMNS)
    total = tile_scaled(total, acc, scales, 0, LANES, x_scales, 0)
    at = me.rank * (len(out) // me.ranks)
    tile_store(out, at, STEP_GROUPS * LANES, STEP_TOKENS, total, False)
