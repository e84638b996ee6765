"""A session's ids -> the ids that follow: prefill, the decode loop, stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from engine.metrics import Metrics
from engine.profiler import Profile, timed
from engine.sampler import Sampler
from engine.tokenizer import TextStream


@dataclass(frozen=True)
class Completion:
    """What a request gave."""

    text: str | None  # None where the checkpoint has no tokenizer
    token_ids: list[int]  # an end-of-text token included
    finish_reason: str | None  # "stop": end of text; "length"; None: not finished
    metrics: Metrics
    profile: Profile | None = None  # where one was asked for


class Generation:
    """One request under way: iterate over its pieces of text, or over `tokens()`.

    What has come so far is in `completion` at any time, and in `session` what another request can
    continue from, so that an interrupted one loses nothing.
    """

    def __init__(self, model, session, params, limit, eos_ids, stream, metrics, profile=None):
        """`session`: ids, the last of them without rows in its cache. `limit`: tokens to follow at
        most. `stream`: a TextStream, or None for ids only. `profile`: is filled."""
        self._model, self.session, self.params = model, session, params
        self._eos_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_ids
        self._limit = limit
        self._stream: TextStream | None = stream
        self._text, self._token_ids, self._finish_reason = "", [], None
        self._metrics: Metrics = metrics
        self.profile: Profile | None = profile
        metrics.prompt_tokens, metrics.cached_tokens = len(session.ids), session.cache.seq_len(0)
        self._tokens = self._run()

    @property
    def completion(self) -> Completion:
        text = None if self._stream is None else self._text
        done = list(self._token_ids), self._finish_reason
        return Completion(text, *done, self._metrics, self.profile)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; joined they are the completion's text.

        Iterating again goes on where the last iteration was left.
        """
        assert self._stream is not None, "text needs a tokenizer"
        for token in self._tokens:
            with timed(self.profile, "text"):
                piece = self._stream.push(token)
            if piece:
                self._text += piece
                yield piece
        if piece := self._stream.flush():
            self._text += piece
            yield piece

    def tokens(self) -> Iterator[int]:
        """Token ids as they are chosen."""
        return self._tokens

    def _run(self) -> Iterator[int]:
        if self._limit == 0:
            self._finish_reason = "length"
            return
        sample = Sampler(self.params, self._model.config.vocab_size)
        logits = self._model.new_logits(1)
        since = self._metrics.now()
        self._prefill(logits)
        while True:
            self._metrics.forward_took(since)
            known = logits[0, : self._model.config.vocab_size]
            with timed(self.profile, "sample"):
                if not np.isfinite([known.min(), known.max()]).all():
                    raise ValueError("the logits are not finite: the model overflows float32")
                token = sample(logits[0])
            if self.profile:
                self.profile.steps[-1].token_id = token
            self._metrics.token_came()
            self._token_ids.append(token)
            self.session.ids.append(token)
            if token in self._eos_ids:
                self._finish_reason = "stop"
            elif len(self._token_ids) == self._limit:
                self._finish_reason = "length"
            yield token
            if self._finish_reason:
                return
            since = self._metrics.now()
            self._forward(np.array([token]), False, logits)

    def _prefill(self, logits: np.ndarray) -> None:
        """Every id without rows: a prompt's in chunks, generated ones as they were, one by one.

        Logits of the last only.
        """
        ids, n_prompt = np.array(self.session.ids, np.int64), self.session.n_prompt
        cache, size = self.session.cache, self._model.max_tokens
        missing = len(ids) - cache.seq_len(0)
        cache.reserve(missing)
        off = True if missing <= size else None  # None: shown on a terminal only
        with tqdm(total=missing, desc="prompt", delay=2, leave=False, disable=off) as bar:
            while (start := cache.seq_len(0)) < len(ids):
                is_prompt = start < n_prompt
                stop = min(start + size, n_prompt) if is_prompt else start + 1
                self._forward(ids[start:stop], is_prompt, logits[: stop == len(ids)])
                bar.update(stop - start)

    def _forward(self, ids: np.ndarray, is_prompt: bool, logits: np.ndarray) -> None:
        cache = self.session.cache
        if self.profile:
            self.profile.begin(is_prompt, len(ids), len(logits), cache)
        self._model.forward(ids, cache, is_prompt, logits, self.profile)
