"""What a run took, and how it is printed."""

from __future__ import annotations

import time
from collections.abc import Callable


class Metrics:
    """Times of one request. The clock starts when this is made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._token_times: list[float] = []
        self.per_forward_ms: list[float] = []  # the first is the prefill, all its chunks
        self.prompt_tokens = 0  # ids that stood before the first new one
        self.cached_tokens = 0  # those of them whose K and V were there already
        self.guessed_tokens = 0  # by lookup.py
        self.accepted_tokens = 0  # those of them that came, and are in the output

    def forward_took(self, since: float) -> None:
        """A forward that began at `since` (of `now`) has ended."""
        self.per_forward_ms.append((self._clock() - since) * 1e3)

    def token_came(self) -> None:
        self._token_times.append(self._clock())

    def tokens_dropped(self, n: int) -> None:
        """The last `n` tokens are no part of the text."""
        del self._token_times[-n:]

    def now(self) -> float:
        return self._clock()

    @property
    def time_to_first_token_ms(self) -> float | None:
        """From the request to its first token; None before there is one."""
        return (self._token_times[0] - self._start) * 1e3 if self._token_times else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time they took; None for fewer than two tokens."""
        if len(self._token_times) < 2:
            return None
        took = self._token_times[-1] - self._token_times[0]
        return (len(self._token_times) - 1) / took if took > 0 else None

    def as_dict(self) -> dict:
        return {
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "per_forward_ms": self.per_forward_ms,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "guessed_tokens": self.guessed_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{k}={v!r}' for k, v in self.as_dict().items())})"

    def report(self, backend: str, kv_cache: str) -> str:
        """The report of a run, figures to three decimals; "n/a" where there is nothing to tell."""
        times = self.per_forward_ms
        spread = "n/a"
        if times:
            mean = sum(times) / len(times)
            spread = f"min {min(times):.3f}  max {max(times):.3f}  mean {mean:.3f}"
        return (
            f"backend: {backend}\n"
            f"kv cache: {kv_cache}\n"
            "\n"
            "metrics:\n"
            f"  time_to_first_token_ms: {figure(self.time_to_first_token_ms)}\n"
            f"  decode_tokens_per_second: {figure(self.decode_tokens_per_second)}\n"
            f"  per_forward_ms: {spread}  (n={len(times)})"
        )


def figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
