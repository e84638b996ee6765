"""engine/lookup.py: guesses change when tokens come, never which."""

import sys

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import chain, finish, request, script

from engine import LLM, SamplingParams
from engine.cache import PoolFull
from engine.lookup import FIRST, PATIENCE, Lookup

VOCAB = 12


# --- what is guessed ---


@pytest.mark.parametrize(
    ("ids", "guesses"),
    [
        ([], []),
        ([1], []),
        ([1, 1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 9, 2], []),  # one token that is the same is no reason
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the last place of several
        ([5, 1, 2, 3, 9, 6, 1, 2, 4, 9, 5, 1, 2], [3, 9, 6, 1]),  # but a longer match first
        ([1, 1, 1], [1, 1, 1, 1]),
        ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3]),  # goes on behind the end
    ],
)
def test_guesses(ids, guesses):
    """Guesses from the wrong place, of too little, or short where a text repeats itself."""
    assert Lookup(FIRST, ids).guess(100) == guesses
    assert Lookup(FIRST, ids).guess(2) == guesses[:2]
    assert Lookup(FIRST, ids).guess(0) == Lookup(FIRST, ids).guess(-1) == []
    assert Lookup(1, ids).guess(100) == guesses[:1]
    slowly = Lookup(FIRST, ids[: len(ids) // 2])
    for token in ids[len(ids) // 2 :]:
        slowly.append(token)
    assert slowly.guess(100) == guesses


def test_more_guesses_where_they_come():
    """A few guesses for ever where all of them come; or more than was asked for."""
    lookup, n = Lookup(20, [1, 2] * 50), []
    for _ in range(5):
        n.append(len(lookup.guess(100)))
        lookup.learn(n[-1], n[-1])
    assert n == [FIRST, 2 * FIRST, 4 * FIRST, 20, 20]
    lookup.learn(20, 5)
    assert len(lookup.guess(100)) == 6


@pytest.mark.parametrize("most", [1, 2, 64])
def test_waits_after_wrong_guesses(most):
    """Guesses that never come are made at every token; or after some no guess is made ever
    again."""
    lookup, waits = Lookup(most, [1, 2] * 10), []
    for _ in range(9):
        waited = 0
        while not (guess := lookup.guess(most)):
            lookup.append(1 + (len(waits) + waited) % 2)
            waited += 1
            assert waited <= PATIENCE
        waits.append(waited)
        assert len(guess) <= (min(FIRST, most) if len(waits) == 1 else 2)
        lookup.learn(len(guess), 0)
        # where the text stands does not matter: both ids follow each other
        lookup.append(1)
        lookup.append(2)
    # two of the tokens of each wait are those appended here
    assert [w + 2 if w else 0 for w in waits] == [0, 0, 4, 8, 16, 32, 64, 64, 64]
    for _ in range(PATIENCE):
        lookup.append(1)
    assert lookup.guess(most)
    lookup.learn(1, 1)
    assert lookup.guess(most)  # one that came ends it


def test_memory_grows_with_the_text_only():
    """Places that are kept twice, or copies of the text in each."""
    ids = np.random.default_rng(0).integers(0, 1000, 4000).tolist()
    lookup = Lookup(8, ids)
    assert len(lookup._behind) <= 3 * len(ids)
    held = sum(map(sys.getsizeof, lookup._behind)) + sys.getsizeof(lookup._behind)
    assert held < 700 * len(ids)
    before = len(lookup._behind)
    for token in ids[-100:] * 20:  # over and over: nothing new after the second time
        lookup.append(token)
    assert len(lookup._behind) - before < 3 * 110


# --- with a model in whose logits every row counts ---


def draw_params(data) -> SamplingParams:
    sampled = data.draw(st.booleans())
    some = {
        "temperature": data.draw(st.sampled_from([0.5, 1.0])) if sampled else 0,
        "seed": data.draw(st.integers(0, 99)),
        "max_tokens": data.draw(st.integers(0, 60)),
        "logprobs": data.draw(st.sampled_from([None, 0, 3])),
        "top_k": data.draw(st.sampled_from([0, 3])),
        "top_p": data.draw(st.sampled_from([1.0, 0.9])),
        "min_p": data.draw(st.sampled_from([0.0, 0.1])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2, 0.9])),
        "presence_penalty": data.draw(st.sampled_from([0.0, 0.5])),
        "frequency_penalty": data.draw(st.sampled_from([0.0, 0.2, -0.2])),
        "logit_bias": data.draw(st.sampled_from([None, {1: 3.0, 4: -100}])),
        "stop_token_ids": data.draw(st.sampled_from([(), (5,), (2, 3)])),
        "ignore_eos": data.draw(st.booleans()),
    }
    some["min_tokens"] = data.draw(st.integers(0, min(20, some["max_tokens"])))
    return SamplingParams(**some)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_same_tokens(data):
    """A guess that was taken for a token, a draw that was made twice, a penalty that counts
    guesses, a row that stays: any of it gives other tokens, logprobs or rows than without."""
    vocab = data.draw(st.integers(6, 12))
    seed, sharpness = data.draw(st.integers(0, 9999)), data.draw(st.sampled_from([0.5, 2.0, 6.0]))
    prompt = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=40))
    params, context = draw_params(data), data.draw(st.integers(len(prompt) + 1, 90))
    more = {"eos_ids": [0], "context": context}

    def run(lookup: int):
        model = chain(vocab, seed, sharpness)
        generation, decoding = request(model, prompt, params, lookup=lookup, **more)
        done, session = finish(generation), decoding.session
        from_rows = [[layer.tolist() for layer in session.cache.materialize(i)] for i in range(2)]
        return model, done, (session.ids, session.n_prompt, from_rows)

    (_, plain, left), (model, done, left_too) = run(0), run(data.draw(st.integers(1, 20)))
    assert (done.token_ids, done.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert done.logprobs == plain.logprobs
    assert left == left_too
    # never past the context, and the figures are those of what was run
    m, steps = done.metrics, [run for run in model.runs if run[2]]
    assert m.guessed_tokens == sum(n - 1 for _, _, n in steps)
    assert len(m.per_forward_ms) == len(steps)
    assert m.accepted_tokens <= m.guessed_tokens
    last_guess_came = len(done.token_ids) == len(steps) + m.accepted_tokens - 1
    assert last_guess_came or len(done.token_ids) == len(steps) + m.accepted_tokens


def test_every_position_is_within_the_context():
    """A guess whose row has no place: the step, or the growth of a cache, fails at the end."""
    model = script([1, 2], VOCAB, 4)
    generation, decoding = request(
        model, [1, 2, 1, 2], SamplingParams(max_tokens=None, temperature=0), context=20, lookup=16
    )
    most = 0
    forward = model.forward

    def watched(runs, logits, profile=None):
        nonlocal most
        most = max(most, runs[0].cache.seq_len(0) + len(runs[0].ids))
        forward(runs, logits, profile)

    model.forward = watched
    done = finish(generation)
    assert len(done.token_ids) == 16 and most == 19 == decoding.session.cache.seq_len(0)


def test_counts():
    """Guesses that are counted as they are made, not as they come; an end of text that was guessed
    and is not counted."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    model = script([3, 4, 9, 5, 6, 7, 0], VOCAB, len(prompt))
    params = SamplingParams(max_tokens=20, temperature=0)
    done = finish(request(model, prompt, params, lookup=8, eos_ids=[0])[0])
    assert done.token_ids == [3, 4, 9, 5, 6, 7, 0]
    # 3 of the prompt's logits; then 4, and 5 6 7 of which none; 9, 5, 6; then 7, 8, 1: 7 came
    assert [ids for ids, _, _ in model.runs[1:]] == [[3, 4, 5, 6, 7], [9], [5], [6, 7, 8]]
    assert (done.metrics.guessed_tokens, done.metrics.accepted_tokens) == (6, 2)
    model = script([1, 2, 0, 0], VOCAB, 7)
    done = finish(request(model, [5, 1, 2, 0, 4, 9, 5], params, lookup=8, eos_ids=[0])[0])
    assert done.token_ids == [1, 2, 0] and model.runs[-1] == ([1, 2, 0, 4, 9], False, 5)
    assert (done.metrics.guessed_tokens, done.metrics.accepted_tokens) == (4, 2)


# --- what it costs and saves ---


@pytest.mark.parametrize("most", [4, 8, 64])
def test_a_copy_takes_few_steps(most):
    """Copying that is hardly sooner than without guesses."""
    text = np.random.default_rng(1).integers(0, 300, 200).tolist()
    copy = [*text[:80], *[301, 302, 303], *text[90:150], 304, *text[150:]]  # with an edit or two
    model = script(copy, 400, len(text) + 1)
    params = SamplingParams(max_tokens=len(copy), temperature=0)
    done = finish(request(model, [*text, 399], params, lookup=most)[0])
    assert done.token_ids == copy
    assert len(model.runs) <= len(copy) / 1.8 + 14  # 14: the prompt's own
    assert len(done.metrics.per_forward_ms) <= len(copy) / 1.8


@pytest.mark.parametrize("most", [8, 64])
@pytest.mark.parametrize("vocab_size", [8, 100, 2000])
def test_little_is_guessed_where_nothing_repeats(vocab_size, most):
    """Text that never goes on as it did before, and pays for guesses at every token."""
    rng = np.random.default_rng(0)
    prompt, said = rng.integers(0, vocab_size, 500).tolist(), rng.integers(0, vocab_size, 500)
    model = script(said.tolist(), vocab_size, len(prompt))
    params = SamplingParams(max_tokens=500, temperature=0)
    done = finish(request(model, prompt, params, lookup=most)[0])
    wrong = done.metrics.guessed_tokens - done.metrics.accepted_tokens
    if vocab_size == 8:  # one guess of eight comes by chance, and then saves a step
        assert wrong < 0.6 * 500
    else:
        assert wrong < 0.08 * 500


# --- with real models, whose bits have to be the same ---


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return write_checkpoint(path, vocab_size=24, eos_token_id=23, max_position_embeddings=192)


KINDS = {
    "basic": {},
    "paged": {"kv_cache": "paged"},
    "concat": {"kv_cache": "concat"},
    "f16": {"kv_dtype": "f16"},
    "paged f16": {"kv_cache": "paged", "kv_dtype": "f16", "kv_block_rows": 3},
    "numpy": {"backend": "numpy", "weights": "f32"},
    "f32": {"weights": "f32", "threads": 1, "prefill_chunk": 7},
}
PARAMS = {
    "greedy": {"temperature": 0, "max_tokens": None, "ignore_eos": True},
    "eos": {"temperature": 0.7, "max_tokens": 100},
    "sampled": {"temperature": 0.4, "max_tokens": 100, "ignore_eos": True},
    "penalties": {
        "temperature": 0.5,
        "max_tokens": 80,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.1,
        "presence_penalty": 0.1,
        "logit_bias": {3: 2.0},
        "min_tokens": 40,
        "stop_token_ids": [7],
    },
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, path) -> tuple[LLM, LLM]:
    """The same without guesses, and with."""
    return LLM(path, **KINDS[request.param]), LLM(path, lookup=6, **KINDS[request.param])


@pytest.mark.parametrize("asked", PARAMS)
def test_the_same_bits(asked, pair):
    """Logits of several tokens in a step that are not those of one after the other."""
    prompt = np.random.default_rng(2).integers(0, 23, 20).tolist() * 2
    accepted = guessed = 0
    for seed in range(3):
        params = SamplingParams(seed=seed, logprobs=2, **PARAMS[asked])
        sessions = [llm.new_session() for llm in pair]
        plain, done = (
            llm.generate(prompt, params, session)
            for llm, session in zip(pair, sessions, strict=True)
        )
        assert (done.token_ids, done.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert done.logprobs == plain.logprobs
        for layer in range(2):
            for a, b in zip(*(s.cache.materialize(layer) for s in sessions), strict=True):
                assert np.array_equal(a, b)
        guessed += done.metrics.guessed_tokens
        accepted += done.metrics.accepted_tokens
        assert len(done.metrics.per_forward_ms) <= len(done.token_ids)
    assert 0 < accepted <= guessed  # else this has shown nothing


def test_what_a_session_goes_on_with(pair, tmp_path):
    """Rows of guesses that are saved, reused or counted as the session's."""
    prompt = np.random.default_rng(2).integers(0, 23, 20).tolist() * 2
    params = SamplingParams(max_tokens=30, temperature=0.5, seed=1, ignore_eos=True, logprobs=0)
    left = []
    for llm in pair:
        session = llm.new_session()
        first = llm.generate(prompt, params, session)
        llm.save_cache(session, tmp_path / "saved.kv")
        on = llm.generate(None, params, llm.load_cache(tmp_path / "saved.kv"))
        turn = [*prompt, *first.token_ids[:17], 1, 2, 3]
        other = llm.generate(turn, params, session)
        assert other.metrics.cached_tokens == len(turn) - 3
        left.append([(d.token_ids, d.logprobs) for d in (first, on, other)])
    assert left[0] == left[1]


def test_a_session_that_was_left(pair, tmp_path):
    """A reader who leaves between two tokens: what is saved then, and what goes on from it, is
    what the same tokens give without guesses."""
    plain, llm = pair
    prompt, greedy = [1, 2, 3] * 6, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    session = llm.new_session()
    tokens = llm._start(prompt, greedy, session).tokens()
    for _ in range(9):
        next(tokens)
    ids = list(session.ids)
    assert session.cache.seq_len(0) == len(ids) - 1
    llm.save_cache(session, tmp_path / "saved.kv")
    on = llm.generate(None, greedy, llm.load_cache(tmp_path / "saved.kv"))
    whole = plain.generate(prompt, SamplingParams(max_tokens=150, temperature=0, ignore_eos=True))
    said = ids[len(prompt) :] + on.token_ids
    assert whole.token_ids[: len(said)] == said
    tokens.close()
    assert llm.generate(None, greedy, session).token_ids == on.token_ids


def test_several_at_once(path):
    """Requests in one step whose guesses are taken for each other's."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 23, n).tolist() * 2 for n in (3, 8, 15)]
    params = SamplingParams(max_tokens=60, temperature=0.5, seed=4, logprobs=1, ignore_eos=True)
    plain, llm = LLM(path), LLM(path, lookup=6)
    alone = [plain.generate(prompt, params) for prompt in prompts]
    together = llm.generate(prompts, params)
    assert [d.token_ids for d in together] == [d.token_ids for d in alone]
    assert [d.logprobs for d in together] == [d.logprobs for d in alone]
    assert sum(d.metrics.accepted_tokens for d in together) > 0


@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_are_the_same_whatever_n(n, path):
    """Sample i of a seed that depends on how many were asked for, or that two samples share."""
    llm = LLM(path, lookup=4)
    params = {"max_tokens": 20, "seed": 5, "logprobs": 1, "ignore_eos": True}
    five = llm.generate([1, 2, 3], SamplingParams(n=5, **params))
    some = llm.generate([1, 2, 3], SamplingParams(n=n, **params))
    some = [some] if n == 1 else some
    assert [d.token_ids for d in some] == [d.token_ids for d in five[:n]]
    assert [d.logprobs for d in some] == [d.logprobs for d in five[:n]]
    assert len({tuple(d.token_ids) for d in five}) == 5


def test_profile(path):
    """A step of several tokens that a profile counts as one token, or that it cannot show."""
    llm = LLM(path, lookup=6)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    done = llm.generate([1, 2, 3] * 5, params, profile=True)
    assert done.token_ids == llm.generate([1, 2, 3] * 5, params).token_ids
    decode = [step for step in done.profile.steps if step.phase == "decode"]
    guessed = sum(step.tokens - 1 for step in decode)
    assert guessed == done.metrics.guessed_tokens > 0
    assert "decode" in done.profile.table() and done.profile.as_dict()


def test_guesses_need_no_blocks(path):
    """A request that fails for want of blocks which only its guesses would have needed."""
    asked = {"kv_cache": "paged", "kv_block_rows": 4, "kv_max_blocks": 14}
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    found = []
    for lookup in (0, 6):
        llm = LLM(path, lookup=lookup, **asked)
        other, session = llm.new_session(), llm.new_session()
        llm.generate([5] * 22, SamplingParams(max_tokens=1), other)  # 6 of the blocks
        tokens = llm._start([1, 2, 3] * 5, params, session).tokens()
        with pytest.raises(PoolFull):
            list(tokens)
        found.append((session.ids, session.cache.seq_len(0)))
    assert found[0] == found[1] and found[0][1] == 32


@pytest.mark.parametrize("lookup", [-1, 65, 1.5, True, "4", None])
def test_what_is_no_lookup(lookup, path):
    """A number of guesses that no step takes, found out in the middle of a request."""
    with pytest.raises(ValueError, match="lookup is .* from 0 to 64 is needed"):
        LLM(path, lookup=lookup)
