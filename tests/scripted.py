"""Models that stand in for real ones, whose words a test knows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from engine.cache import BasicKvCache
from engine.decoding import Decoding
from engine.generate import Generation
from engine.metrics import Metrics
from engine.reply import Reply
from engine.sampler import SamplingParams
from engine.session import Session
from engine.tokenizer import Tokenizer

LAYERS, KV_DIM = 2, 16


class RowsModel:
    """Logits that follow from the last ids whose rows a cache holds, whoever put them there.

    Each row of K is filled with its id. So a row that is missing, stale or one too many gives other
    logits. `says` turns ids into the logits of what follows them, (vocab_size,).
    """

    max_tokens = 16

    def __init__(self, vocab_size: int, says: Callable[[list[int]], np.ndarray]):
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.runs: list[tuple[list[int], bool, int]] = []  # (ids, is_prompt, rows of logits)
        self._says = says

    def new_logits(self, n: int) -> np.ndarray:
        return np.full((n, -(-self.config.vocab_size // 16) * 16), 99, np.float32)

    def new_cache(self) -> BasicKvCache:
        return BasicKvCache(LAYERS, KV_DIM)

    def forward(self, runs, logits, profile=None) -> None:
        given = 0
        for ids, cache, is_prompt, n_logits in runs:
            self.runs.append((ids.tolist(), is_prompt, n_logits))
            for token in ids.tolist():
                for layer in range(LAYERS):
                    row = np.full(KV_DIM, token, np.float32)
                    cache.push_row(layer, row, row)
            held = ids_of_rows(cache)
            for end in range(len(held) - n_logits + 1, len(held) + 1):
                logits[given, : self.config.vocab_size] = self._says(held[:end])
                given += 1


def ids_of_rows(cache) -> list[int]:
    """What RowsModel wrote."""
    return cache.materialize(LAYERS - 1)[0][:, 0].astype(int).tolist()


def chain(vocab_size: int, seed: int, sharpness: float) -> RowsModel:
    """Draws from a chain of second order: what follows two ids follows them again, often."""
    table = np.random.default_rng(seed).standard_normal((vocab_size,) * 3) * sharpness

    def says(ids: list[int]) -> np.ndarray:
        return table[ids[-2] if len(ids) > 1 else 0, ids[-1]].astype(np.float32)

    return RowsModel(vocab_size, says)


def script(ids: list[int], vocab_size: int, n_prompt: int, sharpness: float = 40.0) -> RowsModel:
    """Says `ids` one after the other, wherever it is after a prompt of `n_prompt`; then the last
    of them again and again."""

    def says(held: list[int]) -> np.ndarray:
        logits = np.zeros(vocab_size, np.float32)
        logits[ids[min(len(held) - n_prompt, len(ids) - 1)]] = sharpness
        return logits

    return RowsModel(vocab_size, says)


def request(
    model: RowsModel,
    prompt: list[int],
    params: SamplingParams,
    *,
    session: Session | None = None,
    tokenizer: Tokenizer | None = None,
    splitter=None,
    eos_ids=(),
    context: int = 1000,
    **more,
) -> tuple[Generation, Decoding]:
    """`more` goes to Decoding: lookup, budget, grammar."""
    session = session or Session(model.new_cache())
    session.turn_to(prompt)
    room = context - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    metrics = Metrics()
    size = model.config.vocab_size
    decoding = Decoding(size, session, params, limit, frozenset(eos_ids), metrics, **more)
    stream = tokenizer.stream() if tokenizer else None
    return Generation(model, decoding, Reply(decoding, stream, splitter)), decoding


def finish(generation: Generation, text: bool = False):
    """Run it to its end: its completion."""
    for _ in generation if text else generation.tokens():
        pass
    return generation.completion
