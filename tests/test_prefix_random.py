"""Sequences that share prefixes in one small pool under random use, beside lists and a dictionary
that do the same."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from engine.cache import BlockPool, PagedKvCache, PoolFull, PrefixCache

LAYERS, DIM, MAX_BLOCKS = 2, 2, 9
IDS = st.lists(st.integers(0, 1), max_size=14)  # few ids: prompts that have much in common


class Sequence:
    """A cache, and beside it the ids of its rows, the first n_prompt of which came as a prompt."""

    def __init__(self, cache: PagedKvCache, ids: tuple = (), n_prompt: int = 0):
        self.cache, self.ids, self.n_prompt = cache, ids, n_prompt

    @property
    def rows(self) -> np.ndarray:
        """(LAYERS, rows, 2, DIM): each a function of all ids up to its own, and of what it is."""
        numbers, state = [], 1
        for i, token in enumerate(self.ids):
            state = (state * 31 + token + 1) % 1_000_003
            numbers.append(state + (0 if i < self.n_prompt else 0.5))
        places = 10 * np.arange(LAYERS * 2 * DIM).reshape(LAYERS, 1, 2, DIM)
        return (np.array(numbers)[:, None, None] + places).astype(np.float32)


class Machine(RuleBasedStateMachine):
    """Rows shared with a prompt that begins otherwise, blocks that are lost, evicted in use, in
    the wrong order or in vain, and a pool that is full although something could be evicted."""

    sequences = Bundle("sequences")
    size = 3

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(LAYERS, DIM, self.size, max_blocks=MAX_BLOCKS)
        self.prefixes = PrefixCache(self.pool)
        self.alive: list[Sequence] = []
        self.known: dict[tuple, int] = {}  # a prefix of whole blocks -> its last block's number
        self.used: dict[tuple, int] = {}  # when
        self.clock = 0

    def teardown(self):
        for sequence in self.alive:
            sequence.cache.free()
        del self.prefixes
        self.pool.check_integrity()
        assert self.pool.n_used == 0, "blocks were lost"

    # ------------------------------------------------------------ what ought to be

    def chain(self, ids) -> list[tuple]:
        """The known prefixes of `ids`, the shortest first."""
        ends = range(self.size, len(ids) + 1, self.size)
        whole = [tuple(ids[:end]) for end in ends]
        return [ids for ids in whole if ids in self.known]

    def use(self, prefixes: list[tuple]) -> None:
        self.clock += 1
        self.used |= dict.fromkeys(prefixes, self.clock)

    def free_to_go(self) -> list[tuple]:
        """Known prefixes whose last block no sequence holds."""
        held = {number for s in self.alive for number in s.cache.block_table}
        return [ids for ids, number in self.known.items() if number not in held]

    def evict_known(self, n: int, free: list[tuple]) -> None:
        """`free`: of free_to_go before the step, since whoever evicts may hold the blocks now."""
        for _ in range(n):
            parents = {ids[: -self.size] for ids in self.known}
            leaves = [ids for ids in free if ids in self.known and ids not in parents]
            oldest = min(leaves, key=self.used.get)
            del self.known[oldest], self.used[oldest]

    def reserve(self, sequence: Sequence, n: int) -> bool:
        """Room for n rows more, or a pool that is rightly full."""
        cache, start = sequence.cache, len(sequence.ids)
        table, n_free = list(cache.block_table), self.pool.n_free
        free = self.free_to_go()
        needed = max(-(-(start + n) // self.size) - len(table), 0)
        needed += sum(map(self.pool.is_shared, table[start // self.size :])) if n else 0
        assert self.pool.n_available == n_free + len(free)
        try:
            cache.reserve(n)
        except PoolFull:
            assert needed > n_free + len(free), "there was room"
            assert (cache.block_table, self.pool.n_free) == (table, n_free)
            return False
        self.evict_known(max(needed - n_free, 0), free)
        return True

    def write(self, sequence: Sequence) -> None:
        """The rows that the cache lacks."""
        rows = sequence.rows
        for i in range(sequence.cache.seq_len(0), len(sequence.ids)):
            for layer in range(LAYERS):
                sequence.cache.push_row(layer, *rows[layer, i])

    # ------------------------------------------------------------ sequences

    @rule(target=sequences, ids=IDS)
    def open(self, ids):
        """A request: what is known is shared, the rest is run."""
        sequence = Sequence(PagedKvCache(self.pool))
        self.alive.append(sequence)
        found = self.chain(ids[:-1])
        n_rows = self.prefixes.attach(sequence.cache, ids)
        assert n_rows == len(found) * self.size
        assert sequence.cache.block_table == [self.known[ids] for ids in found]
        self.use(found)
        sequence.ids, sequence.n_prompt = tuple(ids[:n_rows]), n_rows
        if self.reserve(sequence, len(ids) - n_rows):
            sequence.ids, sequence.n_prompt = tuple(ids), len(ids)
            self.write(sequence)
        return sequence

    @rule(sequence=sequences, ids=IDS)
    def generate(self, sequence, ids):
        if self.reserve(sequence, len(ids)):
            sequence.ids += tuple(ids)
            self.write(sequence)

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        keep = data.draw(st.integers(0, len(sequence.ids)))
        sequence.cache.truncate(keep)
        sequence.ids, sequence.n_prompt = sequence.ids[:keep], min(sequence.n_prompt, keep)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        self.alive.append(Sequence(sequence.cache.fork(), sequence.ids, sequence.n_prompt))
        return self.alive[-1]

    @rule(sequence=consumes(sequences))
    def forget(self, sequence):
        self.alive.remove(sequence)
        del sequence.cache

    # ------------------------------------------------------------ prefixes

    @rule(sequence=sequences, data=st.data())
    def insert(self, sequence, data):
        n_rows = data.draw(st.integers(0, sequence.n_prompt))
        table = list(sequence.cache.block_table)
        n_new = self.prefixes.insert(sequence.ids, sequence.cache, n_rows)
        ends = range(self.size, n_rows + 1, self.size)
        whole = [sequence.ids[:end] for end in ends]
        assert n_new == sum(ids not in self.known for ids in whole)
        for ids, number in zip(whole, table, strict=False):
            self.known.setdefault(ids, number)
        shared = [self.known[ids] for ids in whole]
        assert sequence.cache.block_table == shared + table[len(shared) :]
        self.use(whole)

    @rule(n=st.integers(0, 4))
    def evict(self, n):
        free = self.free_to_go()
        assert self.prefixes.n_evictable == len(free)
        assert self.prefixes.evict(n) == min(n, len(free))
        self.evict_known(min(n, len(free)), free)

    @precondition(lambda self: len(self.known) > 4)
    @rule(drop=st.booleans())
    def clear(self, drop):
        if drop:
            del self.prefixes
            self.prefixes = PrefixCache(self.pool)
        else:
            self.prefixes.clear()
        self.known, self.used = {}, {}

    # ------------------------------------------------------------ always

    @invariant()
    def contents_are_those_of_the_lists(self):
        for sequence in self.alive:
            for layer, rows in enumerate(sequence.rows):
                held = np.stack(sequence.cache.materialize(layer), axis=1)
                np.testing.assert_array_equal(held, rows)

    @invariant()
    def what_is_known_is_known(self):
        self.prefixes.check_integrity()
        assert set(self.prefixes._nodes) == set(self.known.values())
        assert self.prefixes.n_blocks == len(self.known)
        held = {number for s in self.alive for number in s.cache.block_table}
        assert self.pool.n_used == len(held | set(self.known.values()))


class OneRowMachine(Machine):
    size = 1


TestBlocks = Machine.TestCase
TestBlocksOfOneRow = OneRowMachine.TestCase
TestBlocks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBlocksOfOneRow.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
