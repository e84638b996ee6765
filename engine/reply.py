"""A request's tokens -> its text: whole characters, cut at a stop, thoughts apart."""

from __future__ import annotations

from dataclasses import dataclass

from engine.decoding import Decoding
from engine.metrics import Metrics
from engine.profiler import Profile, timed
from engine.stopping import StopStrings
from engine.thinking import ThinkingSplitter
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


class Reply:
    """The text of one request, as its tokens come."""

    def __init__(
        self,
        decoding: Decoding,
        stream: TextStream | None,
        splitter: ThinkingSplitter | None = None,
    ):
        """`stream`: None for ids only. `splitter`: what tells thoughts from the answer; None where
        all is answer."""
        self._decoding, self._stream, self._splitter = decoding, stream, splitter
        self._stops = StopStrings(decoding.params.stop)
        self._n_pushed = 0
        self.n_dropped = 0  # tokens behind the end of the text, in the step that brought it
        self._text = {"answer": "", "reasoning": ""}

    @property
    def has_text(self) -> bool:
        return self._stream is not None

    @property
    def completion(self) -> Completion:
        d, text = self._decoding, None if self._stream is None else self._text["answer"]
        done = text, list(d.token_ids), d.finish_reason, d.metrics, d.profile
        logprobs = None if d.logprobs is None else list(d.logprobs)
        return Completion(*done, self._text["reasoning"] or None, logprobs)

    def push(self, tokens: list[int]) -> list[tuple[str, str]]:
        """Pieces ("answer" | "reasoning", text) that are certain by now.

        `tokens` have come in one step. The text may end before the last of them: then the request
        is stopped there.
        """
        assert self._stream is not None, "text needs a tokenizer"
        pieces = []
        with timed(self._decoding.profile, "text"):
            for i, token in enumerate(tokens, 1):
                self._n_pushed += 1
                pieces += self._split(self._before_stop(self._stream.push(token)))
                if self._stops.found is not None:
                    self.n_dropped = len(tokens) - i
                    self._decoding.stop_before(self.n_dropped)
                    break
        return self._kept(pieces)

    def flush(self) -> list[tuple[str, str]]:
        """The rest, when no more tokens follow."""
        if self._stream is None:
            return []
        rest = self._before_stop(self._stream.flush()) + self._stops.flush()
        if self._stops.found is not None:  # it ends with what was no whole character
            self._decoding.stop_before(0)
        return self._kept(self._split(rest, True))

    def _before_stop(self, text: str) -> str:
        """What of the next text can be let go; stop strings count after min_tokens."""
        least = self._decoding.params.min_tokens
        return text if least and self._n_pushed <= least else self._stops.push(text)

    def _split(self, text: str, ended: bool = False) -> list[tuple[str, str]]:
        if self._splitter is None:
            return [("answer", text)] if text else []
        return self._splitter.push(text, ended)

    def _kept(self, pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
        for kind, piece in pieces:
            self._text[kind] += piece
        return pieces
