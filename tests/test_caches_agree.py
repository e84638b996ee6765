"""Every kind of cache through the forward pass: the same bits, wherever the rows lie."""

import json
import time

import numpy as np
import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.cache import BasicKvCache, BlockPool, PagedKvCache, PoolFull
from engine.kernels.runs import Run

N, N_PROMPT = 640, 40
IDS = np.random.default_rng(0).integers(0, 300, N)
OTHERS = np.random.default_rng(1).integers(0, 300, N)
KINDS = {
    "basic": {},
    "paged, 1 row": {"kv_cache": "paged", "kv_block_rows": 1},
    "paged, 16 rows": {"kv_cache": "paged", "kv_block_rows": 16},
    "paged, 33 rows": {"kv_cache": "paged", "kv_block_rows": 33},
    "paged, 256 rows": {"kv_cache": "paged", "kv_block_rows": 256},
    "concat": {"kv_cache": "concat"},
}
KINDS_OF_F16 = {name: kind for name, kind in KINDS.items() if name != "concat"}
DTYPES_OF_KINDS = [("f32", kind) for kind in KINDS] + [("f16", kind) for kind in KINDS_OF_F16]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def step(llm, cache, ids, is_prompt, last=1) -> np.ndarray:
    """The logits of the last tokens of a step."""
    logits = llm._model.new_logits(last)
    llm._model.forward([Run(np.asarray(ids), cache, is_prompt, last)], logits)
    return logits[:, : llm.config.vocab_size].copy()


def generated(llm, cache, ids) -> np.ndarray:
    """The logits behind every one of `ids`, which come as generated tokens."""
    return np.concatenate([step(llm, cache, [token], False) for token in ids])


def logits_of(llm, cache, ids=IDS, n_prompt=N_PROMPT) -> np.ndarray:
    """The logits of a prompt's tokens and of the generated ones behind it."""
    prompt = step(llm, cache, ids[:n_prompt], True, n_prompt)
    return np.concatenate([prompt, generated(llm, cache, ids[n_prompt:])])


@pytest.fixture(scope="module")
def wanted(path) -> dict[str, np.ndarray]:
    """By type, what a cache gives that never grows: all of its rows are reserved at first."""
    found = {}
    for dtype in ("f32", "f16"):
        llm = LLM(path, threads=1, kv_dtype=dtype)
        cache = llm.new_cache()
        cache.reserve(N)
        found[dtype] = logits_of(llm, cache)
        assert cache.counts.grow == 0
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "kind"), DTYPES_OF_KINDS)
def test_every_kind_gives_the_same_bits(dtype, kind, threads, path, wanted):
    """Rows read from another place, in another order or cut elsewhere give other sums."""
    llm = LLM(path, threads=threads, kv_dtype=dtype, **KINDS[kind])
    cache = llm.new_cache()
    np.testing.assert_array_equal(logits_of(llm, cache), wanted[dtype])
    assert [cache.seq_len(layer) for layer in range(cache.num_layers())] == [N, N]


@pytest.mark.parametrize("headroom", [1, 7])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_growth_in_the_middle_of_a_generation(dtype, headroom, path, wanted, monkeypatch):
    """A growth that loses a row, or kernels that still write to the old address."""
    monkeypatch.setattr("engine.cache.basic.KV_HEADROOM_ROWS", headroom)
    llm = LLM(path, kv_dtype=dtype)
    cache = llm.new_cache()
    np.testing.assert_array_equal(logits_of(llm, cache), wanted[dtype])
    assert cache.counts.allocations == 2 * 2 * (1 + 4), "40 rows and some, doubled four times"


@pytest.mark.parametrize("kind", ["basic", "paged, 33 rows"])
def test_float16_rows(kind, path):
    """Float16 rows rounded, or read, in another way than NumPy does; or float32 rows after all."""
    found = {}
    for backend, dtype in (("simd", "f16"), ("numpy", "f16"), ("simd", "f32")):
        llm = LLM(path, weights="f32", backend=backend, kv_dtype=dtype, **KINDS[kind])
        found[backend, dtype] = logits_of(llm, llm.new_cache(), IDS[:300])
    half = found["simd", "f16"]
    np.testing.assert_allclose(half, found["numpy", "f16"], atol=1e-3)
    assert 1e-4 < np.abs(half - found["simd", "f32"]).max() < 2e-2


# ---------------------------------------------------------------- sequences of one pool


@pytest.mark.parametrize("rows", [15, 16, 17, 40])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_forked_sequences_do_not_disturb_each_other(dtype, rows, path):
    """A row written into a block that two sequences share appears in both."""
    llm = LLM(path, kv_cache="paged", kv_dtype=dtype)
    one = llm.new_cache()
    step(llm, one, IDS[:rows], True)
    two = one.fork()
    found = []
    for token, other in zip(IDS[rows : rows + 40], OTHERS, strict=False):
        found.append((step(llm, one, [token], False), step(llm, two, [other], False)))
    for of_each, ids in zip(zip(*found, strict=True), (IDS[rows:], OTHERS), strict=True):
        alone = llm.new_cache()
        step(llm, alone, IDS[:rows], True)
        np.testing.assert_array_equal(np.concatenate(of_each), generated(llm, alone, ids[:40]))


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("kind", ["paged, 1 row", "paged, 16 rows", "paged, 33 rows"])
def test_stale_blocks_are_never_read(kind, n_prompt, path):
    """A table with one block more than is used: a whole block of somebody else's rows."""
    llm = LLM(path, context=70, **KINDS[kind])
    pool = llm.new_cache().pool
    blocks = pool.take(pool.n_free)
    for number in blocks:
        pool.block(number)[:] = np.nan
    pool.give_back(blocks)
    found = logits_of(llm, llm.new_cache(), IDS[:50], n_prompt)
    basic = LLM(path)
    expected = logits_of(basic, basic.new_cache(), IDS[:50], n_prompt)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 63, 64, 99])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shortened_cache_is_as_good_as_a_new_one(kind, rows, path):
    """Rows of the forgotten tail that are still read, or positions that go on from it."""
    llm = LLM(path, **KINDS[kind])
    used, new = llm.new_cache(), llm.new_cache()
    step(llm, used, [*IDS[:rows], *OTHERS[:90]], True)
    generated(llm, used, OTHERS[:10])
    used.truncate(rows)
    found = step(llm, used, IDS[rows : rows + 70], True, 70)
    expected = step(llm, new, IDS[: rows + 70], True, rows + 70)[rows:]
    np.testing.assert_array_equal(found, expected)
    again = generated(llm, used, OTHERS[:3]), generated(llm, new, OTHERS[:3])
    np.testing.assert_array_equal(*again)


@pytest.mark.parametrize("backend", ["simd", "numpy"])
def test_a_step_that_finds_no_room(backend, path):
    """Rows of some layers left by a step that a full pool refused: every later one is shifted."""
    llm = LLM(path, backend=backend, kv_cache="paged", kv_max_blocks=2)
    cache = llm.new_cache()
    step(llm, cache, IDS[:20], True)
    with pytest.raises(PoolFull):
        step(llm, cache, IDS[20:40], True)
    assert [cache.seq_len(layer) for layer in range(2)] == [20, 20]
    found = step(llm, cache, IDS[20:32], True, 12)
    cache.free()
    np.testing.assert_allclose(found, step(llm, cache, IDS[:32], True, 12), atol=1e-4)


def test_many_sequences_through_a_pool_for_one(path):
    """Blocks kept by a finished request, or rows of the last one read by the next."""
    prompts = [IDS[:100], IDS[:100], OTHERS[:70], IDS[:17]]
    params = SamplingParams(max_tokens=28, temperature=0, ignore_eos=True)
    paged, alone = LLM(path, kv_cache="paged", kv_max_blocks=8), LLM(path)
    done = paged.generate(prompts, params)
    for completion, prompt in zip(done, prompts, strict=True):
        assert completion.token_ids == alone.generate(prompt, params).token_ids
    assert paged.new_cache().pool.n_used == 0


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_every_kind_gives_the_same_text(temperature):
    """A kind that is right in a step and wrong in a request: limits, prefill in chunks."""
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=3)
    texts = {
        kind: LLM(prefill_chunk=7, **options).generate("To be, or not to be", params).text
        for kind, options in KINDS.items()
    }
    assert len(set(texts.values())) == 1, texts


def test_cost_of_a_step_does_not_grow_with_the_pool(path):
    """Work on all blocks, or on their list, makes a larger pool slower for the same rows."""
    llm, took, caches = LLM(path, threads=1), {64: [], 20_064: []}, {}
    for n_blocks in took:
        pool = BlockPool(2, 32, max_blocks=n_blocks)
        held = pool.take(n_blocks - 64)
        pool.give_back(held[::2])  # the others stay in use, by nobody here
        caches[n_blocks] = PagedKvCache(pool)
    assert pool.n_used == 10_000
    for token in IDS[:300]:
        for n_blocks, cache in caches.items():
            start = time.perf_counter()
            step(llm, cache, [token], False)
            took[n_blocks].append(time.perf_counter() - start)
    small, large = (np.median(times) for times in took.values())
    assert large < 2 * small


def test_kinds_are_what_they_are_called(path):
    """An option that is not passed on would compare one cache with itself."""
    caches = {kind: LLM(path, **options).new_cache() for kind, options in KINDS.items()}
    assert isinstance(caches["basic"], BasicKvCache)
    paged = [cache for cache in caches.values() if isinstance(cache, PagedKvCache)]
    assert [cache.pool.block_rows for cache in paged] == [1, 16, 33, 256]


def test_sizes_may_be_numpys(path):
    """A size that was computed with NumPy, taken at the door and refused behind it."""
    llm = LLM(path, kv_cache="paged", kv_block_rows=np.int64(8), kv_max_blocks=np.int64(9))
    assert llm.new_cache().pool.max_rows == 72
    json.dumps(llm.settings)
