"""Where K and V of a sequence live."""

from engine.cache.basic import BasicKvCache
from engine.cache.concat import ConcatKvCache
from engine.cache.paged import BlockPool, PagedKvCache, PoolFull
from engine.cache.rows import KV_DTYPES, Counts

KvCache = BasicKvCache | PagedKvCache | ConcatKvCache

__all__ = [
    "KV_DTYPES",
    "BasicKvCache",
    "BlockPool",
    "ConcatKvCache",
    "Counts",
    "KvCache",
    "PagedKvCache",
    "PoolFull",
]
