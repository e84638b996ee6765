"""Attention over cached rows, for a whole group of query heads at once.

A row of K or V holds all of a token's key heads. Both forms cut the rows into chunks of 64 at
fixed absolute positions and take the chunks, and a chunk's rows, in order, so a query's result
depends on itself and the rows before it, never on how work was shared, what else was in the step,
or where the rows lie (k and v are KvRows, see kv.py). Masking is by loop
bounds. The softmax is the streaming one (Milakov & Gimelshein 2018): a chunk gives its largest
score, its sum of exponentials and its weighted sum of values, and chunks merge by rescaling.

`prompt_attention` is for tokens of the prompt, many queries at a time; `decode_attention` and
`merge_chunks` are for a generated token. Queries come divided by sqrt(head_dim).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.kernels.jit import inlined, kernel
from engine.kernels.kv import stretch
from engine.kernels.simd import (
    LANES,
    exp,
    first_lanes,
    fma,
    lane_max,
    lane_sum,
    largest,
    load,
    splat,
    store,
    transpose,
    widen,
)
from engine.kernels.team import share
from engine.kernels.tile import TILE_TOKENS, tile_dot, tile_load, tile_store, tile_zero

CHUNK = 64  # rows of a chunk
QUERIES = 192  # that share a copied chunk of K and V; whole tiles
assert QUERIES % TILE_TOKENS == 0
LOWEST = np.float32(-3.0e38)


class Heads(NamedTuple):
    """n_heads query heads, in groups that share one of n_kv_heads key heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


@inlined
def softmax_chunk(scores, at, seen, peak):
    """scores[at : at + seen] become exponentials relative to the largest of them and `peak`.

    The rest of the chunk becomes 0. Returns (largest, sum of the exponentials).
    """
    top = splat(peak)
    for i in range(0, seen, LANES):
        top = largest(top, first_lanes(load(scores, at + i), seen - i, LOWEST))
    peak = lane_max(top)
    total = splat(np.float32(0.0))
    for i in range(0, CHUNK, LANES):
        part = first_lanes(exp(load(scores, at + i) - peak), seen - i, np.float32(0.0))
        store(scores, at + i, part)
        total = total + part
    return peak, lane_sum(total)


# ---------------------------------------------------------------- a generated token


def decode_work_size(n_heads: int) -> int:
    """Floats of working memory that a rank needs for `decode_attention`: heads in pairs."""
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
    for chunk in range(first, last):
        start, stop = chunk * CHUNK, min(n_rows, (chunk + 1) * CHUNK)
        row = start
        while row < stop:
            keys = stretch(k, row)
            n = min(stop - row, len(keys) // k.width)
            score_rows(work, work_at + row - start, q, keys, n, heads)
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
            rows = stretch(v, row)
            n = min(stop - row, len(rows) // v.width)
            gather_rows(parts, values, work, work_at + row - start, rows, n, heads)
            row += n


@inlined
def score_rows(scores, at, q, k, n, heads):
    """scores[head, j] = q[head] k[j] for n rows of k; scores: (n_heads, CHUNK) from `at`."""
    n_heads, n_kv_heads, head_dim = heads
    group = n_heads // n_kv_heads
    for j in range(n):
        for kv_head in range(n_kv_heads):
            k_at = (j * n_kv_heads + kv_head) * head_dim
            for head in range(kv_head * group, (kv_head + 1) * group):
                dot = splat(np.float32(0.0))
                for i in range(0, head_dim, LANES):
                    dot = fma(load(q, head * head_dim + i), load(k, k_at + i), dot)
                scores[at + head * CHUNK + j] = lane_sum(dot)


@inlined
def gather_rows(out, out_at, p, at, v, n, heads):
    """out[head] += sum over j < n of p[head, j] * v[j], in order; p: (n_heads, CHUNK) from `at`."""
    n_heads, n_kv_heads, head_dim = heads
    kv_dim, group = n_kv_heads * head_dim, n_heads // n_kv_heads
    # Heads of a group whose sums are gathered together; of an odd group one, in half a tile.
    pair = 2 - group % 2
    for j in range(0, n, 4):  # four rows at a time: a sum is loaded and stored once for four
        rows = min(4, n - j)
        for head in range(0, n_heads, pair):
            v_at = j * kv_dim + head // group * head_dim
            p_at = at + head * CHUNK + j
            for i in range(0, head_dim, LANES):
                to = out_at + head * head_dim + i
                total = tile_load(tile_zero(1, 2), out, to, head_dim, pair)
                total = tile_dot(total, v, v_at + i, kv_dim, 0, p, p_at, CHUNK, rows)
                tile_store(out, to, head_dim, pair, total, False)


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


# ---------------------------------------------------------------- tokens of the prompt


def prompt_work_size(head_dim: int) -> int:
    """Floats of working memory that a rank needs for `prompt_attention`."""
    return QUERIES * (2 * head_dim + CHUNK + 2) + 2 * CHUNK * head_dim


@kernel
def prompt_attention(out, q, k, v, start, n_tokens, heads, work, work_at, me):
    """out[t] = softmax(q[t] k^T) v over rows 0 to start + t, for this rank's queries.

    out: Rows. q: (n_tokens, n_heads, head_dim). k, v: start + n_tokens rows and more.
    `work` has room for `prompt_work_size(head_dim)` from `work_at`.
    The queries of one key head are numbered t * group + head, and taken in blocks.
    """
    n_queries = n_tokens * (heads.n_heads // heads.n_kv_heads)
    n_blocks = (n_queries + QUERIES - 1) // QUERIES
    for item in range(me.rank, n_blocks * heads.n_kv_heads, me.ranks):
        kv_head, first = item % heads.n_kv_heads, item // heads.n_kv_heads * QUERIES
        n = min(QUERIES, n_queries - first)
        query_block(out, q, k, v, start, first, n, kv_head, heads, work, work_at)


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
        at = (token * n_heads + head) * head_dim
        for i in range(head_dim):
            work[queries + r * head_dim + i] = q[at + i]
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
