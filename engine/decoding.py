"""One request under way, in ids: what its next step takes, and which tokens follow from its logits.

Whoever runs steps asks for the `next_run`, lets a model run it, alone or among those of others, and
hands its logits to `take`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from engine.grammar import Grammar
from engine.kernels.runs import Run
from engine.kernels.sampling import are_finite
from engine.lookup import Lookup
from engine.metrics import Metrics
from engine.profiler import Profile, timed
from engine.sampler import Sampler, SamplingParams
from engine.session import Session
from engine.thinking import ThinkingBudget


class Decoding:
    """What has come so far is in `token_ids` and in `session`."""

    def __init__(
        self,
        vocab_size: int,
        session: Session,
        params: SamplingParams,
        limit: int,
        eos_ids: frozenset[int],
        metrics: Metrics,
        profile: Profile | None = None,
        *,
        sample: int = 0,
        lookup: int = 0,
        budget: ThinkingBudget | None = None,
        grammar: Grammar | None = None,
    ):
        """`session`: ids, the last of them without rows in its cache. `limit`: tokens to follow at
        most. `profile`: is filled. `sample`: which of the samples of one seed. `lookup`: guesses a
        step at most. ValueError names an id in `params` that is outside the vocabulary."""
        self.session, self.params, self.limit = session, params, limit
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.metrics, self.profile = metrics, profile
        self.token_ids: list[int] = []
        self.logprobs: list | None = None if params.logprobs is None else []
        self.finish_reason: str | None = "length" if limit == 0 else None
        if grammar and grammar.is_finished:  # only an empty text satisfies it
            self.finish_reason = "stop"
        self._claim = session.claim()
        metrics.prompt_tokens, metrics.cached_tokens = len(session.ids), session.cache.seq_len(0)
        self._vocab_size = vocab_size
        self._sampler = Sampler(params, vocab_size, session.ids, self.eos_ids, sample)
        self._lookup = Lookup(lookup, session.ids) if lookup else None
        self._budget, self._grammar = budget, grammar
        self._forced = budget.begin() if budget else []  # ids that come next, whatever the logits
        self._expected: list[int] = []  # the ids behind the known ones in the run under way
        self._n_guesses = 0  # of them; the others are forced
        self._came: list[bool] = []  # which of the last step's tokens had been guessed
        self._since: float | None = None  # when the forward under way began

    def held(self) -> AbstractContextManager:
        """Nobody else touches the session meanwhile; ValueError if another request has it."""
        return self.session.used(self._claim)

    @property
    def n_missing(self) -> int:
        """Ids whose rows the cache does not hold yet."""
        return len(self.session.ids) - self.session.cache.seq_len(0)

    def next_run(self, most: int) -> Run:
        """The next tokens to run, at most `most`: of the prompt, or generated ones and guesses.

        Logits are wanted where the known ids end, and behind every guess.
        """
        if self._since is None:
            self._since = self.metrics.now()
        ids, cache = self.session.ids, self.session.cache
        start = cache.seq_len(0)
        is_prompt = start < self.session.n_prompt
        stop = min(start + most, self.session.n_prompt if is_prompt else len(ids))
        self._expected, self._n_guesses = [], 0
        if not is_prompt and stop == len(ids):
            room = max(min(most - (stop - start), self._n_left - 1), 0)
            if self._forced:
                self._expected = self._forced[:room]
            elif self._lookup:
                self._expected = self._lookup.guess(room)
                self._n_guesses = len(self._expected)
        run_ids = np.array(ids[start:stop] + self._expected, np.int64)
        n_logits = 1 + len(self._expected) if stop == len(ids) else 0
        if self.profile:
            self.profile.begin(is_prompt, len(run_ids), n_logits, cache)
        return Run(run_ids, cache, is_prompt, n_logits)

    def take(self, logits: np.ndarray) -> list[int]:
        """The tokens that follow from the logits of the last run: none while a prompt goes on.

        A guess that is what comes makes the next row of logits good as well; rows of the cache
        behind the first wrong one are dropped.
        """
        if not len(logits):
            return []
        self.metrics.forward_took(self._since)
        self._since, self._came, taken = None, [], []
        with timed(self.profile, "sample"), self.held():
            try:
                for row, known in enumerate(logits):
                    taken.append(self._choose(known))
                    self._append(taken[-1])
                    if self.finish_reason or taken[row:] != self._expected[row : row + 1]:
                        break
            finally:  # an interrupted session is one that goes on
                self.drop_rows()
        if self._n_guesses:
            pairs = zip(taken, [*self._expected, None], strict=False)
            self._came = [token == guess for token, guess in pairs]
            self._lookup.learn(self._n_guesses, sum(self._came))
            self.metrics.guessed_tokens += self._n_guesses
            self.metrics.accepted_tokens += sum(self._came)
        return taken

    def stop_before(self, n: int) -> None:
        """The text has ended: the last `n` tokens, all of the last step, are no part of it."""
        self.finish_reason = "stop"
        if n:
            with self.held():
                del self.session.ids[-n:], self.token_ids[-n:]
                if self.logprobs is not None:
                    del self.logprobs[-n:]
                self.drop_rows()
            self.metrics.tokens_dropped(n)
            self.metrics.accepted_tokens -= sum(self._came[-n:])

    @property
    def _n_left(self) -> int:
        return self.limit - len(self.token_ids)

    def _choose(self, logits: np.ndarray) -> int:
        if not are_finite(logits, self._vocab_size):
            kept = np.dtype(self.session.cache.dtype).name
            raise ValueError(
                f"the logits are not finite: the model overflows float32, or its K and V {kept}"
            )
        if self._forced:
            return self._sampler.took(logits, self._forced.pop(0))
        if self._grammar:
            self._sampler.mask(self._grammar.allowed())
        return self._sampler(logits)

    def _append(self, token: int) -> None:
        """A token has been chosen."""
        self.metrics.token_came()
        self.session.ids.append(token)
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(self._sampler.logprobs)
        if self._lookup:
            self._lookup.append(token)
        if self.profile:
            self.profile.steps[-1].token_id = token
        if self._grammar:
            self._grammar.take(token)
        free = self._grammar is None or self._grammar.is_free
        if self._budget and free and not self._forced:  # a text that is constrained has no thoughts
            self._forced = self._budget.take(token)
        complete = self._grammar is not None and self._grammar.is_finished
        if complete or token in self.eos_ids or token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif self._n_left == 0:
            self.finish_reason = "length"

    def drop_rows(self) -> None:
        """Forget rows of guesses that did not come. The last token never has one."""
        cache, n = self.session.cache, len(self.session.ids) - 1
        if cache.seq_len(0) > n:
            cache.truncate(n)
