"""The kinds of KV cache by their names, and a maker of empty ones."""

from __future__ import annotations

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
        """`kind` of KV_CACHES, `dtype` of KV_DTYPES; the last two are for paged caches."""
        self.kind, self._dtype = kind, dtype
        self._sizes = n_layers, kv_dim
        self.pool = None
        if kind == "paged":
            self.pool = BlockPool(*self._sizes, block_rows, max_blocks=max_blocks, dtype=dtype)

    def new(self) -> KvCache:
        """An empty cache."""
        if self.kind == "paged":
            return PagedKvCache(self.pool)
        if self.kind == "concat":
            return ConcatKvCache(*self._sizes)
        return BasicKvCache(*self._sizes, self._dtype)

    def check_room(self, n_prompt: int, n_new: int) -> None:
        """ValueError if a sequence of so many tokens cannot be held. The last has no rows."""
        if self.pool is not None and n_prompt + n_new - 1 > self.pool.max_rows:
            raise ValueError(
                f"{n_prompt} tokens and {n_new} to follow do not fit in the KV cache of "
                f"{self.pool.max_rows} rows ({self.pool.max_blocks} blocks of "
                f"{self.pool.block_rows})"
            )
