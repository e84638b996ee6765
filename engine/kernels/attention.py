"""What both forms of attention share (decode_attention.py, prompt_attention.py).

A row of K or V holds all of a token's key heads. Both forms cut the rows into chunks of 64 at fixed
absolute positions and take the chunks, and a chunk's rows, in order, so a query's result depends on
itself and the rows before it, never on how work was shared, what else was in the step, or where the
rows lie (k and v are KvRows, see kv.py). Masking is by loop bounds. The softmax is the streaming
one (Milakov & Gimelshein 2018): a chunk gives its largest score, its sum of exponentials and its
weighted sum of values, and chunks merge by rescaling. Queries come divided by sqrt(head_dim).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.kernels.jit import inlined
from engine.kernels.simd import (
    LANES,
    exp,
    first_lanes,
    lane_max,
    lane_sum,
    largest,
    load,
    splat,
    store,
)

CHUNK = 64  # rows of a chunk
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
