"""Paged sequences of one small pool under random use, beside lists that do the same."""

import ctypes
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.cache import BlockPool, PagedKvCache, PoolFull, pool, snapshot

LAYERS, DIM, SIZE, MAX_BLOCKS = 2, 4, 3, 12  # SIZE: rows of a block
ABOUT = {"model": "none"}
ROWS = st.integers(1, 2 * SIZE + 1)


class Sequence:
    """A cache, and beside it the rows that it ought to hold: by layer, (rows, 2, DIM)."""

    def __init__(self, cache: PagedKvCache, rows: np.ndarray):
        self.cache, self.rows = cache, rows


class Machine(RuleBasedStateMachine):
    """Blocks lost or held twice, rows written into another sequence, or half of a step that a full
    pool refused."""

    sequences = Bundle("sequences")
    dtype = "f32"

    def __init__(self):
        super().__init__()
        self.slab_rows, pool.SLAB_ROWS = pool.SLAB_ROWS, 2 * SIZE  # so that the pool grows
        self.pool = BlockPool(LAYERS, DIM, SIZE, max_blocks=MAX_BLOCKS, dtype=self.dtype)
        self.alive: list[Sequence] = []
        self.folder = tempfile.TemporaryDirectory()
        self.n_made = 0

    def teardown(self):
        for sequence in self.alive:
            sequence.cache.free()
        self.pool.check_integrity()
        assert self.pool.n_used == 0, "blocks were lost"
        assert self.pool.n_free == MAX_BLOCKS
        pool.SLAB_ROWS = self.slab_rows
        self.folder.cleanup()

    def new_rows(self, n: int) -> np.ndarray:
        """(LAYERS, n, 2, DIM), each element once in a run, exact in float16 for long enough."""
        size = LAYERS * n * 2 * DIM
        values = np.arange(self.n_made, self.n_made + size) % 2039
        self.n_made += size
        return values.reshape(LAYERS, n, 2, DIM).astype(self.pool.dtype)

    def held(self) -> Sequence:
        self.alive.append(Sequence(PagedKvCache(self.pool), self.new_rows(0)))
        return self.alive[-1]

    def try_to(self, cache: PagedKvCache, stop: int, step, *args) -> bool:
        """Run a step up to row `stop`; False if the pool was full, and then rightly so."""
        table, n_free = list(cache.block_table), self.pool.n_free
        try:
            step(*args)
        except PoolFull:
            assert (cache.block_table, self.pool.n_free) == (table, n_free)
            new = max(-(-stop // SIZE) - len(table), 0)
            assert n_free < new + sum(map(self.pool.is_shared, table)), "there was room"
            return False
        return True

    # ------------------------------------------------------------ sequences

    @rule(target=sequences)
    def open(self):
        return self.held()

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        self.alive.append(Sequence(sequence.cache.fork(), sequence.rows))
        return self.alive[-1]

    @rule(sequence=sequences)
    def free(self, sequence):
        sequence.cache.free()
        sequence.rows = self.new_rows(0)

    @rule(sequence=consumes(sequences))
    def forget(self, sequence):
        self.alive.remove(sequence)
        del sequence.cache

    @rule(target=sequences, sequence=sequences)
    def save_and_load(self, sequence):
        path, n = Path(self.folder.name) / "saved", sequence.cache.seq_len(0)
        snapshot.save(path, sequence.cache, range(n + 1), n, ABOUT)
        loaded = self.held()
        if self.try_to(loaded.cache, n, snapshot.load, path, loaded.cache, ABOUT, n + 1):
            loaded.rows = sequence.rows
        return loaded

    # ------------------------------------------------------------ rows

    @rule(sequence=sequences)
    def push_row(self, sequence):
        cache, rows = sequence.cache, self.new_rows(1)
        for layer in range(LAYERS):
            done = self.try_to(cache, cache.seq_len(0) + 1, cache.push_row, layer, *rows[layer, 0])
            assert done or layer == 0, "a row of some layers"
            if not done:
                return
        sequence.rows = np.concatenate([sequence.rows, rows], axis=1)

    @rule(sequence=sequences, n=ROWS, fails=st.booleans())
    def step(self, sequence, n, fails):
        """Reserve, write as kernels do, commit; or fail before that."""
        cache, start, rows = sequence.cache, sequence.cache.seq_len(0), self.new_rows(n)
        if not self.try_to(cache, start + n, cache.reserve, n):
            return
        kv = cache.kv()
        for layer, i, side in np.ndindex(LAYERS, n, 2):
            block, inside = divmod(start + i, kv.block_rows)
            row = rows[layer, i, side]
            at = int(kv.blocks[block] + kv.places[layer, side]) + inside * row.nbytes
            ctypes.memmove(at, row.ctypes.data, row.nbytes)
        if not fails:
            cache.commit(n)
            sequence.rows = np.concatenate([sequence.rows, rows], axis=1)

    @rule(sequence=sequences, n=st.integers(0, 2 * SIZE + 1))
    def set_prefill(self, sequence, n):
        cache, rows = sequence.cache, self.new_rows(n)
        for layer in range(LAYERS):
            k, v = rows[layer].swapaxes(0, 1)
            done = self.try_to(cache, n, cache.set_prefill, layer, k, v)
            assert done or layer == 0, "a prompt of some layers"
            if not done:
                return
        sequence.rows = rows

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        keep = data.draw(st.integers(0, sequence.rows.shape[1]))
        sequence.cache.truncate(keep)
        sequence.rows = sequence.rows[:, :keep]
        assert len(sequence.cache.block_table) == -(-keep // SIZE)

    # ------------------------------------------------------------ always

    @invariant()
    def contents_are_those_of_the_lists(self):
        for sequence in self.alive:
            for layer, rows in enumerate(sequence.rows):
                assert sequence.cache.seq_len(layer) == len(rows)
                held = np.stack(sequence.cache.materialize(layer), axis=1)
                np.testing.assert_array_equal(held, rows)

    @invariant()
    def pool_is_whole(self):
        self.pool.check_integrity()
        assert self.pool.n_used == len({n for s in self.alive for n in s.cache.block_table})


class Float16Machine(Machine):
    dtype = "f16"


TestFloat32 = Machine.TestCase
TestFloat16 = Float16Machine.TestCase
TestFloat32.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFloat16.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
