"""Attention of a generated token: all rows of K and V are read once, at the memory's speed.

Rows are streamed whole, all heads of one before the next. A rank takes chunks of rows and leaves
what each gathered, unmerged; then ranks merge heads.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.attention import CHUNK, LOWEST, softmax_chunk
from engine.kernels.jit import inlined, kernel
from engine.kernels.kv import prefetch_range, rows_left, stretch
from engine.kernels.simd import LANES, exp, fma, lane_max, load, splat, store
from engine.kernels.team import share
from engine.kernels.tile import (
    tile_dot,
    tile_fma_lanes,
    tile_groups,
    tile_load,
    tile_store,
    tile_store_sums,
    tile_zero,
)

GATHER = 8  # rows of V whose weighted sum is taken at once
# Rows between those that are read and those that are asked for. Every row is a page and the
# processor's own prefetching stops at pages: asking reads float16 rows 1.4 times as fast, float32
# ones 1.05 times. From 4 to 32 rows it is the same.
AHEAD = 8


def decode_work_size(n_heads: int) -> int:
    """Floats of working memory that a rank needs for `decode_attention`.

    A chunk's scores of every head, and of one more: of an odd count the last is read as a pair.
    """
    return (n_heads + 1) * CHUNK


def parts_size(n_rows: int, n_heads: int, head_dim: int) -> int:
    """Floats that `decode_attention` needs for what a token's chunks gather."""
    return -(-n_rows // CHUNK) * n_heads * (head_dim + 2)


@kernel
def decode_attention(parts, q, k, v, n_rows, heads, work, work_at, me):
    """This rank's chunks of softmax(q k^T) v for one token, unmerged.

    q: (n_heads, head_dim). k, v: n_rows rows and more, streamed whole, row by row, since a row is a
    page and the prefetcher stops at pages. `work` has room for `decode_work_size(n_heads)` from
    `work_at`. parts: a chunk has (n_heads, head_dim) values, then n_heads largest scores, then
    n_heads sums.
    """
    n_heads, _, head_dim = heads
    first, last = share((n_rows + CHUNK - 1) // CHUNK, me)
    end = min(n_rows, last * CHUNK)  # of this rank's rows
    for chunk in range(first, last):
        start, stop = chunk * CHUNK, min(n_rows, (chunk + 1) * CHUNK)
        row = start
        while row < stop:
            n = min(stop - row, rows_left(k, row))
            score_rows(work, work_at + row - start, q, k, row, n, end, heads)
            row += n

        values = chunk * n_heads * (head_dim + 2)
        peaks = values + n_heads * head_dim
        for i in range(values, peaks):
            parts[i] = np.float32(0.0)
        for head in range(n_heads):
            peak, total = softmax_chunk(work, work_at + head * CHUNK, stop - start, LOWEST)
            parts[peaks + head], parts[peaks + n_heads + head] = peak, total

        row = start
        while row < stop:
            n = min(stop - row, rows_left(v, row))
            gather_rows(parts, values, work, work_at + row - start, v, row, n, end, heads)
            row += n


@inlined
def score_rows(scores, at, q, k, row, n, end, heads):
    """scores[head, j] = q[head] k[row + j] for n rows of a stretch; scores: (n_heads, CHUNK)."""
    keys = stretch(k, row)
    j = score_tiles(tile_zero(2, 2), tile_zero(2, 1), scores, at, q, keys, 0, n, k, row, end, heads)
    score_tiles(tile_zero(1, 2), tile_zero(1, 1), scores, at, q, keys, j, n, k, row, end, heads)


@inlined
def score_tiles(pair, single, scores, at, q, keys, j, n, k, row, end, heads):
    """Rows from j on, as many at a time as the tiles have groups: heads by pairs, an odd one alone.

    `pair` and `single` are empty tiles, for two heads and for one; `keys` are the stretch of k from
    `row` on. Returns the first row that was left over.
    """
    n_heads, n_kv_heads, head_dim = heads
    group, rows = n_heads // n_kv_heads, tile_groups(pair)
    while j + rows <= n:
        ahead = stretch(k, min(row + j + AHEAD, end - 1))
        for kv_head in range(n_kv_heads):
            prefetch_range(ahead, kv_head * rows * head_dim, (kv_head + 1) * rows * head_dim)
            k_at = (j * n_kv_heads + kv_head) * head_dim
            head, last = kv_head * group, (kv_head + 1) * group
            while head + 2 <= last:
                score_heads(pair, scores, at + j, q, head, keys, k_at, heads)
                head += 2
            if head < last:
                score_heads(single, scores, at + j, q, head, keys, k_at, heads)
        j += rows
    return j


@inlined
def score_heads(zero, scores, at, q, head, k, k_at, heads):
    """The scores of a tile of rows and heads."""
    head_dim, kv_dim = heads.head_dim, heads.n_kv_heads * heads.head_dim
    q_at, total = head * head_dim, zero
    for i in range(0, head_dim, LANES):
        total = tile_fma_lanes(total, k, k_at + i, kv_dim, q, q_at + i, head_dim)
    tile_store_sums(scores, at + head * CHUNK, CHUNK, total)


@inlined
def gather_rows(out, out_at, p, at, v, row, n, end, heads):
    """out[head] += sum over j < n of p[head, j] * v[row + j], in order, for a stretch of n rows.

    p: (n_heads, CHUNK) from `at`.
    """
    n_heads, n_kv_heads, head_dim = heads
    group, values = n_heads // n_kv_heads, stretch(v, row)
    # Heads of a group whose sums are gathered together; of an odd group one, in half a tile.
    pair = 2 - group % 2
    for j in range(0, n, GATHER):  # some rows at a time: a sum is loaded and stored once for them
        rows = min(GATHER, n - j)
        ahead = stretch(v, min(row + j + AHEAD, end - 1))
        for head in range(0, n_heads, pair):
            # The rows ahead are asked for bit by bit, as many elements here as are read meanwhile:
            # of 8 heads and 8 rows of 1,024, head 2's begin at element 2,048.
            part = head * GATHER * v.width // n_heads
            v_at = (j * n_kv_heads + head // group) * head_dim
            p_at, to = at + head * CHUNK + j, out_at + head * head_dim
            i = 0
            while i + 2 * LANES <= head_dim:
                prefetch_range(ahead, part + i * GATHER, part + (i + 2 * LANES) * GATHER)
                add_tile(tile_zero(2, 2), out, to + i, p, p_at, values, v_at + i, rows, pair, heads)
                i += 2 * LANES
            if i < head_dim:
                add_tile(tile_zero(1, 2), out, to + i, p, p_at, values, v_at + i, rows, pair, heads)


@inlined
def add_tile(zero, out, to, p, p_at, v, v_at, rows, pair, heads):
    """out += p v for as many elements of a pair of heads as the tile `zero` has."""
    kv_dim = heads.n_kv_heads * heads.head_dim
    total = tile_load(zero, out, to, heads.head_dim, pair)
    total = tile_dot(total, v, v_at, kv_dim, LANES, p, p_at, CHUNK, rows)
    tile_store(out, to, heads.head_dim, pair, total, False)


@kernel
def merge_chunks(out, parts, n_rows, heads, me):
    """out = the chunks of `decode_attention` merged in order, for this rank's heads."""
    n_heads, _, head_dim = heads
    size = n_heads * (head_dim + 2)
    n_chunks = (n_rows + CHUNK - 1) // CHUNK
    first, last = share(n_heads, me)
    for head in range(first, last):
        at, peak_at = head * head_dim, n_heads * head_dim + head
        peak, total = LOWEST, np.float32(0.0)
        for i in range(at, at + head_dim):
            out[i] = np.float32(0.0)
        for chunk in range(n_chunks):
            peak = max(peak, parts[chunk * size + peak_at])
        for chunk in range(n_chunks):
            part = chunk * size
            scale = lane_max(exp(splat(parts[part + peak_at] - peak)))
            total += scale * parts[part + peak_at + n_heads]
            for i in range(at, at + head_dim, LANES):
                store(out, i, fma(load(parts, part + i), scale, load(out, i)))
        for i in range(at, at + head_dim, LANES):
            store(out, i, load(out, i) / total)
