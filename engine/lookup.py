"""Prompt lookup: guess that what followed the same few tokens before follows them again.

The guesses cost no model (Saxena 2023, "Prompt Lookup Decoding"): texts that quote, correct or
translate repeat much of their prompt. They are checked in one step, which takes little longer than
a step of one token, since both wait for the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable

LENGTHS = 4, 3, 2  # tokens that have to be the same, the longest first
FIRST = 4  # guesses, before anything is known of how many come
PATIENCE = 64  # tokens without a guess, at most, after guesses that did not come


class Lookup:
    """The ids of a text so far, and what followed where."""

    def __init__(self, most: int, ids: Iterable[int]):
        """`most` guesses at a time."""
        self._most, self._n = most, min(FIRST, most)
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # some ids -> the place behind them, the last
        self._wait, self._pause = 0, 1  # tokens until the next guess; how long the last wait was
        for token in ids:
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on with `token`."""
        place = len(self._ids)
        for length in LENGTHS:
            if place >= length:
                self._behind[tuple(self._ids[-length:])] = place
        self._ids.append(token)
        self._wait = max(self._wait - 1, 0)

    def guess(self, most: int) -> list[int]:
        """Ids that may come next, at most `most`: none where nothing is known.

        Behind the last known id what was found begins again: a text that repeats itself goes on.
        """
        most = min(most, self._n)
        if self._wait or most <= 0:
            return []
        for length in LENGTHS:
            place = self._behind.get(tuple(self._ids[-length:]))
            if place is not None:
                found = self._ids[place : place + most]
                return [found[i % len(found)] for i in range(most)]
        return []

    def learn(self, guessed: int, came: int) -> None:
        """Of the last guesses so many came: guess more or fewer, or not at all for a while."""
        self._n = min(2 * self._n if came == guessed else max(came + 1, 2), self._most)
        self._pause = 1 if came else min(2 * self._pause, PATIENCE)
        self._wait = self._pause if self._pause > 2 else 0  # one wrong guess is nothing yet
