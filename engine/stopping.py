"""Stop strings: text is cut before the first of them, and nothing of one is ever let through."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text in, text out, until a stop string is complete.

    The one that is complete first counts, and of several at the same character the longest. So what
    comes out does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self.found: str | None = None  # the one that was met
        self._stops = tuple(stops)
        self._held = ""  # the end of the text, which may become a stop string

    def push(self, piece: str) -> str:
        """The text that can be let go; once a stop string was found, nothing."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = ((text.find(stop), stop) for stop in self._stops)
        ends = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max((self._begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, when no more follows."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """How many characters at the end of `text` are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
