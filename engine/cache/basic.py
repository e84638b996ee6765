"""BasicKvCache: append in place, read without copying.

Per layer a K and a V array of (capacity, kv_dim), of which the first rows are in use. Capacity
doubles only when it runs out, one layer at a time, so copying is constant per token, amortised, and
at most one layer is held twice.
"""

from __future__ import annotations

import numpy as np

from engine import memory
from engine.cache.rows import Counts, check_prefill, check_row, check_truncate, kv_dtype_of
from engine.kernels.jit import uninterrupted
from engine.kernels.kv import ELEMENTS, Kv

KV_HEADROOM_ROWS = 512


class BasicKvCache:
    """The K and V rows of one sequence. It knows no model: only layers, rows and their width.

    Two ways to append: row by row and layer by layer (`set_prefill`, `push_row`), or a whole step
    at once: `reserve` rows, let kernels write them where `kv` says, `commit`. A step that fails
    commits nothing and so leaves the cache as it was.
    """

    parts = "reserve", "commit"  # as they are called in a profile

    def __init__(self, n_layers: int, kv_dim: int, dtype: str = "f32"):
        """dtype: "f32", or "f16" for half the bytes."""
        self.kv_dim, self.dtype = kv_dim, kv_dtype_of(dtype)
        self.counts = Counts()
        self._element = np.zeros(0, ELEMENTS[dtype])
        self._row_bytes = kv_dim * self._element.itemsize
        self._addresses = np.zeros((n_layers, 2), np.uint64)  # of each layer's K and V
        self._rows = [0] * n_layers
        self._k = [np.empty((0, kv_dim), self.dtype)] * n_layers
        self._v = list(self._k)

    def set_prefill(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Hold exactly the prompt's rows, k and v of (n, kv_dim), with room for 512 more."""
        check_prefill(k, v, self.kv_dim)
        n = len(k)
        self._make_room(layer, 0, n + KV_HEADROOM_ROWS)
        self._k[layer][:n] = k
        self._v[layer][:n] = v
        self._rows[layer] = n
        self.counts.append += 2 * n * self._row_bytes

    def push_row(self, layer: int, k_row: np.ndarray, v_row: np.ndarray) -> None:
        """Append one row, k_row and v_row of (kv_dim,)."""
        check_row(k_row, v_row, self.kv_dim)
        n = self._rows[layer]
        self._make_room(layer, n, 1)
        self._k[layer][n] = k_row
        self._v[layer][n] = v_row
        self._rows[layer] = n + 1
        self.counts.append += 2 * self._row_bytes

    def materialize(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V, (rows, kv_dim) each."""
        k, v = self.kv_view(layer)
        self.counts.read += k.nbytes + v.nbytes
        return k.copy(), v.copy()

    def kv_view(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V, (rows, kv_dim) each, lent without a copy.

        Valid until the next append; after growth an old view still reads its old rows.
        """
        n = self._rows[layer]
        return self._k[layer][:n], self._v[layer][:n]

    def seq_len(self, layer: int) -> int:
        """Rows in use."""
        return self._rows[layer]

    def num_layers(self) -> int:
        return len(self._rows)

    def truncate(self, rows: int) -> None:
        """Forget every row from `rows` on, in every layer; O(1), the memory stays."""
        check_truncate(rows, self._rows)
        self._rows = [rows] * len(self._rows)

    # ------------------------------------------------------------ a whole step at once

    @property
    def capacity(self) -> int:
        """Rows that every layer has room for."""
        return min(map(len, self._k))

    def reserve(self, n_rows: int) -> None:
        """Room for `n_rows` more rows in every layer; the first time, and 512 besides."""
        for layer, held in enumerate(self._k):
            room = n_rows if len(held) else n_rows + KV_HEADROOM_ROWS
            self._make_room(layer, self._rows[layer], room)

    def kv(self) -> Kv:
        """Where kernels find the rows and write those reserved: one block. Valid until growth."""
        return Kv(np.zeros(1, np.uint64), self._addresses, self.capacity, self._element)

    def commit(self, n_rows: int) -> None:
        """Count `n_rows` rows that were written behind the last in every layer."""
        assert max(self._rows) + n_rows <= self.capacity, "rows were written without being reserved"
        # in one assignment: an interrupt finds all layers longer, or none
        self._rows = [rows + n_rows for rows in self._rows]
        self.counts.append += 2 * n_rows * self._row_bytes * len(self._rows)

    def _make_room(self, layer: int, rows: int, n_rows: int) -> None:
        """Grow a layer that has no room for `n_rows` behind the first `rows`, which are kept."""
        capacity = len(self._k[layer])
        if rows + n_rows <= capacity:
            return
        capacity = max(2 * capacity, rows + n_rows, KV_HEADROOM_ROWS)
        grown = []
        for old in (self._k[layer], self._v[layer]):
            flat = memory.empty(capacity * self.kv_dim, self.dtype)
            grown.append(flat.reshape(capacity, self.kv_dim))
            grown[-1][:rows] = old[:rows]
            self.counts.allocations += 1
            self.counts.grow += old[:rows].nbytes
        # Only now, when there is memory for both: K and V of one layer have the same room. And not
        # half: kernels write where the addresses say.
        with uninterrupted():
            self._k[layer], self._v[layer] = grown
            self._addresses[layer] = [side.ctypes.data for side in grown]
