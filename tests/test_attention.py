"""engine/kernels/attention.py against a float64 softmax, and bit for bit against itself."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels.activations import Rows
from engine.kernels.attention import CHUNK, Heads
from engine.kernels.decode_attention import (
    decode_attention,
    decode_work_size,
    merge_parts,
    part_size,
)
from engine.kernels.kv import Kv
from engine.kernels.prompt_attention import prompt_attention, prompt_work_size
from engine.kernels.runs import Run, runs_of
from engine.kernels.team import Rank, new_flags

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 400)
GROUPS = (1, 2, 3, 4, 8)
HEAD_DIMS = (16, 64, 128)
SHAPES = [Heads(2 * group, 2, dim) for group in GROUPS for dim in HEAD_DIMS]
SMALL = Heads(6, 2, 16)


def shape_name(heads: Heads) -> str:
    return f"group{heads.n_heads // heads.n_kv_heads}x{heads.head_dim}"


def in_blocks(k: np.ndarray, v: np.ndarray, block_rows: int = 0) -> tuple[Kv, np.ndarray]:
    """(n, kv_dim) rows in blocks scattered over memory full of NaN, and that memory, to be held.

    Without `block_rows` they are one block.
    """
    n, width = k.shape
    block_rows = block_rows or n
    n_blocks = -(-n // block_rows)
    memory = nans(2 * n_blocks, 2, block_rows, width)
    order = np.random.default_rng(n).permutation(2 * n_blocks)[:n_blocks]
    for i, number in enumerate(order):
        for side, rows in enumerate((k, v)):
            some = rows[i * block_rows : (i + 1) * block_rows]
            memory[number, side, : len(some)] = some
    blocks = np.array([memory[number].ctypes.data for number in order], np.uint64)
    places = np.array([[0, memory[0, 0].nbytes]], np.uint64)
    return Kv(blocks, places, block_rows, np.zeros(0, np.float32)), memory


def run_decode(out, q, kv, runs, heads, ranks) -> None:
    """The decode form's one call in this file: every rank's share, one rank after the other.

    Scratch is of exactly the size that is asked for, and full of NaN.
    """
    parts = nans(runs.parts[-1] * part_size(heads.n_heads, heads.head_dim))
    work, flags = nans(ranks, decode_work_size(heads.n_heads)), new_flags(ranks)
    team = [Rank(rank, ranks, flags) for rank in range(ranks)]
    out, q = (Rows(x.reshape(-1), 0, heads.n_heads * heads.head_dim) for x in (out, q))
    for me in team:
        at = me.rank * work.shape[1]
        decode_attention(parts, q, kv, 0, runs, heads, work.ravel(), at, me)
    for me in team:
        merge_parts(out, parts, runs, heads, me)


def run_prompt(out, q, kv, runs, heads, ranks) -> None:
    """The prompt form's one call in this file."""
    work, flags = nans(ranks, prompt_work_size(heads.head_dim)), new_flags(ranks)
    out, q = (Rows(x.reshape(-1), 0, heads.n_heads * heads.head_dim) for x in (out, q))
    for rank in range(ranks):
        me, at = Rank(rank, ranks, flags), rank * work.shape[1]
        prompt_attention(out, q, kv, 0, runs, heads, work.ravel(), at, me)


class Held:
    """Stands for a cache: all that Runs ask of one is how many rows it holds."""

    def __init__(self, rows: int):
        self.rows = rows

    def seq_len(self, layer: int) -> int:
        return self.rows


def run_of(n: int, start: int, is_prompt: bool = False) -> Run:
    """`n` tokens behind `start` rows."""
    return Run(np.zeros(n, np.int64), Held(start), is_prompt, 0)


def decode_run(q, k, v, heads, start, ranks=1, block_rows=0) -> np.ndarray:
    """Queries at positions start, start + 1, ..., (n_tokens, n_heads, head_dim)."""
    out = nans(*q.shape)
    kv, _held = in_blocks(k, v, block_rows)
    run_decode(out, q, kv, runs_of([run_of(len(q), start)], [0]), heads, ranks)
    return out


def decode(q, k, v, heads, n_rows=None, ranks=1, block_rows=0) -> np.ndarray:
    """One query, (n_heads, head_dim), over the first `n_rows` rows."""
    n_rows = len(k) if n_rows is None else n_rows
    return decode_run(q[None], k, v, heads, n_rows - 1, ranks, block_rows)[0]


def prompt(q, k, v, heads, start=0, ranks=1, block_rows=0) -> np.ndarray:
    """Queries at positions start, start + 1, ..., (n_tokens, n_heads, head_dim)."""
    out = nans(*q.shape)
    kv, _held = in_blocks(k, v, block_rows)
    run_prompt(out, q, kv, runs_of([run_of(len(q), start, True)], [0]), heads, ranks)
    return out


def twin(q, k, v, heads, start) -> np.ndarray:
    """softmax(q k^T) v in float64, query t over rows 0 to start + t."""
    n, group = len(q), heads.n_heads // heads.n_kv_heads
    k, v = (
        np.repeat(a.astype(np.float64).reshape(len(a), -1, heads.head_dim), group, axis=1)
        for a in (k, v)
    )
    scores = np.einsum("thd,rhd->htr", q.astype(np.float64), k)
    scores[:, np.arange(len(k)) > start + np.arange(n)[:, None]] = -np.inf
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.einsum("htr,rhd->thd", p / p.sum(axis=2, keepdims=True), v)


def nans(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def inputs(n_tokens: int, n_rows: int, heads: Heads, scale: float = 1.0):
    """q, divided by sqrt(head_dim), k and v."""
    rng = np.random.default_rng((n_tokens, n_rows, *heads))
    kv_dim = heads.n_kv_heads * heads.head_dim
    q = rng.standard_normal((n_tokens, heads.n_heads, heads.head_dim)) / heads.head_dim**0.5
    k, v = rng.standard_normal((2, n_rows, kv_dim))
    return [a.astype(np.float32) for a in (q * scale, k, v)]


def close(found, wanted) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- a generated token


@pytest.mark.parametrize("heads", SHAPES, ids=shape_name)
def test_decode(heads):
    """A row or a chunk skipped or counted twice; a head that reads another's keys."""
    for n_rows in ROWS:
        q, k, v = inputs(1, n_rows, heads)
        close(decode(q[0], k, v, heads), twin(q, k, v, heads, n_rows - 1)[0])


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_decode_with_other_numbers_of_key_heads(n_kv_heads):
    """The number of key heads taken for 2, or for that of the query heads."""
    heads = Heads(3 * n_kv_heads, n_kv_heads, 16)
    q, k, v = inputs(1, 100, heads)
    close(decode(q[0], k, v, heads), twin(q, k, v, heads, 99)[0])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("n_rows", ROWS)
def test_decode_on_any_number_of_ranks(n_rows, ranks):
    """Chunks merged in the order of ranks, not of rows; a rank without a chunk."""
    q, k, v = inputs(1, n_rows, SMALL)
    np.testing.assert_array_equal(decode(q[0], k, v, SMALL, ranks=ranks), decode(q[0], k, v, SMALL))


@pytest.mark.parametrize("n_rows", [15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_decode_reads_only_the_rows_in_use(n_rows):
    """Rows of a cache behind its length that are read: 0 * NaN is NaN."""
    q, k, v = inputs(1, n_rows, SMALL)
    behind = nans(CHUNK, k.shape[1])
    k_big, v_big = np.concatenate([k, behind]), np.concatenate([v, behind])
    found = decode(q[0], k_big, v_big, SMALL, n_rows=n_rows)
    np.testing.assert_array_equal(found, decode(q[0], k, v, SMALL))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("start, n", [(0, 2), (0, 65), (61, 2), (62, 5), (63, 3), (190, 8)])
def test_a_run_of_generated_tokens_is_each_alone(start, n, ranks):
    """A guessed token that sees the next, or bits that depend on how many share a step."""
    q, k, v = inputs(n, start + n, SMALL)
    alone = [decode(q[t], k, v, SMALL, start + t + 1) for t in range(n)]
    found = decode_run(q, k, v, SMALL, start, ranks, block_rows=16)
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sequences_of_one_step_do_not_meet(ranks):
    """A sequence that reads another's rows, or leaves its parts in another's place."""
    lengths, shares = [1, 64, 65, 200, 17], [1, 3, 1, 2, 1]
    some = [inputs(n, length, SMALL) for length, n in zip(lengths, shares, strict=True)]
    kvs = [in_blocks(k, v, 16) for _, k, v in some]
    blocks = np.concatenate([kv.blocks for kv, _ in kvs])
    tables = np.cumsum([0, *(len(kv.blocks) for kv, _ in kvs[:-1])])
    runs = [run_of(n, length - n) for length, n in zip(lengths, shares, strict=True)]
    q = np.concatenate([q for q, _, _ in some])
    out, kv = nans(*q.shape), kvs[0][0]._replace(blocks=blocks)
    run_decode(out, q, kv, runs_of(runs, tables), SMALL, ranks)
    alone = [decode_run(q, k, v, SMALL, len(k) - len(q), block_rows=16) for q, k, v in some]
    np.testing.assert_array_equal(out, np.concatenate(alone))


# ---------------------------------------------------------------- tokens of the prompt


@pytest.mark.parametrize("start", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("heads", SHAPES, ids=shape_name)
def test_prompt(heads, start):
    """A query that sees the row after its own, or not its own; a block's last queries lost."""
    for n_tokens in (1, 2, 7, 64, 100):
        q, k, v = inputs(n_tokens, start + n_tokens, heads)
        close(prompt(q, k, v, heads, start), twin(q, k, v, heads, start))


@pytest.mark.parametrize("start", [0, 63, 100])
@pytest.mark.parametrize("group", GROUPS)
def test_prompt_of_many_blocks(group, start):
    """The second block of queries, which begins amid a token where the group does not divide it."""
    heads = Heads(2 * group, 2, 16)
    q, k, v = inputs(200, start + 200, heads)
    close(prompt(q, k, v, heads, start), twin(q, k, v, heads, start))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("n_tokens", [1, 7, 200])
def test_prompt_on_any_number_of_ranks(n_tokens, ranks):
    """A block that no rank takes; one that changes with who takes it."""
    q, k, v = inputs(n_tokens, 33 + n_tokens, SMALL)
    found = prompt(q, k, v, SMALL, 33, ranks=ranks)
    np.testing.assert_array_equal(found, prompt(q, k, v, SMALL, 33))


def splits() -> list[list[int]]:
    """Ways to cut 230 tokens."""
    rng = np.random.default_rng(0)
    some = [sorted(rng.choice(np.arange(1, 230), 5, replace=False).tolist()) for _ in range(5)]
    return [[1], [229], [64, 128, 192], [63, 65, 127], [100, 200], list(range(7, 230, 7)), *some]


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("cuts", splits(), ids=lambda cuts: "-".join(map(str, cuts))[:20])
def test_prompt_in_parts_is_the_same_to_the_bit(cuts, group):
    """Logits that depend on the size of a prefill's parts, or on a prefix found in a cache."""
    heads = Heads(2 * group, 2, 16)
    q, k, v = inputs(230, 230, heads)
    parts = [
        prompt(q[start:stop], k[:stop], v[:stop], heads, start)
        for start, stop in zip([0, *cuts], [*cuts, 230], strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), prompt(q, k, v, heads))


@pytest.mark.parametrize(
    "start, n_tokens", [(0, 1), (0, 15), (14, 2), (0, 63), (63, 2), (100, 100)]
)
def test_prompt_reads_only_the_rows_in_use(start, n_tokens):
    """Rows of a cache behind its length that are read: 0 * NaN is NaN."""
    n_rows = start + n_tokens
    q, k, v = inputs(n_tokens, n_rows, SMALL)
    behind = nans(CHUNK, k.shape[1])
    found = prompt(q, np.concatenate([k, behind]), np.concatenate([v, behind]), SMALL, start)
    np.testing.assert_array_equal(found, prompt(q, k, v, SMALL, start))


def test_a_query_ignores_all_later_rows():
    """A masked row that leaks: a later token's key or value, however large, changes a bit."""
    q, k, v = inputs(100, 100, SMALL)
    whole = prompt(q, k, v, SMALL)
    for t in (0, 1, 5, 6, 62, 63, 64, 98):
        later_k, later_v = k.copy(), v.copy()
        later_k[t + 1 :] *= 1e4
        later_v[t + 1 :] = 1e6
        found = prompt(q, later_k, later_v, SMALL)
        np.testing.assert_array_equal(found[: t + 1], whole[: t + 1])


# ---------------------------------------------------------------- both forms


@pytest.mark.parametrize("heads", [SMALL, Heads(8, 2, 64)], ids=shape_name)
@pytest.mark.parametrize("block_rows", [1, 3, 16, 33, 64, 100, 256])
def test_where_rows_lie_changes_no_bit(heads, block_rows):
    """A block's last row missed, the next block read where it is not, or sums cut at blocks."""
    for n_rows in ROWS:
        q, k, v = inputs(n_rows, n_rows, heads)
        for start in (0, n_rows - 1, n_rows // 2):
            found = prompt(q[start:], k, v, heads, start, block_rows=block_rows)
            np.testing.assert_array_equal(found, prompt(q[start:], k, v, heads, start))
        found = decode(q[0], k, v, heads, block_rows=block_rows)
        np.testing.assert_array_equal(found, decode(q[0], k, v, heads))


@pytest.mark.parametrize("heads", SHAPES, ids=shape_name)
def test_forms_agree(heads):
    """The same token answered differently as prompt and as reply."""
    for n_rows in (1, 17, 64, 65, 400):
        q, k, v = inputs(1, n_rows, heads)
        close(decode(q[0], k, v, heads), prompt(q, k, v, heads, n_rows - 1)[0])


@pytest.mark.parametrize("heads", SHAPES, ids=shape_name)
def test_one_valid_key(heads):
    """The first token: its softmax is 1, its result the value itself, to the bit."""
    q, k, v = inputs(1, 1, heads)
    wanted = np.repeat(v.reshape(2, -1), heads.n_heads // 2, axis=0)
    np.testing.assert_array_equal(decode(q[0], k, v, heads), wanted)
    np.testing.assert_array_equal(prompt(q, k, v, heads)[0], wanted)


@pytest.mark.parametrize("scale", [1e4, 1e30, 1e36])
@pytest.mark.parametrize("n_rows", [1, 33, 64, 200])
def test_huge_scores(n_rows, scale):
    """NaN from inf - inf or 0 / 0 where scores differ by 1e4 and more: the largest takes it all."""
    q, k, v = inputs(n_rows, n_rows, SMALL, scale)
    one, many = decode(q[-1], k, v, SMALL), prompt(q, k, v, SMALL)
    assert np.isfinite(one).all() and np.isfinite(many).all()

    # A score errs by 1e-7 of itself, so only where the largest stands clear is the answer known.
    keys = np.repeat(k.astype(np.float64).reshape(n_rows, 2, -1), 3, axis=1)
    seen = np.tri(n_rows, dtype=bool)[:, None, :]
    scores = np.where(seen, np.einsum("thd,rhd->thr", q.astype(np.float64), keys), -np.inf)
    first, second = (np.sort(scores, axis=2)[:, :, -i] for i in (1, min(2, n_rows)))
    clear = (first - second > 1e-3 * scale) | (n_rows == 1)
    assert clear.mean() > 0.9
    wanted = twin(q, k, v, SMALL, 0)
    close(many[clear], wanted[clear])
    close(one[clear[-1]], wanted[-1][clear[-1]])


@pytest.mark.parametrize("place", [0, 1, 15, 16, 63, 64, 127, 128, 199])
def test_the_largest_score_in_any_place(place):
    """A running largest that is not carried from chunk to chunk, or rescales the wrong way."""
    heads = Heads(2, 1, 16)
    q, k, v = inputs(1, 200, heads)
    q[:], k[:], k[place] = 1, -0.3, 2  # scores of -4.8 and one of 32
    close(decode(q[0], k, v, heads), twin(q, k, v, heads, 199)[0])
    close(prompt(q, k, v, heads, 199), twin(q, k, v, heads, 199))


@pytest.mark.parametrize("step", [0.002, -0.002])
def test_scores_that_rise_or_fall(step):
    """What earlier chunks gathered, not rescaled when a larger score comes; or twice."""
    heads = Heads(2, 1, 16)
    q, k, v = inputs(1, 400, heads)
    q[:], k[:] = 1, (np.arange(400) * step)[:, None]
    close(decode(q[0], k, v, heads), twin(q, k, v, heads, 399)[0])
    close(prompt(q, k, v, heads, 399), twin(q, k, v, heads, 399))
