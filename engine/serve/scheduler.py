"""Continuous batching: which requests run in the next step of the model, and with how many tokens.

A step takes one token of every request that generates, and pieces of prompts beside them (Yu et al.
2022; Agrawal et al. 2023). Requests come in, end and are cancelled between steps. A request's
tokens are the same alone and in any company, so who runs when is a question of time only.
One thread at a time may use a scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache import BlockPool, PoolFull, PrefixCache
from engine.decoding import Decoding
from engine.kernels.runs import Run
from engine.reply import Completion, Reply

MIXED_TOKENS = 128  # of prompts in a step in which others generate: about 0.3 s at 0.6B
LEAST_SHARE = 32  # of a prompt in a step, where several are under way
GUESSING = 8  # tokens of a step among which guesses are worth their arithmetic


@dataclass(frozen=True)
class Event:
    """What one step brought a request."""

    pieces: list[tuple[str, str]]  # ("answer" | "reasoning", text)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)  # one a token, where they were asked for
    finish_reason: str | None = None  # None: it goes on. "stop", "length", or why it was ended
    error: Exception | None = None


class Request:
    """One request among others, waiting or running."""

    def __init__(self, decoding: Decoding, reply: Reply, deadline: float | None = None):
        """`deadline`, of time.monotonic: it is ended then."""
        self.decoding, self.reply, self.deadline = decoding, reply, deadline
        self.error: Exception | None = None
        self.number = 0  # in order of arrival

    @property
    def ids(self) -> list[int]:
        return self.decoding.session.ids

    @property
    def cache(self):
        return self.decoding.session.cache

    @property
    def n_prompt(self) -> int:
        return self.decoding.session.n_prompt

    @property
    def is_finished(self) -> bool:
        return self.decoding.finish_reason is not None

    def take(self, logits) -> Event:
        """What the logits of its run bring."""
        tokens, reply = self.decoding.take(logits), self.reply
        pieces = reply.push(tokens) if reply.has_text else []
        tokens = tokens[: len(tokens) - reply.n_dropped]
        if self.is_finished:
            pieces += reply.flush()
        logprobs = (self.decoding.logprobs or [])[-len(tokens) :] if tokens else []
        return Event(pieces, tokens, logprobs, self.decoding.finish_reason)

    def end(self, reason: str, error: Exception | None = None) -> Event:
        """It does not go on, for a reason of its own."""
        self.error, self.decoding.finish_reason = error, reason
        return Event(self.reply.flush(), [], [], reason, error)


Events = list[tuple[Request, Event]]


class Scheduler:
    """Requests of one model, whose K and V are in blocks of one pool that nobody else uses."""

    def __init__(self, model, pool: BlockPool, max_running: int = 16):
        """At most `max_running` requests in a step; the others wait, in order of arrival."""
        self.model, self.pool, self.prefixes = model, pool, PrefixCache(pool)
        self.max_running = min(max_running, model.max_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.n_preemptions = 0
        self.n_prompt_tokens = self.n_cached_tokens = self.n_generated_tokens = 0
        self._n_added = 0

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: Request) -> None:
        """It waits from now on. Its session is of this pool, and has no rows yet."""
        self._n_added += 1
        request.number = self._n_added
        self.waiting.append(request)

    def end(self, request: Request, reason: str, error: Exception | None = None) -> Event | None:
        """End a request now, and give its blocks back; None if it has ended already."""
        if request.is_finished:
            return None
        self._drop(request)
        return request.end(reason, error)

    def step(self) -> Events:
        """Run one step of the model: what it brought to whom. Blocks of ended ones are given back.

        An exception of the model ends every request of the step; one in a request's own part, that
        request.
        """
        events = self._overdue()
        for request in [r for r in self.waiting if r.is_finished]:  # nothing was asked of them
            self._drop(request)
            events.append((request, Event([], finish_reason=request.decoding.finish_reason)))
        self._admit()
        taken = self._reserved(self._plan())
        if not taken:
            return events
        taken.sort(key=lambda pair: not pair[1].is_prompt)  # prompts first
        runs = [run for _, run in taken]
        logits = self.model.new_logits(sum(run.n_logits for run in runs))
        try:
            self.model.forward(runs, logits)
        except Exception as e:
            return events + [(r, self.end(r, "error", e)) for r, _ in taken]
        self.n_prompt_tokens += sum(len(run.ids) for run in runs if run.is_prompt)
        given = 0
        for request, run in taken:
            known = logits[given : given + run.n_logits]
            given += run.n_logits
            if run.is_prompt:
                n_rows = min(request.cache.seq_len(0), request.n_prompt)
                self.prefixes.insert(request.ids, request.cache, n_rows)
            try:
                event = request.take(known)
            except Exception as e:
                events.append((request, self.end(request, "error", e)))
                continue
            self.n_generated_tokens += len(event.token_ids)
            if request.is_finished:
                self._drop(request)
            events.append((request, event))
        return events

    def _overdue(self) -> Events:
        now = time.monotonic()
        late = [r for r in (*self.running, *self.waiting) if r.deadline and r.deadline <= now]
        return [(request, self.end(request, "deadline")) for request in late]

    def _admit(self) -> None:
        """Let those who wait run, in order of arrival, while there are places and blocks."""
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            cache, ids = request.cache, request.ids
            if any(self._computes_for(other, request) for other in self.running):
                return
            first_time = not request.decoding.token_ids
            cached = self.prefixes.attach(cache, ids[: request.n_prompt])
            needed = -(-(len(ids) + 1) // self.pool.block_rows) - len(cache.block_table)
            if self.running and needed > self.pool.n_available:
                cache.free()
                return
            self.n_cached_tokens += cached
            if first_time:
                request.decoding.metrics.cached_tokens = cached
            self.running.append(self.waiting.popleft())

    def _computes_for(self, other: Request, request: Request) -> bool:
        """Whether `other` is computing rows that `request` had better wait for: half of what it
        needs, and a block at least."""
        done = other.cache.seq_len(0)
        if done >= other.n_prompt:
            return False
        pairs = zip(other.ids[: other.n_prompt], request.ids[: request.n_prompt - 1], strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if common is None:
            common = min(other.n_prompt, request.n_prompt - 1)
        shared = common // self.pool.block_rows * self.pool.block_rows
        return shared - done >= max(self.pool.block_rows, (request.n_prompt - done) // 2)

    def _plan(self) -> list[tuple[Request, int]]:
        """Who runs in the next step, and with how many tokens at most."""
        generating = [r for r in self.running if r.decoding.n_missing == 1]
        reading = [r for r in self.running if r.decoding.n_missing > 1]
        each = max(1, GUESSING // max(len(generating), 1)) if not reading else 1
        each = min(each, max(self.model.max_tokens // max(len(generating), 1), 1))
        planned = [(request, each) for request in generating]
        left = self.model.max_tokens - each * len(generating)
        if generating:
            left = min(left, MIXED_TOKENS)
        # Several prompts go on side by side, so that a short one does not wait for a long one.
        shortest = min((r.decoding.n_missing for r in reading), default=0)
        even = max(left // max(len(reading), 1), 1)
        share = left if len(reading) == 1 else min(max(shortest, LEAST_SHARE), even)
        for request in reading:
            n = min(share, left, request.decoding.n_missing)
            if n:
                planned.append((request, n))
                left -= n
        return planned

    def _reserved(self, planned: list[tuple[Request, int]]) -> list[tuple[Request, Run]]:
        """The runs that there are blocks for. Where there are too few, the youngest makes room."""
        taken: list[tuple[Request, Run]] = []
        for request, most in planned:
            while request in self.running:
                run = request.decoding.next_run(most)
                try:
                    request.cache.reserve(len(run.ids))
                except PoolFull:
                    self._preempt(max(self.running, key=lambda r: r.number))
                else:
                    taken.append((request, run))
                    break
        return [(request, run) for request, run in taken if request in self.running]

    def _preempt(self, request: Request) -> None:
        """Give its blocks back, and let it wait: its rows are computed again later."""
        self.n_preemptions += 1
        self._drop(request)
        self.waiting.appendleft(request)

    def _drop(self, request: Request) -> None:
        for some in (self.running, self.waiting):
            if request in some:
                some.remove(request)
        request.cache.free()


def run_all(scheduler: Scheduler, requests: Sequence[Request]) -> list[Completion]:
    """Run `requests` to their end; raises what one of them raised."""
    for request in requests:
        scheduler.add(request)
    while not scheduler.is_idle:
        scheduler.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.reply.completion for request in requests]
