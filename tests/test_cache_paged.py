"""PagedKvCache and its pool: rows that never move, blocks that are never lost."""

import ctypes
import dataclasses
import gc
from contextlib import suppress

import numpy as np
import pytest
from racing import in_two_threads

from engine.cache import BlockPool, Counts, PagedKvCache, PoolFull

LAYERS, DIM, SIZE = 3, 8, 4  # SIZE: rows of a block
ROW = 2 * DIM * 4  # bytes of a row of K and V


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM), dtype=np.float32)


def new_pool(max_blocks: int = 64, size: int = SIZE, dtype: str = "f32") -> BlockPool:
    return BlockPool(LAYERS, DIM, size, max_blocks=max_blocks, dtype=dtype)


def filled(n: int, pool: BlockPool | None = None) -> PagedKvCache:
    """n rows: of layer i, rows(n, i) as K and their negatives as V."""
    cache = PagedKvCache(new_pool() if pool is None else pool)
    for layer in range(LAYERS):
        cache.set_prefill(layer, rows(n, layer), -rows(n, layer))
    return cache


def push(cache: PagedKvCache, row: np.ndarray) -> None:
    for layer in range(LAYERS):
        cache.push_row(layer, row, -row)


def lengths(cache: PagedKvCache) -> list[int]:
    return [cache.seq_len(layer) for layer in range(cache.num_layers())]


def check(cache: PagedKvCache, layer: int, k: np.ndarray) -> None:
    """K of a layer is k, and V is -k."""
    for held, wanted in zip(cache.materialize(layer), (k, -k), strict=True):
        np.testing.assert_array_equal(held, wanted)


# ---------------------------------------------------------------- one sequence


@pytest.mark.parametrize("size", [1, 3, 16, 600])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 15, 16, 17, 33])
def test_rows_come_back_as_they_were_given(n, size):
    """A row too few or too many where a block ends."""
    cache = filled(n, new_pool(size=size))
    for seed in range(5):
        push(cache, rows(1, 50 + seed)[0])
    pushed = [rows(1, 50 + seed) for seed in range(5)]
    for layer in range(LAYERS):
        check(cache, layer, np.concatenate([rows(n, layer), *pushed]))
    assert lengths(cache) == [n + 5] * LAYERS and cache.kv_view(0) is None
    assert len(cache.block_table) == -(-(n + 5) // size) == cache.pool.n_used
    cache.pool.check_integrity()


def test_a_read_is_a_copy():
    """A reader that writes into what it got would write into the cache."""
    cache = filled(5)
    for side in cache.materialize(0):
        side[:] = 0
    check(cache, 0, rows(5))


def test_float16_rows():
    """Rows cut off instead of rounded, or blocks that are float32 after all."""
    cache, data = PagedKvCache(new_pool(dtype="f16")), rows(9)
    cache.set_prefill(0, data[:7], data[:7])
    for row in data[7:]:
        cache.push_row(0, row, row)
    assert cache.pool.block(0).nbytes == LAYERS * SIZE * ROW // 2
    for held in cache.materialize(0):
        assert held.dtype == np.float16
        np.testing.assert_array_equal(held, data.astype(np.float16))
    assert cache.counts == Counts(9 * ROW // 2, 0, 9 * ROW // 2, 1)


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_prefill_replaces_what_was_held(n):
    """Rows of an earlier prompt behind those of the new one, or its blocks kept for ever."""
    cache = filled(11)
    for layer in range(LAYERS):
        cache.set_prefill(layer, rows(n, 20 + layer), -rows(n, 20 + layer))
    for layer in range(LAYERS):
        check(cache, layer, rows(n, 20 + layer))
    assert cache.pool.n_used == -(-n // SIZE)
    cache.pool.check_integrity()


def test_prefill_of_one_layer_keeps_the_others():
    """Blocks hold all layers: given back for a short one, they take a longer one's rows along."""
    cache = filled(11)
    cache.set_prefill(1, rows(2, 20), -rows(2, 20))
    assert lengths(cache) == [11, 2, 11] and cache.pool.n_used == 3
    check(cache, 0, rows(11, 0))
    check(cache, 1, rows(2, 20))
    check(cache, 2, rows(11, 2))


def test_rows_written_where_kernels_are_sent():
    """Addresses of another block, layer or side than those that are read."""
    cache = filled(6)
    cache.reserve(7)
    kv, size = cache.kv(), DIM * 4
    assert kv.block_rows == SIZE and cache.capacity == len(kv.blocks) * SIZE == 16
    for layer in range(LAYERS):
        for side, sign in enumerate((1, -1)):
            for row in range(6, 13):
                base = int(kv.blocks[row // SIZE] + kv.places[layer, side])
                value = sign * rows(13, 30 + layer)[row]
                ctypes.memmove(base + row % SIZE * size, value.ctypes.data, size)
    assert lengths(cache) == [6] * LAYERS, "not before they are committed"
    cache.commit(7)
    for layer in range(LAYERS):
        check(cache, layer, np.concatenate([rows(6, layer), rows(13, 30 + layer)[6:]]))


def test_a_step_that_is_not_committed():
    """Blocks reserved by steps that failed must serve the next one, not pile up."""
    cache = filled(6)
    for _ in range(10):
        cache.reserve(7)
    assert lengths(cache) == [6] * LAYERS and cache.pool.n_used == 4
    with pytest.raises(AssertionError):
        cache.commit(11)
    cache.truncate(6)
    assert cache.pool.n_used == 2
    check(cache, 2, rows(6, 2))


@pytest.mark.parametrize("keep", [0, 1, 4, 5, 8, 11])
def test_truncate_gives_blocks_back(keep):
    """Blocks of rows that nobody can read any more, or a tail that comes back."""
    cache = filled(11)
    cache.truncate(keep)
    assert lengths(cache) == [keep] * LAYERS
    assert cache.pool.n_used == len(cache.block_table) == -(-keep // SIZE)
    cache.pool.check_integrity()
    push(cache, rows(1, 50)[0])
    check(cache, 1, np.concatenate([rows(11, 1)[:keep], rows(1, 50)]))
    for wrong in (-1, keep + 2):
        with pytest.raises(ValueError, match=f"{wrong} rows of {keep + 1}"):
            cache.truncate(wrong)


def test_a_freed_sequence_can_be_used_again():
    """A sequence that gives its blocks back and still writes into them."""
    cache = filled(11)
    cache.free()
    other = filled(11, cache.pool)
    push(cache, rows(1, 50)[0])
    check(cache, 1, rows(1, 50))
    check(other, 1, rows(11, 1))
    cache.free()
    cache.free()
    assert cache.pool.n_used == 3
    cache.pool.check_integrity()


def test_wrong_shapes_are_refused():
    """NumPy would broadcast a row of another width without a word."""
    cache = filled(1)
    for k, v in (((1,), (1,)), ((DIM,), (1,)), ((1, DIM), (1, DIM))):
        with pytest.raises(ValueError, match=r"push_row.*\(8,\)"):
            cache.push_row(0, np.zeros(k, np.float32), np.zeros(v, np.float32))
    for k, v in (((3, 1), (3, 1)), ((3, DIM), (2, DIM)), ((DIM,), (DIM,))):
        with pytest.raises(ValueError, match=r"set_prefill.*\(rows, 8\)"):
            cache.set_prefill(0, np.zeros(k, np.float32), np.zeros(v, np.float32))
    check(cache, 0, rows(1))
    cache.pool.check_integrity()


# ---------------------------------------------------------------- what growth costs


def test_growth_copies_nothing_and_moves_nothing():
    """A pool that is re-allocated as it grows: copies, and addresses that kernels still hold."""
    cache, row = PagedKvCache(new_pool(2000)), rows(1)[0]
    first = []
    for n in range(5000):
        push(cache, row)
        addresses = cache.kv().blocks
        if n % 500 == 0:
            first.append(addresses.copy())
    for some in first:
        np.testing.assert_array_equal(addresses[: len(some)], some)
    assert len(set(addresses.tolist())) == 1250
    slabs = cache.pool.n_allocations
    assert cache.counts == Counts(append=5000 * LAYERS * ROW, allocations=slabs)
    assert 2 <= slabs <= 1 + np.log2(1250 * SIZE / 512) + 1, "each as large as all before it"


def test_places_inside_a_block():
    """K and V, or two layers, that overlap."""
    pool = new_pool()
    (number,) = pool.take(1)
    block, places = pool.block(number), pool.places
    start = block.ctypes.data
    for layer in range(LAYERS):
        for side in range(2):
            assert block[layer, side].ctypes.data == start + int(places[layer, side])
    assert block.shape == (LAYERS, 2, SIZE, DIM) and block.flags.c_contiguous


# ---------------------------------------------------------------- a pool that is full


def state(cache: PagedKvCache) -> tuple:
    return lengths(cache), list(cache.block_table), dataclasses.replace(cache.counts)


@pytest.mark.parametrize("step", ["push_row", "push_row of a fork", "reserve", "set_prefill"])
def test_a_full_pool_loses_nothing(step):
    """A step that is refused half-way: blocks taken and held by nobody, rows of some layers."""
    pool = new_pool(max_blocks=5)
    cache, other = filled(8, pool), filled(11, pool)
    fork, row = other.fork(), rows(1)[0]
    before = state(cache), state(other), state(fork)
    with pytest.raises(PoolFull, match=r"\d more blocks of 4 rows are needed, 0 of at most 5"):
        if step == "push_row":
            cache.push_row(0, row, row)
        elif step == "push_row of a fork":  # its last block has room, but is shared
            fork.push_row(0, row, row)
        elif step == "reserve":
            cache.reserve(100)
        else:
            cache.set_prefill(0, rows(9), rows(9))
    assert (state(cache), state(other), state(fork)) == before
    assert pool.n_free == 0
    pool.check_integrity()
    for layer in range(LAYERS):
        check(cache, layer, rows(8, layer))
        check(other, layer, rows(11, layer))
    cache.free()
    push(fork, row)
    check(fork, 1, np.concatenate([rows(11, 1), rows(1)]))


def test_as_much_as_fits_is_taken():
    """A pool that keeps a block back, or makes more than it may."""
    pool = new_pool(max_blocks=300)
    assert (pool.max_rows, pool.n_free, pool.n_used) == (1200, 300, 0)
    cache = filled(1200, pool)
    assert (pool.n_free, pool.n_used, len(pool._blocks)) == (0, 300, 300)
    with pytest.raises(PoolFull):
        push(cache, rows(1)[0])
    check(cache, 2, rows(1200, 2))


def test_memory_that_runs_out_while_the_pool_grows(monkeypatch):
    """Blocks that are counted as made, and are not there."""
    pool = new_pool(1000)
    cache = filled(500, pool)
    before = state(cache)

    def empty(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("engine.memory.empty", empty)
        cache.reserve(3000)
    assert state(cache) == before
    pool.check_integrity()
    cache.reserve(3000)


@pytest.mark.parametrize("sizes", [{"block_rows": 0}, {"block_rows": -1}, {"max_blocks": 0}])
def test_sizes_of_nothing_are_refused(sizes):
    """A division by zero in the first append, or a pool that is always full."""
    (name, value) = next(iter(sizes.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        BlockPool(LAYERS, DIM, **({"max_blocks": 1} | sizes))


def test_unknown_types_are_refused():
    """A type that kernels cannot read."""
    with pytest.raises(ValueError, match="dtype is 'f64'"):
        new_pool(dtype="f64")


# ---------------------------------------------------------------- shared blocks


@pytest.mark.parametrize("n", [0, 1, 4, 6, 8])
def test_a_fork_shares_every_block(n):
    """A fork that copies costs as much as a second prefill."""
    one = filled(n)
    used = one.pool.n_used
    two = one.fork()
    assert two.pool is one.pool and two.block_table == one.block_table
    assert one.pool.n_used == used and two.counts == Counts()
    for cache in (one, two):
        for layer in range(LAYERS):
            check(cache, layer, rows(n, layer))
    one.pool.check_integrity()


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_the_first_to_write_gets_a_copy_of_a_partly_filled_block(writer):
    """A row of one sequence that appears in the others; a whole prompt copied for one row."""
    one = filled(6)
    all_of_them = one, one.fork(), one.fork()
    cache = all_of_them[writer]
    full, partly = cache.block_table
    push(cache, rows(1, 50)[0])
    assert cache.block_table[0] == full and cache.block_table[1] != partly
    assert cache.counts.grow == 2 * LAYERS * ROW, "the 2 rows in use of all layers, once"
    assert one.pool.n_used == 3
    for other in all_of_them:
        mine = [rows(1, 50)] if other is cache else []
        assert mine or other.block_table == [full, partly]
        for layer in range(LAYERS):
            check(other, layer, np.concatenate([rows(6, layer), *mine]))
    one.pool.check_integrity()


def test_the_last_to_write_needs_no_copy():
    """A block that is copied for a sequence that has it alone by now."""
    one = filled(6)
    two = one.fork()
    push(one, rows(1, 50)[0])
    push(two, rows(1, 51)[0])
    assert (one.counts.grow, two.counts.grow) == (2 * LAYERS * ROW, 0)
    assert one.block_table[0] == two.block_table[0] and one.pool.n_used == 3
    for cache, seed in ((one, 50), (two, 51)):
        check(cache, 1, np.concatenate([rows(6, 1), rows(1, seed)]))


@pytest.mark.parametrize("step", ["push", "reserve"])
def test_full_blocks_are_not_copied(step):
    """Forks of a long prompt that end at a block's end share all of it, for ever."""
    one = filled(8)
    two = one.fork()
    if step == "reserve":
        two.reserve(3)
        two.commit(3)
    else:
        push(two, rows(1, 50)[0])
    assert two.counts.grow == 0 and two.block_table[:2] == one.block_table
    assert one.pool.n_used == 3


def test_a_reserved_step_copies_a_shared_block_too():
    """Kernels that write into a block which another sequence reads."""
    one = filled(6)
    two = one.fork()
    before = one.kv().blocks.copy()
    two.reserve(1)
    assert two.kv().blocks[0] == before[0] and two.kv().blocks[1] != before[1]
    np.testing.assert_array_equal(one.kv().blocks, before)
    for layer in range(LAYERS):
        check(two, layer, rows(6, layer))


def test_a_shortened_fork_does_not_write_over_the_other():
    """After truncate the next row lies in the middle of a full block that is shared."""
    one = filled(8)
    two = one.fork()
    two.truncate(5)
    assert one.pool.n_used == 2
    push(two, rows(1, 50)[0])
    check(one, 0, rows(8))
    check(two, 0, np.concatenate([rows(8)[:5], rows(1, 50)]))
    one.pool.check_integrity()


@pytest.mark.parametrize("n", [1, 6, 7, 11, 12, 30])
def test_prefill_of_a_fork_leaves_the_other_alone(n):
    """A new prompt written over the rows of the sequence that the cache was forked from."""
    one = filled(11)
    two = one.fork()
    for layer in range(LAYERS):
        two.set_prefill(layer, rows(n, 20 + layer), -rows(n, 20 + layer))
    for layer in range(LAYERS):
        check(one, layer, rows(11, layer))
        check(two, layer, rows(n, 20 + layer))
    assert not set(one.block_table) & set(two.block_table)
    one.pool.check_integrity()


def test_a_fork_of_a_reserved_step_shares_only_rows_in_use():
    """A block that both would write their next rows into."""
    one = filled(8)
    one.reserve(4)
    two = one.fork()
    assert len(one.block_table) == len(two.block_table) == one.pool.n_used == 2
    push(one, rows(1, 50)[0])
    push(two, rows(1, 51)[0])
    check(one, 0, np.concatenate([rows(8), rows(1, 50)]))
    check(two, 0, np.concatenate([rows(8), rows(1, 51)]))
    one.pool.check_integrity()


def test_forks_outlive_what_they_were_forked_from():
    """Blocks given back while somebody still reads them."""
    one = filled(6)
    pool, two = one.pool, one.fork()
    three = two.fork()
    one.free()
    del two
    filled(40, pool)
    check(three, 1, rows(6, 1))
    assert pool.n_used == 2
    three.free()
    assert pool.n_used == 0
    pool.check_integrity()


# ---------------------------------------------------------------- a pool of many


def test_collected_sequences_give_their_blocks_back():
    """A request that was dropped takes its blocks along, and the pool is full in the end."""
    pool = new_pool()
    cache = filled(11, pool)
    kept = cache.fork()
    push(cache, rows(1)[0])
    cache.itself = cache  # only the garbage collector finds it
    del cache
    gc.collect()
    pool.check_integrity()
    assert pool.n_used == 3
    check(kept, 0, rows(11))
    del kept
    assert pool.n_used == 0


@pytest.mark.parametrize(
    "tamper",
    [
        lambda pool, table: pool._references.__setitem__(table[0], 2),
        lambda pool, table: pool._references.__setitem__(table[0], 0),
        lambda pool, table: pool._free.append(table[0]),
        lambda pool, table: pool._free.append(pool._free[0]),
        lambda pool, table: pool._free.pop(),
        lambda pool, table: table.pop(),
        lambda pool, table: table.append(table[0]),
        lambda pool, table: table.append(pool._free[-1]),
        lambda pool, table: pool.take(1),
        lambda pool, table: pool.give_back(table[:1]),
        lambda pool, table: pool.share(table[:1]),
        lambda pool, table: setattr(pool, "max_blocks", len(pool._blocks) - 1),
    ],
)
def test_a_broken_pool_is_found(tamper):
    """A check that passes whatever it sees hides the bug that it is for."""
    cache = filled(11)
    cache.pool.check_integrity()
    tamper(cache.pool, cache.block_table)
    with pytest.raises(AssertionError):
        cache.pool.check_integrity()
    cache.block_table.clear()  # nothing is given back twice


def test_threads_share_a_pool():
    """A block given to two threads at once, or lost between them."""
    pool = new_pool(max_blocks=60)

    def work(me: int) -> None:
        rng = np.random.default_rng(me)
        for turn in range(60):
            n, mine = int(rng.integers(1, 30)), rows(1, 1000 + 100 * me + turn)
            cache = filled(n, pool)
            twin = cache.fork()
            push(twin, mine[0])
            cache.truncate(n // 2)
            push(cache, -mine[0])
            for layer in range(LAYERS):
                check(twin, layer, np.concatenate([rows(n, layer), mine]))
                check(cache, layer, np.concatenate([rows(n, layer)[: n // 2], -mine]))

    in_two_threads(work)
    pool.check_integrity()
    assert pool.n_used == 0


def test_threads_that_take_the_last_blocks():
    """Two that both see enough free blocks, and get fewer."""
    pool = new_pool(max_blocks=10)

    def work(_) -> None:
        for _ in range(20_000):
            with suppress(PoolFull):
                taken = pool.take(8)
                assert len(set(taken)) == 8
                pool.give_back(taken)

    in_two_threads(work)
    pool.check_integrity()
    assert pool.n_used == 0
