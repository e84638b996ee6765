"""Token embeddings, out of a matrix that is packed for products (matmul.py)."""

from __future__ import annotations

import numpy as np

from engine.kernels.activations import BLOCK, padded
from engine.kernels.int8 import STEP
from engine.kernels.matmul import by_store, is_q8
from engine.kernels.simd import LANES, widen


def embed(store, x, at, token, dim):
    """x[at : at + padded dim] = row `token` of the packed (vocab_size, dim) matrix in `store`."""


@by_store(embed)
def embed_for(store, x, at, token, dim):
    def floats(store, x, at, token, dim):
        first = token // LANES * dim * LANES + token % LANES
        for c in range(dim):
            x[at + c] = widen(store.data[first + c * LANES])
        for c in range(dim, padded(dim)):
            x[at + c] = np.float32(0.0)

    def q8(store, x, at, token, dim):
        first, lane = token // LANES * padded(dim) * LANES, token % LANES
        for c in range(padded(dim)):
            q = store.data[first + c // STEP * STEP * LANES + lane * STEP + c % STEP]
            scale = store.scales[first // BLOCK + c // BLOCK * LANES + lane]
            x[at + c] = np.float32(np.int32(q) - 128) * widen(scale)

    return q8 if is_q8(store) else floats
