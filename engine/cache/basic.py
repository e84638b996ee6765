"""BasicKvCache: append in place, read without copying.

Per layer a K and a V array of (capacity, kv_dim) float32, of which the first rows are in use.
Capacity doubles only when it runs out, one layer at a time, so copying is constant per token,
amortised, and at most one layer is held twice.
"""

from __future__ import annotations

import numpy as np

from engine import memory

KV_HEADROOM_ROWS = 512


class BasicKvCache:
    """The K and V rows of one sequence. It knows no model: only layers, rows and their width.

    Two ways to append: row by row and layer by layer (`set_prefill`, `push_row`), or a whole step
    at once: `reserve` rows, let kernels write them at `addresses`, `commit`. A step that fails
    commits nothing and so leaves the cache as it was.
    """

    def __init__(self, n_layers: int, kv_dim: int):
        self.kv_dim = kv_dim
        self.addresses = np.zeros((n_layers, 2), np.uint64)  # of each layer's K and V
        self.n_allocations = 0
        self._rows = [0] * n_layers
        self._k = [np.empty((0, kv_dim), np.float32)] * n_layers
        self._v = list(self._k)

    def set_prefill(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Hold exactly the prompt's rows, k and v of (n, kv_dim), with room for 512 more."""
        n = len(k)
        if k.shape != (n, self.kv_dim) or v.shape != k.shape:
            raise ValueError(
                f"set_prefill: k is {k.shape}, v {v.shape}; (rows, {self.kv_dim}) is needed"
            )
        self._rows[layer] = 0
        self._make_room(layer, n + KV_HEADROOM_ROWS)
        self._k[layer][:n] = k
        self._v[layer][:n] = v
        self._rows[layer] = n

    def push_row(self, layer: int, k_row: np.ndarray, v_row: np.ndarray) -> None:
        """Append one row, k_row and v_row of (kv_dim,)."""
        if k_row.shape != (self.kv_dim,) or v_row.shape != (self.kv_dim,):
            raise ValueError(
                f"push_row: rows of {k_row.shape} and {v_row.shape}; ({self.kv_dim},) is needed"
            )
        self._make_room(layer, 1)
        n = self._rows[layer]
        self._k[layer][n] = k_row
        self._v[layer][n] = v_row
        self._rows[layer] = n + 1

    def materialize(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V, (rows, kv_dim) each."""
        k, v = self.kv_view(layer)
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

    # ------------------------------------------------------------ a whole step at once

    @property
    def capacity(self) -> int:
        """Rows that every layer has room for."""
        return min(map(len, self._k))

    def reserve(self, n_rows: int) -> None:
        """Room for `n_rows` more rows in every layer; the first time, and 512 besides."""
        for layer, held in enumerate(self._k):
            self._make_room(layer, n_rows if len(held) else n_rows + KV_HEADROOM_ROWS)

    def commit(self, n_rows: int) -> None:
        """Count `n_rows` rows that were written behind the last in every layer."""
        for layer, rows in enumerate(self._rows):
            assert rows + n_rows <= len(self._k[layer]), "rows were written without being reserved"
            self._rows[layer] = rows + n_rows

    def _make_room(self, layer: int, n_rows: int) -> None:
        """Grow a layer that has no room for `n_rows` more."""
        rows, capacity = self._rows[layer], len(self._k[layer])
        if rows + n_rows <= capacity:
            return
        capacity = max(2 * capacity, rows + n_rows, KV_HEADROOM_ROWS)
        grown = []
        for old in (self._k[layer], self._v[layer]):
            grown.append(memory.empty(capacity * self.kv_dim).reshape(capacity, self.kv_dim))
            grown[-1][:rows] = old[:rows]
            self.n_allocations += 1
        # only now, when there is memory for both: K and V of one layer have the same room
        self._k[layer], self._v[layer] = grown
        self.addresses[layer] = [side.ctypes.data for side in grown]
