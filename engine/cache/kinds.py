"""The kinds of KV cache by their names, and a maker of empty ones."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.basic import BasicKvCache
from engine.cache.concat import ConcatKvCache
from engine.cache.paged import PagedKvCache
from engine.cache.pool import BlockPool

KV_CACHES = ("basic", "paged", "concat")
KvCache = BasicKvCache | PagedKvCache | ConcatKvCache


class CacheMaker:
    """Makes caches of one kind for one model; paged ones draw from one pool."""

    def __init__(
        self, kind: str, n_layers: int, kv_dim: int, dtype: str, block_rows: int, max_blocks: int
    ):
        """`kind` of KV_CACHES, `dtype` of KV_DTYPES; the last two are for pools."""
        self.kind, self._dtype = kind, dtype
        self._sizes = n_layers, kv_dim
        self._block_rows, self._max_blocks = block_rows, max_blocks
        self.pool = self.new_pool() if kind == "paged" else None

    def new(self) -> KvCache:
        """An empty cache."""
        if self.kind == "paged":
            return PagedKvCache(self.pool)
        if self.kind == "concat":
            return ConcatKvCache(*self._sizes)
        return BasicKvCache(*self._sizes, self._dtype)

    def new_pool(self, lengths: Sequence[int] | None = None) -> BlockPool:
        """Blocks for sequences that run together, whatever the kind of a single one's cache is.

        `lengths`: the rows that they may come to, where there need not be blocks for more.
        """
        most = self._max_blocks
        if lengths is not None:
            most = min(most, sum(-(-rows // self._block_rows) for rows in lengths))
        return BlockPool(*self._sizes, self._block_rows, max_blocks=most, dtype=self._dtype)
