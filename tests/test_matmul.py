"""engine/kernels/matmul.py against a float64 product, and bit for bit against itself."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from engine.kernels.activations import Inputs, Rows, padded, rows_for
from engine.kernels.matmul import Floats, matmul, of_layer
from engine.kernels.pack import pack_rows
from engine.kernels.team import Rank, new_flags

HEIGHTS = (1, 15, 16, 17, 31, 33, 50, 64, 127)  # rows of w: around groups and tiles of them
DEPTHS = (1, 7, 31, 32, 33, 100)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33)  # tiles hold up to 6
KINDS = {"f32": np.float32, "bf16": np.uint16}
GUARD = np.float32(-12345.0)


def packed(layers: list[np.ndarray], kind: str) -> np.ndarray:
    """Matrices of one shape as the kernel reads them, one after the other."""
    n, k = layers[0].shape
    size = padded(n) * k
    data = np.empty(len(layers) * size, KINDS[kind])
    for i, w in enumerate(layers):
        pack_rows(data, i * size, w)
    return data


def run(data, layer, n, k, x: Rows, out: Rows, n_tokens, add=False, ranks=1) -> None:
    """The kernel's one call in this file: every rank's share, one rank after the other."""
    flags, none = new_flags(ranks), np.zeros(0, np.float32)
    inputs = Inputs(x, none.astype(np.int8), none, none.astype(np.int32))
    w = at_layer(Floats(data), layer, n, k)
    more = np.full((rows_for(n_tokens) - n_tokens) * x.stride + 7, np.nan, np.float32)
    inputs = inputs._replace(rows=x._replace(data=np.concatenate([x.data, more])))
    for rank in range(ranks):
        matmul(out, w, inputs, n_tokens, add, Rank(rank, ranks, flags))


@numba.njit
def at_layer(store, layer, n, k):
    return of_layer(store, layer, n, k)


def product(w, x, kind, **how) -> np.ndarray:
    """x w^T, (n_tokens, n)."""
    (n, k), width = w.shape, padded(len(w))
    out = np.full(len(x) * width, np.nan, np.float32)
    run(packed([w], kind), 0, n, k, Rows(x.ravel(), 0, k), Rows(out, 0, width), len(x), **how)
    return out.reshape(-1, width)[:, :n]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def rounded(w: np.ndarray) -> np.ndarray:
    """Weights that bfloat16 holds exactly, so that both kinds have the same product."""
    return (w.view(np.uint32) & 0xFFFF0000).view(np.float32)


def check(found, w, x, old=0.0) -> None:
    """Within what k roundings can do: an ulp of the sum of absolute values, each."""
    w, x = w.astype(np.float64), x.astype(np.float64)
    error = np.abs(found - (old + x @ w.T))
    bound = (np.abs(old) + np.abs(x) @ np.abs(w).T) * 2.0**-24 * (w.shape[1] + 2)
    assert (error <= bound).all(), (error - bound).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", HEIGHTS)
def test_against_float64(n, kind):
    """A group, a column or a token skipped or counted twice at the edge of a tile."""
    for k in DEPTHS:
        w = rounded(random(n, k))
        for n_tokens in TOKENS:
            x = random(n_tokens, k, seed=1)
            check(product(w, x, kind), w, x)


def test_bfloat16_weights_are_exact():
    """bfloat16 weights widened wrongly, or rounded once more: the sums are float32's."""
    w, x = rounded(random(50, 33)), random(7, 33, seed=1)
    np.testing.assert_array_equal(product(w, x, "bf16"), product(w, x, "f32"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("n_tokens", TOKENS)
def test_places_strides_and_guards(n_tokens, add, kind):
    """A stride or an offset ignored; a write before, between or behind the output rows."""
    for n in HEIGHTS:
        layers = [rounded(random(n, 33, seed=i)) for i in range(3)]
        width = padded(n)
        x = np.full((n_tokens, 40), np.nan, np.float32)  # columns past k are not read
        x[:, :33] = random(n_tokens, 33, seed=9)
        out = np.full(5 + n_tokens * (width + 16) + 7, GUARD)
        rows = out[5:-7].reshape(n_tokens, -1)[:, :width]  # a view
        old = random(n_tokens, width, seed=8)
        rows[:] = old
        x_rows = Rows(np.concatenate([np.full(3, np.nan, np.float32), x.ravel()[:-7]]), 3, 40)
        run(packed(layers, kind), 1, n, 33, x_rows, Rows(out, 5, width + 16), n_tokens, add=add)

        check(rows[:, :n], layers[1], x[:, :33], old[:, :n] if add else 0.0)
        whole = -(-n // 16) * 16
        np.testing.assert_array_equal(rows[:, n:whole], old[:, n:whole] if add else 0)
        np.testing.assert_array_equal(rows[:, whole:], old[:, whole:])
        rows[:] = GUARD
        assert (out == GUARD).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", HEIGHTS)
def test_the_same_bits_in_any_batch(n, kind):
    """A sum whose order depends on how many tokens share a step: replies that change with load."""
    w, x = rounded(random(n, 100)), random(13, 100, seed=1)
    whole = product(w, x, kind)
    for n_tokens in TOKENS:
        for t in range(0, 13 - n_tokens + 1, 3):
            part = product(w, x[t : t + n_tokens], kind)
            np.testing.assert_array_equal(part, whole[t : t + n_tokens])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("n_tokens", [1, 7])
def test_the_same_bits_on_any_number_of_ranks(n_tokens, ranks):
    """Rows lost or computed twice where they are shared out, some ranks without any; with `add`,
    a row computed twice is added twice."""
    for n in HEIGHTS:
        w, x = random(n, 33), random(n_tokens, 33, seed=1)
        data, width = packed([w], "f32"), padded(n)
        found = []
        for r in (1, ranks):
            out = random(n_tokens * width, seed=2)
            rows = Rows(x.ravel(), 0, 33), Rows(out, 0, width)
            run(data, 0, n, 33, *rows, n_tokens, add=True, ranks=r)
            found.append(out)
        np.testing.assert_array_equal(*found)


def test_layers_lie_one_after_the_other():
    """Layers of a height that is no multiple of 16 read from a wrong place."""
    layers = [random(17, 7, seed=i) for i in range(3)]
    x, data = random(1, 7, seed=9), packed(layers, "f32")
    for layer, w in enumerate(layers):
        out = np.empty(32, np.float32)
        run(data, layer, 17, 7, Rows(x.ravel(), 0, 7), Rows(out, 0, 32), 1)
        check(out[None, :17], w, x)
