"""engine/serve/scheduler.py: requests that run together get what each gets alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
from checkpoints import write_checkpoint

from engine import LLM, SamplingParams
from engine.cache import BlockPool
from engine.serve.scheduler import Request, Scheduler, run_all

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 300, n).tolist() for n in (1, 16, 17, 32, 40, 70)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


def params(i: int, n: int = 24) -> SamplingParams:
    """Every other request draws, each with a seed of its own; logprobs show the last bits."""
    kind = {"temperature": 0} if i % 2 else {"temperature": 1.0, "presence_penalty": 0.5}
    return SamplingParams(max_tokens=n, seed=i, ignore_eos=True, logprobs=3, **kind)


def scheduler_of(llm: LLM, max_blocks: int = 100, max_running: int = 16) -> Scheduler:
    c = llm.config
    pool = BlockPool(c.n_layers, c.kv_dim, 16, max_blocks=max_blocks, dtype=llm._model.kv_dtype)
    return Scheduler(llm._model, pool, max_running)


def request(llm: LLM, scheduler: Scheduler, ids, asked, **more) -> Request:
    return Request(*llm.requests.in_pool(scheduler.pool, ids, asked), **more)


def check(llm: LLM, scheduler: Scheduler, prompts) -> None:
    """All at once give what each gives alone, in ids and in the last bits of their logprobs."""
    asked = [params(i) for i in range(len(prompts))]
    some = [request(llm, scheduler, ids, p) for ids, p in zip(prompts, asked, strict=True)]
    for done, ids, p in zip(run_all(scheduler, some), prompts, asked, strict=True):
        alone = llm.generate(ids, p)
        assert done.token_ids == alone.token_ids and done.finish_reason == alone.finish_reason
        assert done.logprobs == alone.logprobs
    assert scheduler.pool.n_used == scheduler.prefixes.n_blocks
    scheduler.prefixes.check_integrity()


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("chunk", "lookup"), [(512, 0), (16, 0), (512, 6)])
def test_together_as_alone(path, threads, kv_dtype, chunk, lookup):
    """Bits that depend on the company, the slot, the chunk or the guesses; a shared generator."""
    llm = LLM(path, threads=threads, kv_dtype=kv_dtype, prefill_chunk=chunk, lookup=lookup)
    check(llm, scheduler_of(llm), PROMPTS)
    check(llm, scheduler_of(llm, max_running=2), PROMPTS[::-1])


@pytest.mark.parametrize("lookup", [0, 6])
def test_the_youngest_makes_room(path, lookup):
    """A request that was put off and goes on askew, or never; blocks that are lost meanwhile."""
    llm = LLM(path, lookup=lookup)
    scheduler = scheduler_of(llm, max_blocks=8)
    check(llm, scheduler, [PROMPTS[i] for i in (4, 5, 3, 4, 2)])
    assert scheduler.n_preemptions > 0


def test_a_known_prefix(path):
    """A prefix that is skipped but not read; a prompt of whole blocks that leaves no token."""
    llm = LLM(path)
    scheduler = scheduler_of(llm)
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[5], PROMPTS[5] + PROMPTS[4]]
    check(llm, scheduler, prompts)
    before = scheduler.n_cached_tokens
    check(llm, scheduler, prompts)
    assert scheduler.n_cached_tokens - before == 0 + 16 + 64 + 96


def test_samples_share_a_prompt(path):
    """A prompt that is read once for every sample; samples that are all the same."""
    llm = LLM(path)
    asked = SamplingParams(max_tokens=9, n=3, seed=5, ignore_eos=True)
    found = llm.generate(PROMPTS[5], asked)
    assert [done.metrics.cached_tokens for done in found] == [0, 64, 64]
    assert len({tuple(done.token_ids) for done in found}) == 3
    again = llm.generate([PROMPTS[4], PROMPTS[5]], asked)[1]
    assert [a.token_ids for a in again] == [b.token_ids for b in found]


def test_streams_flow_while_a_prompt_is_read(path):
    """Those that generate wait for a long prompt; a short prompt waits for all of a long one."""
    llm = LLM(path, prefill_chunk=32)
    scheduler = scheduler_of(llm)
    stream = request(llm, scheduler, PROMPTS[0], params(1, 100))
    scheduler.add(stream)
    scheduler.step()
    long = request(llm, scheduler, RNG.integers(0, 300, 300).tolist(), params(1))
    scheduler.add(long)
    scheduler.step()
    short = request(llm, scheduler, PROMPTS[2], params(1))
    scheduler.add(short)
    for n in range(3, 6):
        scheduler.step()
        assert len(stream.decoding.token_ids) == n
    assert short.decoding.token_ids and not long.decoding.token_ids


def test_ended_at_any_time(path):
    """Blocks of a request that was ended stay taken; one that waits is run all the same."""
    llm = LLM(path)
    scheduler = scheduler_of(llm, max_running=2)
    some = [request(llm, scheduler, ids, params(1, 50)) for ids in PROMPTS[2:]]
    for one in some:
        scheduler.add(one)
    for _ in range(3):
        scheduler.step()
    for one in some[::2]:  # one that runs, one that waits
        assert scheduler.end(one, "cancelled").finish_reason == "cancelled"
        assert scheduler.end(one, "cancelled") is None
    some[3].deadline = time.monotonic()
    while not scheduler.is_idle:
        scheduler.step()
    reasons = [one.decoding.finish_reason for one in some]
    assert reasons == ["cancelled", "length", "cancelled", "deadline"]
    assert scheduler.pool.n_used == scheduler.prefixes.n_blocks
    scheduler.prefixes.check_integrity()


def test_a_model_that_fails(path, monkeypatch):
    """One step that fails, and no request is served after it, or its blocks are gone."""
    llm = LLM(path)
    scheduler = scheduler_of(llm)
    some = [request(llm, scheduler, ids, params(1)) for ids in PROMPTS]
    with monkeypatch.context() as patch:
        patch.setattr(llm._model, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("none")))
        with pytest.raises(MemoryError, match="none"):
            run_all(scheduler, some)
    assert scheduler.pool.n_used == 0
    check(llm, scheduler, PROMPTS)
