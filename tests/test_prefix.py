"""PrefixCache: what is known is found, is of these ids, and is given up when room is needed."""

import gc
import signal

import numpy as np
import pytest
from racing import in_two_threads

from engine import LLM, SamplingParams
from engine.cache import BlockPool, PagedKvCache, PoolFull, PrefixCache, prefix
from engine.session import Session

LAYERS, DIM, SIZE = 2, 4, 4  # SIZE: rows of a block
SIZES = [1, 4, 16, 33]


def rows_of(ids) -> np.ndarray:
    """(LAYERS, n, 2, DIM), each row a function of all ids up to its own."""
    state, states = 1, []
    for token in ids:
        state = (state * 7919 + int(token) + 1) % 16_000_057
        states.append(state)
    places = np.arange(LAYERS * 2 * DIM).reshape(LAYERS, 1, 2, DIM)
    return (np.array(states, np.int64)[:, None, None] + places).astype(np.float32)


def run(cache: PagedKvCache, ids) -> PagedKvCache:
    """Append the rows that the cache lacks of `ids`, as a prefill would."""
    start, rows = cache.seq_len(0), rows_of(ids)
    cache.reserve(len(ids) - start)
    for i in range(start, len(ids)):
        for layer in range(LAYERS):
            cache.push_row(layer, *rows[layer, i])
    return cache


def check(cache: PagedKvCache, ids) -> None:
    """The cache holds the rows of exactly these ids, to the bit."""
    for layer, wanted in enumerate(rows_of(ids)):
        np.testing.assert_array_equal(np.stack(cache.materialize(layer), axis=1), wanted)


def new(max_blocks: int = 64, size: int = SIZE) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(LAYERS, DIM, size, max_blocks=max_blocks)
    return pool, PrefixCache(pool)


def known(prefixes: PrefixCache, ids) -> PagedKvCache:
    """The sequence of a prompt that was found, run and made known."""
    cache = PagedKvCache(prefixes.pool)
    prefixes.attach(cache, ids)
    prefixes.insert(ids, run(cache, ids), len(ids))
    return cache


def n_found(prefixes: PrefixCache, ids) -> int:
    """Rows that a new sequence shares; they are of these ids."""
    cache = PagedKvCache(prefixes.pool)
    n = prefixes.attach(cache, ids)
    assert [cache.seq_len(layer) for layer in range(LAYERS)] == [n] * LAYERS
    check(cache, ids[:n])
    return n


def prompt(n: int, seed: int = 0) -> list[int]:
    """n ids; of another seed, none of them the same."""
    return [1000 * seed + i % 1000 for i in range(n)]


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_a_prompt_that_comes_again(n_blocks, extra, size):
    """A block too few or too many; a prompt of whole blocks with no token left to run."""
    pool, prefixes = new(size=size)
    ids = prompt(n_blocks * size + extra)
    first = known(prefixes, ids)
    assert prefixes.n_blocks == len(ids) // size
    for _ in range(2):
        cache = PagedKvCache(pool)
        n = prefixes.attach(cache, ids)
        assert n == max(len(ids) - 1, 0) // size * size
        assert cache.block_table == first.block_table[: n // size]
        check(run(cache, ids), ids)
        assert prefixes.insert(ids, cache, len(ids)) == 0
        prefixes.check_integrity()
    check(first, ids)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n_shared", [0, 1, 3, 4, 15, 16, 17, 32, 33, 34, 66])
def test_a_prompt_that_diverges(n_shared, size):
    """Rows that depend on ids behind the place where two prompts part, inside a block too."""
    _, prefixes = new(200, size)
    known(prefixes, prompt(70))
    ids = prompt(n_shared) + prompt(70, seed=1)
    assert n_found(prefixes, ids) == n_shared // size * size
    other = known(prefixes, ids)
    check(other, ids)
    assert n_found(prefixes, ids) == (len(ids) - 1) // size * size
    assert n_found(prefixes, prompt(70)) == 69 // size * size
    prefixes.check_integrity()


def test_equal_blocks_behind_different_ones():
    """A block found by its own ids, whatever stood before them."""
    _, prefixes = new()
    a, b, c = prompt(4, 1), prompt(4, 2), prompt(4, 3)
    known(prefixes, a + b + c)
    assert n_found(prefixes, [*b, *c, 0]) == 0
    assert n_found(prefixes, [*a, *c, 0]) == 4
    known(prefixes, b + c)
    assert n_found(prefixes, [*b, *c, *c]) == 8
    assert n_found(prefixes, [*a, *b, *c, 0]) == 12
    assert prefixes.n_blocks == 5


@pytest.mark.parametrize("of_type", [list, tuple, np.array])
def test_ids_of_any_sequence(of_type):
    """A prompt that is known as a list and not found as an array."""
    _, prefixes = new()
    known(prefixes, of_type(prompt(9)))
    assert [n_found(prefixes, t(prompt(9))) for t in (list, tuple, np.array)] == [8, 8, 8]
    assert n_found(prefixes, of_type(prompt(1))) == 0
    assert n_found(prefixes, of_type([])) == 0


def test_equal_hashes_are_no_hit(monkeypatch):
    """A prompt answered with the rows of another user's, whose hash happens to be the same."""
    monkeypatch.setattr(prefix.Key, "__hash__", lambda key: 7)
    assert hash(prefix.Key(1, b"a")) == hash(prefix.Key(2, b"b"))
    _, prefixes = new()
    for seed in range(3):
        known(prefixes, prompt(9, seed))
    assert prefixes.n_blocks == 6
    assert n_found(prefixes, prompt(9, 3)) == 0
    assert n_found(prefixes, prompt(4, 2) + prompt(5, 1)) == 4
    assert [n_found(prefixes, prompt(9, seed)) for seed in range(3)] == [8, 8, 8]


def test_rows_behind_the_prompt_are_not_offered():
    """Rows of generated tokens, whose last bits differ, taken for a prompt's."""
    pool, prefixes = new()
    ids = prompt(16)
    cache = run(PagedKvCache(pool), ids)
    assert prefixes.insert(ids, cache, 7) == 1
    assert n_found(prefixes, ids) == 4
    assert prefixes.insert(ids, cache, 12) == 2
    assert n_found(prefixes, ids) == 12
    for n_rows, n_ids in ((17, 17), (12, 11)):
        with pytest.raises(AssertionError):
            prefixes.insert(prompt(n_ids), cache, n_rows)
    assert prefixes.n_blocks == 3


def test_a_prompt_that_two_sequences_computed():
    """The same rows kept twice for as long as both live; or rows freed that a sequence reads."""
    pool, prefixes = new()
    ids, longer = prompt(10), prompt(15)
    one, two = run(PagedKvCache(pool), ids), run(PagedKvCache(pool), longer)
    assert pool.n_used == 7
    assert prefixes.insert(ids, one, 10) == 2
    kernels = two.kv().blocks.copy()
    assert prefixes.insert(longer, two, 15) == 1
    assert two.block_table[:2] == one.block_table[:2] and pool.n_used == 5
    assert (two.kv().blocks[:2] == one.kv().blocks[:2]).all()
    assert (two.kv().blocks[2:] == kernels[2:]).all()
    prefixes.check_integrity()
    one.free()
    check(two, longer)
    assert n_found(prefixes, [*longer, 0]) == 12


def test_a_cache_that_holds_rows_is_refused():
    """A prefix put behind the rows of another prompt; blocks of another pool."""
    pool, prefixes = new()
    cache = run(PagedKvCache(pool), prompt(3))
    with pytest.raises(AssertionError):
        prefixes.attach(cache, prompt(9))
    strange = PagedKvCache(new()[0])
    with pytest.raises(AssertionError):
        prefixes.attach(strange, prompt(9))
    with pytest.raises(AssertionError):
        prefixes.insert(prompt(4), run(strange, prompt(4)), 4)
    with pytest.raises(AssertionError):
        PrefixCache(pool)
    check(cache, prompt(3))
    prefixes.check_integrity()


def test_blocks_reserved_before_it_is_known_what_is_shared():
    """Blocks taken in vain that stay in the table in front of the shared ones."""
    pool, prefixes = new()
    known(prefixes, prompt(9))
    cache = PagedKvCache(pool)
    cache.reserve(9)
    assert prefixes.attach(cache, prompt(9)) == 8
    assert len(cache.block_table) == 2
    check(run(cache, prompt(9)), prompt(9))
    prefixes.check_integrity()


def test_a_known_block_is_not_written():
    """A sequence that is cut inside a known block and goes on there with other ids."""
    pool, prefixes = new()
    one, fork = known(prefixes, prompt(8)), known(prefixes, prompt(8)).fork()
    other = prompt(6) + prompt(2, seed=1)
    for cache in (one, fork):
        cache.truncate(6)
        check(run(cache, other), other)
    assert n_found(prefixes, [*prompt(8), 0]) == 8
    prefixes.check_integrity()


def test_counts():
    """Hits that nobody can tell, or that count a token that is run again."""
    _, prefixes = new(max_blocks=8)
    for ids in (prompt(8), prompt(8), prompt(11), prompt(3, seed=1)):
        known(prefixes, ids).free()
    counted = prefixes.counts
    assert (counted.lookups, counted.hit_tokens, counted.missed_tokens) == (4, 12, 18)
    assert counted.evictions == 0
    prefixes.evict(1)
    assert prefixes.counts.evictions == 1


# ---------------------------------------------------------------- what is given up


def test_least_recently_used_goes_first():
    """A system prompt that every request has, evicted before one that came once."""
    pool, prefixes = new()
    for seed in range(4):
        known(prefixes, prompt(4, seed))
    n_found(prefixes, prompt(5, 0))  # found
    known(prefixes, prompt(4, 2))  # and offered again
    for seed in (1, 3, 0, 2):
        assert n_held_of(prefixes, seed), seed
        assert prefixes.evict(1) == 1
        assert not n_held_of(prefixes, seed), seed
        prefixes.check_integrity()
    assert (prefixes.evict(1), pool.n_used) == (0, 0)


def n_held_of(prefixes: PrefixCache, seed: int) -> int:
    """Known blocks whose first id is that of a prompt; asked without using them."""
    first = prompt(1, seed)[0]
    return sum(np.frombuffer(key.ids, np.int64)[0] == first for key in prefixes._numbers)


def test_leaves_go_before_what_they_hang_on():
    """An inner block evicted: those behind it are held for ever, and never found."""
    _, prefixes = new()
    stem = prompt(8)
    known(prefixes, stem + prompt(8, 1))
    known(prefixes, stem + prompt(4, 2))
    for n_left, a, b in ((4, 12, 12), (3, 8, 12), (2, 8, 8), (1, 4, 4), (0, 0, 0)):
        assert prefixes.evict(1) == 1
        assert prefixes.n_blocks == prefixes.n_evictable == n_left
        prefixes.check_integrity()
        # the branch that is looked up last is the one used last
        assert n_found(prefixes, [*stem, *prompt(8, 1), 0]) == a
        assert n_found(prefixes, [*stem, *prompt(4, 2), 0]) == b


def test_a_block_in_use_stays():
    """Rows that a sequence reads, evicted; or an eviction that stops at the first one in use."""
    pool, prefixes = new()
    held = known(prefixes, prompt(11))  # the least recently used
    known(prefixes, prompt(8) + prompt(8, 1))
    known(prefixes, prompt(4, 2))
    assert (prefixes.n_blocks, prefixes.n_evictable) == (5, 3)
    assert prefixes.evict(2) == 2
    assert prefixes.evict(10) == 1
    assert (prefixes.n_blocks, prefixes.n_evictable, prefixes.evict(10)) == (2, 0, 0)
    prefixes.check_integrity()
    check(held, prompt(11))
    fork = held.fork()
    del held
    assert prefixes.evict(10) == 0
    fork.truncate(4)  # it holds the first only
    assert prefixes.evict(10) == 1
    fork.free()
    assert prefixes.evict(10) == 1
    assert pool.n_used == 0


@pytest.mark.parametrize("n_blocks", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_that_fills_the_pool_comes_again(size, n_blocks):
    """A copy of a shared block that the pool has no room for: a request that never fits again."""
    pool, prefixes = new(n_blocks, size)
    ids = prompt(n_blocks * size)
    for seed in (None, 1, None, None):
        wanted = ids if seed is None else prompt(len(ids), seed)
        cache = known(prefixes, wanted)
        check(cache, wanted)
        prefixes.check_integrity()
        del cache
    assert prefixes.n_blocks == n_blocks
    assert prefixes.counts.hit_tokens == (n_blocks - 1) * size


def test_the_pool_is_full_only_when_nothing_can_be_evicted():
    """A request refused for the sake of what nobody uses; or all of that lost for one that cannot
    be served anyway."""
    pool, prefixes = new(max_blocks=6)
    known(prefixes, prompt(12))
    busy = known(prefixes, prompt(8, 1))
    assert (pool.n_free, prefixes.n_evictable, pool.n_available) == (1, 3, 4)
    cache = PagedKvCache(pool)
    with pytest.raises(PoolFull, match=r"5 more blocks of 4 rows are needed, 4 of at most 6"):
        cache.reserve(17)
    assert (pool.n_free, prefixes.n_blocks, prefixes.counts.evictions) == (1, 5, 0)
    assert (cache.block_table, n_found(prefixes, prompt(13))) == ([], 12)
    prefixes.check_integrity()
    cache.reserve(8)
    assert (pool.n_free, prefixes.counts.evictions, n_found(prefixes, prompt(13))) == (0, 1, 8)
    run(cache, prompt(16, 2))
    assert (pool.n_available, prefixes.n_blocks) == (0, 2)
    with pytest.raises(PoolFull, match="1 more blocks of 4 rows are needed, 0 of at most 6"):
        run(cache, prompt(17, 2))
    check(cache, prompt(16, 2))
    check(busy, prompt(8, 1))
    prefixes.check_integrity()


def test_room_for_a_copy_is_made_too():
    """A shared block that is evicted by the step that copies it."""
    pool, prefixes = new(max_blocks=3)
    known(prefixes, prompt(4, 1))
    cache = known(prefixes, prompt(8))
    cache.truncate(7)
    other = prompt(7) + [99]
    check(run(cache, other), other)
    assert prefixes.n_blocks == 2 and n_found(prefixes, [*prompt(8), 0]) == 8
    cache.truncate(7)  # its last block is its own now
    check(run(cache, prompt(8)), prompt(8))
    prefixes.check_integrity()


@pytest.mark.parametrize("leave", ["clear", "drop"])
def test_all_of_it_is_given_back(leave):
    """Blocks that are held for a cache that is gone; or taken from sequences that read them."""
    pool, prefixes = new()
    known(prefixes, prompt(12))
    cache = known(prefixes, prompt(9, 1))
    if leave == "clear":
        prefixes.clear()
        assert (prefixes.n_blocks, prefixes.n_evictable, prefixes.evict(9)) == (0, 0, 0)
        assert n_found(prefixes, prompt(12)) == 0
    else:
        prefixes.itself = prefixes  # only the garbage collector finds it
        del prefixes
        gc.collect()
        prefixes = PrefixCache(pool)
    pool.check_integrity()
    assert pool.n_used == len(cache.block_table) == 3
    check(cache, prompt(9, 1))
    assert prefixes.insert(prompt(9, 1), cache, 9) == 2
    assert n_found(prefixes, prompt(9, 1)) == 8
    prefixes.check_integrity()
    cache.free()
    del prefixes
    pool.check_integrity()
    assert pool.n_used == 0


def test_a_pool_without_prefixes_any_more():
    """A full pool that asks a cache which is gone for room."""
    pool, prefixes = new(max_blocks=2)
    known(prefixes, prompt(4))
    del prefixes
    cache = run(PagedKvCache(pool), prompt(8))
    assert pool.n_available == 0
    with pytest.raises(PoolFull):
        cache.reserve(1)


def test_an_eviction_does_not_look_at_all_blocks():
    """Time for each evicted block that grows with the number of those that stay."""
    pool, prefixes = new(max_blocks=2000, size=1)
    for seed in range(1500):
        known(prefixes, [seed])
    looked = []
    is_shared, pool.is_shared = pool.is_shared, lambda number: looked.append(number) or False
    assert prefixes.evict(10) == 10
    pool.is_shared = is_shared
    assert len(looked) == 10
    for _ in range(5):
        for seed in range(1400, 1500):
            n_found(prefixes, [seed, 0])
    assert len(prefixes._leaves) == prefixes.n_blocks == 1490


# ---------------------------------------------------------------- interrupts and threads


@pytest.mark.parametrize("step", ["attach", "insert", "insert again", "evict", "clear", "reserve"])
@pytest.mark.parametrize("where", ["share", "give_back"])
def test_an_interrupt_tears_nothing(where, step, monkeypatch):
    """Ctrl-C between a reference and what it is for: a block that is lost, or freed twice."""
    pool, prefixes = new(max_blocks=7)
    known(prefixes, prompt(8))
    again, fresh = (run(PagedKvCache(pool), prompt(8, seed)) for seed in (0, 1))
    empty = PagedKvCache(pool)
    steps = {
        "attach": lambda: prefixes.attach(empty, prompt(9)),
        "insert": lambda: prefixes.insert(prompt(8, 1), fresh, 8),
        "insert again": lambda: prefixes.insert(prompt(8), again, 8),
        "evict": lambda: prefixes.evict(1),
        "clear": prefixes.clear,
        "reserve": lambda: fresh.reserve(8),
    }
    came, whole = [], getattr(pool, where)

    def interrupted(numbers):
        if not came:
            came.append(step)
            signal.raise_signal(signal.SIGINT)
        whole(numbers)

    with monkeypatch.context() as patch:
        patch.setattr(pool, where, interrupted)
        try:
            steps[step]()
            interrupt = False
        except KeyboardInterrupt:
            interrupt = True
    assert interrupt == bool(came)
    prefixes.check_integrity()
    check(empty, prompt(8 if step == "attach" else 0))
    assert prefixes.counts.lookups == (2 if step == "attach" else 1), "half of a step"
    check(again, prompt(8))
    check(fresh, prompt(8, 1))
    for cache in (again, fresh, empty):
        cache.free()
    prefixes.clear()
    assert pool.n_used == 0


def test_threads_share_prefixes():
    """A block evicted by one thread between another's finding it and holding it."""
    pool, prefixes = new(max_blocks=10)  # as many as two prompts fill

    def work(me: int) -> None:
        rng = np.random.default_rng(me)
        for _ in range(300):
            ids = prompt(int(rng.integers(1, 20)), int(rng.integers(3)))
            cache = known(prefixes, ids)
            check(cache, ids)
            del cache
            if rng.integers(20) == 0:
                prefixes.clear()

    in_two_threads(work)
    prefixes.check_integrity()
    assert prefixes.counts.evictions > 0 and prefixes.counts.hit_tokens > 0
    prefixes.clear()
    assert pool.n_used == 0


# ---------------------------------------------------------------- a model


@pytest.mark.parametrize("block_rows", [1, 16, 33])
def test_a_hit_is_a_cold_run_to_the_bit(block_rows):
    """Logits or rows, of the rest of a prompt or of what follows, that tell a hit from a miss."""
    llm = LLM(kv_cache="paged", kv_block_rows=block_rows, prefill_chunk=48, threads=2)
    prefixes = PrefixCache(llm.new_cache().pool)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=20)
    ids = np.random.default_rng(0).integers(0, 300, 110).tolist()
    first = llm.new_session()
    llm.generate(ids[:70] + [5] * 20, params, first)  # of which 70 are shared, and a block is cut
    prefixes.insert(first.ids, first.cache, first.n_prompt)
    del first
    n_shared = 70 // block_rows * block_rows
    for n in (n_shared, n_shared + 1, 97, 110):
        cold, warm = llm.new_session(), llm.new_session()
        wanted = llm.generate(ids[:n], params, cold)
        found = prefixes.attach(warm.cache, ids[:n])
        assert found == min(n_shared, (n - 1) // block_rows * block_rows)
        warm = Session(warm.cache, ids[:n], n, warm.owner)
        done = llm.generate(None, params, warm)
        assert done.metrics.cached_tokens == found
        assert (done.token_ids, done.logprobs) == (wanted.token_ids, wanted.logprobs)
        for layer in range(llm.config.n_layers):
            for a, b in zip(
                warm.cache.materialize(layer), cold.cache.materialize(layer), strict=True
            ):
                np.testing.assert_array_equal(a, b)
    prefixes.check_integrity()
