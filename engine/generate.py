"""A request run alone: prefill, the decode loop, and its text piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from tqdm import tqdm

from engine.cache import PoolFull
from engine.decoding import Decoding
from engine.reply import Completion, Reply


class Generation:
    """One request under way: iterate over its pieces of text, or over `tokens()`.

    What has come so far is in `completion` at any time, and in `session` what another request can
    continue from, so that an interrupted one loses nothing.
    """

    def __init__(self, model, decoding: Decoding, reply: Reply):
        """Of a Decoding and the Reply that is its text (Requests.begin makes both)."""
        self.session, self.params = decoding.session, decoding.params
        # Neither of the two knows this object: one that is dropped is collected at once, and with
        # it the cache, whose blocks another request may wait for.
        self._steps, self._reply = steps(model, decoding), reply
        self._tokens = tokens_of(self._steps, reply)

    @property
    def completion(self) -> Completion:
        return self._reply.completion

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; joined they are the completion's text.

        Iterating again goes on where the last iteration was left.
        """
        return (piece for kind, piece in self.parts() if kind == "answer")

    def parts(self) -> Iterator[tuple[str, str]]:
        """Pieces of text and what they are: "answer", or in a chat "reasoning"."""
        for tokens in self._steps:
            yield from self._reply.push(tokens)
        yield from self._reply.flush()

    def tokens(self) -> Iterator[int]:
        """Token ids as they are chosen; the text, where there is one, is in `completion`."""
        return self._tokens


def tokens_of(steps: Iterator[list[int]], reply: Reply) -> Iterator[int]:
    """The tokens of some steps, one by one, up to the end of the text."""
    for tokens in steps:
        if reply.has_text:
            reply.push(tokens)
        yield from tokens[: len(tokens) - reply.n_dropped]
    reply.flush()


def steps(model, decoding: Decoding) -> Iterator[list[int]]:
    """Run a request to its end: the tokens that each step brought."""
    logits, missing = model.new_logits(1), decoding.n_missing
    off = True if missing <= model.max_tokens else None  # None: shown on a terminal only
    bar = tqdm(total=missing, desc="prompt", delay=2, leave=False, disable=off)
    with decoding.held():
        decoding.session.cache.reserve(missing)
    while not decoding.finish_reason:
        with decoding.held():
            run = decoding.next_run(model.max_tokens)
            if run.n_logits > len(logits):
                logits = model.new_logits(run.n_logits)
            known = logits[: run.n_logits]
            try:
                try:
                    model.forward([run], known, decoding.profile)
                except PoolFull:
                    if run.n_logits < 2:
                        raise
                    # others hold the blocks that the guesses need: without any, this may be the end
                    run, known = decoding.next_run(decoding.n_missing), logits[:1]
                    model.forward([run], known, decoding.profile)
            except BaseException:
                decoding.drop_rows()
                raise
        bar.update(len(run.ids))
        if tokens := decoding.take(known):
            bar.close()
            yield tokens
