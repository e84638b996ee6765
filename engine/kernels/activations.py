"""What matrices multiply: activations, a row a token, and what they are as Q8_0.

Blocks of 32 along a row have a scale of their own. They lie as a tile of tokens reads them, see
`block_of`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from engine.kernels.int8 import IN_PAIRS, STEP_TOKENS, store_whole
from engine.kernels.jit import inlined, kernel
from engine.kernels.simd import (
    LANES,
    lane_max,
    lane_sum,
    largest,
    load,
    magnitude,
    nearest,
    neighbours,
)
from engine.kernels.tile import TILE_TOKENS

BLOCK = 32  # weights, or activations, that share a scale
LEAST = np.float32(1e-36)  # 127 divided by 3.7e-37 or less is infinite: such a block is zeros


class Rows(NamedTuple):
    """A row for each token: data[at + t * stride : + width], float32."""

    data: np.ndarray
    at: int
    stride: int


@inlined
def from_row(rows, row):
    """The rows from `row` on."""
    return Rows(rows.data, rows.at + row * rows.stride, rows.stride)


class Inputs(NamedTuple):
    """Rows that a matrix multiplies, and room for what they are as Q8_0.

    There are rows for whole tiles of tokens: T = `rows_for(n_tokens)`.
    """

    rows: Rows
    q: np.ndarray  # (T * stride / 32, 32) int8, in the order of `block_of`
    scales: np.ndarray  # (T * stride / 32,) float32, of each block
    starts: np.ndarray  # (T * stride / 32,) int32, -128 times the sum of a block of q


@register_jitable  # to Python it is plain Python: nothing to compile at every start
def padded(n):
    """n rounded up to whole blocks."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


def rows_for(n_tokens: int) -> int:
    """Rows that Inputs of so many tokens need: whole tiles of them."""
    return 1 if n_tokens == 1 else n_tokens + max(TILE_TOKENS, STEP_TOKENS) - 1


@inlined
def tile_for(n_tokens):
    """How many of n tokens a tile of integers takes: of 8 it is 4 and 4, not 5 and 3 in one of 5.

    There are tiles of 1 to 4 tokens, and of the most that the processor has registers for.
    """
    passes = (n_tokens + STEP_TOKENS - 1) // STEP_TOKENS
    n = (n_tokens + passes - 1) // passes
    return n if n <= 4 else STEP_TOKENS


@inlined
def block_of(t, c, n_blocks, tile):
    """Which block of quantised activations holds column c of token t, of n_blocks to a token.

    Those that a tile of tokens reads together are neighbours, and those that it reads next follow.
    """
    return (t // tile * n_blocks + c // BLOCK) * tile + t % tile


@kernel
def quantize(x, n_tokens, first, last, start, stop):
    """Quantise Inputs x in blocks of 32: scale = the largest reach / 127, q = x / scale rounded.

    No q stands for NaN or infinity: their block's scale is NaN or infinite, and so is all that is
    multiplied with it.
    """
    n_blocks, tile = x.rows.stride // BLOCK, tile_for(n_tokens)
    for t in range(first, last):
        row = x.rows.at + t * x.rows.stride
        for c in range(start, stop, BLOCK):
            low, high = load(x.rows.data, row + c), load(x.rows.data, row + c + LANES)
            peak = lane_max(largest(reach(low), reach(high)))
            inverse = np.float32(127.0) / peak if peak > LEAST else np.float32(0.0)
            low, high = nearest(low * inverse), nearest(high * inverse)
            block = block_of(t, c, n_blocks, tile)
            store_whole(x.q, block * BLOCK, low)
            store_whole(x.q, block * BLOCK + LANES, high)
            total = lane_sum(low + high)
            x.scales[block] = peak / np.float32(127.0) + (total - total)  # + 0, or NaN
            x.starts[block] = np.int32(-128.0 * total)


@inlined
def reach(x):
    """What a scale has to hold of 16 activations: |x|, and of pairs the sum as well.

    A pair of one sign then is at most 128 together, rounded: with weights up to 255, 32,640 of 16
    bits' 32,767. Of two signs it cannot be more than one of them alone.
    """
    if IN_PAIRS:
        return largest(magnitude(x + neighbours(x)), magnitude(x))
    return magnitude(x)
