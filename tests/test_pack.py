"""engine/kernels/pack.py: the packed layout, and rounding to bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.pack import pack_rows

SHAPES = [(1, 1), (1, 7), (15, 3), (16, 3), (17, 3), (31, 5), (32, 5), (33, 5), (50, 1), (64, 33)]
FLOAT32_MAX = np.finfo(np.float32).max
BFLOAT16_MAX = float.fromhex("0x1.fep127")


def call(out: np.ndarray, at: int, rows: np.ndarray) -> bool:
    """The kernel's one call in this file; `rows` are read-only, as those of a mapped file are."""
    rows = rows.copy()
    rows.flags.writeable = False
    return pack_rows(out, at, rows)


def pack(rows: np.ndarray, dtype: type, before: int = 0) -> tuple[np.ndarray, bool]:
    """`rows` packed behind `before` elements that stay as they are, and whether all are finite."""
    n, k = rows.shape
    out = np.full(before + -(-n // 16) * 16 * k, 77, dtype)
    finite = call(out, before, rows)
    assert (out[:before] == 77).all()
    return out[before:], finite


def laid_out(rows: np.ndarray) -> np.ndarray:
    """packed[(r // 16 * k + c) * 16 + r % 16] = w[r, c], and zeros."""
    n, k = rows.shape
    out = np.zeros(-(-n // 16) * 16 * k, rows.dtype)
    for r in range(n):
        for c in range(k):
            out[(r // 16 * k + c) * 16 + r % 16] = rows[r, c]
    return out


def widened(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def nearest_bfloat16(x: np.ndarray) -> np.ndarray:
    """Of the two bfloat16 around x, the nearer; of two as near, the one whose last bit is 0."""
    below = x.view(np.uint32) >> 16  # towards zero
    wide = [np.abs(widened(b).astype(np.float64)) for b in (below, below + 1)]
    wide[1][np.isinf(wide[1])] = 2.0**128  # what would follow the largest, if there were room
    down, up = np.abs(x.astype(np.float64)) - wide[0], wide[1] - np.abs(x.astype(np.float64))
    return (below + ((up < down) | ((up == down) & (below % 2 == 1)))).astype(np.uint16)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_layout(shape):
    """A row or column in the wrong place; a last group that holds garbage, not zeros."""
    rows = numbers(*shape)
    stored = nearest_bfloat16(rows)
    for source, dtype, wanted in [
        (rows, np.float32, rows),
        (rows, np.uint16, stored),
        (stored, np.uint16, stored),
        (stored, np.float32, widened(stored)),
    ]:
        found, finite = pack(source, dtype, before=11)
        np.testing.assert_array_equal(found, laid_out(wanted))
        assert finite


def test_pieces_equal_the_whole():
    """A piece of rows packed over its neighbour, or with a gap, where a file is read in pieces."""
    rows = numbers(50, 7)
    out = np.full(64 * 7, np.nan, np.float32)
    for start in (32, 0, 16, 48):
        assert call(out, start * 7, rows[start : start + 16])
    np.testing.assert_array_equal(out, pack(rows, np.float32)[0])


def test_every_bfloat16_survives():
    """A stored bfloat16 that changes on its way: a denormal flushed, a sign lost."""
    stored = np.arange(1 << 16, dtype=np.uint16)
    stored = stored[np.isfinite(widened(stored))].reshape(-1, 16)
    exact, finite = pack(stored, np.uint16)
    np.testing.assert_array_equal(exact, laid_out(stored))
    wide, wide_finite = pack(stored, np.float32)
    np.testing.assert_array_equal(wide.view(np.uint32), laid_out(widened(stored)).view(np.uint32))
    again, again_finite = pack(widened(stored), np.uint16)
    np.testing.assert_array_equal(again, laid_out(stored))
    assert finite and wide_finite and again_finite


@pytest.mark.parametrize("high", [0x3F80, 0x3F81, 0x0000, 0x0001, 0x007F, 0x00FF, 0x7F7E, 0xC2FF])
def test_ties_go_to_even(high):
    """Halves rounded up, or bits cut off: a bias in every weight. Both signs, denormals too."""
    low = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (np.uint32(high) << 16 | low).view(np.float32)
    for signed in (x, -x):
        found = pack(signed[:, None], np.uint16)[0][:6]
        np.testing.assert_array_equal(found, nearest_bfloat16(signed))
    up = high + high % 2  # where a tie goes
    np.testing.assert_array_equal(pack(x[:, None], np.uint16)[0][2:5], [high, up, high + 1])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@settings(max_examples=200, deadline=None)
def test_nearest(values):
    """A float32 rounded to a bfloat16 that is not the nearest."""
    x = np.float32(values)
    np.testing.assert_array_equal(pack(x[:, None], np.uint16)[0][: len(x)], nearest_bfloat16(x))


def test_around_the_largest_bfloat16():
    """A weight beyond the largest bfloat16 that wraps to a small one or changes its sign."""
    half = 2.0**119  # half a unit in its last place
    last = np.nextafter(np.float32(BFLOAT16_MAX + half), np.float32(0))
    x = np.float32([BFLOAT16_MAX, -BFLOAT16_MAX, last, BFLOAT16_MAX + half, -FLOAT32_MAX])
    found, _ = pack(x[:, None], np.uint16)
    np.testing.assert_array_equal(found[:5], [0x7F7F, 0xFF7F, 0x7F7F, 0x7F80, 0xFF80])
    assert pack(x[:3, None], np.uint16)[1] and pack(x[:, None], np.float32)[1]


@pytest.mark.parametrize("value", [BFLOAT16_MAX + 2.0**119, FLOAT32_MAX, -FLOAT32_MAX])
def test_too_large_for_bfloat16(value):
    """A weight that is finite in the checkpoint and kept as an infinity, without a word."""
    assert not pack(np.float32([[1], [value]]), np.uint16)[1]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFF0000, 0x7F810000])
def test_what_is_not_finite_is_found(bits, dtype):
    """NaN or infinity in a checkpoint, seen only when every reply is garbage; fastmath's isfinite,
    which is always true."""
    bad = np.uint32([bits]).view(np.float32)[0]
    for shape in ((1, 1), (17, 3), (32, 2)):
        for place in np.ndindex(shape):
            rows = numbers(*shape)
            rows[place] = bad
            assert not pack(rows, dtype)[1]
            stored = (rows.view(np.uint32) >> 16).astype(np.uint16)
            assert not pack(stored, dtype)[1]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_in_the_low_bits(bits):
    """A NaN that rounding turns into an infinity, a number or zero, and so hides."""
    rows = np.ones((2, 1), np.float32)
    rows.view(np.uint32)[1] = bits
    assert not pack(rows, np.uint16)[1]
    assert not pack(rows, np.float32)[1]
