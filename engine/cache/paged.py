"""PagedKvCache: rows in fixed-size blocks of a pool that many sequences draw from.

A block holds `block_rows` rows of K and V of every layer, so a sequence has one table of blocks for
all its layers, an append is O(1), and growth copies nothing (Kwon et al. 2023). Kernels read blocks
where they lie. Blocks are counted by reference: sequences may share them, and the first to write
into a shared one gets its own copy.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from engine import memory
from engine.cache.rows import Counts, check_prefill, check_row, check_truncate, kv_dtype_of
from engine.kernels.jit import uninterrupted
from engine.kernels.kv import ELEMENTS, Kv

SLAB_ROWS = 512  # rows that a pool makes room for at first, and at least, when it grows


class PoolFull(MemoryError):
    """A pool has fewer free blocks than are needed: nothing was taken."""


class BlockPool:
    """Blocks of (n_layers, 2, block_rows, kv_dim), made in slabs as they are needed.

    Safe to use from several threads, each with sequences of its own.
    """

    def __init__(
        self,
        n_layers: int,
        kv_dim: int,
        block_rows: int = 16,
        *,
        max_blocks: int,
        dtype: str = "f32",
    ):
        """At most `max_blocks` blocks, 2 n_layers block_rows kv_dim elements each."""
        names = "n_layers", "kv_dim", "block_rows", "max_blocks"
        for name, value in zip(names, (n_layers, kv_dim, block_rows, max_blocks), strict=True):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; a whole number of at least 1 is needed")
        self.n_layers, self.kv_dim, self.block_rows = n_layers, kv_dim, block_rows
        self.max_blocks, self.dtype = max_blocks, kv_dtype_of(dtype)
        self.n_allocations = 0
        self.element = np.zeros(0, ELEMENTS[dtype])
        side = block_rows * kv_dim * self.element.itemsize  # bytes of K of one layer in a block
        self.places = np.arange(2 * n_layers, dtype=np.uint64).reshape(-1, 2) * np.uint64(side)
        self._blocks: list[np.ndarray] = []  # by number, views of slabs
        self._references: list[int] = []
        self._free: list[int] = []  # the next to be taken last
        self._tables: weakref.WeakSet[PagedKvCache] = weakref.WeakSet()
        self._lock = threading.RLock()  # re-entered where a sequence is collected inside

    @property
    def max_rows(self) -> int:
        """Rows of the longest sequence there is room for."""
        return self.max_blocks * self.block_rows

    @property
    def n_used(self) -> int:
        return len(self._blocks) - len(self._free)

    @property
    def n_free(self) -> int:
        """Blocks that can be taken, those not made yet among them."""
        return self.max_blocks - self.n_used

    def block(self, number: int) -> np.ndarray:
        """(n_layers, 2, block_rows, kv_dim), lent."""
        return self._blocks[number]

    def is_shared(self, number: int) -> bool:
        return self._references[number] > 1

    def take(self, n: int) -> list[int]:
        """`n` blocks with one reference each, whatever they hold; all of them or PoolFull."""
        with self._lock:
            if n > self.n_free:
                raise PoolFull(
                    f"the KV cache is full: {n} more blocks of {self.block_rows} rows are needed, "
                    f"{self.n_free} of at most {self.max_blocks} are free"
                )
            if n > len(self._free):
                self._grow(n - len(self._free))
            taken = [self._free.pop() for _ in range(n)]
            for number in taken:
                self._references[number] = 1
            return taken

    def share(self, numbers: list[int]) -> None:
        """One reference more to each."""
        with self._lock:
            for number in numbers:
                self._references[number] += 1

    def give_back(self, numbers: list[int]) -> None:
        """One reference less to each; those without any are free."""
        with self._lock:
            for number in reversed(numbers):
                self._references[number] -= 1
                if self._references[number] == 0:
                    self._free.append(number)

    def check_integrity(self) -> None:
        """AssertionError unless every block is free, or held as often as it is counted."""
        with self._lock:
            held = [0] * len(self._blocks)
            for sequence in self._tables:
                assert len(set(sequence.block_table)) == len(sequence.block_table), "a block twice"
                for number in sequence.block_table:
                    held[number] += 1
            assert held == self._references, "references are not those of the tables"
            assert len(set(self._free)) == len(self._free), "a block is free twice"
            assert {i for i, n in enumerate(held) if n == 0} == set(self._free), "a block leaked"
            assert len(self._blocks) <= self.max_blocks and self.n_free + self.n_used == (
                self.max_blocks
            )

    def _grow(self, n: int) -> None:
        """Make `n` blocks and more: as many as there are, so that there are few slabs."""
        made = len(self._blocks)
        n = max(n, made, SLAB_ROWS // self.block_rows)
        n = min(n, self.max_blocks - made)
        shape = (n, self.n_layers, 2, self.block_rows, self.kv_dim)
        slab = memory.empty(int(np.prod(shape)), self.dtype).reshape(shape)
        self.n_allocations += 1
        self._blocks.extend(slab)
        self._references.extend([0] * n)
        self._free[:0] = range(made + n - 1, made - 1, -1)


class PagedKvCache:
    """The K and V rows of one sequence, in blocks of a pool.

    It has the methods of BasicKvCache, but lends no view: a layer's rows are not one array.
    """

    parts = "reserve", "commit"  # as they are called in a profile

    def __init__(self, pool: BlockPool):
        self.pool, self.kv_dim, self.dtype = pool, pool.kv_dim, pool.dtype
        self.block_table: list[int] = []  # numbers of the blocks that hold its rows, in order
        self.counts = Counts()
        self._row_bytes = pool.kv_dim * pool.element.itemsize
        self._addresses = np.zeros(0, np.uint64)  # of these blocks, with room for more
        self._rows = [0] * pool.n_layers
        with pool._lock:
            pool._tables.add(self)
        weakref.finalize(self, pool.give_back, self.block_table).atexit = False

    def set_prefill(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Hold exactly the prompt's rows, k and v of (n, kv_dim)."""
        check_prefill(k, v, self.kv_dim)
        self._make_writable(0, len(k))
        for start in range(0, len(k), self.pool.block_rows):
            rows = slice(start, start + self.pool.block_rows)
            block = self.pool.block(self.block_table[start // self.pool.block_rows])[layer]
            block[0, : len(k[rows])], block[1, : len(k[rows])] = k[rows], v[rows]
        self._rows[layer] = len(k)
        self.counts.append += 2 * len(k) * self._row_bytes
        self._drop_unused()

    def push_row(self, layer: int, k_row: np.ndarray, v_row: np.ndarray) -> None:
        """Append one row, k_row and v_row of (kv_dim,)."""
        check_row(k_row, v_row, self.kv_dim)
        row = self._rows[layer]
        self._make_writable(row, row + 1)
        block = self.pool.block(self.block_table[row // self.pool.block_rows])[layer]
        block[0, row % self.pool.block_rows] = k_row
        block[1, row % self.pool.block_rows] = v_row
        self._rows[layer] = row + 1
        self.counts.append += 2 * self._row_bytes

    def materialize(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V, (rows, kv_dim) each."""
        rows, size = self._rows[layer], self.pool.block_rows
        k, v = (np.empty((rows, self.kv_dim), self.dtype) for _ in range(2))
        for start in range(0, rows, size):
            block = self.pool.block(self.block_table[start // size])[layer]
            n = min(size, rows - start)
            k[start : start + n], v[start : start + n] = block[0, :n], block[1, :n]
        self.counts.read += k.nbytes + v.nbytes
        return k, v

    def kv_view(self, layer: int) -> None:
        """It does not lend: rows of different blocks are not one array."""
        return None

    def seq_len(self, layer: int) -> int:
        """Rows in use."""
        return self._rows[layer]

    def num_layers(self) -> int:
        return len(self._rows)

    def truncate(self, rows: int) -> None:
        """Forget every row from `rows` on, in every layer; O(1) for each block it gives back."""
        check_truncate(rows, self._rows)
        self._rows = [rows] * len(self._rows)
        self._drop_unused()

    def free(self) -> None:
        """Give back all blocks. A sequence that nothing holds any more does so by itself."""
        self.truncate(0)

    def fork(self) -> PagedKvCache:
        """Another sequence with the same rows, in the same blocks."""
        self._drop_unused()
        twin = PagedKvCache(self.pool)
        with uninterrupted():
            self.pool.share(self.block_table)
            twin._extend(self.block_table)
        twin._rows = list(self._rows)
        return twin

    # ------------------------------------------------------------ a whole step at once

    @property
    def capacity(self) -> int:
        """Rows that its blocks have room for."""
        return len(self.block_table) * self.pool.block_rows

    def reserve(self, n_rows: int) -> None:
        """Blocks for `n_rows` more rows in every layer; PoolFull leaves everything as it was."""
        self._make_writable(min(self._rows), max(self._rows) + n_rows)

    def kv(self) -> Kv:
        """Where kernels find the rows and write those reserved. Valid until the next append."""
        addresses = self._addresses[: len(self.block_table)]
        return Kv(addresses, self.pool.places, self.pool.block_rows, self.pool.element)

    def commit(self, n_rows: int) -> None:
        """Count `n_rows` rows that were written behind the last in every layer."""
        assert max(self._rows) + n_rows <= self.capacity, "rows were written without being reserved"
        # in one assignment: an interrupt finds all layers longer, or none
        self._rows = [rows + n_rows for rows in self._rows]
        self.counts.append += 2 * n_rows * self._row_bytes * len(self._rows)

    def _make_writable(self, start: int, stop: int) -> None:
        """Blocks of its own for rows start to stop: new ones, and copies of those it shares."""
        size = self.pool.block_rows
        held, needed = len(self.block_table), -(-stop // size)
        if start == stop:
            return
        touched = range(start // size, min(held, needed))
        shared = [i for i in touched if self.pool.is_shared(self.block_table[i])]
        if not shared and needed <= held:
            return
        with uninterrupted():  # a block that was taken and is in no table would be lost for good
            self._take(needed - held, shared)

    def _take(self, n_new: int, shared: list[int]) -> None:
        """Blocks of its own in the places `shared`, with what they hold, and more at the end."""
        size, slabs = self.pool.block_rows, self.pool.n_allocations
        taken = self.pool.take(max(n_new, 0) + len(shared))
        self.counts.allocations += self.pool.n_allocations - slabs
        for i in shared:
            old, number = self.block_table[i], taken.pop()
            rows = self.pool.block(old)[:, :, : max(self._rows) - i * size]
            self.pool.block(number)[:, :, : rows.shape[2]] = rows
            self.counts.grow += rows.nbytes
            self.block_table[i] = number
            self._addresses[i] = self.pool.block(number).ctypes.data
            self.pool.give_back([old])
        self._extend(taken)

    def _extend(self, numbers: list[int]) -> None:
        """Blocks behind those it has."""
        held = len(self.block_table)
        self.block_table += numbers
        if len(self.block_table) > len(self._addresses):
            grown = np.zeros(2 * len(self.block_table), np.uint64)
            grown[:held] = self._addresses[:held]
            self._addresses = grown
        for i, number in enumerate(numbers, held):
            self._addresses[i] = self.pool.block(number).ctypes.data

    def _drop_unused(self) -> None:
        """Give back the blocks behind the last row of any layer."""
        used = -(-max(self._rows, default=0) // self.pool.block_rows)
        if unused := self.block_table[used:]:
            with uninterrupted():
                del self.block_table[used:]
                self.pool.give_back(unused)
