"""Attention of generated tokens: all rows of K and V are read once, at the memory's speed.

Rows are streamed whole, all heads of one before the next. A rank takes chunks of rows and leaves
what each gathered for a token, a part, unmerged; then ranks merge heads.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.attention import CHUNK, LOWEST, softmax_chunk
from engine.kernels.jit import inlined, kernel
from engine.kernels.kv import of_side, prefetch_range, rows_left, stretch
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


def part_size(n_heads: int, head_dim: int) -> int:
    """Floats of a part: (n_heads, head_dim) weighted sums of values, n_heads largest scores and
    n_heads sums of exponentials."""
    return n_heads * (head_dim + 2)


@kernel
def decode_attention(parts, q, kv, layer, runs, heads, work, work_at, me):
    """This rank's parts of softmax(q k^T) v for the generated tokens of a step, unmerged.

    q: Rows of (n_heads, head_dim). K and V are streamed whole, row by row, since a row is a page
    and the prefetcher stops at pages. `work` has room for `decode_work_size(n_heads)` from
    `work_at`, `parts` for runs.parts[-1] of `part_size`.
    """
    n_runs, kv_dim, scratch = len(runs.start), heads.n_kv_heads * heads.head_dim, (work, work_at)
    begin, end = share(runs.parts[n_runs], me)
    for run in range(runs.n_prompts, n_runs):
        first, start, table = runs.first[run], runs.start[run], runs.table[run]
        k, v = of_side(kv, table, layer, 0, kv_dim), of_side(kv, table, layer, 1, kv_dim)
        before, n = runs.parts[run], runs.first[run + 1] - first
        stop = min(end, runs.parts[run + 1])
        last = (stop - 1 - before) // n + 1  # the chunk behind this rank's of the run
        for part in range(max(begin, before), stop):
            chunk, token = (part - before) // n, (part - before) % n
            n_rows = start + token + 1  # that the token sees: perhaps none of the run's last chunk
            if chunk * CHUNK < n_rows:
                q_at, ahead = q.at + (first + token) * q.stride, min(n_rows, last * CHUNK)
                attend_chunk(parts, part, q.data, q_at, k, v, chunk, n_rows, ahead, heads, scratch)


@kernel
def attend_chunk(parts, part, q, q_at, k, v, chunk, n_rows, end, heads, scratch):
    """One part: what a token's chunk gathers. `end`: of the rows that this rank will read.

    scratch: `work` of decode_attention, and where this rank's begins.
    """
    work, work_at = scratch
    n_heads, _, head_dim = heads
    start, stop = chunk * CHUNK, min(n_rows, (chunk + 1) * CHUNK)
    row = start
    while row < stop:
        n = min(stop - row, rows_left(k, row))
        score_rows(work, work_at + row - start, q, q_at, k, row, n, end, heads)
        row += n

    values = part * n_heads * (head_dim + 2)
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
def score_rows(scores, at, q, q_at, k, row, n, end, heads):
    """scores[head, j] = q[head] k[row + j] for n rows of a stretch; scores: (n_heads, CHUNK)."""
    keys = stretch(k, row)
    twos, ones = (tile_zero(2, 2), tile_zero(2, 1)), (tile_zero(1, 2), tile_zero(1, 1))
    j = score_tiles(twos, scores, at, q, q_at, keys, 0, n, k, row, end, heads)
    score_tiles(ones, scores, at, q, q_at, keys, j, n, k, row, end, heads)


@inlined
def score_tiles(empty, scores, at, q, q_at, keys, j, n, k, row, end, heads):
    """Rows from j on, as many at a time as the tiles have groups: heads by pairs, an odd one alone.

    `empty` tiles: for two heads and for one; `keys` are the stretch of k from `row` on. Returns the
    first row that was left over.
    """
    pair, single = empty
    n_heads, n_kv_heads, head_dim = heads
    group, rows = n_heads // n_kv_heads, tile_groups(pair)
    while j + rows <= n:
        ahead = stretch(k, min(row + j + AHEAD, end - 1))
        for kv_head in range(n_kv_heads):
            prefetch_range(ahead, kv_head * rows * head_dim, (kv_head + 1) * rows * head_dim)
            k_at = (j * n_kv_heads + kv_head) * head_dim
            head, last = kv_head * group, (kv_head + 1) * group
            while head + 2 <= last:
                score_heads(pair, scores, at + j, q, q_at, head, keys, k_at, heads)
                head += 2
            if head < last:
                score_heads(single, scores, at + j, q, q_at, head, keys, k_at, heads)
        j += rows
    return j


@inlined
def score_heads(zero, scores, at, q, q_at, head, k, k_at, heads):
    """The scores of a tile of rows and heads."""
    head_dim, kv_dim = heads.head_dim, heads.n_kv_heads * heads.head_dim
    q_at, total = q_at + head * head_dim, zero
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
def merge_parts(out, parts, runs, heads, me):
    """out = the parts of each generated token merged in order, for this rank's heads; out: Rows."""
    for run in range(runs.n_prompts, len(runs.start)):
        first, n = runs.first[run], runs.first[run + 1] - runs.first[run]
        begin, end = share(n * heads.n_heads, me)
        for i in range(begin, end):
            token, head = i // heads.n_heads, i % heads.n_heads
            n_chunks = (runs.start[run] + token + CHUNK) // CHUNK
            to = out.at + (first + token) * out.stride + head * heads.head_dim
            merge_head(out.data, to, parts, runs.parts[run] + token, n, n_chunks, head, heads)


@inlined
def merge_head(out, to, parts, part, step, n_chunks, head, heads):
    """out = one head of a token's `n_chunks` parts, which are `step` apart."""
    n_heads, _, head_dim = heads
    size = n_heads * (head_dim + 2)
    at, peak_at = head * head_dim, n_heads * head_dim + head
    peak, total = LOWEST, np.float32(0.0)
    for i in range(to, to + head_dim):
        out[i] = np.float32(0.0)
    for chunk in range(n_chunks):
        peak = max(peak, parts[(part + chunk * step) * size + peak_at])
    for chunk in range(n_chunks):
        begin = (part + chunk * step) * size
        scale = lane_max(exp(splat(parts[begin + peak_at] - peak)))
        total += scale * parts[begin + peak_at + n_heads]
        for i in range(0, head_dim, LANES):
            store(out, to + i, fma(load(parts, begin + at + i), scale, load(out, to + i)))
    for i in range(to, to + head_dim, LANES):
        store(out, i, load(out, i) / total)
