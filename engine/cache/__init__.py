"""Where K and V of a sequence live."""

from engine.cache.basic import BasicKvCache
from engine.cache.concat import ConcatKvCache
from engine.cache.kinds import KV_CACHES, CacheMaker, KvCache
from engine.cache.paged import PagedKvCache
from engine.cache.pool import BlockPool, PoolFull
from engine.cache.prefix import PrefixCache
from engine.cache.rows import KV_DTYPES, Counts

__all__ = [
    "KV_CACHES",
    "KV_DTYPES",
    "BasicKvCache",
    "BlockPool",
    "CacheMaker",
    "ConcatKvCache",
    "Counts",
    "KvCache",
    "PagedKvCache",
    "PoolFull",
    "PrefixCache",
]
