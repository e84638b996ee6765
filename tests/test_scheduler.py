"""Requests that run together: the same tokens from the same bits as alone, and everyone's turn."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import write_checkpoint
from scheduling import (
    alone,
    check_given_back,
    random_prompts,
    recorded,
    request,
    run,
    tokens_of,
)
from scripted import KV_DIM, LAYERS, script
from serving import chat_model

from engine import LLM, SamplingParams
from engine.cache import BlockPool, PagedKvCache
from engine.decoding import Decoding
from engine.metrics import Metrics
from engine.reply import Reply
from engine.serve import scheduler as module
from engine.serve.scheduler import Request, Scheduler, run_all
from engine.session import Session

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def opened(path):
    """LLMs of the tiny checkpoint by their settings, each opened once."""
    return functools.cache(lambda **settings: LLM(path, **{"threads": 1} | settings))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The built-in model, which speaks, with a chat template."""
    path = chat_model(tmp_path_factory.mktemp("chat") / "tiny")
    return functools.cache(lambda **settings: LLM(path, **{"threads": 1} | settings))


# ---------------------------------------------------------------- the same bits

LENGTHS = 40, 60, 33, 16, 32, 1, 17


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that end at the edges of blocks, and two that share a beginning."""
    prompts = random_prompts(LENGTHS)
    prompts.append(prompts[0][:20] + [1, 2, 3])
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    return [
        (ids, replace(params, temperature=i % 2, seed=i, max_tokens=100 - 7 * i))
        for i, ids in enumerate(prompts)
    ]


SETTINGS = {
    "plain": {},
    "two threads": {"threads": 2},
    "float16 rows": {"kv_dtype": "f16"},
    "float32 weights": {"weights": "f32"},
    "bfloat16 weights": {"weights": "bf16", "kv_dtype": "f16"},
    "guesses": {"lookup": 8},
}


@pytest.mark.parametrize("chunk", [512, 64, 7])
@pytest.mark.parametrize("kind", SETTINGS)
def test_in_company_as_alone(kind, chunk, opened, monkeypatch):
    """Logits that depend on the neighbours, the slot, the piece of a prompt, or on rows that were
    given back and computed again; in the middle of a prompt, or of what was generated."""
    settings = SETTINGS[kind]
    wanted = [alone(opened(**settings), *one) for one in mixed_requests()]
    together = opened(**settings, prefill_chunk=chunk, kv_cache="paged", kv_max_blocks=14)
    scheduler, preempted = together.new_scheduler(), []
    preempt = scheduler._preempt

    def watched(one: Request) -> None:
        n_rows = one.cache.seq_len(0)
        preempted.append((n_step, 0 < n_rows < one.n_prompt, n_rows > one.n_prompt))
        preempt(one)

    monkeypatch.setattr(scheduler, "_preempt", watched)
    # all the pool has to hold, so that the admission does not keep everyone out who will not fit
    monkeypatch.setattr(scheduler, "_n_owed", lambda request: 0)
    requests = [request(together, scheduler, *one) for one in mixed_requests()]
    for one in requests[::-1] if chunk == 64 else requests:
        scheduler.add(one)
    n_step, events = 0, []
    with recorded(together._model) as recorder:
        while not scheduler.is_idle:
            n_step += 1
            events.append(scheduler.step())
    for one, (done, logits) in zip(requests, wanted, strict=True):
        assert one.reply.completion.token_ids == tokens_of(events, one) == done.token_ids
        found = recorder.of(one.cache, one.n_prompt, len(done.token_ids))
        np.testing.assert_array_equal(found, logits)
    check_given_back(scheduler)
    assert len(preempted) == scheduler.n_preemptions > 3
    steps = [step for step, _, _ in preempted]
    assert any(generating for _, _, generating in preempted)
    assert chunk != 7 or any(reading for _, reading, _ in preempted)
    assert chunk == 7 or len(set(steps)) < len(steps), "never several at once"


def test_numpy_in_company(opened):
    """Another backend that mixes up whose rows are whose. Its products depend, in the last bits,
    on how many tokens a piece of a prompt has."""
    wanted = [alone(opened(backend="numpy"), *one) for one in mixed_requests()]
    together = opened(backend="numpy", prefill_chunk=64, kv_cache="paged", kv_max_blocks=14)
    scheduler = together.new_scheduler()
    requests = [request(together, scheduler, *one) for one in mixed_requests()]
    for one in requests:
        scheduler.add(one)
    with recorded(together._model) as recorder:
        run(scheduler)
    assert scheduler.n_preemptions
    for one, (done, logits) in zip(requests, wanted, strict=True):
        assert one.reply.completion.token_ids == done.token_ids
        found = recorder.of(one.cache, one.n_prompt, len(done.token_ids))
        np.testing.assert_allclose(found, logits, atol=1e-4)


@pytest.mark.parametrize("slot", range(4))
@pytest.mark.parametrize("backend", ["simd", "numpy"])
def test_any_slot_of_a_list(backend, slot, opened):
    """A list of prompts, the plainest call, gives another answer in another place."""
    llm = opened(backend=backend)
    prompts = random_prompts([23, 50, 9])
    wanted = llm.generate(prompts[0], GREEDY).token_ids
    others = [*prompts[1:], prompts[1]]
    done = llm.generate([*others[:slot], prompts[0], *others[slot:]], GREEDY)
    assert done[slot].token_ids == wanted


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("first", "second", "n_cached"),
    [
        (16, 16, 0),  # the block of the last token is run again
        (17, 17, 16),
        (32, 32, 16),
        (33, 33, 32),
        (32, 50, 32),
        (50, 32, 16),
        (40, 40, 32),
    ],
)
def test_a_prompt_that_comes_again(first, second, n_cached, dtype, opened):
    """No token left to run behind cached rows; rows that are skipped, but never read; positions
    that begin at 0 again."""
    llm = opened(kv_dtype=dtype)
    (ids,) = random_prompts([50])
    wanted, logits = alone(llm, ids[:second], GREEDY)
    scheduler = llm.new_scheduler()
    scheduler.add(request(llm, scheduler, ids[:first], GREEDY))
    run(scheduler)
    again = request(llm, scheduler, ids[:second], GREEDY)
    scheduler.add(again)
    with recorded(llm._model) as recorder:
        run(scheduler)
    assert again.reply.completion.token_ids == wanted.token_ids
    assert again.reply.completion.metrics.cached_tokens == n_cached
    assert recorder.sizes[0] == second - n_cached
    np.testing.assert_array_equal(recorder.of(again.cache, second, 20), logits)


@pytest.mark.parametrize("at", [0, 15, 16, 31, 33])
def test_a_prompt_that_diverges(at, opened):
    """A block taken for another that begins alike."""
    llm = opened()
    (ids,) = random_prompts([40])
    other = ids[:at] + [ids[at] ^ 1] + ids[at + 1 :]
    wanted, logits = alone(llm, other, GREEDY)
    scheduler = llm.new_scheduler()
    for prompt in (ids, other):
        one = request(llm, scheduler, prompt, GREEDY)
        scheduler.add(one)
        with recorded(llm._model) as recorder:
            run(scheduler)
    assert one.reply.completion.metrics.cached_tokens == min(at, 32) // 16 * 16
    assert one.reply.completion.token_ids == wanted.token_ids
    np.testing.assert_array_equal(recorder.of(one.cache, 40, 20), logits)


def test_the_same_prompt_twice_in_a_list(opened):
    """The second takes rows by reference while the first still computes them."""
    llm, (ids,) = opened(), random_prompts([100])
    wanted = llm.generate(ids, GREEDY).token_ids
    done = llm.generate([ids, ids, ids[:50], ids], GREEDY)
    assert [one.token_ids for one in done] == [
        wanted,
        wanted,
        llm.generate(ids[:50], GREEDY).token_ids,
        wanted,
    ]
    assert [one.metrics.cached_tokens for one in done] == [0, 96, 48, 96]


def test_samples_share_a_prompt(opened):
    """A prompt that is read once for every sample."""
    llm, prompts = opened(), random_prompts([70, 8])
    params = SamplingParams(max_tokens=9, n=3, seed=5, ignore_eos=True)
    with recorded(llm._model) as recorder:
        found = llm.generate(prompts[0], params)
    assert sum(recorder.sizes) == 70 + 2 * 6 + 3 * 8
    assert [done.metrics.cached_tokens for done in found] == [0, 64, 64]
    assert len({tuple(done.token_ids) for done in found}) == 3
    again = llm.generate(prompts[::-1], params)[1]
    assert [done.token_ids for done in again] == [done.token_ids for done in found]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_rows_that_others_left(length, opened):
    """A block more than is in use, or the rest of the last one, is read: NaN is in all of them."""
    llm, (ids,) = opened(), random_prompts([length])
    wanted, logits = alone(llm, ids, GREEDY)
    scheduler = llm.new_scheduler()
    pool = scheduler.pool
    taken = pool.take(pool.n_free)
    for number in taken:
        pool.block(number)[:] = np.nan
    pool.give_back(taken)
    one = request(llm, scheduler, ids, GREEDY)
    scheduler.add(one)
    with recorded(llm._model) as recorder:
        run(scheduler)
    assert one.reply.completion.token_ids == wanted.token_ids
    np.testing.assert_array_equal(recorder.of(one.cache, length, 20), logits)


# ---------------------------------------------------------------- each its own

PLAIN = SamplingParams(max_tokens=40)
OWN = {
    "seeded": replace(PLAIN, seed=42),
    "not seeded": PLAIN,
    "seeded otherwise": replace(PLAIN, seed=43, top_k=9, top_p=0.9),
    "greedy": replace(PLAIN, temperature=0),
    "penalties": replace(PLAIN, temperature=0, repetition_penalty=1.4, frequency_penalty=0.7),
    "bias": replace(PLAIN, seed=1, logit_bias={20: 4.0}, presence_penalty=1.0),
    "logprobs": replace(PLAIN, seed=2, logprobs=3),
    "no logprobs": replace(PLAIN, seed=2, logprobs=0),
    "stop": replace(PLAIN, temperature=0, max_tokens=60, stop=("the", "\n")),
    "two samples' stop": replace(PLAIN, seed=9, max_tokens=60, stop=("e ",), logprobs=1),
    "late stop": replace(PLAIN, temperature=0, max_tokens=60, stop=("e",), min_tokens=21),
    "digits": replace(PLAIN, seed=3, regex="[0-9]{7,9}"),
    "schema": replace(
        PLAIN,
        seed=4,
        json_schema={
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}},
            "required": ["a"],
        },
    ),
}


@pytest.mark.parametrize("lookup", [0, 8])
def test_each_has_its_own(lookup, chatty):
    """One generator, one table of penalties, one grammar or one text for all of a batch."""
    llm, prompt = chatty(lookup=lookup), "To be, or not to be, that is the question: to be"
    params = {name: llm.requests.params_of(one) for name, one in OWN.items()}  # and seeds
    ids = llm.tokenizer.encode(prompt)
    scheduler = llm.new_scheduler()
    requests = {name: request(llm, scheduler, ids, one) for name, one in params.items()}
    for one in requests.values():
        scheduler.add(one)
    events = run(scheduler)
    for name, one in requests.items():
        wanted, found = llm.generate(prompt, params[name]), one.reply.completion
        assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids), name
        assert (found.finish_reason, found.logprobs) == (wanted.finish_reason, wanted.logprobs)
        own = [event for step in events for other, event in step if other is one]
        assert "".join(text for event in own for _, text in event.pieces) == found.text
        assert tokens_of(events, one) == found.token_ids
        assert sum((event.logprobs for event in own), []) == (found.logprobs or [])
        assert [event.finish_reason for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == found.finish_reason
    assert requests["stop"].reply.completion.finish_reason == "stop"


def test_a_stop_in_the_middle_of_a_step(chatty):
    """Tokens that were guessed right, behind a stop, told as part of the answer."""
    llm, cut = chatty(lookup=8), 0
    (e,) = llm.tokenizer.encode("e")
    base = replace(PLAIN, temperature=0, ignore_eos=True, logit_bias={e: 100}, logprobs=0)
    for n in range(3, 30):
        scheduler = llm.new_scheduler()
        params = replace(base, stop="e" * n)
        one = request(llm, scheduler, llm.tokenizer.encode("To b"), params)
        scheduler.add(one)
        events = run(scheduler)
        done = one.reply.completion
        assert (done.text, done.finish_reason) == ("", "stop")
        assert tokens_of(events, one) == done.token_ids == [e] * n
        assert len(done.logprobs) == scheduler.n_generated_tokens == n
        assert sum((event.logprobs for _, event in sum(events, [])), []) == done.logprobs
        cut += one.reply.n_dropped
    assert cut, "no stop was found in the middle of a step"


@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_in_company(budget, chatty):
    """A budget that counts the tokens of others, or is closed in the wrong one's text."""
    llm = chatty()
    messages = [{"role": "user", "content": "Who is there?"}]
    base = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    several = [base, replace(base, thinking_budget=budget), replace(base, thinking_budget=12)]
    scheduler, requests = llm.new_scheduler(), []
    for params in several:
        ids, splitter = llm.chat_prompt(messages, enable_thinking=True)
        requests.append(request(llm, scheduler, ids, params, splitter))
        scheduler.add(requests[-1])
    run(scheduler)
    for one, params in zip(requests, several, strict=True):
        wanted = llm.chat(messages, params, enable_thinking=True)
        found = one.reply.completion
        assert (found.reasoning, found.text) == (wanted.reasoning, wanted.text)
        assert found.token_ids == wanted.token_ids


def test_seeds_of_a_list(chatty):
    """Equal prompts without a seed answered alike, or with one not; samples that are all one."""
    llm, hot = chatty(), SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True)
    free = llm.generate(["To be"] * 3, hot)
    assert len({one.text for one in free}) == 3
    seeded = llm.generate(["To be"] * 3, replace(hot, seed=7))
    assert {one.text for one in seeded} == {llm.generate("To be", replace(hot, seed=7)).text}
    pairs = llm.generate(["To be", "O, "], replace(hot, n=2, seed=7))
    assert [len(pair) for pair in pairs] == [2, 2]
    assert len({one.text for pair in pairs for one in pair}) == 4
    assert pairs[0][0].text == seeded[0].text
    assert pairs[0] != llm.generate("To be", replace(hot, n=2))


def test_samples_of_a_chat(chatty):
    """chat(n=2) that gives one completion, shares a splitter, or the draws."""
    llm = chatty()
    messages = [{"role": "user", "content": "Who is there?"}]
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=3, ignore_eos=True)
    for thinking in (True, None):
        first = llm.chat(messages, params, enable_thinking=thinking)
        one, other = llm.chat(messages, replace(params, n=2), enable_thinking=thinking)
        assert (one.text, one.reasoning) == (first.text, first.reasoning)
        assert one.token_ids != other.token_ids and len(other.token_ids) == 20


# ---------------------------------------------------------------- plans


def added(llm, scheduler, *wanted) -> list[Request]:
    """Requests of (ids, params), which wait now."""
    requests = [request(llm, scheduler, *one) for one in wanted]
    for one in requests:
        scheduler.add(one)
    return requests


def test_equal_requests_decode_as_one(opened):
    """Weights read once a sequence, a prompt that holds up the rest, or a step too many."""
    llm, scheduler = opened(), opened().new_scheduler()
    added(llm, scheduler, *[(ids, GREEDY) for ids in random_prompts([40] * 8)])
    with recorded(llm._model) as recorder:
        run(scheduler)
    assert recorder.sizes == [320] + 19 * [8]
    assert (scheduler.n_prompt_tokens, scheduler.n_generated_tokens) == (320, 160)


def test_places_are_filled_as_they_become_free(opened):
    """A batch that waits for its last member before anyone else begins; an order that is not that
    of arrival."""
    llm = opened()
    scheduler = llm.new_scheduler(max_running=3)
    params = [replace(GREEDY, max_tokens=n) for n in (2, 9, 4, 3, 1, 5, 2)]
    requests = added(llm, scheduler, *zip(random_prompts([5] * 7), params, strict=True))
    with recorded(llm._model) as recorder:
        events = run(scheduler)
    assert max(len(step) for step in events) == 3
    order = list(dict.fromkeys(one for step in events for one, _ in step))
    assert [requests.index(one) for one in order] == list(range(7))
    assert len(recorder.sizes) == 10  # 26 tokens, three a step, but for the end


def long_and_streams(opened, n_streams: int, long: int = 900):
    """A model that reads a long prompt, beside streams that generate."""
    llm = opened(prefill_chunk=64)
    scheduler = llm.new_scheduler()
    endless = replace(GREEDY, max_tokens=400)
    streams = added(llm, scheduler, *[(i, endless) for i in random_prompts([4] * n_streams, 1)])
    while any(not one.decoding.token_ids for one in streams):
        scheduler.step()
    (reader,) = added(llm, scheduler, *[(ids, GREEDY) for ids in random_prompts([long])])
    scheduler.step()
    return llm, scheduler, streams, reader


@pytest.mark.parametrize("n_streams", [0, 1, 3])
@pytest.mark.parametrize("n_short", [1, 5, 30])
def test_a_short_prompt_beside_a_long_one(n_streams, n_short, opened):
    """A short request that waits until all of a long prompt is read."""
    llm, scheduler, _, reader = long_and_streams(opened, n_streams)
    (short,) = added(llm, scheduler, (random_prompts([n_short], 2)[0], GREEDY))
    before = reader.cache.seq_len(0)
    assert short in [one for one, event in scheduler.step() if event.token_ids]
    assert before < reader.cache.seq_len(0) <= before + 32, "the long one stood, or held it up"


def test_a_prompt_longer_than_its_share(opened, monkeypatch):
    """One that is shorter than the long one, but not than a step, goes behind all of it."""
    monkeypatch.setattr(module, "MIXED_TOKENS", 20)
    llm, scheduler, _, reader = long_and_streams(opened, 2)
    (short,) = added(llm, scheduler, (random_prompts([40], 2)[0], GREEDY))
    steps = 0
    while not short.decoding.token_ids:
        scheduler.step()
        steps += 1
    assert steps == 4  # 10 a step
    assert reader.decoding.n_missing > 700


def test_streams_flow_while_a_prompt_is_read(opened, monkeypatch):
    """Streams that stand still, or one step that is as long as a prompt."""
    monkeypatch.setattr(module, "MIXED_TOKENS", 20)
    llm, scheduler, streams, reader = long_and_streams(opened, 3, 300)
    with recorded(llm._model) as recorder:
        n = 0
        while not reader.decoding.token_ids:
            came = [one for one, event in scheduler.step() if event.token_ids]
            assert set(streams) <= set(came)
            n += 1
    assert n == 14 and recorder.sizes == [23] * 14


def test_nobody_waits_behind_one_that_waits_for_rows(opened):
    """A request that lets another compute its rows, and keeps out those that need none of them."""
    llm, scheduler, _, reader = long_and_streams(opened, 0)
    twin, short = added(llm, scheduler, (reader.ids, GREEDY), (random_prompts([5], 2)[0], GREEDY))
    came = [one for one, event in scheduler.step() if event.token_ids]
    assert came == [short] and twin in scheduler.waiting
    scheduler._preempt(short)
    assert list(scheduler.waiting) == [twin, short], "who came first"
    run(scheduler)
    assert twin.decoding.metrics.cached_tokens >= 880
    assert twin.decoding.token_ids == reader.decoding.token_ids


def test_short_requests_do_not_stop_a_long_one(opened):
    """Shortest first for ever: the long prompt is never read while short ones come."""
    llm, scheduler, _, reader = long_and_streams(opened, 0)
    steps, served = 0, 0
    one_token = replace(GREEDY, max_tokens=1)
    while not reader.is_finished:
        added(llm, scheduler, *[(ids, one_token) for ids in random_prompts([20, 25], steps)])
        events = scheduler.step()
        served += sum(event.finish_reason == "length" for _, event in events)
        steps += 1
        assert steps < 60, "the long one starves"
    assert served >= 2 * steps - 4, "the short ones starve"


def test_a_request_of_medium_length_does_not_starve(opened):
    """Only the oldest and the shortest ever get a share."""
    llm, scheduler, _, _ = long_and_streams(opened, 0)
    (medium,) = added(llm, scheduler, (random_prompts([200], 5)[0], GREEDY))
    one_token = replace(GREEDY, max_tokens=1)
    for steps in range(120):
        if medium.decoding.token_ids:
            break
        added(llm, scheduler, (random_prompts([64], 100 + steps)[0], one_token))
        scheduler.step()
    assert medium.decoding.token_ids, "it starves"


# ---------------------------------------------------------------- blocks run out


def test_the_youngest_gives_way(opened, monkeypatch):
    """Progress of the oldest undone by those that came later, in a pool for one and a half."""
    llm = opened(kv_cache="paged", kv_max_blocks=12)
    scheduler, gone = llm.new_scheduler(), []
    preempt = scheduler._preempt

    def watched(one: Request) -> None:
        assert one.number == max(other.number for other in scheduler.running)
        gone.append(one)
        preempt(one)

    monkeypatch.setattr(scheduler, "_preempt", watched)
    long = replace(GREEDY, max_tokens=100)
    requests = added(llm, scheduler, *[(ids, long) for ids in random_prompts([30] * 3)])
    ends = []
    while not scheduler.is_idle:
        before = len(requests[0].decoding.token_ids)
        for one, event in scheduler.step():
            ends += [one] if event.finish_reason else []
        assert requests[0].is_finished or len(requests[0].decoding.token_ids) == before + 1
        numbers = [one.number for one in scheduler.waiting]
        assert numbers == sorted(numbers)
    assert gone and requests[0] not in gone
    assert ends == requests
    check_given_back(scheduler)


def test_a_burst_that_does_not_fit_waits(opened):
    """Prompts let in that have to be thrown out, and read again, in the same step."""
    llm = opened(kv_cache="paged", kv_max_blocks=12)
    scheduler = llm.new_scheduler()
    requests = added(llm, scheduler, *[(ids, GREEDY) for ids in random_prompts([100] * 4)])
    run(scheduler)
    assert scheduler.n_preemptions == 0 and scheduler.n_prompt_tokens == 400
    assert all(one.decoding.finish_reason == "length" for one in requests)


@pytest.mark.parametrize("n_prompt", [1, 80, 191, 192])
def test_a_request_as_large_as_the_pool(n_prompt, opened):
    """One that can run alone only is never let in, keeps out all others, or does not end."""
    llm = opened(kv_cache="paged", kv_max_blocks=12)
    prompts = random_prompts([20, n_prompt, 20])
    params = [GREEDY, replace(GREEDY, max_tokens=12 * 16 + 1 - n_prompt), GREEDY]
    wanted = [opened().generate(*one).token_ids for one in zip(prompts, params, strict=True)]
    scheduler = llm.new_scheduler()
    requests = added(llm, scheduler, *zip(prompts, params, strict=True))
    run(scheduler)
    assert [one.decoding.token_ids for one in requests] == wanted


def test_a_preempted_prompt_is_not_told_as_cached(opened):
    """A client told that its prompt was known, since its own rows were there from before."""
    llm = opened(kv_cache="paged", kv_max_blocks=14, prefill_chunk=16)
    scheduler = llm.new_scheduler()
    first, second = added(llm, scheduler, *[(ids, GREEDY) for ids in random_prompts([100, 40])])
    scheduler.step()
    scheduler.step()
    scheduler._preempt(second)
    run(scheduler)
    assert second.decoding.metrics.cached_tokens == 0 and scheduler.n_cached_tokens > 0
    assert first.is_finished and second.is_finished


def of_script(scheduler, model, ids: list[int], max_tokens: int, lookup: int = 8) -> Request:
    session = Session(PagedKvCache(scheduler.pool), ids, len(ids))
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    decoding = Decoding(
        model.config.vocab_size, session, params, max_tokens, frozenset(), Metrics(), lookup=lookup
    )
    return Request(decoding, Reply(decoding, None))


def test_nobody_gives_way_to_a_guess():
    """A sequence thrown out for rows that may be dropped again in the same step."""
    model = script([1], 16, 7)
    scheduler = Scheduler(model, BlockPool(LAYERS, KV_DIM, 4, max_blocks=4))
    old = of_script(scheduler, model, [1] * 7, 10)
    young = of_script(scheduler, model, [2] * 7, 2)
    scheduler.add(old)
    scheduler.add(young)
    run(scheduler)
    assert scheduler.n_preemptions == 0
    assert old.decoding.metrics.accepted_tokens, "there was no guess"


def test_guesses_share_a_step():
    """As many guesses for each of many as for one: a step that costs many times as much."""
    model = script([1], 16, 3)
    model.max_tokens = 64
    for n, most in ((1, 8), (2, 8), (3, 6), (8, 8), (9, 9)):
        scheduler = Scheduler(model, BlockPool(LAYERS, KV_DIM, 4, max_blocks=100))
        for _ in range(n):
            scheduler.add(of_script(scheduler, model, [1] * 3, 24))
        with recorded(model) as recorder:
            run(scheduler)
        assert max(recorder.sizes[1:]) == most


# ---------------------------------------------------------------- ends before the end


@pytest.mark.parametrize("when", ["waiting", "reading", "generating", "over"])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_ended_early(when, how, opened):
    """Blocks that stay taken, a step more, or a neighbour that is disturbed."""
    llm = opened(prefill_chunk=32)
    scheduler = llm.new_scheduler(max_running=2)
    prompts = random_prompts([20, 100, 20])
    wanted = llm.generate(prompts[0], GREEDY).token_ids
    places = {"waiting": 2, "reading": 1, "generating": 1, "over": 1}
    requests = added(llm, scheduler, *[(ids, GREEDY) for ids in prompts])
    one = requests[places[when]]
    while {
        "waiting": False,
        "reading": one.cache.seq_len(0) < 10,
        "generating": len(one.decoding.token_ids) < 3,
        "over": not one.is_finished,
    }[when]:
        scheduler.step()
    n, is_over = len(one.decoding.token_ids), when == "over"
    if how == "deadline":
        one.deadline = 0.0  # 0 is a time too
        events = [event for other, event in scheduler.step() if other is one]
    else:
        events = [scheduler.end(one, how)]
        assert one not in scheduler.running and one not in scheduler.waiting
    if is_over:
        assert events in ([], [None])
    else:
        assert [event.finish_reason for event in events] == [how]
        assert one.decoding.finish_reason == how and not one.cache.block_table
    run(scheduler)
    assert len(one.decoding.token_ids) == n
    assert requests[0].decoding.token_ids == wanted


def test_a_deadline_to_come(opened):
    """A request ended before its time, or not at it."""
    llm, scheduler = opened(), opened().new_scheduler()
    (ids,) = random_prompts([5])
    late = request(llm, scheduler, ids, GREEDY, deadline=time.monotonic() + 1000)
    scheduler.add(late)
    run(scheduler)
    assert late.decoding.finish_reason == "length"


def test_nothing_asked_for(opened):
    """max_tokens=0 computes a prompt, waits for a place, or has two ends where it is late too."""
    llm = opened()
    scheduler = llm.new_scheduler(max_running=1)
    prompts = random_prompts([5, 5])
    nothing = replace(GREEDY, max_tokens=0)
    added(llm, scheduler, (prompts[0], GREEDY))
    empty = request(llm, scheduler, prompts[1], nothing, deadline=0.0)
    scheduler.add(empty)
    events = [event for one, event in scheduler.step() if one is empty]
    assert [event.finish_reason for event in events] == ["length"]
    assert empty.reply.completion.token_ids == []
    run(scheduler)
    assert scheduler.n_prompt_tokens == 5


# ---------------------------------------------------------------- errors


def failing(model, monkeypatch, error: BaseException, at: int, name: str = "forward") -> None:
    """Call number `at` of a method raises `error`, and that one only."""
    method, calls = getattr(model, name), []

    def call(*args, **more):
        calls.append(1)
        if len(calls) == at:
            raise error
        return method(*args, **more)

    monkeypatch.setattr(model, name, call, raising=False)


@pytest.mark.parametrize(("name", "at"), [("forward", 1), ("forward", 3), ("new_logits", 1)])
def test_a_step_that_fails(name, at, opened, monkeypatch):
    """Requests that hang, or blocks lost, since memory ran out; nothing can be served after it."""
    llm = opened()
    scheduler = llm.new_scheduler(max_running=2)
    wanted = [(ids, GREEDY) for ids in random_prompts([20, 40, 30])]
    requests = added(llm, scheduler, *wanted)
    error = MemoryError("no more")
    failing(llm._model, monkeypatch, error, at, name)
    events = sum(run(scheduler), [])
    ends = {one: event for one, event in events if event.finish_reason}
    assert [ends[one].finish_reason for one in requests] == ["error", "error", "length"]
    assert [ends[one].error for one in requests] == [error, error, None]
    assert requests[2].decoding.token_ids == llm.generate(*wanted[2]).token_ids


def test_memory_refused_for_blocks(opened, monkeypatch):
    """A pool that cannot grow ends one request, and not the thread that runs all."""
    llm = opened()
    scheduler = llm.new_scheduler()
    failing(scheduler.pool, monkeypatch, MemoryError("no slab"), 1, "_grow")
    requests = added(llm, scheduler, *[(ids, GREEDY) for ids in random_prompts([20, 40])])
    run(scheduler)
    assert [one.decoding.finish_reason for one in requests] == ["error", "length"]


def test_one_whose_logits_are_not_finite(opened, monkeypatch):
    """An overflow in one sequence ends its neighbours too."""
    llm = opened()
    scheduler = llm.new_scheduler()
    wanted = [(ids, GREEDY) for ids in random_prompts([20, 40])]
    solo = llm.generate(*wanted[1]).token_ids
    bad, good = added(llm, scheduler, *wanted)
    forward = llm._model.forward

    def spoiled(runs, logits):
        forward(runs, logits)
        caches = [run.cache for run in runs]
        if len(bad.decoding.token_ids) == 4 and bad.cache in caches:
            logits[caches.index(bad.cache), 7] = np.nan

    monkeypatch.setattr(llm._model, "forward", spoiled, raising=False)
    ends = {one: event for one, event in sum(run(scheduler), []) if event.finish_reason}
    assert ends[bad].finish_reason == "error" and "not finite" in str(ends[bad].error)
    assert len(bad.decoding.token_ids) == 4
    assert good.decoding.token_ids == solo


def test_an_error_in_the_text(opened, monkeypatch):
    """A failure behind the last token: an end that nobody is told of."""
    llm, (ids,) = opened(), random_prompts([5])
    scheduler = llm.new_scheduler()
    (one,) = added(llm, scheduler, (ids, replace(GREEDY, max_tokens=1)))
    take = one.take

    def fails(logits):
        take(logits)
        raise RuntimeError("a bug")

    monkeypatch.setattr(one, "take", fails)
    ((found, event),) = scheduler.step()
    assert found is one and event.finish_reason == "error" == one.decoding.finish_reason
    check_given_back(scheduler)


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("error", [MemoryError("no"), ValueError("bad"), KeyboardInterrupt()])
def test_a_list_that_fails(error, at, opened, monkeypatch):
    """An LLM that is of no use after an error or Ctrl-C; an error that is not told."""
    llm, prompts = opened(kv_cache="paged"), random_prompts([20, 40])
    wanted = [llm.generate(ids, GREEDY).token_ids for ids in prompts]
    with monkeypatch.context() as patch:
        failing(llm._model, patch, error, at)
        with pytest.raises(type(error)) as raised:
            llm.generate(prompts, GREEDY)
        assert raised.value is error
    assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == wanted
    assert llm._caches.pool.n_used == 0


def test_memory_after_an_error(opened, monkeypatch):
    """A pool, which may be most of the memory, is kept by a ring of the error and its frames."""
    llm, pools = opened(), []
    new_pool = llm._caches.new_pool

    def fails(*args):
        raise MemoryError("no")

    forward = llm._model.forward

    def spoils(runs, logits):
        forward(runs, logits)
        logits[:] = np.nan

    def watched(*args):
        pool = new_pool(*args)
        pools.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(llm._caches, "new_pool", watched)
    gc.disable()
    try:
        for name, call in (("forward", fails), ("new_logits", fails), ("forward", spoils)):
            with monkeypatch.context() as patch:
                patch.setattr(llm._model, name, call, raising=False)
                with suppress(MemoryError, ValueError):
                    llm.generate(random_prompts([20, 40]), GREEDY)
        assert [pool() for pool in pools] == [None] * 3
    finally:
        gc.enable()


def test_a_list_ends_with_its_first_error(opened, monkeypatch):
    """All the others are run to their ends, and then thrown away."""
    llm, calls = opened(), []
    forward = llm._model.forward

    def spoiled(runs, logits):
        forward(runs, logits)
        calls.append(len(runs))
        if len(calls) == 2:
            logits[0] = np.nan

    monkeypatch.setattr(llm._model, "forward", spoiled, raising=False)
    with pytest.raises(ValueError, match="not finite"):
        llm.generate(random_prompts([20, 40]), GREEDY)
    assert calls == [2, 2]


def test_a_scheduler_after_a_list_that_failed(opened, monkeypatch):
    """Those that had not failed go on, or keep their blocks, though nobody waits for them."""
    llm = opened()
    scheduler = llm.new_scheduler(max_running=1)
    wanted = [(ids, GREEDY) for ids in random_prompts([20, 40])]
    with monkeypatch.context() as patch:
        failing(llm._model, patch, MemoryError("no"), 2)
        with pytest.raises(MemoryError):
            run_all(scheduler, [request(llm, scheduler, *one) for one in wanted])
    assert scheduler.is_idle
    check_given_back(scheduler)
    done = run_all(scheduler, [request(llm, scheduler, *one) for one in wanted])
    assert [one.token_ids for one in done] == [llm.generate(*one).token_ids for one in wanted]


@pytest.mark.parametrize(
    ("bad", "params", "message"),
    [
        ([5, 300], GREEDY, "token id 300"),
        ([], GREEDY, "empty"),
        ([5] * 1024, GREEDY, "1024 tokens long, the context 1024"),
        ([5] * 30, replace(GREEDY, stop_token_ids=(301,)), "301"),
        ([5] * 30, replace(GREEDY, logit_bias={400: 1}), "400"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_bad_prompt_in_a_list(bad, params, message, n, opened, monkeypatch):
    """Work that is done, and lost, before the bad one among many is looked at."""
    llm = opened()
    monkeypatch.setattr(llm._model, "forward", None, raising=False)
    with pytest.raises(ValueError, match=message):
        llm.generate([[1, 2, 3], bad], replace(params, n=n))
