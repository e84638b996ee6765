"""A model's text -> text and tool calls, piece by piece.

Qwen3 writes a call as

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

What is not exactly such a call stays text, to the character. Whitespace at a call is layout: it is
left out before a call, and after the last one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"
STRING_PARTS = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object


class ToolCallSplitter:
    """Text in; out, as soon as they are certain, texts and calls. How it is cut does not matter."""

    def __init__(self) -> None:
        self._held = ""  # whitespace, and behind it what may become a call
        self._searched = 0  # no end of a call begins before this place in it
        self._called = False

    def push(self, piece: str, ended: bool = False) -> list[str | ToolCall]:
        """What is certain by now; no text is empty, and no two stand side by side."""
        self._held += piece
        found: list[str | ToolCall] = []
        while self._step(found, ended):
            self._searched = 0
        return joined(found)

    def flush(self) -> list[str | ToolCall]:
        """The rest of a text that has ended."""
        return self.push("", ended=True)

    def _step(self, found: list, ended: bool) -> bool:
        """Take from what is held all that is certain; whether to look again."""
        held = self._held
        text, opened, body = held.partition(OPEN)
        if not opened:
            certain = text if ended else text[: len(text) - begun(text)].rstrip()
            if ended and self._called and not text.strip():
                certain, self._held = "", ""
            self._give(found, certain)
            return False
        self._give(found, text.rstrip())
        call, size = self._call(body, ended)
        if size is None:
            return False
        if call is None:  # text that only begins like one
            self._give(found, self._held[: -len(body)] if body else self._held)
        else:
            self._held, self._called = body[size:], True
            found.append(call)
        return True

    def _call(self, body: str, ended: bool) -> tuple[ToolCall | None, int | None]:
        """The call that `body` begins with and its length; (None, 0): none; (None, None): wait."""
        inner = body.lstrip()
        if inner and not inner.startswith("{"):
            return None, 0
        at = body.find(CLOSE, self._searched)
        while at >= 0 and in_string(body[:at]):  # an argument that speaks of calls
            at = body.find(CLOSE, at + 1)
        if at >= 0:
            call = call_of(body[:at])
            return call, at + len(CLOSE) if call else 0
        self._searched = max(0, len(body) - len(CLOSE) + 1)
        return None, 0 if ended else None

    def _give(self, found: list, text: str) -> None:
        if text:
            found.append(text)
            self._held = self._held[len(text) :]


class WholeCall:
    """As ToolCallSplitter, for a text that is a call and nothing else, without tags."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> list[str | ToolCall]:
        self._held += piece
        return []

    def flush(self) -> list[str | ToolCall]:
        call = call_of(self._held)
        return [call] if call else [self._held] if self._held else []


def call_of(text: str) -> ToolCall | None:
    """The call that `text` spells, None where it is no object with a name and arguments."""
    try:
        call = json.loads(text, strict=False, parse_constant=refuse)  # a newline in a text is one
        name, arguments = call["name"], call.get("arguments", {})
        if isinstance(arguments, str):  # some models quote them once more
            arguments = json.loads(arguments, strict=False, parse_constant=refuse)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        spelled = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + spelled).encode()  # half a character, escaped, could not be sent
        return ToolCall(name, spelled)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def refuse(name: str):
    raise ValueError(f"{name} is not JSON")


def in_string(text: str) -> bool:
    """Whether JSON `text` ends inside of a string."""
    return sum(part == '"' for part in STRING_PARTS.findall(text)) % 2 == 1


def begun(text: str) -> int:
    """How many characters at the end of `text` are the beginning of a call's tag."""
    return next(n for n in reversed(range(len(OPEN))) if text.endswith(OPEN[:n]))


def joined(found: list[str | ToolCall]) -> list[str | ToolCall]:
    """`found` with texts that stand side by side made one."""
    out: list[str | ToolCall] = []
    for item in found:
        if isinstance(item, str) and out and isinstance(out[-1], str):
            out[-1] += item
        else:
            out.append(item)
    return out
