"""Logits -> a token id: what a request asks for, and the choice itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.kernels.sampling import sample
from engine.kernels.simd import LANES

GREEDY_BELOW = 1e-5  # temperatures under this one choose the largest logit, as 0 does
HOTTEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses its tokens. ValueError names a value out of range and the range."""

    max_tokens: int | None = 128  # None: until the context is full
    temperature: float = 1.0  # 0: always the likeliest token; of equal ones the lowest id
    top_k: int = 0  # keep the k likeliest; 0 or -1: all
    top_p: float = 1.0  # keep the fewest likeliest tokens that hold this share; 1: all
    min_p: float = 0.0  # keep tokens at least this share of the likeliest's probability; 0: all
    seed: int | None = None  # None: a fresh one for each request
    ignore_eos: bool = False  # go on after an end-of-text token

    def __post_init__(self):
        check("max_tokens", self.max_tokens, int, 0, None, optional=True)
        check("temperature", self.temperature, float, 0, HOTTEST)
        check("top_k", self.top_k, int, -1, None)
        check("top_p", self.top_p, float, 0, 1, above=True)
        check("min_p", self.min_p, float, 0, 1)
        check("seed", self.seed, int, 0, None, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; True or False is needed")


def check(name, value, kind, low, high, optional=False, above=False) -> None:
    """ValueError unless `value` is a number of `kind` from (with `above`: above) low to high."""
    if optional and value is None:
        return
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, np.number) and not isinstance(value, np.timedelta64):
        value = value.item()
    high = math.inf if high is None else high
    if isinstance(value, kinds) and not isinstance(value, bool) and value < math.inf:
        if (value > low if above else value >= low) and value <= high:
            return
    least = f"above {low}" if above else f"at least {low}"
    most = "" if high == math.inf else f" and at most {high:g}"
    number = "a whole number" if kind is int else "a number"
    raise ValueError(f"{name} is {value!r}; {number} {least}{most} is needed")


class Sampler:
    """Chooses the tokens of one request, with a generator of its own."""

    def __init__(self, params: SamplingParams, vocab_size: int):
        self.params = params
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(params.seed)

    @classmethod
    def compile(cls) -> None:
        """Load or compile the kernel that sampling needs."""
        cls(SamplingParams(seed=0), LANES)(np.zeros(LANES, np.float32))

    def __call__(self, logits: np.ndarray) -> int:
        """A token for `logits`, (padded vocab_size,) float32.

        In transformers' order: temperature, then top_k, top_p and min_p, each on what the one
        before left. (llama.cpp applies the temperature last.)
        """
        p, n = self.params, self._vocab_size
        if p.temperature < GREEDY_BELOW:
            return int(logits[:n].argmax())
        top_k, temperature = int(min(p.top_k, n)), np.float32(p.temperature)
        return sample(logits, n, temperature, top_k, float(p.top_p), float(p.min_p), self._rng)
