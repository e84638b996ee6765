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
from traceback import clear_frames

import numpy as np

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
        self.number = 0  # in order of arrival
        self.has_run = False

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
    def is_reading(self) -> bool:
        """Whether ids of its prompt are to be run yet, or, again, some that it generated."""
        return self.decoding.n_missing > 1 or self.cache.seq_len(0) < self.n_prompt

    @property
    def is_finished(self) -> bool:
        return self.decoding.finish_reason is not None

    def run(self, most: int) -> Run | None:
        """Its next tokens, at most `most`, with room for their rows; None: there are no blocks.

        Guesses are worth a block that is free, and nobody's who would have to give it back.
        """
        run = self.decoding.next_run(most)
        try:
            self.cache.reserve(len(run.ids))
        except PoolFull:
            return self.run(1) if run.n_logits > 1 else None
        return run

    def take(self, logits) -> Event:
        """What the logits of its run bring."""
        tokens, reply = self.decoding.take(logits), self.reply
        pieces = reply.push(tokens) if reply.has_text else []
        tokens = tokens[: len(tokens) - reply.n_dropped]
        if self.is_finished:
            pieces += reply.flush()
        logprobs = (self.decoding.logprobs or [])[-len(tokens) :] if tokens else []
        return Event(pieces, tokens, logprobs, self.decoding.finish_reason)

    def end(self, reason: str) -> Event:
        """It does not go on, for a reason of its own."""
        pieces = self.reply.flush()  # which may find a stop in the rest
        self.decoding.finish_reason = reason
        return Event(pieces, finish_reason=reason)


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
        self._logits = np.empty((0, 0), np.float32)  # room for a step's

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: Request) -> None:
        """It waits from now on. Its session is of this pool, and has no rows yet."""
        self._n_added += 1
        request.number = self._n_added
        self.waiting.append(request)

    def end(self, request: Request, reason: str) -> Event | None:
        """End a request now, and give its blocks back; None if it has ended already."""
        if request.is_finished:
            return None
        self._drop(request)
        try:
            return request.end(reason)
        except Exception as e:  # in what text it held
            return self.fail(request, e)

    def fail(self, request: Request, error: Exception) -> Event:
        """As `end`, but for an error, also of one that has ended. What text it held is lost."""
        self._drop(request)
        request.decoding.finish_reason = "error"
        return Event([], finish_reason="error", error=error)

    def step(self) -> Events:
        """Run one step of the model: what it brought to whom. Blocks of ended ones are given back.

        An exception of the model ends every request of the step; one in a request's own part, that
        request.
        """
        events = self._ended()
        self._admit()
        taken, failed = self._reserved(self._plan())
        events += failed
        if not taken:
            return events
        taken.sort(key=lambda pair: not pair[1].is_prompt)  # prompts first
        runs = [run for _, run in taken]
        try:
            n = sum(run.n_logits for run in runs)
            if len(self._logits) < n:
                self._logits = self.model.new_logits(n)
            logits = self._logits[:n]
            self.model.forward(runs, logits)
        except Exception as e:
            return events + [(request, self.fail(request, e)) for request, _ in taken]
        given = 0
        for request, run in taken:
            known = logits[given : given + run.n_logits]
            given += run.n_logits
            try:
                event = self._took(request, run, known)
            except Exception as e:
                event = self.fail(request, e)
            events.append((request, event))
        return events

    def _ended(self) -> Events:
        """Those who need no step, or have no time for one."""
        now, events = time.monotonic(), []
        for request in (*self.running, *self.waiting):
            if request.is_finished:  # nothing was asked of it
                self._drop(request)
                events.append((request, Event([], finish_reason=request.decoding.finish_reason)))
            elif request.deadline is not None and request.deadline <= now:
                events.append((request, self.end(request, "deadline")))
        return events

    def _took(self, request: Request, run: Run, logits) -> Event:
        """What a run brought its request. Rows of a prompt are known to others from now on."""
        if run.is_prompt:
            self.n_prompt_tokens += len(run.ids)
            n_rows = min(request.cache.seq_len(0), request.n_prompt)
            self.prefixes.insert(request.ids, request.cache, n_rows)
        event = request.take(logits)
        self.n_generated_tokens += len(event.token_ids)
        if request.is_finished:
            self._drop(request)
        return event

    def _admit(self) -> None:
        """Let those who wait run, in order of arrival, while there are places and blocks.

        Who had better wait for rows that another computes lets those behind go first.
        """
        for request in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            if any(self._computes_for(other, request) for other in self.running):
                continue
            cached = self.prefixes.attach(request.cache, request.ids[: request.n_prompt])
            owed = sum(self._n_owed(other) for other in (*self.running, request))
            if self.running and owed > self.pool.n_available:
                request.cache.free()
                return
            self.n_cached_tokens += cached
            if not request.has_run:  # later its own rows may be among them
                request.decoding.metrics.cached_tokens = cached
            request.has_run = True
            self.waiting.remove(request)
            self.running.append(request)

    def _n_owed(self, request: Request) -> int:
        """Blocks that it lacks until its next token is generated."""
        needed = -(-(len(request.ids) + 1) // self.pool.block_rows)
        return max(needed - len(request.cache.block_table), 0)

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
        reading = [r for r in self.running if r.is_reading]
        generating = [r for r in self.running if not r.is_reading]
        each = max(1, GUESSING // max(len(generating), 1)) if not reading else 1
        each = min(each, max(self.model.max_tokens // max(len(generating), 1), 1))
        planned = [(request, each) for request in generating]
        left = self.model.max_tokens - each * len(generating)
        if generating:
            left = min(left, MIXED_TOKENS)
        for request, share in self._shares(reading, left):
            n = min(share, left, request.decoding.n_missing)
            if n:
                planned.append((request, n))
                left -= n
        return planned

    def _shares(self, reading: list[Request], left: int) -> list[tuple[Request, int]]:
        """How much of `left` tokens each of those may take that read a prompt, the first first.

        The shortest goes first, and makes the step no longer than it needs. But the oldest always
        has a share, of up to half of the step: short ones that keep coming do not stop it.
        """
        by_length = sorted(reading, key=lambda r: (r.decoding.n_missing, r.number))
        if len(reading) < 2:
            return [(request, left) for request in reading]
        share = max(by_length[0].decoding.n_missing, LEAST_SHARE)
        oldest = min(reading, key=lambda r: r.number)
        if oldest is by_length[0]:
            return [(request, share) for request in by_length]
        by_length.remove(oldest)
        half = min(share, -(-left // 2))
        return [(oldest, half)] + [(request, share) for request in by_length]

    def _reserved(
        self, planned: list[tuple[Request, int]]
    ) -> tuple[list[tuple[Request, Run]], Events]:
        """The runs that there are blocks for. Where there are too few, the youngest makes room."""
        taken: list[tuple[Request, Run]] = []
        failed: Events = []
        for request, most in planned:
            while request in self.running:
                try:
                    run = request.run(most)
                except Exception as e:  # such as memory that the system refused
                    failed.append((request, self.fail(request, e)))
                    break
                if run:
                    taken.append((request, run))
                    break
                self._preempt(max(self.running, key=lambda r: r.number))
        return [(request, run) for request, run in taken if request in self.running], failed

    def _preempt(self, request: Request) -> None:
        """Give its blocks back, and let it wait: its rows are computed again later."""
        self.n_preemptions += 1
        self._drop(request)
        place = sum(other.number < request.number for other in self.waiting)
        self.waiting.insert(place, request)

    def _drop(self, request: Request) -> None:
        for some in (self.running, self.waiting):
            if request in some:
                some.remove(request)
        request.cache.free()


def run_all(scheduler: Scheduler, requests: Sequence[Request]) -> list[Completion]:
    """Run `requests` to their end, or until one of them fails: raises what it raised, and all have
    ended."""
    for request in requests:
        scheduler.add(request)
    while not scheduler.is_idle:
        error = next((event.error for _, event in scheduler.step() if event.error), None)
        if error:
            for request in requests:
                scheduler.end(request, "cancelled")
            clear_frames(error.__traceback__)  # they hold the pool, and this error
            try:
                raise error
            finally:
                del error
    return [request.reply.completion for request in requests]
