"""Events -> what OpenAI's API answers: whole objects, and chunks of a stream.

A choice takes the events of one sample. What it gives for each is the `choices` of a chunk; what it
has kept at the end is the choice of a whole answer. So the two cannot differ.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from engine.serve.protocol import Call
from engine.serve.scheduler import Event
from engine.serve.service import Ticket
from engine.serve.tokens import Tokens
from engine.serve.tools import ToolCall


class ChatChoice:
    """One sample of a chat."""

    def __init__(self, index: int, call: Call, tokens: Tokens):
        self.index, self.finish_reason = index, None
        self._tokens, self._tools = tokens, call.tool_splitter()
        self._text = {"content": "", "reasoning_content": ""}
        self._calls: list[dict] = []
        self._logprobs: list[dict] | None = None if call.params.logprobs is None else []
        self._sent = 0  # logprobs that have gone out

    def first(self) -> list[dict]:
        """What a stream begins with."""
        return [self._part({"role": "assistant", "content": ""})]

    def take(self, event: Event) -> list[dict]:
        """The parts that an event adds, the last of them with the finish reason if it ends."""
        for token, logprob in zip(event.token_ids, event.logprobs, strict=False):
            self._logprobs.append(self._tokens.chat_logprob(token, *logprob))
        deltas = []
        for kind, text in event.pieces:
            if kind == "reasoning":
                deltas.append(self._said("reasoning_content", text))
            elif self._tools is None:
                deltas.append(self._said("content", text))
            else:
                deltas += self._split(self._tools.push(text))
        if event.finish_reason and self._tools is not None:
            deltas += self._split(self._tools.flush())
        parts = [self._part(delta) for delta in deltas]
        if event.finish_reason:
            called = self._calls and event.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else event.finish_reason
            parts.append(self._part({}))
        return parts

    def whole(self) -> dict:
        content, reasoning = self._text["content"], self._text["reasoning_content"]
        message = {"role": "assistant", "content": content or (None if self._calls else "")}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._wrapped(self._logprobs),
            "finish_reason": self.finish_reason,
        }

    def _said(self, name: str, text: str) -> dict:
        self._text[name] += text
        return {name: text}

    def _split(self, found: list[str | ToolCall]) -> list[dict]:
        deltas = []
        for item in found:
            deltas += (
                self._called(item) if isinstance(item, ToolCall) else [self._said("content", item)]
            )
        return deltas

    def _called(self, call: ToolCall) -> list[dict]:
        """A call as OpenAI streams it: its name, then its arguments."""
        at, made = len(self._calls), f"call_{secrets.token_hex(12)}"
        about = {"id": made, "type": "function"}
        self._calls.append(about | {"function": {"name": call.name, "arguments": call.arguments}})
        begin = {"index": at} | about | {"function": {"name": call.name, "arguments": ""}}
        rest = {"index": at, "function": {"arguments": call.arguments}}
        return [{"tool_calls": [begin]}, {"tool_calls": [rest]}]

    def _part(self, delta: dict) -> dict:
        """A choice of a chunk, with the logprobs that have not gone out yet."""
        logprobs = None
        if self._logprobs is not None and len(self._logprobs) > self._sent:
            logprobs, self._sent = self._logprobs[self._sent :], len(self._logprobs)
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": self._wrapped(logprobs),
            "finish_reason": self.finish_reason,
        }

    @staticmethod
    def _wrapped(logprobs: list[dict] | None) -> dict | None:
        return None if logprobs is None else {"content": logprobs, "refusal": None}


class TextChoice:
    """One sample of a completion."""

    def __init__(self, index: int, call: Call, tokens: Tokens):
        self.index, self.finish_reason = index, None
        self._tokens, self._text, self._offset = tokens, "", 0
        self._logprobs: list[tuple] | None = None if call.params.logprobs is None else []
        self._sent = 0

    def first(self) -> list[dict]:
        """A stream of text begins with text."""
        return []

    def take(self, event: Event) -> list[dict]:
        for token, logprob in zip(event.token_ids, event.logprobs, strict=False):
            spelled, top = self._tokens.text(token), self._tokens.top(token, *logprob)
            self._logprobs.append((spelled, top[spelled], top, self._offset))
            self._offset += len(spelled)
        text = "".join(text for _, text in event.pieces)
        self._text += text
        self.finish_reason = event.finish_reason
        if not text and not event.finish_reason:
            return []
        logprobs = None
        if self._logprobs is not None:
            logprobs, self._sent = self._logprobs[self._sent :], len(self._logprobs)
        return [self._choice(text, logprobs)]

    def whole(self) -> dict:
        return self._choice(self._text, self._logprobs)

    def _choice(self, text: str, logprobs: list[tuple] | None) -> dict:
        told = None
        if logprobs is not None:
            names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
            columns = zip(*logprobs, strict=True) if logprobs else [()] * len(names)
            told = {name: list(column) for name, column in zip(names, columns, strict=True)}
        return {
            "index": self.index,
            "text": text,
            "logprobs": told,
            "finish_reason": self.finish_reason,
        }


class Reply:
    """The answer to one call: choices, and what they are wrapped in."""

    def __init__(self, call: Call, is_chat: bool, model: str, tokens: Tokens):
        self._call, self._is_chat = call, is_chat
        kind, prefix = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        self._chunk_kind = "chat.completion.chunk" if is_chat else kind
        self._about = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        choice = ChatChoice if is_chat else TextChoice
        self.choices = [choice(i, call, tokens) for i in range(call.n_samples)]

    def chunks(self, parts: list[dict]) -> list[dict]:
        """A chunk for each part of a choice."""
        usage = {"usage": None} if self._call.include_usage else {}
        about = self._about | {"object": self._chunk_kind}
        return [about | {"choices": [part]} | usage for part in parts]

    def last_chunk(self, usage: dict) -> dict:
        """What a stream ends with where usage was asked for."""
        return self._about | {"object": self._chunk_kind, "choices": [], "usage": usage}

    def whole(self, usage: dict) -> dict:
        return self._about | {"choices": [c.whole() for c in self.choices], "usage": usage}


def usage_of(call: Call, tickets: Sequence[Ticket], n_tokens: int) -> dict:
    """What all samples of a call took; a prompt of several samples counts once."""
    firsts = tickets[:: call.params.n]
    n_prompt = sum(len(prompt) for prompt in call.prompts)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(ticket.completion.metrics.cached_tokens for ticket in firsts)
        },
    }
