"""Matrix products with packed weights.

A matrix of (n, k) is kept in groups of 16 rows, so that the weights which meet one activation are
one vector; rows are padded with zeros to whole groups. No sum crosses lanes, and the order of every
sum is that of the columns, so a token gets the same bits alone and among others.

Floats: column by column, `data[(r // 16 * k + c) * 16 + r % 16] = w[r, c]`, float32 or bfloat16.
Q8_0: columns padded to whole blocks of 32, four of them at a time (see int8.py),
`data[(r // 16 * k + c // 4 * 4) * 16 + r % 16 * 4 + c % 4] = q[r, c] + 128`, with a float16 scale
for 32 columns of a row, `scales[(r // 16 * (k // 32) + c // 32) * 16 + r % 16]`. Activations are
quantised as well (activations.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from engine.kernels.activations import BLOCK, block_of, padded, quantize, tile_for
from engine.kernels.int8 import (
    STEP,
    STEP_GROUPS,
    STEP_TOKENS,
    tile_scaled,
    tile_start,
    tile_step,
)
from engine.kernels.jit import FLAGS, inlined, kernel
from engine.kernels.simd import LANES, prefetch
from engine.kernels.team import draw, share
from engine.kernels.tile import (
    TILE_GROUPS,
    TILE_TOKENS,
    tile_dot,
    tile_groups,
    tile_store,
    tile_tokens,
    tile_zero,
)

LINE = 64  # bytes of a cache line
# One token's product waits for memory. Four row groups at once are four independent streams and
# chains of sums, which is what it takes to keep up with it.
ALONE_GROUPS = 4
SHARED = 75  # per cent of several tokens' rows that are not drawn: memory is faster in one piece


class Floats(NamedTuple):
    """Packed matrices one after the other, float32 or bfloat16 (as int16)."""

    data: np.ndarray


class Q8(NamedTuple):
    """Packed Q8_0 matrices one after the other."""

    data: np.ndarray  # uint8
    scales: np.ndarray  # float16 (as int16)


class Matrix(NamedTuple):
    """A packed (n, k) matrix, the one that starts at weight `at` of `store`."""

    store: Floats | Q8
    at: int
    n: int
    k: int  # columns as stored


def is_q8(store) -> bool:
    """Whether Numba's type `store` is that of Q8."""
    return isinstance(store, types.BaseNamedTuple) and store.instance_class is Q8


def by_store(stub):
    """Let compiled code call `stub(store, ...)`, which is not code but a name and a promise.

    The decorated function gets Numba's types of the arguments while the caller is compiled, and
    returns the function that is meant for them: one for Q8, one for Floats.
    """
    return overload(stub, jit_options=FLAGS, inline="never")


def columns(store, k):
    """Columns that a row of k weights takes in `store`."""


@by_store(columns)
def columns_for(store, k):
    if is_q8(store):
        return lambda store, k: padded(k)
    return lambda store, k: k


@inlined
def of_layer(store, layer, n, k):
    """Matrix `layer` of those in `store`, all (n, k)."""
    k = columns(store, k)
    return Matrix(store, layer * padded(n) * k, n, k)


@kernel
def matmul(out, w, x, n_tokens, add, me):
    """out[t, r] = sum over c of w[r, c] * x[t, c], for this rank's share of the rows r of w.

    out: Rows, (n_tokens, w.n) with room for w.n padded to 16. x: Inputs, (n_tokens, w.k).
    With `add` the product is added to what `out` holds. One token's rows are shared by blocks of
    32, so that what a rank computed it can quantise. Of several tokens, who is done with its share
    of most of the rows goes on with tiles of the rest: else all would wait for a rank whose
    processor others use as well.
    """
    if n_tokens == 0:  # no logits are wanted amid a prompt
        return
    n_groups = (w.n + LANES - 1) // LANES
    if n_tokens == 1:
        g, last = share(padded(w.n) // BLOCK, me)
        g, last = g * BLOCK // LANES, min(last * BLOCK // LANES, n_groups)
        by_tiles(tile_zero(ALONE_GROUPS, 1), tile_zero(1, 1), out, w, x, g, last, last, 1, add)
        return
    size = most_groups(w.store)
    n_tiles = (n_groups + size - 1) // size
    shared = n_tiles * SHARED // 100
    g, last = share(shared, me)
    many_tokens(w.store, out, w, x, g * size, last * size, last * size, n_tokens, add)
    n = n_tiles - shared
    i = draw(n, me)
    while i < n:
        following = draw(n, me)
        g, ahead = (shared + i) * size, (shared + following) * size
        many_tokens(w.store, out, w, x, g, min(g + size, n_groups), ahead, n_tokens, add)
        i = following


def most_groups(store):
    """Row groups of the largest tile."""


@by_store(most_groups)
def most_groups_for(store):
    groups = STEP_GROUPS if is_q8(store) else TILE_GROUPS
    return lambda store: groups


def many_tokens(store, out, w, x, g, last, ahead, n_tokens, add):
    """Several tokens times row groups g to last; those at `ahead` come next, so far as is known."""


@by_store(many_tokens)
def many_tokens_for(store, out, w, x, g, last, ahead, n_tokens, add):
    def floats(store, out, w, x, g, last, ahead, n_tokens, add):
        wide, narrow = tile_zero(TILE_GROUPS, TILE_TOKENS), tile_zero(1, TILE_TOKENS)
        by_tiles(wide, narrow, out, w, x, g, last, ahead, n_tokens, add)

    def q8(store, out, w, x, g, last, ahead, n_tokens, add):
        n = tile_for(n_tokens)
        if n == 2:
            wide, narrow = tile_zero(STEP_GROUPS, 2), tile_zero(1, 2)
            by_tiles(wide, narrow, out, w, x, g, last, ahead, n_tokens, add)
        elif n == 3:
            wide, narrow = tile_zero(STEP_GROUPS, 3), tile_zero(1, 3)
            by_tiles(wide, narrow, out, w, x, g, last, ahead, n_tokens, add)
        elif n == 4:
            wide, narrow = tile_zero(STEP_GROUPS, 4), tile_zero(1, 4)
            by_tiles(wide, narrow, out, w, x, g, last, ahead, n_tokens, add)
        else:
            wide, narrow = tile_zero(STEP_GROUPS, STEP_TOKENS), tile_zero(1, STEP_TOKENS)
            by_tiles(wide, narrow, out, w, x, g, last, ahead, n_tokens, add)

    return q8 if is_q8(store) else floats


@inlined
def by_tiles(wide, narrow, out, w, x, g, last, ahead, n_tokens, add):
    """Row groups g to last, as many at a time as the tile `wide` has, then those left over."""
    g = all_tokens(wide, out, w, x, g, last, ahead, n_tokens, add)
    all_tokens(narrow, out, w, x, g, last, ahead, n_tokens, add)


@inlined
def all_tokens(zero, out, w, x, g, last, ahead, n_tokens, add):
    """Every token times row groups g to last, as many of them as fill the empty tile `zero`.

    The weights of the next groups, behind the last of them those at `ahead`, are asked for
    meanwhile, evenly: otherwise a few tokens wait for memory first and multiply then, 1.3 times as
    long.
    """
    groups, passes = tile_groups(zero), (n_tokens - 1) // tile_tokens(zero) + 1
    share_of = groups * LANES // passes
    while g + groups <= last:
        at = w.at + g * LANES * w.k
        next_at = w.at + (g + groups if g + groups < last else ahead) * LANES * w.k
        for i in range(passes):
            t = i * tile_tokens(zero)
            asked = next_at + i * share_of * w.k
            total = dot_rows(w.store, zero, at, w.k, x, t, asked, share_of)
            to = out.at + t * out.stride + g * LANES
            valid = min(tile_tokens(zero), n_tokens - t)
            tile_store(out.data, to, out.stride, valid, total, add)
        g += groups
    return g


def dot_rows(store, zero, at, k, x, t, asked, share_of):
    """The tile of row groups whose weights start at `at`, times the tokens from t on.

    Among several tokens, `share_of` weights a column are asked for, from `asked` on.
    """


@by_store(dot_rows)
def dot_rows_for(store, zero, at, k, x, t, asked, share_of):
    def floats(store, zero, at, k, x, t, asked, share_of):
        x_at = x.rows.at + t * x.rows.stride
        group = k * LANES
        return tile_dot(zero, store.data, at, LANES, group, x.rows.data, x_at, x.rows.stride, k)

    def q8(store, zero, at, k, x, t, asked, share_of):
        group, total = k * LANES, zero
        for c in range(0, k, BLOCK):
            block = block_of(t, c, x.rows.stride // BLOCK, tile_tokens(zero))
            acc = tile_start(total, x.starts, block)
            for i in range(c, min(c + BLOCK, k), STEP):  # "min": LLVM would unroll, and spill
                x_at = block * BLOCK + i - c
                acc = tile_step(acc, store.data, at + i * LANES, group, x.q, x_at, BLOCK)
                if tile_tokens(zero) > 1:
                    for line in range(tile_groups(zero)):
                        prefetch(store.data, asked + i * share_of + line * LINE)
            scale_at = (at + c * LANES) // BLOCK
            step = group // BLOCK
            total = tile_scaled(total, acc, store.scales, scale_at, step, x.scales, block)
        return total

    return q8 if is_q8(store) else floats


def prepare(store, x, n_tokens, first, last, start, stop):
    """Make rows first to last of Inputs x (n_tokens), columns start to stop, what `store` takes."""


@by_store(prepare)
def prepare_for(store, x, n_tokens, first, last, start, stop):
    def q8(store, x, n_tokens, first, last, start, stop):
        quantize(x, n_tokens, first, last, start, stop)

    return q8 if is_q8(store) else lambda store, x, n_tokens, first, last, start, stop: None
