"""ConcatKvCache, the baseline: what it copies is what its formula says, no more and no less."""

import dataclasses

import numpy as np
import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.cache import ConcatKvCache, Counts
from engine.kernels.runs import Run

LAYERS, DIM = 3, 8
ROW = 2 * DIM * 4  # bytes of a row of K and V


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM), dtype=np.float32)


def filled(n: int) -> ConcatKvCache:
    cache = ConcatKvCache(LAYERS, DIM)
    for layer in range(LAYERS):
        cache.set_prefill(layer, rows(n, layer), -rows(n, layer))
    return cache


def lengths(cache) -> list[int]:
    return [cache.seq_len(layer) for layer in range(cache.num_layers())]


def check(cache, layer: int, k: np.ndarray) -> None:
    """K of a layer is k, and V is -k."""
    for held, wanted in zip(cache.materialize(layer), (k, -k), strict=True):
        np.testing.assert_array_equal(held, wanted)


def since(cache, before: Counts) -> Counts:
    return cache.counts - before


def test_an_append_makes_arrays_one_row_taller():
    """Room left behind the rows would make the baseline better than what it stands for."""
    cache = filled(5)
    for n in range(5, 20):
        old = cache._k[1], cache._v[1]
        cache.push_row(1, rows(1, n)[0], -rows(1, n)[0])
        for before, after in zip(old, (cache._k[1], cache._v[1]), strict=True):
            assert after.shape == (n + 1, DIM) and after.base is None
            assert not np.shares_memory(before, after)
            np.testing.assert_array_equal(after[:n], before)
    check(cache, 1, np.concatenate([rows(5, 1), *(rows(1, n) for n in range(5, 20))]))
    assert lengths(cache) == [5, 20, 5]


def test_every_read_is_a_clone():
    """A read that lends lets a reader write into the cache, and costs nothing, as it should."""
    cache = filled(5)
    assert cache.kv_view(0) is None
    reads = [side for _ in range(2) for side in cache.materialize(0)]
    for i, side in enumerate(reads):
        for other in [*reads[:i], cache._k[0], cache._v[0]]:
            assert not np.shares_memory(side, other)
        side[:] = 0
    check(cache, 0, rows(5))


def test_prefill_replaces_and_is_a_copy():
    """A prompt that is lent to the cache changes when its owner writes the next one into it."""
    cache, k = filled(5), rows(3, 7)
    cache.set_prefill(2, k, -k)
    k[:] = 0
    check(cache, 2, rows(3, 7))
    assert lengths(cache) == [5, 5, 3]


@pytest.mark.parametrize("n", [0, 1, 100])
def test_counts_of_n_appends(n):
    """Bytes copied in n appends: row i copies the i before it, so n (n - 1) / 2 rows in all."""
    cache = ConcatKvCache(LAYERS, DIM)
    for i in range(n):
        before = dataclasses.replace(cache.counts)
        cache.push_row(0, rows(1)[0], rows(1)[0])
        assert since(cache, before) == Counts(append=ROW, grow=i * ROW, allocations=2)
        before = dataclasses.replace(cache.counts)
        cache.materialize(0)
        assert since(cache, before) == Counts(read=(i + 1) * ROW, allocations=2)
    total = Counts(n * ROW, n * (n - 1) // 2 * ROW, n * (n + 1) // 2 * ROW, 4 * n)
    assert cache.counts == total


@pytest.mark.parametrize("n", [1, 4])
def test_a_staged_step(n):
    """Rows written where `kv` says must arrive, in every layer, behind those that were there."""
    cache = filled(6)
    before = dataclasses.replace(cache.counts)
    cache.reserve(n)
    kv = cache.kv()
    assert kv.block_rows == cache.capacity == 6 + n
    assert kv.blocks.tolist() == [0] and kv.places.shape == (LAYERS, 2)
    for layer, sides in enumerate(cache._staged):
        assert kv.places[layer].tolist() == [side.ctypes.data for side in sides]
        for side, sign in zip(sides, (1, -1), strict=True):
            np.testing.assert_array_equal(side[:6], sign * rows(6, layer), "cloned, to be read")
            side[6:] = sign * rows(n, 50 + layer)
    assert lengths(cache) == [6] * LAYERS, "not before they are committed"
    cache.commit(n)
    of_all = LAYERS * ROW
    assert since(cache, before) == Counts(n * of_all, 6 * of_all, 6 * of_all, 4 * LAYERS)
    for layer in range(LAYERS):
        check(cache, layer, np.concatenate([rows(6, layer), rows(n, 50 + layer)]))


def test_a_step_that_is_not_committed():
    """Rows of a step that failed, or of its buffers, seen by the next one."""
    cache = filled(6)
    cache.reserve(3)
    for sides in cache._staged:
        for side in sides:
            side[:] = np.nan
    for layer in range(LAYERS):
        check(cache, layer, rows(6, layer))
    cache.reserve(1)
    assert cache.capacity == 7
    for layer, (k, _) in enumerate(cache._staged):
        np.testing.assert_array_equal(k[:6], rows(6, layer))


def fail_after(n: int, monkeypatch) -> None:
    """The n-th concatenation from now, and every later one, finds no memory."""
    real, left = np.concatenate, [n]

    def concatenate(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(np, "concatenate", concatenate)


@pytest.mark.parametrize("n", [0, 1])
def test_memory_that_runs_out_in_an_append(n, monkeypatch):
    """K one row longer than V: every later row of the layer is at two positions."""
    cache, row = filled(6), rows(1)[0]
    fail_after(n, monkeypatch)
    with pytest.raises(MemoryError):
        cache.push_row(1, row, row)
    assert lengths(cache) == [len(v) for v in cache._v] == [6] * LAYERS


@pytest.mark.parametrize("n", range(2 * LAYERS))
def test_memory_that_runs_out_in_a_commit(n, monkeypatch):
    """Some layers longer than others, which the next step does not see: it asks the first."""
    cache = filled(6)
    cache.reserve(1)
    fail_after(n, monkeypatch)
    with pytest.raises(MemoryError):
        cache.commit(1)
    assert lengths(cache) == [len(v) for v in cache._v] == [6] * LAYERS


@pytest.mark.parametrize("reserved", [0, 2])
def test_commit_beyond_the_reserved_rows_is_caught(reserved):
    """Rows that no kernel had room to write."""
    cache = filled(4)
    if reserved:
        cache.reserve(reserved)
    with pytest.raises(AssertionError):
        cache.commit(reserved + 1)
    assert lengths(cache) == [4] * LAYERS


@pytest.mark.parametrize("keep", [0, 3, 5])
def test_truncate_then_append(keep):
    """A tail that comes back with the next row."""
    cache = filled(5)
    cache.truncate(keep)
    assert lengths(cache) == [keep] * LAYERS
    before = dataclasses.replace(cache.counts)
    cache.push_row(1, rows(1, 9)[0], -rows(1, 9)[0])
    assert since(cache, before).grow == keep * ROW
    check(cache, 1, np.concatenate([rows(5, 1)[:keep], rows(1, 9)]))
    for wrong in (-1, keep + 1):
        with pytest.raises(ValueError, match=f"{wrong} rows of {keep}"):
            cache.truncate(wrong)


def test_wrong_shapes_are_refused():
    """NumPy would broadcast a row of another width without a word."""
    cache = filled(1)
    with pytest.raises(ValueError, match=r"push_row.*\(1,\).*\(8,\)"):
        cache.push_row(0, np.zeros(1, np.float32), np.zeros(1, np.float32))
    with pytest.raises(ValueError, match=r"set_prefill.*\(rows, 8\)"):
        cache.set_prefill(0, rows(3), rows(2))
    check(cache, 0, rows(1))


# ---------------------------------------------------------------- beside the other kinds


@pytest.mark.parametrize("kind", ["basic", "paged", "concat"])
def test_copies_of_a_decode_step(kind, tmp_path):
    """What each kind moves for one token: a copy that nobody counted, or one that need not be."""
    llm = LLM(write_checkpoint(tmp_path), kv_cache=kind)
    layers, row = llm.config.n_layers, 2 * llm.config.kv_dim * 4
    session = llm.new_session()
    llm.generate(range(300), SamplingParams(max_tokens=1, ignore_eos=True), session)
    cache, logits = session.cache, llm._model.new_logits(1)
    for n_rows in range(300, 303):
        before = dataclasses.replace(cache.counts)
        llm._model.forward([Run(np.array([5]), cache, False, len(logits))], logits)
        moved = since(cache, before)
        assert moved.append == layers * row
        if kind == "concat":  # K and V, cloned to be read and concatenated: 4 copies a layer
            assert moved.read == moved.grow == layers * n_rows * row
            assert moved.allocations == 4 * layers
        else:
            assert (moved.read, moved.grow, moved.allocations) == (0, 0, 0)
