"""BlockPool: memory for the rows of many sequences, in blocks that are counted by reference."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection

import numpy as np

from engine import memory
from engine.cache.rows import kv_dtype_of
from engine.kernels.kv import ELEMENTS

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
        self._lent: weakref.WeakKeyDictionary[object, Collection[int]] = weakref.WeakKeyDictionary()
        self._prefixes: weakref.ref | None = None
        self.lock = threading.RLock()  # re-entered where a sequence is collected inside

    @property
    def max_rows(self) -> int:
        """Rows of the longest sequence there is room for."""
        return self.max_blocks * self.block_rows

    def check_room(self, n_prompt: int, n_new: int) -> None:
        """ValueError if a sequence of so many tokens cannot be held. The last has no rows."""
        if n_prompt + n_new - 1 > self.max_rows:
            raise ValueError(
                f"{n_prompt} tokens and {n_new} to follow do not fit in the KV cache of "
                f"{self.max_rows} rows ({self.max_blocks} blocks of {self.block_rows})"
            )

    @property
    def n_used(self) -> int:
        return len(self._blocks) - len(self._free)

    @property
    def n_free(self) -> int:
        """Blocks that nobody holds, those not made yet among them."""
        return self.max_blocks - self.n_used

    @property
    def n_available(self) -> int:
        """Blocks that can be taken: free ones, and those that `reclaim_from` can give back.

        O(blocks) where there are such: for decisions, not for every step.
        """
        with self.lock:
            prefixes = self._prefixes and self._prefixes()
            return self.n_free + (prefixes.n_evictable if prefixes else 0)

    def block(self, number: int) -> np.ndarray:
        """(n_layers, 2, block_rows, kv_dim), lent."""
        return self._blocks[number]

    def is_shared(self, number: int) -> bool:
        return self._references[number] > 1

    def take(self, n: int) -> list[int]:
        """`n` blocks with one reference each, whatever they hold; all of them or PoolFull.

        Where too few are free, known prefixes that no sequence uses make room.
        """
        with self.lock:
            missing = n - self.n_free
            prefixes = self._prefixes and self._prefixes()
            if missing > 0 and not (prefixes and prefixes.evict(missing, at_least=missing)):
                raise PoolFull(
                    f"the KV cache is full: {n} more blocks of {self.block_rows} rows are needed, "
                    f"{self.n_available} of at most {self.max_blocks} are free"
                )
            if n > len(self._free):
                self._grow(n - len(self._free))
            taken = [self._free.pop() for _ in range(n)]
            for number in taken:
                self._references[number] = 1
            return taken

    def share(self, numbers: Collection[int]) -> None:
        """One reference more to each."""
        with self.lock:
            for number in numbers:
                self._references[number] += 1

    def lend_to(self, holder: object, numbers: Collection[int]) -> None:
        """`numbers` names the blocks that `holder` has a reference to, now and from now on.

        Those in it when nothing holds `holder` any more are given back.
        """
        with self.lock:
            self._lent[holder] = numbers
        weakref.finalize(holder, self.give_back, numbers).atexit = False

    def reclaim_from(self, prefixes) -> None:
        """Let a PrefixCache, the pool's only one, give blocks back when they are needed."""
        with self.lock:
            assert not (self._prefixes and self._prefixes()), "the pool has a prefix cache"
            self._prefixes = weakref.ref(prefixes)

    def give_back(self, numbers: Collection[int]) -> None:
        """One reference less to each; those without any are free."""
        with self.lock:
            for number in reversed(tuple(numbers)):
                self._references[number] -= 1
                if self._references[number] == 0:
                    self._free.append(number)

    def check_integrity(self) -> None:
        """AssertionError unless every block is free, or held as often as it is counted."""
        with self.lock:
            held = [0] * len(self._blocks)
            for numbers in self._lent.values():
                assert len(set(numbers)) == len(numbers), "a block twice"
                for number in numbers:
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
