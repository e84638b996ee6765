"""Scheduler: requests from any thread, served one after the other by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.chat import ThinkingSplitter
from engine.generate import Completion
from engine.llm import LLM
from engine.sampler import SamplingParams


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True)
class Event:
    """What one step brought a request; told in the engine's thread."""

    pieces: list[tuple[str, str]]  # ("answer" | "reasoning", text): text to send now
    token_ids: list[int]  # tokens that came
    logprobs: list[tuple[float, list[tuple[int, float]]]]  # of each, where they were asked for
    finish_reason: str | None  # "stop" | "length" | "cancelled" | "deadline" | "error"
    error: Exception | None = None


@dataclass(frozen=True)
class Stats:
    """Figures of now, and counts since the start."""

    running: int = 0
    queued: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason


class Request:
    """One sample under way."""

    def __init__(self, generation, listener: Callable[[Event], None], deadline: float | None):
        self.generation, self.listener, self.deadline = generation, listener, deadline
        self.cancelled = False

    @property
    def completion(self) -> Completion:
        return self.generation.completion

    def cancel(self) -> None:
        """From any thread; within one step."""
        self.cancelled = True


class Scheduler:
    """Serial: one request at a time."""

    def __init__(
        self, llm: LLM, *, max_running: int = 16, max_queued: int = 64, step_tokens: int = 512
    ):
        self.llm, self.max_queued = llm, max_queued
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._change = threading.Condition()
        self._closed = self._drained = False
        self._finished: Counter[str] = Counter()
        self._n_prompt = self._n_generated = self._n_cached = 0
        self._session = llm.new_session()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        ids: list[int],
        params: SamplingParams,
        listener: Callable[[Event], None],
        *,
        splitter: ThinkingSplitter | None = None,
        deadline: float | None = None,
        sample: int = 0,
    ) -> Request:
        seed = None if params.seed is None else params.seed + 7919 * sample
        params = replace(params, n=1, seed=seed)
        self.llm._limit(len(ids), params)
        generation = self.llm._start(ids, params, None, False, splitter)
        request = Request(generation, listener, deadline)
        with self._change:
            if self._closed or self._drained or len(self._waiting) >= self.max_queued:
                raise QueueFull(f"{len(self._waiting)} requests wait; that is the most")
            self._waiting.append(request)
            self._change.notify_all()
        return request

    def stats(self) -> Stats:
        with self._change:
            return Stats(
                running=int(self._running is not None),
                queued=len(self._waiting),
                prefix_hit_tokens=self._n_cached,
                prompt_tokens_total=self._n_prompt,
                generated_tokens_total=self._n_generated,
                finished=dict(self._finished),
            )

    def drain(self, timeout: float) -> None:
        with self._change:
            self._drained = True
            self._change.wait_for(lambda: not self._waiting and self._running is None, timeout)

    def close(self) -> None:
        with self._change:
            self._closed = True
            for request in [*self._waiting, self._running]:
                if request:
                    request.cancel()
            self._change.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._waiting, 0.05)
                if not self._waiting:
                    if self._closed:
                        return
                    continue
                self._running = request = self._waiting.popleft()
            try:
                self._run(request)
            except Exception as e:
                self._tell(request, Event([], [], [], "error", e))
            with self._change:
                self._running = None
                self._change.notify_all()

    def _tell(self, request: Request, event: Event) -> None:
        if event.finish_reason:
            with self._change:
                self._finished[event.finish_reason] += 1
        request.listener(event)

    def _over(self, request: Request) -> str | None:
        if request.cancelled:
            return "cancelled"
        if request.deadline is not None and time.monotonic() > request.deadline:
            return "deadline"
        return None

    def _run(self, request: Request) -> None:
        if reason := self._over(request):
            return self._tell(request, Event([], [], [], reason))
        gen, d = request.generation, request.generation._decoding
        ids = list(gen.session.ids)
        self._session.turn_to(ids)
        gen.session = d.session = self._session
        d._claim = self._session.claim()
        d.metrics.cached_tokens = self._session.cache.seq_len(0)
        self._n_prompt += len(ids) - d.metrics.cached_tokens
        self._n_cached += d.metrics.cached_tokens
        stopped = False
        for token in gen._tokens:
            self._n_generated += 1
            pieces = list(gen._kept(gen._split(gen._before_stop(gen._stream.push(token)))))
            lps = [] if d.logprobs is None else d.logprobs[-1:]
            stopped = gen._stops.found is not None
            if reason := self._over(request):
                gen._tokens.close()
                self._tell(request, Event(pieces, [token], lps, reason))
                break
            if stopped or d.finish_reason:
                d.finish_reason = "stop" if stopped else d.finish_reason
                rest = gen._before_stop(gen._stream.flush()) + gen._stops.flush()
                pieces += gen._kept(gen._split(rest, True))
                gen._tokens.close()
                self._tell(request, Event(pieces, [token], lps, d.finish_reason))
                break
            self._tell(request, Event(pieces, [token], lps, None))
        with self._session._lock:
            self._session.cache.truncate(min(self._session.cache.seq_len(0), len(ids)))
            self._session.ids = ids
