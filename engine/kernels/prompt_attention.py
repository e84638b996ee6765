"""Attention of a prompt's tokens: many queries share what is read, and arithmetic is the limit."""

from __future__ import annotations

import numpy as np

from engine.kernels.activations import from_row
from engine.kernels.attention import CHUNK, LOWEST, softmax_chunk
from engine.kernels.jit import inlined, kernel
from engine.kernels.kv import of_side, stretch
from engine.kernels.simd import LANES, exp, lane_max, load, splat, store, transpose, widen
from engine.kernels.tile import TILE_TOKENS, tile_dot, tile_store, tile_zero

QUERIES = 192  # that share a copied chunk of K and V; whole tiles
assert QUERIES % TILE_TOKENS == 0


def prompt_work_size(head_dim: int) -> int:
    """Floats of working memory that a rank needs for `prompt_attention`."""
    return QUERIES * (2 * head_dim + CHUNK + 2) + 2 * CHUNK * head_dim


@kernel
def prompt_attention(out, q, kv, layer, runs, heads, work, work_at, me):
    """out[t] = softmax(q[t] k^T) v over the rows up to t's own, for this rank's queries of prompts.

    out, q: Rows of (n_heads, head_dim). `work` has room for `prompt_work_size(head_dim)` from
    `work_at`. The queries of one key head of a run are numbered token * group + head, and taken in
    blocks.
    """
    group, kv_dim = heads.n_heads // heads.n_kv_heads, heads.n_kv_heads * heads.head_dim
    for run in range(runs.n_prompts):
        begin, start, table = runs.first[run], runs.start[run], runs.table[run]
        k, v = of_side(kv, table, layer, 0, kv_dim), of_side(kv, table, layer, 1, kv_dim)
        some_out, some_q = from_row(out, begin), from_row(q, begin)
        n_queries = (runs.first[run + 1] - begin) * group
        n_blocks = (n_queries + QUERIES - 1) // QUERIES
        for item in range(me.rank, n_blocks * heads.n_kv_heads, me.ranks):
            kv_head, first = item % heads.n_kv_heads, item // heads.n_kv_heads * QUERIES
            n = min(QUERIES, n_queries - first)
            query_block(some_out, some_q, k, v, start, first, n, kv_head, heads, work, work_at)


@kernel
def query_block(out, q, k, v, start, first, n, kv_head, heads, work, work_at):
    """Queries first to first + n of one key head against all rows that they see."""
    n_heads, n_kv_heads, head_dim = heads
    group = n_heads // n_kv_heads
    queries = work_at  # (QUERIES, head_dim)
    sums = queries + QUERIES * head_dim  # (QUERIES, head_dim) weighted sums of values
    scores = sums + QUERIES * head_dim  # (QUERIES, CHUNK)
    peaks = scores + QUERIES * CHUNK  # (QUERIES,) largest scores
    totals = peaks + QUERIES  # (QUERIES,) sums of exponentials
    keys = totals + QUERIES  # (CHUNK / 16, head_dim, 16): 16 keys by their elements
    values = keys + CHUNK * head_dim  # (head_dim / 16, CHUNK, 16): rows, 16 elements at a time

    for r in range(n):
        token, head = (first + r) // group, kv_head * group + (first + r) % group
        at = q.at + token * q.stride + head * head_dim
        for i in range(head_dim):
            work[queries + r * head_dim + i] = q.data[at + i]
            work[sums + r * head_dim + i] = np.float32(0.0)
        work[peaks + r], work[totals + r] = LOWEST, np.float32(0.0)

    n_rows = start + (first + n - 1) // group + 1  # that the block's last query sees
    for row in range(0, n_rows, CHUNK):
        copy_chunk(work, keys, values, k, v, row, min(CHUNK, n_rows - row), kv_head, head_dim)
        # the first query that sees the chunk, from a whole tile on
        begin = max((row - start) * group - first, 0) // TILE_TOKENS * TILE_TOKENS

        for j in range(0, min(CHUNK, n_rows - row), LANES):
            for r in range(begin, n, TILE_TOKENS):
                valid, q_at = min(TILE_TOKENS, n - r), queries + r * head_dim
                w_at, total = keys + j * head_dim, tile_zero(1, TILE_TOKENS)
                total = tile_dot(total, work, w_at, LANES, 0, work, q_at, head_dim, head_dim)
                tile_store(work, scores + r * CHUNK + j, CHUNK, valid, total, False)

        for r in range(begin, n):
            seen = min(CHUNK, start + (first + r) // group + 1 - row)
            old = work[peaks + r]
            peak, total = softmax_chunk(work, scores + r * CHUNK, seen, old)
            if peak > old:
                scale = lane_max(exp(splat(old - peak)))
                work[peaks + r] = peak
                work[totals + r] *= scale
                for i in range(sums + r * head_dim, sums + (r + 1) * head_dim, LANES):
                    store(work, i, load(work, i) * scale)
            work[totals + r] += total

        for i in range(0, head_dim, LANES):
            for r in range(begin, n, TILE_TOKENS):
                valid, p_at = min(TILE_TOKENS, n - r), scores + r * CHUNK
                seen = min(CHUNK, start + (first + r + valid - 1) // group + 1 - row)
                w_at, total = values + i * CHUNK, tile_zero(1, TILE_TOKENS)
                total = tile_dot(total, work, w_at, LANES, 0, work, p_at, CHUNK, seen)
                tile_store(work, sums + r * head_dim + i, head_dim, valid, total, True)

    for r in range(n):
        token, head = (first + r) // group, kv_head * group + (first + r) % group
        at = out.at + token * out.stride + head * head_dim
        for i in range(0, head_dim, LANES):
            store(out.data, at + i, load(work, sums + r * head_dim + i) / work[totals + r])


@inlined
def copy_chunk(work, keys, values, k, v, row, n, kv_head, head_dim):
    """K and V of one head in rows row to row + n, as tiles read them.

    Beside the rows of other heads every row is on another page, and in the same few sets of the
    cache.
    """
    begin = 0
    while begin < n:  # a stretch of rows that lie one behind the other
        some_k, some_v = stretch(k, row + begin), stretch(v, row + begin)
        end = min(n, begin + len(some_k) // k.width)
        at, j = kv_head * head_dim, begin
        while j < end:
            to = keys + j // LANES * LANES * head_dim + j % LANES
            if j % LANES == 0 and j + LANES <= end:
                for i in range(0, head_dim, LANES):
                    transpose(work, to + i * LANES, some_k, at + i, k.width)
                rows = LANES
            else:
                for i in range(head_dim):
                    work[to + i * LANES] = widen(some_k[at + i])
                rows = 1
            at += rows * k.width
            j += rows
        for j in range(begin, end):
            at = (j - begin) * v.width + kv_head * head_dim
            for i in range(0, head_dim, LANES):
                store(work, values + i * CHUNK + j * LANES, load(some_v, at + i))
        begin = end
