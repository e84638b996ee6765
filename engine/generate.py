"""A prompt's ids -> the ids that follow: prefill, the decode loop, stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.metrics import Metrics
from engine.sampler import Sampler
from engine.tokenizer import TextStream


@dataclass(frozen=True)
class Completion:
    """What a request gave."""

    text: str | None  # None where the checkpoint has no tokenizer
    token_ids: list[int]  # an end-of-text token included
    finish_reason: str | None  # "stop": end of text; "length"; None: not finished
    metrics: Metrics


class Generation:
    """One request under way: iterate over its pieces of text, or over `tokens()`.

    What has come so far is in `completion` at any time, so that an interrupted one loses nothing.
    """

    def __init__(self, model, cache, prompt, params, eos_ids, context, stream, metrics):
        """`prompt`: ids that fit in `context`. `stream`: a TextStream, or None for ids only."""
        self._model, self._cache = model, cache
        self._prompt, self.params = np.array(prompt, np.int64), params
        self._eos_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_ids
        room = context - len(prompt)
        self._limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._stream: TextStream | None = stream
        self._text, self._token_ids, self._finish_reason = "", [], None
        self._metrics: Metrics = metrics
        self._tokens = self._run()

    @property
    def completion(self) -> Completion:
        text = None if self._stream is None else self._text
        return Completion(text, list(self._token_ids), self._finish_reason, self._metrics)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; joined they are the completion's text.

        Iterating again goes on where the last iteration was left.
        """
        assert self._stream is not None, "text needs a tokenizer"
        for token in self._tokens:
            if piece := self._stream.push(token):
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
            if not np.isfinite([known.min(), known.max()]).all():
                raise ValueError("the logits are not finite: the model's weights overflow float32")
            token = sample(logits[0])
            self._metrics.token_came()
            self._token_ids.append(token)
            if token in self._eos_ids:
                self._finish_reason = "stop"
            elif len(self._token_ids) == self._limit:
                self._finish_reason = "length"
            yield token
            if self._finish_reason:
                return
            since = self._metrics.now()
            self._model.forward(np.array([token]), self._cache, False, logits)

    def _prefill(self, logits: np.ndarray) -> None:
        """The prompt in chunks; logits of the last token only."""
        prompt, size = self._prompt, self._model.max_tokens
        self._cache.reserve(len(prompt))
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            is_last = start + size >= len(prompt)
            self._model.forward(chunk, self._cache, True, logits if is_last else logits[:0])
