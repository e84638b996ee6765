"""BasicKvCache against the contract: append in place, lend without copying, grow by doubling."""

import gc
import tracemalloc

import numpy as np
import pytest

from engine import memory
from engine.cache.basic import KV_HEADROOM_ROWS, BasicKvCache

LAYERS, DIM = 3, 32


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM), dtype=np.float32)


def filled(n: int) -> BasicKvCache:
    cache = BasicKvCache(n_layers=LAYERS, kv_dim=DIM)
    for layer in range(LAYERS):
        cache.set_prefill(layer, rows(n, layer), rows(n, 100 + layer))
    return cache


@pytest.mark.parametrize("n", [0, 1, 17, 511])
def test_prefill_leaves_headroom(n):
    """A prefill that fits exactly would make the first generated token copy everything."""
    cache = filled(n)
    assert KV_HEADROOM_ROWS == 512
    assert cache.capacity >= n + 512
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [n] * LAYERS
    assert cache.num_layers() == LAYERS


def test_base_address_stays_until_capacity_runs_out():
    """A growth before capacity is used copies for nothing; a missed one writes out of bounds."""
    cache = filled(10)
    base = cache.kv().places.copy()
    for i in range(512):
        for layer in range(LAYERS):
            cache.push_row(layer, rows(1, i)[0], rows(1, i)[0])
    np.testing.assert_array_equal(cache.kv().places, base)
    cache.push_row(0, rows(1)[0], rows(1)[0])
    assert (cache.kv().places[0] != base[0]).all(), "layer 0 had to move"
    np.testing.assert_array_equal(cache.kv().places[1:], base[1:])


def test_lent_addresses_are_those_of_the_views():
    """Kernels would write rows where no reader looks."""
    cache = filled(3)
    for layer in range(LAYERS):
        k, v = cache.kv_view(layer)
        assert [k.ctypes.data, v.ctypes.data] == cache.kv().places[layer].tolist()
        assert cache.kv().places[layer, 0] % 64 == 0


def test_growth_keeps_every_row_of_every_layer():
    """Growing by re-laying out scrambles the later layers."""
    cache, plain = BasicKvCache(n_layers=LAYERS, kv_dim=DIM), [[] for _ in range(LAYERS)]
    data = rows(5000 * LAYERS).reshape(5000, LAYERS, DIM)
    sizes = set()
    for step in data:
        for layer in range(LAYERS):
            cache.push_row(layer, step[layer], -step[layer])
            plain[layer].append(step[layer])
        if cache.capacity not in sizes:  # just grown: compare everything
            sizes.add(cache.capacity)
            for layer in range(LAYERS):
                k, v = cache.kv_view(layer)
                np.testing.assert_array_equal(k, plain[layer])
                np.testing.assert_array_equal(v, np.negative(plain[layer]))
    assert cache.counts.allocations <= 2 * LAYERS * np.log2(2 * 5000), "growth must be by doubling"


def test_old_view_survives_growth():
    """A view over a freed buffer reads other people's memory."""
    cache = filled(4)
    old, _ = cache.kv_view(1)
    before = old.copy()
    for i in range(600):
        cache.push_row(1, rows(1, i)[0], rows(1, i)[0])
    np.testing.assert_array_equal(old, before)
    assert not np.shares_memory(old, cache.kv_view(1)[0])


def test_old_buffer_is_freed_once_no_view_holds_it():
    """A reference that stays somewhere would keep every outgrown buffer alive."""
    tracemalloc.start()
    try:
        cache = BasicKvCache(n_layers=1, kv_dim=1024)
        cache.reserve(1000)
        cache.commit(1000)
        held = cache.kv_view(0)
        cache.reserve(10_000)
        gc.collect()
        with_old = tracemalloc.get_traced_memory()[0]
        held = None  # noqa: F841
        gc.collect()
        without = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert with_old - without >= 2 * 1000 * 1024 * 4


def test_view_lends_and_materialize_copies():
    """A copy on every read is the cost this cache exists to avoid."""
    cache = filled(5)
    k, _ = cache.kv_view(0)
    copy, _ = cache.materialize(0)
    assert np.shares_memory(k, cache.kv_view(0)[0]) and not np.shares_memory(k, copy)
    np.testing.assert_array_equal(k, copy)
    assert k.shape == (5, DIM)


def test_view_sees_the_row_just_pushed():
    """A view lent before the push would leave the current token out of its own attention."""
    cache = filled(5)
    cache.push_row(0, np.ones(DIM, np.float32), np.zeros(DIM, np.float32))
    k, v = cache.kv_view(0)
    assert len(k) == len(v) == 6 and k[5].sum() == DIM


def test_push_row_allocates_nothing_when_there_is_room():
    """A hidden temporary the size of the rows would cost a copy a token."""
    cache = BasicKvCache(n_layers=1, kv_dim=1024)
    k = np.ones((1, 1024), np.float32)
    cache.set_prefill(0, k, k)
    cache.push_row(0, k[0], k[0])
    tracemalloc.start()
    try:
        for _ in range(400):
            cache.push_row(0, k[0], k[0])
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1024, f"{peak} bytes at once (a row is 4,096)"
    assert kept < 1024


def test_prefill_after_reserve_writes_into_the_reserved_buffer():
    """A prefill that replaces the buffer loses the reservation and grows on every step."""
    cache = BasicKvCache(n_layers=LAYERS, kv_dim=DIM)
    cache.reserve(2000)
    base = cache.kv().places.copy()
    cache.set_prefill(0, rows(1000), rows(1000))
    np.testing.assert_array_equal(cache.kv().places, base)


def test_uncommitted_rows_do_not_exist():
    """A step that fails half-way would leave rows of some layers behind."""
    cache = filled(2)
    cache.reserve(3)
    assert cache.seq_len(0) == 2 and len(cache.kv_view(0)[0]) == 2
    cache.commit(3)
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [5] * LAYERS


def test_reserve_leaves_headroom_once():
    """Headroom on every reservation would make a chunked prefill grow at each chunk."""
    cache = BasicKvCache(n_layers=LAYERS, kv_dim=DIM)
    cache.reserve(100)
    assert cache.capacity == 612
    cache.commit(100)
    cache.reserve(512)
    assert cache.capacity == 612
    cache.reserve(513)
    assert cache.capacity == 1224


def test_commit_beyond_the_reserved_rows_is_caught():
    """Rows counted but never given memory would be read from beyond the buffer."""
    cache = filled(1)
    with pytest.raises(AssertionError):
        cache.commit(513)


def test_wrong_shapes_are_refused():
    """NumPy would broadcast a row of another width without a word."""
    cache = filled(1)
    with pytest.raises(ValueError, match=r"\(1,\).*\(32,\)"):
        cache.push_row(0, np.zeros(1, np.float32), np.zeros(1, np.float32))
    with pytest.raises(ValueError, match=r"32"):
        cache.set_prefill(0, np.zeros((3, 1), np.float32), np.zeros((3, 1), np.float32))


def test_memory_that_runs_out_between_k_and_v(monkeypatch):
    """K grown and V not: the capacity says there is room, and kernels write beyond V."""
    cache, real, left = filled(10), memory.empty, [3]

    def empty(n, dtype):
        left[0] -= 1
        if left[0] == 0:  # V of the second layer
            raise MemoryError
        return real(n, dtype)

    monkeypatch.setattr(memory, "empty", empty)
    with pytest.raises(MemoryError):
        cache.reserve(600)
    assert cache.capacity == 10 + 512
    assert all(len(k) == len(v) for k, v in zip(cache._k, cache._v, strict=True))
    np.testing.assert_array_equal(cache.kv_view(1)[0], rows(10, 1))
