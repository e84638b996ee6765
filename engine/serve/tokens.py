"""Tokens as clients are told of them: their text, their bytes, their logprobs."""

from __future__ import annotations

import math

from engine.tokenizer import Tokenizer

LEAST = -9999.0  # for -inf, which JSON has not; as OpenAI does


class Tokens:
    """Spells ids, special ones too."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._added = {i: content.encode() for content, i in tokenizer.added_ids.items()}

    def bytes_of(self, token_id: int) -> bytes:
        return self._added.get(token_id) or self._tokenizer.bytes_of(token_id)

    def text(self, token_id: int) -> str:
        """Its text; bytes that are no character by themselves are U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def piece(self, token_id: int) -> str | list[int]:
        """Its text where it has one, else its bytes: as llama-server tells of pieces."""
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return list(spelled)

    def chat_logprob(self, token_id: int, logprob: float, top: list[tuple[int, float]]) -> dict:
        """An entry of a chat choice's logprobs."""
        return self._entry(token_id, logprob) | {"top_logprobs": [self._entry(*t) for t in top]}

    def _entry(self, token_id: int, logprob: float) -> dict:
        spelled = list(self.bytes_of(token_id))
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": spelled}

    def top(self, token_id: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, float]:
        """text -> logprob: the likeliest, and the chosen one; of equal texts the likeliest."""
        found: dict[str, float] = {}
        for one, value in [*top, (token_id, logprob)]:
            found.setdefault(self.text(one), finite(value))
        return found


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
