"""PagedKvCache: rows in fixed-size blocks of a pool that many sequences draw from.

A block holds `block_rows` rows of K and V of every layer, so a sequence has one table of blocks for
all its layers, an append is O(1), and growth copies nothing (Kwon et al. 2023). Kernels read blocks
where they lie. Blocks are counted by reference: sequences may share them, and the first to write
into a shared one gets its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cache.pool import BlockPool
from engine.cache.rows import Counts, check_prefill, check_row, check_truncate
from engine.kernels.jit import uninterrupted
from engine.kernels.kv import Kv


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
        pool.lend_to(self, self.block_table)

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
        twin.adopt(self.block_table, self._rows)
        return twin

    def adopt(self, numbers: Sequence[int], rows: Sequence[int]) -> None:
        """Hold `rows[layer]` rows of each layer that blocks `numbers` of others hold, in these.

        Only a sequence without rows can.
        """
        assert not any(self._rows), f"a sequence of {max(self._rows)} rows cannot adopt others"
        self._drop_unused()
        with uninterrupted():
            self.pool.share(numbers)
            self._extend(numbers)
            self._rows = list(rows)

    def exchange(self, numbers: Sequence[int]) -> None:
        """Hold blocks `numbers` of others, which hold the same rows, in place of its first."""
        with uninterrupted():
            for i, number in enumerate(numbers):
                if number != self.block_table[i]:
                    self.pool.share([number])
                    self._put(i, number)

    # ------------------------------------------------------------ a whole step at once

    @property
    def capacity(self) -> int:
        """Rows that its blocks have room for."""
        return len(self.block_table) * self.pool.block_rows

    def reserve(self, n_rows: int) -> None:
        """Blocks for `n_rows` more rows in every layer; PoolFull leaves everything as it was."""
        self._make_writable(min(self._rows), max(self._rows) + n_rows)

    def kv(self) -> Kv:
        """Where kernels find the rows and write those reserved.

        Valid until the next append or exchange.
        """
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
            self._put(i, number)
        self._extend(taken)

    def _put(self, i: int, number: int) -> None:
        """Another block, and the reference to it, in the place of one that is given back."""
        old, self.block_table[i] = self.block_table[i], number
        self._addresses[i] = self.pool.block(number).ctypes.data
        self.pool.give_back([old])

    def _extend(self, numbers: Sequence[int]) -> None:
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
