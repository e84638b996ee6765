"""Sessions: what of a cache the next request can use, and that nothing else is used."""

import gc
import threading

import numpy as np
import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.cache import BasicKvCache, ConcatKvCache
from engine.session import Session

KINDS = ("basic", "paged", "concat")
IDS = np.random.default_rng(0).integers(0, 300, 200).tolist()


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


def held(ids: list[int], n_rows: int, n_prompt: int = 0) -> Session:
    """A session of `ids` with n_rows rows, each of which holds its id."""
    cache = ConcatKvCache(1, 1)
    rows = np.array(ids[:n_rows], np.float32)[:, None]
    cache.set_prefill(0, rows, rows)
    return Session(cache, ids, n_prompt)


def check_rows(session: Session, wanted: list[int]) -> None:
    assert session.cache.materialize(0)[0].ravel().tolist() == wanted


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=KINDS)
def llm(request, path) -> LLM:
    return LLM(path, kv_cache=request.param, prefill_chunk=50)


# ---------------------------------------------------------------- which rows stay


@pytest.mark.parametrize(
    ("ids", "n_rows", "prompt", "kept"),
    [
        ([1, 2, 3], 2, [1, 2, 3], 2),  # the last token had no row
        ([1, 2, 3], 3, [1, 2, 3], 2),  # it had one, but its logits are wanted
        ([1, 2, 3], 2, [1, 2, 3, 4], 2),
        ([1, 2, 3], 3, [1, 2, 3, 4], 3),
        ([1, 2, 3], 3, [1, 2], 1),
        ([1, 2, 3], 3, [1], 0),
        ([1, 2, 3], 3, [1, 9, 3, 4], 1),
        ([1, 2, 3], 3, [9, 2, 3], 0),
        ([1, 2, 3], 3, [1, 2, 9], 2),
        ([1, 2, 3, 4], 1, [1, 2, 3, 9], 1),  # ids in common, but without rows
        ([1, 1, 1], 3, [1, 1, 1, 1], 3),
        ([], 0, [1, 2], 0),
    ],
)
def test_turn_to_keeps_the_longest_common_prefix(ids, n_rows, prompt, kept):
    """One row too many is a row of another token, or no token left to run; one too few is work."""
    session = held(ids, n_rows)
    session.turn_to(prompt)
    check_rows(session, prompt[:kept])
    assert (session.ids, session.n_prompt) == (prompt, len(prompt))


@pytest.mark.parametrize("prompt_type", [list, tuple, np.array])
def test_turn_to_does_not_hold_the_callers_list(prompt_type):
    """Generated tokens appended to the prompt of whoever asked."""
    session, prompt = held([1, 2, 3], 3), prompt_type([1, 2, 9])
    session.turn_to(prompt)
    session.ids.append(7)
    assert list(prompt) == [1, 2, 9]
    check_rows(session, [1, 2])


@pytest.mark.parametrize(("n_rows", "kept"), [(0, 0), (1, 1), (3, 3), (4, 3)])
def test_a_claim_leaves_the_last_token_to_be_run(n_rows, kept):
    """A session whose tokens all have rows gives no logits to go on from."""
    session = held([1, 2, 3, 4], n_rows, n_prompt=2)
    session.claim()
    check_rows(session, [1, 2, 3, 4][:kept])
    assert (session.ids, session.n_prompt) == ([1, 2, 3, 4], 2)


@pytest.mark.parametrize(("n_ids", "n_prompt"), [(2, 0), (3, 4)])
def test_impossible_sessions_are_caught(n_ids, n_prompt):
    """Rows of tokens that nobody knows, or a prompt longer than all there is."""
    with pytest.raises(AssertionError):
        Session(held([1, 2, 3], 3).cache, range(n_ids), n_prompt)


# ---------------------------------------------------------------- in requests, each kind of cache


@pytest.mark.parametrize("n", [1, 16, 32, 50])
def test_a_prompt_that_is_cached_as_a_whole(n, llm):
    """No token left to run, where the prompt fills its blocks exactly: an error, or no logits."""
    wanted, session = llm.generate(IDS[:n], greedy(5)).token_ids, llm.new_session()
    for n_cached in (0, n - 1, n - 1):
        done = llm.generate(IDS[:n], greedy(5), session)
        assert done.token_ids == wanted
        assert (done.metrics.prompt_tokens, done.metrics.cached_tokens) == (n, n_cached)


@pytest.mark.parametrize("n_shared", [0, 1, 15, 16, 17, 99])
def test_a_prompt_that_diverges(n_shared, llm):
    """Rows of the old prompt that stay behind the common prefix."""
    session = llm.new_session()
    llm.generate(IDS[:100], greedy(20), session)
    prompt = [*IDS[:n_shared], *IDS[110:170]]
    done = llm.generate(prompt, greedy(20), session)
    assert done.token_ids == llm.generate(prompt, greedy(20)).token_ids
    assert done.metrics.cached_tokens == n_shared


def test_turns_of_a_conversation(llm):
    """An answer computed again in each turn, or a turn that is not seen in the next."""
    session, prompt = llm.new_session(), []
    for turn in range(4):
        n_before = len(session.ids)
        prompt = [*session.ids, *IDS[10 * turn : 10 * turn + 10]]
        done = llm.generate(prompt, greedy(7), session)
        assert session.ids == [*prompt, *done.token_ids]
        assert done.metrics.cached_tokens == max(n_before - 1, 0)
        assert session.cache.seq_len(0) == len(session.ids) - 1
        assert session.n_prompt == len(prompt)


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 0, 7], [11, 1]])
def test_a_session_goes_on(cuts, llm):
    """Many short requests that give other tokens than a long one."""
    session, tokens = llm.new_session(), []
    for i, n in enumerate(cuts):
        tokens += llm.generate(None if i else IDS[:40], greedy(n), session).token_ids
    assert tokens == llm.generate(IDS[:40], greedy(12)).token_ids
    assert session.ids == [*IDS[:40], *tokens] and session.n_prompt == 40


@pytest.mark.parametrize("n_rows", [0, 7, 40, 45])
def test_ids_without_rows_are_run_as_they_came(n_rows, llm):
    """Generated tokens run like a prompt's, or the other way round, have rows of other bits."""
    whole, again = llm.new_session(), llm.new_session()
    tokens = llm.generate(IDS[:40], greedy(12), whole).token_ids
    llm.generate(IDS[:40], greedy(8), again)
    again.cache.truncate(n_rows)
    assert llm.generate(None, greedy(4), again).token_ids == tokens[8:]
    for layer in range(2):
        rows = zip(again.cache.materialize(layer), whole.cache.materialize(layer), strict=True)
        for found, wanted in rows:
            np.testing.assert_array_equal(found, wanted)


def test_an_answer_that_was_not_read_to_its_end(llm):
    """Tokens that were made and not kept: the session goes on from somewhere else."""
    wanted, session = llm.generate(IDS[:40], greedy(12)).token_ids, llm.new_session()
    tokens = llm._start(IDS[:40], greedy(12), session).tokens()
    assert [next(tokens) for _ in range(5)] == wanted[:5]
    assert session.ids == [*IDS[:40], *wanted[:5]]
    assert llm.generate(None, greedy(7), session).token_ids == wanted[5:]


def test_a_session_up_to_the_end_of_the_context(path):
    """Positions beyond the context, by way of a session that is nearly full."""
    llm = LLM(path, context=60)
    session = llm.new_session()
    done = llm.generate(IDS[:40], SamplingParams(temperature=0, ignore_eos=True), session)
    assert len(done.token_ids) == 20 and session.cache.seq_len(0) == 59
    with pytest.raises(ValueError, match="60 tokens long, the context 60"):
        llm.generate(None, greedy(1), session)
    assert llm.generate(IDS[:30], greedy(3), session).metrics.cached_tokens == 29


# ---------------------------------------------------------------- what is refused


def test_several_prompts_cannot_share_a_session(path):
    """Prompts that see one another's tokens, or of which only the last is kept."""
    llm = LLM(path)
    session = llm.new_session()
    llm.generate(IDS[:5], greedy(2), session)
    before = list(session.ids)
    for prompts in ([[1, 2], [3]], [[1, 2]]):
        with pytest.raises(ValueError, match=f"{len(prompts)} completions cannot share a session"):
            llm.generate(prompts, greedy(2), session)
    assert session.ids == before and session.cache.seq_len(0) == 6


def test_nothing_to_continue(path):
    """A model run on no tokens at all."""
    llm = LLM(path)
    for session in (None, llm.new_session()):
        with pytest.raises(ValueError, match="neither a prompt nor a session"):
            llm.generate(None, greedy(1), session)


@pytest.mark.parametrize("session", [1, "s", BasicKvCache(2, 32), [1, 2]], ids=str)
def test_what_is_no_session(session, path):
    """A traceback from deep inside for a cache, or ids, given instead of a session."""
    with pytest.raises(ValueError, match="new_session or load_cache makes one"):
        LLM(path).generate([1, 2], greedy(1), session)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"num_hidden_layers": 3}, {}),
        ({"num_key_value_heads": 1}, {}),
        ({}, {"kv_dtype": "f16"}),
        ({"seed": 1}, {}),  # the same sizes, other weights
        ({}, {"weights": "f32"}),
    ],
    ids=str,
)
def test_a_session_of_another_model(changes, settings, path, tmp_path):
    """Kernels that write beyond narrower rows; or rows that mean nothing to this model."""
    llm, other = LLM(path), LLM(write_checkpoint(tmp_path, **changes), **settings)
    session = other.new_session()
    other.generate(IDS[:5], greedy(2), session)
    with pytest.raises(ValueError, match="session"):
        llm.generate(IDS[:6], greedy(2), session)
    assert session.ids[:5] == IDS[:5] and session.cache.seq_len(0) == 6


# ---------------------------------------------------------------- blocks of the pool


def test_a_request_that_does_not_fit_beside_a_session(path):
    """A full pool must end the request, not the session nor those that come later."""
    llm = LLM(path, kv_cache="paged", kv_max_blocks=6)
    session = llm.new_session()
    wanted = llm.generate(IDS[:60], greedy(9), session).token_ids
    rows = session.cache.materialize(1)
    with pytest.raises(MemoryError, match="the KV cache is full"):
        llm.generate(IDS[100:150], greedy(3))
    for found, before in zip(session.cache.materialize(1), rows, strict=True):
        np.testing.assert_array_equal(found, before)
    assert llm.generate(IDS[:60], greedy(9), session).token_ids == wanted
    session.cache.free()
    assert llm.new_cache().pool.n_used == 0
    assert len(llm.generate(IDS[100:150], greedy(3)).token_ids) == 3


@pytest.mark.parametrize("n_read", [0, 1, 5])
def test_answers_that_nobody_reads_to_the_end(n_read):
    """Blocks of a stream that was dropped stay taken, and the pool is full soon."""
    llm = LLM(kv_cache="paged", context=128)
    gc.collect()
    gc.disable()  # which may come by at any time, or not before the pool is full
    try:
        for _ in range(5):
            pieces = llm.stream(IDS[:70], greedy(30))
            for _ in range(n_read):
                next(iter(pieces))
        del pieces
        assert len(llm.generate(IDS[:70], greedy(3)).token_ids) == 3
    finally:
        gc.enable()


# ---------------------------------------------------------------- one session, several requests


@pytest.mark.parametrize("kind", ["basic", "paged", "concat"])
def test_a_request_whose_session_has_moved_on(kind, path):
    """Tokens of an old request appended to another text, and rows that are not those of the ids."""
    llm = LLM(path, kv_cache=kind)
    session = llm.new_session()
    old = llm._start(IDS[:20], greedy(30), session).tokens()
    next(old)
    llm.generate(IDS[50:60], greedy(5), session)
    ids = list(session.ids)
    with pytest.raises(ValueError, match="gone on with another request"):
        next(old)
    assert session.ids == ids and session.cache.seq_len(0) == len(ids) - 1
    assert llm.generate(None, greedy(5), session).token_ids == (
        LLM(path).generate(ids, greedy(5)).token_ids
    )


def test_threads_with_one_session(path):
    """Rows of two texts mixed in one cache, without a word."""
    llm = LLM(path, threads=1)
    session, outcomes = llm.new_session(), []

    def ask(start: int) -> None:
        for _ in range(5):
            try:
                outcomes.append(llm.generate(IDS[start : start + 20], greedy(20), session))
            except ValueError as e:
                outcomes.append(str(e))

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 30, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 15
    assert all("another request" in o for o in outcomes if isinstance(o, str))
    ids = list(session.ids)
    again = llm.generate(None, greedy(5), session).token_ids
    assert again == llm.generate(ids, greedy(5)).token_ids


def test_a_session_is_saved_by_its_own_llm(path, tmp_path):
    """Rows of one model in a file that says they are another's."""
    llm, other = LLM(path), LLM(path, weights="f32")
    session = llm.new_session()
    llm.generate(IDS[:5], greedy(2), session)
    for wrong in (session, other.new_session(), None, 5):
        with pytest.raises(ValueError, match="session"):
            other.save_cache(wrong, tmp_path / "f")
    assert not (tmp_path / "f").exists()
