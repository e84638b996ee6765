"""engine/kernels/simd.py: vectors against their NumPy twins, lane by lane and bit by bit."""

from __future__ import annotations

import operator

import numba
import numpy as np
import pytest

from engine.kernels import simd
from engine.kernels.simd import LANES, first_lanes, lane_max, lane_sum, load, store
from engine.kernels.tile import tile_dot, tile_store, tile_zero

NUMBERS = np.random.default_rng(0).standard_normal(3 * 1024).astype(np.float32).reshape(3, -1)
SPECIAL = np.float32([0, -0.0, 1, -1, 1e-40, -1e-40, 3e38, -3e38, np.inf, -np.inf])
ODD = np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 1e7, -1e-9, 0.0])


# Vectors cannot cross the border to Python: each wrapper loads, applies and stores.
def lanewise(operation, arguments: int):
    """A function of `arguments` flat arrays that gives `operation` of them, a vector at a time."""
    if arguments == 1:

        @numba.njit
        def run(out, a):
            for i in range(0, len(out), LANES):
                store(out, i, operation(load(a, i)))

    elif arguments == 2:

        @numba.njit
        def run(out, a, b):
            for i in range(0, len(out), LANES):
                store(out, i, operation(load(a, i), load(b, i)))

    else:

        @numba.njit
        def run(out, a, b, c):
            for i in range(0, len(out), LANES):
                store(out, i, operation(load(a, i), load(b, i), load(c, i)))

    def of_any_length(*arrays):
        n = len(arrays[0])
        full = [np.pad(a, (0, -n % LANES)).astype(np.float32) for a in arrays]
        out = np.full(len(full[0]), np.nan, np.float32)
        run(out, *full)
        return out[:n]

    return of_any_length


@numba.njit
def copy(out, out_at, x, x_at):
    store(out, out_at, load(x, x_at))


@numba.njit
def keep_first(out, x, n, other):
    store(out, 0, first_lanes(load(x, 0), n, other))


@numba.njit
def joined(x):
    return lane_sum(load(x, 0)), lane_max(load(x, 0))


@numba.njit
def with_scalars(out, x, s):
    v = load(x, 0)
    for i, y in enumerate((v + s, s + v, v - s, s - v, v * s, s * v, v / s, s / v)):
        store(out, i * LANES, y)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(found), bits(wanted.astype(np.float32)))


exp = lanewise(simd.exp, 1)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("at", [0, 1, 5, 16, 17])
def test_unaligned_load_and_store(at):
    """An aligned move of an array that starts on no 64-byte line, which ends the process."""
    numbers = np.arange(64, dtype=np.float32)
    out = np.full(64, np.nan, np.float32)
    copy(out[1:], at, numbers[1:], at + 2)
    wanted = np.full(64, np.nan, np.float32)
    wanted[1 + at :][:LANES] = numbers[1 + at + 2 :][:LANES]
    same(out, wanted)


def test_every_bfloat16():
    """A bit lost in widening: a sign, a denormal, the last bit of a fraction."""
    stored = np.arange(1 << 16, dtype=np.uint16)
    for offset in (0, 1):  # with 1, no load is aligned
        out = np.empty(1 << 16, np.float32)
        source = np.concatenate([np.zeros(offset, np.uint16), stored])[offset:]
        for i in range(0, 1 << 16, LANES):
            copy(out, i, source, i)
        wanted = stored.astype(np.uint32) << 16
        number = ~np.isnan(wanted.view(np.float32))
        np.testing.assert_array_equal(bits(out)[number], wanted[number])
        assert np.isnan(out[~number]).all()


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="needs NUMBA_BOUNDSCHECK=1")
@pytest.mark.parametrize("out_at, x_at", [(0, 5), (5, 0), (0, -1), (-1, 0), (0, 10**9)])
def test_out_of_bounds(out_at, x_at):
    """A vector that hangs over an array's end, read from or written to stray memory."""
    with pytest.raises(IndexError):
        copy(np.zeros(20, np.float32), out_at, np.zeros(20, np.float32), x_at)
    with pytest.raises(IndexError):
        copy(np.zeros(20, np.float32), out_at, np.zeros(20, np.uint16), x_at)


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="needs NUMBA_BOUNDSCHECK=1")
def test_tile_out_of_bounds():
    """A tile whose last row group or last token lies outside the array."""
    arrays = [np.zeros(n, np.float32) for n in (3 * 32, 40, 33)]
    tile_by_hand(*arrays, 32, 8, 3)
    for i, shorter in enumerate((3 * 32 - 1, 39, 32)):
        cut = [a[:shorter] if i == j else a for j, a in enumerate(arrays)]
        with pytest.raises(IndexError):
            tile_by_hand(*cut, 32, 8, 3)


# ---------------------------------------------------------------- lane by lane


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
def test_arithmetic(name):
    """Operands swapped, or a fast division: the bits are those of IEEE float32."""
    operation = getattr(operator, name)
    a, b = NUMBERS[:2]
    same(lanewise(operation, 2)(a, b), operation(a, b))
    a, b = np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))
    with np.errstate(all="ignore"):
        wanted = operation(a, b)
    np.testing.assert_array_equal(lanewise(operation, 2)(a, b), wanted)


def test_arithmetic_with_a_scalar():
    """A float on the left taken for one on the right: s - v and s / v."""
    v, s = NUMBERS[0, :LANES], np.float32(1.7)
    out = np.empty(8 * LANES, np.float32)
    with_scalars(out, v, s)
    same(out, np.concatenate([v + s, s + v, v - s, s - v, v * s, s * v, v / s, s / v]))


def test_fma_rounds_once():
    """A product rounded before the sum: (1 + e)(1 - e) - 1 would be 0."""
    e = np.float32(2.0**-13)
    ones = np.ones(LANES, np.float32)
    same(lanewise(simd.fma, 3)(ones + e, ones - e, -ones), -(ones * e * e))
    a, b, c = NUMBERS  # a * b is exact in float64, and the sum seldom rounds there
    wanted = (a.astype(np.float64) * b + c).astype(np.float32)
    found = lanewise(simd.fma, 3)(a, b, c)
    assert (found == wanted).mean() > 0.999
    np.testing.assert_allclose(found, wanted, rtol=2e-7)


def test_largest_smallest_nearest():
    """largest and smallest swapped; halves rounded up, not to even."""
    a, b = NUMBERS[:2]
    same(lanewise(simd.largest, 2)(a, b), np.maximum(a, b))
    same(lanewise(simd.smallest, 2)(a, b), np.minimum(a, b))
    same(lanewise(simd.nearest, 1)(ODD), np.rint(ODD))


def test_times_power_of_two():
    """An exponent off by one at the ends of its range."""
    n = np.arange(-126, 128).astype(np.float32)
    x = np.full(len(n), 1.5, np.float32)
    same(lanewise(simd.times_power_of_two, 2)(x, n), np.ldexp(x, n.astype(int)))


@pytest.mark.parametrize("n", [-(2**31), -5, -1, 0, 1, 7, 15, 16, 17, 1000, 2**31 - 1])
def test_first_lanes(n):
    """A remainder below 0 or above 16, as loops over chunks give, taken modulo something."""
    x = np.full(LANES, np.nan, np.float32)
    x[: max(n, 0)] = NUMBERS[0, : min(max(n, 0), LANES)]
    out = np.empty(LANES, np.float32)
    keep_first(out, x, n, np.float32(-7))
    same(out, np.where(np.arange(LANES) < n, x, np.float32(-7)))


# ---------------------------------------------------------------- all lanes into one


def folded(x: np.ndarray, join) -> np.float32:
    while len(x) > 1:
        x = join(x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


def test_lane_sum_tree():
    """A sum whose order, and so whose last bit, depends on the processor or the compiler."""
    for x in np.concatenate([NUMBERS.reshape(-1, LANES), NUMBERS.reshape(-1, LANES) ** 9]):
        assert bits(np.float32(joined(x)[0])) == bits(folded(x, np.add))
    big = np.float32([1e8, 1, -1e8, 1] * 4)  # any other tree gives another sum
    assert joined(big)[0] == folded(big, np.add)


def test_lane_max_finds_every_lane():
    """A lane that the tree leaves out."""
    for lane in range(LANES):
        x = np.arange(LANES, dtype=np.float32) - 100
        x[lane] = 5
        assert joined(x)[1] == 5
    assert joined(np.full(LANES, -np.inf, np.float32))[1] == -np.inf


# ---------------------------------------------------------------- exp


def exp_samples() -> np.ndarray:
    rng = np.random.default_rng(1)
    breaks = np.arange(-251, 254) * (np.log(2) / 2)  # where the reduction changes its power of two
    near = breaks[:, None] * (1 + np.arange(-8, 9) * 2.0**-24)
    small = np.concatenate([10.0 ** -np.arange(1.0, 46), [0.0]])
    dense = np.concatenate([np.linspace(-87, 88, 500_000), rng.uniform(-87, 88, 500_000)])
    x = np.concatenate([near.ravel(), small, -small, dense, [-87, 88]]).astype(np.float32)
    return x[(x >= -87) & (x <= 88)]


def test_exp_within_two_ulp():
    """A wrong coefficient, or ln 2 in one part: errors of many ulp for large |x|."""
    x = exp_samples()
    true = np.exp(x.astype(np.float64))
    error = np.abs(exp(x) - true) / np.spacing(true.astype(np.float32))
    assert error.max() < 2, (x[error.argmax()], error.max())


def test_exp_of_zero():
    """The largest score of a softmax has weight 1, exactly: a lone key's value comes through."""
    assert (exp(np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40])) == 1).all()


def test_exp_of_nan():
    """A softmax that makes a weight of what is no number, and hides that a model overflowed."""
    found = exp(np.float32([np.nan, 0, -np.nan, 1]))
    assert np.isnan(found).tolist() == [True, False, True, False]


def test_exp_beyond_the_ends():
    """NaN or a wrapped exponent from scores too large or too small."""
    beyond = np.float32([88.0001, 89, 128, 1e3, 1e38, np.inf])
    low, high = exp(np.float32([-87, 88]))
    same(exp(beyond), np.full(len(beyond), high))
    same(exp(-beyond), np.full(len(beyond), low))
    assert 0 < low < 2e-38 and 1e38 < high < np.inf
    inside = exp(np.sort(exp_samples()))
    assert low <= inside.min() and inside.max() <= high
    assert (inside[1:] >= inside[:-1] * np.float32(1 - 4e-7)).all()  # never down by 4 ulp


# ---------------------------------------------------------------- tiles


@numba.njit
def tile_by_hand(out, w, x, stride, w_stride, valid):
    """2 groups x 4 tokens, of which `valid` count: 3 columns of w, 10 floats a token of x."""
    total = tile_zero(2, 4)
    total = tile_dot(total, w, 0, 8, w_stride, x, 0, 10, 3)
    tile_store(out, 0, stride, valid, total, False)


@pytest.mark.parametrize("valid", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_tile(valid, dtype):
    """Strides mixed up; a token past `valid` written over out."""
    rng = np.random.default_rng(2)
    w = rng.integers(-8, 8, 40).astype(np.float32)  # whole numbers: exact in both types
    x = np.full((4, 10), np.nan, np.float32)
    x[:valid, :3] = rng.integers(-8, 8, (valid, 3))
    out = np.full(4 * 40, 77, np.float32)
    stored = w if dtype == np.float32 else (bits(w) >> 16).astype(np.uint16)
    tile_by_hand(out, stored, x.ravel(), 40, 8, valid)
    wanted = np.full((4, 40), 77, np.float32)
    for t in range(valid):
        for g in range(2):
            columns = [w[g * 8 + c * 8 :][:LANES] * x[t, c] for c in range(3)]
            wanted[t, g * LANES :][:LANES] = sum(columns)
    same(out, wanted.ravel())
