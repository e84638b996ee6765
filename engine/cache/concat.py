"""ConcatKvCache: concatenate on every append, clone on every read.

The cache that BasicKvCache replaced, kept as it was so that the gain can be measured: per layer and
step two concatenations (K and V) and two clones, all of the rows each time.
"""

from __future__ import annotations

import numpy as np

from engine import memory
from engine.cache.rows import Counts, check_prefill, check_row, check_truncate
from engine.kernels.kv import ELEMENTS, Kv


class ConcatKvCache:
    """The K and V rows of one sequence, float32, in arrays without room for another row.

    It cannot lend rows that a kernel appends to, so a whole step is staged: `reserve` clones every
    layer into a buffer that has room for the step's rows, and `commit` pushes them.
    """

    dtype = np.float32
    parts = "materialize", "concat_dim0"  # what reserve and commit are, in a profile

    def __init__(self, n_layers: int, kv_dim: int):
        self.kv_dim = kv_dim
        self.counts = Counts()
        self._k = [np.empty((0, kv_dim), np.float32)] * n_layers
        self._v = list(self._k)
        self._staged: list[tuple[np.ndarray, np.ndarray]] = []

    def set_prefill(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Hold exactly the prompt's rows, k and v of (n, kv_dim)."""
        check_prefill(k, v, self.kv_dim)
        self._k[layer], self._v[layer] = k.astype(np.float32), v.astype(np.float32)
        self.counts.allocations += 2
        self.counts.append += 2 * self._k[layer].nbytes

    def push_row(self, layer: int, k_row: np.ndarray, v_row: np.ndarray) -> None:
        """Append one row, k_row and v_row of (kv_dim,): two arrays one row taller."""
        check_row(k_row, v_row, self.kv_dim)
        self._concatenate(layer, k_row[None], v_row[None])

    def materialize(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Clones of K and V, (rows, kv_dim) each."""
        return self._clone(layer, 0)

    def kv_view(self, layer: int) -> None:
        """It does not lend: every read is a clone."""
        return None

    def seq_len(self, layer: int) -> int:
        """Rows in use."""
        return len(self._k[layer])

    def num_layers(self) -> int:
        return len(self._k)

    def truncate(self, rows: int) -> None:
        """Forget every row from `rows` on, in every layer; O(1)."""
        check_truncate(rows, [*map(len, self._k)])
        self._k, self._v = ([side[:rows] for side in sides] for sides in (self._k, self._v))

    # ------------------------------------------------------------ a whole step at once

    @property
    def capacity(self) -> int:
        """Rows that the staged buffers have room for."""
        return len(self._staged[0][0]) if self._staged else self.seq_len(0)

    def reserve(self, n_rows: int) -> None:
        """Clone every layer into buffers with room for `n_rows` rows behind it."""
        self._staged = [self._clone(layer, n_rows) for layer in range(self.num_layers())]

    def kv(self) -> Kv:
        """Where kernels find the rows and write those reserved. Valid until `commit`."""
        places = [[side.ctypes.data for side in sides] for sides in self._staged]
        element = np.zeros(0, ELEMENTS["f32"])
        return Kv(np.zeros(1, np.uint64), np.array(places, np.uint64), self.capacity, element)

    def commit(self, n_rows: int) -> None:
        """Push the `n_rows` rows that were written behind the last, layer by layer."""
        assert self.seq_len(0) + n_rows <= self.capacity, "rows were written without being reserved"
        rows = self.seq_len(0)
        try:
            for layer, (k, v) in enumerate(self._staged):
                self._concatenate(layer, k[rows : rows + n_rows], v[rows : rows + n_rows])
        except BaseException:
            self.truncate(rows)  # of every layer: those that have got their rows lose them again
            raise
        self._staged = []

    def _concatenate(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        grown = []
        for side, new in ((self._k[layer], k), (self._v[layer], v)):
            grown.append(np.concatenate([side, new], axis=0, dtype=np.float32))
            self.counts.grow += side.nbytes
            self.counts.append += self.kv_dim * len(new) * 4
            self.counts.allocations += 1
        self._k[layer], self._v[layer] = grown

    def _clone(self, layer: int, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V with `n_rows` rows of room behind them."""
        clones = []
        for side in (self._k[layer], self._v[layer]):
            rows = len(side)
            flat = memory.empty((rows + n_rows) * self.kv_dim)
            clones.append(flat.reshape(rows + n_rows, self.kv_dim))
            clones[-1][:rows] = side
            self.counts.read += side.nbytes
            self.counts.allocations += 1
        return clones[0], clones[1]
