"""Service: requests from any thread, run by one thread that owns the engine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.llm import LLM
from engine.reply import Completion
from engine.sampler import SamplingParams
from engine.serve.scheduler import Event, Events, Request
from engine.thinking import ThinkingSplitter

Listener = Callable[[Event], None]


class QueueFull(Exception):
    """As many requests wait as may: try again later."""


class Draining(Exception):
    """The service is about to end, and takes no more requests."""


@dataclass(frozen=True)
class Stats:
    """Figures of now, and counts since the start."""

    running: int = 0
    queued: int = 0
    kv_blocks_used: int = 0  # those of known prefixes among them
    kv_blocks_cached: int = 0  # of known prefixes
    kv_blocks_total: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_total: int = 0  # that were computed
    generated_tokens_total: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason


@dataclass(frozen=True)
class Ticket:
    """A request that was taken."""

    _service: Service
    _request: Request

    @property
    def completion(self) -> Completion:
        """What has come so far."""
        return self._request.reply.completion

    def cancel(self) -> None:
        """End it within one step; from any thread, also when it has ended."""
        self._service._cancel(self._request)


class Service:
    """Runs requests of one LLM together. Safe to use from any thread."""

    def __init__(self, llm: LLM, *, max_running: int = 16, max_queued: int = 64):
        """At most `max_running` requests in a step, and `max_queued` more that wait."""
        self.llm, self.max_queued = llm, max_queued
        self._scheduler = llm.new_scheduler(max_running)
        self._listeners: dict[Request, Listener] = {}
        self._new: list[Request] = []
        self._cancelled: list[Request] = []
        self._finished: Counter[str] = Counter()
        self._draining = self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        ids: list[int],
        params: SamplingParams,
        listener: Listener,
        *,
        splitter: ThinkingSplitter | None = None,
        deadline: float | None = None,
        sample: int = 0,
    ) -> Ticket:
        """Take a request. `listener` is told every Event of it, in the engine's thread.

        deadline: of time.monotonic. sample: which of the samples of params.seed; params.n is not
        looked at. ValueError for what cannot be served; QueueFull; Draining.
        """
        requests, pool = self.llm.requests, self._scheduler.pool
        params = requests.params_of(params)
        begun = requests.in_pool(pool, requests.ids_of(ids), params, splitter, sample)
        request = Request(*begun, deadline)
        with self._change:
            if self._draining:
                raise Draining("the server is shutting down")
            # not by the scheduler's lists: how many of a burst fit in must not depend on its pace
            n = len(self._listeners)
            most = self._scheduler.max_running + self.max_queued
            if n >= most:
                raise QueueFull(f"{n} requests run or wait, and no more than {most} may")
            self._listeners[request] = listener
            self._new.append(request)
            self._change.notify_all()
        return Ticket(self, request)

    def stats(self) -> Stats:
        s = self._scheduler
        with self._change:
            return Stats(
                running=len(s.running),
                queued=len(self._new) + len(s.waiting),
                kv_blocks_used=s.pool.n_used,
                kv_blocks_cached=s.prefixes.n_blocks,
                kv_blocks_total=s.pool.max_blocks,
                prefix_hit_tokens=s.n_cached_tokens,
                prompt_tokens_total=s.n_prompt_tokens,
                generated_tokens_total=s.n_generated_tokens,
                preemptions=s.n_preemptions,
                finished=dict(self._finished),
            )

    def drain(self, timeout: float) -> bool:
        """Take no more requests, and wait for those taken: whether they ended in `timeout` s."""
        with self._change:
            self._draining = True
            return self._change.wait_for(lambda: not self._listeners, timeout)

    def close(self) -> None:
        """End every request, and the thread."""
        with self._change:
            self._draining = self._closed = True
            self._change.notify_all()
        self._thread.join()

    def _cancel(self, request: Request) -> None:
        with self._change:
            self._cancelled.append(request)
            self._change.notify_all()

    def _serve(self) -> None:
        while self._round():
            pass

    def _round(self) -> bool:
        """Wait for work, and do a turn of it; False: that was the last."""
        with self._change:
            self._change.wait_for(self._has_work)
            new, self._new = self._new, []
            ended, self._cancelled = self._cancelled, []
            closed = self._closed
        try:
            events = self._turn(new, ended, closed)
        except Exception as e:  # of the engine itself: nobody is left to wait for ever
            with self._change:
                begun = self._listeners.keys() - set(self._new)
            events = [(request, self._scheduler.fail(request, e)) for request in begun]
        for request, event in events:
            self._tell(request, event)
        return not closed

    def _turn(self, new: list[Request], ended: list[Request], closed: bool) -> Events:
        """Let requests in, end some, who are told so, and run a step; or `closed`: end all."""
        scheduler = self._scheduler
        for request in new:
            scheduler.add(request)
        if closed:
            ended = [*scheduler.running, *scheduler.waiting]
        for request in ended:
            self._tell(request, scheduler.end(request, "cancelled"))
        return [] if closed else scheduler.step()

    def _has_work(self) -> bool:
        return bool(self._new or self._cancelled or self._closed) or not self._scheduler.is_idle

    def _tell(self, request: Request, event: Event | None) -> None:
        """Let the listener know; None: the request had ended, and it knows."""
        if event is None:
            return
        ended = event.finish_reason is not None
        if ended:
            with self._change:
                self._finished[event.finish_reason] += 1
        try:
            self._listeners[request](event)
        except Exception:  # whoever listened has gone: nobody waits for the rest
            if not ended:
                self._tell(request, self._scheduler.end(request, "cancelled"))
        if ended:  # and the listener knows: whoever drains may leave now
            with self._change:
                del self._listeners[request]
                self._change.notify_all()
