"""A budget for thoughts: after so many tokens their block is closed for the model."""

from __future__ import annotations

from engine.chat import CLOSE, OPEN
from engine.tokenizer import Tokenizer

CLOSING = f"\n{CLOSE}\n\n"  # as Qwen3 writes it


class ThinkingBudget:
    """Counts the tokens of a reply's first block of thoughts."""

    def __init__(self, n: int, tokenizer: Tokenizer, opened: bool):
        """`n` tokens at most. `opened`: the block has begun in the prompt."""
        self._left, self._open = n, opened
        self._begin, self._end = tokenizer.encode(OPEN), tokenizer.encode(CLOSE)
        self._closing = tokenizer.encode(CLOSING)
        self._ids: list[int] = []  # of the reply
        self._over = False

    def begin(self) -> list[int]:
        """The ids that a reply has to begin with."""
        return self._close() if self._open and self._left == 0 else []

    def take(self, token: int) -> list[int]:
        """A token has come: the ids that have to follow it, none as a rule."""
        if self._over:
            return []
        self._ids.append(token)
        if not self._open:
            self._open = self._ids[-len(self._begin) :] == self._begin
            # a block that does not begin a reply is none
            self._over = not self._open and len(self._ids) > len(self._begin)
        elif self._ids[-len(self._end) :] == self._end:
            self._over = True
        else:
            self._left -= 1
        return self._close() if self._open and not self._over and self._left <= 0 else []

    def _close(self) -> list[int]:
        self._over = True
        return list(self._closing)
