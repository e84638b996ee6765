"""Session: token ids, and the cache that holds the K and V rows of the first of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.cache import KvCache


class Session:
    """What generation continues from, and leaves behind.

    The cache holds rows of the first `cache.seq_len(0)` ids; the rest wait for the next step. The
    last token of a generation always waits: it was chosen, and nothing has followed it.
    """

    def __init__(
        self, cache: KvCache, ids: Sequence[int] = (), n_prompt: int = 0, owner: object = None
    ):
        """`ids[:n_prompt]` came as a prompt; those behind it were generated. `owner`: the model
        whose rows they are."""
        self.cache, self.ids, self.n_prompt, self.owner = cache, list(ids), n_prompt, owner
        self._claims = 0
        self._lock = threading.RLock()
        assert cache.seq_len(0) <= len(self.ids) and n_prompt <= len(self.ids)

    def turn_to(self, prompt: Sequence[int]) -> None:
        """Hold `prompt` instead, with the rows of the longest prefix that the two have in common.

        The rows of the last token are left out: it is run again, for its logits.
        """
        with self._lock:
            self._turn_to(prompt)

    def _turn_to(self, prompt: Sequence[int]) -> None:
        held = self.ids[: min(self.cache.seq_len(0), len(prompt) - 1)]
        common = next((i for i, token in enumerate(held) if token != prompt[i]), len(held))
        self.cache.truncate(common)
        self.ids, self.n_prompt = list(prompt), len(prompt)

    def claim(self) -> int:
        """Let a generation begin behind the ids it holds, the last of which is run again.

        Whatever generation was under way ends: `used` tells it so.
        """
        with self._lock:
            self._claims += 1
            self.cache.truncate(min(self.cache.seq_len(0), max(len(self.ids) - 1, 0)))
            return self._claims

    @contextmanager
    def used(self, claim: int) -> Iterator[None]:
        """Nobody else touches the session meanwhile; ValueError if `claim` is not the latest."""
        with self._lock:
            if claim != self._claims:
                raise ValueError("the session has gone on with another request: this one is over")
            yield
