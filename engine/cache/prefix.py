"""PrefixCache: blocks of rows that outlive their sequence, found again by the ids they are of.

A row of a prompt is a function of the ids up to its own, whatever follows them, and to the bit. So
a sequence whose prompt begins with ids that are known takes their blocks by reference instead of
computing them. Whole blocks only: one that is partly filled is still being written.

The blocks form a tree. A node is one block, known by its parent's number and its own ids, which
stand in the key: a hash only says where to look, and blocks of other ids are never taken for these.
The parent of a held node is held too, so its number is as good as all the ids before. And whoever
shares a block shares those before it, so a block that no sequence shares can always be given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from engine.cache.paged import PagedKvCache
from engine.cache.pool import BlockPool
from engine.kernels.jit import uninterrupted

ROOT = -1  # the parent of first blocks
ID_BYTES = 8  # of int64


class Key(NamedTuple):
    """What a block is known by."""

    parent: int  # number of the block before it, or ROOT
    ids: bytes  # its own, block_rows int64


@dataclass(slots=True)
class Node:
    """A block that is held."""

    key: Key
    used: int  # when it last was, by the cache's clock: never before its children
    n_children: int = 0
    queued: bool = False  # once in the heap of leaves


@dataclass
class PrefixCounts:
    """What a prefix cache has done so far."""

    lookups: int = 0
    hit_tokens: int = 0  # whose rows were found
    missed_tokens: int = 0  # that are to be run: the last of a prompt always is
    evictions: int = 0  # blocks given back to make room


class PrefixCache:
    """Known prefixes of prompts, in blocks of a pool that has no other PrefixCache.

    It holds one reference to each of its blocks, and gives up those that no sequence shares when
    the pool runs out of free ones, the least recently used first. All blocks are given back when
    nothing holds it any more. Safe to use from several threads, as the pool is.
    """

    def __init__(self, pool: BlockPool):
        self.pool, self.counts = pool, PrefixCounts()
        self._nodes: dict[int, Node] = {}  # by the block's number
        self._numbers: dict[Key, int] = {}
        # (used, number) of every node without children, and of some that have got children since
        # or were used since: these are put right when their turn comes
        self._leaves: list[tuple[int, int]] = []
        self._clock = 0
        pool.reclaim_from(self)
        pool.lend_to(self, self._nodes)

    @property
    def n_blocks(self) -> int:
        return len(self._nodes)

    @property
    def n_evictable(self) -> int:
        """Blocks that `evict` could give back: those that no sequence shares. O(n_blocks)."""
        with self.pool.lock:
            return sum(not self.pool.is_shared(number) for number in self._nodes)

    def attach(self, cache: PagedKvCache, ids: Sequence[int]) -> int:
        """Let `cache`, which has no rows, share the longest known prefix of `ids`; its rows now.

        The last token is run again, for its logits, and with it all of its block: were the others
        of the block shared, the first row written would need a copy of it, one block more than the
        pool needs without a PrefixCache, and a prompt that fills the pool would not fit twice.
        """
        assert cache.pool is self.pool, "the sequence is of another pool"
        keys = self._keys(ids, max(len(ids) - 1, 0))
        with uninterrupted(), self.pool.lock:  # nothing is evicted before the sequence holds it
            known = self._walk(keys)
            n_rows = len(known) * self.pool.block_rows
            cache.adopt(known, [n_rows] * cache.num_layers())
            self._touch(known)
            self.counts.lookups += 1
            self.counts.hit_tokens += n_rows
            self.counts.missed_tokens += len(ids) - n_rows
        return n_rows

    def insert(self, ids: Sequence[int], cache: PagedKvCache, n_rows: int) -> int:
        """Make whole blocks of the first `n_rows` rows of `cache`, which are of `ids`, known.

        The caller answers for it that these rows were computed as a prompt's: those of generated
        tokens differ in the last bits. Where the ids of a block are known already, the sequence
        shares that block from now on, and gives its own back. Returns how many became known.
        """
        assert cache.pool is self.pool, "the sequence is of another pool"
        held = min(map(cache.seq_len, range(cache.num_layers())))
        assert n_rows <= min(held, len(ids)), f"{n_rows} rows of {held}, of {len(ids)} ids"
        keys = self._keys(ids, n_rows)
        with uninterrupted(), self.pool.lock:
            path = self._walk(keys)
            cache.exchange(path)
            new = cache.block_table[len(path) : len(keys)]
            assert self._nodes.keys().isdisjoint(new), "a block is known by other ids"
            self.pool.share(new)
            self._touch(path)
            for number, own in zip(new, keys[len(path) :], strict=True):
                self._add(number, Node(Key(path[-1] if path else ROOT, own), self._clock))
                path.append(number)
            if new:
                self._queue(new[-1])
        return len(new)

    def evict(self, n_blocks: int, at_least: int = 0) -> int:
        """Give back the `n_blocks` least recently used that no sequence shares, or all there are.

        A block goes before the one in front of it. Where there are fewer than `at_least`, none
        goes. Returns how many went.
        """
        with uninterrupted(), self.pool.lock:
            evicted: list[tuple[int, Node]] = []
            shared: list[int] = []  # at most one leaf of a sequence
            while self._leaves and len(evicted) < n_blocks:
                used, number = heappop(self._leaves)
                node = self._nodes[number]
                node.queued = False
                if node.n_children:
                    continue
                if node.used > used:
                    self._queue(number)
                elif self.pool.is_shared(number):
                    shared.append(number)
                else:
                    self._remove(number, node)
                    evicted.append((number, node))
            for number in shared:
                self._queue(number)
            if len(evicted) < at_least:
                for number, node in reversed(evicted):
                    self._add(number, node)
                    self._queue(number)
                return 0
            self.pool.give_back([number for number, _ in evicted])
            self.counts.evictions += len(evicted)
            return len(evicted)

    def clear(self) -> None:
        """Know nothing any more. Sequences keep what they share."""
        with uninterrupted(), self.pool.lock:
            held = list(self._nodes)
            self._nodes.clear()
            self._numbers.clear()
            self._leaves.clear()
            self.pool.give_back(held)

    def check_integrity(self) -> None:
        """AssertionError unless the tree is whole, and every leaf waits for eviction once."""
        with self.pool.lock:
            self.pool.check_integrity()
            assert self._numbers == {node.key: number for number, node in self._nodes.items()}
            children = dict.fromkeys(self._nodes, 0)
            for number, node in self._nodes.items():
                if (parent := node.key.parent) != ROOT:
                    children[parent] += 1
                    assert node.used <= self._nodes[parent].used, "used after its parent"
                    assert self.pool.is_shared(parent) or not self.pool.is_shared(number), (
                        "a block is shared without the one before it"
                    )
            for number, node in self._nodes.items():
                assert node.n_children == children[number], "children are miscounted"
                assert node.queued or node.n_children, "a leaf would never be evicted"
            queued = sorted(number for number, node in self._nodes.items() if node.queued)
            assert sorted(number for _, number in self._leaves) == queued, "leaves are not queued"

    # ------------------------------------------------------------ the tree

    def _keys(self, ids: Sequence[int], n_rows: int) -> list[bytes]:
        """The ids of each whole block of the first `n_rows` rows."""
        size = self.pool.block_rows * ID_BYTES
        data = np.asarray(ids[:n_rows], np.int64).tobytes()
        return [data[end - size : end] for end in range(size, len(data) + 1, size)]

    def _walk(self, keys: list[bytes]) -> list[int]:
        """Numbers of the longest chain of known blocks from the root."""
        found: list[int] = []
        parent = ROOT
        for ids in keys:
            if (number := self._numbers.get(Key(parent, ids))) is None:
                break
            found.append(number)
            parent = number
        return found

    def _touch(self, numbers: list[int]) -> None:
        """Blocks of a chain, from its first, are used now."""
        self._clock += 1
        for number in numbers:
            self._nodes[number].used = self._clock

    def _add(self, number: int, node: Node) -> None:
        self._nodes[number], self._numbers[node.key] = node, number
        if node.key.parent != ROOT:
            self._nodes[node.key.parent].n_children += 1

    def _remove(self, number: int, node: Node) -> None:
        """Take out a leaf. The block before it may be one then."""
        del self._nodes[number], self._numbers[node.key]
        if (parent := node.key.parent) != ROOT:
            self._nodes[parent].n_children -= 1
            if not self._nodes[parent].n_children:
                self._queue(parent)

    def _queue(self, number: int) -> None:
        """Let a node wait for its eviction, if it does not already."""
        node = self._nodes[number]
        if not node.queued:
            node.queued = True
            heappush(self._leaves, (node.used, number))
