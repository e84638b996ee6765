"""engine/kernels/rmsnorm.py against float64."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels.activations import Rows
from engine.kernels.rmsnorm import rmsnorm, rmsnorm_rows

EPS = 1e-6


def run(out, x, at, weight, weight_at, n, width, first, last, eps=EPS) -> None:
    """The kernel's one call in this file."""
    rmsnorm_rows(Rows(out, at, width), Rows(x, at, width), weight, weight_at, n, eps, first, last)


def twin(x, weight, eps=EPS):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rows(count: int, n: int, scale: float = 1.0) -> np.ndarray:
    """(count, n padded to 16), zeros in the padding."""
    x = np.zeros((count, -(-n // 16) * 16), np.float32)
    x[:, :n] = np.random.default_rng((count, n)).standard_normal((count, n)) * scale
    return x


@pytest.mark.parametrize("n", [1, 15, 16, 17, 20, 32, 100, 128, 1024])
def test_against_float64(n):
    """A mean over the padded width, not the row's: too small by n / padded."""
    x, weight = rows(3, n), rows(1, n)[0] + np.float32(0.5)
    weight[n:] = 0
    out = np.full(x.shape, np.nan, np.float32)
    run(out.ravel(), x.ravel(), 0, weight, 0, n, x.shape[1], 0, 3)
    np.testing.assert_allclose(out[:, :n], twin(x[:, :n], weight[:n]), rtol=1e-6, atol=1e-7)
    assert (out[:, n:] == 0).all()


@pytest.mark.parametrize("n", [16, 20, 128])
def test_in_place(n):
    """A row that is normed with what it has just been overwritten with."""
    x, weight = rows(3, n), rows(1, n)[0]
    apart = np.empty_like(x)
    run(apart.ravel(), x.ravel(), 0, weight, 0, n, x.shape[1], 0, 3)
    run(x.ravel(), x.ravel(), 0, weight, 0, n, x.shape[1], 0, 3)
    np.testing.assert_array_equal(x, apart)


def test_only_the_given_rows():
    """A rank that norms its neighbour's rows, or takes another layer's weights."""
    n, width = 20, 32
    x, weight = rows(6, n), rows(3, n)
    out = np.full(x.size, 77, np.float32)
    run(out, x.ravel(), width, weight.ravel(), 2 * width, n, width, 1, 4)  # row 0 is x[1]
    out = out.reshape(x.shape)
    np.testing.assert_allclose(out[2:5, :n], twin(x[2:5, :n], weight[2, :n]), rtol=1e-6, atol=1e-7)
    assert (out[[0, 1, 5]] == 77).all()


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-4, 1e4, 1e15])
def test_small_and_large(scale):
    """0 / 0 for a row of zeros; eps left out, which shows in small rows; an overflow."""
    x, weight = rows(1, 64, scale), np.ones(64, np.float32)
    out = np.empty(64, np.float32)
    run(out, x.ravel(), 0, weight, 0, 64, 64, 0, 1)
    np.testing.assert_allclose(out, twin(x[0], weight), rtol=1e-6)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_eps_is_the_models(eps):
    """An eps of another model, built in."""
    x, weight = rows(1, 64, 0.01), np.ones(64, np.float32)
    out = np.empty(64, np.float32)
    run(out, x.ravel(), 0, weight, 0, 64, 64, 0, 1, eps=eps)
    np.testing.assert_allclose(out, twin(x[0], weight, eps), rtol=1e-6)


def test_one_head_among_others():
    """The heads beside the one that is normed, in place and at any offset, left untouched."""
    x, weight = rows(1, 5 * 16)[0], rows(1, 3 * 16)[0]
    old = x.copy()
    rmsnorm(x, 35, x, 35, weight, 16, 16, 16, EPS)
    np.testing.assert_allclose(x[35:51], twin(old[35:51], weight[16:32]), rtol=1e-6)
    np.testing.assert_array_equal(np.delete(x, range(35, 51)), np.delete(old, range(35, 51)))
