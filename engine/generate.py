"""A session's ids -> the ids that follow, and their text: prefill, the decode loop, stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from engine.chat import ThinkingSplitter
from engine.kernels.runs import Run
from engine.metrics import Metrics
from engine.profiler import Profile, timed
from engine.sampler import Sampler
from engine.session import Session
from engine.stopping import StopStrings
from engine.tokenizer import TextStream


@dataclass(frozen=True)
class Completion:
    """What a request gave."""

    text: str | None  # None where the checkpoint has no tokenizer
    token_ids: list[int]  # an end-of-text token included
    finish_reason: str | None  # "stop": end of text or a stop; "length"; None: not finished
    metrics: Metrics
    profile: Profile | None = None  # where one was asked for
    reasoning: str | None = None  # what a model thought before it answered, in a chat
    # for each token its own logprob and (id, logprob) of the likeliest, where they were asked for
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None


class Decoding:
    """One request under way, in ids. What has come so far is in `token_ids` and in `session`."""

    def __init__(self, model, session: Session, params, limit: int, eos_ids, metrics, profile):
        self.model, self.session, self.params, self.limit = model, session, params, limit
        self.eos_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_ids
        self.logprobs: list | None = None if params.logprobs is None else []
        self.metrics: Metrics = metrics
        self.profile: Profile | None = profile
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._claim = session.claim()
        metrics.prompt_tokens, metrics.cached_tokens = len(session.ids), session.cache.seq_len(0)

    def run(self) -> Iterator[int]:
        """Token ids as they are chosen."""
        if self.limit == 0:
            self.finish_reason = "length"
            return
        vocab_size = self.model.config.vocab_size
        sample = Sampler(self.params, vocab_size, self.session.ids, self.eos_ids)
        logits = self.model.new_logits(1)
        since = self.metrics.now()
        self._prefill(logits)
        while True:
            self.metrics.forward_took(since)
            with timed(self.profile, "sample"):
                known = logits[0, :vocab_size]
                if not np.isfinite([known.min(), known.max()]).all():
                    kept = np.dtype(self.session.cache.dtype).name
                    raise ValueError(
                        "the logits are not finite: the model overflows float32, or its K and V "
                        f"{kept}"
                    )
                token = sample(logits[0])
            self.metrics.token_came()
            self._append(token)
            if self.logprobs is not None:
                self.logprobs.append(sample.logprobs)
            yield token
            if self.finish_reason:
                return
            since = self.metrics.now()
            self._forward(np.array([token]), False, logits)

    def _append(self, token: int) -> None:
        """A token has been chosen."""
        with self.session.used(self._claim):
            self.session.ids.append(token)
        self.token_ids.append(token)
        if self.profile:
            self.profile.steps[-1].token_id = token
        if token in self.eos_ids or token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.limit:
            self.finish_reason = "length"

    def _prefill(self, logits: np.ndarray) -> None:
        """Every id without rows: a prompt's in chunks, generated ones as they were, one by one.

        Logits of the last only.
        """
        ids, n_prompt = np.array(self.session.ids, np.int64), self.session.n_prompt
        cache, size = self.session.cache, self.model.max_tokens
        missing = len(ids) - cache.seq_len(0)
        with self.session.used(self._claim):
            cache.reserve(missing)
        off = True if missing <= size else None  # None: shown on a terminal only
        with tqdm(total=missing, desc="prompt", delay=2, leave=False, disable=off) as bar:
            while (start := cache.seq_len(0)) < len(ids):
                is_prompt = start < n_prompt
                stop = min(start + size, n_prompt) if is_prompt else start + 1
                self._forward(ids[start:stop], is_prompt, logits[: stop == len(ids)])
                bar.update(stop - start)

    def _forward(self, ids: np.ndarray, is_prompt: bool, logits: np.ndarray) -> None:
        with self.session.used(self._claim):
            cache = self.session.cache
            if self.profile:
                self.profile.begin(is_prompt, len(ids), len(logits), cache)
            self.model.forward([Run(ids, cache, is_prompt, len(logits))], logits, self.profile)


class Generation:
    """One request under way: iterate over its pieces of text, or over `tokens()`.

    What has come so far is in `completion` at any time, and in `session` what another request can
    continue from, so that an interrupted one loses nothing.
    """

    def __init__(
        self, model, session, params, limit, eos_ids, stream, metrics, profile=None, splitter=None
    ):
        """`session`: ids, the last of them without rows in its cache. `limit`: tokens to follow at
        most. `stream`: a TextStream, or None for ids only. `profile`: is filled. `splitter`: what
        tells thoughts from the answer; None where all is answer."""
        self.session, self.params = session, params
        self._decoding = Decoding(model, session, params, limit, eos_ids, metrics, profile)
        # Neither of the two knows this object: one that is dropped is collected at once, and with
        # it the cache, whose blocks another request may wait for.
        self._tokens = self._decoding.run()
        self._stream: TextStream | None = stream
        self._stops = StopStrings(params.stop)
        self._splitter: ThinkingSplitter | None = splitter
        self._text = {"answer": "", "reasoning": ""}

    @property
    def completion(self) -> Completion:
        d, text = self._decoding, None if self._stream is None else self._text["answer"]
        done = text, list(d.token_ids), d.finish_reason, d.metrics, d.profile
        logprobs = None if d.logprobs is None else list(d.logprobs)
        return Completion(*done, self._text["reasoning"] or None, logprobs)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; joined they are the completion's text.

        Iterating again goes on where the last iteration was left.
        """
        return (piece for kind, piece in self.parts() if kind == "answer")

    def parts(self) -> Iterator[tuple[str, str]]:
        """Pieces of text and what they are: "answer", or in a chat "reasoning"."""
        assert self._stream is not None, "text needs a tokenizer"
        for token in self._tokens:
            with timed(self._decoding.profile, "text"):
                pieces = self._split(self._before_stop(self._stream.push(token)))
            yield from self._kept(pieces)
            if self._stops.found is not None:
                self._tokens.close()
                self._decoding.finish_reason = "stop"
        rest = self._before_stop(self._stream.flush()) + self._stops.flush()
        yield from self._kept(self._split(rest, True))

    def _before_stop(self, text: str) -> str:
        """What of the next text can be let go; stop strings count after min_tokens."""
        early = len(self._decoding.token_ids) <= self.params.min_tokens
        return text if early and self.params.min_tokens else self._stops.push(text)

    def _split(self, text: str, ended: bool = False) -> list[tuple[str, str]]:
        if self._splitter is None:
            return [("answer", text)] if text else []
        return self._splitter.push(text, ended)

    def _kept(self, pieces: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        for kind, piece in pieces:
            self._text[kind] += piece
            yield kind, piece

    def tokens(self) -> Iterator[int]:
        """Token ids as they are chosen."""
        return self._tokens
