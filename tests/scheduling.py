"""Requests run alone and together, with all that a test of the scheduler wants to see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from engine import LLM, SamplingParams
from engine.reply import Completion
from engine.serve.scheduler import Event, Request, Scheduler


@dataclass
class Recorder:
    """What a model was asked to run, and the logits it gave."""

    steps: list[list[tuple[object, int, int]]] = field(default_factory=list)
    logits: dict[object, dict[int, np.ndarray]] = field(default_factory=dict)

    def of(self, cache, n_prompt: int, n_tokens: int) -> np.ndarray:
        """(n_tokens, vocab_size): the last logits that were given before each token."""
        found = self.logits[cache]
        return np.stack([found[n_prompt - 1 + i] for i in range(n_tokens)])

    @property
    def sizes(self) -> list[int]:
        """How many tokens each forward took."""
        return [sum(n for _, _, n in step) for step in self.steps]


@contextmanager
def recorded(model) -> Iterator[Recorder]:
    """Inside, each forward of the model leaves (cache, first position, tokens) of its runs."""
    recorder, forward = Recorder(), model.forward

    def recording(runs, logits, *rest):
        starts = [run.cache.seq_len(0) for run in runs]
        forward(runs, logits, *rest)
        given = 0
        recorder.steps.append([])
        for run, start in zip(runs, starts, strict=True):
            n = len(run.ids)
            recorder.steps[-1].append((run.cache, start, n))
            rows = recorder.logits.setdefault(run.cache, {})
            for i in range(run.n_logits):
                rows[start + n - run.n_logits + i] = logits[given + i].copy()
            given += run.n_logits

    model.forward = recording
    try:
        yield recorder
    finally:
        del model.forward


def alone(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[Completion, np.ndarray]:
    """A request run by itself, and the logits before each of its tokens."""
    with recorded(llm._model) as recorder:
        done = llm.generate(ids, params)
    (cache,) = recorder.logits
    return done, recorder.of(cache, len(ids), len(done.token_ids))


def request(
    llm: LLM, scheduler: Scheduler, ids: list[int], params: SamplingParams, splitter=None, **more
) -> Request:
    """One for this scheduler; `more` goes to Request."""
    requests = llm.requests
    params = requests.params_of(params)
    begun = requests.in_pool(scheduler.pool, requests.ids_of(ids), params, splitter)
    return Request(*begun, **more)


def run(scheduler: Scheduler, most: int = 5000) -> list[list[tuple[Request, Event]]]:
    """Step until all is done, at most `most` times: the events of each step."""
    events = []
    while not scheduler.is_idle:
        assert len(events) < most, "it does not end"
        events.append(scheduler.step())
    check_given_back(scheduler)
    return events


def check_given_back(scheduler: Scheduler) -> None:
    """AssertionError unless all blocks in use are the prefix cache's own."""
    scheduler.prefixes.check_integrity()
    assert scheduler.pool.n_used == scheduler.prefixes.n_blocks, "blocks were lost"


def tokens_of(events, request: Request) -> list[int]:
    """What the events said that came for a request."""
    return [
        token
        for step in events
        for other, event in step
        if other is request
        for token in event.token_ids
    ]


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
