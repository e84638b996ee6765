"""Requests from many threads: told to those who wait, ended when asked, and nothing left behind."""

from __future__ import annotations

import functools
import multiprocessing
import queue
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import write_checkpoint
from scheduling import random_prompts, request
from serving import until

from engine import LLM, SamplingParams
from engine.serve.scheduler import Event
from engine.serve.service import Draining, QueueFull, Service

SECONDS = 60  # to wait for what comes at once, where nothing is broken
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path, threads=1, prefill_chunk=32)


class Listener:
    """Keeps the events of a request, for another thread to look at."""

    def __init__(self):
        self.events: list[Event] = []
        self.threads: set[str] = set()
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __call__(self, event: Event) -> None:
        self.threads.add(threading.current_thread().name)
        self._queue.put(event)

    def next(self) -> Event:
        self.events.append(self._queue.get(timeout=SECONDS))
        return self.events[-1]

    def end(self) -> str:
        """Why it ended; all its events have come then, and no other follows."""
        while not self.events or self.events[-1].finish_reason is None:
            self.next()
        return self.events[-1].finish_reason

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def is_silent(self) -> bool:
        return self._queue.empty()


@contextmanager
def serving(llm: LLM, **options):
    """A service that has to leave neither a block nor a thread behind."""
    service = Service(llm, **options)
    thread = service._thread
    try:
        yield service
    finally:
        service.close()
    assert not thread.is_alive()
    scheduler = service._scheduler
    scheduler.prefixes.check_integrity()
    assert scheduler.is_idle and scheduler.pool.n_used == scheduler.prefixes.n_blocks
    assert not service._listeners


class Gate:
    """Lets a model run steps when a test says so."""

    def __init__(self, model, monkeypatch):
        self._forward = model.forward
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(model, "forward", self._gated, raising=False)

    def _gated(self, runs, logits, *rest) -> None:
        self._arrived.release()
        assert self._go.acquire(timeout=SECONDS)
        self._forward(runs, logits, *rest)

    def wait(self) -> None:
        """Until a step has begun."""
        assert self._arrived.acquire(timeout=SECONDS)

    def step(self) -> None:
        """Let the step that has begun end, and wait for the next one to begin."""
        self._go.release()
        self.wait()

    def open(self) -> None:
        """For all steps to come."""
        self._go.release(1 << 20)


@pytest.fixture
def gate(llm, monkeypatch):
    return Gate(llm._model, monkeypatch)


# ---------------------------------------------------------------- answers


def test_answers(llm):
    """Events of another request, out of order, twice, or in the caller's thread."""
    prompts = random_prompts([20, 1, 40, 33])
    with serving(llm) as service:
        listeners = [Listener() for _ in prompts]
        tickets = [
            service.submit(ids, GREEDY, listener)
            for ids, listener in zip(prompts, listeners, strict=True)
        ]
        for ids, listener, ticket in zip(prompts, listeners, tickets, strict=True):
            assert listener.end() == "length"
            wanted = llm.generate(ids, GREEDY).token_ids
            assert listener.token_ids == ticket.completion.token_ids == wanted
            assert listener.threads == {"engine"} and listener.is_silent
        stats = service.stats()
        assert (stats.running, stats.queued, stats.finished) == (0, 0, {"length": 4})
        assert (stats.prompt_tokens_total, stats.generated_tokens_total) == (94, 48)
        assert stats.kv_blocks_used == stats.kv_blocks_cached == 1 + 2 + 2


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([300], GREEDY, "300"),
        ([1] * 1024, GREEDY, "1024 tokens long"),
        ([1], {"n": 3}, "SamplingParams"),
        ([1], replace(GREEDY, stop=("a",)), "tokenizer"),
        ([1], replace(GREEDY, stop_token_ids=(999,)), "999"),
    ],
)
def test_what_cannot_be_served(ids, params, message, llm):
    """A bad request found in the engine's thread, where it ends all others, or counted for ever."""
    with serving(llm) as service:
        with pytest.raises(ValueError, match=message):
            service.submit(ids, params, Listener())
        assert service.drain(0)


def test_samples_and_seeds(llm):
    """Samples that are all one; a seed that is lost between the threads."""
    (ids,) = random_prompts([10])
    hot = replace(GREEDY, temperature=1.0, seed=5)
    wanted = llm.generate(ids, replace(hot, n=2))
    with serving(llm) as service:
        listeners = [Listener() for _ in range(4)]
        for i, listener in enumerate(listeners):
            params = hot if i < 2 else replace(hot, seed=None)
            service.submit(ids, params, listener, sample=i % 2)
        found = [listener.end() and listener.token_ids for listener in listeners]
    assert found[:2] == [one.token_ids for one in wanted]
    assert len(set(map(tuple, found))) == 4


# ---------------------------------------------------------------- ended early


@pytest.mark.parametrize("when", ["new", "waiting", "reading", "generating"])
def test_cancel(when, llm, gate):
    """A request that goes on for a step more, or disturbs those beside it."""
    prompts = random_prompts([10, 100])
    with serving(llm, max_running=1 if when == "waiting" else 2) as service:
        other, gone = Listener(), Listener()
        service.submit(prompts[0], replace(GREEDY, max_tokens=30), other)
        gate.wait()
        ticket = service.submit(prompts[1], ENDLESS, gone)
        for _ in range({"new": 0, "waiting": 3, "reading": 2, "generating": 8}[when]):
            gate.step()
        n_rows = service._scheduler.running[-1].cache.seq_len(0)
        assert {"reading": 0 < n_rows < 100, "generating": n_rows > 100}.get(when, True)
        ticket.cancel()
        ticket.cancel()
        gate.step()
        n = len(ticket.completion.token_ids)
        assert gone.end() == "cancelled" and gone.is_silent
        assert not ticket._request.cache.block_table
        gate.open()
        assert other.end() == "length"
        assert other.token_ids == llm.generate(prompts[0], replace(GREEDY, max_tokens=30)).token_ids
        assert gone.token_ids == ticket.completion.token_ids and n == len(gone.token_ids)
        assert ticket.completion.finish_reason == "cancelled"
        ticket.cancel()  # it has ended
        assert service.stats().finished == {"cancelled": 1, "length": 1}


def test_cancel_by_the_listener(llm):
    """A lock that a listener waits for, while its own thread holds it."""
    (ids,) = random_prompts([10])
    with serving(llm) as service:
        listener, ready, tickets = Listener(), threading.Event(), []

        def listen(event: Event) -> None:
            listener(event)
            assert ready.wait(SECONDS)
            if len(event.token_ids):
                tickets[0].cancel()

        tickets.append(service.submit(ids, ENDLESS, listen))
        ready.set()
        assert listener.end() == "cancelled" and len(listener.token_ids) == 1


@pytest.mark.parametrize("deadline", [0.0, -1.0])
def test_deadline_that_is_over(deadline, llm):
    """A request that is run although nobody waits any more; 0 taken for no deadline."""
    (ids,) = random_prompts([10])
    with serving(llm) as service:
        listener = Listener()
        service.submit(ids, GREEDY, listener, deadline=deadline)
        assert listener.end() == "deadline" and listener.token_ids == []
        assert service.stats().prompt_tokens_total == 0


def test_deadline_while_it_runs(llm, gate):
    """A deadline that is looked at when a request begins only."""
    (ids,) = random_prompts([10])
    with serving(llm) as service:
        listener = Listener()
        ticket = service.submit(ids, ENDLESS, listener, deadline=time.monotonic() + 1000)
        gate.wait()
        gate.step()
        ticket._request.deadline = time.monotonic()
        gate.open()
        assert listener.end() == "deadline" and len(listener.token_ids) == 2


@pytest.mark.parametrize("at", [1, 3, 12])
def test_a_listener_that_raises(at, llm):
    """The engine's thread ends with one listener, and with it everyone's answers."""
    prompts = random_prompts([10, 12])
    with serving(llm) as service:
        calls = []

        def listen(event: Event) -> None:
            calls.append(event)
            if len(calls) >= at:
                raise RuntimeError("gone")

        other = Listener()
        service.submit(prompts[0], GREEDY, listen)
        service.submit(prompts[1], GREEDY, other)
        assert other.end() == "length"
        assert other.token_ids == llm.generate(prompts[1], GREEDY).token_ids
        assert service.drain(SECONDS)
        assert len(calls) == min(at + 1, 12)
        assert calls[-1].finish_reason == ("length" if at == 12 else "cancelled")


# ---------------------------------------------------------------- errors


def test_a_step_that_fails(llm, monkeypatch):
    """A thread that dies of an error, and a service that takes requests and answers none."""
    prompts, forward = random_prompts([10, 12]), llm._model.forward
    failed = threading.Event()

    def fails_once(runs, logits):
        if not failed.is_set():
            failed.set()
            raise MemoryError("no more")
        forward(runs, logits)

    monkeypatch.setattr(llm._model, "forward", fails_once, raising=False)
    with serving(llm) as service:
        first, second = Listener(), Listener()
        service.submit(prompts[0], GREEDY, first)
        assert first.end() == "error" and isinstance(first.events[-1].error, MemoryError)
        service.submit(prompts[1], GREEDY, second)
        assert second.end() == "length"


@pytest.mark.parametrize("where", ["_admit", "_plan", "_took"])
def test_an_error_of_the_scheduler_itself(where, llm, monkeypatch):
    """A bug ends the thread: requests, those to come among them, wait for ever."""
    prompts = random_prompts([10, 12, 14])
    with serving(llm) as service:
        done = Listener()
        service.submit(prompts[0], GREEDY, done)
        done.end()
        with monkeypatch.context() as patch:
            patch.setattr(service._scheduler, where, None)
            broken = [Listener() for _ in range(3)]
            for listener in broken:
                service.submit(prompts[1], GREEDY, listener)
            for listener in broken:
                assert listener.end() == "error"
                assert isinstance(listener.events[-1].error, TypeError)
        again = Listener()
        service.submit(prompts[2], GREEDY, again)
        assert again.end() == "length"
        assert again.token_ids == llm.generate(prompts[2], GREEDY).token_ids
        assert done.is_silent


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_an_error_in_the_rest_of_a_text(how, llm, gate, monkeypatch):
    """A thread that dies of the text of one that is ended, or takes all others along."""
    prompts = random_prompts([10, 12])
    with serving(llm) as service:
        broken, other = Listener(), Listener()
        deadline = time.monotonic() + 0.05 if how == "deadline" else None
        ticket = service.submit(prompts[0], ENDLESS, broken, deadline=deadline)
        service.submit(prompts[1], GREEDY, other)
        monkeypatch.setattr(ticket._request.reply, "flush", None)
        gate.wait()
        if how == "cancel":
            ticket.cancel()
        elif how == "deadline":
            until(lambda: time.monotonic() > deadline)
        gate.open()
        if how == "close":
            service.close()
        assert broken.end() == "error" and isinstance(broken.events[-1].error, TypeError)
        assert other.end() in ({"length", "cancelled"} if how == "close" else {"length"})
        assert broken.is_silent and other.is_silent


# ---------------------------------------------------------------- the queue, and the end


def test_the_queue_has_an_end(llm, gate):
    """A queue without a bound; one whose bound depends on how far the engine's thread has come."""
    (ids,) = random_prompts([10])
    with serving(llm, max_running=2, max_queued=3) as service:
        listeners = [Listener() for _ in range(5)]
        tickets = [service.submit(ids, GREEDY, one) for one in listeners]  # in one burst
        with pytest.raises(QueueFull, match="5 requests run or wait, and no more than 5"):
            service.submit(ids, GREEDY, Listener())
        gate.wait()
        with pytest.raises(QueueFull):
            service.submit(ids, GREEDY, Listener())
        stats = service.stats()
        assert stats.running + stats.queued == 5
        tickets[-1].cancel()
        gate.step()
        assert listeners[-1].end() == "cancelled"
        gate.open()
        assert [one.end() for one in listeners[:4]] == ["length"] * 4
        assert service.drain(SECONDS)


def test_drain(llm, gate):
    """Requests cut off by a shutdown that had time for them, or taken in the middle of it; a
    wait that ends before the last listener knows."""
    prompts, told = random_prompts([10, 12]), []

    def slow(event: Event) -> None:
        if event.finish_reason:
            release.wait(SECONDS)
            told.append(event)

    with serving(llm, max_running=1) as service:
        listener, release = Listener(), threading.Event()
        service.submit(prompts[0], GREEDY, listener)
        service.submit(prompts[1], GREEDY, slow)
        gate.wait()
        assert not service.drain(0)
        with pytest.raises(Draining):
            service.submit(prompts[0], GREEDY, Listener())
        gate.open()
        assert listener.end() == "length"
        while service.stats().finished["length"] < 2:  # the thread is with the last listener
            time.sleep(0.001)
        assert not service.drain(0) and not told
        release.set()
        assert service.drain(SECONDS) and told


def test_close_while_they_run(llm, gate):
    """Clients that wait for ever for a service that is gone; a thread that outlives it."""
    prompts = random_prompts([10, 12, 100])
    with serving(llm, max_running=2) as service:
        listeners = [Listener() for _ in range(3)]
        for ids, listener in zip(prompts, listeners, strict=True):
            service.submit(ids, ENDLESS, listener)
        gate.wait()
        gate.step()
        gate.open()
        service.close()
        assert [one.end() for one in listeners] == ["cancelled"] * 3
        assert all(one.is_silent for one in listeners)
        with pytest.raises(Draining):
            service.submit(prompts[0], GREEDY, Listener())
        service.close()  # again


def test_close_what_has_just_begun(llm):
    """A service that waits for its first request, and does not end."""
    before = set(threading.enumerate())
    for n in (0, 5):
        with serving(llm) as service:
            listeners = [Listener() for _ in range(n)]
            for listener in listeners:
                service.submit([1, 2, 3], ENDLESS, listener)
        assert [one.end() for one in listeners] == ["cancelled"] * n
    assert {one for one in set(threading.enumerate()) - before if one.name == "engine"} == set()


# ---------------------------------------------------------------- many at once


def test_all_ways_at_once(path):
    """Callers of one LLM that meet in its team, its scratch or its locks."""
    llm, prompts = LLM(path, threads=2), random_prompts([20, 1, 40, 33], 3)
    wanted = [llm.generate(ids, GREEDY).token_ids for ids in prompts]
    found = queue.SimpleQueue()

    def lists() -> None:
        found.put([one.token_ids for one in llm.generate(prompts, GREEDY)])

    def one_by_one() -> None:
        found.put([llm.generate(ids, GREEDY).token_ids for ids in prompts])

    with serving(llm) as service:

        def served() -> None:
            listeners = [Listener() for _ in prompts]
            for ids, listener in zip(prompts, listeners, strict=True):
                service.submit(ids, GREEDY, listener)
            found.put([one.end() and one.token_ids for one in listeners])

        ways = [lists, one_by_one, served] * 2
        threads = [threading.Thread(target=way, daemon=True) for way in ways for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert found.get(timeout=SECONDS) == wanted
        for thread in threads:
            thread.join(SECONDS)


def child(llm: LLM, prompts, out) -> None:
    lists = [one.token_ids for one in llm.generate(prompts, GREEDY)]
    with serving(llm) as service:
        listener = Listener()
        service.submit(prompts[0], GREEDY, listener)
        listener.end()
    out.put((lists, llm.generate(prompts[0], GREEDY).token_ids, listener.token_ids))


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_a_step(path, monkeypatch):
    """Locks that the engine's thread held, and threads that are not in the child."""
    llm, prompts = LLM(path, threads=2), random_prompts([20, 40])
    wanted = [llm.generate(ids, GREEDY).token_ids for ids in prompts]
    gate = Gate(llm._model, monkeypatch)
    with serving(llm) as service:
        try:
            for _ in range(2):
                service.submit(prompts[1], ENDLESS, Listener())
            gate.wait()
            context = multiprocessing.get_context("fork")
            out = context.Queue()
            monkeypatch.undo()  # the child's steps have no gate
            process = context.Process(target=child, args=(llm, prompts, out))
            process.start()
            assert out.get(timeout=SECONDS) == (wanted, wanted[0], wanted[0])
            process.join(SECONDS)
            assert process.exitcode == 0
        finally:
            gate.open()


# ---------------------------------------------------------------- anything


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "f16", "threads": 2}, {"lookup": 8}])
@pytest.mark.parametrize("seed", range(4))
def test_anything_that_comes(seed, settings, path):
    """Requests that arrive, share beginnings, are cancelled or late, in a pool for very few: each
    that finished is as alone, and the pool is whole after every step."""
    rng = np.random.default_rng(seed)
    small = {"kv_cache": "paged", "kv_max_blocks": int(rng.integers(6, 20)), "kv_block_rows": 8}
    chunk = int(rng.choice([1, 5, 16, 64]))
    llm = LLM(path, **({"threads": 1} | settings | small), prefill_chunk=chunk)
    solo = solo_of(path, tuple(settings.items()))
    scheduler = llm.new_scheduler(int(rng.integers(1, 7)))
    begin = rng.integers(0, 3, 60).tolist()
    under_way, finished, n_early = [], 0, 0
    for step in range(400):
        if step < 250 and rng.random() < 0.25:
            ids = begin[: rng.integers(0, 40)] + rng.integers(0, 300, rng.integers(1, 9)).tolist()
            room = llm._caches.pool.max_rows + 1 - len(ids)
            params = SamplingParams(
                max_tokens=int(rng.integers(0, max(min(room, 50), 1))),
                temperature=float(rng.integers(0, 2)),
                seed=int(rng.integers(0, 99)),
                ignore_eos=bool(rng.integers(0, 2)),
                repetition_penalty=float(rng.choice([1, 1.3])),
            )
            if len(ids) <= llm._caches.pool.max_rows:
                one = request(llm, scheduler, ids, params)
                scheduler.add(one)
                under_way.append((one, ids, params))
        if under_way and rng.random() < 0.05:
            one = under_way[rng.integers(len(under_way))][0]
            if rng.random() < 0.5:
                scheduler.end(one, "cancelled")
            else:
                one.deadline = 0.0
        events = scheduler.step()
        assert len({one for one, _ in events}) == len(events), "told twice in a step"
        scheduler.prefixes.check_integrity()
        assert all(not one.cache.block_table for one in scheduler.waiting)
        for one, ids, params in [entry for entry in under_way if entry[0].is_finished]:
            under_way.remove((one, ids, params))
            done, wanted = one.reply.completion, solo.generate(ids, params)
            if done.finish_reason in ("cancelled", "deadline"):
                n_early += 1
                assert done.token_ids == wanted.token_ids[: len(done.token_ids)]
            else:
                finished += 1
                assert done.token_ids == wanted.token_ids
                assert done.finish_reason == wanted.finish_reason
        if step >= 250 and scheduler.is_idle:
            break
        if step == 399:
            while not scheduler.is_idle:  # small chunks take long
                scheduler.step()
    assert finished > 5 and n_early
    assert scheduler.pool.n_used == scheduler.prefixes.n_blocks


@functools.cache
def solo_of(path, settings) -> LLM:
    return LLM(path, **({"threads": 1} | dict(settings)))
