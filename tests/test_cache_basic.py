"""BasicKvCache against the contract: append in place, lend without copying, grow by doubling."""

import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest

from engine import memory
from engine.cache.basic import KV_HEADROOM_ROWS, BasicKvCache
from engine.cache.rows import Counts

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


def test_growth_holds_no_more_than_one_layer_twice():
    """All layers grown at once hold everything twice, just where memory is short."""
    dim, n = 256, 4096
    of_a_layer = 2 * n * dim * 4
    tracemalloc.start()
    try:
        cache = BasicKvCache(LAYERS, dim)
        cache.reserve(n - KV_HEADROOM_ROWS)
        cache.commit(n)
        before = tracemalloc.get_traced_memory()[0]
        assert before > LAYERS * of_a_layer
        for layer in range(LAYERS):
            tracemalloc.reset_peak()
            cache.push_row(layer, np.ones(dim, np.float32), np.ones(dim, np.float32))
            kept, peak = tracemalloc.get_traced_memory()
            assert kept - before < (layer + 1) * of_a_layer + 10_000, "twice the room"
            assert peak - before < (layer + 2) * of_a_layer + 10_000, "and the old rows meanwhile"
    finally:
        tracemalloc.stop()


def test_number_of_growths():
    """A step of fixed size copies all rows again and again: 20 times for 10,000 rows, not 5."""
    cache = BasicKvCache(n_layers=1, kv_dim=DIM)
    growths, copied = 0, 0
    for row in rows(10_000):
        before = cache.counts.allocations
        cache.push_row(0, row, row)
        if cache.counts.allocations > before:
            growths += 1
            copied += cache.seq_len(0) - 1
    assert growths <= 1 + np.log2(10_000 / KV_HEADROOM_ROWS) + 1
    assert cache.counts.grow == 2 * copied * DIM * 4 < 2 * cache.counts.append


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("f16", 2)])
def test_counts(dtype, size):
    """Copies that are not counted make the cache look better than it is."""
    cache = BasicKvCache(LAYERS, DIM, dtype)
    for layer in range(LAYERS):
        cache.set_prefill(layer, rows(20), rows(20))
    cache.push_row(0, rows(1)[0], rows(1)[0])
    cache.reserve(3)
    cache.commit(3)
    assert cache.counts == Counts(append=2 * (21 + 20 + 20 + 9) * DIM * size, allocations=6)
    cache.kv_view(1), cache.kv()
    assert cache.counts.read == 0, "lending copies nothing"
    cache.materialize(1)
    assert cache.counts.read == 2 * 23 * DIM * size
    cache.reserve(600)
    assert cache.counts.grow == 2 * (24 + 23 + 23) * DIM * size and cache.counts.allocations == 12


def test_counts_of_a_stretch_of_time():
    """A difference that mixes up its fields, or that changes when the cache goes on."""
    cache = filled(2)
    before = dataclasses.replace(cache.counts)
    cache.materialize(0)
    cache.push_row(0, rows(1)[0], rows(1)[0])
    assert cache.counts - before == Counts(append=2 * DIM * 4, read=2 * 2 * DIM * 4)


def test_float16_rows_are_rounded_to_nearest_and_take_half_the_memory():
    """Rows cut off instead of rounded, or an array that is float32 after all."""
    cache, data = BasicKvCache(1, DIM, "f16"), rows(700)
    cache.set_prefill(0, data[:30], -data[:30])
    for row in data[30:]:
        cache.push_row(0, row, -row)
    for lent, copy, wanted in zip(
        cache.kv_view(0), cache.materialize(0), (data, -data), strict=True
    ):
        assert lent.dtype == copy.dtype == np.float16 and lent.strides == (2 * DIM, 2)
        np.testing.assert_array_equal(lent, wanted.astype(np.float16))
        np.testing.assert_array_equal(copy, lent)
    assert cache.kv().places.tolist() == [[side.ctypes.data for side in cache.kv_view(0)]]
    assert cache.kv().element.itemsize == 2


@pytest.mark.parametrize("name", ["f64", "", None, np.float32])
def test_unknown_types_are_refused(name):
    """A type that kernels cannot read would be found out in the first step, or never."""
    with pytest.raises(ValueError, match="f32, f16"):
        BasicKvCache(1, DIM, name)


@pytest.mark.parametrize("keep", [0, 1, 9, 10])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_truncate_then_append(dtype, keep):
    """A tail that comes back, a layer left longer than the others, or memory given up."""
    cache = BasicKvCache(LAYERS, DIM, dtype)
    for layer in range(LAYERS):
        cache.set_prefill(layer, rows(10, layer), -rows(10, layer))
    places, capacity = cache.kv().places.copy(), cache.capacity
    cache.truncate(keep)
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [keep] * LAYERS
    for layer in range(LAYERS):
        cache.push_row(layer, rows(1, 50 + layer)[0], -rows(1, 50 + layer)[0])
        wanted = np.concatenate([rows(10, layer)[:keep], rows(1, 50 + layer)])
        for held, side in zip(cache.kv_view(layer), (wanted, -wanted), strict=True):
            np.testing.assert_array_equal(held, side.astype(cache.dtype))
    np.testing.assert_array_equal(cache.kv().places, places)
    assert cache.capacity == capacity and cache.counts.grow == 0


@pytest.mark.parametrize("keep", [-1, 6, 1000])
def test_truncate_to_rows_that_are_not_there(keep):
    """Rows that were never written would count as in use; -1 would leave all but one."""
    cache = filled(5)
    cache.push_row(0, rows(1)[0], rows(1)[0])  # one layer is longer: the shortest decides
    with pytest.raises(ValueError, match=f"{keep} rows of 5"):
        cache.truncate(keep)
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [6, 5, 5]


def test_prefill_replaces_what_was_held():
    """Rows of an earlier prompt that stay before, or behind, those of the new one."""
    cache = filled(40)
    cache.set_prefill(1, rows(7, 9), -rows(7, 9))
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [40, 7, 40]
    np.testing.assert_array_equal(cache.kv_view(1)[0], rows(7, 9))
    np.testing.assert_array_equal(cache.kv_view(1)[1], -rows(7, 9))


def test_memory_that_runs_out_in_a_prefill(monkeypatch):
    """A layer that has lost its rows, beside others that still hold theirs."""
    cache = filled(10)

    def empty(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(memory, "empty", empty)
        cache.set_prefill(1, rows(600), rows(600))
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [10] * LAYERS
