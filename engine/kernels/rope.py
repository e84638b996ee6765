"""Rotary positions (Su et al. 2021) on half-split pairs, as Hugging Face's checkpoints lay them.

Elements i and i + head_dim / 2 of a head are one pair, turned by the angle pos * theta^(-2i / d).
"""

from __future__ import annotations

import numpy as np

from engine.kernels.jit import inlined


def rope_table(head_dim: int, theta: float, n_rows: int) -> np.ndarray:
    """(n_rows, head_dim) float32: a row holds the cosines of a position's angles, then the sines.

    Angles are float32 products, as the models were trained with.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(theta) ** exponents
    angles = np.arange(n_rows, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


@inlined
def rotate(x, at, head_dim, table, pos):
    """Turn the head at x[at : at + head_dim] to position `pos`."""
    half = head_dim // 2
    row = pos * head_dim
    for i in range(half):
        cos, sin = table[row + i], table[row + half + i]
        a, b = x[at + i], x[at + half + i]
        x[at + i] = a * cos - b * sin
        x[at + half + i] = b * cos + a * sin
