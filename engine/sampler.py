"""Logits -> a token id.

In this order:

1. logits as the model gives them: logprobs are of these
2. mask and min_tokens: what may not come now is -inf from here on
3. repetition, presence and frequency penalties
4. logit_bias
5. at temperature 0 the largest; else temperature, top_k, top_p, min_p, as in transformers, each on
   what the one before left (llama.cpp applies the temperature last), and a draw

Steps 2 to 4 are made in a copy, and only where a request asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from engine import memory
from engine.kernels.sampling import adjust, are_finite, largest_first, log_sum, masked, sample
from engine.kernels.simd import LANES
from engine.params import SamplingParams, check

__all__ = ["Sampler", "SamplingParams"]

GREEDY_BELOW = 1e-5  # temperatures under this one choose the largest logit, as 0 does
BIASED_ONLY = -1  # the count of an id that has a bias, but came neither in prompt nor output


class Sampler:
    """Chooses the tokens of one request, with a generator of its own."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        stream: int = 0,
    ):
        """prompt_ids: what repetition_penalty counts beside the output. stop_ids: what, beside
        params.stop_token_ids, may not come before min_tokens. stream: which of the samples of one
        seed; each has draws of its own. ValueError names an id outside the vocabulary.
        """
        self.params = params
        self.logprobs: tuple[float, list[tuple[int, float]]] | None = None
        self._vocab_size = vocab_size
        self._greedy = params.temperature < GREEDY_BELOW
        top_k, temperature = int(min(params.top_k, vocab_size)), np.float32(params.temperature)
        self._filters = vocab_size, temperature, top_k, float(params.top_p), float(params.min_p)
        self._rng = generator(params.seed, check("stream", stream, int, 0, None))
        self._mask = None
        self._n_chosen = 0
        stops = within("stop_ids", stop_ids, vocab_size)
        own = within("stop_token_ids", params.stop_token_ids, vocab_size)
        self._stops = np.append(stops, own)
        self._table = Table(params, vocab_size, prompt_ids)
        self._scratch = None
        if params.logprobs is not None:
            self._n_top = min(params.logprobs, vocab_size)
            room = max(self._n_top, 1)  # the first is needed always
            self._top = np.empty(room, np.int64), np.empty(room, np.float32)

    @classmethod
    def compile(cls) -> None:
        """Load or compile the kernels that sampling needs."""
        sampler = cls(SamplingParams(seed=0, logprobs=1, logit_bias={0: 1}), LANES)
        are_finite(np.zeros(LANES, np.float32), LANES)
        sampler.mask(np.array([-1], np.int32))
        sampler(np.zeros(LANES, np.float32))

    def __call__(self, logits: np.ndarray) -> int:
        """A token for `logits`, (padded vocab_size,) float32, which stay as they are.

        With params.logprobs, `logprobs` is of this token from now on: its own, and (id, logprob) of
        the likeliest, in order; of equal ones the lowest id comes first. ValueError if mask and
        min_tokens leave no token.
        """
        left = self.adjusted(logits)
        if self._greedy:
            token = int(left[: self._vocab_size].argmax())
        else:
            token = sample(left, *self._filters, self._rng)
        return self.took(logits, token)

    def took(self, logits: np.ndarray, token: int) -> int:
        """Count `token` as chosen, whoever chose it; `logits` are those before it."""
        if self.params.logprobs is not None:
            self.logprobs = self._logprobs(logits, token)
        self._n_chosen += 1
        self._table.count(token)
        return token

    def mask(self, allowed_bits: np.ndarray | None) -> None:
        """From now on only tokens i whose bit, i % 32 of allowed_bits[i // 32], is set; None: all.

        (ceil(vocab_size / 32),) int32, as llguidance and xgrammar give it; copied. ValueError for
        another form, or if no token is allowed.
        """
        if allowed_bits is None:
            self._mask = None
            return
        words, ragged = -(-self._vocab_size // 32), self._vocab_size % 32
        about = getattr(allowed_bits, "shape", None), getattr(allowed_bits, "dtype", None)
        if about != ((words,), np.int32):
            raise ValueError(f"the mask is {about[1]} {about[0]}; int32 ({words},) is needed")
        bits = np.array(allowed_bits)
        if ragged:
            bits[-1] &= (1 << ragged) - 1
        if not bits.any():
            raise ValueError(f"the mask allows none of {self._vocab_size} tokens; one is needed")
        self._mask = bits

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        """What temperature and filters see: `logits`, or a copy, good until the next call."""
        n = self._vocab_size
        is_early = self._n_chosen < self.params.min_tokens and len(self._stops) > 0
        if self._mask is None and not is_early and not self._table.size:
            return logits
        if self._scratch is None:
            self._scratch = memory.zeros(-(-n // LANES) * LANES)
        left = self._scratch
        if self._mask is None:
            left[:n] = logits[:n]
        else:
            masked(left, logits, n, self._mask)
        if is_early:
            left[self._stops] = -np.inf
        if is_early or self._mask is not None:
            check_any(left[:n].max())
        self._table.apply(left)
        return left

    def _logprobs(self, logits, token: int) -> tuple[float, list[tuple[int, float]]]:
        """log(softmax(logits)) of `token`, and of the largest with their ids."""
        n, (ids, values) = self._vocab_size, self._top
        largest_first(logits, n, ids, values)
        peak = float(values[0])
        rest = math.log(log_sum(logits, n, values[0]))
        top = zip(ids.tolist()[: self._n_top], values.tolist(), strict=False)
        return float(logits[token]) - peak - rest, [(i, x - peak - rest) for i, x in top]


class Table:
    """How often ids came, and their bias: a row for each that did or has one, for no others."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Iterable[int]):
        repetition, bias = params.repetition_penalty, dict(params.logit_bias or ())
        within("logit_bias", bias, vocab_size)
        # Only repetition looks at the prompt.
        prompt = within("prompt_ids", prompt_ids, vocab_size) if repetition != 1 else np.array([])
        came = set(prompt.tolist())
        self._rows = {token: row for row, token in enumerate(came | bias.keys())}
        self.size = len(self._rows)
        self._ids = np.array(list(self._rows), np.int64)
        self._counts = np.array([0 if i in came else BIASED_ONLY for i in self._rows], np.int64)
        self._bias = np.array([bias.get(i, 0) for i in self._rows], np.float64)
        penalties = repetition, params.presence_penalty, params.frequency_penalty
        self._penalties = tuple(float(penalty) for penalty in penalties)
        self._counting = self._penalties != (1.0, 0.0, 0.0)

    def count(self, token: int) -> None:
        """Count a token of the output."""
        if not self._counting:
            return
        row = self._rows.setdefault(token, self.size)
        if row == self.size:
            self._add(token)
        self._counts[row] = max(self._counts[row], 0) + 1

    def _add(self, token: int) -> None:
        if self.size == len(self._ids):  # double, so that most tokens move nothing
            more = self.size + 64
            self._ids = np.append(self._ids, np.zeros(more, np.int64))
            self._counts = np.append(self._counts, np.zeros(more, np.int64))
            self._bias = np.append(self._bias, np.zeros(more))
        self._ids[self.size] = token
        self.size += 1

    def apply(self, logits: np.ndarray) -> None:
        """Penalties, then bias, onto logits, in place."""
        if self.size:
            adjust(logits, self._ids, self._counts, self._bias, self.size, *self._penalties)


def check_any(most: np.float32) -> None:
    """ValueError if nothing can be chosen; `most`: the largest logit that is left."""
    if not np.isfinite(most):
        about = f"the largest logit that mask and min_tokens leave is {most}"
        raise ValueError(f"no token can be chosen: {about}")


def generator(seed: int | None, stream: int) -> np.random.Generator:
    """Draws that follow from (seed, stream) and are independent of other pairs'."""
    key = (stream,) if stream else ()
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def within(name: str, ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """(n,) int64; ValueError unless these are ids of the vocabulary."""
    found = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if not found.size:
        return np.empty(0, np.int64)
    needed = f"token ids from 0 to {vocab_size - 1} are needed"
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{name} has {found.dtype} {found.shape}; {needed}")
    wrong = found[(found < 0) | (found >= vocab_size)]
    if len(wrong):
        raise ValueError(f"{name} has {wrong[0]}; {needed}")
    return found.astype(np.int64)
