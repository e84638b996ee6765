"""A model's thoughts: told from its answer, and ended where they take too long."""

from __future__ import annotations

from collections.abc import Sequence

from engine.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


def split_thinking(text: str, opened: bool = False) -> tuple[str | None, str]:
    """A reply's (reasoning, answer): what stands in its first block, and what follows it.

    A block begins a reply with `<think>`, or has begun in the prompt (`opened`: that ends with
    `<think>`). Newlines around it are left out. One without an end is reasoning to the end of the
    reply; None: there is none, or nothing in it.
    """
    splitter = ThinkingSplitter(opened)
    pieces = splitter.push(text) + splitter.flush()
    reasoning = "".join(text for kind, text in pieces if kind == "reasoning")
    return reasoning or None, "".join(text for kind, text in pieces if kind == "answer")


class ThinkingSplitter:
    """`split_thinking` piece by piece. Only what may yet be a tag, or newlines at one, is held."""

    def __init__(self, opened: bool = False) -> None:
        self.opened = opened
        self._kind = ""  # of what comes next: not known at the beginning of a reply
        self._trims = False  # newlines, until there is other text
        self._held = ""

    def copy(self) -> ThinkingSplitter:
        """Another for the same prompt."""
        return ThinkingSplitter(self.opened)

    def push(self, piece: str, ended: bool = False) -> list[tuple[str, str]]:
        """What is certain by now: pieces ("reasoning" | "answer", text), none of them empty."""
        held, self._held = self._held + piece, ""
        if not self._kind:
            start = held.lstrip("\n")
            if not ended and OPEN.startswith(start):
                self._held = held
                return []
            self._trims = self.opened or start.startswith(OPEN)
            self._kind = "reasoning" if self._trims else "answer"
            held = start.removeprefix(OPEN) if self._trims else held
        held = held.lstrip("\n") if self._trims else held
        if self._kind == "answer":
            return self._given(held)
        text, close, after = held.partition(CLOSE)
        begun = next(n for n in reversed(range(len(CLOSE))) if text.endswith(CLOSE[:n]))
        certain = text if close or ended else text[: len(text) - begun]
        pieces = self._given(certain.rstrip("\n"))
        if not close:
            self._held = text[len(certain.rstrip("\n")) :]
            return pieces
        self._kind, self._trims = "answer", True
        return pieces + self._given(after.lstrip("\n"))

    def flush(self) -> list[tuple[str, str]]:
        """The rest of a reply that has ended."""
        return self.push("", ended=True)

    def _given(self, text: str) -> list[tuple[str, str]]:
        self._trims = self._trims and not text
        return [(self._kind, text)] if text else []


def tag_ids(tokenizer: Tokenizer, tag: str) -> list[int]:
    """A tag's ids: its own token's, else those that spell it."""
    own = tokenizer.added_ids.get(tag)
    return tokenizer.encode_plain(tag) if own is None else [own]


def opening_id(tokenizer: Tokenizer, prompt: Sequence[int]) -> int | None:
    """The id with which a reply may begin a block; None where both tags are not tokens of a text,
    and behind a prompt that has ended the block already."""
    opens = tokenizer.added_ids.get(OPEN)
    if any(not tokenizer.bytes_of(tokenizer.added_ids.get(tag, -1)) for tag in (OPEN, CLOSE)):
        return None
    return None if tokenizer.decode(prompt[-4:]).rstrip().endswith(CLOSE) else opens


def closing_ids(tokenizer: Tokenizer) -> list[int]:
    """What ends thoughts, as Qwen3 writes it. The tag's ids are those of `tag_ids`, also where the
    tokenizer would rather join its last characters to the newlines."""
    before, after = tokenizer.encode_plain("\n"), tokenizer.encode_plain("\n\n")
    return before + tag_ids(tokenizer, CLOSE) + after


class ThinkingBudget:
    """Counts the tokens of a reply's first block of thoughts."""

    def __init__(self, n: int, tokenizer: Tokenizer, opened: bool):
        """`n` tokens at most. `opened`: the block has begun in the prompt."""
        self._left, self._open = n, opened
        self._bytes_of = tokenizer.bytes_of
        self._closing = closing_ids(tokenizer)
        self._text = b""  # of the reply, as much as may be a tag or become one
        self._over = False

    def begin(self) -> list[int]:
        """The ids that a reply has to begin with."""
        return self._close() if self._open and self._left == 0 else []

    def take(self, token: int) -> list[int]:
        """A token has come: the ids that have to follow it, none as a rule."""
        if self._over:
            return []
        self._text += self._bytes_of(token)
        if self._open:
            self._left -= 1
        else:
            self._text = self._text.lstrip(b"\n")
            self._open = self._text.startswith(OPEN.encode())
            # a block that does not begin a reply is none
            self._over = not self._open and not OPEN.encode().startswith(self._text)
        if self._open:
            self._over = CLOSE.encode() in self._text
            self._text = self._text[1 - len(CLOSE) :]
        return self._close() if self._open and not self._over and self._left <= 0 else []

    def _close(self) -> list[int]:
        self._over = True
        return list(self._closing)
