"""engine/kernels/rope.py against turns of complex numbers."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels.rope import rope_table, rotate

HEAD_DIMS, THETAS = (16, 64, 128), (1e4, 1e6)


def turned(x: np.ndarray, at: int, head_dim: int, theta: float, pos: int) -> np.ndarray:
    """The kernel's one call in this file: a copy of x with one head at `pos`."""
    x, table = x.copy(), rope_table(head_dim, theta, pos + 1)
    rotate(x, at, head_dim, table.ravel(), pos)
    return x


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    return theta ** -(np.arange(head_dim // 2) * 2 / head_dim)


def twin(head: np.ndarray, theta: float, pos: int) -> np.ndarray:
    """Pair i is the complex number head[i] + i head[i + half], turned by pos * theta^(-2i / d)."""
    half = len(head) // 2
    z = (head[:half] + 1j * head[half:]) * np.exp(1j * pos * frequencies(len(head), theta))
    return np.concatenate([z.real, z.imag])


def head_of(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("pos", [0, 1, 50])
def test_half_split_pairs(head_dim, theta, pos):
    """Interleaved pairs (i, i + 1), or turns the other way: the first token right, then garbage."""
    x = head_of(head_dim)
    np.testing.assert_allclose(turned(x, 0, head_dim, theta, pos), twin(x, theta, pos), atol=3e-5)


def test_position_zero_changes_nothing():
    """A position counted from 1."""
    x = head_of(64)
    np.testing.assert_array_equal(turned(x, 0, 64, 1e6, 0), x)


def test_one_head_among_others():
    """A neighbouring head turned along, or the head at the wrong offset."""
    x = head_of(5 * 16)
    found = turned(x, 35, 16, 1e4, 7)
    np.testing.assert_allclose(found[35:51], twin(x[35:51], 1e4, 7), atol=3e-6)
    np.testing.assert_array_equal(np.delete(found, range(35, 51)), np.delete(x, range(35, 51)))


def test_products_depend_on_the_distance_alone():
    """q and k turned by different angles: attention that knows where it is, not how far back."""
    q, k = head_of(64), head_of(65)[:64]
    products = [
        turned(q, 0, 64, 1e4, pos + 9) @ turned(k, 0, 64, 1e4, pos) for pos in (0, 1, 40, 500)
    ]
    np.testing.assert_allclose(products, products[0], atol=1e-3)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_table(head_dim, theta):
    """Cosines and sines swapped, or angles of too few bits: they may err by what a float32 of
    their size does, and no more."""
    table = rope_table(head_dim, theta, 3000)
    assert table.shape == (3000, head_dim) and table.dtype == np.float32
    assert table.flags.c_contiguous
    angles = np.arange(3000)[:, None] * frequencies(head_dim, theta)
    wanted = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    allowed = np.concatenate([angles, angles], axis=1) * 4e-7 + 1e-7
    assert (np.abs(table - wanted) <= allowed).all()


@pytest.mark.parametrize("theta", THETAS)
def test_a_longer_table_starts_the_same(theta):
    """Rows that change when a growing cache has the table made anew."""
    np.testing.assert_array_equal(rope_table(64, theta, 1000)[:77], rope_table(64, theta, 77))
