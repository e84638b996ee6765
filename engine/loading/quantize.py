"""How matrices are kept, in plain NumPy: Q8_0 and bfloat16, there and back.

Kernels pack and quantise in one pass (kernels/pack.py); these functions say what that must give,
and make the weights of the NumPy backend.

Q8_0 is ggml's: blocks of 32 weights along the row, a float16 scale d = max |w| / 127 each, and
q = w / d rounded, halves away from zero. Its value is q * d.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32


def quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) float32 -> q (n, k) int8 and scales (n, k / 32) float16; k a multiple of 32."""
    blocks = w.reshape(len(w), -1, BLOCK)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))  # from d before it is rounded
    value = blocks * inverse
    q = np.trunc(value)
    q += np.trunc(2 * (value - q))
    with np.errstate(over="ignore"):
        return q.astype(np.int8).reshape(w.shape), d[..., 0].astype(np.float16)


def dequantize(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What Q8_0 weights stand for: (n, k) float32."""
    blocks = q.reshape(len(q), -1, BLOCK) * scales.astype(np.float32)[..., None]
    return blocks.reshape(q.shape)


def as_kept(w: np.ndarray, kind: str) -> np.ndarray:
    """The values that a float32 matrix has once it is kept as `kind`: "q8_0", "bf16" or "f32"."""
    if kind == "bf16":
        bits = w.view(np.uint32)
        bits = bits + 0x7FFF + (bits >> 16 & 1)  # to the nearest, ties to even
        return (bits & 0xFFFF0000).view(np.float32)
    if kind == "q8_0":
        k = w.shape[1]
        wide = np.pad(w, ((0, 0), (0, -k % BLOCK)))
        return np.ascontiguousarray(dequantize(*quantize(wide))[:, :k])
    return w
