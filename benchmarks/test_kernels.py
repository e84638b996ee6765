"""Kernels one by one, at the shapes of Qwen3-0.6B, beside what the machine can do.

Weights and caches hold random data: a page that was never written is read from cache.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import ranks
from benchmarks.shapes import QWEN3_0_6B
from engine import SamplingParams, memory
from engine.cache import BasicKvCache, BlockPool, KvCache, PagedKvCache
from engine.config import ModelConfig
from engine.kernels.activations import BLOCK, Inputs, Rows, padded, rows_for
from engine.kernels.attention import Heads
from engine.kernels.decode_attention import decode_work_size, part_size
from engine.kernels.matmul import Q8, Floats
from engine.kernels.prompt_attention import prompt_work_size
from engine.kernels.rope import rope_table
from engine.kernels.runs import Run, runs_of
from engine.loading.weights import KINDS
from engine.sampler import Sampler

C = ModelConfig.from_dict(QWEN3_0_6B)
HEADS = Heads(C.n_heads, C.n_kv_heads, C.head_dim)
PROMPT = 511  # tokens
WALK = 128 << 20  # bytes that a kernel which waits for memory goes through: four L3s of 32 MB
ROUNDS = 9
HALF = np.float16(0.01).view(np.int16)
MATRICES = {"wq": (C.q_dim, C.dim), "w_up": (C.hidden_dim, C.dim), "w_down": (C.dim, C.hidden_dim)}
FILTERS = {"greedy": {"temperature": 0}, "top_k": {"top_k": 20}, "top_p": {"top_p": 0.95}}


@pytest.fixture
def walk(toy) -> int:
    return 1 if toy else WALK


def repeated(some: np.ndarray, n: int) -> np.ndarray:
    """(n,): `some` over and over, from the start of a cache line on, as the engine's arrays are."""
    found = memory.empty(n, some.dtype)
    for at in range(0, n, len(some)):
        found[at : at + len(some)] = some[: n - at]
    return found


def random_floats(n: int) -> np.ndarray:
    """(n,) float32, a million random values over and over."""
    some = np.random.default_rng(n).standard_normal(min(n, 1 << 20), dtype=np.float32)
    return repeated(some, n)


def random_store(kind: str, n: int) -> Floats | Q8:
    """`n` packed weights: what they are does not matter to the kernel, only that they are."""
    rng = np.random.default_rng(n)
    if kind == "q8_0":
        q = rng.integers(1, 256, 1 << 20, np.uint8)
        return Q8(repeated(q, n), repeated(np.array([HALF] * BLOCK), n // BLOCK))
    values = random_floats(n)
    if kind == "f32":
        return Floats(values)
    return Floats(repeated((values[: 1 << 20].view(np.uint32) >> 16).astype(np.uint16), n))


def rows(n_tokens: int, width: int) -> Rows:
    return Rows(random_floats(n_tokens * width), 0, width)


def inputs(n_tokens: int, width: int) -> Inputs:
    """Activations, and room for them as Q8_0; `width` is whole blocks."""
    size = rows_for(n_tokens) * width
    q, scales = memory.zeros(size, np.int8), memory.zeros(size // BLOCK)
    starts = memory.zeros(size // BLOCK, np.int32)
    return Inputs(rows(rows_for(n_tokens), width), q, scales, starts)


@pytest.mark.benchmark(group="matmul")
@pytest.mark.parametrize("n_tokens", [1, PROMPT])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_matmul(measure, team, walk, matrix, kind, n_tokens):
    """One token waits for memory, and goes through many matrices; a prompt for arithmetic."""
    n, k = MATRICES[matrix]
    layers = 1 if n_tokens > 1 else -(-walk // (n * k * np.dtype(KINDS[kind]).itemsize))
    store = random_store(kind, layers * n * k)
    x, out = inputs(n_tokens, k), rows(n_tokens, padded(n))
    team.run(ranks.quantizations, x, n_tokens)
    measure(
        lambda: team.run(ranks.matmuls, out, store, layers, n, k, x, n_tokens),
        rounds=ROUNDS,
        moved=sum(array.nbytes for array in store),
        operations=2 * layers * n * k * n_tokens,
        kind="int8" if kind == "q8_0" else "f32",
    )


def divided(q: np.ndarray) -> np.ndarray:
    """Queries as attention takes them."""
    q /= np.float32(np.sqrt(C.head_dim))
    return q


CACHES = {
    "basic-f32": lambda layers, n_rows: BasicKvCache(layers, C.kv_dim),
    "basic-f16": lambda layers, n_rows: BasicKvCache(layers, C.kv_dim, "f16"),
    "paged-f32": lambda layers, n_rows: paged(layers, n_rows, "f32"),
    "paged-f16": lambda layers, n_rows: paged(layers, n_rows, "f16"),
}


def paged(layers: int, n_rows: int, dtype: str) -> PagedKvCache:
    """A cache whose pool has just the blocks that `n_rows` need."""
    return PagedKvCache(BlockPool(layers, C.kv_dim, max_blocks=-(-n_rows // 16), dtype=dtype))


@pytest.fixture(params=CACHES)
def filled(request):
    """Makes a cache of `n_rows` random rows in each of `layers`."""

    def fill(layers: int, n_rows: int) -> KvCache:
        cache = CACHES[request.param](layers, n_rows)
        for layer in range(layers):
            k, v = random_floats(2 * n_rows * C.kv_dim).reshape(2, n_rows, C.kv_dim)
            cache.set_prefill(layer, k, v)
        return cache

    return fill


@pytest.mark.benchmark(group="attention")
@pytest.mark.parametrize("n_rows", [511, 4000])
def test_decode_attention(measure, team, walk, filled, n_rows):
    """A generated token: every row of K and V is read once."""
    layers = -(-walk // (2 * 4 * n_rows * C.kv_dim))
    cache = filled(layers, n_rows)
    cache.truncate(n_rows - 1)  # the last row is the token's own
    runs = runs_of([Run(np.zeros(1, np.int64), cache, False, 0)], [0])
    q, out = Rows(divided(random_floats(C.q_dim)), 0, C.q_dim), rows(1, C.q_dim)
    parts = memory.zeros(runs.parts[-1] * part_size(C.n_heads, C.head_dim))
    work = memory.zeros(team.ranks * decode_work_size(C.n_heads))
    arguments = out, parts, q, cache.kv(), runs, HEADS, work
    measure(
        lambda: team.run(ranks.decode_attentions, *arguments),
        rounds=ROUNDS,
        moved=2 * layers * n_rows * C.kv_dim * np.dtype(cache.dtype).itemsize,
        operations=4 * layers * n_rows * C.q_dim,
    )


@pytest.mark.benchmark(group="attention")
def test_prompt_attention(measure, team, filled):
    """512 tokens of a prompt, each of which sees itself and those before it."""
    n = 512
    q, out = Rows(divided(random_floats(n * C.q_dim)), 0, C.q_dim), rows(n, C.q_dim)
    cache = filled(1, n)
    kv = cache.kv()
    cache.truncate(0)  # the rows are there, and they are the tokens' own
    runs = runs_of([Run(np.zeros(n, np.int64), cache, True, 0)], [0])
    work = memory.zeros(team.ranks * prompt_work_size(C.head_dim))
    measure(
        lambda: team.run(ranks.prompt_attentions, out, q, kv, runs, HEADS, work),
        rounds=ROUNDS,
        operations=4 * C.q_dim * n * (n + 1) // 2,
    )


@pytest.mark.benchmark(group="others")
def test_rmsnorm(measure, team):
    """Read and written: the residual stream of a prompt."""
    x, out, weight = rows(PROMPT, C.dim), rows(PROMPT, C.dim), random_floats(C.dim)
    measure(
        lambda: team.run(ranks.rmsnorms, out, x, weight, PROMPT, C.dim, C.norm_eps),
        rounds=ROUNDS,
        moved=x.data.nbytes + out.data.nbytes,
    )


@pytest.mark.benchmark(group="others")
def test_norm_and_rotate(measure, team):
    """Read and written: the query heads of a prompt."""
    x, weight = rows(PROMPT, C.q_dim), random_floats(C.head_dim)
    rope = rope_table(C.head_dim, C.rope_theta, PROMPT).ravel()
    runs = runs_of([Run(np.zeros(PROMPT, np.int64), BasicKvCache(1, C.kv_dim), True, 0)], [0])
    arguments = x, weight, C.n_heads, HEADS, C.norm_eps, rope, runs, PROMPT
    measure(
        lambda: team.run(ranks.norms_and_rotations, *arguments),
        rounds=ROUNDS,
        moved=2 * x.data.nbytes,
    )


@pytest.mark.benchmark(group="others")
def test_quantize(measure, team):
    """Floats read, bytes and their scales and sums written: a prompt's way into a matmul."""
    x = inputs(PROMPT, C.hidden_dim)
    measure(
        lambda: team.run(ranks.quantizations, x, PROMPT),
        rounds=ROUNDS,
        moved=sum(array.nbytes for array in (x.rows.data, x.q, x.scales, x.starts)),
    )


@pytest.mark.benchmark(group="sampling")
@pytest.mark.parametrize("filters", FILTERS)
def test_sampling(measure, filters):
    """One token of 151,936 logits, which are read once at least; by one thread."""
    sample = Sampler(SamplingParams(seed=0, **FILTERS[filters]), C.vocab_size)
    logits = 4 * random_floats(C.vocab_size)
    measure(lambda: sample(logits), rounds=5 * ROUNDS, tokens=1, moved=logits.nbytes)
